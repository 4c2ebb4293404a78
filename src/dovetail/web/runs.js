// All runs, newest first, live. Filters are in the address.
import { html, useEffect, useMemo, useRef, useState } from "./html.js";
import { calmly, get, newKey, onRunEvents, path, post, reread, withQuery } from "./api.js";
import { link, setQuery, go } from "./route.js";
import { Elapsed, Empty, Heads, Loading, RUN_STATES, Rows, STATES, State, Time, Trouble, TypedInput, WriteButton, moment, useNarrow } from "./ui.js";

const PAGE = 50;
const MAX_REREAD = 200; // of the newest; events move older ones on
const REFRESH_MS = 400;
const COUNTS_MS = 2000;
const HOURS = 24;
const MAX_SEARCHES = 20; // a search that finds little goes on by itself so often
const ENDS = { "run.completed": "COMPLETED", "run.failed": "FAILED", "run.cancelled": "CANCELLED", "run.retried": "RUNNING", "run.started": "RUNNING" };
const TIMES = { "15m": ["the last 15 minutes", 900], "1h": ["the last hour", 3600], "24h": ["the last 24 hours", 86400], "7d": ["the last 7 days", 604800] };

function between({ time, after, before }) {
  const span = TIMES[time]?.[1];
  const from = span ? new Date(Date.now() - span * 1000).toISOString() : asTime(after);
  return { created_after: from, created_before: asTime(before) };
}

function asTime(text) {
  const time = text ? new Date(text) : null;
  return time && !Number.isNaN(time.getTime()) ? time.toISOString() : undefined;
}

function useRuns(query) {
  const [state, setState] = useState({ items: null, cursor: null, error: null, busy: false });
  const control = useRef(null);
  const { status, workflow, q, time, after, before } = query;
  useEffect(() => {
    const leaving = new AbortController();
    const { signal } = leaving;
    const filters = { status, workflow: workflow?.trim(), q: q?.trim(), ...between(query) };
    const searches = Boolean(filters.q || filters.created_after || filters.created_before);
    const where = (more) => withQuery("/runs", { ...filters, ...more });
    let items = [];
    let known = null;
    setState({ items: null, cursor: null, error: null, busy: true });
    const fail = (error) => signal.aborted || setState((now) => ({ ...now, busy: false, error: error.status === 0 && now.items ? null : error }));

    async function newest() {
      const count = Math.min(MAX_REREAD, Math.max(PAGE, items.length));
      try {
        const page = await reread(where({ limit: count }), known?.count === count ? known : null, signal);
        if (page === known) return;
        const first = known === null;
        known = { ...page, count };
        const found = page.value.items;
        const ids = new Set(found.map((run) => run.run_id));
        const beyond = first ? [] : items.slice(count).filter((run) => !ids.has(run.run_id));
        items = [...found, ...beyond];
        setState((now) => ({ items, cursor: beyond.length || (!first && items.length > count) ? now.cursor : page.value.next_cursor, error: null, busy: false }));
        if (first && searches && found.length < PAGE && page.value.next_cursor) await older(page.value.next_cursor);
      } catch (error) {
        fail(error);
      }
    }

    // A search examines so many runs a request: its page may be short though older runs match.
    async function older(cursor) {
      setState((now) => ({ ...now, busy: true }));
      const wanted = items.length + PAGE;
      try {
        for (let n = 0; cursor && items.length < wanted && n < MAX_SEARCHES; n++) {
          const page = await get(where({ limit: PAGE * 2, cursor }), signal);
          const ids = new Set(items.map((run) => run.run_id));
          items = [...items, ...page.items.filter((run) => !ids.has(run.run_id))];
          cursor = page.next_cursor;
          setState({ items, cursor, error: null, busy: Boolean(cursor) && items.length < wanted });
        }
        setState((now) => ({ ...now, busy: false }));
      } catch (error) {
        fail(error);
      }
    }

    const refresh = calmly(newest, REFRESH_MS, signal);
    const stop = onRunEvents((events) => {
      for (const event of events ?? []) {
        const place = items.findIndex((run, n) => n >= MAX_REREAD && run.run_id === event.run_id);
        if (place < 0 || !ENDS[event.type]) continue;
        const ended = event.type !== "run.retried" && event.type !== "run.started";
        items = items.slice();
        items[place] = { ...items[place], status: ENDS[event.type], error: event.error ?? null, finished_at: ended ? event.time : null, duration: null };
        setState((now) => ({ ...now, items }));
      }
      refresh();
    });
    refresh();
    control.current = { older, refresh };
    return () => {
      stop();
      leaving.abort();
    };
  }, [status, workflow, q, time, after, before]);
  return { ...state, older: (cursor) => control.current.older(cursor), refresh: () => control.current.refresh() };
}

