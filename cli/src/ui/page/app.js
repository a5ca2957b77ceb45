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
  if (seconds < 7200) return `${Math.floor(seconds / 60)}m`;
  return seconds < 172800 ? `${Math.floor(seconds / 3600)}h` : `${Math.floor(seconds / 86400)}d`;
}

const since = (now, time) => (time ? ` for ${span(Math.max(0, (Date.parse(now) - Date.parse(time)) / 1000))}` : "");

const owner = (hold) => `${hold.namespace}/${hold.pods.length === 1 ? hold.pods[0] : hold.claim}`;

/** What is remarkable about a claim's part, in words. */
function notes(hold) {
  return [
    hold.idle ? `idle for ${span(hold.idleSeconds)}` : "",
    hold.overGrant ? "over its grant" : "",
    hold.phase === "prepared" ? "" : hold.phase,
  ].filter(Boolean);
}

function describe(hold) {
  const pods = hold.pods.length ? `, pods ${hold.pods.join(", ")}` : "";
  return [`claim ${hold.namespace}/${hold.claim}${pods}`, hold.part, `memory granted ${bytes(hold.memoryGranted)}`,
    `used ${bytes(hold.memoryUsed)}`, `busy ${percent(hold.utilization)}`, ...notes(hold)].join(", ");
}

function part(gpu, hold) {
  const known = hold.memoryUsed !== null && hold.memoryGranted > 0;
  const width = known ? Math.min(100, (100 * hold.memoryUsed) / hold.memoryGranted) : 0;
  const classes = ["part", gpu.mode, hold.idle ? "idle" : "", hold.overGrant ? "over" : ""].filter(Boolean).join(" ");
  const used = known ? `${bytes(hold.memoryUsed)} of ${bytes(hold.memoryGranted)}` : `use unknown, ${bytes(hold.memoryGranted)}`;
  const second = [hold.part, ...notes(hold), used].join(" · ");
  const [from, to] = hold.place;
  return el("li", { style: { left: `${100 * from}%`, width: `${100 * (to - from)}%` } },
    el("button", { type: "button", className: classes, title: describe(hold), label: describe(hold),
      data: { key: `${gpu.uuid} ${hold.namespace}/${hold.claim} ${hold.device}`, about: `claim/${hold.namespace}/${hold.claim}` } },
      known ? el("span", { className: "use" }, el("span", { className: "fill", style: { width: `${width}%` } })) : null,
      el("span", { className: "label" }, owner(hold)),
      el("span", { className: "label second" }, second)));
}

/** The bar's free end, if it is wide enough for a word. */
function rest(gpu) {
  const end = Math.max(0, ...gpu.holds.map((hold) => hold.place?.[1] ?? 0));
  if (end > 0.9) return null;
  const word = gpu.troubles.length ? "not available" : "free";
  return el("li", { className: "free", style: { left: `${100 * end}%`, width: `${100 * (1 - end)}%` } }, word);
}

function gpuRow(node, gpu) {
  const about = `gpu/${node.name}/${gpu.name}`;
  const placed = gpu.holds.filter((hold) => hold.place);
  const admins = gpu.holds.filter((hold) => !hold.place).map(owner);
  const memory = gpu.memoryUsed === null ? bytes(gpu.memory) : `${bytes(gpu.memoryUsed)} of ${bytes(gpu.memory)} in use`;
  const product = gpu.product.replace(/^NVIDIA /, "");
  const mode = gpu.mode === "idle" ? "no claim" : gpu.mode;
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
    el("ul", { className: "bar", label: `Claims on ${gpu.name}` }, placed.map((hold) => part(gpu, hold)), rest(gpu)),
    below.length ? el("div", { className: "below" }, below) : null);
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
  return el("tr", null,
    el("th", { scope: "row" }, el("button", { type: "button", data: { key, about: `claim/${claim}` } }, claim)),
    el("td", null, hold.pods.join(", ") || "–"),
    el("td", null, `${node.name} ${hold.device}`),
    el("td", { className: "number" }, hold.part === "admin" ? "–" : bytes(hold.memoryGranted)),
    el("td", { className: "number" }, bytes(hold.memoryUsed)),
    el("td", { className: "number" }, percent(hold.utilization)),
    el("td", null, notes(hold).join(", ") || "–"));
}

/** As `divvy top`: what is idle first, the longest before others; then by memory that is not used; the unknown last. */
function byWaste([, , a], [, , b]) {
  const idle = (hold) => (hold.idle ? hold.idleSeconds : -1);
  return idle(b) - idle(a) || (b.wasted ?? -1) - (a.wasted ?? -1) || owner(a).localeCompare(owner(b));
}

