// A trace: rounds with their trees. The data are documented in sage/tracing/trace_page.py.
const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg", COLUMN = 148, ROW = 34, LABEL = 14;
const byId = (id) => document.getElementById(id);
const percent = (value) => (value === null || value === undefined ? "-" : `${(value / 100).toFixed(value < 1000 ? 1 : 0)}%`);
const shown = (text) => (text === "" ? "\u2205" : text.replace(/\n/g, "\u23ce").replace(/\t/g, "\u21e5").replace(/ /g, "\u00b7"));
const quoted = (token) => `\u201c${shown(data.texts[token])}\u201d`;
const counted = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
const spans = [...document.querySelectorAll("#answer > span")];

function element(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function html(name, className, ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

// -- the tree of a round

function outcome(round, node) {
  if (node === 0) return "root";
  if (round.path.includes(node)) return "accepted";
  return node < round.verified ? "rejected" : "skipped";
}

function placed(round) { // column and row of every node; the first child continues the row of its parent
  const children = round.parents.map(() => []);
  round.parents.forEach((parent, node) => parent >= 0 && children[parent].push(node));
  const rank = (node) => (round.path.includes(node) ? 2 : node < round.verified ? 1 : 0);
  children.forEach((own) => own.sort((a, b) => rank(b) - rank(a) || round.draft[b] - round.draft[a] || a - b));
  const end = round.path[round.path.length - 1], places = [], choice = { column: 0, row: 0 };
  let row = 0, deepest = 0;
  const stack = [[0, 0, true]];
  while (stack.length) {
    const [node, column, isFirst] = stack.pop();
    if (!isFirst) row += 1;
    places[node] = { column, row };
    deepest = Math.max(deepest, column);
    const hasChoice = node === end && round.bonus !== null;
    if (hasChoice) {
      Object.assign(choice, { column: column + 1, row });
      deepest = Math.max(deepest, column + 1);
    }
    for (let i = children[node].length - 1; i >= 0; i -= 1) {
      stack.push([children[node][i], column + 1, i === 0 && !hasChoice]);
    }
  }
  return { places, choice, columns: deepest + 1, rows: row + 1 };
}

function edge(from, to, className, width) {
  const [x0, y0, x1, y1] = [point(from).x, point(from).y, point(to).x, point(to).y];
  const middle = from.row === to.row ? `L${x1} ${y1}` : `C${x0 + 26} ${y0} ${x0 + 8} ${y1} ${x0 + 40} ${y1}L${x1} ${y1}`;
  return element("path", { class: `edge ${className}`, d: `M${x0} ${y0}${middle}`, "stroke-width": width.toFixed(1) });
}

const point = ({ column, row }) => ({ x: 14 + column * COLUMN, y: 18 + row * ROW });
const short = (text) => (text.length > LABEL ? `${text.slice(0, LABEL - 1)}\u2026` : text);

function label(place, name, figures) {
  const { x, y } = point(place);
  return [
    element("text", { class: "name", x: x + 11, y: y - 5 }, short(shown(name))),
    element("text", { class: "figures", x: x + 11, y: y + 13 }, figures),
  ];
}

function figuresOf(round, node) {
  const calibrated = round.calibrated ? ` (${percent(round.calibrated[node])})` : "";
  const target = node < round.verified ? ` \u2192 ${percent(round.target[node])}` : "";
  return `${percent(round.draft[node])}${calibrated}${target}`;
}

function described(round, node) {
  const kind = { accepted: "accepted", rejected: "verified, not accepted", skipped: "drafted, not verified", root: "last token" };
  const parts = [`${quoted(round.nodes[node])}: ${kind[outcome(round, node)]}`];
  if (node > 0) parts.push(`draft ${percent(round.draft[node])}`);
  if (node > 0 && round.calibrated) parts.push(`calibrated ${percent(round.calibrated[node])}`);
  if (node > 0 && node < round.verified) parts.push(`target ${percent(round.target[node])}`);
  return parts.join(", ");
}

function drawTree(round) {
  const { places, choice, columns, rows } = placed(round), edges = [], marks = [];
  round.nodes.forEach((token, node) => {
    const kind = outcome(round, node), { x, y } = point(places[node]);
    if (node > 0) edges.push(edge(places[round.parents[node]], places[node], kind, 1 + (3 * round.draft[node]) / 10000));
    const mark = node === 0 ? element("rect", { x: x - 5, y: y - 5, width: 10, height: 10, rx: 2 })
      : element("circle", { cx: x, cy: y, r: kind === "skipped" ? 4 : 5.5 });
    const text = label(places[node], data.texts[token], node === 0 ? "" : figuresOf(round, node));
    marks.push(element("g", { class: `node ${kind}`, "data-node": node }, element("title", {}, described(round, node)), mark, ...text));
  });
  if (round.bonus) {
    const { x, y } = point(choice), [token, target, draft, rank] = round.bonus;
    edges.push(edge(places[round.path[round.path.length - 1]], choice, "bonus", 1.5));
    const known = draft === null ? "not among the draft's candidates" : `the draft's candidate ${rank + 1}, ${percent(draft)}`;
    const title = element("title", {}, `${quoted(token)}: the target's own, ${percent(target)}; ${known}`);
    const mark = element("path", { d: `M${x} ${y - 7}L${x + 7} ${y}L${x} ${y + 7}L${x - 7} ${y}Z` });
    const figures = `${draft === null ? "-" : percent(draft)} \u2192 ${percent(target)}`;
    marks.push(element("g", { class: "choice" }, title, mark, ...label(choice, data.texts[token], figures)));
  }
  const tree = byId("tree"), width = columns * COLUMN + 20, height = rows * ROW + 14;
  tree.setAttribute("viewBox", `0 0 ${width} ${height}`);
  tree.setAttribute("width", width);
  tree.setAttribute("height", height);
  tree.setAttribute("aria-label", byId("summary").textContent);
  tree.replaceChildren(...edges, ...marks);
}

// -- the current round

let current = 0, pinned = 0; // the round shown, and the one to return to after pointing at a token

function summarize(round, number) {
  const verified = round.verified - 1, drafted = round.nodes.length - 1 + round.omitted;
  const proposed = drafted === 0 ? "Nothing was drafted" : `${counted(drafted, "node")} drafted, ${verified} verified`;
  const own = round.bonus ? `, then the target's own ${quoted(round.bonus[0])}` : "; the answer ended there";
  return `Round ${number} of ${data.rounds.length}: ${proposed}; ${counted(round.accepted, "token")} accepted${own}.`;
}

function showStages(round) {
  const parts = Object.entries(round.ms).filter(([, ms]) => ms > 0), total = parts.reduce((sum, [, ms]) => sum + ms, 0);
  byId("stages").replaceChildren(...parts.map(([phase, ms]) => {
    const part = html("span", phase);
    part.style.flexGrow = ms / (total || 1);
    part.title = `${data.phases[phase] || phase}: ${ms.toFixed(2)} ms`;
    return part;
  }));
  byId("stages").setAttribute("aria-label", `Time by stage, ${total.toFixed(2)} ms in total`);
  const items = parts.map(([phase, ms]) => html("li", "", html("span", `key ${phase}`), `${data.phases[phase] || phase} ${ms.toFixed(2)} ms`));
  byId("stage-legend").replaceChildren(html("li", "", `${total.toFixed(2)} ms:`), ...items);
}

function show(number) {
  if (number === current) return;
  current = number;
  const round = data.rounds[number - 1];
  byId("slider").value = number;
  byId("slider").setAttribute("aria-valuetext", `round ${number} of ${data.rounds.length}`);
  byId("number").textContent = `${number} of ${data.rounds.length}`;
  byId("now").setAttribute("x", number - 1);
  byId("summary").textContent = summarize(round, number);
  byId("reason").textContent = round.reason ? `The policy: ${round.reason}.` : "";
  const facts = Object.entries(round.figures).map(([name, value]) => [data.names[name] || name.replace(/_/g, " "), value]);
  byId("figures").replaceChildren(...facts.map(([name, value]) => html("div", "", html("dt", "", name), html("dd", "", String(value)))));
  byId("omitted").textContent = round.omitted ? `${round.omitted} less probable nodes were drafted and not verified; they are not drawn.` : "";
  showStages(round);
  drawTree(round);
  spans.forEach((span) => span.classList.toggle("now", Number(span.dataset.round) === number));
}

function pin(number) {
  pinned = Math.min(Math.max(number, 1), data.rounds.length);
  show(pinned);
  try { history.replaceState(null, "", `#round-${pinned}`); } catch { /* in a frame without an address */ }
}

function fromAddress() {
  const found = /^#round-(\d+)$/.exec(location.hash);
  return found ? Number(found[1]) : null;
}

function connectRounds() {
  byId("slider").addEventListener("input", () => pin(Number(byId("slider").value)));
  byId("previous").addEventListener("click", () => pin(pinned - 1));
  byId("next").addEventListener("click", () => pin(pinned + 1));
  byId("strip").addEventListener("click", (event) => {
    const box = byId("strip").getBoundingClientRect();
    pin(1 + Math.floor(((event.clientX - box.left) / box.width) * data.rounds.length));
  });
  const roundOf = (event) => Number(event.target.dataset && event.target.dataset.round) || null;
  byId("answer").addEventListener("pointerover", (event) => roundOf(event) && show(roundOf(event)));
  byId("answer").addEventListener("pointerleave", () => show(pinned));
  byId("answer").addEventListener("click", (event) => roundOf(event) && pin(roundOf(event)));
  addEventListener("hashchange", () => {
    if (fromAddress()) {
      pin(fromAddress());
      byId("round-title").scrollIntoView();
    }
  });
  addEventListener("keydown", (event) => {
    if (event.target.closest("input, summary, .scroll") || event.altKey || event.ctrlKey || event.metaKey) return;
    const steps = { ArrowLeft: pinned - 1, ArrowRight: pinned + 1, Home: 1, End: data.rounds.length };
    if (!(event.key in steps)) return;
    pin(steps[event.key]);
    event.preventDefault();
  });
  pin(fromAddress() || 1);
}

if (data.rounds.length) connectRounds();
