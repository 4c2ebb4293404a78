// Where the page is: `#/runs/<id>/logs?node=fetch`. Every selection is in the address.
import { createStore } from "./store.js";

export const route = createStore(parse());
window.addEventListener("hashchange", () => route.set(parse()));

function parse() {
  const [place, query = ""] = location.hash.replace(/^#/, "").split("?");
  const parts = place.split("/").filter(Boolean).map(decoded);
  return { parts: parts.length ? parts : ["runs"], query: Object.fromEntries(new URLSearchParams(query)) };
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

export function link(parts, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const place = "#/" + parts.map(encodeURIComponent).join("/");
  return given.length ? `${place}?${new URLSearchParams(given)}` : place;
}

export function go(parts, query) {
  location.hash = link(parts, query);
}

// A change of filters does not fill the history: one step back leads to the screen before.
export function setQuery(changes) {
  const { parts, query } = route.get();
  history.replaceState(null, "", link(parts, { ...query, ...changes }));
  route.set(parse());
}
