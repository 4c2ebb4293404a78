// The API of the server that gave out this page: calls, streams, the token, the connection.
import { createStore } from "./store.js";

const PREFIX = "/api/v1";
const TOKEN = "dovetail.token";
const SILENCE_MS = 40000; // the server sends a comment every 15 s
const MAX_BACKOFF_MS = 5000;
const HIDDEN_MS = 3000;

// Whether the server answers. `generation` grows with each new token: screens then load anew.
export const connection = createStore({ lost: false });
export const auth = createStore({ needed: false, wrong: false, generation: 0 });
// Whether the token may only read. The server refuses it anyway; the page says so before.
export const readOnly = createStore(false);

export class Problem extends Error {
  constructor(status, detail, errors) {
    super(detail);
    this.status = status;
    this.errors = errors || [];
  }
}

function token() {
  return sessionStorage.getItem(TOKEN);
}

function fitsHeader(text) {
  try {
    return Boolean(new Headers({ Authorization: text }));
  } catch {
    return false;
  }
}

export function useToken(given) {
  // With a sign that no header can have, every call would fail before it is sent.
  if (!fitsHeader(given)) return auth.set({ needed: true, wrong: true, generation: auth.get().generation });
  sessionStorage.setItem(TOKEN, given);
  auth.set({ needed: false, wrong: false, generation: auth.get().generation + 1 });
  return undefined;
}

export function forgetToken() {
  sessionStorage.removeItem(TOKEN);
  auth.set({ needed: true, wrong: false, generation: auth.get().generation });
}

export function hasToken() {
  return token() !== null;
}

export async function askScope() {
  readOnly.set(hasToken() && (await get("/me")).scope === "read");
}

export const path = (...parts) => parts.map((part) => "/" + encodeURIComponent(part)).join("");

export function withQuery(base, query) {
  const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  return given.length ? `${base}?${new URLSearchParams(given)}` : base;
}

function withToken(headers) {
  return token() === null ? { ...headers } : { ...headers, Authorization: `Bearer ${token()}` };
}

// A call as it is, whatever its reply.
export const rawCall = (method, where, headers, body, signal) => fetch(where, { method, headers: withToken(headers), body, signal, cache: "no-store" });

// Whole numbers beyond 2^53 stay as they were written, where the browser can do that.
const LARGE_NUMBER = /(?:^|[[:,])\s*-?\d{16,}\s*(?:$|[,}\]])/;

export function parseJson(text) {
  if (!JSON.rawJSON || !LARGE_NUMBER.test(text)) return JSON.parse(text);
  const isLarge = (value, source) => Number.isInteger(value) && !Number.isSafeInteger(value) && /^-?\d+$/.test(source);
  return JSON.parse(text, (key, value, { source }) => (isLarge(value, source) ? JSON.rawJSON(source) : value));
}

export const isRawNumber = (value) => Boolean(JSON.isRawJSON?.(value));

async function send(method, where, { body, headers = {}, signal } = {}) {
  const used = token();
  const sent = withToken(headers);
  if (body !== undefined && typeof body !== "string") {
    sent["Content-Type"] = "application/json";
    body = JSON.stringify(body);
  }
  let reply;
  try {
    reply = await fetch(where.startsWith(PREFIX) ? where : PREFIX + where, { method, headers: sent, body, signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    connection.set({ lost: true });
    throw new Problem(0, "The server does not answer.");
  }
  if (connection.get().lost) connection.set({ lost: false });
  if (reply.ok || reply.status === 304) return reply;
  let problem = {};
  try {
    problem = await reply.json();
  } catch {
    // A proxy may reply with something else than a problem.
  }
  if (reply.status === 401 && used === token()) { // a late reply says nothing about a newer token
    auth.set({ needed: true, wrong: used !== null, generation: auth.get().generation });
  }
  throw new Problem(reply.status, sentence(problem.detail || `The server replied with status ${reply.status}.`), problem.errors);
}

function sentence(text) {
  const whole = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?…]$/.test(whole) ? whole : whole + ".";
}

// The body of a reply. The server may die before all of it is there, and a proxy may reply with
// something else than JSON.
async function bodyOf(reply, read = "text") {
  try {
    return await reply[read]();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    connection.set({ lost: true });
    throw new Problem(0, "The server does not answer.");
  }
}

async function jsonOf(reply) {
  const text = await bodyOf(reply);
  try {
    return parseJson(text);
  } catch {
    throw new Problem(reply.status, "The reply of the server cannot be read: it is no JSON.");
  }
}

export async function get(where, signal) {
  return jsonOf(await send("GET", where, { signal }));
}

// A read that is repeated: gives back `known` itself if the server says that it is the same. `seq`
// is the number of the last event that a run has in it.
export async function reread(where, known, signal) {
  const headers = known && known.tag ? { "If-None-Match": known.tag } : {};
  const reply = await send("GET", where, { headers, signal });
  if (reply.status === 304) return known;
  return { value: await jsonOf(reply), tag: reply.headers.get("ETag"), seq: Number(reply.headers.get("Last-Event-Id")) };
}

export async function post(where, body, headers, signal) {
  const reply = await send("POST", where, { body, headers, signal });
  return reply.status === 204 ? null : jsonOf(reply);
}

export async function put(where, body, headers) {
  return jsonOf(await send("PUT", where, { body, headers }));
}

export async function remove(where, headers) {
  await send("DELETE", where, { headers });
}

export async function getText(where, accept, signal) {
  return bodyOf(await send("GET", where, { headers: { Accept: accept }, signal }));
}

// A file as an address that an image can have; it needs the token, so `src` alone cannot load it.
export async function dataUrl(where, signal) {
  const blob = await bodyOf(await send("GET", where, { signal }), "blob");
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Problem(0, "The file cannot be shown."));
    reader.readAsDataURL(blob);
  });
}

