// One run. It opens on the answer: why it failed, what it waits for, or its result.
import { html, useEffect, useMemo, useRef, useState } from "./html.js";
import { follow, get, onRunEvents, path, pause, reread } from "./api.js";
import { CancelDialog, ForkDialog, RetryDialog } from "./actions.js";
import { Graph } from "./graph.js";
import { Items, itemsWords } from "./items.js";
import { afterEvents, placesOf } from "./live.js";
import { LogView } from "./logs.js";
import { Failure, NodePanel, useNode } from "./node.js";
import { go, link, setQuery } from "./route.js";
import { Timeline } from "./timeline.js";
import { Copy, Elapsed, Empty, Heads, Json, Loading, NODE_STATES, Name, Rows, STATES, State, Tabs, Time, Trouble, WriteButton, clock, isActive, statesToChoose, useNarrow } from "./ui.js";

const SHOW_MS = 100; // at most ten times a second, however many events come
const [LARGE_RUN, SHOW_LARGE_MS] = [2000, 300]; // nodes
const MAX_RECENT = 50000;

// The run: read once, then moved on by its events. It is read again for what no event has.
function useRun(id) {
  const [state, setState] = useState({ run: null, error: null, recent: [], turn: 0 });
  const control = useRef(null);
  useEffect(() => {
    const leaving = new AbortController();
    const { signal } = leaving;
    const where = path("runs", id);
    let known = null; // as it was read
    let run = null;
    let places = new Map();
    let runSeq = 0; // of the last event that `run` has in it
    let seq = 0; // of the last event that came
    let recent = []; // events that came since the first read
    let waiting = [];
    let timer = null;
    let following = false;
    let reading = false;
    let readAgain = false;

    async function read() {
      if (reading) {
        readAgain = true;
        return;
      }
      reading = true;
      do {
        readAgain = false;
        const began = performance.now();
        try {
          const before = known;
          known = await reread(where, known, signal);
          if (known !== before) take(before);
          else setState((now) => (now.error ? { ...now, error: null } : now));
        } catch (error) {
          if (signal.aborted) return;
          // What is known stays on the screen while the server is away.
          setState((now) => (error.status === 0 && now.run ? now : { ...now, error }));
          if (error.status === 0) readAgain = true;
          if (!readAgain) break;
          await pause(1000, signal);
          continue;
        }
        if (run.finished_at === null) watch();
        // A large run takes longer to read, and is read less often.
        if (readAgain) await pause(Math.max(SHOW_MS, 4 * (performance.now() - began)), signal);
      } while (readAgain && !signal.aborted);
      reading = false;
    }

    function take(before) {
      const wasOver = run !== null && !isActive(run);
      run = known.value;
      if (before === null || before.value.nodes.length !== run.nodes.length) places = placesOf(run.nodes);
      // Events that came while it was read may be newer than it is.
      const newer = recent.filter((event) => event.seq > known.seq);
      runSeq = Math.max(known.seq, runSeq);
      seq = Math.max(seq, runSeq);
      if (newer.length) [run] = afterEvents(run, newer, places);
      const reopened = wasOver && isActive(run);
      setState((now) => ({ run, error: null, recent, turn: now.turn + (reopened ? 1 : 0) }));
    }

    function show() {
      timer = null;
      const events = waiting;
      waiting = [];
      recent = recent.concat(events);
      if (recent.length > MAX_RECENT) recent = recent.slice(-MAX_RECENT / 2);
      let stale;
      // A read may have overtaken some of them.
      [run, stale] = afterEvents(run, events.filter((event) => event.seq > runSeq), places);
      runSeq = Math.max(runSeq, events.at(-1).seq);
      setState((now) => ({ ...now, run, recent, error: null }));
      if (stale) read();
    }

    async function watch() {
      if (following) return;
      following = true;
      try {
        await follow(`${where}/events`, {
          signal,
          after: seq,
          onEvents(more) {
            waiting = waiting.concat(more.filter((event) => event.seq > seq));
            seq = Math.max(seq, more.at(-1).seq);
            if (waiting.length) timer ??= setTimeout(show, run.nodes.length > LARGE_RUN ? SHOW_LARGE_MS : SHOW_MS);
          },
        });
      } catch {
        // The reading above says what is wrong.
      }
      following = false;
      if (!signal.aborted) read();
    }

    read();
    // A finished run may be retried or deleted from elsewhere.
    const stop = onRunEvents((events, again) => {
      if (events === null ? again : events.some((event) => event.run_id === id)) read();
    });
    control.current = read;
    return () => {
      stop();
      clearTimeout(timer);
      leaving.abort();
    };
  }, [id]);
  return { ...state, refresh: () => control.current() };
}