// How many runs there are in which state, and in each of the last hours.
function useCounts(workflow) {
  const [counts, setCounts] = useState(null);
  useEffect(() => {
    const leaving = new AbortController();
    const { signal } = leaving;
    const read = () => get(withQuery("/run-counts", { workflow, hours: HOURS }), signal).then(setCounts, () => {});
    const refresh = calmly(read, COUNTS_MS, signal);
    const stop = onRunEvents((events, again) => (events !== null || again) && refresh());
    refresh();
    return () => {
      stop();
      leaving.abort();
    };
  }, [workflow]);
  return counts;
}

function Sparkline({ hours }) {
  const most = Math.max(1, ...hours.map((one) => one.total));
  const total = hours.reduce((sum, one) => sum + one.total, 0);
  const failed = hours.reduce((sum, one) => sum + one.failed, 0);
  const share = (count) => (count ? `${Math.max(6, (100 * count) / most)}%` : "0");
  return html`<figure class="sparkline"><div class="bars">${hours.map((one) => {
      const next = new Date(Date.parse(one.time) + 3600e3).toISOString();
      const words = `${moment(one.time)}: ${one.total.toLocaleString()} ${one.total === 1 ? "run" : "runs"}, ${one.failed.toLocaleString()} failed`;
      return html`<a key=${one.time} href=${link(["runs"], { after: one.time, before: next })} title=${words} aria-label=${words} tabindex=${one.total ? 0 : -1}>
        <span class="good" style=${{ height: share(one.total) }}></span><span class="bad" style=${{ height: share(one.failed) }}></span></a>`;
    })}</div>
    <figcaption>${total.toLocaleString()} ${total === 1 ? "run" : "runs"} in ${hours.length} hours, ${failed.toLocaleString()} failed</figcaption></figure>`;
}

const COLUMNS = [["c-state", "State"], ["c-name", "Workflow"], ["c-id", "Run"], ["c-error", "Error or params"], ["c-time", "Created"], ["c-duration", "Took"]];
const OUTCOME_COLUMNS = COLUMNS.map(([name, words]) => [name, name === "c-error" ? "Outcome" : words]);
const MAX_PARAMS = 8;

// Runs of one workflow differ by their params.
function paramWords(params) {
  const some = Object.entries(params ?? {}).slice(0, MAX_PARAMS);
  return some.map(([name, value]) => `${name}: ${typeof value === "string" ? value : JSON.stringify(value)}`.slice(0, 100)).join(", ");
}

function Row({ run, checked, check, outcome }) {
  const error = outcome ? outcomeWords(outcome) : run.error ? `${run.error.node ? run.error.node + ": " : ""}${run.error.message}` : "";
  const params = error ? "" : paramWords(run.params); // beside the name of the link, which is read out
  return html`<div class="row run" role="listitem">
    <label class="check"><input type="checkbox" checked=${checked} aria-label=${`Select run ${run.run_id}`} onChange=${check} /></label>
    <a class="cover" href=${link(["runs", run.run_id])}>
      <span class="c-state">${run.status && html`<${State} of=${run.status} />`}</span>
      <span class="c-name" title=${run.workflow}>${run.workflow}${run.version ? html`<small> v${run.version}</small>` : null}</span>
      <span class="c-id"><code>${run.run_id.slice(0, 8)}</code></span>
      ${error ? html`<span class="c-error" title=${error}>${error}</span>` : html`<span class="c-error c-params" title=${params} aria-hidden="true">${params}</span>`}
      <span class="c-time"><${Time} at=${run.created_at} /></span>
      <span class="c-duration"><${Elapsed} from=${run.started_at} to=${run.finished_at} seconds=${run.duration} /></span>
    </a>
  </div>`;
}

