// The panel of one node: its state and why, attempts, items, config, inputs, output, log.
import { html, useEffect, useState } from "./html.js";
import { printable } from "./ansi.js";
import { get, path } from "./api.js";
import { Items } from "./items.js";
import { LogView } from "./logs.js";
import { link, setQuery } from "./route.js";
import { Copy, Elapsed, Json, Loading, State, Time, Trouble, WriteButton, duration } from "./ui.js";

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
    <p class="cause"><strong>${printable(error.type)}</strong>${error.message && html`: ${printable(error.message)}`}</p>
    ${error.where && html`<p class="where">at <code>${error.where}</code></p>`}
    ${error.traceback && html`<details class="traceback" open><summary>Traceback</summary><${Copy} text=${error.traceback} /><pre tabindex="0">${printable(error.traceback)}</pre></details>`}
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

// Of a node that had been started.
const STOPPED = { run_failed: "The run failed meanwhile." };

// A definition never changes: it is read once, for all runs of a version.
const definitions = new Map();

function useSpec(run, nodeId) {
  const [, redraw] = useState(0);
  const key = run.version ? `${run.workflow} ${run.version}` : run.run_id;
  useEffect(() => {
    if (definitions.has(key)) return;
    definitions.set(key, null);
    get(path("runs", run.run_id, "definition")).then(
      (found) => {
        definitions.set(key, found.definition);
        redraw((n) => n + 1);
      },
      () => definitions.delete(key),
    );
  }, [key]);
  const definition = definitions.get(key);
  const own = definition?.nodes.find((one) => one.id === nodeId);
  return own && { ...definition.defaults, ...own };
}

function useLimit(tag) {
  const [limit, setLimit] = useState(null);
  useEffect(() => {
    if (!tag) return undefined;
    const leaving = new AbortController();
    get(path("rate-limits", tag), leaving.signal).then(setLimit, () => {});
    return () => leaving.abort();
  }, [tag]);
  return limit;
}

const text = (value) => (typeof value === "string" ? value : JSON.stringify(value));

function retryWords({ max_retries: most, retry }) {
  const { base_delay_seconds: base, max_delay_seconds: longest, jitter } = retry ?? {};
  return [
    most !== undefined && `at most ${most}`,
    base !== undefined && `the first after ${duration(base)}`,
    longest !== undefined && `no later than after ${duration(longest)}`,
    jitter !== undefined && `jitter ${jitter}`,
  ].filter(Boolean).join(", ");
}

// What the definition says beside the config, and what became of it.
function Settings({ run, node, spec, detail }) {
  const tag = spec?.resource_tag ?? detail.why?.details?.resource_tag;
  const limit = useLimit(tag);
  const neverRan = node.status === "COMPLETED" && node.attempt === 0;
  const facts = [
    ["Runs after", node.dependencies.length > 0 && node.dependencies.slice(0, 20).map((id) => html`<a href=${link(["runs", run.run_id, "nodes"], { node: id })}>${id}</a> `)],
    ["Condition", spec?.condition && html`<code>${text(spec.condition)}</code>`],
    ["For each", spec?.for_each && html`<code>${text(spec.for_each)}</code>`],
    ["Rate limit", tag && html`<code>${tag}</code>${limit && ` ${limit.rate_per_second} a second, burst ${limit.burst}`}`],
    ["Cache", neverRan ? (run.forked_from ? `reused from run ${run.forked_from.slice(0, 8)}` : "its output came from the cache") : spec?.cache && `its output is kept for ${duration(spec.cache.ttl_seconds)}`],
    ["Retries", spec && retryWords(spec)],
    ["Timeout", spec?.timeout_seconds && duration(spec.timeout_seconds)],
    ["Failure", spec?.allow_failure && "is allowed: the run goes on"],
  ].filter(([, value]) => value);
  return facts.length > 0 && html`<dl class="settings">${facts.map(([name, value]) => html`<dt>${name}</dt><dd>${value}</dd>`)}</dl>`;
}

const MAX_NODES = 2000; // the events of a larger run are too many to read for this

// What it reported before the page was opened is only in the events of the run.
function useProgress(run, node) {
  const [earlier, setEarlier] = useState(null);
  const { run_id: runId } = run;
  const isUnknown = node.status === "RUNNING" && !node.items && !node.progress && run.nodes.length <= MAX_NODES;
  useEffect(() => {
    if (!isUnknown) return undefined;
    const leaving = new AbortController();
    const mine = (event) => event.type === "node.progress" && event.node === node.id && event.attempt === node.attempt && event.epoch === node.epoch;
    get(path("runs", runId, "events"), leaving.signal).then((events) => setEarlier(events.findLast(mine) ?? null), () => {});
    return () => leaving.abort();
  }, [runId, node.id, node.attempt, isUnknown]);
  return node.progress ?? (isUnknown ? earlier : null);
}

