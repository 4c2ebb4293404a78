// When each node was queued, parked, backing off and running, from the events of the run.
import { html, useMemo, useState } from "./html.js";
import { link, route } from "./route.js";
import { Empty, Rows, duration, useNarrow } from "./ui.js";

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
const PARTS = { queued: "part-queued", parked: "part-parked", "backing off": "part-backoff", running: "part-running" };

// For each node of an epoch its parts, in the order in which the nodes first did something.
export function partsOf(events, epoch, now) {
  const rows = new Map();
  for (const event of events) {
    const next = BEGINS[event.type];
    if (next === undefined || event.epoch !== epoch || (event.item !== undefined && event.item !== null)) continue;
    const at = Date.parse(event.time);
    if (!rows.has(event.node)) rows.set(event.node, { id: event.node, parts: [], attempts: 0, end: null });
    const row = rows.get(event.node);
    const open = row.parts.at(-1);
    if (open && open.to === null) open.to = at;
    if (next !== null) row.parts.push({ kind: next, from: at, to: null, attempt: event.attempt });
    else row.end = event.type.slice(5);
    if (event.type === "node.started") row.attempts += 1;
  }
  for (const row of rows.values()) for (const part of row.parts) part.to ??= now;
  return [...rows.values()].filter((row) => row.parts.length > 0);
}

// The chain that decided when the run ended: from the last node to end, back through the parent
// that ended last.
export function criticalPath(nodes) {
  const byId = new Map(nodes.map((node) => [node.id, node]));
  const ended = (node) => (node?.finished_at ? Date.parse(node.finished_at) : -1);
  const latest = (ids) => ids.map((id) => byId.get(id)).reduce((best, node) => (ended(node) > ended(best) ? node : best), undefined);
  const found = new Set();
  let node = latest(nodes.filter((one) => one.started_at).map((one) => one.id));
  while (node && !found.has(node.id)) {
    found.add(node.id);
    node = latest(node.dependencies);
  }
  return found;
}

export function Timeline({ run, events, chosen }) {
  const narrow = useNarrow();
  const [onlyPath, setOnlyPath] = useState(false);
  const [epoch, setEpoch] = useState(null);
  const shownEpoch = epoch ?? run.epoch;
  const active = run.finished_at === null;
  const last = events.length ? Date.parse(events.at(-1).time) : 0;
  const rows = useMemo(() => partsOf(events, shownEpoch, active ? Math.max(Date.now(), last) : last), [events, shownEpoch, active]);
  const path = useMemo(() => criticalPath(run.nodes), [run]);
  const shown = onlyPath ? rows.filter((row) => path.has(row.id)) : rows;
  const from = Math.min(...rows.map((row) => row.parts[0].from));
  const whole = Math.max(1, Math.max(...rows.map((row) => row.parts.at(-1).to)) - from);
  const { parts, query } = route.get();
  return html`<div class="timeline">
    <div class="bar">
      ${run.epoch > 1 && html`<label>Epoch <select value=${String(shownEpoch)} onChange=${(e) => setEpoch(Number(e.currentTarget.value))}>
        ${Array.from({ length: run.epoch }, (_, n) => html`<option value=${String(n + 1)}>${n + 1}</option>`)}</select></label>`}
      <label><input type="checkbox" checked=${onlyPath} onChange=${(e) => setOnlyPath(e.currentTarget.checked)} /> Only the critical path</label>
      <span class="legend">${Object.entries(PARTS).map(([words, name]) => html`<span><span class=${`swatch ${name}`} aria-hidden="true"></span>${words}</span>`)}</span>
      ${rows.length > 0 && html`<span class="count">${duration(whole / 1000)} in all</span>`}
    </div>
    ${shown.length === 0 && html`<${Empty}>No node has started in this epoch.<//>`}
    <${Rows} items=${shown} height=${narrow ? 44 : 28} label="Timeline" row=${(row) => html`<div class="row span" role="listitem" key=${row.id}>
      <a class="c-name" href=${link(parts, { ...query, node: row.id })} aria-current=${chosen === row.id ? "true" : null} title=${row.id}>${path.has(row.id) ? html`<span class="critical" title="on the critical path">◆</span>` : null}${row.id}</a>
      <span class="lane">${row.parts.map((part) => html`<span class=${`part ${PARTS[part.kind]}`} title=${`${part.kind}${part.attempt > 1 ? `, attempt ${part.attempt}` : ""}: ${duration((part.to - part.from) / 1000)}`}
        style=${{ left: `${((part.from - from) / whole) * 100}%`, width: `${Math.max(0.15, ((part.to - part.from) / whole) * 100)}%` }}></span>`)}</span>
      <span class="c-duration">${duration(row.parts.filter((part) => part.kind === "running").reduce((sum, part) => sum + part.to - part.from, 0) / 1000)}</span>
    </div>`} />
  </div>`;
}