// All events of the run: those before it was opened are read when a tab needs them.
function useEvents(run, recent) {
  const [state, setState] = useState({ earlier: null, error: null });
  const known = state.earlier?.at(-1)?.seq ?? 0;
  const gap = state.earlier !== null && recent.length > 0 && recent[0].seq > known + 1 ? recent[0].seq : 0;
  useEffect(() => {
    const leaving = new AbortController();
    get(path("runs", run.run_id, "events"), leaving.signal).then(
      (earlier) => setState({ earlier, error: null }),
      (error) => leaving.signal.aborted || setState({ earlier: null, error }),
    );
    return () => leaving.abort();
  }, [run.run_id, gap]);
  const events = useMemo(() => state.earlier && state.earlier.concat(recent.filter((event) => event.seq > known)), [state.earlier, recent]);
  return { events, error: state.error };
}

function counts(nodes) {
  const found = {};
  for (const node of nodes) found[node.status] = (found[node.status] ?? 0) + 1;
  return found;
}

function Progress({ run }) {
  const found = counts(run.nodes);
  const behind = run.nodes.filter((node) => node.status === "FAILED" && node.reason === "dependency_failed").length;
  const order = ["COMPLETED", "SKIPPED", "FAILED", "CANCELLED", "RUNNING", "QUEUED", "PENDING"].filter((state) => found[state]);
  return html`<div class="progress">
    <div class="track" aria-hidden="true">${order.map((state) => html`<span class="fill-${STATES[state][1]}" style=${{ flexGrow: found[state] }}></span>`)}</div>
    <p>${order.map((state) => html`<a href=${link(["runs", run.run_id, "nodes"], { state })}><span class="icon state-${STATES[state][1]}" aria-hidden="true">${STATES[state][0]}</span> ${found[state].toLocaleString()} ${STATES[state][1]}${state === "FAILED" && behind ? `, ${behind.toLocaleString()} of them behind a failed node` : ""}</a> `)}</p>
  </div>`;
}

// ── the answer ──────────────────────────────────────────────────────────────────────────

function culprit(run) {
  const named = run.error?.node && run.nodes.find((node) => node.id === run.error.node);
  return named || run.nodes.find((node) => node.status === "FAILED" && node.error);
}

function FailedAnswer({ run, open, turn }) {
  const node = culprit(run);
  if (!node) {
    return html`<section class="answer"><h2>The run failed</h2>${run.error && html`<${Failure} error=${run.error} />`}
      <div class="actions"><${WriteButton} class="primary" onClick=${() => open("retry")}>Retry…<//><${WriteButton} onClick=${() => open("fork")}>Fork…<//></div></section>`;
  }
  return html`<${FailedNode} run=${run} node=${node} open=${open} turn=${turn} />`;
}

