// All runs, newest first, live. Filters are in the address.
import { html, useEffect, useRef, useState } from "./html.js";
import { Problem, follow, get, pause, post, path, reread, withQuery } from "./api.js";
import { link, setQuery } from "./route.js";
import { Dialog, Elapsed, Empty, Loading, RUN_STATES, Rows, STATES, State, Time, Trouble, isActive, useNarrow } from "./ui.js";

const PAGE = 50;
const MAX_REREAD = 1000;
const POLL_MS = 2000;
const REFRESH_MS = 400;

// As the server's own search: the beginning of the id, a part of the name, a value of the params.
function matches(run, text) {
  const wanted = text.toLowerCase();
  const within = (value) =>
    value !== null && typeof value === "object" ? Object.values(value).some(within)
      : (typeof value === "string" || typeof value === "number") && String(value).toLowerCase().includes(wanted);
  return run.run_id.startsWith(wanted) || run.workflow.toLowerCase().includes(wanted) || within(run.params);
}

function useRuns({ status, workflow, q }) {
  const [state, setState] = useState({ items: null, cursor: null, error: null });
  const control = useRef(null);
  useEffect(() => {
    const leaving = new AbortController();
    const { signal } = leaving;
    const where = (more) => withQuery("/runs", { status, workflow, q, ...more });
    let items = [];
    let known = null;
    let reading = false;
    let dirty = false;
    setState({ items: null, cursor: null, error: null });
    async function refresh() {
      dirty = true;
      if (reading) return;
      reading = true;
      while (dirty && !signal.aborted) {
        dirty = false;
        const count = Math.min(MAX_REREAD, Math.max(PAGE, items.length));
        try {
          const page = await reread(where({ limit: count }), known?.count === count ? known : null, signal);
          if (page !== known) {
            known = { ...page, count };
            const found = page.value.items;
            const beyond = items.slice(count);
            items = beyond.length ? [...found, ...beyond.filter((run) => !found.some((one) => one.run_id === run.run_id))] : found;
            setState((now) => ({ items, cursor: beyond.length ? now.cursor : page.value.next_cursor, error: null }));
          }
        } catch (error) {
          if (signal.aborted) return;
          setState((now) => ({ ...now, error: error.status === 0 && now.items ? null : error }));
        }
        await pause(REFRESH_MS, signal);
      }
      reading = false;
    }
    async function older(cursor) {
      try {
        const page = await get(where({ limit: PAGE * 4, cursor }), signal);
        items = [...items, ...page.items];
        setState({ items, cursor: page.next_cursor, error: null });
      } catch (error) {
        if (!signal.aborted) setState((now) => ({ ...now, error }));
      }
    }
    async function live() {
      await refresh();
      try {
        // A server of an older version has no stream over all runs.
        await follow("/events", { signal, onOpen: refresh, onEvents: refresh });
      } catch (error) {
        if (!(error instanceof Problem)) throw error;
        while (!signal.aborted) {
          await pause(POLL_MS, signal);
          if (!signal.aborted && !document.hidden) await refresh();
        }
      }
    }
    live();
    control.current = { older, refresh };
    return () => leaving.abort();
  }, [status, workflow, q]);
  return { ...state, older: (cursor) => control.current.older(cursor), refresh: () => control.current.refresh() };
}

function Row({ run, checked, check }) {
  const words = run.error ? `${run.error.node ? run.error.node + ": " : ""}${run.error.message}` : "";
  return html`<div class="row run" role="listitem">
    <label class="check"><input type="checkbox" checked=${checked} aria-label=${`Select run ${run.run_id}`} onChange=${check} /></label>
    <a class="cover" href=${link(["runs", run.run_id])}>
      <span class="c-state"><${State} of=${run.status} /></span>
      <span class="c-name">${run.workflow}${run.version ? html`<small> v${run.version}</small>` : null}</span>
      <span class="c-id"><code>${run.run_id.slice(0, 8)}</code></span>
      <span class="c-error">${words}</span>
      <span class="c-time"><${Time} at=${run.created_at} /></span>
      <span class="c-duration"><${Elapsed} from=${run.started_at} to=${run.finished_at} seconds=${run.duration} /></span>
    </a>
  </div>`;
}

// One call for all where the server has it, else one call for each run.
async function forEachRun(verb, ids) {
  try {
    return (await post(`/runs/${verb}`, { run_ids: ids })).items;
  } catch (error) {
    if (error.status !== 404 && error.status !== 405) throw error;
  }
  const outcomes = [];
  for (const id of ids) {
    try {
      const run = await post(path("runs", id, verb), {});
      outcomes.push({ run_id: id, ok: true, status: run.status });
    } catch (error) {
      outcomes.push({ run_id: id, ok: false, error: { message: error.message } });
    }
  }
  return outcomes;
}

