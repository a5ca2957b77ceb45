// Draws the views that arrive at /events. Names are what tenants wrote: they become text nodes and nothing else. What is
// not known is `null`, and shown as "?".
"use strict";

const at = (id) => document.getElementById(id);

/** An element with properties and children; texts become text nodes. */
function el(tag, props, ...children) {
  const node = document.createElement(tag);
  const { data, style, label, ...rest } = props ?? {};
  Object.assign(node, rest);
  Object.assign(node.dataset, data);
  Object.assign(node.style, style);
  if (label) node.setAttribute("aria-label", label);
  node.append(...children.flat().filter((child) => child !== null && child !== ""));
  return node;
}

/** Replaces children, but keeps those that are the same, so that focus and reading position stay. */
function fill(parent, children) {
  children.forEach((child, index) => {
    const old = parent.children[index];
    if (!old) parent.append(child);
    else if (!old.isEqualNode(child)) replace(old, child);
  });
  while (parent.children.length > children.length) parent.lastElementChild.remove();
}

function replace(old, child) {
  const focused = old.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  old.replaceWith(child);
  if (focused) child.parentNode.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
}

function section(id, children) {
  at(`${id}-section`).hidden = children.length === 0;
  const link = document.querySelector(`nav a[href="#${id}-title"]`);
  if (link) link.hidden = children.length === 0;
  fill(at(id), children);
}

const text = (id, value) => { if (at(id).textContent !== value) at(id).textContent = value; };

function bytes(count) {
  if (count === null || count === undefined) return "?";
  if (count >= 2 ** 30) return `${Number((count / 2 ** 30).toFixed(1))} GiB`;
  return count >= 2 ** 20 ? `${Math.floor(count / 2 ** 20)} MiB` : `${count} B`;
}

const percent = (ratio) => (ratio === null ? "?" : `${Math.round(ratio * 100)} %`);

function span(seconds) {
  if (seconds < 120) return `${Math.floor(seconds)}s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)}m`;
  return seconds < 172800 ? `${Math.floor(seconds / 3600)}h` : `${Math.floor(seconds / 86400)}d`;
}

const since = (now, time) => (time ? ` for ${span(Math.max(0, (Date.parse(now) - Date.parse(time)) / 1000))}` : "");

/** The pod first: it is what people look for. The namespace comes second. */
const user = (hold) => (hold.pods.length === 1 ? hold.pods[0] : hold.claim);
const owner = (hold) => `${hold.namespace}/${user(hold)}`;

/** What is remarkable about a claim's part, in words. */
function notes(hold) {
  return [
    hold.idle ? `idle for ${span(hold.idleSeconds)}` : "",
    hold.overGrant ? "over its grant" : "",
    hold.phase === "prepared" ? "" : hold.phase,
  ].filter(Boolean);
}

/** What a claim was granted, with the limit of its memory where that is more. */
function granted(hold) {
  const limit = hold.memoryLimit > hold.memoryGranted ? ` (limit ${bytes(hold.memoryLimit)})` : "";
  return `${bytes(hold.memoryGranted)}${limit}`;
}

function describe(hold) {
  const pods = hold.pods.length ? `, pods ${hold.pods.join(", ")}` : "";
  return [`claim ${hold.namespace}/${hold.claim}${pods}`, hold.part, `memory granted ${granted(hold)}`,
    `used ${bytes(hold.memoryUsed)}`, `busy ${percent(hold.utilization)}`, ...notes(hold)].join(", ");
}

/** Places and grants of claims before they left: an allocation goes while its devices are still in use. */
const before = new Map();

function remembered(key, hold) {
  const old = before.get(key);
  if (hold.phase === "leaving" && hold.memoryGranted === null && old) {
    // The others in its partition have been placed without its grant: it has its new place among them.
    return { ...hold, place: hold.within ? hold.place : old.place, memoryGranted: old.memoryGranted };
  }
  before.set(key, { place: hold.place, memoryGranted: hold.memoryGranted });
  return hold;
}

/** Shares of a partition are drawn as shares, within a frame that is the partition. */
function look(gpu, hold) {
  if (!hold.within) return gpu.mode;
  return hold.device.endsWith("-mps") ? "mps" : "time-sliced";
}

