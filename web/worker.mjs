// Runs ckptconv on the chosen files. Only the needed ranges are read. The policy of the page forbids all connections.
import { loadPyodide } from "./pyodide.mjs";

const NESTING = 400; // the stack of a browser overflows at about 700 levels
const given = new Map(); // files that Pyodide fetches by name; the page has sent them already
const unbound = self.fetch;
const FOLDER = "/files/FOLDER"; // the path of the chosen files in Python; browsers do not reveal the real one
let bridge;
let files = new Map(); // the chosen files, by their paths in FOLDER
let nread = 0, unreadable = ""; // in the current call: the bytes that were read, and a file that cannot be read

const enforced = unbound.call(self, "data:,").then(() => false, () => true); // a data: URL causes no network traffic

self.fetch = async (asked) => {
  const name = String(asked.url ?? asked).split("/").pop();
  if (!given.has(name)) throw new TypeError("not part of this page: " + name);
  return given.get(name);
};

const unzipped = (bytes) => new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));

async function start(engine) {
  given.set("pyodide.asm.wasm", new Response(unzipped(engine["pyodide.asm.wasm.gz"]), { headers: { "content-type": "application/wasm" } }));
  given.set("python_stdlib.zip", new Response(unzipped(engine["python_stdlib.zip.gz"])));
  const code = new Response(unzipped(engine["ckptconv.zip.gz"])).arrayBuffer();
  const here = new URL("./", self.location.href).href;
  const python = await loadPyodide({
    indexURL: here,
    packageBaseUrl: here,
    lockFileContents: `{{lock}}`,
    checkAPIVersion: false,
    env: { HOME: "/", PYTHONDONTWRITEBYTECODE: "1" },
  });
  python.FS.writeFile("/lib/ckptconv.zip", new Uint8Array(await code));
  python.runPython("import sys; sys.path.insert(0, '/lib/ckptconv.zip')");
  python.pyimport("ckptconv.limits").lower.callKwargs({ nesting: NESTING });
  const module = python.pyimport("bridge");
  bridge = { of: module.Bridge(FOLDER), python };
  python.FS.mkdirTree(FOLDER);
  watch(python.FS, python.ERRNO_CODES);
  given.clear();
  return { enforced: await enforced };
}

// Counts the bytes that are read, and records a file that cannot be read. Only workers may read synchronously.
function watch(FS, { EIO }) {
  const operations = FS.filesystems.WORKERFS.stream_ops, read = operations.read;
  operations.read = (stream, ...where) => {
    try {
      const done = read(stream, ...where);
      nread += done;
      return done;
    } catch (error) { // the file was changed or deleted
      unreadable = stream.node.name;
      throw new FS.ErrnoError(EIO);
    }
  };
}

// Mounts `dropped`, pairs of a path and a file, for Python. Returns the paths of the checkpoints.
function open({ dropped }) {
  const { FS } = bridge.python;
  bridge.of.forget();
  if (files.size) {
    FS.chdir("/");
    FS.unmount(FOLDER);
  }
  files = new Map(dropped);
  FS.mount(FS.filesystems.WORKERFS, { blobs: dropped.map(([name, data]) => ({ name, data })) }, FOLDER);
  return plain(bridge.of.checkpoints());
}

const plain = (found) => found.toJs({ dict_converter: Object.fromEntries });

const calls = {
  start,
  open,
  inspect: ({ path }, progress) => plain(bridge.of.inspect(path, (...done) => progress(done))),
  diff: ({ a, b }) => plain(bridge.of.diff(a, b)),
  plan: ({ name, options }) => plain(bridge.of.plan(name, bridge.python.toPy(options))),
  make({ number }, progress) {
    let made = 0, told = 0;
    const blobs = [], tick = (nbytes) => {
      made += nbytes;
      if (made - told > 1 << 22) progress((told = made));
    };
    for (const part of bridge.of.parts(number, tick)) {
      const value = part.toJs();
      const [path, offset, length] = value;
      blobs.push(value instanceof Uint8Array ? value : files.get(path).slice(offset, offset + length));
      part.destroy();
    }
    return { blob: new Blob(blobs, { type: "application/octet-stream" }) };
  },
};

self.onmessage = async ({ data: { id, name, given } }) => {
  [nread, unreadable] = [0, ""];
  try {
    const result = await calls[name](given, (done) => self.postMessage({ id, progress: done }));
    if (unreadable) throw new Error(gone());
    self.postMessage({ id, result, nread });
  } catch (error) {
    let text = bridge ? "ckptconv: this file needs a larger stack, or more memory, than a browser gives: use the command line" : String(error.message ?? error);
    if (bridge && error.name === "PythonError") text = bridge.python.runPython("import sys, bridge; bridge.error_text(sys.last_exc)");
    self.postMessage({ id, error: unreadable ? gone() : text, fatal: !bridge || (error.name !== "PythonError" && !unreadable) });
  }
};

const gone = () => "ckptconv: " + unreadable + ": the file was changed, moved or deleted since it was chosen: choose it again";
