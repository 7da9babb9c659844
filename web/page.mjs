// The page: it passes files to the worker, shows the results of ckptconv, and saves the planned copies.
const ENGINE = {{engine}};
const DEADLINE = 60_000; // milliseconds without progress before the worker is terminated
const MOST = 10_000; // the most files in a folder that is dropped
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
  element.append(...below); // texts from files are never parsed as HTML
  return element;
}

// Replaces invisible characters, and those that change the direction of others, by escapes.
const shown = (text) => text.replace(/[^\P{C}\n]|[\p{Zl}\p{Zp}]/gu, (c) => "\\u{" + c.codePointAt(0).toString(16) + "}");

function say(text, done) {
  $("state").textContent = shown(text);
  $("progress").hidden = done === undefined;
  if (done === null) $("progress").removeAttribute("value");
  else if (done !== undefined) $("progress").value = done;
}

// Shows an error next to the field whose option or value it contains, otherwise after `place`.
function fail(error, place = $("drop")) {
  const text = shown(String(error.message ?? error));
  const named = [...text.matchAll(/--([a-z-]+)/g)].map(([, flag]) => form[FIELDS[flag] ?? flag.replaceAll("-", "_")]);
  const filled = (each) => each?.type === "checkbox" ? each.checked : each?.value;
  const quoted = (each) => filled(each) && each.type !== "checkbox" && each.value.split("\n").some((line) => line && text.includes("'" + line + "'"));
  const field = place === $("drop") ? null : named.find(filled) ?? [...form].find(quoted);
  (field ? field.closest("p, .grid") : place).after($("error"));
  field?.focus();
  $("error").hidden = false;
  $("error").textContent = text;
}
const FIELDS = { rename: "regex" }; // options whose field has another name

// The service worker, which serves the page's files and its policy.

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

// The worker. There is only one, and it is started again after a failure.

let engine = null, worker = null, starting = null, calls = new Map(), number = 0, nread = 0;

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
  worker = starting = null;
  for (const call of calls.values()) call.reject(new Error(why));
  calls.clear();
}