function trouble(now, entry) {
  const place = [entry.node, entry.gpu, entry.subject].filter(Boolean).join(" ");
  return el("li", null,
    el("strong", null, `${place}: ${entry.kind}${since(now, entry.since)}`),
    el("p", null, entry.why),
    entry.affects?.length ? el("p", null, `held by: ${entry.affects.join(", ")}`) : null,
    entry.remedy ? el("p", null, `do: ${entry.remedy}`) : null);
}

function refused(now, claim) {
  return el("li", null,
    el("strong", null, `claim ${claim.claim}: refused, ${claim.reason}${since(now, claim.since)}`),
    claim.message.split("\n").map((line) => el("p", null, line)));
}

function waits(now, pod) {
  const others = pod.others ? ` and ${pod.others} more like it` : "";
  const reasons = pod.nodes.map((alike) => `${alike.nodes.slice(0, 3).join(", ")}: ${alike.reasons.join("; ")}`);
  const why = pod.mistake ? [pod.mistake] : reasons.slice(0, 4);
  return el("li", null,
    el("strong", null, `${pod.pod}${others}`), `${since(now, pod.since)}: ${SENTENCES[pod.verdict] ?? pod.verdict}`,
    why.map((line) => el("p", { className: "quiet" }, line)),
    pod.hint ? el("p", null, `do: ${pod.hint}`) : null);
}

const SENTENCES = {
  "fits": "a node has room: the scheduler has not retried the pod yet, or another constraint holds it back",
  "no-room": "no room now: other claims hold the devices",
  "never-fits": "it fits on no node, even with all devices free",
  "mistake": "the claim cannot be allocated as written",
  "unknown": "unknown: objects that decide this cannot be listed",
  "offline": "unknown: only the scheduler can evaluate it",
};

function freeCards(free) {
  const card = (name, value, more) => el("div", null, el("dt", null, name), el("dd", null, value, more ? el("small", null, ` ${more}`) : null));
  if (!free) return [card("whole GPUs", "?"), card("largest partition", "?"), card("memory for shares", "?")];
  return [
    card("whole GPUs", String(free.wholeGpus)),
    card("largest partition", free.largestPartition ?? "none"),
    card("memory for shares", bytes(free.shareMemory), free.shareMemory ? `largest ${bytes(free.largestShare)}` : ""),
  ];
}

function draw(view) {
  const gpus = view.nodes.flatMap((node) => node.gpus.map((gpu) => [node, gpu]));
  const holds = gpus.flatMap(([node, gpu]) => gpu.holds.map((hold) => [node, gpu, hold]));
  const actions = view.troubles.filter((entry) => !entry.notice);
  at("caption").hidden = !view.caption;
  text("caption", view.caption ?? "");
  fill(at("free"), freeCards(view.free));
  section("troubles", [...actions.map((entry) => trouble(view.now, entry)), ...view.refused.map((claim) => refused(view.now, claim))]);
  section("waiting", view.waiting.map((pod) => waits(view.now, pod)));
  fill(at("nodes"), view.nodes.length ? view.nodes.map(nodeCard) : [el("p", null, "No node reports GPUs.")]);
  section("holders", holds.sort(byWaste).map((found) => holderRow(...found)));
  section("unread", view.unread.map((line) => el("li", null, line)));
  const count = (number, one, many) => `${number} ${number === 1 ? one : many}`;
  text("state", [
    "live", count(gpus.length, "GPU", "GPUs"), count(actions.length + view.refused.length, "problem", "problems"),
    count(view.waiting.length, "pod waits", "pods wait"),
  ].join(" · "));
}

async function about(what) {
  const answer = await fetch(`/about?${what}`).then((response) => response.text(), () => "The program that serves this page has ended.");
  text("about-title", what.replace("/", " "));
  text("about-text", answer);
  at("about").showModal();
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-about]");
  if (button) about(button.dataset.about);
});
at("about-close").addEventListener("click", () => at("about").close());

const events = new EventSource("/events");
events.addEventListener("message", (event) => {
  const { view, problem } = JSON.parse(event.data);
  at("problem").hidden = !problem;
  text("problem", problem ? `The cluster cannot be read, and what is shown may be old: ${problem}` : "");
  if (view) draw(view);
});
events.addEventListener("error", () => text("state", "not live: the program that serves this page has ended or cannot be reached"));
