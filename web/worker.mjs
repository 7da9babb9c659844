// Runs ckptconv: one file is open at a time, and is read by position. It asks no host for anything; it is not allowed to.
import { loadPyodide } from "./pyodide.mjs";

const NESTING = 400; // the stack of a browser ends at some 700 levels
const given = new Map(); // what Pyodide asks for by name: the page has it already
const unbound = self.fetch;
let bridge, blobs;

const enforced = unbound.call(self, "data:,").then(() => false, () => true); // a data: URL leaves no machine

self.fetch = async (asked) => {
  const name = String(asked.url ?? asked).split("/").pop();
  if (!given.has(name)) throw new TypeError("not part of this page: " + name);
  return given.get(name);
};

// The bytes of a file, read here and now: what a browser lets workers alone do.
function slices(file) {
  const reader = new FileReaderSync();
  return {
    name: file.name,
    size: file.size,
    read(offset, length) {
      try {
        return new Uint8Array(reader.readAsArrayBuffer(file.slice(offset, offset + length)));
      } catch (error) { // the text says what Python would
        return error.name === "NotReadableError" ? "the file was changed, moved or deleted since it was chosen" : String(error);
      }
    },
  };
}

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
  bridge = { of: module.Bridge(), python, errorText: module.error_text };
  given.clear();
  return { enforced: await enforced };
}

const plain = (found) => found.toJs({ dict_converter: Object.fromEntries });

const calls = {
  start,
  inspect: ({ file }) => plain(bridge.of.inspect(slices(file))),
  diff: ({ files }) => plain(bridge.of.diff(slices(files[0]), slices(files[1]))),
  plan: ({ name, options }) => plain(bridge.of.plan(name, bridge.python.toPy(options))),
  make({ file }, progress) {
    let made = 0, told = 0;
    const tick = (nbytes) => {
      made += nbytes;
      if (made - told > 1 << 22) progress((told = made));
    };
    blobs = [];
    for (const part of bridge.of.parts(tick)) {
      const value = part.toJs ? part.toJs() : part;
      const [offset, length] = value;
      blobs.push(value instanceof Uint8Array ? value : file.slice(offset, offset + length));
      part.destroy?.();
    }
    return { blob: new Blob(blobs, { type: "application/octet-stream" }) };
  },
};

self.onmessage = async ({ data: { id, name, given } }) => {
  try {
    const result = await calls[name](given, (done) => self.postMessage({ id, progress: done }));
    self.postMessage({ id, result });
  } catch (error) {
    let text = String(error.message ?? error);
    if (bridge && error.name === "PythonError") text = bridge.python.runPython("import sys, bridge; bridge.error_text(sys.last_exc)");
    self.postMessage({ id, error: text, fatal: !bridge || error.name !== "PythonError" });
  }
};
