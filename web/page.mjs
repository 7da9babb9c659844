// The page around the worker: takes files, shows what ckptconv says of them, and saves what it plans.
const ENGINE = {{engine}};
const DEADLINE = 60_000; // milliseconds without a sign of life, after which the worker is started anew
const $ = (id) => document.getElementById(id);
const counted = (n) => n.toLocaleString("en");

function size(n) {
  if (n < 1000) return n + " B";
  let unit = -1;
  for (; n >= 999.5 && unit < 3; unit++) n /= 1000;
  return Number(n.toPrecision(3)) + " " + "kMGT"[unit] + "B";
}

function make(tag, attributes, ...below) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value) element.setAttribute(name, value);
  }
  element.append(...below); // texts stay texts, whatever a file says
  return element;
}

function say(text, done) {
  $("state").textContent = text;
  $("progress").hidden = done === undefined;
  if (done === null) $("progress").removeAttribute("value");
  else if (done !== undefined) $("progress").value = done;
}

function fail(error) {
  $("error").hidden = false;
  $("error").textContent = String(error.message ?? error);
}

// The service worker, which has the files and says what the page may do.

const guarded = (async () => {
  if (!navigator.serviceWorker) return false;
  try {
    await navigator.serviceWorker.register("sw.js");
    if (navigator.serviceWorker.controller) return true;
    return await new Promise((resolve) => {
      navigator.serviceWorker.addEventListener("controllerchange", () => resolve(true), { once: true });
      setTimeout(() => resolve(false), 10_000);
    });
  } catch {
    return false;
  }
})();

// The worker: one at a time, started again when it fails.

let engine = null, worker = null, calls = new Map(), number = 0;

async function loaded() {
  await guarded;
  const sizes = {{sizes}};
  const all = ENGINE.reduce((sum, name) => sum + sizes[name], 0);
  let done = 0;
  const parts = await Promise.all(ENGINE.map(async (name) => {
    const answer = await fetch(name);
    if (!answer.ok) throw new Error("This page could not load " + name + ": " + answer.status);
    const chunks = [], reader = answer.body.getReader();
    for (let got = await reader.read(); !got.done; got = await reader.read()) {
      chunks.push(got.value);
      say("Loading Python: " + size((done += got.value.length)) + " of " + size(all), done / all);
    }
    return [name, await new Blob(chunks).arrayBuffer()];
  }));
  return Object.fromEntries(parts);
}

function stop(why) {
  worker?.terminate();
  worker = null;
  for (const call of calls.values()) call.reject(new Error(why));
  calls.clear();
}

function post(name, given, progress) {
  return new Promise((resolve, reject) => {
    const id = ++number;
    let timer;
    const wait = () => {
      clearTimeout(timer);
      timer = setTimeout(() => stop("This took longer than " + DEADLINE / 1000 + " s, and was ended. The command line has no such limit."), DEADLINE);
    };
    const ended = (run) => (value) => { clearTimeout(timer); calls.delete(id); run(value); };
    calls.set(id, { resolve: ended(resolve), reject: ended(reject), progress: (n) => { wait(); progress?.(n); } });
    wait();
    worker.postMessage({ id, name, given });
  });
}

function spawn() {
  worker = new Worker("worker.mjs", { type: "module" });
  worker.onerror = () => stop("The part of this page that reads files has failed. Choose the file again.");
  worker.onmessage = ({ data: { id, result, error, fatal, progress } }) => {
    const call = calls.get(id);
    if (!call) return;
    if (progress !== undefined) call.progress(progress);
    else if (error === undefined) call.resolve(result);
    else {
      call.reject(new Error(error));
      if (fatal) stop(error);
    }
  };
}

let starting = null;
function ready() {
  if (worker && starting) return starting;
  starting = (async () => {
    engine ??= await loaded();
    say("Starting Python", null);
    spawn();
    const { enforced } = await post("start", engine);
    const held = enforced && (await guarded);
    $("promise").className = enforced ? "" : "bad";
    $("promise").textContent = enforced
      ? "Nothing is uploaded: the browser forbids it. What reads your file may connect to nothing" + (held ? ", and this page to nothing but itself." : ".")
      : "Nothing is uploaded by this page, but this browser or this host does not enforce it: no policy reached the part that reads files.";
    say("Python is loaded.");
    return true;
  })();
  starting.catch(() => { starting = null; stop("Python could not be started."); });
  return starting;
}

// One file, or two

let source = null; // {file, handle}
let turn = 0;

// A file can be another than the one that was chosen, while it is read or saved.
async function unchanged() {
  const { file, handle } = source;
  if (handle) {
    const now = await handle.getFile();
    if (now.size !== file.size || now.lastModified !== file.lastModified) throw new Error("ckptconv: " + file.name + ": the file changed since it was chosen: choose it again");
  } else if (file.size) {
    await file.slice(file.size - 1).arrayBuffer().catch(() => { // where the browser looks itself
      throw new Error("ckptconv: " + file.name + ": the file was changed, moved or deleted since it was chosen: choose it again");
    });
  }
}