function FailedNode({ run, node, open, turn }) {
  const { detail, error } = useNode(run.run_id, node);
  const attempt = detail?.attempts.at(-1);
  const behind = run.nodes.filter((one) => one.cause === node.id && one.id !== node.id).length;
  const query = attempt && !node.items ? { node: node.id, epoch: attempt.epoch, attempt: attempt.attempt } : { node: node.id };
  return html`<section class="answer">
    <h2>The node <a href=${link(["runs", run.run_id], { node: node.id })}>${node.id}</a> failed${attempt && attempt.attempt > 1 ? ` at attempt ${attempt.attempt}` : ""}</h2>
    <${Failure} error=${attempt?.error ?? node.error ?? run.error} />
    <${Trouble} error=${error} />
    ${behind > 0 && html`<p>${behind} ${behind === 1 ? "node" : "nodes"} behind it did not run.</p>`}
    <div class="actions">
      <${WriteButton} class="primary" onClick=${() => open("retry")}>Retry…<//>
      <${WriteButton} onClick=${() => open("retry", node.id)}>Retry from here…<//>
      <${WriteButton} onClick=${() => open("change")}>Fork with a changed definition…<//>
      ${run.version > 1 && html`<${WriteButton} onClick=${() => go(["workflows", run.workflow], { rollback: run.version })}>Roll back v${run.version}…<//>`}
    </div>
    ${node.items && html`<${Items} runId=${run.run_id} node=${node} query=${{}} failedOnly />`}
    <h3>Its log</h3>
    <${LogView} compact runId=${run.run_id} query=${query} again=${turn} />
  </section>`;
}

const MAX_REASONS = 50;
const REASONS_MS = 1000;
const FIRST_REASONS = ["running", "rate_limited", "backing_off", "no_worker", "max_concurrency", "queued", "damaged", "waiting_for_parents"];

// Read again while it waits, for the times in the sentences; a large run less often.
function useReasons(runId) {
  const [state, setState] = useState({ found: null, error: null });
  useEffect(() => {
    const leaving = new AbortController();
    const { signal } = leaving;
    async function reading() {
      while (!signal.aborted) {
        const began = performance.now();
        try {
          const found = await get(path("runs", runId, "explain"), signal);
          setState({ found, error: null });
        } catch (error) {
          if (!signal.aborted) setState((now) => (error.status === 0 ? now : { ...now, error }));
        }
        await pause(Math.max(REASONS_MS, 5 * (performance.now() - began)), signal);
      }
    }
    reading();
    return () => leaving.abort();
  }, [runId]);
  return state;
}

function RunningAnswer({ run }) {
  const state = useReasons(run.run_id);
  const { found, error } = state;
  // The run is newer than the reasons: what has ended since is not waited for any more.
  const ended = useMemo(() => new Set(run.nodes.filter((node) => node.finished_at).map((node) => node.id)), [run.nodes]);
  const nodes = found && found.nodes.filter((node) => !ended.has(node.id)).sort((a, b) => FIRST_REASONS.indexOf(a.code) - FIRST_REASONS.indexOf(b.code));
  return html`<section class="answer"><h2>What it waits for</h2>
    <${Trouble} error=${error} />
    ${!found && !error && html`<${Loading} />`}
    ${found?.damage?.length > 0 && html`<p class="trouble">${found.damage[0]}</p>`}
    ${nodes && nodes.length === 0 && html`<p>It is about to finish.</p>`}
    ${nodes && html`<ul class="plain reasons">${nodes.slice(0, MAX_REASONS).map((node) => html`<li key=${node.id}><${State} of=${node.status} />
      <a href=${link(["runs", run.run_id], { node: node.id })}>${node.id}</a> <span>${node.why}</span></li>`)}</ul>
      ${nodes.length > MAX_REASONS && html`<p><a href=${link(["runs", run.run_id, "nodes"], { hide: "1" })}>${nodes.length - MAX_REASONS} more</a></p>`}`}
  </section>`;
}

function Answer({ run, open, turn }) {
  if (run.status === "FAILED") return html`<${FailedAnswer} run=${run} open=${open} turn=${turn} />`;
  if (isActive(run)) return html`<${RunningAnswer} run=${run} />`;
  const allowed = run.nodes.filter((node) => node.status === "FAILED");
  if (run.status === "CANCELLED") {
    return html`<section class="answer"><h2>The run was cancelled</h2><p>A retry goes on where it stopped.</p>
      <div class="actions"><${WriteButton} class="primary" onClick=${() => open("retry")}>Retry…<//><${WriteButton} onClick=${() => open("fork")}>Fork…<//></div></section>`;
  }
  return html`<section class="answer"><h2>The run completed</h2>
    ${allowed.length > 0 && html`<p>${allowed.length} ${allowed.length === 1 ? "failure was" : "failures were"} allowed: ${allowed.slice(0, 10).map((node) => html`<a href=${link(["runs", run.run_id], { node: node.id })}>${node.id}</a> `)}</p>`}
    <${Json} title="Result" value=${run.result} file=${`${run.run_id}-result.json`} /></section>`;
}

// ── the other tabs ──────────────────────────────────────────────────────────────────────

const NODE_COLUMNS = [["c-state", "State"], ["c-name", "Node"], ["c-id", "Handler"], ["c-error", "Error, reason or progress"], ["c-time", "Attempts"], ["c-duration", "Took"]];

function whyWords(node) {
  if (node.error) return node.error.message;
  if (node.reason) return node.reason.replaceAll("_", " ") + (node.cause && node.cause !== node.id ? `: ${node.cause}` : "");
  return node.items ? itemsWords(node.items) : node.progress?.message ?? "";
}

