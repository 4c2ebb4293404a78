// Parts that several screens use. Data is only ever a text node.
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./html.js";
import { get, isRawNumber, readOnly, save } from "./api.js";
import { useStore } from "./store.js";

// ── states: always a colour, an icon and a word ─────────────────────────────────────────

export const STATES = {
  PENDING: ["○", "pending"],
  QUEUED: ["◔", "queued"],
  RUNNING: ["▶", "running"],
  COMPLETED: ["✓", "completed"],
  FAILED: ["✕", "failed"],
  SKIPPED: ["»", "skipped"],
  CANCELLED: ["⊘", "cancelled"],
  LOST: ["?", "lost"],
};
export const RUN_STATES = ["PENDING", "RUNNING", "COMPLETED", "FAILED", "CANCELLED"];
export const NODE_STATES = ["FAILED", "RUNNING", "QUEUED", "PENDING", "CANCELLED", "SKIPPED", "COMPLETED"];

// The states to choose from. While counts change, a button that appeared would move the others from
// under the pointer: so the usual states have a button from the start, also with 0.
const RARE = ["CANCELLED", "SKIPPED"];
export const statesToChoose = (states, counts, going, chosen) =>
  states.filter((one) => counts[one] > 0 || one === chosen || (going && !RARE.includes(one)));

export function State({ of }) {
  const [icon, word] = STATES[of] || ["?", String(of).toLowerCase()];
  return html`<span class="state state-${word}"><span class="icon" aria-hidden="true">${icon}</span>${word}</span>`;
}

export const isActive = (run) => run.status === "PENDING" || run.status === "RUNNING";

// A long name that is cut before its end: names that belong together often differ there only.
const END = 8;

export function Name({ text }) {
  if (text.length <= 2 * END) return text;
  return html`<span class="cut"><span>${text.slice(0, -END)}</span><span>${text.slice(-END)}</span></span>`;
}

// ── times ───────────────────────────────────────────────────────────────────────────────

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 59.95) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