/** Where something from 0 to 1 of the GPU is in its bar, or in the frame of its partition. */
function position([from, to], [start, end] = [0, 1]) {
  const at = (place) => (100 * (place - start)) / (end - start);
  return { left: `${at(from)}%`, width: `${at(to) - at(from)}%` };
}

function part(gpu, found) {
  const key = `${gpu.uuid} ${found.namespace}/${found.claim} ${found.device}`;
  const hold = remembered(key, found);
  const known = hold.memoryUsed !== null && hold.memoryGranted > 0;
  const width = known ? Math.min(100, (100 * hold.memoryUsed) / hold.memoryGranted) : 0;
  const classes = ["part", look(gpu, hold), hold.idle ? "idle" : "", hold.overGrant ? "over" : ""].filter(Boolean).join(" ");
  const used = `${bytes(hold.memoryUsed)} of ${granted(hold)}`;
  const second = [hold.namespace, hold.part, ...notes(hold), used].join(" · ");
  const name = hold.overGrant ? `! ${user(hold)}` : user(hold);
  return el("li", { style: position(hold.place, hold.within) },
    el("button", { type: "button", className: classes, title: describe(hold), label: describe(hold),
      data: { key, about: `claim/${hold.namespace}/${hold.claim}` } },
      known ? el("span", { className: "use" }, el("span", { className: "fill", style: { width: `${width}%` } })) : null,
      el("span", { className: "initial" }, name.slice(0, 1)),
      el("span", { className: "label" }, name),
      el("span", { className: "label second" }, second)));
}

/** What is left behind the end of the last part, if it is wide enough for a word. */
function rest(gpu, end, within = [0, 1]) {
  if (within[1] - end < 0.1 * (within[1] - within[0])) return null;
  const word = gpu.troubles.length ? "not available" : "free";
  return el("li", { className: "free", style: position([end, within[1]], within) }, el("span", null, word));
}

/** A partition with the claims that share it. */
function partition(gpu, holds) {
  const [{ within, part: words }] = holds;
  const end = Math.max(...holds.map((hold) => hold.place[1]));
  const name = `Claims in one partition of ${gpu.name}, each with a ${words}`;
  return el("li", { className: "shared", style: position(within) },
    el("ul", { label: name }, holds.map((hold) => part(gpu, hold)), rest(gpu, end, within)));
}

/** The parts of a GPU, by place: of each shared partition one frame. */
function parts(gpu) {
  const placed = gpu.holds.filter((hold) => hold.place);
  const isSame = (a, b) => a.within && b.within && a.within[0] === b.within[0];
  const drawn = placed.map((hold) => {
    if (!hold.within) return part(gpu, hold);
    const together = placed.filter((other) => isSame(hold, other));
    return together[0] === hold ? partition(gpu, together) : null;
  });
  const end = Math.max(0, ...placed.map((hold) => (hold.within ?? hold.place)[1]));
  return [...drawn.filter(Boolean), rest(gpu, end)];
}

/** A mode in words. */
const modeOf = (gpu) => ({ idle: "no claim", mps: "MPS" })[gpu.mode] ?? gpu.mode;

function gpuRow(node, gpu) {
  const about = `gpu/${node.name}/${gpu.name}`;
  const admins = gpu.holds.filter((hold) => !hold.place).map(owner);
  const memory = gpu.memoryUsed === null ? bytes(gpu.memory) : `${bytes(gpu.memoryUsed)} of ${bytes(gpu.memory)} in use`;
  const product = gpu.product.replace(/^NVIDIA /, "");
  const mode = modeOf(gpu);
  const said = [`${node.name} ${gpu.name}`, gpu.product, mode, `memory ${memory}`, ...gpu.troubles].filter(Boolean);
  const below = [
    gpu.troubles.length ? el("span", { className: "warn" }, `⚠ ${gpu.troubles.join(", ")} `) : "",
    admins.length ? `admin access: ${admins.join(", ")} ` : "",
    gpu.memoryUnattributed ? `${bytes(gpu.memoryUnattributed)} used outside of claims` : "",
  ].filter(Boolean);
  return el("li", { className: "gpu" },
    el("button", { type: "button", className: "name", label: said.join(", "), data: { key: about, about } },
      el("strong", null, `${gpu.name} · ${mode}`),
      [product, memory].filter(Boolean).map((line) => el("span", { className: "quiet" }, line))),
    el("ul", { className: "bar", label: `Claims on ${gpu.name}` }, parts(gpu)),
    below.length ? el("div", { className: "below" }, below) : null);
}