// ── many at once ────────────────────────────────────────────────────────────────────────

const OUTCOMES = "dovetail.outcomes.";
const VERBS = { retry: ["Retried", "retried"], cancel: ["Cancelled", "cancelled"] };
const outcomeWords = (one) => (one.ok ? VERBS[one.verb][1] : one.error?.message ?? `not ${VERBS[one.verb][1]}`);

// What became of each run is kept in this tab, so that its address can be loaded again. If the
// browser has no more room, it is kept until the page is left.
const unsaved = new Map();

function keep(outcome) {
  const key = newKey().slice(0, 8);
  try {
    sessionStorage.setItem(OUTCOMES + key, JSON.stringify(outcome));
  } catch {
    unsaved.set(key, outcome);
  }
  return key;
}

function kept(key) {
  if (unsaved.has(key)) return unsaved.get(key);
  try {
    return JSON.parse(sessionStorage.getItem(OUTCOMES + key));
  } catch {
    return null;
  }
}

function Bulk({ chosen, clear, query }) {
  const [error, setError] = useState(null);
  const [busy, setBusy] = useState(false);
  const act = async (verb) => {
    setBusy(true);
    setError(null);
    try {
      const { items } = await post(`/runs/${verb}`, { run_ids: [...chosen].slice(0, 1000) });
      const outcome = keep({ verb, items });
      clear();
      go(["runs"], { ...query, outcome });
    } catch (problem) {
      setError(problem);
    }
    setBusy(false);
  };
  return html`
    ${chosen.size > 0 && html`<div class="bar bulk" role="group" aria-label="Selected runs">
      <span>${chosen.size.toLocaleString()} selected${chosen.size > 1000 ? ", of which 1,000 at once" : ""}</span>
      <${WriteButton} disabled=${busy} onClick=${() => act("retry")}>Retry<//>
      <${WriteButton} disabled=${busy} onClick=${() => act("cancel")}>Cancel<//>
      <button class="quiet" onClick=${clear}>Clear</button>
    </div>`}
    <${Trouble} error=${error} />`;
}

// Just the runs that were retried or cancelled together, live.
function useThese(ids) {
  const [runs, setRuns] = useState({});
  const all = ids.join();
  useEffect(() => {
    const leaving = new AbortController();
    const { signal } = leaving;
    const wanted = new Set(ids);
    let waiting = [...ids];
    const read = calmly(async () => {
      while (waiting.length && !signal.aborted) {
        const some = waiting.splice(0, 6);
        const found = await Promise.all(some.map((id) => get(`${path("runs", id)}?nodes=false`, signal).catch(() => null)));
        setRuns((now) => ({ ...now, ...Object.fromEntries(found.filter(Boolean).map((run) => [run.run_id, run])) }));
      }
    }, REFRESH_MS, signal);
    const stop = onRunEvents((events) => {
      if (events) waiting = [...new Set([...waiting, ...events.map((event) => event.run_id).filter((id) => wanted.has(id))])];
      read();
    });
    read();
    return () => {
      stop();
      leaving.abort();
    };
  }, [all]);
  return runs;
}

