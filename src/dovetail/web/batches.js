// Batches: how far each is, and what failed of it.
import { html, useEffect, useState } from "./html.js";
import { get, path, post, withQuery } from "./api.js";
import { link } from "./route.js";
import { Mark, Table, usePolled } from "./operations.js";
import { Copy, Elapsed, Empty, Loading, STATES, State, Tabs, Time, Trouble, WriteButton } from "./ui.js";

const ORDER = ["COMPLETED", "FAILED", "CANCELLED", "RUNNING", "PENDING"];
const SHOWN = 100;

function Progress({ batch }) {
  const states = ORDER.filter((state) => batch.counts[state]);
  const done = ["COMPLETED", "FAILED", "CANCELLED"].reduce((sum, state) => sum + (batch.counts[state] ?? 0), 0);
  return html`<div class="progress">
    <div class="track" aria-hidden="true">${states.map((state) => html`<span class="fill-${STATES[state][1]}" style=${{ flexGrow: batch.counts[state] }}></span>`)}</div>
    <p>${done.toLocaleString()} of ${batch.count.toLocaleString()} done ${states.map((state) => html`<span class="count"><span class="icon state-${STATES[state][1]}" aria-hidden="true">${STATES[state][0]}</span> ${batch.counts[state].toLocaleString()} ${STATES[state][1]}</span> `)}</p>
  </div>`;
}

export function BatchesScreen() {
  const { value, error, again } = usePolled("/batches?limit=50");
  const [older, setOlder] = useState({ items: [], cursor: undefined, error: null });
  const cursor = older.cursor === undefined ? value?.next_cursor : older.cursor;
  const more = async () => {
    try {
      const page = await get(withQuery("/batches", { limit: 50, cursor }));
      setOlder({ items: [...older.items, ...page.items], cursor: page.next_cursor, error: null });
    } catch (problem) {
      setOlder({ ...older, error: problem });
    }
  };
  const first = value?.items ?? [];
  const items = [...first, ...older.items.filter((one) => !first.some((known) => known.batch_id === one.batch_id))];
  return html`<main tabindex="-1"><h1>Batches</h1>
    <${Trouble} error=${error || older.error} again=${again} />
    ${!value && !error && html`<${Loading} />`}
    ${value && items.length === 0 && html`<${Empty}><p>There are no batches yet.</p><p>One run for each line of a file: <code>dovetail batch flow.yaml --items items.jsonl</code></p><//>`}
    <ul class="plain cards">${items.map((batch) => html`<li class="card" key=${batch.batch_id}>
      <header><h2><a href=${link(["batches", batch.batch_id])}>${batch.workflow} <code>${batch.batch_id.slice(0, 8)}</code></a></h2>
        ${batch.finished_at ? html`<${Mark} kind=${batch.counts.FAILED ? "failed" : "completed"} icon=${batch.counts.FAILED ? "✕" : "✓"}>${batch.counts.FAILED ? `${batch.counts.FAILED.toLocaleString()} failed` : "finished"}<//>` : html`<${Mark} kind="running" icon="▶">running<//>`}
        <span class="count">created <${Time} at=${batch.created_at} />, ${batch.finished_at ? "took" : "for"} <${Elapsed} from=${batch.created_at} to=${batch.finished_at} /></span></header>
      <${Progress} batch=${batch} /></li>`)}</ul>
    ${cursor && html`<p class="more"><button onClick=${more}>Older batches</button></p>`}
  </main>`;
}

// A page of its runs in one state, with their errors; the state "" is all of them, by index.
function useRunsOf(id, state, turn) {
  const [found, setFound] = useState({ items: null, cursor: null, error: null });
  const read = async (cursor, before, signal) => {
    try {
      const page = state
        ? await get(withQuery("/runs", { batch: id, status: state, limit: SHOWN, cursor }), signal)
        : await get(withQuery(path("batches", id), { limit: SHOWN, cursor }), signal);
      setFound({ items: [...before, ...(page.items ?? page.runs)], cursor: page.next_cursor, error: null });
    } catch (error) {
      if (!signal?.aborted) setFound((now) => ({ ...now, error }));
    }
  };
  useEffect(() => {
    const leaving = new AbortController();
    read(undefined, [], leaving.signal);
    return () => leaving.abort();
  }, [id, state, turn]);
  return { ...found, more: () => read(found.cursor, found.items) };
}

export function BatchScreen({ id, query }) {
  const { value: batch, error, again } = usePolled(withQuery(path("batches", id), { limit: 1 }));
  const [problem, setProblem] = useState(null);
  const [busy, setBusy] = useState(false);
  const failed = batch ? (batch.counts.FAILED ?? 0) + (batch.counts.CANCELLED ?? 0) : 0;
  const state = query.state === undefined ? (batch?.counts.FAILED ? "FAILED" : "") : query.state === "all" ? "" : query.state;
  const runs = useRunsOf(id, state, JSON.stringify(batch?.counts));
  if (!batch) return html`<main tabindex="-1"><h1>Batch <code>${id.slice(0, 8)}</code></h1>${error ? html`<${Trouble} error=${error} again=${again} />` : html`<${Loading} />`}</main>`;
  const retry = async () => {
    setBusy(true);
    setProblem(null);
    try {
      await post(path("batches", id, "retry"), {});
    } catch (refused) {
      setProblem(refused);
    }
    setBusy(false);
    again();
  };
  const states = ["", ...ORDER.filter((one) => batch.counts[one])];
  return html`<main tabindex="-1">
    <div class="title"><h1>${batch.workflow} <small>batch <code>${id.slice(0, 8)}</code></small></h1><${Copy} text=${id} label="Copy id" />
      <span class="grow"></span>
      ${failed > 0 && html`<${WriteButton} class="primary" disabled=${busy} onClick=${retry}>Retry ${failed.toLocaleString()} failed<//>`}</div>
    <p class="facts">created <${Time} at=${batch.created_at} />, ${batch.finished_at ? "took" : "for"} <${Elapsed} from=${batch.created_at} to=${batch.finished_at} /></p>
    <${Progress} batch=${batch} />
    <${Trouble} error=${problem || runs.error || error} />
    <${Tabs} label="Runs of the batch" current=${state} items=${states.map((one) => [one, one ? `${STATES[one][1]} (${batch.counts[one].toLocaleString()})` : "all", link(["batches", id], { state: one || "all" })])} />
    ${runs.items === null && !runs.error && html`<${Loading} />`}
    ${runs.items && runs.items.length === 0 && html`<${Empty}>No run of this batch is in this state.<//>`}
    ${runs.items && runs.items.length > 0 && html`<${Table} label="Runs" kind=${state ? "stack" : "narrow"} heads=${state ? ["State", "Run", "Params", "Error"] : ["State", "#Item", "Run"]}>
      ${runs.items.map((run) => html`<tr key=${run.run_id}><td><${State} of=${run.status} /></td>
        ${!state && html`<td class="number">${run.index}</td>`}
        <td><a href=${link(["runs", run.run_id])}><code>${run.run_id.slice(0, 8)}</code></a></td>
        ${state && html`<td class="clip"><code>${JSON.stringify(run.params)}</code></td><td class="clip">${run.error ? `${run.error.node ? run.error.node + ": " : ""}${run.error.message}` : ""}</td>`}</tr>`)}<//>`}
    ${runs.cursor && html`<p class="more"><button onClick=${runs.more}>More runs</button></p>`}
  </main>`;
}
