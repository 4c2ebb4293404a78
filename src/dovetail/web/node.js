// The panel of one node: its state and why, attempts, config, inputs, output, log.
import { html, useEffect, useState } from "./html.js";
import { get, path } from "./api.js";
import { LogView } from "./logs.js";
import { link } from "./route.js";
import { Copy, Elapsed, Json, Loading, State, Time, Trouble } from "./ui.js";

// Its details, read again whenever the run shows that the node has changed.
export function useNode(runId, node) {
  const [state, setState] = useState({ detail: null, error: null });
  const seen = `${node.id} ${node.status} ${node.epoch} ${node.attempt} ${node.finished_at}`;
  useEffect(() => {
    const leaving = new AbortController();
    get(path("runs", runId, "nodes", node.id), leaving.signal).then(
      (detail) => setState({ detail, error: null }),
      (error) => leaving.signal.aborted || setState((now) => ({ ...now, error })),
    );
    return () => leaving.abort();
  }, [runId, seen]);
  return state.detail?.id === node.id ? state : { detail: null, error: state.error };
}

export function Failure({ error }) {
  return html`<div class="failure">
    <p class="cause"><strong>${error.type}</strong>${error.message && html`: ${error.message}`}</p>
    ${error.where && html`<p class="where">at <code>${error.where}</code></p>`}
    ${error.traceback && html`<details class="traceback" open><summary>Traceback</summary><${Copy} text=${error.traceback} /><pre tabindex="0">${error.traceback}</pre></details>`}
  </div>`;
}

const REASONS = {
  condition_false: "Its condition was false.",
  dependency_skipped: "A node before it was skipped.",
  dependency_failed: "A node before it failed.",
  run_failed: "The run failed before it could start.",
  run_cancelled: "The run was cancelled.",
  worker_lost: "Its worker was lost too often.",
};

export function NodePanel({ run, node, query, retry, fork, again }) {
  const { detail, error } = useNode(run.run_id, node);
  const [chosen, setChosen] = useState(null);
  const attempts = detail?.attempts ?? [];
  const attempt = attempts.find((one) => `${one.epoch}.${one.attempt}` === chosen) ?? attempts.at(-1);
  const panelQuery = attempt ? { node: node.id, epoch: attempt.epoch, attempt: attempt.attempt } : { node: node.id };
  const finished = run.status !== "RUNNING" && run.status !== "PENDING";
  return html`<aside class="panel" aria-label=${`Node ${node.id}`}>
    <header><h2>${node.id}</h2><${State} of=${node.status} /><span class="grow"></span>
      <a class="button quiet" href=${link(["runs", run.run_id, ...(query.tab ? [query.tab] : [])], { ...query.rest, node: "" })} aria-label="Close the panel">✕</a></header>
    <p class="facts"><code>${node.handler}</code>
      ${node.worker && html` on <code>${node.worker}</code>`}
      ${node.started_at && html` · <${Time} at=${node.started_at} /> · <${Elapsed} from=${node.started_at} to=${node.finished_at} seconds=${node.duration} />`}
      ${node.attempt > 1 && ` · attempt ${node.attempt}`}</p>
    ${node.reason && html`<p>${REASONS[node.reason] ?? node.reason}${node.cause && node.cause !== node.id && html` The cause is <a href=${link(["runs", run.run_id, ...(query.tab ? [query.tab] : [])], { ...query.rest, node: node.cause })}>${node.cause}</a>.`}</p>`}
    ${detail?.why && html`<p class="why">${detail.why.why}</p>`}
    <div class="actions">
      ${finished && html`<button onClick=${() => retry(node.id)}>Retry from here…</button>`}
      <button onClick=${() => fork(node.id)}>Fork from here…</button>
    </div>
    <${Trouble} error=${error} />
    ${!detail && !error && html`<${Loading} />`}
    ${detail && html`
      ${attempts.length > 1 && html`<label class="field"><span>Attempt</span><select value=${attempt ? `${attempt.epoch}.${attempt.attempt}` : ""} onChange=${(e) => setChosen(e.currentTarget.value)}>
        ${attempts.map((one) => html`<option value=${`${one.epoch}.${one.attempt}`}>${one.epoch > 1 ? `epoch ${one.epoch}, ` : ""}attempt ${one.attempt}: ${one.status.toLowerCase()}</option>`)}
      </select></label>`}
      ${attempt?.error ? html`<${Failure} error=${attempt.error} />` : node.error && html`<${Failure} error=${node.error} />`}
      <section><header><h3>Log</h3><a href=${link(["runs", run.run_id, "logs"], { node: node.id })}>Whole log</a></header>
        <${LogView} compact runId=${run.run_id} query=${panelQuery} again=${again} /></section>
      ${detail.config_error && html`<p class="trouble">${detail.config_error}</p>`}
      <${Json} title="Config" value=${detail.config} />
      <${Json} title="Config as defined" value=${detail.template} />
      <${Json} title="Inputs" value=${detail.inputs} />
      <${Json} title="Output" value=${detail.output} file=${`${node.id}.json`} />`}
  </aside>`;
}