function post(name, given, progress) {
  return new Promise((resolve, reject) => {
    const id = ++number;
    let timer;
    const wait = () => {
      clearTimeout(timer);
      timer = setTimeout(() => stop("There was no progress for " + DEADLINE / 1000 + " s, so this was stopped. The command line has no such limit."), DEADLINE);
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
  worker.onmessage = ({ data: { id, result, error, fatal, progress, nread: read } }) => {
    const call = calls.get(id);
    if (!call) return;
    nread = read;
    if (progress !== undefined) call.progress(progress);
    else if (error === undefined) call.resolve(result);
    else {
      call.reject(new Error(error));
      if (fatal) stop(error);
    }
  };
}

function ready() {
  if (starting) return starting; // several events start the worker; the later ones wait for the first
  starting = (async () => {
    engine ??= await loaded();
    say("Starting Python", null);
    spawn();
    const { enforced } = await post("start", engine);
    const held = enforced && (await guarded);
    $("promise").className = enforced ? "" : "bad";
    $("promise").textContent = enforced
      ? "Nothing is uploaded: the browser forbids it. The part that reads your file may connect to nothing" + (held ? ", and this page only to its own files." : ".")
      : "Nothing is uploaded by this page, but this browser or this host does not enforce it: no policy reached the part that reads files.";
    say("Python is loaded.");
    return true;
  })();
  starting.catch(() => stop("Python could not be started."));
  return starting;
}

// One checkpoint, or two

let source = { path: "", dropped: [] }; // the path of the checkpoint, and the dropped files: {path, file, handle}
let turn = 0;

// Throws if a file has changed since it was chosen. Without a handle, it reads one byte: Chromium refuses to read a file
// that has changed.
async function unchanged() {
  for (const { path, file, handle } of source.dropped) {
    const same = handle
      ? handle.getFile().then((now) => now.size === file.size && now.lastModified === file.lastModified)
      : file.slice(Math.max(file.size - 1, 0)).arrayBuffer();
    if (!(await same.catch(() => false))) throw new Error("ckptconv: " + path + ": the file was changed, moved or deleted since it was chosen: choose it again");
  }
}

async function take(dropped) {
  const mine = ++turn;
  for (const id of ["error", "errors", "danger", "file", "compared", "planned"]) $(id).hidden = true;
  $("drop").after($("error"));
  $("prepare").after($("saving")); // these two are kept when the rest is replaced
  let seconds = 0, clock;
  try {
    await ready();
    const reading = "Reading " + (dropped.length > 2 ? counted(dropped.length) + " files" : dropped.map((each) => each.path).join(" and "));
    say(reading, null);
    const paths = await opened(dropped);
    if (mine !== turn) return;
    source = { path: paths[0], dropped };
    if (paths.length === 2) {
      clock = setInterval(() => mine === turn && say(reading + ": " + (seconds += 2) + " s", null), 2000); // the total is not known
      await compare(paths, mine);
    } else await look(mine, reading.slice(7));
    if (mine === turn) say("Ready: " + (paths.length === 2 ? "the two are compared. Next: choose other files, or see in a terminal how far values differ." : "the file was read, and nothing of it was run. Next: " + next() + "."));
  } catch (error) {
    if (mine !== turn) return;
    fail(error);
    say("Choose another file, or the same one again.");
  } finally {
    clearInterval(clock);
  }
}

// The actions for the file that is shown.
const next = () => ($("danger").hidden ? $("findings").children.length ? "mend it, or save a changed copy" : "save a changed copy, or look at what is inside" : "do not load it");

const opened = (dropped) => post("open", { dropped: dropped.map(({ path, file }) => [path, file]) });

async function compare([a, b], mine) {
  const found = await post("diff", { a, b });
  if (mine !== turn) return;
  warn(found.dangers, found.dangers.map((text) => text[0]).join(" or "));
  $("same").textContent = found.same ? "They are the same." : "They are not the same.";
  $("same").className = found.same ? "good" : "bad";
  $("difference").textContent = [found.note, found.text].filter((text) => text).join("\n\n");
  $("diff-command").textContent = found.command;
  $("compared").hidden = false;
}

function warn(dangers, what) {
  $("danger").hidden = !dangers.length;
  $("danger").replaceChildren(make("strong", {}, "Dangerous: do not load " + what), ...dangers.map((text) => make("p", {}, text)));
}

async function look(mine, files) {
  const found = await post("inspect", { path: source.path }, ([step, percent]) => mine === turn && say(step + files + ": " + percent + " %", percent / 100));
  if (mine !== turn) return;
  $("name").textContent = shown(source.path);
  $("stands").hidden = !source.path.startsWith("FOLDER");
  $("several").hidden = source.dropped.length === 1;
  warn(found.danger, "this file");
  refusal = found.danger.length ? "The file contains something dangerous. This page only saves a copy without it." : "";
  $("verdict").textContent = found.verdict;
  $("verdict").className = found.loads === false ? "bad" : found.loads && !found.findings.length ? "good" : "";
  $("host").hidden = found.loads !== undefined;
  const all = found.remedy && found.findings.length > 1, word = all ? "Mend only this" : "Mend this";
  const fixes = found.findings.map((each) => make("li", {}, each.text, each.fix ? " " : "", each.fix ? button(word, each.fix) : ""));
  if (all) fixes.unshift(make("li", { class: "all" }, button("Mend all", found.remedy)));
  $("findings").replaceChildren(...fixes);
  $("more").open = false;
  const first = $("findings").querySelector("button") ?? $("prepare");
  first.after($("saving"));
  clear(first);
  $("change").textContent = source.dropped.every((each) => each.handle)
    ? "Leave the file as it is until the copy is saved. This page notices if it changes."
    : "Leave the file as it is until the copy is saved. Chromium notices if it changes; other browsers may not.";
  $("file").hidden = false;
  $("file").dataset.nread = nread;
  $("inside").replaceWith(frame(found.page));
}

// Each file gets a new frame, because Chromium never lays out a page that is put into a hidden frame.
const frame = (srcdoc) => make("iframe", { id: "inside", sandbox: "allow-scripts", title: "What is inside the file", srcdoc });

$("full").hidden = !document.fullscreenEnabled;
$("full").addEventListener("click", () => $("inside").requestFullscreen());

const button = (text, fix) => make("button", { type: "button", title: fix.command, onclick: (event) => mend(fix, event.currentTarget) }, text);

// The form

const form = $("edits").elements;
const LINES = ["map", "strip_prefix", "add_prefix", "drop", "include", "exclude"];
const FLAGS = ["unwrap", "state_dict", "loadable", "loadable_objects", "compact", "copy_tied"];

function clear(first) {
  $("edits").reset();
  form.to.placeholder = "cpu";
  unplan(first);
  const [name] = source.path.split("/"), dot = name.lastIndexOf(".");
  form.dst.value = source.dropped.length > 1 ? name + "-new" : dot > 0 ? name.slice(0, dot) + "-new" + name.slice(dot) : name + "-new.pt";
}

let refusal = ""; // the reason why a dangerous file cannot be saved yet

function unplan(first = $("prepare")) { // hides Save until a copy is planned with the button `first`
  $("planned").hidden = $("save").disabled = true;
  $("save").hidden = false;
  $("save").textContent = "Save";
  $("saved").textContent = refusal || "First press " + first.textContent + ".";
  $("outputs").replaceChildren();
}

function mend(fix, pressed) {
  clear();
  form.dst.value = fix.dst;
  for (const [keyword, value] of Object.entries(fix.options)) {
    if (keyword === "map_location") {
      form.to.value = value.filter((each) => !each.includes("=")).join("");
      form.map.value = value.filter((each) => each.includes("=")).join("\n");
      form.to.placeholder = form.map.value ? "as below: " + form.map.value.replaceAll("\n", ", ") : "cpu";
    } else if (keyword === "rename") {
      [form.regex.value, form.replacement.value] = [0, 1].map((i) => value.map((pair) => pair[i]).join("\n"));
    } else if (value === true) form[keyword].checked = true;
    else form[keyword].value = value.join("\n");
  }
  $("more").open = $("more").querySelector(":checked, :is(input:not([type=checkbox]), textarea):not(:placeholder-shown)") !== null;
  prepare(pressed);
}

function options() {
  const said = {}, lines = (name) => form[name].value.split("\n").filter((line) => line);
  const devices = [...(form.to.value.trim() ? [form.to.value.trim()] : []), ...lines("map").map((line) => line.trim())];
  if (devices.length) said.map_location = devices;
  for (const name of LINES.slice(1)) if (lines(name).length) said[name] = lines(name);
  const become = form.replacement.value.split("\n");
  const pairs = form.regex.value.split("\n").map((regex, i) => [regex, become[i] ?? ""]).filter(([regex]) => regex);
  if (pairs.length) said.rename = pairs;
  if (form.select.value) said.select = form.select.value;
  for (const name of FLAGS) if (form[name].checked) said[name] = true;
  return said;
}

async function prepare(pressed = $("prepare")) { // Save appears next to the button that was pressed
  const mine = turn;
  $("error").hidden = true;
  pressed.after($("saving"));
  unplan(pressed);
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
    show(plan);
    say("Ready: the copy is planned, and nothing is written yet. Press Save.");
    $("saving").querySelector("button:not([hidden])").focus();
  } catch (error) {
    if (mine !== turn) return;
    fail(error, $("saving"));
    say("Ready. Nothing was prepared: change the form, or choose another file.");
  }
}

// A worker that was started again has no open file.
async function reopened() {
  if (worker) return;
  await ready();
  await opened(source.dropped);
  await post("inspect", { path: source.path });
}

let planned = null; // {folder, files: [{name, size, reads}]}
const sum = (numbers) => numbers.reduce((all, each) => all + each, 0);

function show(plan) {
  planned = plan;
  const reads = sum(plan.files.map((each) => each.reads)), total = size(sum(plan.files.map((each) => each.size)));
  $("reads").textContent = reads
    ? size(reads) + " of " + (source.dropped.length > 1 ? "the files" : "the file") + " will be read first, to compute or to compare checksums."
    : "The data of the tensors need not be read.";
  $("save").textContent = plan.folder ? "Save " + counted(plan.files.length) + " files, " + total + ", in a folder" : "Save " + shown(plan.files[0].name) + ", " + total;
  $("save").hidden = Boolean(plan.folder) && !globalThis.showDirectoryPicker;
  $("save").disabled = false;
  $("saved").textContent = "";
  $("outputs").replaceChildren(...(plan.folder ? plan.files.map((each, i) =>
    make("li", {}, make("button", { type: "button", onclick: () => save([i], oneFile) }, "Save " + size(each.size)), " " + shown(each.name))) : []));
  $("planned").hidden = false;
}

// Also shows the message next to the button, because the top of the page may not be visible.
function saving(text, done) {
  say(text, done);
  $("saved").textContent = text;
}

// Asks where to save the file number i. Returns null if the browser does not let pages write to the disk.
async function oneFile([i]) {
  return globalThis.showSaveFilePicker ? [await showSaveFilePicker({ suggestedName: planned.files[i].name.split("/").pop() })] : null;
}

async function oneFolder() {
  const folder = await (await showDirectoryPicker({ mode: "readwrite" })).getDirectoryHandle(planned.folder, { create: true });
  for await (const name of folder.keys()) throw new Error("ckptconv: " + planned.folder + ": there is such a folder already, with " + name + " in it: choose another place or name");
  return Promise.all(planned.files.map(async ({ name }) => {
    const above = name.split("/"), last = above.pop();
    let here = folder;
    for (const each of above) here = await here.getDirectoryHandle(each, { create: true });
    return here.getFileHandle(last, { create: true });
  }));
}

async function save(numbers, places) {
  const buttons = [...document.querySelectorAll("#saving button, #planned button")];
  for (const each of buttons) each.disabled = true;
  $("error").hidden = true;
  const outs = [];
  let next = "the copy is planned, and nothing is written. Press Save.";
  try {
    if (!worker) await prepare($("saving").previousElementSibling); // the plan was lost with the worker
    if ($("planned").hidden) {
      next = "nothing was prepared. Change the form, or choose another file.";
      return;
    }
    await unchanged();
    $("saved").textContent = "Your browser asks where to save it.";
    const handles = await places(numbers);
    for (const [at, i] of numbers.entries()) {
      const { name, reads } = planned.files[i];
      const { blob } = await post("make", { number: i }, (done) => saving("Reading the file: " + size(done), done / reads));
      if (handles) {
        outs.push(await handles[at].createWritable());
        await stream(blob, name, outs.at(-1));
      } else download(blob, name.split("/").pop());
    }
    if (outs.length) await unchanged();
    while (outs.length) await outs.shift().close(); // closing makes the files appear; an index is the last one
    next = "the copy is saved. Next: load it, or choose another file.";
    $("saved").textContent = handles
      ? "Saved, and the file did not change meanwhile."
      : "Your browser saves it now: " + counted(sum(numbers.map((i) => planned.files[i].size))) + " bytes.";
  } catch (error) {
    for (const each of outs) await each.abort().catch(() => {});
    $("saved").textContent = "";
    if (error.name !== "AbortError") { // the user has canceled
      fail(await unchanged().then(() => error, (why) => why), $("saving"));
      next = "nothing was saved. Save it somewhere else, or choose the file again.";
    }
  } finally {
    say("Ready: " + next);
    for (const each of buttons) each.disabled = $("planned").hidden;
  }
}

function download(blob, name) {
  const url = URL.createObjectURL(blob);
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 600_000); // the browser may first ask where to save
}

// Writes to a file on the disk. The file appears when it is closed.
async function stream(blob, name, out) {
  let done = 0;
  const counter = new TransformStream({
    transform(chunk, controller) {
      saving("Saving " + name + ": " + size((done += chunk.length)), done / blob.size);
      controller.enqueue(chunk);
    },
  });
  await blob.stream().pipeThrough(counter).pipeTo(out, { preventClose: true });
}

// Events

for (const touch of ["pointerover", "focusin"]) $("drop").addEventListener(touch, () => ready().catch(() => {}), { once: true });
$("choose").addEventListener("click", () => ready().catch(fail));
$("choose").addEventListener("change", () => {
  const chosen = [...$("choose").files].map((file) => ({ path: file.name, file }));
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
  const asked = items.map((item) => ({ // immediately, because the browser soon forgets what was dropped
    file: item.getAsFile(),
    entry: item.webkitGetAsEntry?.(),
    handle: item.getAsFileSystemHandle?.().catch(() => null),
  }));
  try {
    const dropped = [];
    for (const { file, entry, handle } of asked) {
      if (entry?.isDirectory) await enter(entry, dropped);
      else dropped.push({ path: freeName(file.name, dropped), file, handle: await handle });
    }
    if (dropped.length) take(dropped);
  } catch (error) {
    fail(error);
  }
});

// Gives different names to files that have the same name in two folders.
const freeName = (name, dropped) => (dropped.some((each) => each.path === name) ? freeName(name.replace(/(\.[^.]*)?$/, " (2)$1"), dropped) : name);

// Adds all files in a folder and below to `dropped`, except those in hidden folders.
async function enter(folder, dropped) {
  const reader = folder.createReader();
  for (;;) {
    const entries = await new Promise((done, failed) => reader.readEntries(done, failed));
    if (!entries.length) return;
    for (const each of entries) {
      if (dropped.length === MOST) throw new Error("This folder has more than " + counted(MOST) + " files. In a terminal: ckptconv inspect FOLDER");
      if (each.isFile) dropped.push({ path: each.fullPath.slice(1), file: await new Promise((done, failed) => each.file(done, failed)) });
      else if (!each.name.startsWith(".")) await enter(each, dropped);
    }
  }
}

$("edits").addEventListener("submit", (event) => { event.preventDefault(); prepare(); });
$("edits").addEventListener("input", () => unplan()); // the plan no longer matches the form
$("clear").addEventListener("click", () => clear());
$("save").addEventListener("click", () => save([...planned.files.keys()], planned.folder ? oneFolder : oneFile));
for (const each of document.querySelectorAll("[data-copies]")) {
  each.addEventListener("click", async () => {
    await navigator.clipboard.writeText($(each.dataset.copies).textContent);
    each.textContent = "Copied";
    setTimeout(() => { each.textContent = "Copy"; }, 2000);
  });
}
