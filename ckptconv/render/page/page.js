"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const columns = data.tensors;
  const $ = (id) => document.getElementById(id);
  const collator = new Intl.Collator("en", { numeric: true });
  const MEASURES = { bytes: "bytes", parameters: "parameters", count: "tensors" };
  const ROW = 28; // pixels of a row of the table
  const ROWS_OPEN = 18; // rows of the tree that are open at first
  const AT_ONCE = 100; // children of a branch that the tree shows at first
  const AT_MOST = 12; // words of a fact that the filter offers
  const LEAST_AREA = 90; // square pixels; the content of smaller cells is not drawn
  const FEW = 500, AREAS = 60; // the most tensors that are all drawn, and the number of cells if there are more
  const MATCHES = 20; // the tree is opened for a search with at most this many results
  const UNLIKE = "× usual", FAR = 3; // a column, and the least value that is listed above the table
  const ALIKE = 3; // the least number of similar neighbors that are folded
  const HIDDEN = /[\p{C}\p{Zl}\p{Zp}]/gu; // invisible characters, and those that change the direction of others

  // Texts: all texts from the file are set as textContent, with escapes for invisible characters.

  const shown = (text) => String(text).replace(HIDDEN, (c) => "\\u{" + c.codePointAt(0).toString(16) + "}");
  const short = (text, most) => // does not split surrogate pairs
    text.length <= most ? text : text.slice(0, most * 0.6).replace(/\p{Cs}$/u, "") + "…" + text.slice(-most * 0.4).replace(/^\p{Cs}/u, "");

  function make(tag, attributes, ...below) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name === "on") for (const [event, run] of Object.entries(value)) element.addEventListener(event, run);
      else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
    }
    element.append(...below.filter((each) => each !== null && each !== undefined));
    return element;
  }

  const named = (text, most = 120) => // a long name can break after dots and slashes
    make("span", { class: "name" }, ...short(shown(text), most).split(/(?<=[./])/).flatMap((piece, n) => (n ? [make("wbr"), piece] : [piece])));

  function size(n) {
    if (n < 1000) return n + " B";
    let unit = -1;
    for (; n >= 999.5 && unit < 3; unit++) n /= 1000;
    return Number(n.toPrecision(3)) + " " + "kMGT"[unit] + "B";
  }

  const counted = new Intl.NumberFormat("en").format;
  const arrow = (texts) => (texts.every((text) => text === texts[0]) ? texts[0] : texts.join(" → "));
  const measured = (n) => (measure === "bytes" ? size(n) : counted(n));
  const percent = (part, whole) => (part && part / whole < 0.0005 ? "< 0.1 %" : whole ? ((100 * part) / whole).toFixed(part / whole < 0.1 ? 1 : 0) + " %" : "");
  const number = (n) => (n === null ? "–" : typeof n !== "number" ? String(n) : Number.isInteger(n) ? counted(n)
    : Math.abs(n) < 1e-3 ? n.toExponential(2) : String(Number(n.toPrecision(4))));
  const worth = (n) => (Array.isArray(n) ? worth(n[n.length - 1]) : n === null ? null : n === "inf" ? Infinity : n === "-inf" ? -Infinity : Number(n));

  // The tensors, and the tree of their paths.

  const PIECE = /(?:\[(?:'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[^\]'"])*\](?:\\[0-9]+)?\/?)|\.*(?:\\.|[^\\/[.])*(?:[./]|(?=\[)|$)|./gs;
  const DEEPEST = 64;

  function pieces(path) {
    const found = (path.match(PIECE) || []).filter((piece) => piece);
    return found.length <= DEEPEST ? found : [...found.slice(0, DEEPEST - 1), found.slice(DEEPEST - 1).join("")];
  }

  const total = columns.paths.length / 2;
  const unpacked = (list) => (list && list.length === 1 ? Array(total).fill(list[0]) : list); // one item stands for all tensors if they are equal
  for (const each of [...columns.sides, ...columns.facts]) for (const key of ["at", "numbers"]) each[key] = unpacked(each[key]);
  columns.tied = unpacked(columns.tied);
  if (columns.storage === "each") columns.storage = [...columns.tied.keys()];
  const facts = columns.facts, colours = facts.filter((fact) => fact.colour);
  const bads = facts.filter((fact) => fact.bad);
  const said = (fact, i) => (fact.words ? fact.words[fact.at[i]] ?? null : fact.numbers[i]);
  const nonzero = (n) => (Array.isArray(n) ? n.some(nonzero) : !!n);

  function written(fact, i) { // a fact of one tensor as text
    const found = said(fact, i);
    if (fact.words) return found === null ? "" : shown(found);
    if (found === null) return "";
    const text = arrow([].concat(found).map(number));
    return fact.form === "percent" ? text + " %" : text;
  }

  const tensors = [];
  for (let i = 0, before = ""; i < total; i++) {
    before = before.slice(0, columns.paths[2 * i]) + columns.paths[2 * i + 1];
    const extents = columns.sides.map((side) => side.words[side.at[i]] || null); // in each file: bytes, elements, and whether they are counted (not for ties)
    tensors.push({
      i, path: before, extents, tied: columns.tied[i], bad: bads.some((fact) => nonzero(fact.numbers[i])),
      nbytes: Math.max(...extents.map((each) => (each ? each[0] : 0))),
      numel: Math.max(...extents.map((each) => (each ? each[1] : 0))), low: before.toLowerCase(),
    });
  }
  const numbersOf = (name) => (columns.sides.length === 1 && facts.find((fact) => fact.name === name) || { numbers: null }).numbers;
  if (numbersOf("max")) { // computed columns: the largest magnitude, and the factor to the usual value
    const low = numbersOf("min").map(worth), top = numbersOf("max").map((n, i) => (n === null ? null : Math.max(Math.abs(worth(n)), Math.abs(low[i]))));
    const unlike = unlikeness([top, numbersOf("std").map(worth)]);
    const insert = (before, name, numbers) => facts.splice(facts.findIndex((fact) => fact.name === before), 0, { name, numbers, table: true });
    insert("mean", "max |x|", top);
    if (unlike.some((n) => n)) insert("zeros", UNLIKE, unlike);
    const far = unlike.map((n, i) => [n, i]).filter(([n]) => n >= FAR).sort((a, b) => b[0] - a[0]);
    if (far.length) data.lists.push({ label: "outliers", groups: far.slice(0, 6).map(([, i]) => [i]), says: far.map(([n]) => n.toPrecision(2) + " × the median of other layers"), of: far.length });
  }

  function unlikeness(measures) { // the largest factor between one of `measures` and its median in other layers, for each tensor
    const kinds = new Map(), part = facts.find((fact) => fact.name === "part"), shape = facts.find((fact) => fact.name === "shape");
    for (const each of tensors) {
      const key = each.path.replace(/\d+/g, "#") + said(shape, each.i);
      if (each.tied < 0 && (!part || said(part, each.i) !== "optimizer")) (kinds.get(key) || kinds.set(key, []).get(key)).push(each.i);
    }
    const off = tensors.map(() => null);
    for (const kind of kinds.values()) for (const values of kind.length < 4 ? [] : measures) {
      const all = kind.map((i) => values[i]).filter((n) => n > 0 && n < Infinity).sort((a, b) => a - b), median = all[all.length >> 1];
      for (const i of kind) if (values[i] > 0 && values[i] < Infinity) off[i] = Math.max(off[i], values[i] / median, median / values[i]);
    }
    return off;
  }
  const own = (each, n) => Math.max(...each.extents.map((extent) => (extent && extent[2] ? extent[n] : 0))); // 0 if all are tied
  const sizes = (extents) => arrow(extents.map((each) => (each ? size(each[0]) : "–")));
  const tiedTo = new Map();
  const onStorage = new Map();
  for (const each of tensors) {
    const home = each.tied < 0 ? each.i : each.tied;
    if (each.tied >= 0) (tiedTo.get(home) || tiedTo.set(home, [home]).get(home)).push(each.i);
    const storage = columns.storage ? columns.storage[each.i] : null;
    if (storage !== null) (onStorage.get(storage) || onStorage.set(storage, []).get(storage)).push(each.i);
  }
  const mates = (each) => (tiedTo.get(each.tied < 0 ? each.i : each.tied) || []).filter((i) => i !== each.i);

  function branch(name, path, above) {
    const sides = columns.sides.map(() => ({ bytes: 0, parameters: 0, count: 0 })); // in each file
    return { name, path, above, below: [], tensor: null, sides, bytes: 0, parameters: 0, count: 0, bad: 0, kinds: null };
  }
  const root = branch("", "", null);
  const nodeOf = [];
  for (const each of tensors) {
    let at = root;
    for (const piece of pieces(each.path)) {
      at.named ??= new Map();
      let next = at.named.get(piece);
      if (!next) {
        next = branch(piece, at.path + piece, at);
        at.named.set(piece, next);
        at.below.push(next);
      }
      at = next;
    }
    at.tensor = each;
    nodeOf[each.i] = at;
    const bytes = own(each, 0), parameters = own(each, 1);
    for (let node = at; node; node = node.above) {
      node.bytes += bytes; node.parameters += parameters;
      each.extents.forEach((extent, k) => {
        if (!extent) return;
        if (extent[2]) { node.sides[k].bytes += extent[0]; node.sides[k].parameters += extent[1]; }
        node.sides[k].count++;
      });
      node.count++;
      if (each.bad) node.bad++;
    }
  }
  const FORMS = new Map(); // branches with the same content have the same number
  const told = facts.filter((fact) => fact.words);
  function form(node) {
    if (node.form === undefined) {
      let key = node.tensor ? node.tensor.tied + "," + node.tensor.bad + node.bytes : "";
      if (node.tensor) for (const fact of told) key += "," + fact.at[node.tensor.i];
      else for (const each of node.below) key += each.name + form(each) + ",";
      node.form = FORMS.get(key) ?? FORMS.size;
      FORMS.set(key, node.form);
    }
    return node.form;
  }

  const INDEX = /^\[?\d+\]?[./]?$/;
  const indexed = (nodes) => nodes.length > 2 && nodes.every((each) => INDEX.test(each.name));
  const digits = (node) => node.name.replace(/\D/g, "");

  function together(above, members, name) { // one branch for several neighbors
    const node = { ...branch(name, above.path, above), members, below: members };
    for (const each of members) {
      for (const key of ["bytes", "parameters", "count", "bad"]) node[key] += each[key];
      node.sides.forEach((side, k) => { for (const key in side) side[key] += each.sides[k][key]; });
    }
    return node;
  }

  function kids(node) { // the children of `node`; ALIKE or more similar neighbors are folded into one
    if (node.kids || node.members || !indexed(node.below)) return node.kids || node.below;
    const runs = [];
    for (const each of node.below) {
      if (runs.length && form(runs[runs.length - 1][0]) === form(each)) runs[runs.length - 1].push(each);
      else runs.push([each]);
    }
    node.kids = runs.flatMap((run) => (run.length < ALIKE ? run
      : [together(node, run, "{" + digits(run[0]) + "…" + digits(run[run.length - 1]) + "} ×" + run.length)]));
    return node.kids;
  }
  function visit(node, run) { // calls `run` with each tensor in it
    if (node.tensor) run(node.tensor);
    node.below.forEach((below) => visit(below, run));
  }

  function holdersOf(node) { // a test of whether a branch contains `node`
    const line = new Set();
    for (; node; node = node.above) line.add(node);
    return (each) => line.has(each) || (each.members || []).some((member) => line.has(member));
  }

  function sole(node) { // the first descendant of `node` with several children, or its tensor
    while (!node.tensor && node.below.length === 1) node = node.below[0];
    return node;
  }
  const label = (node, from) => (node === root ? "everything" : node.members ? node.name : node.path.slice(from ? from.path.length : 0));

  // What is shown.

  let measure = "bytes", colour, focus = sole(root), within = null, chosen = null, query = "", kept = 0;
  let order = { key: "bytes", up: false };
  const expanded = new Set([root]);
  const opened = new Set(); // branches that a search has opened
  const more = new Map();
  for (const fact of colours) { // words without an order are sorted by bytes
    const sums = new Map();
    if (!fact.ordered) fact.words.forEach((word) => sums.set(word, 0));
    for (const each of tensors) {
      const word = said(fact, each.i);
      if (word !== null) sums.set(word, (sums.get(word) || 0) + own(each, 0));
    }
    fact.hues = fact.ordered ? fact.words.filter((word) => sums.has(word)) : [...sums].sort((a, b) => b[1] - a[1]).map(([word]) => word);
  }
  // The color scales: their words (the worst or most frequent first), the word of a tensor, and the color of a word.
  const KINDS = { "only in A": "--only-a", "only in B": "--only-b", shape: "--shape", values: "--values", dtype: "--dtype", device: "--device" };
  const scales = colours.map((fact) => {
    if (fact.name === "differs") {
      const kind = (i) => { const all = (said(fact, i) || "").split(", "); return Object.keys(KINDS).find((each) => all.includes(each)) || "other"; };
      const there = new Set(tensors.map((each) => kind(each.i)));
      return { name: fact.name, words: [...Object.keys(KINDS), "other"].filter((each) => there.has(each)), word: kind, fill: (word) => KINDS[word] || "--other" };
    }
    const apart = fact.hues.filter((word) => !/^(NaN|not known)/.test(word)); // the worst word has the strongest color
    const fill = (word) => (!fact.ordered ? "--c" + Math.min(fact.hues.indexOf(word), 7)
      : word.startsWith("NaN") ? "--broken" : word === "not known" ? "--other" : "--s" + Math.round(6 - (6 * apart.indexOf(word)) / Math.max(apart.length - 1, 1)));
    return { name: fact.name, words: fact.hues, word: (i) => said(fact, i), fill, worst: fact.ordered };
  });
  for (const [name, text] of [["std"], ["norm"], ["zeros", "share of zeros"], [UNLIKE]]) { // statistics have a sequential scale
    const fact = facts.find((each) => each.name === name);
    if (fact && columns.sides.length === 1) scales.push(stepped(text || name, (i) => {
      const n = worth(said(fact, i));
      return n === null || !Number.isFinite(n) ? null : text ? (100 * n) / Math.max(tensors[i].numel, 1) : n;
    }, text ? " %" : ""));
  }

  function stepped(name, value, unit) { // a scale with seven steps; logarithmic if the values are far apart
    const all = tensors.map((each) => value(each.i)).filter((n) => n !== null);
    const positive = all.filter((n) => n > 0), least = positive.reduce((a, b) => Math.min(a, b), Infinity), most = all.reduce((a, b) => Math.max(a, b), 0);
    const far = !unit && positive.length && most / least > 30, from = far ? least : unit ? 0 : least;
    const edge = (k) => (far ? from * (most / from) ** (k / 7) : from + ((most - from) * k) / 7);
    const step = (n) => { let k = 0; while (k < 6 && n >= edge(k + 1)) k++; return k; };
    const text = (k) => number(Number(edge(k).toPrecision(2))) + " to " + number(Number(edge(k + 1).toPrecision(2))) + unit;
    const words = [6, 5, 4, 3, 2, 1, 0].map(text);
    const word = (i) => { const n = value(i); return n === null ? null : words[6 - step(n)]; };
    return { name, words: all.length && most > from ? words : [], word, fill: (each) => "--s" + (6 - words.indexOf(each)), worst: true };
  }

  colour = ["differs", "largest difference", "part", "dtype", "device", UNLIKE].map((name) => scales.find((scale) => scale.name === name && scale.words.length > 1))
    .find((scale) => scale) || scales[0];
  const hue = (word) => (word === null ? "var(--panel)" : "var(" + colour.fill(word) + ")");
  const spread = (node, format) => arrow(node.sides.map((side) => format(side[measure])));

  function main(node) { // the word with the most bytes below `node`, or the worst if words have an order
    if (node.tensor) return colour.word(node.tensor.i);
    if (node.kinds && node.kinds[0] === colour) return node.kinds[1];
    const sums = new Map();
    visit(node, (each) => {
      const word = colour.word(each.i);
      if (word !== null) sums.set(word, (sums.get(word) || 0) + nodeOf[each.i].bytes + 1);
    });
    if (!sums.size) return null;
    const best = colour.worst ? colour.words.find((word) => sums.has(word)) : [...sums].reduce((a, b) => (b[1] > a[1] ? b : a))[0];
    node.kinds = [colour, best];
    return best;
  }

  // The head

  function command(text) {
    const code = make("code", { dir: "ltr", tabindex: "0" }, text);
    const button = make("button", { type: "button", on: { click: copy } }, "Copy");
    function copy() {
      const range = document.createRange();
      range.selectNodeContents(code);
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      button.textContent = document.execCommand("copy") ? "Copied" : "Selected"; // also works in frames of notebooks
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    }
    return make("div", { class: "command" }, code, button);
  }

  function head() {
    $("path").textContent = short(shown(data.title), 400);
    const verdict = data.verdict;
    $("danger").hidden = !verdict.danger.length;
    $("danger").append(make("strong", {}, "Dangerous: do not load " + (columns.sides.length > 1 ? verdict.danger.map((text) => text[0]).join(" or ") : "this file")),
      ...verdict.danger.map((text) => make("p", {}, make("bdi", {}, shown(text)))));
    $("verdict").textContent = verdict.text;
    if (verdict.good !== null) $("verdict").className = verdict.good ? "good" : "bad";
    if (verdict.remedy && verdict.findings.length !== 1) {
      $("findings").append(verdict.findings.length ? "This fixes everything:" : "This compares what is alike:", command(verdict.remedy));
    }
    if (verdict.findings.length) {
      $("findings").append(make("ul", {}, ...verdict.findings.map((each) =>
        make("li", {}, make("bdi", {}, shown(each.text)), each.command ? command(each.command) : null))));
    }
    for (const [name, text] of data.facts) {
      $("facts").append(make("dt", {}, name), make("dd", {}, make("bdi", {}, shown(text))));
    }
    for (const each of data.tables || []) {
      const cells = (tag, texts) => texts.map((text) => make(tag, tag === "th" ? { scope: "col" } : {}, make("bdi", {}, short(shown(text), 60))));
      $("facts").append(make("dt", {}, shown(each.label)), make("dd", {}, make("div", { class: "wide", tabindex: "0", role: "group", "aria-label": each.label }, make("table", {},
        make("thead", {}, make("tr", {}, ...cells("th", each.heads))), make("tbody", {}, ...each.rows.map((texts) => make("tr", {}, ...cells("td", texts))))))));
    }
    for (const each of data.lists) {
      const list = make("dd", { class: each.bad ? "bad" : null });
      each.groups.forEach((group, n) => {
        if (n) list.append("; ");
        group.slice(0, 6).forEach((i, m) => list.append(m ? " = " : "", link(tensors[i])));
        if (group.length > 6) list.append(" = … " + counted(group.length - 6) + " more");
        if (each.says[n]) list.append(" (" + each.says[n] + ")");
      });
      if (each.of > each.groups.length) list.append("; … " + counted(each.of - each.groups.length) + " more");
      $("facts").append(make("dt", {}, each.label), list);
    }
    smaller();
  }

  function smaller() {
    const offers = data.smaller || [];
    if (!offers.length) return;
    $("facts").append(make("dt", {}, "make it smaller"), make("dd", {}, ...offers.flatMap((each) =>
      [make("bdi", {}, shown(each.text)), command(each.command)])));
  }

  const link = (each) =>
    make("button", { type: "button", class: "link", on: { click: () => choose(nodeOf[each.i], true) } }, named(each.path));

  // The controls

  function controls() {
    for (const [key, word] of Object.entries(MEASURES)) {
      const radio = make("input", { type: "radio", name: "measure", value: key, on: { change: () => { measure = key; draw(); } } });
      radio.checked = key === measure;
      $("measure").append(make("label", {}, radio, " " + word));
    }
    scales.forEach((scale) => $("colour").append(make("option", { value: scale.name }, scale.name)));
    $("colour").value = colour ? colour.name : "";
    $("colour").addEventListener("change", () => { colour = scales.find((scale) => scale.name === $("colour").value); draw(); });
    FILTERS.forEach(([text], n) => $("filter").append(make("option", { value: n }, short(shown(text), 60))));
    $("filter-label").hidden = FILTERS.length < 2;
    $("filter").addEventListener("change", () => { kept = Number($("filter").value); search(); });
    $("close").addEventListener("click", () => { choose(null, false, true); });
    const terms = [...Object.keys(DEFINED).filter((name) => facts.some((fact) => fact.name === name)).map((name) => name + ": " + DEFINED[name]),
      ...(facts.some((fact) => fact.name === "mean") ? ["min, max, mean, std and norm are of the elements that are finite."] : [])];
    $("finite").textContent = terms.join(" ");
    $("search").addEventListener("keydown", (event) => { if (event.key === "Enter") $("scroll").focus(); });
    $("search").addEventListener("input", () => { query = $("search").value.toLowerCase(); search(); });
  }

  const DEFINED = { // explanations of the columns
    [UNLIKE]: "by what factor max |x| or std is off the median of the tensors with this name in other layers.",
    "max |A − B| / max |B|": "the largest difference, divided by the largest element of B in size.",
    "max |A − B| / |B|": "the largest of all differences divided by the element of B itself, which is huge if that element is nearly 0.",
  };
  const FILTERS = [["all tensors", () => true]];
  if (bads.length) FILTERS.push(["NaN or inf", (each) => each.bad]);
  const differs = colours.find((fact) => fact.name === "differs");
  if (differs && differs.hues.length > 1 && differs.hues.includes("device")) FILTERS.push(["ignore devices", (each) => said(differs, each.i) !== "device"]);
  if (tiedTo.size) FILTERS.push(["tied", (each) => mates(each).length > 0]);
  for (const fact of colours) {
    if (fact.hues.length < 2) continue;
    for (const word of fact.hues.slice(0, AT_MOST)) FILTERS.push([fact.name + ": " + word, (each) => said(fact, each.i) === word]);
  }

  function legend() {
    const words = colour && colour.words.length > 1 ? colour.words : [];
    const most = words[8] && !colour.worst ? 8 : words.length;
    $("legend").replaceChildren(...words.slice(0, most).map((word, i) => {
      const box = make("i", {});
      box.style.background = hue(word);
      const text = i === 7 && words.length > most ? counted(words.length - 7) + " others" : short(shown(word), 40);
      return make("li", {}, box, make("bdi", {}, text));
    }));
  }

  function crumbs() {
    const way = [];
    for (let node = focus; node; node = node.above) if (node === focus || node === root || node.below.length > 1) way.unshift(node);
    const parts = [];
    way.forEach((node, n) => {
      const text = short(shown(label(node, n ? way[n - 1] : null)), 60);
      if (n) parts.push(" › ");
      parts.push(node === focus ? make("b", {}, text)
        : make("button", { type: "button", class: "link", on: { click: () => look(node) } }, text));
    });
    $("crumbs").replaceChildren(...parts, ": " + spread(focus, measured) + (focus === root ? "" : ", " + percent(focus[measure], root[measure])));
  }

  // The map: cells have a node, a value and a rectangle. Some contain cells.

  function parts(node, area, of, room) { // the cells inside the cell of `node`; small neighbors share a cell
    const whole = node.below.reduce((sum, each) => sum + of(each), 0) || 1;
    const least = Math.max(LEAST_AREA, area / room), cells = [];
    let few = [], value = 0;
    const put = () => {
      if (few.length) cells.push({ node: few.length === 1 ? sole(few[0]) : together(node, few, span(few)), value });
      few = [];
      value = 0;
    };
    for (const each of node.below) {
      if ((area * of(each)) / whole >= least) { put(); cells.push({ node: sole(each), value: of(each) }); continue; }
      if (!of(each)) continue;
      few.push(each);
      value += of(each);
      if ((area * value) / whole >= Math.max(12 * LEAST_AREA, least)) put();
    }
    put();
    return cells;
  }

  function span(nodes) { // the name of a cell with several neighbors
    const [from, to] = [nodes[0], nodes[nodes.length - 1]];
    return INDEX.test(from.name) && INDEX.test(to.name) ? digits(from) + "–" + digits(to) : from.name + " … " + to.name;
  }

  function grown(top, pixels, of) { // divides cells, the largest first; cells with the same name in all layers are divided together
    const most = top.node.count > FEW ? AREAS : Infinity;
    let n = 1, units = [[top]];
    while (units.length) {
      const unit = units.splice(units.reduce((best, each, k) => (each[0].value > units[best][0].value ? k : best), 0), 1)[0];
      const room = (most - n) / unit.length + 1, needs = Math.max(...unit.map((cell) => cell.node.below.length));
      if (needs > room && (unit.length > 1 || room < 8)) continue;
      const next = new Map();
      for (const cell of unit) {
        const below = parts(cell.node, pixels * cell.value, of, room);
        if (below.length === 1 && !below[0].node.tensor && below[0].node !== cell.node) units.push([Object.assign(cell, { node: below[0].node })]);
        if (below.length < 2) continue;
        cell.below = below;
        n += below.length - 1;
        for (const each of below) {
          if (each.node.tensor || each.node.members || each.value * pixels < 4 * LEAST_AREA) continue;
          const key = INDEX.test(each.node.name) ? "#" : label(each.node, cell.node);
          (next.get(key) || next.set(key, []).get(key)).push(each);
        }
      }
      units.push(...next.values());
    }
    return top;
  }

  function ordered(cells) { // whether `cells` are drawn in their order, because their sizes are similar; otherwise they are sorted by size
    const values = cells.map((cell) => cell.value), far = Math.max(...values) / Math.min(...values);
    const named = cells.every((cell) => /^\[?\d/.test(cell.node.name));
    if (cells.length > 2 && far < (named ? 4 : 1.01)) return true;
    cells.sort((a, b) => b.node[measure] - a.node[measure] || b.value - a.value);
    return false;
  }

  const sumOf = (cells) => cells.reduce((sum, cell) => sum + cell.value, 0);

  function laid(cell, x, y, w, h) { // sets the rectangles of `cell` and of the cells in it
    Object.assign(cell, { x, y, w, h });
    if (!cell.below) return;
    const title = cell.depth && w > 30 && h > 40 && wide(plain(cell)) < w - 8 ? 17 : 0;
    cell.titled = title > 0;
    for (const each of cell.below) each.depth = cell.depth + 1, each.from = cell.node;
    const pad = cell.depth ? 2 : 0;
    (ordered(cell.below) ? inRows : squarified)(cell.below, x + pad, y + (title || pad), Math.max(w - 2 * pad, 0), Math.max(h - (title || pad) - pad, 0));
  }

  function strip(cells, x, y, w, h, across) { // a row or a column of cells
    const whole = sumOf(cells) || 1;
    for (const cell of cells) {
      const share = cell.value / whole;
      laid(cell, x, y, across ? w * share : w, across ? h : h * share);
      if (across) x += w * share; else y += h * share;
    }
  }

  function inRows(cells, x, y, w, h) { // rows in reading order; their number makes cells a bit wider than high
    const n = cells.length, whole = sumOf(cells);
    let best = 1, least = Infinity;
    for (let rows = 1; rows <= n; rows++) {
      const per = Math.ceil(n / rows), bad = Math.abs(Math.log((w * rows) / (1.6 * h * per || 1))) + (1.5 * (per * Math.ceil(n / per) - n)) / per + (h * (n - per * (Math.ceil(n / per) - 1)) < 40 * n ? 0.3 : 0); // titles need 40 pixels, also in the last row
      if (bad < least) [best, least] = [per, bad];
    }
    for (let k = 0; k < n; k += best) {
      const some = cells.slice(k, k + best), high = (h * sumOf(some)) / whole;
      strip(some, x, y, w, high, true);
      y += high;
    }
  }

  function squarified(cells, x, y, w, h) { // a squarified treemap, the largest cells first
    while (cells.length) {
      const scale = (w * h) / (sumOf(cells) || 1), side = Math.min(w, h);
      let n = 0, sum = 0, worst = Infinity;
      for (; n < cells.length; n++) {
        const thick = ((sum + cells[n].value) * scale) / side;
        const bad = Math.max((cells[0].value * scale) / thick ** 2, thick ** 2 / (cells[n].value * scale));
        if (n && !(bad <= worst)) break;
        worst = bad;
        sum += cells[n].value;
      }
      const thick = (sum * scale) / side || 0, down = w >= h;
      strip(cells.slice(0, n), x, y, down ? thick : w, down ? h : thick, !down);
      if (down) { x += thick; w -= thick; } else { y += thick; h -= thick; }
      cells = cells.slice(n);
    }
  }

  const pen = document.createElement("canvas").getContext("2d");
  pen.font = "12px system-ui, sans-serif";
  const wide = (text) => pen.measureText(text).width;
  const plain = (cell) => shown(label(cell.node, cell.node.members ? null : cell.from)).replace(/[./]$/, "");

  function lines(cell) { // the texts that fit into the cell without being cut
    const { node, w, h } = cell, name = plain(cell), fits = (text) => text.length < 100 && wide(text) < w - 8;
    const count = " (" + counted(node.count) + ")", some = node.tensor ? "" : [counted(node.count) + (node.count > 1 ? " tensors" : " tensor"), count.trim()].find(fits);
    const first = [name + (some && h < 32 ? count : ""), name, name.replace(/\.weight$/, ""), name.replace(/–.*/, "…")].find(fits);
    if (!first || h < 16) return "";
    return [first, ...[some, measured(cell.value)].filter((text) => text && fits(text))].slice(0, Math.floor(h / 16)).join("\n");
  }

  const maps = data.maps.map((title) => {
    const element = make("div", { class: "map" });
    $("map").append(make("div", {}, data.maps.length > 1 ? make("p", { class: "hint" }, title) : null, element));
    return element;
  });
  const layouts = []; // the layouts of the maps, and the arguments for which they were computed
  let room = []; // width and height of each map and of the table; 0 in a frame that is not visible
  const ask = () => { room = [...maps, $("scroll")].map((each) => [each.clientWidth, each.clientHeight]); };
  const map = () => maps.forEach(drawn);

  function drawn(element, k) { // the map of one file
    const [width, height] = room[k], of = (node) => node.sides[k][measure], made = [focus, measure, width, height];
    element.replaceChildren();
    if (maps.length > 1) element.previousSibling.textContent = data.maps[k] + ": " + measured(of(focus));
    if (!of(focus) || !width || !height) return;
    if (!layouts[k] || made.some((each, n) => each !== layouts[k].made[n])) {
      layouts[k] = { made, top: grown({ node: focus, value: of(focus), depth: 0 }, (width * height) / of(focus), of) };
      laid(layouts[k].top, 0, 0, width, height);
    }
    const top = layouts[k].top;
    const boxes = document.createDocumentFragment();
    const tied = new Set(chosen && chosen.tensor ? mates(chosen.tensor).map((i) => nodeOf[i]) : []);
    const frames = [], holds = holdersOf(chosen);
    const todo = top.below ? [...top.below] : [{ ...top, from: focus.above }];
    while (todo.length) {
      const cell = todo.pop(), node = cell.node;
      if (cell.below) todo.push(...cell.below);
      const place = { left: Math.round(cell.x), top: Math.round(cell.y) };
      const w = Math.round(cell.x + cell.w) - place.left, h = Math.round(cell.y + cell.h) - place.top;
      if (w < 1 || h < 1) continue;
      const put = (box) => { Object.assign(box.style, { left: place.left + "px", top: place.top + "px", width: w + "px", height: h + "px" }); return box; };
      const faint = !cell.below && dim(node), box = put(make("div", { class: cell.below ? "inner" : faint ? "dim" : null }));
      if (!cell.below) box.style.background = faint ? "color-mix(in srgb, " + hue(main(node)) + " 25%, var(--panel))" : hue(main(node));
      box.textContent = cell.below ? (cell.titled ? plain(cell) : "") : faint ? "" : lines(cell);
      if (!box.textContent && !cell.below && !faint && w >= 18 && wide(plain(cell)) < h - 8) { // vertical text
        box.textContent = plain(cell);
        box.classList.add("down");
      }
      box.title = short(shown(node.path + (node.members ? node.name : "")), 300) + "\n" + (node.tensor ? "" : counted(node.count) + " tensors, ") + measured(cell.value) + ", " + percent(cell.value, of(root));
      if (!cell.below && node.bad) box.classList.add("bad");
      box.addEventListener("click", (event) => {
        if (event.detail > 1) return; // the second click of a double click may hit a cell that the first has opened
        if (!cell.below && !node.tensor && node !== focus) aim(node);
        choose(node, !node.members);
        if (innerWidth < 1000) element.scrollIntoView({ block: "nearest" }); // above the panel
      });
      if (cell.below) box.addEventListener("dblclick", () => look(node));
      boxes.append(box);
      if (node === chosen || tied.has(node) || (!cell.below && holds(node))) frames.push(put(make("div", { class: node === chosen ? "frame" : "frame tied" })));
    }
    element.append(boxes, ...frames);
  }

  function aim(node) { // sets the branch that the map and the table show
    focus = node.tensor && node.above ? node.above : sole(node);
    if (focus.tensor && focus.above) focus = focus.above;
    within = focus === root ? null : new Set();
    if (within) visit(focus, (each) => within.add(each));
    crumbs();
    find();
  }

  function look(node) {
    aim(node);
    map();
    tree(false);
    show();
  }

  // The tree

  let visible = [];
  const isOpen = (node) => expanded.has(node) || opened.has(node) || (opened.size > 0 && (node.members || []).some((each) => opened.has(each)));
  const part = (node) => more.get(node) || [0, AT_ONCE]; // the range of the children that the tree shows
  function listed(node) { // the children of a branch, layers in their order and others by size
    const below = [...kids(node)];
    return node.members || indexed(node.below) ? below : below.sort((a, b) => b[measure] - a[measure] || 0);
  }
  function extend({ node, before }) {
    const [from, to] = part(node);
    more.set(node, before ? [Math.max(from - AT_ONCE, 0), to] : [from, to + AT_ONCE]);
  }
  function flatten() {
    visible = [];
    const add = (node, level, above) => {
      const end = node.members ? node : sole(node);
      visible.push({ node: end, top: node, level, from: above ? above.node.members ? above.node.above : above.node : null,
        kin: above ? above.kin : 1, place: above ? above.place : 1 });
      if (!isOpen(end)) return;
      const below = listed(end), kin = below.length, most = below.reduce((a, b) => Math.max(a, b[measure]), 0) || 1;
      const [from, to] = part(end);
      if (from) visible.push({ node: end, level: level + 1, rest: from, before: true, kin, place: from });
      below.slice(from, to).forEach((each, n) => {
        each.share = each[measure] / most;
        add(each, level + 1, { node: end, kin, place: from + n + 1 });
      });
      if (kin > to) visible.push({ node: end, level: level + 1, rest: kin - to, kin, place: to + 1 });
    };
    add(root, 1, null);
  }

  let current = 0; // the index of the visible row with the keyboard focus
  function tree(focused) {
    flatten();
    current = Math.max(0, Math.min(current, visible.length - 1));
    const items = visible.map((each, n) => {
      const node = each.node;
      const opens = !each.rest && node.below.length > 0;
      const twist = make("span", { class: "twist", "aria-hidden": "true" }, opens ? (isOpen(node) ? "▾" : "▸") : "");
      const text = each.rest ? "… " + counted(each.rest) + (each.before ? " before" : " more") : label(node, each.from);
      const item = make("li", {
        role: "treeitem", "aria-level": each.level, "aria-setsize": each.kin, "aria-posinset": each.place,
        "aria-expanded": opens ? String(isOpen(node)) : null, class: !each.rest && dim(node) ? "dim" : null, "aria-selected": String(!each.rest && node === chosen),
        tabindex: n === current ? "0" : "-1", title: text.length > 12 ? short(shown(text), 300) : null,
      }, twist, named(text, 80), !each.rest && node.bad ? make("span", { class: "bad" }, "⚠") : null);
      item.style.paddingLeft = 6 + 10 * (Math.min(each.level, 20) - 1) + "px";
      if (!each.rest) {
        const bar = make("i", { class: "bar", "aria-hidden": "true", title: "compared with the largest of its neighbours" });
        bar.style.setProperty("--share", (100 * (each.top.share ?? 1)) + "%");
        item.append(bar, make("span", { class: "size" },
          (node.tensor && node.tensor.tied >= 0 && measure !== "count" ? "tied" : spread(node, measured))));
        item.style.borderLeftColor = hue(main(node));
      }
      item.addEventListener("click", (event) => {
        current = n;
        if (each.rest) { extend(each); tree(true); return; }
        if (opens && (event.target === twist || node === chosen)) toggle(node);
        choose(node, false, true);
      });
      return item;
    });
    $("tree").replaceChildren(...items);
    if (focused && items[current]) items[current].focus({ preventScroll: false });
  }

  function toggle(node) {
    const was = isOpen(node);
    for (const each of [node, ...(node.members || [])]) opened.delete(each);
    if (was) expanded.delete(node); else expanded.add(node);
  }

  $("tree").addEventListener("keydown", (event) => {
    const each = visible[current];
    if (!each) return;
    const node = each.node, opens = !each.rest && node.below.length > 0, enters = event.key === "Enter" || event.key === " ";
    if (event.key === "ArrowDown") current = Math.min(current + 1, visible.length - 1);
    else if (event.key === "ArrowUp") current = Math.max(current - 1, 0);
    else if (event.key === "Home") current = 0;
    else if (event.key === "End") current = visible.length - 1;
    else if (event.key === "ArrowRight" && opens) { if (isOpen(node)) current++; else toggle(node); }
    else if (event.key === "ArrowLeft") {
      if (opens && isOpen(node)) toggle(node);
      else while (current > 0 && visible[current].level >= each.level) current--;
    } else if (enters && each.rest) extend(each);
    else if (!enters) return;
    event.preventDefault();
    if (enters && !each.rest) choose(node, false, true);
    else tree(true);
  });

  // What is selected

  const PLAIN = /^[\w@%+=:,./-]+$/;
  function quoted(word) {
    if (word && PLAIN.test(word)) return word;
    if (!new RegExp(HIDDEN.source, "u").test(word)) return "'" + word.replaceAll("'", "'\"'\"'") + "'";
    const bytes = (c) => [...new TextEncoder().encode(c)].map((b) => "\\x" + b.toString(16).padStart(2, "0")).join("");
    return "$'" + word.replace(/[\\']/g, "\\$&").replace(HIDDEN, bytes) + "'";
  }
  const glob = (path) => {
    const literal = path.replace(/[*?[]/g, "[$&]").replace(HIDDEN, "?");
    return path.includes("/") || (data.named && /^[\w.]+$/.test(path)) ? literal : "./" + literal;
  };

  function details() {
    const box = $("selected");
    $("details").className = chosen ? "docked" : "";
    document.documentElement.className = chosen ? "docks" : ""; // then focused elements are not covered by the panel
    $("close").hidden = !chosen;
    if (!chosen) {
      box.replaceChildren(make("p", { class: "hint" }, "Select a module or a tensor: in the tree, on the map, or in the table."));
      return;
    }
    const each = chosen.tensor, lines = [];
    const fact = (name, ...what) => lines.push(make("div", {}, make("dt", {}, name), make("dd", {}, ...what)));
    if (each) tensorFacts(each, fact);
    else {
      if (chosen.members) fact("contains", counted(chosen.below.length) + " neighbours");
      fact("tensors", arrow(chosen.sides.map((side) => counted(side.count))));
      if (chosen.bad) fact("NaN or inf", make("span", { class: "bad" }, "in " + counted(chosen.bad)));
    }
    fact("bytes", arrow(chosen.sides.map((side, k) => each && !each.extents[k] ? "–" : counted(each ? each.extents[k][0] : side.bytes)))
      + " (" + percent(each ? each.nbytes : chosen.bytes, root.bytes) + " of all)");
    fact("parameters", arrow(chosen.sides.map((side, k) => counted(each ? (each.extents[k] || [0, 0])[1] : side.parameters))));
    const indexed = chosen.below.length && chosen.below[0].name.startsWith("[");
    const whole = chosen.path.endsWith("/") ? chosen.path.slice(0, -1) : indexed ? chosen.path : null;
    const kind = whole && data.commands.some(([of]) => of === "path") ? "path" : "glob";
    const value = kind === "path" ? whole : glob(chosen.path) + (each ? "" : "*");
    const commands = chosen === root || chosen.members || !chosen.sides[0].count ? [] // the commands need the first file
      : data.commands.filter(([of]) => of === kind && (kind === "path" || !(data.optimizers || []).some((path) => chosen.path.startsWith(path))));
    box.replaceChildren(
      make("h3", { dir: "ltr" }, named(chosen === root ? "everything" : chosen.path + (chosen.members ? chosen.name : ""), Infinity)),
      make("dl", {}, ...lines), ...columns.histograms.filter((of) => each && of.bars[each.i]).map((of) => histogram(of.title, of.bars[each.i])),
      make("div", {}, ...commands.flatMap(([, what, ...words]) =>
        [make("div", {}, what + ":"), command(words.map((word) => quoted(word === null ? value : word)).join(" "))]),
      chosen.below.length ? make("button", { type: "button", on: { click: () => look(chosen) } }, "Show its inside on the map") : ""),
    );
  }

  function tensorFacts(each, fact) {
    const i = each.i;
    for (const of of facts) {
      const text = written(of, i);
      if (text) fact(of.name, make("span", { class: of.bad && nonzero(said(of, i)) ? "bad" : null }, make("bdi", {}, text)));
    }
    const storage = columns.storage ? columns.storage[i] : null;
    if (storage !== null) fact("storage", "number " + storage + (onStorage.get(storage).length > 1 ? "" : ", not shared on this page"));
    const same = mates(each);
    if (same.length) fact("tied to", ...links(same));
    const others = (onStorage.get(storage) || []).filter((n) => n !== i && !same.includes(n));
    if (others.length) fact("same storage", ...links(others));
  }

  const links = (numbers) => [
    ...numbers.slice(0, 12).flatMap((i, n) => [n ? ", " : "", link(tensors[i])]),
    numbers.length > 12 ? ", … " + counted(numbers.length - 12) + " more" : "",
  ];

  function histogram(title, [edge, ...counts]) {
    const most = Math.max(...counts, 1), bars = make("div", { class: "bars", role: "img" });
    const top = Number(edge), bins = counts.length / 2;
    const from = counts.slice(0, bins).some((n) => n) ? 0 : bins;
    const at = (n) => { const k = n - bins; return k === 0 ? 0 : Math.sign(k) * top * 2 ** (Math.abs(k) - bins); };
    counts.slice(from).forEach((n, k) => {
      const bar = make("i", { title: number(at(from + k)) + " to " + number(at(from + k + 1)) + ": " + counted(n) });
      bar.style.height = (100 * n) / most + "%";
      bars.append(bar);
    });
    const range = number(at(from)) + " to " + number(top);
    bars.setAttribute("aria-label", "Histogram" + (title ? " of " + title : "") + ": 32 bins that double in width away from 0, from " + range);
    return make("div", {}, bars, make("p", { class: "hint" }, (title ? title + ": " : "") + "from " + range + "; each bin twice as wide as the next one towards 0"));
  }

  function drawing([, ...counts]) { // a histogram in a row of the table
    const of = (tag, attributes) => {
      const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
      for (const name in attributes) element.setAttribute(name, attributes[name]);
      return element;
    };
    const most = Math.max(...counts, 1), image = of("svg", { viewBox: "0 0 64 20", width: 64, height: 20, "aria-hidden": "true" });
    image.append(of("path", { d: counts.map((n, k) => "M" + 2 * k + " 20v" + (-20 * n) / most + "h2V20z").join("") }));
    return image;
  }

  function choose(node, opens, focused) { // draws everything before it reads sizes, so that the browser computes the layout only once
    chosen = node;
    if (opens) {
      const holds = holdersOf(node);
      for (let above = node.above; above; above = above.above) {
        for (const each of [kids(above).find((kid) => kid.members && holds(kid)), above]) {
          if (!each) continue;
          expanded.add(each);
          const at = listed(each).findIndex(holds), [from, to] = part(each);
          if (at < from || at >= to) more.set(each, [Math.max(at - AT_ONCE / 2, 0), at + AT_ONCE / 2]);
        }
      }
      flatten();
      current = Math.max(0, visible.findIndex((each) => each.node === sole(node) && !each.rest));
    }
    tree(false);
    map();
    details();
    show();
    const list = $("tree"), item = list.children[current];
    if (opens && item) list.scrollTop = item.offsetTop - list.offsetTop - list.clientHeight / 2;
    if (focused && item) item.focus();
    inSight();
  }

  function inSight() { // makes the panel next to the map fit into the window, and scrolls to it below a long head
    const box = $("selected");
    box.scrollTop = 0;
    const top = () => box.getBoundingClientRect().top;
    if (!chosen || innerWidth < 1000) { box.style.maxHeight = ""; return; }
    if (top() > innerHeight - 200) $("details").scrollIntoView({ block: "center" });
    box.style.maxHeight = Math.max(innerHeight - top() - 12, 100) + "px";
  }

  // The table

  const HEADS = [{ name: "tensor" }, ...facts.filter((fact) => fact.table && fact.words && (fact.words.length > 1 || tensors.length < 2)), // facts that all tensors share are listed above
    { name: "bytes" }, ...columns.histograms.map((of) => ({ name: of.title || "histogram", bars: of.bars })), ...facts.filter((fact) => fact.table && fact.numbers)];
  const far = HEADS.findIndex((each) => each.name === "differing"); // the differences come before the columns of both sides
  if (far > 0) HEADS.splice(HEADS[1].name === "differs" ? 2 : 1, 0, ...HEADS.splice(far, 4));
  const falls = (head) => head.name === "bytes" || head.name === "shape" || !!head.numbers; // whether the largest comes first
  let found = [];

  function heads() {
    $("heads").replaceChildren(...HEADS.map((head, n) => {
      const key = head.name;
      if (head.bars) return make("th", { scope: "col" }, make("span", {}, key));
      const sorted = order.key === key ? (order.up ? "ascending" : "descending") : "none";
      const mark = order.key === key ? (order.up ? " ▲" : " ▼") : "";
      const sort = () => {
        order = { key, up: order.key === key ? !order.up : !falls(head) };
        heads();
        rows();
        $("heads").children[n].firstChild.focus();
      };
      return make("th", { scope: "col", "aria-sort": sorted, class: head.numbers || key === "bytes" ? "right" : null },
        make("button", { type: "button", on: { click: sort } }, key, make("span", { "aria-hidden": "true" }, mark)));
    }));
  }

  let stamp = 0, dims = false; // branches with a result have the current stamp; the others are dimmed
  const dim = (node) => dims && (node.members ? node.members.every(dim) : node.stamp !== stamp);

  let dimming = 0;
  function search() { // shows the results; shortly after the last key, dims the rest of the map and tree, and opens the tree
    const hidden = $("scroll").getBoundingClientRect().top - innerHeight + 7 * ROW; // read before the layout changes
    find();
    show();
    clearTimeout(dimming);
    dimming = setTimeout(() => {
      for (const node of opened) {
        const at = node.below.length > AT_ONCE ? listed(node).findIndex((each) => !dim(each)) : 0;
        more.set(node, [at, at + AT_ONCE]); // begin with the first result
      }
      map();
      current = 0;
      tree(false);
    }, 60);
    if (dims && hidden > 0) requestAnimationFrame(() => scrollBy(0, hidden));
  }

  function rows() {
    find();
    show();
  }

  let words = [], from = 0; // the scroll position of the table, in pixels
  function find() {
    if (from) $("scroll").scrollTop = from = 0;
    words = query.split(/\s+/).filter((word) => word);
    stamp++;
    dims = words.length > 0 || kept > 0;
    opened.clear();
    let low = "";
    const has = (word) => low.includes(word), matches = [];
    for (const each of tensors) {
      low = each.low;
      if (!words.every(has) || (kept && !FILTERS[kept][1](each)) || (within && !within.has(each))) continue;
      each.stamp = stamp;
      matches.push(each);
      if (!dims) continue;
      for (let node = nodeOf[each.i]; node && node.stamp !== stamp; node = node.above) node.stamp = stamp;
      if (matches.length <= MATCHES && words.length) for (let node = nodeOf[each.i].above; node; node = node.above) opened.add(node);
    }
    found = matches.length < tensors.length / 20 ? matches.sort(comparison()) : inOrder().filter((each) => each.stamp === stamp);
  }

  const sorted = []; // all tensors in the current order, and this order
  function inOrder() {
    if (sorted[1] !== order) sorted.splice(0, 2, [...tensors].sort(comparison()), order);
    return sorted[0];
  }

  function comparison() {
    const head = HEADS.find((each) => each.name === order.key), up = order.up ? 1 : -1;
    if (head.name === "tensor") return (a, b) => up * collator.compare(a.path, b.path);
    if (falls(head)) {
      const value = (each) => (head.name === "bytes" ? each.nbytes : head.name === "shape" ? each.numel : worth(said(head, each.i))) ?? Infinity * up; // tensors without a value come last
      return (a, b) => (value(a) === value(b) ? 0 : up * (value(a) - value(b))) || a.i - b.i;
    }
    return (a, b) => up * collator.compare(said(head, a.i) || "", said(head, b.i) || "") || a.i - b.i;
  }

  function show() {
    $("shown").textContent = found.length === tensors.length ? counted(found.length) : counted(found.length) + " of " + counted(tensors.length);
    $("hits").textContent = hits(words);
    $("table").setAttribute("aria-rowcount", found.length + 1);
    paint();
  }

  function hits(words) { // the text next to the search box
    if (!words.length) return "";
    const inside = focus === root || !focus.path ? "" : " in " + short(shown(focus.path), 60);
    if (found.length) return counted(found.length) + (found.length > 1 ? " tensors" : " tensor") + inside;
    const others = (data.tables || []).length || data.facts.some(([name]) => name === "other values") ? " Other values are listed above. They are not searched." : "";
    return "No tensor" + inside + " has " + (words.length > 1 ? "these words" : "this") + " in its name" + (kept ? " among the selected rows." : ".") + others;
  }

  function row(each, n) {
    const cells = [
      make("td", {}, make("button", { type: "button", class: "link", on: { click: () => choose(nodeOf[each.i], true) } },
        named(each.path + (each.tied < 0 ? "" : " = " + tensors[each.tied].path), longest))),
      ...HEADS.slice(1).map((head) => (head.bars ? make("td", {}, head.bars[each.i] && drawing(head.bars[each.i])) : head.name === "bytes" ? make("td", { class: "right" }, sizes(each.extents))
        : make("td", { class: (head.numbers ? "right" : "") + (head.bad && nonzero(said(head, each.i)) ? " bad" : "") }, written(head, each.i) || "–"))),
    ];
    return make("tr", { "aria-rowindex": n + 2, class: chosen && chosen.tensor === each ? "chosen" : null }, ...cells);
  }

  let painting = false, printing = false;
  let longest = 120; // the most characters of a name in the table; longer names are cut in the middle
  function paint() {
    const [width, height] = room[maps.length];
    longest = printing ? 120 : Math.max(16, Math.floor(width / (innerWidth > 600 ? 16 : 8))); // names have two lines on a narrow page
    const top = Math.max(0, Math.floor(from / ROW) - 10);
    const first = printing ? 0 : top, last = printing ? Math.min(500, found.length) : Math.min(found.length, top + Math.ceil(height / ROW) + 20);
    const space = (height) => {
      const cell = make("td", { colspan: HEADS.length });
      cell.style.height = height + "px";
      return make("tr", { class: "space", "aria-hidden": "true" }, cell);
    };
    const drawn = [];
    if (first) drawn.push(space(first * ROW));
    for (let n = first; n < last; n++) drawn.push(row(found[n], n));
    if (last < found.length && !printing) drawn.push(space((found.length - last) * ROW));
    if (printing && last < found.length) {
      drawn.push(make("tr", {}, make("td", { colspan: HEADS.length }, "… " + counted(found.length - last) + " more tensors")));
    }
    $("rows").replaceChildren(...drawn);
    requestAnimationFrame(edge);
  }

  function edge() { // shades the right edge if columns are hidden behind it, and names them
    const scroll = $("scroll"), right = scroll.scrollLeft + scroll.clientWidth;
    const gone = [...$("heads").children].filter((each) => each.offsetLeft + each.offsetWidth > right + 2);
    const text = gone.length && !printing ? "To the right: " + gone.map((each) => each.firstChild.firstChild.textContent).join(", ") : "";
    if (text === $("beyond").textContent) return;
    $("beyond").textContent = text;
    scroll.className = text ? "cut" : "";
  }
  $("scroll").addEventListener("scroll", () => {
    if (!painting) requestAnimationFrame(() => { painting = false; from = $("scroll").scrollTop; paint(); });
    painting = true;
  });
  addEventListener("beforeprint", () => { printing = true; paint(); });
  addEventListener("afterprint", () => { printing = false; paint(); });

  function draw() {
    legend();
    crumbs();
    find();
    map();
    tree(false);
    show();
  }

  let resizing = 0;
  const later = (ms) => { clearTimeout(resizing); resizing = setTimeout(resized, ms); };
  function resized() {
    const before = String(room);
    ask();
    if (String(room) !== before) { map(); paint(); }
    if (room.flat().includes(0)) later(200); // no event reports that a hidden frame becomes visible
  }
  const observer = new ResizeObserver(() => later(50));
  for (const name of ["map", "scroll"]) observer.observe($(name));
  for (let n = 0, todo = [sole(root)]; n < ROWS_OPEN && todo.length;) { // opens as much of the tree as fits
    const node = todo.sort((a, b) => b.bytes - a.bytes).shift(), below = kids(node);
    if (n + below.length > ROWS_OPEN && node !== sole(root)) continue;
    n += below.length;
    expanded.add(node);
    todo.push(...below.filter((each) => !each.members).map(sole).filter((each) => each.below.length));
  }
  head();
  controls();
  heads();
  details();
  ask();
  draw();
  later(50);
})();