// Everywhere in the time zone of the browser; the whole time, in UTC, is in the title.
const CLOCK = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
const DAY = new Intl.DateTimeFormat(undefined, { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", hour12: false });

const LINE = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", fractionalSecondDigits: 3, hour12: false });

// Of a line of a log or an event, with milliseconds.
export const clock = (time) => LINE.format(new Date(time));

export const moment = (time) => DAY.format(new Date(time));

export function Time({ at }) {
  if (!at) return "";
  const time = new Date(at);
  const today = time.toDateString() === new Date().toDateString();
  return html`<time datetime=${at} title=${at}>${(today ? CLOCK : DAY).format(time)}</time>`;
}

// The time since then, which goes on while nothing has ended.
export function Elapsed({ from, to, seconds }) {
  const [, tick] = useState(0);
  const goes = from && !to;
  useEffect(() => {
    if (!goes) return undefined;
    const timer = setInterval(() => tick((n) => n + 1), 1000);
    return () => clearInterval(timer);
  }, [goes]);
  if (seconds !== null && seconds !== undefined) return duration(seconds);
  return from ? duration(Math.max(0, (new Date(to || Date.now()) - new Date(from)) / 1000)) : "";
}

// ── buttons, messages, dialogs ──────────────────────────────────────────────────────────

// Browsers have `navigator.clipboard` only over HTTPS and on loopback.
export async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const before = document.activeElement;
  const area = document.createElement("textarea");
  area.value = text;
  area.className = "sr";
  (document.querySelector("dialog[open]") ?? document.body).append(area); // all else is inert
  area.focus({ preventScroll: true });
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  before?.focus({ preventScroll: true });
  if (!done) throw new Error("The browser does not let the page copy.");
  return undefined;
}

// `text` may be a function, which may have to read something first.
export function Copy({ text, label = "Copy" }) {
  const [said, setSaid] = useState(null);
  const copy = async () => {
    try {
      await copyText(typeof text === "function" ? await text() : text);
      setSaid("Copied");
    } catch {
      setSaid("Not copied");
    }
    setTimeout(() => setSaid(null), 1500);
  };
  return html`<button type="button" class="quiet" onClick=${copy}>${said ?? label}</button>`;
}

export const READ_ONLY = "This token may only read.";

// A button that changes something on the server.
export function WriteButton({ disabled, children, ...more }) {
  const isReader = useStore(readOnly);
  return html`<button ...${more} disabled=${isReader || disabled} title=${isReader ? READ_ONLY : null}>${children}</button>`;
}

export function Trouble({ error, again }) {
  if (!error) return null;
  return html`<div class="trouble" role="alert">
    <p>${error.message}</p>
    ${error.errors?.length > 0 && html`<ul>${error.errors.map((one) => html`<li><code>${one.path}</code> ${one.message}</li>`)}</ul>`}
    ${again && html`<button onClick=${again}>Try again</button>`}
  </div>`;
}

export const Empty = ({ children }) => html`<div class="empty">${children}</div>`;
export const Loading = () => html`<p class="loading" role="status">Loading…</p>`;

export function Dialog({ title, onClose, children }) {
  const element = useRef(null);
  useLayoutEffect(() => {
    element.current.showModal();
  }, []);
  return html`<dialog ref=${element} aria-label=${title} onClose=${onClose}>
    <header><h2>${title}</h2><button class="quiet" aria-label="Close" onClick=${() => element.current.close()}>✕</button></header>
    ${children}
  </dialog>`;
}

export function Tabs({ label, items, current }) {
  const bar = useRef(null);
  // On a phone not all tabs fit: the current one is scrolled into view.
  useLayoutEffect(() => {
    const tab = bar.current.querySelector("[aria-current]");
    if (tab) bar.current.scrollLeft = tab.offsetLeft - (bar.current.clientWidth - tab.offsetWidth) / 2;
  }, [current]);
  return html`<nav class="tabs" aria-label=${label} ref=${bar}>
    ${items.map(([key, words, href]) => html`<a key=${key} href=${href} aria-current=${key === current ? "page" : null}>${words}</a>`)}
  </nav>`;
}

// ── what a screen reads ─────────────────────────────────────────────────────────────────

// Reads an address of the API, or calls `read`, again whenever `where` changes. The value of before
// stays until the new one is there, so that a change of a version does not blink.
export function useRead(where, read = get) {
  const [state, setState] = useState({ value: null, error: null, of: null });
  const [turn, setTurn] = useState(0);
  useEffect(() => {
    if (!where) return undefined;
    const leaving = new AbortController();
    read(where, leaving.signal).then(
      (value) => leaving.signal.aborted || setState({ value, error: null, of: where }),
      (error) => leaving.signal.aborted || setState({ value: null, error, of: where }),
    );
    return () => leaving.abort();
  }, [where, turn]);
  return { ...state, isNew: state.of === where, again: () => setTurn((n) => n + 1) };
}

// A part of the page that is loaded when it is first seen.
export function Later({ load, part, isScreen, isOverlay, ...props }) {
  const [state, setState] = useState({});
  useEffect(() => {
    let left = false;
    load().then((module) => left || setState({ Part: module[part] }), () => left || setState({ lost: true }));
    return () => { left = true; };
  }, [part]);
  const framed = (content) => (isScreen ? html`<main tabindex="-1">${content}</main>` : content);
  if (state.lost) return framed(html`<${Empty}>This part of the page cannot be loaded: the server is away, or has a newer version. <button onClick=${() => location.reload()}>Load the page again</button><//>`);
  if (state.Part) return html`<${state.Part} ...${props} />`;
  return isOverlay ? null : framed(html`<${Loading} />`);
}

// ── lists: only the rows in view are in the document ────────────────────────────────────

const ROWS_BEYOND = 8;

export function useNarrow() {
  const [narrow, setNarrow] = useState(() => matchMedia("(max-width: 640px)").matches);
  useEffect(() => {
    const query = matchMedia("(max-width: 640px)");
    const change = () => setNarrow(query.matches);
    query.addEventListener("change", change);
    return () => query.removeEventListener("change", change);
  }, []);
  return narrow;
}

// What the columns of the rows below are. `columns`: a class and words for each.
export function Heads({ kind, columns, first }) {
  const words = columns.map(([name, text]) => html`<span class=${name}>${text}</span>`);
  return html`<div class=${`heads ${kind}`}>${first}<span class="cover" aria-hidden="true">${words}</span></div>`;
}

// Rows of one height. It scrolls with the page, or by itself where `own` is set; `follow` keeps
// its end in view.
export function Rows({ items, height, row, own, follow, onLeaveEnd, label, role = "list" }) {
  const outer = useRef(null);
  const [range, setRange] = useState([0, 60]);
  const measure = () => {
    const element = outer.current;
    if (!element) return;
    const top = own ? element.scrollTop : Math.max(0, -element.getBoundingClientRect().top);
    const seen = own ? element.clientHeight : window.innerHeight;
    const first = Math.max(0, Math.floor(top / height) - ROWS_BEYOND);
    const last = Math.ceil((top + seen) / height) + ROWS_BEYOND;
    setRange((now) => (now[0] === first && now[1] === last ? now : [first, last]));
  };
  useEffect(() => {
    const target = own ? outer.current : window;
    const scrolled = () => {
      measure();
      const element = outer.current;
      if (own && follow && element.scrollHeight - element.scrollTop - element.clientHeight > 3 * height) onLeaveEnd?.();
    };
    measure();
    target.addEventListener("scroll", scrolled, { passive: true });
    window.addEventListener("resize", measure);
    return () => {
      target.removeEventListener("scroll", scrolled);
      window.removeEventListener("resize", measure);
    };
  }, [own, follow, height]);
  useLayoutEffect(() => {
    if (own && follow) outer.current.scrollTop = outer.current.scrollHeight;
    measure();
  }, [items, follow, height]);
  const last = Math.min(items.length, range[1]);
  const first = Math.min(range[0], Math.max(0, last - 1));
  return html`<div ref=${outer} class=${own ? "rows own" : "rows"} role=${role} aria-label=${label} tabindex=${own ? 0 : null}>
    <div class="extent" style=${{ height: `${items.length * height}px` }}>
      <div class="window" style=${{ transform: `translateY(${first * height}px)` }}>
        ${items.slice(first, last).map((item, n) => row(item, first + n))}
      </div>
    </div>
  </div>`;
}

const TYPING_MS = 250;

// A field that acts once the user has stopped typing. It keeps its own text: a screen that is drawn
// anew meanwhile, by an event or by another filter, must not take letters away.
export function TypedInput({ value, set, onText, ...more }) {
  const [text, setText] = useState(value);
  const timer = useRef(null);
  useEffect(() => {
    if (timer.current === null) setText(value);
  }, [value]);
  useEffect(() => () => clearTimeout(timer.current), []);
  const typed = (event) => {
    const given = event.currentTarget.value;
    setText(given);
    onText?.(given);
    clearTimeout(timer.current);
    timer.current = setTimeout(() => {
      timer.current = null;
      set(given);
    }, TYPING_MS);
  };
  return html`<input type="search" value=${text} onInput=${typed} ...${more} />`;
}

// The name of a node, typed: a list of ten thousand to choose from would fill the document.
const SUGGESTIONS = 30;

export function NodeInput({ nodes, value, onChoose, placeholder, label, ...more }) {
  const [text, setText] = useState(value || "");
  const id = useMemo(() => `nodes-${Math.random().toString(36).slice(2)}`, []);
  useEffect(() => setText(value || ""), [value]);
  const known = useMemo(() => new Set(nodes.map((node) => node.id)), [nodes.length]);
  const wanted = text.toLowerCase();
  const found = [];
  for (const node of nodes) {
    if (found.length >= SUGGESTIONS) break;
    if (node.id.toLowerCase().includes(wanted)) found.push(node.id);
  }
  const typed = (event) => {
    const given = event.currentTarget.value;
    setText(given);
    if (given === "" || known.has(given)) onChoose(given);
  };
  return html`<input type="search" list=${id} value=${text} placeholder=${placeholder} aria-label=${label} onInput=${typed} autocomplete="off" ...${more} />
    <datalist id=${id}>${found.map((one) => html`<option key=${one} value=${one} />`)}</datalist>`;
}

// ── JSON as a tree ──────────────────────────────────────────────────────────────────────

const CHILDREN = 100;
const LONG_TEXT = 2000;
const SMALL = 3000; // a value of fewer characters is shown whole

// The same value with the large outputs in it: what is copied and saved is whole.
async function whole(value) {
  if (isReference(value)) return get(value.$output.href);
  if (value === null || typeof value !== "object" || !Object.values(value).some(isReference)) return value;
  const entries = await Promise.all(Object.entries(value).map(async ([key, inner]) => [key, isReference(inner) ? await get(inner.$output.href) : inner]));
  return Object.fromEntries(entries);
}

// Data may have a key `$output` of its own, below the top.
const HREF = /^\/api\/v1\/runs\/[^/?#]+\/(result|nodes\/[^/?#]+\/output)$/;

function isReference(value) {
  return value !== null && typeof value === "object" && HREF.test(value.$output?.href) && Object.keys(value).length === 1;
}

export function bytes(size) {
  return size < 1000 ? `${size} B` : size < 1e6 ? `${Math.round(size / 1000)} kB` : `${(size / 1e6).toFixed(1)} MB`;
}

function Large({ reference, name }) {
  const [state, setState] = useState({});
  if (state.loaded) return html`<${Tree} value=${state.value} name=${name} open />`;
  const load = async () => {
    try {
      setState({ loaded: true, value: await get(reference.href) });
    } catch (error) {
      setState({ error });
    }
  };
  return html`<div class="leaf">${name !== undefined && html`<span class="key">${name}: </span>`}
    <button class="quiet" onClick=${load}>Load (${bytes(reference.size)})</button> ${state.error?.message}</div>`;
}

export function Tree({ value, name, open }) {
  const [isOpen, setOpen] = useState(Boolean(open));
  const [shown, setShown] = useState(CHILDREN);
  if (isReference(value)) return html`<${Large} reference=${value.$output} name=${name} />`;
  const key = name !== undefined && html`<span class="key">${name}: </span>`;
  if (value === null || typeof value !== "object" || isRawNumber(value)) {
    const text = typeof value === "string" || isRawNumber(value) ? JSON.stringify(value) : String(value);
    const cut = text.length > LONG_TEXT && !isOpen;
    return html`<div class="leaf">${key}<span class="value-${value === null ? "null" : isRawNumber(value) ? "number" : typeof value}">${cut ? text.slice(0, LONG_TEXT) + "…" : text}</span>
      ${cut && html`<button class="quiet" onClick=${() => setOpen(true)}>All (${bytes(text.length)})</button>`}</div>`;
  }
  const isList = Array.isArray(value);
  const entries = isList ? value.map((inner, n) => [n, inner]) : Object.entries(value);
  const size = isList ? `${entries.length} ${entries.length === 1 ? "item" : "items"}` : `${entries.length} ${entries.length === 1 ? "key" : "keys"}`;
  if (entries.length === 0) return html`<div class="leaf">${key}<span class="value-null">${isList ? "[]" : "{}"}</span></div>`;
  return html`<details class="tree" open=${isOpen} onToggle=${(event) => { event.stopPropagation(); setOpen(event.currentTarget.open); }}>
    <summary>${key}<span class="size">${isList ? "[" : "{"}${size}${isList ? "]" : "}"}</span></summary>
    ${isOpen && html`<div class="children">
      ${entries.slice(0, shown).map(([inner, child]) => html`<${Tree} key=${inner} name=${inner} value=${child} open=${open === "all" ? "all" : false} />`)}
      ${entries.length > shown && html`<button class="quiet" onClick=${() => setShown(shown + 1000)}>${entries.length - shown} more</button>`}
    </div>`}
  </details>`;
}

export function Json({ title, value, file, level = 3 }) {
  const [error, setError] = useState(null);
  const text = async () => JSON.stringify(await whole(value), null, 2);
  const download = async () => {
    setError(null);
    try {
      save(new Blob([await text()], { type: "application/json" }), file);
    } catch (problem) {
      setError(problem);
    }
  };
  const isSmall = useMemo(() => (JSON.stringify(value) ?? "").length < SMALL, [value]);
  return html`<section class="json">
    <header><${`h${level}`}>${title}<//>
      ${value !== null && value !== undefined && html`<${Copy} text=${text} />
      ${file && html`<button class="quiet" onClick=${download}>Download</button>`}`}
    </header>
    <${Trouble} error=${error} />
    ${value === null || value === undefined ? html`<p class="none">none</p>` : html`<${Tree} value=${value} open=${isSmall ? "all" : true} />`}
  </section>`;
}
