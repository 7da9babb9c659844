"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const columns = data.tensors;
  const $ = (id) => document.getElementById(id);
  const collator = new Intl.Collator("en", { numeric: true });
  const MEASURES = { bytes: "bytes", parameters: "parameters", count: "tensors" };
  const ROW = 28; // pixels of a row of the table
  const ROWS_OPEN = 18; // rows of the tree that are open at first
  const AT_ONCE = 200; // children that a branch of the tree shows before it asks
  const AT_MOST = 12; // words of a fact that can be asked for
  const LEAST_AREA = 90; // square pixels, below which what is inside is not drawn
  const HIDDEN = /[\p{C}\p{Zl}\p{Zp}]/gu; // characters that nobody would see, or that turn others round

  // Texts: everything that a file says goes through textContent, with what cannot be seen in escapes.

  const shown = (text) => String(text).replace(HIDDEN, (c) => "\\u{" + c.codePointAt(0).toString(16) + "}");
  const short = (text, most) =>
    text.length <= most ? text : text.slice(0, most * 0.6) + "…" + text.slice(-most * 0.4);

  function make(tag, attributes, ...below) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name === "on") for (const [event, run] of Object.entries(value)) element.addEventListener(event, run);
      else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
    }
    element.append(...below.filter((each) => each !== null && each !== undefined));
    return element;
  }

  const named = (text, most = 120) => make("span", { class: "name" }, short(shown(text), most));

  function size(n) {
    if (n < 1000) return n + " B";
    let unit = -1;
    for (; n >= 999.5 && unit < 3; unit++) n /= 1000;
    return Number(n.toPrecision(3)) + " " + "kMGT"[unit] + "B";
  }

  const counted = (n) => n.toLocaleString("en");
  const arrow = (texts) => (texts.every((text) => text === texts[0]) ? texts[0] : texts.join(" → "));
  const measured = (n) => (measure === "bytes" ? size(n) : counted(n));
  const percent = (part, whole) => (whole ? ((100 * part) / whole).toFixed(part / whole < 0.1 ? 1 : 0) + " %" : "");
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
  for (let i = 0, before = ""; i < columns.tied.length; i++) {
    before = before.slice(0, columns.paths[2 * i]) + columns.paths[2 * i + 1];
    const extents = columns.sides.map((side) => side.words[side.at[i]] || null); // bytes, elements, and whether they count, in each file
    tensors.push({
      i, path: before, extents, tied: columns.tied[i], bad: bads.some((fact) => nonzero(fact.numbers[i])),
      nbytes: Math.max(...extents.map((each) => (each ? each[0] : 0))),
      numel: Math.max(...extents.map((each) => (each ? each[1] : 0))), low: before.toLowerCase(),
    });
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
    const sides = columns.sides.map(() => ({ bytes: 0, parameters: 0, count: 0 })); // in each file, and the larger of them
    return { name, path, above, below: [], tensor: null, sides, bytes: 0, parameters: 0, count: 0, bad: 0, kinds: null };
  }
  const root = branch("", "", null);
  const nodeOf = [];
  const places = new Map([["", root]]);
  for (const each of tensors) {
    let at = root, path = "";
    for (const piece of pieces(each.path)) {
      path += piece;
      let next = places.get(path);
      if (!next) {
        next = branch(piece, path, at);
        places.set(path, next);
        at.below.push(next);
      }
      at = next;
    }
    at.tensor = each;
    nodeOf[each.i] = at;
    for (let node = at; node; node = node.above) {
      node.bytes += own(each, 0); node.parameters += own(each, 1);
      each.extents.forEach((extent, k) => {
        if (!extent) return;
        if (extent[2]) { node.sides[k].bytes += extent[0]; node.sides[k].parameters += extent[1]; }
        node.sides[k].count++;
      });
      node.count++;
      if (each.bad) node.bad++;
    }
  }
  function sole(node) { // what a chain of only children ends in
    while (!node.tensor && node.below.length === 1) node = node.below[0];
    return node;
  }
  const label = (node, from) => (node === root ? "everything" : node.path.slice(from ? from.path.length : 0));

  // What is shown.

  let measure = "bytes", colour, focus = sole(root), chosen = null, query = "", kept = 0;
  let order = { key: "bytes", up: false };
  const expanded = new Set([root]);
  const more = new Map();
  for (const fact of colours) { // those that have most bytes first, unless they have an order
    const sums = new Map();
    if (!fact.ordered) fact.words.forEach((word) => sums.set(word, 0));
    for (const each of tensors) {
      const word = said(fact, each.i);
      if (word !== null) sums.set(word, (sums.get(word) || 0) + own(each, 0));
    }
    fact.hues = fact.ordered ? fact.words.filter((word) => sums.has(word)) : [...sums].sort((a, b) => b[1] - a[1]).map(([word]) => word);
  }
  colour = ["differs", "by at most", "part", "dtype"].map((name) => colours.find((fact) => fact.name === name && fact.hues.length > 1))
    .find((fact) => fact) || colours[0];
  const hue = (word) => (word === null ? "var(--panel)" : "var(--c" + Math.min(colour.hues.indexOf(word), 7) + ")");
  const spread = (node, format) => arrow(node.sides.map((side) => format(side[measure])));

  function main(node) { // the word that most of what is below has
    if (node.tensor) return said(colour, node.tensor.i);
    if (node.kinds && node.kinds[0] === colour) return node.kinds[1];
    const sums = new Map(), stack = [node];
    while (stack.length) {
      const at = stack.pop();
      const word = at.tensor ? said(colour, at.tensor.i) : null;
      if (word !== null) sums.set(word, (sums.get(word) || 0) + at.bytes + 1);
      stack.push(...at.below);
    }
    if (!sums.size) return null;
    const best = [...sums].reduce((a, b) => (b[1] > a[1] ? b : a))[0];
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
      button.textContent = document.execCommand("copy") ? "Copied" : "Selected"; // works in frames of notebooks too
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
    if (verdict.findings.length) {
      $("findings").append(make("ul", {}, ...verdict.findings.map((each) =>
        make("li", {}, make("bdi", {}, shown(each.text)), each.command ? command(each.command) : null))));
    }
    if (verdict.remedy && verdict.findings.length !== 1) {
      $("findings").append(verdict.findings.length ? "All of it:" : "This compares what is alike:", command(verdict.remedy));
    }
    for (const [name, text] of data.facts) {
      $("facts").append(make("dt", {}, name), make("dd", {}, make("bdi", {}, shown(text))));
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
    colours.forEach((fact) => $("colour").append(make("option", { value: fact.name }, fact.name)));
    $("colour").value = colour ? colour.name : "";
    $("colour").addEventListener("change", () => { colour = colours.find((fact) => fact.name === $("colour").value); draw(); });
    FILTERS.forEach(([text], n) => $("filter").append(make("option", { value: n }, short(shown(text), 60))));
    $("filter-label").hidden = FILTERS.length < 2;
    $("filter").addEventListener("change", () => { kept = Number($("filter").value); rows(); });
    $("close").addEventListener("click", () => { choose(null, false); tree(true); });
    $("finite").hidden = !facts.some((fact) => fact.name === "mean");
    $("search").addEventListener("input", () => { query = $("search").value.toLowerCase(); rows(); });
  }

  const FILTERS = [["all tensors", () => true]];
  if (bads.length) FILTERS.push(["NaN or inf", (each) => each.bad]);
  if (tiedTo.size) FILTERS.push(["tied", (each) => mates(each).length > 0]);
  for (const fact of colours) {
    if (fact.hues.length < 2) continue;
    for (const word of fact.hues.slice(0, AT_MOST)) FILTERS.push([fact.name + ": " + word, (each) => said(fact, each.i) === word]);
  }

  function legend() {
    const hues = colour ? colour.hues : [];
    $("legend").replaceChildren(...hues.slice(0, 8).map((word, i) => {
      const box = make("i", {});
      box.style.background = "var(--c" + i + ")";
      const text = i === 7 && hues.length > 8 ? counted(hues.length - 7) + " others" : short(shown(word), 40);
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

  // The map

  function pruned(node, area, of) { // as deep as it can be seen; of: the measure of a node
    const value = of(node);
    if (node.tensor || !node.below.length || area < LEAST_AREA * 4) return { node, value };
    const whole = node.below.reduce((sum, each) => sum + of(each), 0) || 1;
    const below = [];
    let some = { node, value: 0, from: null, to: null };
    for (const each of node.below) { // what is small is put together with its neighbours
      const share = (area * of(each)) / whole;
      if (share >= LEAST_AREA) { below.push(pruned(sole(each), share, of)); continue; }
      if (!of(each)) continue;
      some = { node, value: some.value + of(each), from: some.from || each, to: each };
      if ((area * some.value) / whole < 12 * LEAST_AREA) continue;
      below.push(some);
      some = { node, value: 0, from: null, to: null };
    }
    if (some.from) below.push(some);
    if (below.length === 1 && !below[0].from) return below[0];
    return below.length > 1 ? { node, below } : { node, value };
  }

  function span(some, node) { // what several neighbours are called
    const from = label(some.from, node);
    return some.from === some.to ? from : from + " … " + label(some.to, node);
  }

  const maps = data.maps.map((title) => {
    const element = make("div", { class: "map" });
    $("map").append(make("div", {}, data.maps.length > 1 ? make("p", { class: "hint" }, title) : null, element));
    return element;
  });
  const widths = []; // of the maps as they are drawn; a frame that is not laid out yet has none
  const map = () => maps.forEach(drawn);

  function drawn(element, k) { // the map of one file
    const width = element.clientWidth, height = element.clientHeight, of = (node) => node.sides[k][measure];
    element.replaceChildren();
    widths[k] = height && width;
    if (maps.length > 1) element.previousSibling.textContent = data.maps[k] + ": " + measured(of(focus));
    if (!of(focus) || !widths[k]) return;
    const tree = d3.hierarchy(pruned(focus, width * height, of), (each) => each.below).sum((each) => each.value || 0);
    const titled = (at) => at.titled // asked once, before corners are rounded
      ?? (at.titled = at.depth > 0 && at.height > 0 && at.x1 - at.x0 > 50 && at.y1 - at.y0 > 40);
    const rank = (at) => (at.data.from ? at.value : at.data.node[measure]); // the same in both files
    d3.treemap().size([width, height]).paddingTop((at) => (titled(at) ? 17 : 1))
      .paddingInner(1).paddingRight(1).paddingBottom(1).round(true)(tree.sort((a, b) => rank(b) - rank(a)));
    const boxes = document.createDocumentFragment();
    const tied = chosen && chosen.tensor ? new Set(mates(chosen.tensor)) : new Set();
    for (const at of tree.descendants()) {
      if (!at.depth && at.children) continue;
      const node = at.data.node, w = at.x1 - at.x0, h = at.y1 - at.y0;
      if (w < 1 || h < 1) continue;
      const box = make("div", { class: at.children ? "inner" : null });
      Object.assign(box.style, { left: at.x0 + "px", top: at.y0 + "px", width: w + "px", height: h + "px" });
      if (!at.children) box.style.background = hue(main(node));
      const text = at.data.from ? span(at.data, node) : label(node, at.parent ? at.parent.data.node : node.above);
      if (at.children ? titled(at) : w > (at.data.from ? 60 : 30) && h > 15) box.textContent = short(shown(text), 60) + (h > 32 && !at.children ? "\n" + measured(at.value) : "");
      box.title = short(shown(node.path + (at.data.from ? text : "")), 300) + "\n" + measured(at.value) + ", " + percent(at.value, of(root));
      if (!at.data.from && (node === chosen || (node.tensor && tied.has(node.tensor.i)))) {
        const frame = make("div", { class: node === chosen ? "frame" : "frame tied" }); // above what is inside
        Object.assign(frame.style, { left: at.x0 + "px", top: at.y0 + "px", width: w + "px", height: h + "px" });
        boxes.append(frame);
      }
      if (!at.children && !at.data.from && node.bad) box.classList.add("bad");
      box.addEventListener("click", () => choose(node, true));
      box.addEventListener("dblclick", () => look(node));
      boxes.append(box);
    }
    element.append(boxes);
  }

  function look(node) {
    focus = node.tensor && node.above ? node.above : sole(node);
    if (focus.tensor && focus.above) focus = focus.above;
    draw();
  }

  // The tree

  let visible = [];
  function flatten() {
    visible = [];
    const add = (node, level, above) => {
      const end = sole(node);
      const kin = above ? above.kin : 1, place = above ? above.place : 1;
      visible.push({ node: end, level, from: above ? above.node : null, kin, place });
      if (!expanded.has(end)) return;
      const below = [...end.below].sort((a, b) => b[measure] - a[measure] || 0);
      const most = more.get(end) || AT_ONCE;
      below.slice(0, most).forEach((each, n) => add(each, level + 1, { node: end, kin: below.length, place: n + 1 }));
      if (below.length > most) visible.push({ node: end, level: level + 1, rest: below.length - most, kin: below.length, place: most + 1 });
    };
    add(root, 1, null);
  }

  let current = 0; // the place in what is visible that the keyboard is at
  function tree(focused) {
    flatten();
    current = Math.max(0, Math.min(current, visible.length - 1));
    const items = visible.map((each, n) => {
      const node = each.node;
      const opens = !each.rest && node.below.length > 0;
      const twist = make("span", { class: "twist", "aria-hidden": "true" }, opens ? (expanded.has(node) ? "▾" : "▸") : "");
      const text = each.rest ? "… " + counted(each.rest) + " more" : label(node, each.from);
      const item = make("li", {
        role: "treeitem", "aria-level": each.level, "aria-setsize": each.kin, "aria-posinset": each.place,
        "aria-expanded": opens ? String(expanded.has(node)) : null, "aria-selected": String(!each.rest && node === chosen),
        tabindex: n === current ? "0" : "-1",
      }, twist, named(text, 80));
      item.style.paddingLeft = 6 + 14 * (Math.min(each.level, 20) - 1) + "px";
      if (!each.rest) {
        item.append(make("span", { class: "size" }, 
          (node.tensor && node.tensor.tied >= 0 && measure !== "count" ? "tied" : spread(node, measured)) + (node.bad ? " ⚠" : "")));
        item.style.setProperty("--share", (100 * node[measure]) / (root[measure] || 1) + "%");
        item.style.borderLeftColor = hue(main(node));
      }
      item.addEventListener("click", (event) => {
        current = n;
        if (each.rest) { more.set(node, (more.get(node) || AT_ONCE) + AT_ONCE); tree(true); return; }
        if (opens && (event.target === twist || node === chosen)) toggle(node);
        choose(node, false);
        tree(true);
      });
      return item;
    });
    $("tree").replaceChildren(...items);
    if (focused && items[current]) items[current].focus({ preventScroll: false });
  }

  const toggle = (node) => (expanded.has(node) ? expanded.delete(node) : expanded.add(node));

  $("tree").addEventListener("keydown", (event) => {
    const each = visible[current];
    if (!each) return;
    const node = each.node, opens = !each.rest && node.below.length > 0;
    if (event.key === "ArrowDown") current = Math.min(current + 1, visible.length - 1);
    else if (event.key === "ArrowUp") current = Math.max(current - 1, 0);
    else if (event.key === "Home") current = 0;
    else if (event.key === "End") current = visible.length - 1;
    else if (event.key === "ArrowRight" && opens) { if (expanded.has(node)) current++; else expanded.add(node); }
    else if (event.key === "ArrowLeft") {
      if (opens && expanded.has(node)) expanded.delete(node);
      else while (current > 0 && visible[current].level >= each.level) current--;
    } else if (event.key === "Enter" || event.key === " ") {
      if (each.rest) more.set(node, (more.get(node) || AT_ONCE) + AT_ONCE);
      else choose(node, false);
    } else return;
    event.preventDefault();
    tree(true);
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
    document.documentElement.className = chosen ? "docks" : ""; // so that what gets the focus is not behind the panel
    $("close").hidden = !chosen;
    box.scrollTop = 0;
    if (!chosen) {
      box.replaceChildren(make("p", { class: "hint" }, "Select a module or a tensor: in the tree, on the map, or in the table."));
      return;
    }
    const each = chosen.tensor, lines = [];
    const fact = (name, ...what) => lines.push(make("div", {}, make("dt", {}, name), make("dd", {}, ...what)));
    if (each) tensorFacts(each, fact);
    else {
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
    const commands = chosen === root || !chosen.sides[0].count ? [] // the first file must have it
      : data.commands.filter(([of]) => of === kind);
    box.replaceChildren(
      make("h3", { dir: "ltr" }, make("bdi", {}, chosen === root ? "everything" : shown(chosen.path))),
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
    if (storage !== null) fact("storage", "number " + storage + (onStorage.get(storage).length > 1 ? "" : ", of no other tensor on this page"));
    const same = mates(each);
    if (same.length) fact("tied to", ...listed(same));
    const others = (onStorage.get(storage) || []).filter((n) => n !== i && !same.includes(n));
    if (others.length) fact("same storage", ...listed(others));
  }

  const listed = (numbers) => [
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

  function choose(node, opens) {
    chosen = node;
    if (opens) {
      for (let above = node.above; above; above = above.above) {
        expanded.add(above);
        const end = above.below.indexOf(node);
        if (end >= AT_ONCE) more.set(above, above.below.length);
      }
      flatten();
      current = Math.max(0, visible.findIndex((each) => each.node === sole(node) && !each.rest));
    }
    tree(false);
    if (opens && $("tree").children[current]) {
      const item = $("tree").children[current], list = $("tree");
      list.scrollTop = item.offsetTop - list.offsetTop - list.clientHeight / 2;
    }
    map();
    details();
    paint();
  }

  // The table

  const HEADS = [{ name: "tensor" }, ...facts.filter((fact) => fact.table && fact.words), { name: "bytes" }, ...facts.filter((fact) => fact.table && fact.numbers)];
  const falls = (head) => head.name === "bytes" || head.name === "shape" || !!head.numbers; // the largest first
  let found = [];

  function heads() {
    $("heads").replaceChildren(...HEADS.map((head, n) => {
      const key = head.name;
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

  function rows() {
    const words = query.split(/\s+/).filter((word) => word);
    found = tensors.filter((each) => FILTERS[kept][1](each) && words.every((word) => each.low.includes(word)) && each.path.startsWith(focus.path));
    const head = HEADS.find((each) => each.name === order.key), up = order.up ? 1 : -1;
    if (head.name === "tensor") found.sort((a, b) => up * collator.compare(a.path, b.path));
    else if (falls(head)) {
      const value = (each) => (head.name === "bytes" ? each.nbytes : head.name === "shape" ? each.numel : worth(said(head, each.i))) ?? Infinity * up; // what has none stands last
      found.sort((a, b) => (value(a) === value(b) ? 0 : up * (value(a) - value(b))) || a.i - b.i);
    } else found.sort((a, b) => up * collator.compare(said(head, a.i) || "", said(head, b.i) || "") || a.i - b.i);
    $("shown").textContent = found.length === tensors.length ? counted(found.length) : counted(found.length) + " of " + counted(tensors.length);
    $("hits").textContent = hits(words);
    $("table").setAttribute("aria-rowcount", found.length + 1);
    $("scroll").scrollTop = 0;
    paint();
  }

  function hits(words) { // what the search found, beside its box
    if (!words.length) return "";
    const inside = focus === root || !focus.path ? "" : " in " + short(shown(focus.path), 60);
    if (found.length) return counted(found.length) + (found.length > 1 ? " tensors" : " tensor") + inside;
    const others = data.facts.some(([name]) => name === "other values") ? " Other values stand above, they are not searched." : "";
    return "No tensor" + inside + " has " + (words.length > 1 ? "these words" : "this") + " in its name" + (kept ? ", of the rows chosen." : ".") + others;
  }

  function row(each, n) {
    const cells = [
      make("td", {}, make("button", { type: "button", class: "link", on: { click: () => choose(nodeOf[each.i], true) } },
        named(each.path + (each.tied < 0 ? "" : " = " + tensors[each.tied].path)))),
      ...HEADS.slice(1).map((head) => (head.name === "bytes" ? make("td", { class: "right" }, sizes(each.extents))
        : make("td", { class: (head.numbers ? "right" : "") + (head.bad && nonzero(said(head, each.i)) ? " bad" : "") }, written(head, each.i) || "–"))),
    ];
    return make("tr", { "aria-rowindex": n + 2, class: chosen && chosen.tensor === each ? "chosen" : null }, ...cells);
  }

  let painting = false, printing = false;
  function paint() {
    const scroll = $("scroll"), top = Math.max(0, Math.floor(scroll.scrollTop / ROW) - 10);
    const first = printing ? 0 : top, last = printing ? Math.min(500, found.length) : Math.min(found.length, top + Math.ceil(scroll.clientHeight / ROW) + 20);
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
  }
  $("scroll").addEventListener("scroll", () => {
    if (!painting) requestAnimationFrame(() => { painting = false; paint(); });
    painting = true;
  });
  addEventListener("beforeprint", () => { printing = true; paint(); });
  addEventListener("afterprint", () => { printing = false; paint(); });

  function draw() {
    legend();
    crumbs();
    map();
    tree(false);
    rows();
  }

  let resizing = 0;
  const later = (ms) => { clearTimeout(resizing); resizing = setTimeout(resized, ms); };
  function resized() {
    if (maps.some((element, k) => (element.clientHeight && element.clientWidth) !== widths[k])) { map(); paint(); }
    if (widths.includes(0)) later(200); // a frame out of sight is not told when it gets its size
  }
  new ResizeObserver(() => later(50)).observe($("map"));
  for (let n = 0, todo = [sole(root)]; n < ROWS_OPEN && todo.length;) { // as much of the tree as can be seen at once
    const node = todo.sort((a, b) => b.bytes - a.bytes).shift();
    if (n + node.below.length > ROWS_OPEN && node !== sole(root)) continue;
    n += node.below.length;
    expanded.add(node);
    todo.push(...node.below.map(sole).filter((each) => each.below.length));
  }
  head();
  controls();
  heads();
  details();
  draw();
  later(50);
})();