function Outcome({ outcome, query }) {
  const narrow = useNarrow();
  const ids = useMemo(() => outcome.items.map((one) => one.run_id), [outcome]);
  const runs = useThese(ids);
  const [chosen, check, setChosen] = useChosen();
  const done = outcome.items.filter((one) => one.ok).length;
  const rows = outcome.items.map((one) => ({ run: runs[one.run_id] ?? { run_id: one.run_id, status: one.status, workflow: "" }, one: { ...one, verb: outcome.verb } }));
  return html`<main tabindex="-1">
    <div class="title"><h1>${VERBS[outcome.verb][0]} runs</h1><span class="count">${done.toLocaleString()} of ${outcome.items.length.toLocaleString()} ${VERBS[outcome.verb][1]}</span>
      <span class="grow"></span><a class="button" href=${link(["runs"], { ...query, outcome: "" })}>Back to the list</a></div>
    <${Bulk} chosen=${chosen} clear=${() => setChosen(new Set())} query=${query} />
    <${Heads} kind="run outcome" columns=${OUTCOME_COLUMNS} first=${html`<span class="check"></span>`} />
    <${Rows} items=${rows} height=${narrow ? 68 : 40} label="Runs"
      row=${({ run, one }) => html`<${Row} key=${run.run_id} run=${run} outcome=${one} checked=${chosen.has(run.run_id)} check=${() => check(run.run_id)} />`} />
  </main>`;
}

function useChosen() {
  const [chosen, setChosen] = useState(new Set());
  const check = (id) => {
    const next = new Set(chosen);
    if (!next.delete(id)) next.add(id);
    setChosen(next);
  };
  return [chosen, check, setChosen];
}

// ── the screen ──────────────────────────────────────────────────────────────────────────

function TimeFilter({ query }) {
  const isOwn = query.time === "own" || query.after !== undefined || query.before !== undefined;
  const local = (text) => {
    const time = text ? new Date(text) : null;
    if (!time || Number.isNaN(time.getTime())) return "";
    return new Date(time.getTime() - time.getTimezoneOffset() * 60e3).toISOString().slice(0, 16);
  };
  const choose = (event) => {
    const time = event.currentTarget.value;
    setQuery(time === "own" ? { time, after: new Date(Date.now() - 3600e3).toISOString(), before: "" } : { time, after: "", before: "" });
  };
  // One that is emptied, or half typed, stays to be typed again.
  const set = (name) => (event) => setQuery({ time: "own", [name]: asTime(event.currentTarget.value) ?? "" });
  return html`<select aria-label="Time" value=${isOwn ? "own" : query.time || ""} onChange=${choose}>
      <option value="">any time</option>
      ${Object.entries(TIMES).map(([key, [words]]) => html`<option value=${key}>${words}</option>`)}
      <option value="own">between…</option>
    </select>
    ${isOwn && html`<input type="datetime-local" aria-label="Created after" value=${local(query.after)} onChange=${set("after")} />
      <input type="datetime-local" aria-label="Created before" value=${local(query.before)} onChange=${set("before")} />`}`;
}

const SUGGESTED = 20;

// The whole name, as the API wants it; registered ones are suggested.
function WorkflowFilter({ value, choose }) {
  const [names, setNames] = useState([]);
  const suggest = (q) => get(withQuery("/workflows", { q: q.trim(), limit: SUGGESTED })).then((page) => setNames(page.items.map((one) => one.name)), () => {});
  return html`<${TypedInput} list="workflow-names" aria-label="Workflow" placeholder="Workflow" autocomplete="off" value=${value} set=${choose}
      onFocus=${(event) => suggest(event.currentTarget.value)} onText=${suggest} />
    <datalist id="workflow-names">${names.map((name) => html`<option key=${name} value=${name} />`)}</datalist>`;
}

// Older runs come when the end of the list comes into view, and by the button.
function Older({ cursor, older, busy }) {
  const end = useRef(null);
  const latest = useRef(null);
  latest.current = () => busy || older(cursor);
  useEffect(() => {
    const watching = new IntersectionObserver((entries) => entries.some((one) => one.isIntersecting) && window.scrollY > 0 && latest.current(), { rootMargin: "400px" });
    watching.observe(end.current);
    return () => watching.disconnect();
  }, [cursor]);
  return html`<p class="more" ref=${end}><button disabled=${busy} onClick=${() => older(cursor)}>${busy ? "Searching…" : "Older runs"}</button></p>`;
}