/** Nodes above this number are rows of cells, and only those with problems are open. */
const MANY = 8;
/** Nodes that were opened or closed by hand. */
const opened = new Map();

/** A cell per GPU, coloured by its mode. */
function heatRow(node, isOpen) {
  const cell = (gpu) => {
    const trouble = gpu.troubles.length > 0;
    const holds = gpu.holds.filter((hold) => hold.place);
    const said = [`${gpu.name}: ${modeOf(gpu)}`, ...gpu.troubles, holds.map(owner).join(", ")].filter(Boolean).join(", ");
    const idle = holds.length > 0 && holds.every((hold) => hold.idle);
    const about = `gpu/${node.name}/${gpu.name}`;
    return el("li", null, el("button", { type: "button", title: said, label: `${node.name} ${said}`,
      className: ["cell", gpu.mode === "idle" ? "" : gpu.mode, idle ? "idle" : "", trouble ? "trouble" : ""].filter(Boolean).join(" "),
      data: { key: `cell ${about}`, about } }, trouble ? "!" : ""));
  };
  const facts = `${node.free} of ${node.gpus.length} free`;
  return el("div", { className: "row" },
    el("button", { type: "button", className: "toggle", ariaExpanded: String(isOpen), data: { key: `open ${node.name}`, open: node.name } },
      `${isOpen ? "▾" : "▸"} ${node.name} `, el("span", { className: "quiet" }, facts)),
    el("ul", { className: "cells", label: `GPUs of ${node.name}` }, node.gpus.map(cell)));
}

/** A node among many. */
function nodeRow(node) {
  const inTrouble = node.trouble !== "" || node.gpus.some((gpu) => gpu.troubles.length);
  const isOpen = opened.get(node.name) ?? inTrouble;
  return el("section", { className: isOpen ? "node open" : "node", label: `Node ${node.name}` }, heatRow(node, isOpen),
    isOpen ? el("ul", { label: `GPUs of ${node.name} in full` }, node.gpus.map((gpu) => gpuRow(node, gpu))) : null);
}

/** Says whether a GPU is in the state that the filter names. */
const STATES = {
  "": () => true,
  free: (gpu) => !gpu.troubles.length && !gpu.holds.some((hold) => hold.place),
  held: (gpu) => gpu.holds.some((hold) => hold.place),
  idle: (gpu) => gpu.holds.some((hold) => hold.idle),
  trouble: (gpu) => gpu.troubles.length > 0,
};

/** Returns the nodes with the GPUs that fit the filter. */
function filtered(nodes) {
  const text = at("filter-text").value.trim().toLowerCase();
  const namespace = at("filter-namespace").value;
  const inState = STATES[at("filter-state").value];
  const has = (...names) => names.some((name) => name.toLowerCase().includes(text));
  const fits = (node, gpu) => inState(gpu)
    && (!namespace || gpu.holds.some((hold) => hold.namespace === namespace))
    && (!text || has(node.name, gpu.name, gpu.product)
      || gpu.holds.some((hold) => has(owner(hold), hold.claim, ...hold.pods)));
  const isSet = text || namespace || at("filter-state").value;
  if (!isSet) return nodes;
  return nodes.map((node) => ({ ...node, gpus: node.gpus.filter((gpu) => fits(node, gpu)) }))
    .filter((node) => node.gpus.length);
}

function namespaces(holds) {
  const names = [...new Set(holds.map(([, , hold]) => hold.namespace))].sort();
  const select = at("filter-namespace");
  const chosen = select.value;
  fill(select, ["", ...names].map((name) => el("option", { value: name }, name || "all namespaces")));
  select.value = names.includes(chosen) ? chosen : "";
}