export async function download(where, accept, name) {
  const reply = await send("GET", where, { headers: { Accept: accept } });
  save(await bodyOf(reply, "blob"), name);
}

export function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

export const pause = (ms, signal) =>
  new Promise((resolve) => {
    const done = () => {
      clearTimeout(timer);
      signal?.removeEventListener("abort", done);
      resolve();
    };
    const timer = setTimeout(done, ms);
    signal?.addEventListener("abort", done);
  });

// Calls `act` soon, and once more if it is called meanwhile.
export function calmly(act, ms, signal) {
  let busy = false;
  let again = false;
  return async function ask() {
    again = true;
    if (busy) return;
    busy = true;
    while (again && !signal.aborted) {
      again = false;
      await act();
      await pause(ms, signal);
    }
    busy = false;
  };
}

// Follows a stream of events until it has ended for good; comes back after a break where it was.
// `onEvents` gets a list, all that came in one piece. Throws `Problem` for a refusal.
// EventSource cannot send a token, so the frames are read here.
// `first` stands for "after nothing": with it the server can say that a stream has ended for good.
export async function follow(where, { after, first = null, onEvents, onOpen, signal }) {
  let last = after === undefined ? null : String(after);
  let failures = 0;
  while (!signal.aborted) {
    await shown(signal);
    const headers = { Accept: "text/event-stream" };
    if (last !== null) headers["Last-Event-ID"] = last;
    const open = whileShown(signal);
    try {
      const reply = await send("GET", where, { headers, signal: open.signal });
      if (reply.status === 204) return;
      failures = 0;
      last ??= reply.headers.get("Last-Event-ID"); // where it begins: it may break off before the first event
      onOpen?.();
      for await (const frames of framesOf(reply.body, open.signal)) {
        last = frames.at(-1).id ?? last;
        onEvents(frames.map((frame) => parseJson(frame.data)));
      }
    } catch (error) {
      if (signal.aborted) return;
      if (open.signal.aborted) continue;
      if (error.status === 410) last = null; // events are missing: `onOpen` reads everything anew
      else if (error instanceof Problem && error.status !== 0 && error.status !== 429 && error.status !== 503) throw error;
    } finally {
      open.abort(); // its listeners go, too
    }
    last ??= first;
    await pause(Math.min(500 * 2 ** failures++, MAX_BACKOFF_MS), signal);
  }
}

// The events of all runs, over one stream however many listeners there are. A listener gets lists of
// events; null says that the stream begins (`again`: after a break), and what happened before is to
// be read.
const listeners = new Set();
let leavingFeed = null;

export function onRunEvents(listener) {
  listeners.add(listener);
  const tell = (events, again) => {
    for (const one of [...listeners]) one(events, again);
  };
  if (leavingFeed === null) {
    leavingFeed = new AbortController();
    let again = false;
    const onOpen = () => {
      tell(null, again);
      again = true;
    };
    follow("/events", { signal: leavingFeed.signal, onOpen, onEvents: (events) => tell(events) }).catch(() => {});
  }
  return () => {
    listeners.delete(listener);
    if (listeners.size > 0) return;
    leavingFeed?.abort();
    leavingFeed = null;
  };
}

// A browser has six connections to a server over HTTP/1.1, for all tabs together: a hidden
// tab gives its streams back, and continues where it was when it is shown again.
function shown(signal) {
  return new Promise((resolve) => {
    if (!document.hidden || signal.aborted) return resolve();
    const look = () => {
      if (document.hidden && !signal.aborted) return;
      document.removeEventListener("visibilitychange", look);
      resolve();
    };
    document.addEventListener("visibilitychange", look);
    signal.addEventListener("abort", look, { once: true });
    return undefined;
  });
}

// Aborts with the given signal, and once the tab has been hidden for a while.
function whileShown(signal) {
  const open = new AbortController();
  let timer = null;
  const look = () => {
    clearTimeout(timer);
    timer = document.hidden ? setTimeout(() => open.abort(), HIDDEN_MS) : null;
  };
  const stop = () => open.abort();
  document.addEventListener("visibilitychange", look);
  signal.addEventListener("abort", stop, { once: true });
  open.signal.addEventListener("abort", () => {
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", look);
    signal.removeEventListener("abort", stop);
  }, { once: true });
  return open;
}

async function* framesOf(body, signal) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    while (true) {
      const { done, value } = await withDeadline(reader.read(), signal);
      if (done) return;
      text += value;
      const parts = text.split("\n\n");
      text = parts.pop();
      const frames = parts.map(frameOf).filter((frame) => frame.data !== null);
      if (frames.length) yield frames;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function withDeadline(reading, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(() => reject(new Problem(0, "The stream is silent.")), SILENCE_MS);
    const stop = () => reject(new DOMException("left", "AbortError"));
    signal.addEventListener("abort", stop, { once: true });
    reading.then(resolve, () => reject(new Problem(0, "The stream broke off."))).finally(() => {
      clearTimeout(timer);
      signal.removeEventListener("abort", stop);
    });
  });
}

function frameOf(text) {
  const frame = { id: null, data: null };
  for (const line of text.split("\n")) {
    if (line.startsWith("id: ")) frame.id = line.slice(4);
    else if (line.startsWith("data: ")) frame.data = line.slice(6);
  }
  return frame;
}

// A repeated request with the same key makes no second run. `randomUUID` needs a secure context.
export function newKey() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
