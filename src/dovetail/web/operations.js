// Workers, queues, rate limits and dead letters: what the whole set-up does at the moment.
import { html, useEffect, useRef, useState } from "./html.js";
import { Problem, path, pause, post, put, remove, reread, get } from "./api.js";
import { link } from "./route.js";
import { Dialog, Elapsed, Empty, Json, Loading, Tabs, Time, Trouble, WriteButton } from "./ui.js";

const POLL_MS = 3000;

// A read that is repeated while the page is seen. What is known stays while the server is away.
export function usePolled(where, every = POLL_MS) {
  const [state, setState] = useState({ value: null, error: null });
  const control = useRef(() => {});
  useEffect(() => {
    const leaving = new AbortController();
    const { signal } = leaving;
    let known = null;
    let wake = () => {};
    setState({ value: null, error: null });
    async function reading() {
      while (!signal.aborted) {
        try {
          const before = known;
          known = await reread(where, known, signal);
          if (known !== before) setState({ value: known.value, error: null });
          else setState((now) => (now.error ? { ...now, error: null } : now));
        } catch (error) {
          if (signal.aborted) return;
          if (!(error instanceof Problem)) throw error;
          setState((now) => (error.status === 0 && now.value ? now : { ...now, error }));
        }
        do await Promise.race([pause(every, signal), new Promise((resolve) => (wake = resolve))]);
        while (document.hidden && !signal.aborted);
      }
    }
    reading();
    control.current = () => wake();
    return () => leaving.abort();
  }, [where, every]);
  return { ...state, again: () => control.current() };
}

// A state that is no run's or node's: colour, icon and word as well.
export const Mark = ({ kind, icon, children }) => html`<span class="state state-${kind}"><span class="icon" aria-hidden="true">${icon}</span>${children}</span>`;

// A head that begins with # is that of numbers. `kind`: "narrow", or "stack" for lines on a phone.
export function Table({ label, heads, kind = "", children }) {
  return html`<div class="scroller" tabindex="0" role="region" aria-label=${label}><table class="grid ${kind}">
    <thead><tr>${heads.map((head) => html`<th scope="col" class=${head.startsWith("#") ? "number" : null}>${head.replace("#", "")}</th>`)}</tr></thead><tbody>${children}</tbody></table></div>`;
}

const plural = (count, word) => `${count.toLocaleString()} ${word}${count === 1 ? "" : "s"}`;

// ── workers ─────────────────────────────────────────────────────────────────────────────

const toNode = (one) => link(["runs", one.run_id, "nodes"], { node: one.node });

function RunningNodes({ nodes }) {
  const name = (one) => (one.item === null ? one.node : `${one.node}[${one.item}]`);
  return html`<ul class="plain running">${nodes.map((one) => html`<li key=${`${one.run_id} ${name(one)}`}>
    <a href=${toNode(one)}>${one.workflow} · ${name(one)}</a> <span class="count"><code>${one.handler}</code>${one.attempt > 1 ? `, attempt ${one.attempt}` : ""}, <${Elapsed} from=${one.started_at} /></span></li>`)}</ul>`;
}