export function RunsScreen({ query }) {
  const outcome = useMemo(() => (query.outcome ? kept(query.outcome) : null), [query.outcome]);
  return outcome ? html`<${Outcome} key=${query.outcome} outcome=${outcome} query=${query} />` : html`<${RunList} query=${query} />`;
}

function RunList({ query }) {
  const { items, cursor, error, busy, older, refresh } = useRuns(query);
  const counted = useCounts(query.workflow);
  const [chosen, check, setChosen] = useChosen();
  // Other filters hide runs: what no longer shows is neither retried nor cancelled.
  useEffect(() => setChosen(new Set()), [query.status, query.workflow, query.q, query.time, query.after, query.before]);
  const narrow = useNarrow();
  const filtered = query.status || query.workflow || query.q || query.time || query.after || query.before;
  const going = counted ? counted.counts.RUNNING + counted.counts.PENDING : 0;
  const count = (state) => counted && html` <span class="number">${counted.counts[state].toLocaleString()}</span>`;
  const allChosen = items?.length > 0 && items.every((run) => chosen.has(run.run_id));
  return html`<main tabindex="-1">
    <div class="title"><h1>Runs</h1>${going > 0 && html`<span class="count">${going.toLocaleString()} in progress</span>`}<span class="grow"></span>
      ${counted && html`<${Sparkline} hours=${counted.hours} />`}</div>
    <div class="bar" role="search">
      <div class="chips" role="group" aria-label="State">
        <button class="chip" aria-pressed=${!query.status} onClick=${() => setQuery({ status: "" })}>all</button>
        ${RUN_STATES.map((state) => html`<button class="chip" aria-pressed=${query.status === state} onClick=${() => setQuery({ status: state })}>
          <span class="icon state-${STATES[state][1]}" aria-hidden="true">${STATES[state][0]}</span>${STATES[state][1]}${count(state)}</button>`)}
      </div>
      <${WorkflowFilter} value=${query.workflow || ""} choose=${(workflow) => setQuery({ workflow })} />
      <${TimeFilter} query=${query} />
      <${TypedInput} class="wide" aria-label="Search runs" placeholder="Id, name, value of a param" value=${query.q || ""} set=${(q) => setQuery({ q })} />
    </div>
    <${Bulk} chosen=${chosen} clear=${() => setChosen(new Set())} query=${query} />
    <${Trouble} error=${error} again=${refresh} />
    ${(items === null || (items.length === 0 && busy)) && !error && html`<${Loading} />`}
    ${items && items.length === 0 && !busy && (filtered
      ? html`<${Empty}>No run matches.${query.workflow ? " The name of a workflow counts as a whole." : ""} <button onClick=${() => setQuery({ status: "", workflow: "", q: "", time: "", after: "", before: "" })}>Show all runs</button><//>`
      : html`<${Empty}><p>There are no runs yet.</p><p>Start one: <code>dovetail run flow.yaml</code> writes to the embedded file,
          or register a workflow and trigger it under <a href=${link(["workflows"])}>Workflows</a>.</p><//>`)}
    ${items && items.length > 0 && html`<${Heads} kind="run" columns=${COLUMNS} first=${html`<label class="check">
        <input type="checkbox" checked=${allChosen} onChange=${() => setChosen(allChosen ? new Set() : new Set(items.map((run) => run.run_id)))} /> <span class="words">Select all shown</span></label>`} />
      <${Rows} items=${items} height=${narrow ? 68 : 40} label="Runs"
      row=${(run) => html`<${Row} key=${run.run_id} run=${run} checked=${chosen.has(run.run_id)} check=${() => check(run.run_id)} />`} />`}
    ${cursor && html`<${Older} cursor=${cursor} older=${older} busy=${busy} />`}
  </main>`;
}
