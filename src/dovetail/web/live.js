// A run as its events leave it: a large run is not read again for each of them.
const ends = (status) => (node, event) => ({
  status,
  finished_at: event.time,
  duration: node.started_at ? Math.max(0, (Date.parse(event.time) - Date.parse(node.started_at)) / 1000) : null,
  reason: event.reason ?? null,
  cause: event.cause ?? null,
});

// What an event changes of its node; a type that is not here changes nothing that is shown.
const NODE_CHANGES = {
  "node.queued": () => ({ status: "QUEUED", worker: null }),
  "node.started": (node, event) => ({ status: "RUNNING", attempt: event.attempt, worker: event.worker ?? null, started_at: event.time, finished_at: null, duration: null }),
  "node.progress": (node, event) => ({ progress: { fraction: event.fraction, message: event.message } }),
  "node.retrying": (node, event) => ({ status: "QUEUED", worker: null, error: event.error ?? node.error, progress: undefined }),
  "node.completed": (node, event) => ({ ...ends("COMPLETED")(node, event), error: null }),
  "node.cached": (node, event) => ({ ...ends("COMPLETED")(node, event), error: null, cached: true }),
  "node.failed": (node, event) => ({ ...ends("FAILED")(node, event), error: event.error ?? node.error }),
  "node.skipped": ends("SKIPPED"),
  "node.cancelled": ends("CANCELLED"),
};
const RUN_ENDS = { "run.completed": "COMPLETED", "run.failed": "FAILED", "run.cancelled": "CANCELLED" };

// Gives [the run, whether it must be read again]: only a read has results, the nodes of a new epoch
// and the counts of items.
export function afterEvents(run, events, places) {
  const changed = new Map();
  let head = run;
  let stale = false;
  for (const event of events) {
    if (event.node === undefined) {
      if (event.type === "run.started") head = { ...head, status: "RUNNING", started_at: event.time };
      else if (RUN_ENDS[event.type]) {
        head = { ...head, status: RUN_ENDS[event.type], error: event.error ?? null };
        stale = true;
      } else if (event.type === "run.retried") stale = true;
      continue;
    }
    if (event.item !== undefined && event.item !== null) {
      stale = true;
      continue;
    }
    const change = NODE_CHANGES[event.type];
    const place = places.get(event.node);
    if (!change || place === undefined) continue;
    const node = changed.get(place) ?? run.nodes[place];
    changed.set(place, { ...node, ...change(node, event) });
  }
  if (changed.size === 0) return [head, stale];
  const nodes = run.nodes.slice();
  for (const [place, node] of changed) nodes[place] = node;
  return [{ ...head, nodes }, stale];
}

export const placesOf = (nodes) => new Map(nodes.map((node, place) => [node.id, place]));