function ProgressBar({ run, node }) {
  const reported = useProgress(run, node);
  const known = node.items && node.items.total > 0 ? { fraction: node.items.completed / node.items.total } : reported;
  if (!known || node.finished_at) return null;
  const share = Math.round(100 * Math.min(1, Math.max(0, known.fraction ?? 0)));
  return html`<div class="own-progress"><progress max="100" value=${share} aria-label="Progress"></progress> <span>${share} %${known.message ? `: ${known.message}` : ""}</span></div>`;
}

const keyOf = (attempt) => `${attempt.epoch}.${attempt.attempt}`;

function Attempts({ attempts, chosen }) {
  return html`<section><header><h3>Attempts</h3></header><ul class="plain attempts">${attempts.map((one) => html`<li key=${keyOf(one)}>
    <button class="chip" aria-pressed=${one === chosen} onClick=${() => setQuery({ at: keyOf(one) })}>${one.epoch > 1 ? `epoch ${one.epoch}, ` : ""}attempt ${one.attempt}</button>
    <${State} of=${one.status} /><span class="count">started <${Time} at=${one.started_at} />${one.duration !== null && `, took ${duration(one.duration)}`}</span>
    ${one.error && html`<span class="item-error">${one.error.type}: ${one.error.message}</span>`}</li>`)}</ul></section>`;
}

export function NodePanel({ run, node, query, at, retry, fork, again }) {
  const { detail, error } = useNode(run.run_id, node);
  const spec = useSpec(run, node.id);
  const attempts = detail?.attempts ?? [];
  const attempt = attempts.find((one) => keyOf(one) === at) ?? attempts.at(-1);
  const logQuery = attempt ? { node: node.id, epoch: attempt.epoch, attempt: attempt.attempt } : { node: node.id };
  const finished = run.status !== "RUNNING" && run.status !== "PENDING";
  const place = ["runs", run.run_id, ...(query.tab ? [query.tab] : [])];
  return html`<aside class="panel" aria-label=${`Node ${node.id}`}>
    <header><h2>${node.id}</h2><${State} of=${node.status} /><span class="grow"></span>
      <a class="button quiet" href=${link(place, { ...query.rest, items: "" })} aria-label="Close the panel">✕</a></header>
    <p class="facts"><code>${node.handler}</code>
      ${node.worker && html` on <code>${node.worker}</code>`}
      ${node.started_at && html` · started <${Time} at=${node.started_at} /> · ${node.finished_at ? "took" : "for"} <${Elapsed} from=${node.started_at} to=${node.finished_at} seconds=${node.duration} />`}
      ${node.attempt > 1 && ` · attempt ${node.attempt}`}</p>
    ${node.reason && html`<p>${(node.attempt > 0 && STOPPED[node.reason]) || REASONS[node.reason] || node.reason}${node.cause && node.cause !== node.id && html` The cause is <a href=${link(place, { ...query.rest, node: node.cause })}>${node.cause}</a>.`}</p>`}
    ${detail?.why && !node.reason && html`<p class="why">${detail.why.why}</p>`}
    <${ProgressBar} run=${run} node=${node} />
    <div class="actions">
      ${finished && html`<${WriteButton} onClick=${() => retry(node.id)}>Retry from here…<//>`}
      <${WriteButton} onClick=${() => fork(node.id)}>Fork from here…<//>
    </div>
    <${Trouble} error=${error} />
    ${!detail && !error && html`<${Loading} />`}
    ${detail && html`
      ${attempt?.error ? html`<${Failure} error=${attempt.error} />` : node.error && html`<${Failure} error=${node.error} />`}
      ${node.items && html`<${Items} runId=${run.run_id} node=${node} query=${query.rest} />`}
      ${attempts.length > 1 && html`<${Attempts} attempts=${attempts} chosen=${attempt} />`}
      <section><header><h3>Log</h3><a href=${link(["runs", run.run_id, "logs"], { node: node.id })}>Whole log</a></header>
        <${LogView} compact runId=${run.run_id} query=${node.items ? { node: node.id } : logQuery} again=${again} /></section>
      <${Settings} run=${run} node=${node} spec=${spec} detail=${detail} />
      ${detail.config_error && html`<p class=${node.items ? "facts" : "trouble"}>${detail.config_error}</p>`}
      <div class="pair"><${Json} title="Config" value=${detail.config} /><${Json} title="Config as defined" value=${detail.template} /></div>
      <${Json} title="Inputs" value=${detail.inputs} />
      <${Json} title="Output" value=${detail.output} file=${`${node.id}.json`} />`}
  </aside>`;
}