function Worker({ worker, running }) {
  return html`<article class="card" aria-label=${`Worker ${worker.worker_id}`}>
    <header><h2>${worker.worker_id}</h2>${worker.alive ? html`<${Mark} kind="completed" icon="✓">alive<//>` : html`<${Mark} kind="failed" icon="✕">dead<//>`}
      <span class="count">${worker.running} of ${worker.concurrency} places in use</span></header>
    <div class="meter" aria-hidden="true"><span class="fill-running" style=${{ width: `${Math.min(100, (100 * worker.running) / Math.max(1, worker.concurrency))}%` }}></span></div>
    <p class="facts">${worker.host}, pid ${worker.pid}, started <${Time} at=${worker.started_at} />, last heard of <${Time} at=${worker.last_heartbeat} /></p>
    ${running.length > 0 && html`<${RunningNodes} nodes=${running} />`}
    <details><summary>${plural(worker.handlers.length, "handler")}</summary><p class="ids">${worker.handlers.map((name) => html`<code>${name}</code> `)}</p></details>
  </article>`;
}

function Workers() {
  const workers = usePolled("/workers");
  const queues = usePolled("/queues");
  const found = workers.value?.items;
  const running = queues.value?.running ?? [];
  const known = new Set((found ?? []).map((one) => one.worker_id));
  const elsewhere = running.filter((one) => !known.has(one.worker));
  const order = found && [...found].sort((a, b) => b.alive - a.alive || b.running - a.running);
  return html`
    <${Trouble} error=${workers.error || queues.error} again=${workers.again} />
    ${!found && !workers.error && html`<${Loading} />`}
    ${found && found.length === 0 && html`<${Empty}><p>No worker is there, so nodes wait.</p><p>Start one: <code>dovetail worker</code>, with <code>--handlers FILE.py</code> for your own handlers.</p><//>`}
    <div class="cards">${order && order.map((worker) => html`<${Worker} key=${worker.worker_id} worker=${worker} running=${running.filter((one) => one.worker === worker.worker_id)} />`)}
      ${elsewhere.length > 0 && html`<article class="card" aria-label="Other processes"><header><h2>Other processes</h2></header>
        <p class="facts">These nodes run in processes that are not listed above, such as <code>dovetail run</code>.</p><${RunningNodes} nodes=${elsewhere} /></article>`}</div>
    ${queues.value && !queues.value.complete && html`<p class="count">Nodes of the newest runs are shown.</p>`}`;
}

// ── queues ──────────────────────────────────────────────────────────────────────────────

function Queues() {
  const { value, error, again } = usePolled("/queues");
  const items = value && [...value.items].sort((a, b) => b.waiting - a.waiting || a.handler.localeCompare(b.handler));
  const waiting = items ? items.reduce((sum, one) => sum + one.waiting, 0) : 0;
  return html`<${Trouble} error=${error} again=${again} />
    ${!items && !error && html`<${Loading} />`}
    ${items && items.length === 0 && html`<${Empty}>No handler is known yet. A worker announces its handlers when it starts: <code>dovetail worker</code><//>`}
    ${items && items.length > 0 && html`<p>${waiting === 0 ? "No node waits for a worker." : `${plural(waiting, "node")} ${waiting === 1 ? "waits" : "wait"} for a worker.`}</p>
      <${Table} label="Handlers" kind="narrow" heads=${["Handler", "#Waiting", "#Workers"]}>
        ${items.map((one) => html`<tr key=${one.handler}><th scope="row"><code>${one.handler}</code>${one.waiting > 0 && one.workers === 0 && html`<div><${Mark} kind="failed" icon="✕">no worker has this handler: start one with --handlers<//></div>`}</th>
          <td class="number">${one.waiting.toLocaleString()}</td><td class="number">${one.workers}</td></tr>`)}
      <//>`}`;
}

// ── rate limits ─────────────────────────────────────────────────────────────────────────

function Limit({ limit, parked, done }) {
  const [fields, setFields] = useState(null);
  const [problem, setProblem] = useState(null);
  const now = fields ?? { rate: String(limit.rate_per_second), burst: String(limit.burst) };
  const changed = Number(now.rate) !== limit.rate_per_second || Number(now.burst) !== limit.burst;
  const save = async (event) => {
    event.preventDefault();
    try {
      await put(path("rate-limits", limit.tag), { rate_per_second: Number(now.rate), burst: Number(now.burst) });
      setProblem(null);
      setFields(null);
      done();
    } catch (error) {
      setProblem(error);
    }
  };
  const set = (name) => (event) => setFields({ ...now, [name]: event.currentTarget.value });
  return html`<li class="card"><form onSubmit=${save} aria-label=${`Rate limit ${limit.tag}`}>
    <h2>${limit.tag}</h2>
    <div class="bar">
      <label>starts a second <input type="number" min="0" step="any" required value=${now.rate} onInput=${set("rate")} /></label>
      <label>burst <input type="number" min="1" step="1" required value=${now.burst} onInput=${set("burst")} /></label>
      <${WriteButton} class="primary" type="submit" disabled=${!changed}>Save<//>
    </div>
    <p class="facts">${parked ? html`<${Mark} kind="queued" icon="◔">${plural(parked.nodes, "node")} parked<//>, the next may start <${Time} at=${parked.next_at} />` : "no node is parked"}</p>
    <${Trouble} error=${problem} />
  </form></li>`;
}

function Limits() {
  const limits = usePolled("/rate-limits");
  const queues = usePolled("/queues");
  const [more, setMore] = useState([]);
  const [tag, setTag] = useState("");
  const [problem, setProblem] = useState(null);
  const parked = new Map((queues.value?.parked ?? []).map((one) => [one.tag, one]));
  const set = limits.value?.items ?? [];
  const known = new Set(set.map((one) => one.tag));
  const unset = [...parked.values(), ...more].filter((one) => !known.has(one.tag) && known.add(one.tag));
  const all = [...set, ...unset];
  const add = async (event) => {
    event.preventDefault();
    const wanted = tag.trim();
    if (!wanted) return;
    try {
      if (!known.has(wanted)) setMore([...more, await get(path("rate-limits", wanted))]);
      setTag("");
      setProblem(null);
    } catch (refused) {
      setProblem(refused);
    }
  };
  return html`<${Trouble} error=${limits.error || queues.error} again=${limits.again} />
    <${Trouble} error=${problem} />
    ${!limits.value && !limits.error && html`<${Loading} />`}
    ${limits.value && all.length === 0 && html`<${Empty}><p>No rate limit is set, and no node is parked.</p><p>Nodes with the same <code>resource_tag</code> share one: 10 starts a second, unless you set another below.</p><//>`}
    <ul class="plain cards">${all.map((limit) => html`<${Limit} key=${limit.tag} limit=${limit} parked=${parked.get(limit.tag)} done=${() => { limits.again(); queues.again(); }} />`)}</ul>
    ${limits.value && html`<form class="bar" onSubmit=${add}><label>Limit for the resource_tag <input value=${tag} onInput=${(e) => setTag(e.currentTarget.value)} /></label><button type="submit" disabled=${!tag.trim()}>Show it</button></form>`}`;
}

// ── dead letters ────────────────────────────────────────────────────────────────────────

function Letter({ letter, drop, requeue }) {
  const run = letter.fields?.run_id;
  return html`<li class="card"><article aria-label=${`Dead letter ${letter.id}`}>
    <header><h2>${letter.reason}</h2></header>
    <p class="facts"><${Time} at=${letter.time} />, from <code>${letter.stream}</code>, message <code>${letter.id}</code></p>
    <${Json} title="Fields" value=${letter.fields} />
    <div class="actions">
      ${run && html`<${WriteButton} class="primary" onClick=${requeue}>Requeue<//><a class="button" href=${link(["runs", run])}>Its run</a>`}
      <${WriteButton} onClick=${drop}>Drop…<//>
    </div>
  </article></li>`;
}

function DeadLetters() {
  const { value, error, again } = usePolled("/dead-letters");
  const [dropping, setDropping] = useState(null);
  const [said, setSaid] = useState(null);
  const [problem, setProblem] = useState(null);
  const act = async (work, words) => {
    setProblem(null);
    setSaid(null);
    try {
      const outcome = await work();
      setSaid(words(outcome));
    } catch (failed) {
      setProblem(failed);
    }
    again();
  };
  const requeue = (letter) => act(() => post(path("dead-letters", letter.letter_id, "requeue"), {}), (run) => letter.stream === "webhooks" ? "The notification is sent again." : html`The run <a href=${link(["runs", run.run_id])}><code>${run.run_id.slice(0, 8)}</code></a> goes on.`);
  const drop = (letter) => act(() => remove(path("dead-letters", letter.letter_id)), () => "The letter is dropped.");
  return html`<${Trouble} error=${error || problem} again=${error && again} />
    <p role="status">${said}</p>
    ${!value && !error && html`<${Loading} />`}
    ${value && value.items.length === 0 && html`<${Empty}><p>There are no dead letters.</p><p>A message that cannot be read, or a node that lost its worker too often, would be here.</p><//>`}
    <ul class="plain cards">${value && value.items.map((letter) => html`<${Letter} key=${letter.letter_id} letter=${letter} requeue=${() => requeue(letter)} drop=${() => setDropping(letter)} />`)}</ul>
    ${dropping && html`<${Dialog} title="Drop this letter" onClose=${() => setDropping(null)}>
      <p>It is deleted for good. The run that it names stays as it is.</p>
      <div class="actions"><button class="primary danger" autofocus onClick=${() => { setDropping(null); drop(dropping); }}>Drop it</button></div>
    <//>`}`;
}

const SECTIONS = { workers: ["Workers", Workers], queues: ["Queues", Queues], limits: ["Rate limits", Limits], letters: ["Dead letters", DeadLetters] };

export function OperationsScreen({ section = "workers" }) {
  const [title, Section] = Object.hasOwn(SECTIONS, section) ? SECTIONS[section] : SECTIONS.workers;
  return html`<main tabindex="-1"><h1>Operations</h1>
    <${Tabs} label="Parts" current=${section} items=${Object.entries(SECTIONS).map(([key, [words]]) => [key, words, link(["operations", key])])} />
    <section aria-label=${title}><${Section} /></section></main>`;
}
