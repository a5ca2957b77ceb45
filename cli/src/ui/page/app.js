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

/** Lists of which all is shown, since somebody asked for it. */
const whole = new Set();

/** Returns the first of a list, and offers the others below it. */
function first(id, number, all) {
  const shown = whole.has(id) ? all : all.slice(0, number);
  at(`${id}-more`).hidden = shown.length === all.length;
  text(`${id}-more`, `Show all ${all.length}`);
  return shown;
}

/** URL of the documentation, where it is known. */
let docs = "";

/** Text with links of the documentation's pages. It may have words of a tenant. */
const linked = (words) => parted(words, /(docs\/[\w./-]+\.md(?:#[\w-]+)?)/, link);

/**
 * Text of a node or of this program with links, and commands that can be copied. Never of a tenant's words: an
 * administrator would run what they say.
 */
const rich = (words) => parted(words, /(docs\/[\w./-]+\.md(?:#[\w-]+)?|(?<=: |^)(?:kubectl|helm|divvy) [^\n]*$)/m,
  (part) => (part.startsWith("docs/") ? link(part) : command(part)));

const parted = (words, found, shown) => words.split(found).map((part, index) => (index % 2 ? shown(part) : part));
const link = (page) => (docs ? el("a", { href: `${docs}/${page.slice(5)}`, target: "_blank", rel: "noreferrer" }, page) : page);

/** A command, and a button that copies it. */
const command = (words) => el("span", { className: "command" }, el("code", null, words),
  el("button", { type: "button", className: "copy", label: `Copy ${words}`, data: { key: `copy ${words}`, copy: words } }, "copy"));

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

/** Nodes above this number are rows of cells; those with problems of their own are open below. */
const MANY = 8;
/** Nodes that were opened or closed by hand. */
const opened = new Map();

/** The part of a GPU that is held, from 0 to 1. */
const heldPart = (gpu) => gpu.holds.filter((hold) => hold.place && !hold.within).reduce((sum, { place }) => sum + place[1] - place[0], 0)
  + [...new Set(gpu.holds.filter((hold) => hold.within).map(({ within }) => within.join()))]
    .map((range) => range.split(",")).reduce((sum, [from, to]) => sum + (to - from), 0);

/** The place of the arrow keys among the nodes: only that is a stop of the Tab key. */
let roving = "";

/** What all nodes have at the end of their names says nothing. */
function domainOf(nodes) {
  const [, ...labels] = (nodes[0]?.name ?? "").split(".");
  const end = labels.length ? `.${labels.join(".")}` : "";
  return end && nodes.every((node) => node.name.endsWith(end)) ? end : "";
}

/** A cell per GPU, coloured by its mode, and filled as far as it is held. */
function heatRow(node, isOpen, domain) {
  const stop = (key) => (key === roving ? 0 : -1);
  const cell = (gpu) => {
    const trouble = gpu.troubles.length > 0;
    const holds = gpu.holds.filter((hold) => hold.place);
    const part = gpu.mode === "idle" ? 0 : heldPart(gpu);
    const held = holds.length ? `${percent(Math.min(1, part))} held by ${holds.map(owner).join(", ")}` : "";
    const said = [`${gpu.name}: ${modeOf(gpu)}`, ...gpu.troubles, held].filter(Boolean).join(", ");
    const idle = holds.length > 0 && holds.every((hold) => hold.idle);
    const about = `gpu/${node.name}/${gpu.name}`;
    const key = `cell ${about}`;
    return el("li", null, el("button", { type: "button", title: said, label: `${node.name} ${said}`, tabIndex: stop(key),
      className: ["cell", trouble ? "trouble" : ""].filter(Boolean).join(" "), data: { key, about } },
    gpu.mode === "idle" ? null : el("span", { className: `held ${gpu.mode}${idle ? " idle" : ""}`, style: { height: `${100 * Math.min(1, Math.max(part, 0.12))}%` } }),
    trouble ? el("b", null, "!") : null));
  };
  const facts = [node.trouble, `${node.free} of ${node.all ?? node.gpus.length} free`].filter(Boolean).join(" · ");
  const key = `open ${node.name}`;
  return el("div", { className: "row" },
    el("button", { type: "button", className: "toggle", title: node.name, ariaExpanded: String(isOpen), tabIndex: stop(key), data: { key, open: node.name } },
      `${isOpen ? "▾" : "▸"} ${domain ? node.name.slice(0, -domain.length) : node.name}`),
    el("ul", { className: "cells", label: `GPUs of ${node.name}` }, node.gpus.map(cell)),
    el("span", { className: node.trouble ? "facts warn" : "facts quiet" }, facts));
}

/** Returns the trouble that all GPUs of a node have: it is the node's. */
function commonTrouble(node) {
  const [one, ...others] = node.gpus.map((gpu) => gpu.troubles.join(", "));
  return one && others.length && others.every((other) => other === one) ? one : "";
}

/** The GPUs of a node in full. Those that only have the trouble of their node are one line. */
function gpuRows(node) {
  const common = commonTrouble(node);
  const rows = node.gpus.filter((gpu) => !common || gpu.holds.length);
  const left = node.gpus.length - rows.length;
  return [
    common ? el("p", { className: "warn" }, `⚠ ${common}: none of its GPUs is available`,
      left && rows.length ? `; ${left} without claims are not shown` : "") : null,
    el("ul", { label: `GPUs of ${node.name}` }, rows.map((gpu) => gpuRow(node, gpu))),
  ].filter(Boolean);
}

/** Returns whether a node among many is shown in full. */
function isOpen(node) {
  return opened.get(node.name) ?? (!commonTrouble(node) && node.gpus.some((gpu) => gpu.troubles.length));
}

/** Says whether a GPU is in the state that the filter names. */
const STATES = {
  "": () => true,
  free: (gpu) => !gpu.troubles.length && !gpu.holds.some((hold) => hold.place),
  held: (gpu) => gpu.holds.some((hold) => hold.place),
  idle: (gpu) => gpu.holds.some((hold) => hold.idle),
  trouble: (gpu) => gpu.troubles.length > 0,
};

/** What the filter asks for. */
const asked = () => ({
  text: at("filter-text").value.trim().toLowerCase(), namespace: at("filter-namespace").value, state: at("filter-state").value,
});

/** Returns the part of a view that fits the filter. */
function filtered(view) {
  const { text, namespace, state } = asked();
  if (!text && !namespace && !state) return view;
  const has = (...names) => names.some((name) => (name ?? "").toLowerCase().includes(text));
  const mine = (name) => !namespace || (name ?? "").split("/")[0] === namespace;
  const holdFits = (hold) => (!namespace || hold.namespace === namespace) && (!text || has(owner(hold), hold.claim, ...hold.pods));
  const gpuFits = (node, gpu) => STATES[state](gpu) && (!text || has(node.name, gpu.name, gpu.product) || gpu.holds.some(holdFits))
    && (!namespace || gpu.holds.some((hold) => hold.namespace === namespace));
  const nodes = view.nodes.map((node) => ({ ...node, all: node.gpus.length, gpus: node.gpus.filter((gpu) => gpuFits(node, gpu)) }))
    .filter((node) => node.gpus.length);
  const held = (entry) => entry.affects ?? [];
  return { ...view, nodes,
    troubles: view.troubles.filter((entry) => (!state || state === "trouble") && (!namespace || held(entry).some(mine))
      && has(entry.node, entry.gpu, entry.subject, entry.why, ...held(entry))),
    refused: view.refused.filter((claim) => !state && mine(claim.claim) && has(claim.claim, claim.message, ...(claim.pods ?? []))),
    waiting: view.waiting.filter((pod) => !state && mine(pod.pod) && has(pod.pod, pod.cause, ...pod.claims)),
    holdFits: (node, gpu, hold) => (!namespace || hold.namespace === namespace)
      && (holdFits(hold) || has(node.name, gpu.name, gpu.product)) };
}

/** Puts the filter and the opened nodes into the address, so that it can be sent to others. */
function remember() {
  const { text, namespace, state } = asked();
  const open = [...opened].filter(([, is]) => is).map(([name]) => name);
  const all = { q: text, ns: namespace, state, open: open.join(",") };
  const words = new URLSearchParams(Object.entries(all).filter(([, value]) => value)).toString();
  history.replaceState(null, "", words ? `#${words}` : location.pathname);
}

/** Namespace of the address, until a view has it. */
let wanted = "";

function recall() {
  const words = new URLSearchParams(location.hash.slice(1));
  at("filter-text").value = words.get("q") ?? "";
  at("filter-state").value = words.get("state") ?? "";
  wanted = words.get("ns") ?? "";
  for (const name of (words.get("open") ?? "").split(",").filter(Boolean)) opened.set(name, true);
}

function namespaces(view, holds) {
  const waiting = view.waiting.map((pod) => pod.pod.split("/")[0]);
  const names = [...new Set([...holds.map(([, , hold]) => hold.namespace), ...waiting])].sort();
  const select = at("filter-namespace");
  const chosen = select.value || wanted;
  wanted = "";
  fill(select, ["", ...names].map((name) => el("option", { value: name }, name || "all namespaces")));
  select.value = names.includes(chosen) ? chosen : "";
}

function drawNodes(view, nodes) {
  const many = nodes.length > MANY;
  at("nodes").classList.toggle("heat", many);
  const domain = domainOf(nodes);
  const keys = nodes.flatMap((node) => [`open ${node.name}`, ...node.gpus.map((gpu) => `cell gpu/${node.name}/${gpu.name}`)]);
  if (!keys.includes(roving)) [roving = ""] = keys;
  const none = view.nodes.length ? "Nothing fits the filter." : view.empty ?? "No node reports GPUs.";
  const drawn = many
    ? nodes.map((node) => el("section", { className: "node", label: `Node ${node.name}` }, heatRow(node, isOpen(node), domain)))
    : nodes.map(nodeCard);
  fill(at("nodes"), drawn.length ? drawn : [el("p", null, rich(none))]);
  fill(at("open"), many ? nodes.filter(isOpen).map(nodeCard) : []);
  legend(nodes);
}

/** Shows of the legend what occurs. */
function legend(nodes) {
  const gpus = nodes.flatMap((node) => node.gpus);
  const holds = gpus.flatMap((gpu) => gpu.holds);
  const occurs = new Set([...gpus.map((gpu) => gpu.mode), holds.some((hold) => hold.within) ? "frame" : "",
    holds.some((hold) => hold.memoryUsed) ? "in-use" : "", holds.some((hold) => hold.idle) ? "idle" : "",
    nodes.length > MANY && holds.length ? "height" : ""]);
  for (const item of at("legend").children) item.hidden = !occurs.has(item.dataset.for);
}

function nodeCard(node) {
  const number = node.all ? `${node.gpus.length} of ${node.all}` : node.gpus.length;
  const facts = [`${number} GPUs`, `${node.free} free`, node.driver ? `driver ${node.driver}` : "", node.trouble].filter(Boolean);
  return el("section", { className: "node", label: `Node ${node.name}` },
    el("h3", null, node.name, " ", el("span", { className: "quiet" }, facts.join(" · "))), gpuRows(node));
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

/** Rows of the table, cards of problems and of reasons, until all are asked for. */
const ROWS = matchMedia("(max-width: 45rem)").matches ? 8 : 20;
const CARDS = 10;

function holders(holds) {
  section("holders", first("holders", ROWS, holds).map((found) => holderRow(...found)));
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
    entry.affects?.length ? el("p", null, `held by: ${some(entry.affects)}`) : null,
    entry.remedy ? el("p", null, "do: ", rich(entry.remedy)) : null);
}

function refused(now, claim) {
  return el("li", null,
    headline(`claim/${claim.claim}`, `claim ${claim.claim}: refused, ${claim.reason}`), since(now, claim.since),
    claim.message.split("\n").map((line) => el("p", null, linked(line))));
}

/** Names of a list that may be long. */
const some = (names) => (names.length > 4 ? `${names.slice(0, 3).join(", ")} and ${names.length - 3} more` : names.join(", "));

const reason = (pod) => pod.mistake || pod.cause || SENTENCES[pod.verdict] || pod.verdict;

/** Pods that wait for the same reason. Those that have waited longest come first. */
function grouped(pods) {
  const groups = new Map();
  for (const pod of pods) {
    const key = `${reason(pod)}\n${pod.hint ?? ""}`;
    groups.set(key, [...(groups.get(key) ?? []), pod]);
  }
  const oldest = (pod) => Date.parse(pod.since) || Infinity;
  return [...groups.values()].map((group) => group.sort((a, b) => oldest(a) - oldest(b)))
    .sort(([a], [b]) => oldest(a) - oldest(b));
}

function waits(now, pods) {
  const [longest] = pods;
  const number = pods.reduce((sum, pod) => sum + 1 + (pod.others ?? 0), 0);
  const key = `pods ${reason(longest)}`;
  const shown = whole.has(key) ? pods : pods.slice(0, 3);
  const name = (pod) => {
    const others = pod.others ? ` and ${pod.others} more like it` : "";
    return el("li", null, headline(`claim/${pod.claims[0] ?? ""}`, `${pod.pod}${others}`), since(now, pod.since));
  };
  const left = pods.length - shown.length;
  return el("li", null,
    el("p", null, el("strong", null, number === 1 ? "" : `${number} pods: `), linked(reason(longest))),
    el("ul", { className: "names" }, shown.map(name),
      left ? el("li", null, el("button", { type: "button", className: "link", data: { key, all: key } }, `and ${left} more`)) : null),
    longest.hint ? el("p", null, "do: ", linked(longest.hint)) : null,
    el("p", { className: "quiet" }, "more: ", command(`kubectl divvy status pod ${longest.pod}`)));
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

function freeNow(free) {
  const item = (name, value, more) => el("div", null, el("dt", null, name), el("dd", null, value, more ? el("small", null, ` ${more}`) : null));
  if (!free) return [item("whole GPUs", "?"), item("largest partition", "?"), item("memory for shares", "?")];
  return [
    item("whole GPUs", String(free.wholeGpus), fullFor(free)),
    item("largest partition", free.largestPartition ?? "none"),
    item("memory for shares", bytes(free.shareMemory),
      free.shareMemory > free.largestShare ? `largest ${bytes(free.largestShare)}` : ""),
  ];
}

/** Free whole GPUs and waiting pods of the last minutes, as far as this page has seen them. */
const seen = [];
const SEEN_FOR = 15 * 60 * 1000;

function note(view) {
  const time = Date.parse(view.now) || Date.now();
  if (!view.free || seen.at(-1)?.time === time) return;
  // A clock that was set back.
  if (seen.at(-1)?.time > time) seen.length = 0;
  seen.push({ time, free: view.free.wholeGpus, waiting: view.waiting.length });
  while (seen.length && seen[0].time < time - SEEN_FOR) seen.shift();
}

/** Since when no GPU is free. */
function fullFor(free) {
  if (free.wholeGpus > 0 || !seen.length) return "";
  const last = seen.findLastIndex((one) => one.free > 0);
  const from = seen[last + 1];
  const lasted = span((seen.at(-1).time - from.time) / 1000);
  return last < 0 ? `none since this page looks, ${lasted}` : `none for ${lasted}`;
}

/** A line of the free whole GPUs of the last minutes. */
function trend() {
  if (seen.length < 2) return [];
  const [width, height] = [160, 28];
  const [start, end] = [seen[0].time, seen.at(-1).time];
  const most = Math.max(1, ...seen.map((one) => one.free));
  const points = seen.map((one) => `${(width * (one.time - start)) / Math.max(1, end - start)},${height - 1 - ((height - 2) * one.free) / most}`);
  const make = (tag, attributes) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    return node;
  };
  const words = `free whole GPUs of the last ${span((end - start) / 1000)}: from ${seen[0].free} to ${seen.at(-1).free}`;
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": words });
  svg.append(make("polyline", { points: points.join(" ") }));
  return [svg, el("span", { className: "quiet" }, words)];
}

/** The view that is shown, and when it was read. */
let shown = null;
let readAt = 0;

function age() {
  if (!shown) return;
  const seconds = Math.max(0, Math.round((Date.now() - readAt) / 1000));
  text("age", shown.saved ? `saved ${shown.now}` : `read ${span(seconds)} ago`);
}

function draw(view) {
  shown = view;
  note(view);
  at("content").hidden = false;
  at("caption").hidden = !view.caption;
  text("caption", view.caption ?? "");
  text("title", view.cluster ? `GPUs of ${view.cluster}` : "GPUs of the cluster");
  namespaces(view, allHolds(view));
  at("unknown").hidden = !view.unread.length;
  const count = (number, one, many) => `${number} ${number === 1 ? one : many}`;
  fill(at("unknown"), view.unread.length ? [el("span", null, `Not everything is known: ${view.unread[0].split("\n")[0]} `),
    el("a", { href: "#unread-title" }, view.unread.length > 1 ? `and ${view.unread.length - 1} more` : "in full")] : []);
  section("unread", view.unread.map((line) => el("li", null, linked(line))));
  fill(at("free"), freeNow(view.free));
  fill(at("trend"), trend());
  const actions = view.troubles.filter((entry) => !entry.notice).length + view.refused.length;
  const gpus = view.nodes.reduce((sum, node) => sum + node.gpus.length, 0);
  document.title = `${actions ? `(${actions}) ` : ""}${view.cluster ?? "GPUs"} · divvy`;
  text("state", [
    "live", count(gpus, "GPU", "GPUs"), count(actions, "problem", "problems"), count(view.waiting.length, "pod waits", "pods wait"),
  ].join(" · "));
  drawFiltered();
}

/** All GPUs' parts with their nodes. */
const allHolds = (view) => view.nodes.flatMap((node) => node.gpus.flatMap((gpu) => gpu.holds.map((hold) => [node, gpu, hold])));

/** Draws what the filter leaves. */
function drawFiltered() {
  const view = filtered(shown);
  const fits = view.holdFits ?? (() => true);
  const gpus = (of) => of.nodes.reduce((sum, node) => sum + node.gpus.length, 0);
  at("clear").hidden = view === shown;
  text("found", view === shown ? "" : `${gpus(view)} of ${gpus(shown)} GPUs, ${view.waiting.length} of ${shown.waiting.length} waiting pods`);
  const actions = view.troubles.filter((entry) => !entry.notice);
  const cards = [...actions.map((entry) => trouble(view.now, entry)), ...view.refused.map((claim) => refused(view.now, claim))];
  fill(at("troubles"), cards.length ? first("troubles", CARDS, cards) : [el("li", { className: "nothing" }, view === shown ? "nothing" : "nothing that fits the filter")]);
  at("troubles-more").hidden ||= !cards.length;
  section("waiting", first("waiting", CARDS, grouped(view.waiting)).map((pods) => waits(view.now, pods)));
  drawNodes(shown, view.nodes);
  holders(allHolds(view).filter((found) => fits(...found)).sort(byWaste));
}

async function about(what) {
  const answer = await fetch(`about?${what}`).then((response) => response.text(), () => "The program that serves this page has ended.");
  text("about-title", what.replace("/", " "));
  text("about-text", answer);
  at("about").showModal();
}

const KEYS = `/         filter
j, k      next and previous entry
arrows    among the GPUs of many nodes
Enter     what divvy status says of it
Esc       close, or clear the filter
?         this list`;

function help() {
  text("about-title", "Keys");
  text("about-text", KEYS);
  at("about").showModal();
}

function setFilter(value) {
  at("filter-text").value = value;
  at("filter-namespace").value = value;
  at("filter-state").value = value;
  changed();
}

function changed() {
  remember();
  if (shown) drawFiltered();
}

async function copy(button) {
  await navigator.clipboard.writeText(button.dataset.copy);
  button.textContent = "copied";
}

document.addEventListener("click", (event) => {
  const on = (what) => event.target.closest(`[data-${what}]`);
  const button = on("about");
  if (button) about(button.dataset.about);
  const toggle = on("open");
  if (toggle) {
    opened.set(toggle.dataset.open, toggle.ariaExpanded !== "true");
    changed();
  }
  const all = on("all");
  if (all) {
    whole.add(all.dataset.all);
    drawFiltered();
    if (all.dataset.all === "holders") at("holders").children[ROWS]?.querySelector("button").focus();
  }
  if (on("copy")) copy(on("copy"));
  // The address is the filter's.
  const link = event.target.closest("a[href^='#']");
  if (link) {
    event.preventDefault();
    const target = document.querySelector(link.getAttribute("href"));
    target.tabIndex = -1;
    target.scrollIntoView();
    target.focus();
  }
});
at("filter").addEventListener("input", changed);
at("filter").addEventListener("submit", (event) => event.preventDefault());
at("clear").addEventListener("click", () => setFilter(""));
at("keys").addEventListener("click", help);
addEventListener("hashchange", () => { recall(); if (shown) draw(shown); });

/** Moves among the cells of many nodes. Returns whether there was somewhere to go. */
function move(key) {
  const now = document.activeElement.closest(".heat [data-key]");
  if (!now) return false;
  const rows = [...document.querySelectorAll(".heat .row")].map((row) => [...row.querySelectorAll("[data-key]")]);
  const y = rows.findIndex((row) => row.includes(now));
  const x = rows[y].indexOf(now);
  const [down, right] = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[key];
  const row = rows[y + down] ?? rows[y];
  const to = row[Math.max(0, Math.min(row.length - 1, x + right))];
  now.tabIndex = -1;
  to.tabIndex = 0;
  roving = to.dataset.key;
  to.focus();
  return true;
}

/** Goes to the next entry of the page, or the one before. */
function step(by) {
  const all = [...document.querySelectorAll("main [data-about], main [data-open]")].filter((one) => one.checkVisibility());
  const now = all.indexOf(document.activeElement);
  all[Math.max(0, Math.min(all.length - 1, now + by))]?.focus();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape" && event.target.closest("#filter")) setFilter("");
  if (event.target.closest("input, select, textarea, dialog")) return;
  const keys = { "/": () => at("filter-text").focus(), j: () => step(1), k: () => step(-1), "?": help };
  const isArrow = event.key.startsWith("Arrow") && move(event.key);
  if (!isArrow && !keys[event.key]) return;
  event.preventDefault();
  keys[event.key]?.();
});
setInterval(age, 1000);
at("about-close").addEventListener("click", () => at("about").close());
recall();

const events = new EventSource("events");
events.addEventListener("message", (event) => {
  const said = JSON.parse(event.data);
  docs = said.docs ?? "";
  at("problem").hidden = !said.problem;
  const old = said.view || shown ? "The cluster cannot be read, and what is shown may be old" : "The cluster cannot be read";
  text("problem", said.problem ? `${old}: ${said.problem}. Tried again every ${said.every} s.` : "");
  if (!said.view && !shown) text("state", "not connected");
  if (said.view) {
    readAt = Date.parse(said.view.now) || Date.now();
    draw(said.view);
    age();
  }
});
events.addEventListener("error", () => text("state", "not live: the program that serves this page has ended or cannot be reached"));