function Bulk({ chosen, clear, refresh }) {
  const [outcome, setOutcome] = useState(null);
  const [error, setError] = useState(null);
  const [busy, setBusy] = useState(false);
  const act = async (verb) => {
    setBusy(true);
    setError(null);
    try {
      setOutcome({ verb, items: await forEachRun(verb, [...chosen]) });
      clear();
      refresh();
    } catch (problem) {
      setError(problem);
    }
    setBusy(false);
  };
  const message = (one) => (typeof one.error === "string" ? one.error : one.error?.message) ?? one.status;
  return html`
    ${chosen.size > 0 && html`<div class="bar bulk" role="group" aria-label="Selected runs">
      <span>${chosen.size} selected</span>
      <button disabled=${busy} onClick=${() => act("retry")}>Retry</button>
      <button disabled=${busy} onClick=${() => act("cancel")}>Cancel</button>
      <button class="quiet" onClick=${clear}>Clear</button>
    </div>`}
    <${Trouble} error=${error} />
    ${outcome && html`<${Dialog} title=${outcome.verb === "retry" ? "Retried runs" : "Cancelled runs"} onClose=${() => setOutcome(null)}>
      <p>${outcome.items.filter((one) => one.ok).length} of ${outcome.items.length} done.</p>
      <ul class="outcomes">${outcome.items.map((one) => html`<li>
        <a href=${link(["runs", one.run_id])}><code>${one.run_id.slice(0, 8)}</code></a> ${one.ok ? "done" : message(one)}</li>`)}</ul>
    <//>`}`;
}

export function RunsScreen({ query }) {
  const { items, cursor, error, older, refresh } = useRuns(query);
  const [chosen, setChosen] = useState(new Set());
  const narrow = useNarrow();
  const typing = useRef(null);
  const later = (change) => {
    clearTimeout(typing.current);
    typing.current = setTimeout(() => setQuery(change), 250);
  };
  const check = (id) => {
    const next = new Set(chosen);
    if (!next.delete(id)) next.add(id);
    setChosen(next);
  };
  const found = items && query.q ? items.filter((run) => matches(run, query.q)) : items;
  const filtered = query.status || query.workflow || query.q;
  const busy = items ? items.filter(isActive).length : 0;
  return html`<main tabindex="-1">
    <div class="title"><h1>Runs</h1>${busy > 0 && html`<span class="count">${busy} in progress</span>`}</div>
    <div class="bar" role="search">
      <div class="chips" role="group" aria-label="State">
        <button class="chip" aria-pressed=${!query.status} onClick=${() => setQuery({ status: "" })}>all</button>
        ${RUN_STATES.map((state) => html`<button class="chip" aria-pressed=${query.status === state} onClick=${() => setQuery({ status: state })}>
          <span class="icon state-${STATES[state][1]}" aria-hidden="true">${STATES[state][0]}</span>${STATES[state][1]}</button>`)}
      </div>
      <input type="search" aria-label="Workflow" placeholder="Workflow" value=${query.workflow || ""} onInput=${(e) => later({ workflow: e.currentTarget.value })} />
      <input type="search" class="wide" aria-label="Search runs" placeholder="Id, name or a value of the params" value=${query.q || ""} onInput=${(e) => later({ q: e.currentTarget.value })} />
    </div>
    <${Bulk} chosen=${chosen} clear=${() => setChosen(new Set())} refresh=${refresh} />
    <${Trouble} error=${error} again=${refresh} />
    ${found === null && !error && html`<${Loading} />`}
    ${found && found.length === 0 && (filtered
      ? html`<${Empty}>No run matches. <button onClick=${() => setQuery({ status: "", workflow: "", q: "" })}>Show all runs</button><//>`
      : html`<${Empty}><p>There are no runs yet.</p><p>Start one: <code>dovetail run flow.yaml</code> writes to the embedded file,
          or register a workflow and trigger it under <a href=${link(["workflows"])}>Workflows</a>.</p><//>`)}
    ${found && found.length > 0 && html`<${Rows} items=${found} height=${narrow ? 68 : 40} label="Runs"
      row=${(run) => html`<${Row} key=${run.run_id} run=${run} checked=${chosen.has(run.run_id)} check=${() => check(run.run_id)} />`} />`}
    ${cursor && html`<p class="more"><button onClick=${() => older(cursor)}>Older runs</button></p>`}
  </main>`;
}
