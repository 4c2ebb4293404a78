// When each node was queued, parked, backing off and running, from the events of the run.
import { html, useEffect, useMemo, useRef, useState } from "./html.js";
import { link, setQuery } from "./route.js";
import { Empty, Name, Rows, STATES, duration, useNarrow } from "./ui.js";

// What a node does from an event on. An event that is not here changes nothing.
const BEGINS = {
  "node.queued": "queued",
  "node.parked": "parked",
  "node.retrying": "backing off",
  "node.lost": "queued",
  "node.started": "running",
  "node.completed": null,
  "node.cached": null,
  "node.reused": null,
  "node.failed": null,
  "node.skipped": null,
  "node.cancelled": null,
};
const PARTS = { queued: "part-queued", parked: "part-parked", "backing off": "part-backoff", running: "part-running", failed: "part-running part-failed" };
const IN_LEGEND = { failed: "failed attempt" };

const FAILED = new Set(["node.failed", "node.retrying", "node.lost"]);

// For each node of an epoch its parts, in the order in which the nodes first did something.
export function partsOf(events, epoch, now) {
  const rows = new Map();
  for (const event of events) {
    const next = BEGINS[event.type];
    if (next === undefined || event.epoch !== epoch || (event.item !== undefined && event.item !== null)) continue;
    const at = (event.at ??= Date.parse(event.time));
    if (!rows.has(event.node)) rows.set(event.node, { id: event.node, epoch, parts: [] });
    const row = rows.get(event.node);
    const open = row.parts.at(-1);
    if (open && open.to === null) {
      open.to = at;
      if (open.kind === "running" && FAILED.has(event.type)) open.kind = "failed";
    }
    if (next !== null) row.parts.push({ kind: next, from: at, to: null, attempt: event.attempt });
  }
  for (const row of rows.values()) for (const part of row.parts) part.to ??= now;
  return [...rows.values()].filter((row) => row.parts.length > 0);
}

// The chain that decided when the run ended: from the last node to end, back through the parent
// that ended last.
export function criticalPath(nodes) {
  const byId = new Map(nodes.map((node) => [node.id, node]));
  const ended = (node) => node?.finished_at ?? ""; // in UTC, so the order of the text is that of time
  const latest = (ids) => ids.map((id) => byId.get(id)).reduce((best, node) => (ended(node) > ended(best) ? node : best), undefined);
  const found = new Set();
  let node = latest(nodes.filter((one) => one.started_at).map((one) => one.id));
  while (node && !found.has(node.id)) {
    found.add(node.id);
    node = latest(node.dependencies);
  }
  return found;
}

const MAX_TICKS = 8;

// Below a second a step is 1, 2 or 5 times a power of ten; from a second on it is a step of a clock,
// such as 15 s or 10 min.
const CLOCK_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400].map((seconds) => seconds * 1000);

export function ticksOf(whole) {
  const least = whole / MAX_TICKS;
  const power = 10 ** Math.floor(Math.log10(least));
  const step = least < 1000 ? [1, 2, 5, 10].map((n) => n * power).find((one) => one >= least) : CLOCK_STEPS.find((one) => one >= least) ?? Math.ceil(least / 86400e3) * 86400e3;
  return Array.from({ length: Math.floor(whole / step - 0.3) + 1 }, (_, n) => n * step); // none at the right edge
}
const CALM_MS = 500;

// A time that goes on while the run does: bars of what is running grow.
function useNow(active) {
  const [now, setNow] = useState(Date.now());
  useEffect(() => {
    if (!active) return undefined;
    const timer = setInterval(() => setNow(Date.now()), 1000);
    return () => clearInterval(timer);
  }, [active]);
  return now;
}

const tickWords = (ms) => (ms >= 1000 && ms < 60000 ? `${ms / 1000} s` : duration(ms / 1000).replace(/ 0 (s|min|h)$/, ""));

function Axis({ whole }) {
  return html`<div class="axis" aria-hidden="true"><span class="c-name"></span><span class="lane">
    ${ticksOf(whole).map((at) => html`<span class="tick" style=${{ left: `${(at / whole) * 100}%` }}>${at === 0 ? "0" : tickWords(at)}</span>`)}
  </span><span class="c-duration"></span></div>`;
}

// Every part leads to the attempt that it belongs to.
function Part({ row, part, from, whole, place, query }) {
  const isRun = part.kind === "running" || part.kind === "failed";
  const words = `${isRun ? "running" : part.kind}${part.attempt > 1 ? `, attempt ${part.attempt}` : ""}: ${duration((part.to - part.from) / 1000)}${part.kind === "failed" ? ", failed" : ""}`;
  const at = isRun ? `${row.epoch}.${part.attempt}` : query.at;
  return html`<a class=${`part ${PARTS[part.kind]}${isRun && query.node === row.id && query.at === at ? " chosen" : ""}`} title=${words} aria-label=${`${row.id} ${words}`} tabindex="-1"
    href=${link(place, { ...query, node: row.id, at })} style=${{ left: `min(${((part.from - from) / whole) * 100}%, 100% - 2px)`, width: `${Math.max(0.15, ((part.to - part.from) / whole) * 100)}%` }}></a>`;
}