function Nodes({ run, query }) {
  const narrow = useNarrow();
  const found = counts(run.nodes);
  const wanted = (query.q || "").toLowerCase();
  const shown = useMemo(() => run.nodes.filter((node) =>
    (!query.state || node.status === query.state) &&
    (!query.hide || (node.status !== "COMPLETED" && node.status !== "SKIPPED")) &&
    (!wanted || node.id.toLowerCase().includes(wanted) || node.handler.toLowerCase().includes(wanted))), [run, query.state, query.hide, wanted]);
  return html`<div>
    <div class="bar" role="search">
      <div class="chips" role="group" aria-label="State">
        <button class="chip" aria-pressed=${!query.state} onClick=${() => setQuery({ state: "" })}>all ${run.nodes.length}</button>
        ${statesToChoose(NODE_STATES, found, isActive(run), query.state).map((state) => html`<button class="chip" key=${state} aria-pressed=${query.state === state} onClick=${() => setQuery({ state })}>
          <span class="icon state-${STATES[state][1]}" aria-hidden="true">${STATES[state][0]}</span>${STATES[state][1]} ${found[state] ?? 0}</button>`)}
      </div>
      <input type="search" aria-label="Search nodes" placeholder="Node or handler" value=${query.q || ""} onInput=${(e) => setQuery({ q: e.currentTarget.value })} />
      <label><input type="checkbox" checked=${Boolean(query.hide)} onChange=${(e) => setQuery({ hide: e.currentTarget.checked ? "1" : "" })} /> Hide completed</label>
    </div>
    ${shown.length === 0 && html`<${Empty}>No node matches. <button onClick=${() => setQuery({ state: "", q: "", hide: "" })}>Show all nodes</button><//>`}
    ${shown.length > 0 && html`<${Heads} kind="node" columns=${NODE_COLUMNS} />`}
    <${Rows} items=${shown} height=${narrow ? 60 : 36} label="Nodes" row=${(node) => html`<div class="row node" role="listitem" key=${node.id}>
      <a class="cover" href=${link(["runs", run.run_id, "nodes"], { ...query, node: node.id, at: "", items: "" })} aria-current=${query.node === node.id ? "true" : null}>
        <span class="c-state"><${State} of=${node.status} /></span>
        <span class="c-name" title=${node.id}><${Name} text=${node.id} /></span>
        <span class="c-id">${node.handler}</span>
        <span class="c-error">${whyWords(node)}</span>
        <span class="c-time">${node.attempt > 1 ? node.attempt : ""}</span>
        <span class="c-duration"><${Elapsed} from=${node.started_at} to=${node.finished_at} seconds=${node.duration} /></span>
      </a></div>`} />
  </div>`;
}

function eventWords(event) {
  const { seq, time, type, epoch, node, attempt, ...rest } = event;
  return Object.keys(rest).length ? JSON.stringify(rest) : "";
}

function WithEvents({ run, recent, children }) {
  const { events, error } = useEvents(run, recent);
  if (error) return html`<${Trouble} error=${error} />`;
  return events === null ? html`<${Loading} />` : children(events);
}

function Events({ run, events, query }) {
  const narrow = useNarrow();
  const wanted = (query.q || "").toLowerCase();
  const shown = useMemo(() => {
    const found = wanted ? events.filter((event) => event.type.includes(wanted) || (event.node || "").toLowerCase().includes(wanted)) : [...events];
    return found.reverse();
  }, [events, wanted]);
  return html`<div>
    <div class="bar" role="search"><input type="search" aria-label="Search events" placeholder="Type or node" value=${query.q || ""} onInput=${(e) => setQuery({ q: e.currentTarget.value })} />
      <span class="count">${shown.length.toLocaleString()} ${shown.length === 1 ? "event" : "events"}, newest first</span></div>
    ${shown.length === 0 && html`<${Empty}>No event matches.<//>`}
    ${shown.length > 0 && html`<${Heads} kind="event" columns=${[["c-seq", "No."], ["c-time", "Time"], ["c-state", "Event"], ["c-name", "Node"], ["c-error", "Details"]]} />`}
    <${Rows} items=${shown} height=${narrow ? 60 : 32} label="Events" row=${(event) => html`<div class="row event" role="listitem" key=${event.seq}>
      <span class="c-seq">${event.seq}</span>
      <span class="c-time"><time title=${event.time}>${clock(event.time)}</time></span>
      <span class="c-state"><code>${event.type}</code></span>
      <span class="c-name">${event.node && html`<a href=${link(["runs", run.run_id, "events"], { ...query, node: event.node, at: "", items: "" })}>${event.node}</a>`}</span>
      <span class="c-error">${eventWords(event)}</span></div>`} />
  </div>`;
}

function Data({ run }) {
  return html`<div><${Json} title="Params" level=${2} value=${run.params} file=${`${run.run_id}-params.json`} />
    <${Json} title="Result" level=${2} value=${run.result} file=${`${run.run_id}-result.json`} /></div>`;
}

const TABS = [["", "Answer"], ["nodes", "Nodes"], ["graph", "Graph"], ["timeline", "Timeline"], ["logs", "Logs"], ["events", "Events"], ["data", "Params and result"]];

export function RunScreen({ id, tab = "", query }) {
  const { run, error, recent, turn, refresh } = useRun(id);
  const [dialog, setDialog] = useState(null);
  const open = (kind, from) => setDialog({ kind, from });
  const close = () => setDialog(null);
  if (!run) {
    return html`<main tabindex="-1"><h1>Run ${id.slice(0, 8)}</h1>
      ${error ? html`<${Trouble} error=${error} again=${refresh} /><p><a href=${link(["runs"])}>All runs</a></p>` : html`<${Loading} />`}</main>`;
  }
  const { node: chosen, at, ...rest } = query;
  // The log has its own choice of a node; every other tab opens the panel.
  const node = chosen && tab !== "logs" ? run.nodes.find((one) => one.id === chosen) : null;
  const kept = tab === "logs" ? {} : { node: chosen };
  return html`<main tabindex="-1" class=${node ? "with-panel" : null}>
    <div class="title">
      <h1>${run.version ? html`<a href=${link(["workflows", run.workflow])}>${run.workflow}</a> <small>v${run.version}</small>` : run.workflow}</h1><${State} of=${run.status} />
      <span class="grow"></span>
      <div class="actions">
        ${(run.status === "FAILED" || run.status === "CANCELLED") && html`<${WriteButton} onClick=${() => open("retry")}>Retry…<//>`}
        ${isActive(run) && html`<${WriteButton} onClick=${() => open("cancel")}>Cancel…<//>`}
        <${WriteButton} onClick=${() => open("fork")}>Fork…<//>
        ${run.version && html`<a class="button" href=${link(["workflows", run.workflow], { from: run.run_id })}>Trigger again…</a>`}
      </div>
    </div>
    <p class="facts"><code>${run.run_id}</code> <${Copy} text=${run.run_id} />
      · created <${Time} at=${run.created_at} /> · ${run.finished_at ? "took" : "for"} <${Elapsed} from=${run.started_at ?? run.created_at} to=${run.finished_at} seconds=${run.duration} />
      ${run.epoch > 1 && ` · epoch ${run.epoch}`}
      ${run.forked_from && html` · fork of <a href=${link(["runs", run.forked_from])}><code>${run.forked_from.slice(0, 8)}</code></a>`}</p>
    <${Progress} run=${run} />
    <${Tabs} label="Parts of the run" current=${tab} items=${TABS.map(([key, words]) => [key, words, link(["runs", id, ...(key ? [key] : [])], key === "logs" ? { node: chosen } : kept)])} />
    <${Trouble} error=${error} />
    <div class="split"><div class="content">
      ${tab === "" && html`<${Answer} run=${run} open=${open} turn=${turn} />`}
      ${tab === "nodes" && html`<${Nodes} run=${run} query=${query} />`}
      ${tab === "graph" && html`<${Graph} run=${run} query=${query} />`}
      ${tab === "timeline" && html`<${WithEvents} run=${run} recent=${recent}>${(events) => html`<${Timeline} run=${run} events=${events} query=${query} />`}<//>`}
      ${tab === "logs" && html`<${LogView} runId=${id} query=${{ node: query.node, item: query.item, level: query.level, q: query.q, epoch: query.epoch, attempt: query.attempt }} wrap=${query.wrap} set=${setQuery} nodes=${run.nodes} again=${turn} />`}
      ${tab === "events" && html`<${WithEvents} run=${run} recent=${recent}>${(events) => html`<${Events} run=${run} events=${events} query=${query} />`}<//>`}
      ${tab === "data" && html`<${Data} run=${run} />`}
      ${!TABS.some(([key]) => key === tab) && html`<${Empty}>There is no such part. <a href=${link(["runs", id])}>The answer</a><//>`}
    </div>
    ${node && html`<${NodePanel} key=${node.id} run=${run} node=${node} query=${{ tab, rest }} at=${query.at} again=${turn} retry=${(from) => open("retry", from)} fork=${(from) => open("fork", from)} />`}
    </div>
    ${dialog?.kind === "retry" && html`<${RetryDialog} run=${run} from=${dialog.from} onClose=${close} onDone=${refresh} />`}
    ${dialog?.kind === "cancel" && html`<${CancelDialog} run=${run} onClose=${close} onDone=${refresh} />`}
    ${(dialog?.kind === "fork" || dialog?.kind === "change") && html`<${ForkDialog} run=${run} from=${dialog.from} changed=${dialog.kind === "change"} onClose=${close} />`}
  </main>`;
}
