// Where the boxes and edges of a graph are. The server lays it out; ELK, in a worker, does it better
// for small graphs. A layout is kept: the graph of a run, or of a version, never changes.
import { useEffect, useState } from "./html.js";
import { get } from "./api.js";

export const WIDTH = 180;
export const HEIGHT = 40;
const MAX_IMPROVED = 300;
const MIN_IMPROVED = 3;
const DEADLINE_MS = 5000;
const MAX_KEPT = 20;
const OPTIONS = {
  "elk.algorithm": "layered",
  "elk.direction": "DOWN",
  "elk.edgeRouting": "ORTHOGONAL",
  "elk.spacing.nodeNode": "24",
  "elk.layered.spacing.nodeNodeBetweenLayers": "48",
  "elk.layered.spacing.edgeNodeBetweenLayers": "16",
  "elk.layered.nodePlacement.strategy": "NETWORK_SIMPLEX",
  "elk.padding": "[top=20,left=20,bottom=20,right=20]",
};

// As the API has it, with what drawing and walking along the edges need.
export function prepared({ nodes, edges, width, height }) {
  const at = new Map(nodes.map((node) => [node.id, { x: node.x - WIDTH / 2, y: node.y - HEIGHT / 2, layer: node.layer }]));
  const layers = [];
  const parents = new Map(nodes.map((node) => [node.id, []]));
  const children = new Map(nodes.map((node) => [node.id, []]));
  for (const node of nodes) (layers[node.layer] ??= []).push(node.id);
  for (const layer of layers) layer.sort((a, b) => at.get(a).x - at.get(b).x);
  const lines = edges.map(({ from, to, points }) => {
    parents.get(to).push(from);
    children.get(from).push(to);
    const line = { from, to, points, left: Infinity, right: -Infinity, top: Infinity, bottom: -Infinity };
    for (const [x, y] of points) {
      line.left = Math.min(line.left, x);
      line.right = Math.max(line.right, x);
      line.top = Math.min(line.top, y);
      line.bottom = Math.max(line.bottom, y);
    }
    return line;
  });
  return { at, layers, parents, children, lines, width, height, by: "server" };
}

// ── ELK ─────────────────────────────────────────────────────────────────────────────────

const kept = new Map();

function keep(key, value) {
  kept.set(key, value);
  if (kept.size > MAX_KEPT) kept.delete(kept.keys().next().value);
}

// The same graph with better places, or null if ELK takes too long.
function improved({ nodes, edges }, signal) {
  const graph = {
    id: "",
    layoutOptions: OPTIONS,
    children: nodes.map((node, n) => ({ id: `n${n}`, width: WIDTH, height: HEIGHT })),
    edges: [],
  };
  const place = new Map(nodes.map((node, n) => [node.id, n]));
  edges.forEach(({ from, to }, n) => graph.edges.push({ id: `e${n}`, sources: [`n${place.get(from)}`], targets: [`n${place.get(to)}`] }));
  return new Promise((resolve) => {
    const worker = new Worker(new URL("./vendor/elk-worker.min.js", import.meta.url));
    const end = (found) => {
      clearTimeout(timer);
      worker.terminate();
      resolve(found);
    };
    const timer = setTimeout(() => end(null), DEADLINE_MS);
    signal.addEventListener("abort", () => end(null), { once: true });
    worker.onerror = () => end(null);
    worker.onmessage = ({ data }) => {
      if (data.id === 0 && !data.error) worker.postMessage({ id: 1, cmd: "layout", graph, layoutOptions: {}, options: {} });
      else end(data.error ? null : fromElk(data.data, nodes, edges));
    };
    worker.postMessage({ id: 0, cmd: "register", algorithms: ["layered"] });
  });
}

function fromElk(found, nodes, edges) {
  const pair = ({ x, y }) => [x, y];
  return {
    nodes: found.children.map(({ x, y }, n) => ({ id: nodes[n].id, x: x + WIDTH / 2, y: y + HEIGHT / 2, layer: nodes[n].layer })),
    edges: found.edges.map(({ sections }, n) => {
      const [section] = sections;
      return { ...edges[n], points: [section.startPoint, ...(section.bendPoints ?? []), section.endPoint].map(pair) };
    }),
    width: found.width,
    height: found.height,
  };
}

// The layout of the graph at this address of the API: the server's first, then the better one.
export function useLayout(where) {
  const [state, setState] = useState({ where: null, layout: null, error: null });
  useEffect(() => {
    if (kept.has(where)) {
      setState({ where, layout: kept.get(where), error: null });
      return undefined;
    }
    const leaving = new AbortController();
    const { signal } = leaving;
    async function load() {
      const found = await get(where, signal);
      const first = prepared(found);
      setState({ where, layout: first, error: null });
      const { length } = found.nodes;
      const better = length >= MIN_IMPROVED && length <= MAX_IMPROVED ? await improved(found, signal) : null;
      if (signal.aborted) return;
      const best = better ? { ...prepared(better), by: "elk" } : first;
      keep(where, best);
      if (better) setState({ where, layout: best, error: null });
    }
    load().catch((error) => signal.aborted || setState({ where, layout: null, error }));
    return () => leaving.abort();
  }, [where]);
  return state.where === where ? state : { layout: null, error: null };
}
