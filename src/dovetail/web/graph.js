// The graph of a run: layers from left to right, drawn as SVG, only the nodes in view.
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./html.js";
import { go, link, route } from "./route.js";
import { STATES } from "./ui.js";

const WIDTH = 170;
const HEIGHT = 34;
const GAP_X = 70;
const GAP_Y = 14;
const SWEEPS = 4;

// Each node one layer after its last parent; inside a layer in the order of its parents.
export function layout(nodes) {
  const byId = new Map(nodes.map((node) => [node.id, node]));
  const layer = new Map();
  const visit = (first) => {
    const stack = [first];
    while (stack.length) {
      const id = stack.at(-1);
      if (layer.has(id)) { stack.pop(); continue; }
      const open = byId.get(id).dependencies.filter((parent) => byId.has(parent) && !layer.has(parent));
      if (open.length) stack.push(...open);
      else {
        layer.set(id, Math.max(-1, ...byId.get(id).dependencies.map((parent) => layer.get(parent) ?? -1)) + 1);
        stack.pop();
      }
    }
  };
  for (const node of nodes) visit(node.id);
  const layers = [];
  const children = new Map(nodes.map((node) => [node.id, []]));
  for (const node of nodes) {
    (layers[layer.get(node.id)] ??= []).push(node.id);
    for (const parent of node.dependencies) children.get(parent)?.push(node.id);
  }
  const place = new Map();
  const number = (ids) => ids.forEach((id, n) => place.set(id, n));
  layers.forEach(number);
  const sweep = (ids, neighbours) => {
    const weight = new Map(ids.map((id) => {
      const near = neighbours(id);
      return [id, near.length ? near.reduce((sum, one) => sum + place.get(one), 0) / near.length : place.get(id)];
    }));
    ids.sort((a, b) => weight.get(a) - weight.get(b));
    number(ids);
  };
  for (let n = 0; n < SWEEPS; n++) {
    for (const ids of layers) sweep(ids, (id) => byId.get(id).dependencies.filter((parent) => place.has(parent)));
    for (const ids of [...layers].reverse()) sweep(ids, (id) => children.get(id));
  }
  const tallest = Math.max(1, ...layers.map((ids) => ids.length));
  const at = new Map();
  layers.forEach((ids, column) => {
    const top = ((tallest - ids.length) * (HEIGHT + GAP_Y)) / 2;
    ids.forEach((id, n) => at.set(id, { x: column * (WIDTH + GAP_X), y: top + n * (HEIGHT + GAP_Y) }));
  });
  return { at, width: layers.length * (WIDTH + GAP_X) - GAP_X, height: tallest * (HEIGHT + GAP_Y) - GAP_Y };
}

const short = (text) => (text.length > 20 ? text.slice(0, 19) + "…" : text);