async function take(chosen) {
  const mine = ++turn;
  for (const id of ["error", "errors", "file", "compared", "planned"]) $(id).hidden = true;
  try {
    if (chosen.some((each) => each.folder)) throw new Error("A folder needs the command line: ckptconv inspect FOLDER, ckptconv convert FOLDER OUT");
    if (chosen.length === 2 && ofOneSet(...chosen.map((each) => each.file.name))) throw new Error("These are two shards of one checkpoint. Shards need the command line: ckptconv inspect FOLDER, ckptconv convert FOLDER OUT");
    if (chosen.length > 2) throw new Error("Here one file is shown, or two are compared. For more, and for shards: ckptconv inspect FOLDER, ckptconv convert FOLDER OUT");
    await ready();
    say("Reading " + chosen.map((each) => each.file.name).join(" and "), null);
    if (chosen.length === 2) await compare(chosen.map((each) => each.file), mine);
    else await look(chosen[0], mine);
    if (mine === turn) say("Ready.");
  } catch (error) {
    if (mine !== turn) return;
    fail(error);
    say("Choose another file, or the same one again.");
  }
}

// Shards are told apart by their number: model-00001-of-00002.bin.
function ofOneSet(a, b) {
  const set = (name) => name.replace(/-\d+(?=-of-\d+)/, "");
  return a !== b && set(a) !== a && set(a) === set(b);
}

async function compare(files, mine) {
  const found = await post("diff", { files });
  if (mine !== turn) return;
  $("same").textContent = found.same ? "They are the same." : "They are not the same.";
  $("same").className = found.same ? "good" : "bad";
  $("difference").textContent = [found.note, found.text].filter((text) => text).join("\n\n");
  $("diff-command").textContent = found.command;
  $("compared").hidden = false;
}

async function look(chosen, mine) {
  source = chosen;
  const found = await post("inspect", { file: chosen.file });
  if (mine !== turn) return;
  $("name").textContent = chosen.file.name;
  $("verdict").textContent = found.verdict;
  $("verdict").className = found.loads === false ? "bad" : found.loads && !found.findings.length ? "good" : "";
  $("host").hidden = found.loads !== undefined;
  const fixes = found.findings.map((each) => make("li", {}, each.text, each.fix ? " " : "", each.fix ? button("Mend this", each.fix) : ""));
  if (found.remedy && found.findings.length > 1) fixes.push(make("li", {}, "All of it at once: ", button("Mend all", found.remedy)));
  $("findings").replaceChildren(...fixes);
  clear();
  $("change").textContent = chosen.handle
    ? "Leave the file as it is until the copy is saved. This page notices if it changes."
    : "Leave the file as it is until the copy is saved. Chromium notices if it changes; other browsers may not.";
  $("file").hidden = false;
  $("file").dataset.nread = found.nread;
  const frame = $("inside").cloneNode(); // a new one, that has a size before its map is drawn by it
  frame.removeAttribute("srcdoc");
  $("inside").replaceWith(frame);
  setTimeout(() => { frame.srcdoc = found.page; }, 50);
}

const button = (text, fix) => make("button", { type: "button", title: fix.command, onclick: () => mend(fix) }, text);

// The form

const form = $("edits").elements;
const LINES = ["map", "strip_prefix", "add_prefix", "drop", "include", "exclude"];
const FLAGS = ["unwrap", "state_dict", "loadable", "loadable_objects", "compact", "copy_tied"];

function clear() {
  $("edits").reset();
  $("planned").hidden = true;
  const name = source.file.name, dot = name.lastIndexOf(".");
  form.dst.value = dot > 0 ? name.slice(0, dot) + "-new" + name.slice(dot) : name + "-new.pt";
}

function mend(fix) {
  clear();
  form.dst.value = fix.dst;
  for (const [keyword, value] of Object.entries(fix.options)) {
    if (keyword === "map_location") {
      form.to.value = value.filter((each) => !each.includes("=")).join("");
      form.map.value = value.filter((each) => each.includes("=")).join("\n");
    } else if (keyword === "rename") {
      [form.regex.value, form.replacement.value] = value[0];
    } else if (value === true) form[keyword].checked = true;
    else form[keyword].value = value.join("\n");
  }
  prepare();
}

function options() {
  const said = {}, lines = (name) => form[name].value.split("\n").filter((line) => line);
  const devices = [...(form.to.value.trim() ? [form.to.value.trim()] : []), ...lines("map").map((line) => line.trim())];
  if (devices.length) said.map_location = devices;
  for (const name of LINES.slice(1)) if (lines(name).length) said[name] = lines(name);
  if (form.regex.value) said.rename = [[form.regex.value, form.replacement.value]];
  if (form.select.value) said.select = form.select.value;
  for (const name of FLAGS) if (form[name].checked) said[name] = true;
  return said;
}

