// A graph to look at: pan, zoom, search, follow the edges. Edges, and boxes too small to read, are
// painted on a canvas; boxes that can be read are links, and only those in view are in the document.
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./html.js";
import { path } from "./api.js";
import { itemsShort } from "./items.js";
import { HEIGHT, WIDTH, prepared, useLayout } from "./layout.js";
import { go, link, route, setQuery } from "./route.js";
import { Empty, Loading, NODE_STATES, Name, Rows, STATES, State, Trouble, useNarrow } from "./ui.js";

const MAX_BOXES = 250; // in the document
const LEAST_READABLE = 0.42;
const LEAST_OPENED = 0.15;
const MAX_LINES = 20000; // painted at once
const MAX_LINES_MOVING = 3000;
const COLLAPSED_FROM = 1500; // nodes: with more of them, each layer is one box at first
const [WIDE_FROM, WIDE_LAYER] = [300, 60]; // and with so many if a layer is wider than a screen
const [LAYER_WIDTH, LAYER_HEIGHT, LAYER_GAP] = [420, 60, 40];
const [MAP_WIDTH, MAP_HEIGHT] = [170, 110];
const BEYOND = 0.3; // of the view: boxes there are in the document before they are seen

const clamp = (value, least, most) => Math.min(most, Math.max(least, value));

// Each layer as one box, with how many of its nodes are in which state.
function collapsed(layout) {
  const at = new Map();
  layout.layers.forEach((ids, n) => at.set(n, { x: 0, y: n * (LAYER_HEIGHT + LAYER_GAP), layer: n }));
  const seen = new Set();
  const lines = [];
  for (const { from, to } of layout.lines) {
    const [a, b] = [layout.at.get(from).layer, layout.at.get(to).layer];
    const key = a * layout.layers.length + b;
    if (seen.has(key)) continue;
    seen.add(key);
    const [top, bottom] = [at.get(a).y + LAYER_HEIGHT, at.get(b).y];
    const middle = LAYER_WIDTH / 2;
    const aside = LAYER_WIDTH + 12 + ((a * 7) % 40);
    const points = b === a + 1 ? [[middle, top], [middle, bottom]] : [[LAYER_WIDTH, top - 10], [aside, top - 10], [aside, bottom + 10], [LAYER_WIDTH, bottom + 10]];
    lines.push({ from: a, to: b, points, left: middle, right: aside, top, bottom });
  }
  return { at, layers: layout.layers, lines, width: LAYER_WIDTH + 60, height: Math.max(1, layout.layers.length) * (LAYER_HEIGHT + LAYER_GAP) };
}

// ── painting ────────────────────────────────────────────────────────────────────────────

function colours() {
  const style = getComputedStyle(document.documentElement);
  const named = (name) => style.getPropertyValue(name).trim();
  const idle = named("--idle-fill");
  const fills = { COMPLETED: "--ok-fill", FAILED: "--bad-fill", RUNNING: "--going-fill", QUEUED: "--waiting-fill", CANCELLED: "--off-fill" };
  const found = Object.fromEntries(Object.entries(fills).map(([state, name]) => [state, named(name)]));
  return { state: (status) => found[status] ?? idle, edge: named("--soft"), focus: named("--focus"), ink: named("--ink") };
}

