// The items of a `for_each` node: counts, and a table that is read page by page, failed ones first.
import { html, useEffect, useRef, useState } from "./html.js";
import { calmly, get, path, withQuery } from "./api.js";
import { link, setQuery } from "./route.js";
import { Elapsed, Empty, Json, Loading, STATES, State, Trouble, statesToChoose } from "./ui.js";

const PAGE = 50;
const REFRESH_MS = 500;
const ITEM_STATES = ["FAILED", "RUNNING", "PENDING", "CANCELLED", "COMPLETED"];

export function itemsWords(items) {
  const failed = items.failed ? `, ${items.failed.toLocaleString()} failed` : "";
  return `${items.completed.toLocaleString()} of ${items.total.toLocaleString()} items${failed}`;
}

// The same for a box of the graph.
export function itemsShort(items) {
  return `${items.completed.toLocaleString()} / ${items.total.toLocaleString()}${items.failed ? `, ${items.failed.toLocaleString()} failed` : ""}`;
}

// The items in this state, or all: then the failed ones come first. They are read again while their
// counts change, as far as they were read.
function useItems(runId, node, status) {
  const [state, setState] = useState({ items: null, cursor: null, error: null });
  const where = path("runs", runId, "nodes", node.id, "items");
  const counts = JSON.stringify(node.items);
  const control = useRef(null);
  const failures = useRef(0);
  failures.current = node.items.failed;
  useEffect(() => {
    const leaving = new AbortController();
    const { signal } = leaving;
    let known = { items: [], cursor: null }; // in the order of the list
    let failed = [];
    const show = () => {
      const first = new Set(failed.map((one) => one.index));
      setState({ items: [...failed, ...known.items.filter((one) => !first.has(one.index))], cursor: known.cursor, error: null });
    };
    const fail = (error) => signal.aborted || setState((now) => ({ ...now, error: error.status === 0 && now.items ? null : error }));
    const read = (more) => get(withQuery(where, { status, ...more }), signal);
    async function newest() {
      try {
        failed = status || !failures.current ? [] : (await get(withQuery(where, { status: "FAILED" }), signal)).items;
        const page = await read({ limit: Math.max(PAGE, known.items.length) });
        const last = page.items.at(-1)?.index ?? -1;
        // Pages below the longest one that can be read at once stay.
        const beyond = page.next_cursor === null ? [] : known.items.filter((one) => one.index > last);
        known = { items: [...page.items, ...beyond], cursor: beyond.length ? known.cursor : page.next_cursor };
        show();
      } catch (error) {
        fail(error);
      }
    }
    async function more() {
      try {
        const page = await read({ cursor: known.cursor });
        const last = known.items.at(-1)?.index ?? -1;
        known = { items: [...known.items, ...page.items.filter((one) => one.index > last)], cursor: page.next_cursor };
        show();
      } catch (error) {
        fail(error);
      }
    }
    control.current = { refresh: calmly(newest, REFRESH_MS, signal), more };
    return () => leaving.abort();
  }, [where, status]);
  useEffect(() => { control.current.refresh(); }, [where, status, counts]);
  return { ...state, more: () => control.current.more() };
}

function Item({ runId, node, item }) {
  const [open, setOpen] = useState(false);
  const words = item.error?.message ?? item.reason?.replaceAll("_", " ") ?? "";
  return html`<li class="item">
    <button class="quiet" aria-expanded=${open} onClick=${() => setOpen(!open)}>${node.id}[${item.index}]</button>
    <${State} of=${item.status} />
    <span class="count c-took">${item.attempt > 1 ? `attempt ${item.attempt} ` : ""}<${Elapsed} from=${item.started_at} to=${item.finished_at} /></span>
    <a href=${link(["runs", runId, "logs"], { node: node.id, item: item.index })}>Log</a>
    ${words && html`<span class="item-error">${words}</span>`}
    ${open && html`<div class="item-detail">
      ${item.error && html`<p><strong>${item.error.type}</strong>: ${item.error.message}</p>`}
      ${item.reason && html`<p>reason: ${item.reason.replaceAll("_", " ")}</p>`}
      <p>${item.attempt ? `attempt ${item.attempt}` : "never started"}${item.worker && html` on <code>${item.worker}</code>`}</p>
      <${Json} title="Output" value=${item.output} file=${`${node.id}-${item.index}.json`} /></div>`}
  </li>`;
}

export function Items({ runId, node, query, failedOnly }) {
  const status = failedOnly ? "FAILED" : query.items || "";
  const { items, cursor, error, more } = useItems(runId, node, status);
  const counts = Object.fromEntries(ITEM_STATES.map((state) => [state, node.items[state.toLowerCase()]]));
  const shown = statesToChoose(ITEM_STATES, counts, !node.finished_at, status);
  return html`<section class="items"><header><h3>${failedOnly ? "Failed items" : "Items"}</h3><span class="count">${itemsWords(node.items)}</span></header>
    ${!failedOnly && html`<div class="chips" role="group" aria-label="State of the items">
      <button class="chip" aria-pressed=${!status} onClick=${() => setQuery({ items: "" })}>all ${node.items.total.toLocaleString()}</button>
      ${shown.map((state) => html`<button class="chip" key=${state} aria-pressed=${status === state} onClick=${() => setQuery({ items: state })}>
        <span class="icon state-${STATES[state][1]}" aria-hidden="true">${STATES[state][0]}</span>${STATES[state][1]} ${counts[state].toLocaleString()}</button>`)}
    </div>`}
    <${Trouble} error=${error} />
    ${items === null && !error && html`<${Loading} />`}
    ${items?.length === 0 && html`<${Empty}>${node.items.total === 0 ? "The list has no items." : "No item is in this state."}<//>`}
    ${items?.length > 0 && html`<ul class="plain">${items.map((item) => html`<${Item} key=${item.index} runId=${runId} node=${node} item=${item} />`)}</ul>`}
    ${cursor && html`<p class="more"><button onClick=${more}>More items</button></p>`}
  </section>`;
}