async function prepare() {
  const mine = turn;
  $("error").hidden = $("planned").hidden = true;
  $("saved").textContent = "";
  const suffix = form.suffix.value;
  if (suffix) form.dst.value = form.dst.value.replace(/\.(pt|pth|bin|ckpt|tar|th|pkl|p|pickle|safetensors)$/i, "") + suffix;
  form.suffix.value = "";
  try {
    await unchanged();
    await reopened();
    say("Planning " + form.dst.value, null);
    const plan = await post("plan", { name: form.dst.value, options: options() });
    if (mine !== turn) return;
    $("report").textContent = plan.report;
    $("command").textContent = plan.command;
    $("reads").textContent = plan.reads
      ? size(plan.reads) + " of the file will be read first, to compute or to compare checksums."
      : "The bytes of the tensors need not be read for it.";
    $("save").textContent = "Save " + size(plan.size);
    $("save").disabled = false;
    $("planned").hidden = false;
    planned = { name: form.dst.value, size: plan.size, reads: plan.reads };
    say("Ready.");
    $("save").focus();
  } catch (error) {
    if (mine !== turn) return;
    fail(error);
    say("Ready.");
  }
}

// A worker that was started again has no file open.
async function reopened() {
  if (worker) return;
  await ready();
  await post("inspect", { file: source.file });
}

let planned = null;

// Said beside the button too: the top of the page may be out of sight.
function saving(text, done) {
  say(text, done);
  $("saved").textContent = text;
}

async function save() {
  $("save").disabled = true;
  $("error").hidden = true;
  try {
    if (!worker) await prepare(); // it was ended, and with it the plan
    if ($("planned").hidden) return;
    const name = planned.name;
    await unchanged();
    $("saved").textContent = "Your browser asks where to save it.";
    const handle = globalThis.showSaveFilePicker ? await showSaveFilePicker({ suggestedName: name }) : null;
    const { blob } = await post("make", { file: source.file }, (done) => saving("Reading the file: " + size(done), done / planned.reads));
    if (handle) await stream(blob, handle);
    else download(blob, name);
    $("saved").textContent = handle ? "Saved, and the file did not change meanwhile." : "Your browser saves it now: " + counted(blob.size) + " bytes.";
  } catch (error) {
    $("saved").textContent = "";
    if (error.name !== "AbortError") fail(error);
  }
  say("Ready.");
  $("save").disabled = false;
}

function download(blob, name) {
  const url = URL.createObjectURL(blob);
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 600_000); // a browser may ask where to before it reads
}

// To a file of the disk, which appears when all of it is written.
async function stream(blob, handle) {
  const out = await handle.createWritable();
  let done = 0;
  const counter = new TransformStream({
    transform(chunk, controller) {
      saving("Saving: " + size((done += chunk.length)), done / blob.size);
      controller.enqueue(chunk);
    },
  });
  try {
    await blob.stream().pipeThrough(counter).pipeTo(out, { preventClose: true });
    await unchanged();
  } catch (error) {
    await out.abort().catch(() => {});
    throw error;
  }
  await out.close();
}

// What is done by hand

$("choose").addEventListener("click", () => ready().catch(fail));
$("choose").addEventListener("change", () => {
  const chosen = [...$("choose").files].map((file) => ({ file }));
  $("choose").value = "";
  if (chosen.length) take(chosen);
});
addEventListener("dragover", (event) => {
  event.preventDefault();
  $("drop").classList.add("over");
  ready().catch(() => {});
});
addEventListener("dragleave", (event) => event.relatedTarget || $("drop").classList.remove("over"));
addEventListener("drop", async (event) => {
  event.preventDefault();
  $("drop").classList.remove("over");
  const items = [...event.dataTransfer.items].filter((item) => item.kind === "file");
  const chosen = items.map((item) => ({
    file: item.getAsFile(),
    folder: item.webkitGetAsEntry?.()?.isDirectory,
    asked: item.getAsFileSystemHandle?.().catch(() => null),
  }));
  for (const each of chosen) each.handle = await each.asked; // asked for at once: what was dropped is soon forgotten
  if (chosen.length) take(chosen);
});
$("edits").addEventListener("submit", (event) => { event.preventDefault(); prepare(); });
$("clear").addEventListener("click", clear);
$("save").addEventListener("click", save);
for (const each of document.querySelectorAll("[data-copies]")) {
  each.addEventListener("click", async () => {
    await navigator.clipboard.writeText($(each.dataset.copies).textContent);
    each.textContent = "Copied";
    setTimeout(() => { each.textContent = "Copy"; }, 2000);
  });
}