export function Graph({ run, chosen }) {
  const shape = run.nodes.map((node) => `${node.id}:${node.dependencies.join(",")}`).join(";");
  const drawn = useMemo(() => layout(run.nodes), [shape]); // colours change without a new layout
  const frame = useRef(null);
  const [size, setSize] = useState({ width: 800, height: 500 });
  const [view, setView] = useState(null);
  const fit = () => {
    const zoom = Math.min(1.2, Math.max(0.02, Math.min(size.width / (drawn.width + 40), size.height / (drawn.height + 40))));
    setView({ zoom, x: (size.width - drawn.width * zoom) / 2, y: (size.height - drawn.height * zoom) / 2 });
  };
  useLayoutEffect(() => {
    const measure = () => setSize({ width: frame.current.clientWidth, height: frame.current.clientHeight });
    measure();
    const watching = new ResizeObserver(measure);
    watching.observe(frame.current);
    return () => watching.disconnect();
  }, []);
  useEffect(fit, [drawn, size.width, size.height]);
  const zoomBy = (factor, px = size.width / 2, py = size.height / 2) =>
    setView((now) => {
      const zoom = Math.min(3, Math.max(0.02, now.zoom * factor));
      const ratio = zoom / now.zoom;
      return { zoom, x: px - (px - now.x) * ratio, y: py - (py - now.y) * ratio };
    });
  useEffect(() => {
    const element = frame.current;
    const wheel = (event) => {
      event.preventDefault();
      const box = element.getBoundingClientRect();
      zoomBy(event.deltaY < 0 ? 1.15 : 1 / 1.15, event.clientX - box.left, event.clientY - box.top);
    };
    element.addEventListener("wheel", wheel, { passive: false });
    return () => element.removeEventListener("wheel", wheel);
  }, [size.width, size.height]);
  const drag = useRef(null);
  const down = (event) => {
    if (event.target.closest?.("a")) return;
    drag.current = { x: event.clientX, y: event.clientY };
    frame.current.setPointerCapture(event.pointerId);
  };
  const move = (event) => {
    if (!drag.current) return;
    const [dx, dy] = [event.clientX - drag.current.x, event.clientY - drag.current.y];
    drag.current = { x: event.clientX, y: event.clientY };
    setView((now) => ({ ...now, x: now.x + dx, y: now.y + dy }));
  };
  const keys = (event) => {
    const step = { ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60] }[event.key];
    if (step) setView((now) => ({ ...now, x: now.x + step[0], y: now.y + step[1] }));
    else if (event.key === "+") zoomBy(1.3);
    else if (event.key === "-") zoomBy(1 / 1.3);
    else return;
    event.preventDefault();
  };
  const seen = [];
  if (view) {
    const [left, top] = [-view.x / view.zoom, -view.y / view.zoom];
    const [right, bottom] = [left + size.width / view.zoom, top + size.height / view.zoom];
    for (const node of run.nodes) {
      const { x, y } = drawn.at.get(node.id);
      if (x + WIDTH >= left && x <= right && y + HEIGHT >= top && y <= bottom) seen.push(node);
    }
  }
  // Texts could not be read: one path draws all nodes of a state, however many are in view.
  const small = view && view.zoom < 0.35;
  const byState = new Map();
  if (small) {
    for (const node of seen) {
      const { x, y } = drawn.at.get(node.id);
      byState.set(node.status, `${byState.get(node.status) ?? ""}M${x} ${y}h${WIDTH}v${HEIGHT}h${-WIDTH}z`);
    }
  }
  const pick = (event) => {
    if (!small) return;
    const box = frame.current.getBoundingClientRect();
    const [x, y] = [(event.clientX - box.left - view.x) / view.zoom, (event.clientY - box.top - view.y) / view.zoom];
    const hit = seen.find((node) => {
      const at = drawn.at.get(node.id);
      return x >= at.x && x <= at.x + WIDTH && y >= at.y && y <= at.y + HEIGHT;
    });
    if (hit) go(route.get().parts, { ...route.get().query, node: hit.id });
  };
  const edges = [];
  if (view) {
    for (const node of seen) {
      const to = drawn.at.get(node.id);
      for (const parent of node.dependencies) {
        const from = drawn.at.get(parent);
        if (!from) continue;
        const [x1, y1, x2, y2] = [from.x + WIDTH, from.y + HEIGHT / 2, to.x, to.y + HEIGHT / 2];
        const middle = (x1 + x2) / 2;
        edges.push(`M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`);
      }
    }
  }
  const { query, parts } = route.get();
  return html`<div class="graph">
    <div class="bar"><button onClick=${() => zoomBy(1.3)} aria-label="Zoom in">+</button><button onClick=${() => zoomBy(1 / 1.3)} aria-label="Zoom out">−</button><button onClick=${fit}>Fit</button>
      <span class="count">${run.nodes.length.toLocaleString()} nodes</span></div>
    <div class="canvas" ref=${frame} tabindex="0" role="group" aria-label="Graph; the arrow keys move it, plus and minus zoom" onKeyDown=${keys} onClick=${pick}
      onPointerDown=${down} onPointerMove=${move} onPointerUp=${() => (drag.current = null)} onPointerCancel=${() => (drag.current = null)}>
      ${view && html`<svg width=${size.width} height=${size.height}><g transform=${`translate(${view.x} ${view.y}) scale(${view.zoom})`}>
        <path class="edges" d=${edges.join("")} />
        ${small && [...byState].map(([state, d]) => html`<path key=${state} class="paint-${STATES[state][1]}" d=${d} />`)}
        ${!small && seen.map((node) => {
          const { x, y } = drawn.at.get(node.id);
          const [icon, word] = STATES[node.status];
          return html`<a key=${node.id} href=${link(parts, { ...query, node: node.id })} aria-label=${`${node.id}, ${word}`} class=${`box box-${word}${chosen === node.id ? " chosen" : ""}`}>
            <rect x=${x} y=${y} width=${WIDTH} height=${HEIGHT} rx="6" />
            <text class="mark" x=${x + 10} y=${y + 22}>${icon}</text><text x=${x + 28} y=${y + 22}>${short(node.id)}<title>${node.id}: ${word}</title></text>
          </a>`;
        })}
      </g></svg>`}
    </div>
  </div>`;
}