function sized(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

function trace(context, line, view) {
  line.points.forEach(([x, y], n) => {
    if (n === 0) context.moveTo(x * view.zoom + view.x, y * view.zoom + view.y);
    else context.lineTo(x * view.zoom + view.x, y * view.zoom + view.y);
  });
}

function paintLines(context, shape, view, size, colour, chosen, most) {
  const [left, top] = [-view.x / view.zoom, -view.y / view.zoom];
  const [right, bottom] = [left + size.width / view.zoom, top + size.height / view.zoom];
  let drawn = 0;
  const own = [];
  context.strokeStyle = colour.edge;
  context.globalAlpha = view.zoom < 0.2 ? 0.25 : 0.6;
  context.lineWidth = view.zoom < 0.4 ? 0.7 : 1.2;
  context.beginPath();
  for (const line of shape.lines) {
    if (line.right < left || line.left > right || line.bottom < top || line.top > bottom) continue;
    if (chosen !== null && (line.from === chosen || line.to === chosen)) own.push(line);
    if (drawn++ < most) trace(context, line, view);
  }
  context.stroke();
  context.globalAlpha = 1;
  if (own.length === 0) return;
  context.strokeStyle = colour.focus;
  context.lineWidth = 2.2;
  context.beginPath();
  for (const line of own) trace(context, line, view);
  context.stroke();
}

function paintNodes(context, nodes, shape, view, size, colour, marked) {
  const [width, height] = [Math.max(1, WIDTH * view.zoom), Math.max(1, HEIGHT * view.zoom)];
  const byState = new Map();
  for (const node of nodes) {
    const at = shape.at.get(node.id);
    if (!at) continue;
    const [x, y] = [at.x * view.zoom + view.x, at.y * view.zoom + view.y];
    if (x + width < 0 || y + height < 0 || x > size.width || y > size.height) continue;
    if (!byState.has(node.status)) byState.set(node.status, []);
    byState.get(node.status).push(x, y);
    if (marked.has(node.id)) {
      context.strokeStyle = colour.focus;
      context.lineWidth = 2;
      context.strokeRect(x - 2, y - 2, width + 4, height + 4);
    }
  }
  for (const [state, places] of byState) {
    context.fillStyle = colour.state(state);
    for (let n = 0; n < places.length; n += 2) context.fillRect(places[n], places[n + 1], width, height);
  }
}

function paintLayers(context, groups, shape, view, colour) {
  for (const [layer, counts] of groups) {
    const at = shape.at.get(layer);
    let x = at.x * view.zoom + view.x;
    const total = Object.values(counts).reduce((sum, one) => sum + one, 0);
    for (const [state, count] of Object.entries(counts)) {
      const width = (LAYER_WIDTH * view.zoom * count) / total;
      context.fillStyle = colour.state(state);
      context.fillRect(x, at.y * view.zoom + view.y, width, Math.max(1, LAYER_HEIGHT * view.zoom));
      x += width;
    }
  }
}

// ── moving ──────────────────────────────────────────────────────────────────────────────

// The view is moved without drawing the document anew: `paint` gets it with each frame.
function useView(frame, shape, size, paint) {
  const view = useRef(null);
  const touched = useRef(false);
  const moving = useRef({ until: 0, frame: 0, timer: 0 });
  const ask = () => {
    moving.current.frame ||= requestAnimationFrame(() => {
      moving.current.frame = 0;
      if (view.current) paint(view.current, performance.now() < moving.current.until);
    });
  };
  const move = (next) => {
    view.current = next;
    moving.current.until = performance.now() + 120;
    clearTimeout(moving.current.timer);
    moving.current.timer = setTimeout(ask, 150); // once more at rest, with all lines
    ask();
  };
  const fitted = () => {
    const zoom = clamp(Math.min(size.width / (shape.width + 20), size.height / (shape.height + 20)), 0.005, 1.1);
    return { zoom, x: (size.width - shape.width * zoom) / 2, y: Math.max(8, (size.height - shape.height * zoom) / 2) };
  };
  const fit = () => {
    touched.current = false;
    move(fitted());
  };
  // How it opens: whole, or, if that were a strip of dots, as high as the view around one place.
  const opened = (at) => {
    const whole = fitted();
    if (whole.zoom >= LEAST_OPENED) return whole;
    const zoom = clamp(size.height / (shape.height + 20), LEAST_OPENED, 0.6);
    const [x, y] = at ? [at.x + WIDTH / 2, at.y + HEIGHT / 2] : [shape.width / 2, Math.min(shape.height, size.height / zoom) / 2];
    const isLow = shape.height * zoom <= size.height;
    return { zoom, x: size.width / 2 - x * zoom, y: isLow ? (size.height - shape.height * zoom) / 2 : Math.min(8, size.height / 2 - y * zoom) };
  };
  const zoomBy = (factor, px = size.width / 2, py = size.height / 2) => {
    touched.current = true;
    const now = view.current;
    const zoom = clamp(now.zoom * factor, 0.005, 3);
    const ratio = zoom / now.zoom;
    move({ zoom, x: px - (px - now.x) * ratio, y: py - (py - now.y) * ratio });
  };
  const shift = (dx, dy) => {
    touched.current = true;
    move({ ...view.current, x: view.current.x + dx, y: view.current.y + dy });
  };
  // Brings a box into view, near enough to be read.
  const show = (at, width = WIDTH, height = HEIGHT) => {
    const { x, y, zoom } = view.current;
    const [left, top] = [at.x * zoom + x, at.y * zoom + y];
    const inside = left >= 0 && top >= 0 && left + width * zoom <= size.width && top + height * zoom <= size.height;
    if (inside && zoom >= LEAST_READABLE) return;
    touched.current = true;
    const near = Math.max(zoom, 0.8);
    move({ zoom: near, x: size.width / 2 - (at.x + width / 2) * near, y: size.height / 2 - (at.y + height / 2) * near });
  };
  useEffect(() => () => {
    cancelAnimationFrame(moving.current.frame);
    clearTimeout(moving.current.timer);
  }, []);

  // Drag with one pointer, pinch with two.
  const pointers = useRef(new Map());
  const dragged = useRef(false);
  const handlers = {
    onPointerDown(event) {
      if (event.button !== 0) return;
      pointers.current.set(event.pointerId, { x: event.clientX, y: event.clientY });
      if (pointers.current.size === 1) dragged.current = false;
    },
    onPointerMove(event) {
      const last = pointers.current.get(event.pointerId);
      if (!last) return;
      const [dx, dy] = [event.clientX - last.x, event.clientY - last.y];
      if (!dragged.current && pointers.current.size === 1) {
        if (Math.hypot(dx, dy) < 4) return; // a click may tremble
        frame.current.setPointerCapture(event.pointerId);
      }
      dragged.current = true;
      const here = { x: event.clientX, y: event.clientY };
      const other = [...pointers.current].find(([id]) => id !== event.pointerId)?.[1];
      pointers.current.set(event.pointerId, here);
      if (!other) return shift(dx, dy);
      const box = frame.current.getBoundingClientRect();
      const before = Math.hypot(last.x - other.x, last.y - other.y);
      if (before > 0) zoomBy(Math.hypot(here.x - other.x, here.y - other.y) / before, (here.x + other.x) / 2 - box.left, (here.y + other.y) / 2 - box.top);
      return undefined;
    },
    onPointerUp: (event) => pointers.current.delete(event.pointerId),
    onPointerCancel: (event) => pointers.current.delete(event.pointerId),
    onDragStart: (event) => event.preventDefault(),
    // What ends a drag is no click on the box below.
    onClickCapture(event) {
      if (!dragged.current) return;
      dragged.current = false;
      event.preventDefault();
      event.stopPropagation();
    },
  };
  const onWheel = (event) => {
    event.preventDefault();
    const box = frame.current.getBoundingClientRect();
    zoomBy(Math.exp(-clamp(event.deltaY, -100, 100) / 500), event.clientX - box.left, event.clientY - box.top);
  };
  const wheel = useRef(onWheel);
  wheel.current = onWheel;
  useEffect(() => {
    const element = frame.current;
    const listener = (event) => wheel.current(event);
    element.addEventListener("wheel", listener, { passive: false });
    return () => element.removeEventListener("wheel", listener);
  }, []);
  return { view, touched, ask, move, fit, opened, zoomBy, shift, show, handlers };
}

// ── what is seen ────────────────────────────────────────────────────────────────────────

function countsByLayer(nodes, layout) {
  const found = new Map(layout.layers.map((ids, n) => [n, {}]));
  const known = new Map(nodes.map((node) => [node.id, node.status]));
  layout.layers.forEach((ids, n) => {
    const counts = {};
    for (const id of ids) {
      const state = known.get(id) ?? "PENDING";
      counts[state] = (counts[state] ?? 0) + 1;
    }
    const sorted = Object.keys(counts).sort((a, b) => NODE_STATES.indexOf(a) - NODE_STATES.indexOf(b));
    found.set(n, Object.fromEntries(sorted.map((state) => [state, counts[state]])));
  });
  return found;
}

function within(shape, view, size, width, height) {
  const [mx, my] = [size.width * BEYOND, size.height * BEYOND];
  const [left, top] = [(-mx - view.x) / view.zoom, (-my - view.y) / view.zoom];
  const [right, bottom] = [(size.width + mx - view.x) / view.zoom, (size.height + my - view.y) / view.zoom];
  const found = [];
  for (const [id, { x, y }] of shape.at) {
    if (x + width < left || x > right || y + height < top || y > bottom) continue;
    found.push(id);
    if (found.length > MAX_BOXES) return null; // too many to read
  }
  return found;
}

function Box({ node, at, chosen, cursor, match, href }) {
  const [icon, word] = STATES[node.status] ?? ["", "none"];
  const note = node.items ? itemsShort(node.items) : node.progress?.fraction ? `${Math.round(100 * node.progress.fraction)} %` : null;
  const classes = ["box", `box-${word}`, chosen && "chosen", cursor && "cursor", match && "match", node.reason === "dependency_failed" && "behind", node.mark && `mark-${node.mark}`].filter(Boolean).join(" ");
  return html`<a class=${classes} href=${href} tabindex="-1" title=${`${node.id}${node.status ? `: ${word}` : ""}${node.reason === "dependency_failed" ? `, because ${node.cause} failed` : ""}`} aria-label=${`${node.id}${node.status ? `, ${word}` : ""}${node.mark ? `, ${node.mark}` : ""}`}
    style=${{ left: `${at.x}px`, top: `${at.y}px`, width: `${WIDTH}px`, height: `${HEIGHT}px` }}>
    ${icon && html`<span class="mark" aria-hidden="true">${icon}</span>`}<span class="name"><${Name} text=${node.id} />${note && html`<small>${note}</small>`}</span></a>`;
}

function LayerBox({ layer, at, counts, chosen, to }) {
  const total = Object.values(counts).reduce((sum, one) => sum + one, 0);
  return html`<div class=${`box layer${chosen ? " chosen" : ""}`} style=${{ left: `${at.x}px`, top: `${at.y}px`, width: `${LAYER_WIDTH}px`, height: `${LAYER_HEIGHT}px` }}>
    <a href=${to(`${layer}`)} tabindex="-1">Layer ${layer}: ${total.toLocaleString()} ${total === 1 ? "node" : "nodes"}</a>
    <span class="states">${Object.entries(counts).map(([state, count]) => html`<a key=${state} href=${to(`${layer}.${state}`)} tabindex="-1" class=${`segment fill-${STATES[state][1]}`} style=${{ flexGrow: count }}
      title=${`${count.toLocaleString()} ${STATES[state][1]}`} aria-label=${`Layer ${layer}: ${count.toLocaleString()} ${STATES[state][1]}`}><span aria-hidden="true">${STATES[state][0]} ${count.toLocaleString()}</span></a>`)}</span>
  </div>`;
}

function GroupList({ group, nodes, layout, parts, query }) {
  const narrow = useNarrow();
  const [layer, state] = group.split(".");
  const ids = new Set(layout.layers[Number(layer)] ?? []);
  const found = nodes.filter((node) => ids.has(node.id) && (!state || node.status === state));
  return html`<section class="group"><header><h2>Layer ${layer}${state ? `, ${STATES[state]?.[1] ?? state}` : ""}: ${found.length.toLocaleString()}</h2>
    <button class="quiet" onClick=${() => setQuery({ group: "" })}>Close</button></header>
    <${Rows} own items=${found} height=${narrow ? 44 : 32} label="Nodes of the layer" row=${(node) => html`<div class="row" role="listitem" key=${node.id}>
      <a class="c-name" href=${link(parts, { ...query, node: node.id, at: "" })}>${node.id}</a> <${State} of=${node.status} /></div>`} /></section>`;
}

const KEYS = "The arrow keys go along the edges, or from layer to layer where layers are collapsed, Enter opens a node, Shift and the arrow keys move the graph, plus and minus zoom, 0 fits it.";

// `nodes`: id, and where there is one status, items, progress, `mark` (a word). `where`: the layout.
export function GraphView({ nodes, where, query, href }) {
  const { layout, error } = useLayout(where);
  if (error) return html`<${Trouble} error=${error} />`;
  if (!layout) return html`<div class="graph"><div class="canvas"><${Loading} /></div></div>`;
  if (layout.at.size === 0) return html`<${Empty}>The graph has no nodes.<//>`;
  return html`<${Drawing} nodes=${nodes} layout=${layout} query=${query} href=${href} />`;
}

function Drawing({ nodes, layout, query, href, plain }) {
  const isLarge = useMemo(() => nodes.length > COLLAPSED_FROM || (nodes.length > WIDE_FROM && layout.layers.some((ids) => ids.length > WIDE_LAYER)), [layout]);
  const isCollapsed = query.collapse ? query.collapse === "1" : isLarge;
  const shape = useMemo(() => (isCollapsed ? collapsed(layout) : layout), [layout, isCollapsed]);
  const groups = useMemo(() => (isCollapsed ? countsByLayer(nodes, layout) : null), [nodes, layout, isCollapsed]);
  const byId = useMemo(() => new Map(nodes.map((node) => [node.id, node])), [nodes]);
  const { parts } = route.get();
  const [frame, board, boxes, map] = [useRef(null), useRef(null), useRef(null), useRef(null)];
  const [size, setSize] = useState({ width: 800, height: 500 });
  const [seen, setSeen] = useState([]);
  const [isTooSmall, setTooSmall] = useState(false); // to read names
  const [cursor, setCursor] = useState(null);
  const chosen = isCollapsed ? (query.group ? Number(query.group.split(".")[0]) : null) : query.node ?? null;
  const wanted = (query.find || "").toLowerCase();
  const found = useMemo(() => (wanted ? nodes.filter((node) => node.id.toLowerCase().includes(wanted)).map((node) => node.id) : []), [wanted, nodes.length]);
  const marked = useMemo(() => new Set([...found, ...(query.node ? [query.node] : []), ...(cursor ? [cursor] : [])]), [found, query.node, cursor]);
  const palette = useRef(null);
  const picture = useRef({ nodes: null, shape: null, canvas: null });
  const [boxWidth, boxHeight] = isCollapsed ? [LAYER_WIDTH, LAYER_HEIGHT] : [WIDTH, HEIGHT];

  const paint = (view, isMoving) => {
    if (!board.current) return; // the graph was left before its next frame
    palette.current ??= colours();
    const context = sized(board.current, size.width, size.height);
    const readable = view.zoom >= LEAST_READABLE ? within(shape, view, size, boxWidth, boxHeight) : null;
    paintLines(context, shape, view, size, palette.current, chosen, isMoving ? MAX_LINES_MOVING : MAX_LINES);
    if (readable === null) {
      if (isCollapsed) paintLayers(context, groups, shape, view, palette.current);
      else paintNodes(context, nodes, shape, view, size, palette.current, marked);
    }
    boxes.current.style.transform = `translate(${view.x}px, ${view.y}px) scale(${view.zoom})`;
    setTooSmall(readable === null);
    setSeen((now) => {
      const next = readable ?? [];
      return now.length === next.length && now.every((id, n) => id === next[n]) ? now : next;
    });
    paintMap(view);
  };

  const mapScale = Math.min(MAP_WIDTH / shape.width, MAP_HEIGHT / shape.height);
  const [mapX, mapY] = [(MAP_WIDTH - shape.width * mapScale) / 2, (MAP_HEIGHT - shape.height * mapScale) / 2];
  const paintMap = (view) => {
    // Where all is in view, it would only hide some of it.
    const isWhole = view.x >= -1 && view.y >= -1 && view.x + shape.width * view.zoom <= size.width + 1 && view.y + shape.height * view.zoom <= size.height + 1;
    map.current.hidden = isWhole;
    if (isWhole) return;
    const kept = picture.current;
    if (kept.nodes !== nodes || kept.shape !== shape || !kept.canvas) {
      kept.canvas ??= document.createElement("canvas");
      const context = sized(kept.canvas, MAP_WIDTH, MAP_HEIGHT);
      const small = { zoom: mapScale, x: mapX, y: mapY };
      if (isCollapsed) paintLayers(context, groups, shape, small, palette.current);
      else paintNodes(context, nodes, shape, small, { width: MAP_WIDTH, height: MAP_HEIGHT }, palette.current, new Set());
      kept.nodes = nodes;
      kept.shape = shape;
    }
    const context = sized(map.current, MAP_WIDTH, MAP_HEIGHT);
    context.drawImage(kept.canvas, 0, 0, MAP_WIDTH, MAP_HEIGHT);
    context.strokeStyle = palette.current.ink;
    context.lineWidth = 1;
    context.strokeRect(mapX - (view.x / view.zoom) * mapScale, mapY - (view.y / view.zoom) * mapScale, (size.width / view.zoom) * mapScale, (size.height / view.zoom) * mapScale);
  };
  const mapMoved = (event) => {
    if (event.type === "pointermove" && event.buttons === 0) return;
    event.stopPropagation();
    const box = map.current.getBoundingClientRect();
    const { zoom } = moved.view.current;
    const shrunk = box.width / MAP_WIDTH; // on a phone
    const [x, y] = [((event.clientX - box.left) / shrunk - mapX) / mapScale, ((event.clientY - box.top) / shrunk - mapY) / mapScale];
    moved.touched.current = true;
    moved.move({ zoom, x: size.width / 2 - x * zoom, y: size.height / 2 - y * zoom });
  };

  const latest = useRef(paint);
  latest.current = paint;
  const moved = useView(frame, shape, size, (view, isMoving) => latest.current(view, isMoving));

  useLayoutEffect(() => {
    const measure = () => setSize({ width: frame.current.clientWidth, height: frame.current.clientHeight });
    measure();
    const watching = new ResizeObserver(measure);
    watching.observe(frame.current);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const repaint = () => {
      palette.current = null;
      picture.current.nodes = null;
      moved.ask();
    };
    dark.addEventListener("change", repaint);
    return () => {
      watching.disconnect();
      dark.removeEventListener("change", repaint);
    };
  }, []);
  // A new layout, or a new size: the whole graph, unless a person has moved it. Then what is in the
  // middle stays there.
  const before = useRef(null);
  useLayoutEffect(() => {
    const last = before.current;
    before.current = { shape, size };
    if (!moved.view.current || !moved.touched.current) {
      const first = isCollapsed ? null : nodes.find((node) => node.status === "FAILED") ?? nodes.find((node) => node.status === "RUNNING");
      moved.move(moved.opened(first && shape.at.get(first.id)));
      const at = shape.at.get(chosen);
      if (!last && at && moved.view.current.zoom < LEAST_READABLE) moved.show(at, boxWidth, boxHeight);
      return;
    }
    if (!last || last.shape === shape) return moved.ask();
    const { x, y, zoom } = moved.view.current;
    let nearest = null;
    for (const [id, at] of last.shape.at) {
      const far = Math.hypot(at.x * zoom + x - size.width / 2, at.y * zoom + y - size.height / 2);
      if (shape.at.has(id) && (!nearest || far < nearest.far)) nearest = { id, at, far };
    }
    if (!nearest) return moved.fit();
    const to = shape.at.get(nearest.id);
    return moved.move({ zoom, x: x + (nearest.at.x - to.x) * zoom, y: y + (nearest.at.y - to.y) * zoom });
  }, [shape, size.width, size.height]);
  useEffect(() => moved.ask(), [nodes, chosen, cursor, found]);
  useEffect(() => {
    const at = shape.at.get(chosen);
    if (at && moved.view.current) moved.show(at, boxWidth, boxHeight);
  }, [chosen]);

  const goTo = (id) => {
    setCursor(id);
    const at = shape.at.get(isCollapsed ? layout.at.get(id)?.layer : id);
    if (at) moved.show(at, boxWidth, boxHeight);
  };
  const jump = (event) => {
    if (event.key !== "Enter" || found.length === 0) return;
    const next = found[(found.indexOf(cursor) + 1) % found.length];
    if (isCollapsed) go(parts, { ...query, node: next, at: "" });
    goTo(next);
  };
  const neighbour = (key, id) => {
    const row = layout.layers[layout.at.get(id).layer];
    const near = (ids) => ids.toSorted((a, b) => Math.abs(layout.at.get(a).x - layout.at.get(id).x) - Math.abs(layout.at.get(b).x - layout.at.get(id).x))[0];
    if (key === "ArrowDown") return near(layout.children.get(id));
    if (key === "ArrowUp") return near(layout.parents.get(id));
    return row[row.indexOf(id) + (key === "ArrowRight" ? 1 : -1)];
  };
  const toLayer = (by) => {
    const last = layout.layers.length - 1;
    const next = chosen === null ? (by > 0 ? 0 : last) : clamp(chosen + by, 0, last);
    setQuery({ group: String(next) });
  };
  const keys = (event) => {
    const step = { ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60] }[event.key];
    const isAlong = event.key === "ArrowUp" || event.key === "ArrowDown";
    if (step && isCollapsed && isAlong && !event.shiftKey && !plain) toLayer(event.key === "ArrowDown" ? 1 : -1);
    else if (step && (event.shiftKey || isCollapsed)) moved.shift(...step);
    else if (step) {
      const from = cursor ?? query.node;
      const next = from && layout.at.has(from) ? neighbour(event.key, from) : layout.layers[0][0];
      if (next) goTo(next);
    } else if (event.key === "Enter" && cursor && !plain && event.target === frame.current) go(parts, { ...query, node: cursor, at: "" });
    else if (event.key === "+" || event.key === "=") moved.zoomBy(1.3);
    else if (event.key === "-") moved.zoomBy(1 / 1.3);
    else if (event.key === "0") moved.fit();
    else return;
    event.preventDefault();
  };
  // A box that is too small for a link is picked by its place.
  const pick = (event) => {
    if (plain || seen.length > 0 || event.target.closest("a")) return;
    const box = frame.current.getBoundingClientRect();
    const { x, y, zoom } = moved.view.current;
    const [px, py] = [(event.clientX - box.left - x) / zoom, (event.clientY - box.top - y) / zoom];
    for (const [id, at] of shape.at) {
      if (px >= at.x && px <= at.x + boxWidth && py >= at.y && py <= at.y + boxHeight) {
        if (isCollapsed) setQuery({ group: String(id) });
        else go(parts, { ...query, node: id, at: "" });
        return;
      }
    }
  };
  const under = cursor && byId.get(cursor);
  const toGroup = (group) => link(parts, { ...query, group });
  return html`<div class="graph">
    <div class="bar"><button onClick=${() => moved.zoomBy(1.3)} aria-label="Zoom in">+</button><button onClick=${() => moved.zoomBy(1 / 1.3)} aria-label="Zoom out">−</button><button onClick=${moved.fit}>Fit</button>
      ${!plain && html`<input type="search" aria-label="Search the graph" placeholder="Find a node" value=${query.find || ""} onInput=${(e) => setQuery({ find: e.currentTarget.value })} onKeyDown=${jump} />
      ${wanted && html`<span class="count">${found.length.toLocaleString()} found${found.length ? ", Enter goes to the next" : ""}</span>`}
      <label><input type="checkbox" checked=${isCollapsed} onChange=${(e) => setQuery({ collapse: e.currentTarget.checked ? "1" : "0", group: "" })} /> Collapse layers</label>`}
      <span class="count">${nodes.length.toLocaleString()} ${nodes.length === 1 ? "node" : "nodes"}${isTooSmall ? "; zoom in to read their names" : ""}</span></div>
    <div class="canvas" ref=${frame} data-layout=${layout.by} tabindex="0" role="application" aria-label=${`Graph. ${KEYS}`} onKeyDown=${keys} onClick=${pick} ...${moved.handlers}>
      <canvas class="lines" ref=${board} aria-hidden="true"></canvas>
      <div class="boxes" ref=${boxes}>
        ${isCollapsed
          ? seen.map((layer) => groups.has(layer) && html`<${LayerBox} key=${layer} layer=${layer} at=${shape.at.get(layer)} counts=${groups.get(layer)} chosen=${layer === chosen} to=${toGroup} />`)
          : seen.map((id) => byId.has(id) && shape.at.has(id) && html`<${Box} key=${id} node=${byId.get(id)} at=${shape.at.get(id)} chosen=${id === chosen} cursor=${id === cursor} match=${marked.has(id) && found.length > 0} href=${href(id)} />`)}
      </div>
      <canvas class="minimap" ref=${map} aria-hidden="true" onPointerDown=${mapMoved} onPointerMove=${mapMoved} onClick=${(e) => e.stopPropagation()}></canvas>
    </div>
    <p class="sr" role="status">${under ? `${under.id}, ${STATES[under.status]?.[1] ?? ""}, ${layout.parents.get(cursor).length} before it, ${layout.children.get(cursor).length} after it` : ""}</p>
    ${isCollapsed && query.group && html`<${GroupList} group=${query.group} nodes=${nodes} layout=${layout} parts=${parts} query=${query} />`}
  </div>`;
}

// A graph that comes with its layout, such as that of a text while it is written.
export function GivenGraph({ graph }) {
  const layout = useMemo(() => prepared(graph), [graph]);
  if (graph.nodes.length === 0) return html`<${Empty}>The graph has no nodes.<//>`;
  return html`<${Drawing} nodes=${graph.nodes} layout=${layout} query=${{}} href=${() => null} plain />`;
}

export function Graph({ run, query }) {
  const href = (id) => link(["runs", run.run_id, "graph"], { ...query, node: id, at: "", items: "" });
  return html`<${GraphView} nodes=${run.nodes} where=${path("runs", run.run_id, "graph")} query=${query} href=${href} />`;
}