function nodesOf(view) {
  const nodes = filtered(view.nodes);
  const many = nodes.length > MANY;
  at("nodes").classList.toggle("heat", many);
  if (!view.nodes.length) return [el("p", null, "No node reports GPUs.")];
  if (!nodes.length) return [el("p", null, "Nothing fits the filter.")];
  return nodes.map(many ? nodeRow : nodeCard);
}

function nodeCard(node) {
  const facts = [`${node.gpus.length} GPUs`, `${node.free} free`, node.driver ? `driver ${node.driver}` : ""].filter(Boolean);
  return el("section", { className: "node", label: `Node ${node.name}` },
    el("h3", null, node.name, " ", el("span", { className: "quiet" }, facts.join(" · "))),
    el("ul", { label: `GPUs of ${node.name}` }, node.gpus.map((gpu) => gpuRow(node, gpu))));
}

function holderRow(node, gpu, hold) {
  const claim = `${hold.namespace}/${hold.claim}`;
  const key = `row ${gpu.uuid} ${claim} ${hold.device}`;
  // Roles are written, since a table that is shown as cards loses them.
  const cell = (name, text, className = "") => el("td", { role: "cell", className, data: { name } }, text);
  return el("tr", { role: "row" },
    el("th", { scope: "row", role: "rowheader" },
      el("button", { type: "button", className: "link", data: { key, about: `claim/${claim}` } },
        hold.pods.join(", ") || hold.claim, el("span", { className: "quiet" }, ` ${hold.namespace}`))),
    cell("Claim", hold.claim),
    cell("Device", `${node.name} ${hold.device}`),
    cell("Granted", hold.part === "admin" ? "–" : granted(hold), "number"),
    cell("Used", bytes(hold.memoryUsed), "number"),
    cell("Busy", percent(hold.utilization), "number"),
    cell("Note", notes(hold).join(", ") || "–", notes(hold).length ? "" : "none"));
}

/** As `divvy top`: what is idle first, the longest before others; then by memory that is not used; the unknown last. */
function byWaste([, , a], [, , b]) {
  const idle = (hold) => (hold.idle ? hold.idleSeconds : -1);
  return idle(b) - idle(a) || (b.wasted ?? -1) - (a.wasted ?? -1) || owner(a).localeCompare(owner(b));
}

/** Rows of the table, until all are asked for. */
const ROWS = 50;
let allRows = false;

function holders(holds) {
  const rows = allRows ? holds : holds.slice(0, ROWS);
  at("more").hidden = rows.length === holds.length;
  text("more", `Show all ${holds.length}`);
  section("holders", rows.map((found) => holderRow(...found)));
}

/** A headline that opens what `divvy status` says of its subject. */
function headline(about, words) {
  return el("button", { type: "button", className: "link", data: { key: `card ${about} ${words}`, about } }, el("strong", null, words));
}

function trouble(now, entry) {
  const subject = entry.why.includes(entry.subject) ? "" : entry.subject;
  const place = [entry.node, entry.gpu, subject].filter(Boolean).join(" ");
  const about = entry.gpu ? `gpu/${entry.node}/${entry.gpu}` : `node/${entry.node}`;
  return el("li", null,
    headline(about, `${place}: ${entry.why}`), since(now, entry.since),
    entry.affects?.length ? el("p", null, `held by: ${entry.affects.join(", ")}`) : null,
    entry.remedy ? el("p", null, `do: ${entry.remedy}`) : null);
}

function refused(now, claim) {
  return el("li", null,
    headline(`claim/${claim.claim}`, `claim ${claim.claim}: refused, ${claim.reason}`), since(now, claim.since),
    claim.message.split("\n").map((line) => el("p", null, line)));
}

function waits(now, pod) {
  const others = pod.others ? ` and ${pod.others} more like it` : "";
  const why = pod.mistake || pod.cause || SENTENCES[pod.verdict] || pod.verdict;
  return el("li", null,
    headline(`claim/${pod.claims[0] ?? ""}`, `${pod.pod}${others}`), `${since(now, pod.since)}: ${why}`,
    pod.hint ? el("p", null, `do: ${pod.hint}`) : null,
    el("p", { className: "quiet" }, "more: ", el("code", null, `kubectl divvy status pod ${pod.pod}`)));
}