function Named({ id, state, isCritical }) {
  return html`${state && html`<span class="icon state-${state[1]}" title=${state[1]} aria-hidden="true">${state[0]}</span><span class="sr">${state[1]}, </span>`}${isCritical && html`<span class="critical" title="on the critical path">◆</span>`}<${Name} text=${id} />`;
}

// A value that changes at most so often: all rows are computed from it.
function useCalm(value, ms) {
  const [shown, setShown] = useState(value);
  const latest = useRef(value);
  latest.current = value;
  useEffect(() => {
    const timer = setInterval(() => setShown(latest.current), ms);
    return () => clearInterval(timer);
  }, [ms]);
  return shown;
}

export function Timeline({ run, events: newest, query }) {
  const narrow = useNarrow();
  const events = useCalm(newest, CALM_MS);
  const nodes = useCalm(run.nodes, CALM_MS);
  const onlyPath = Boolean(query.path);
  const wanted = Number(query.epoch);
  const epoch = wanted >= 1 && wanted <= run.epoch ? wanted : run.epoch;
  const active = run.finished_at === null && epoch === run.epoch;
  const now = useNow(active);
  const last = events.length ? Date.parse(events.at(-1).time) : 0;
  const rows = useMemo(() => partsOf(events, epoch, active ? Math.max(now, last) : last), [events, epoch, active, now]);
  const path = useMemo(() => criticalPath(nodes), [nodes]);
  const states = useMemo(() => new Map(nodes.map((node) => [node.id, epoch === run.epoch || node.epoch === epoch ? STATES[node.status] : null])), [nodes, epoch]);
  const shown = useMemo(() => rows.filter((row) => (!onlyPath || path.has(row.id)) && (!query.q || row.id.toLowerCase().includes(query.q.toLowerCase()))), [rows, onlyPath, path, query.q]);
  const from = rows.reduce((least, row) => Math.min(least, row.parts[0].from), Infinity);
  const whole = Math.max(1, rows.reduce((most, row) => Math.max(most, row.parts.at(-1).to), 0) - from);
  const place = ["runs", run.run_id, "timeline"];
  return html`<div class="timeline">
    <div class="bar">
      ${run.epoch > 1 && html`<label>Epoch <select value=${String(epoch)} onChange=${(e) => setQuery({ epoch: e.currentTarget.value })}>
        ${Array.from({ length: run.epoch }, (_, n) => html`<option value=${String(n + 1)}>${n + 1}</option>`)}</select></label>`}
      <label><input type="checkbox" checked=${onlyPath} onChange=${(e) => setQuery({ path: e.currentTarget.checked ? "1" : "" })} /> Only the critical path</label>
      <input type="search" aria-label="Search nodes" placeholder="Node" value=${query.q || ""} onInput=${(e) => setQuery({ q: e.currentTarget.value })} />
      <span class="legend">${Object.entries(PARTS).map(([words, name]) => html`<span><span class=${`swatch ${name}`} aria-hidden="true"></span>${IN_LEGEND[words] ?? words}</span>`)}
        <span><span class="critical" aria-hidden="true">◆</span>on the critical path</span></span>
      ${rows.length > 0 && html`<span class="count">${duration(whole / 1000)} in all</span>`}
    </div>
    ${shown.length === 0 && html`<${Empty}>${rows.length ? "No node matches." : "No node has started in this epoch."}<//>`}
    ${shown.length > 0 && !narrow && html`<${Axis} whole=${whole} />`}
    <${Rows} items=${shown} height=${narrow ? 44 : 28} label="Timeline" row=${(row) => html`<div class="row span" role="listitem" key=${row.id}>
      <a class="c-name" href=${link(place, { ...query, node: row.id, at: "" })} aria-current=${query.node === row.id ? "true" : null} title=${row.id}><${Named} id=${row.id} state=${states.get(row.id)} isCritical=${path.has(row.id)} /></a>
      <span class="lane">${row.parts.map((part) => html`<${Part} row=${row} part=${part} from=${from} whole=${whole} place=${place} query=${query} />`)}</span>
      <span class="c-duration">${duration(row.parts.filter((part) => part.kind === "running" || part.kind === "failed").reduce((sum, part) => sum + part.to - part.from, 0) / 1000)}</span>
    </div>`} />
  </div>`;
}