const SENTENCES = {
  "fits": "a node has room: the scheduler has not retried the pod yet, or another constraint holds it back",
  "no-room": "no room now: other claims hold the devices",
  "own-pods": "no room: pods of its own owner hold the devices, and end only when it is ready",
  "never-fits": "it fits on no node, even with all devices free",
  "mistake": "the claim cannot be allocated as written",
  "blocked": "blocked: other claims hold devices that exclude each other",
  "bypassed": "the pod's nodeName passes the scheduler by, and only the scheduler allocates claims",
  "unknown": "unknown: objects that decide this cannot be listed",
  "offline": "unknown: only the scheduler can evaluate it",
};

function freeCards(free) {
  const card = (name, value, more) => el("div", null, el("dt", null, name), el("dd", null, value, more ? el("small", null, ` ${more}`) : null));
  if (!free) return [card("whole GPUs", "?"), card("largest partition", "?"), card("memory for shares", "?")];
  return [
    card("whole GPUs", String(free.wholeGpus)),
    card("largest partition", free.largestPartition ?? "none"),
    card("memory for shares", bytes(free.shareMemory),
      free.shareMemory > free.largestShare ? `largest ${bytes(free.largestShare)}` : ""),
  ];
}

/** The view that is shown, and when it was read. */
let shown = null;
let readAt = 0;

function age() {
  if (!shown) return;
  const seconds = Math.max(0, Math.round((Date.now() - readAt) / 1000));
  text("age", [shown.cluster, `read ${span(seconds)} ago`].filter(Boolean).join(" · "));
}

function draw(view) {
  shown = view;
  const gpus = view.nodes.flatMap((node) => node.gpus.map((gpu) => [node, gpu]));
  const holds = gpus.flatMap(([node, gpu]) => gpu.holds.map((hold) => [node, gpu, hold]));
  const actions = view.troubles.filter((entry) => !entry.notice);
  at("caption").hidden = !view.caption;
  text("caption", view.caption ?? "");
  fill(at("free"), freeCards(view.free));
  section("troubles", [...actions.map((entry) => trouble(view.now, entry)), ...view.refused.map((claim) => refused(view.now, claim))]);
  section("waiting", view.waiting.map((pod) => waits(view.now, pod)));
  namespaces(holds);
  fill(at("nodes"), nodesOf(view));
  holders(holds.sort(byWaste));
  section("unread", view.unread.map((line) => el("li", null, line)));
  const count = (number, one, many) => `${number} ${number === 1 ? one : many}`;
  text("state", [
    "live", count(gpus.length, "GPU", "GPUs"), count(actions.length + view.refused.length, "problem", "problems"),
    count(view.waiting.length, "pod waits", "pods wait"),
  ].join(" · "));
}

async function about(what) {
  const answer = await fetch(`about?${what}`).then((response) => response.text(), () => "The program that serves this page has ended.");
  text("about-title", what.replace("/", " "));
  text("about-text", answer);
  at("about").showModal();
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-about]");
  if (button) about(button.dataset.about);
  const toggle = event.target.closest("[data-open]");
  if (toggle) {
    opened.set(toggle.dataset.open, toggle.ariaExpanded !== "true");
    fill(at("nodes"), nodesOf(shown));
  }
});
at("filter").addEventListener("input", () => shown && fill(at("nodes"), nodesOf(shown)));
at("filter").addEventListener("submit", (event) => event.preventDefault());
document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input, select, textarea, dialog");
  if (event.key !== "/" || typing || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  at("filter-text").focus();
});
setInterval(age, 1000);
at("more").addEventListener("click", () => {
  allRows = true;
  draw(shown);
  at("holders").children[ROWS]?.querySelector("button").focus();
});
at("about-close").addEventListener("click", () => at("about").close());

const events = new EventSource("events");
events.addEventListener("message", (event) => {
  const { view, problem } = JSON.parse(event.data);
  at("problem").hidden = !problem;
  text("problem", problem ? `The cluster cannot be read, and what is shown may be old: ${problem}` : "");
  if (view) {
    readAt = Date.parse(view.now) || Date.now();
    draw(view);
    age();
  }
});
events.addEventListener("error", () => text("state", "not live: the program that serves this page has ended or cannot be reached"));
