// Registered workflows with their last runs: which of them fail is seen at once.
import { html, useEffect, useRef, useState } from "./html.js";
import { get, onRunEvents, pause, withQuery } from "./api.js";
import { link, setQuery } from "./route.js";
import { Empty, Heads, Loading, STATES, Time, Trouble, TypedInput } from "./ui.js";

const PAGE = 50;
const LAST_RUNS = 10;
const REFRESH_MS = 2000;
const POLL_MS = 10000;

// An alias names a version, or several with weights.
export function targetsOf(target) {
  if (typeof target === "number") return [{ version: target }];
  const total = Object.values(target).reduce((sum, one) => sum + one, 0);
  return Object.entries(target)
    .map(([version, weight]) => ({ version: Number(version), share: weight / total }))
    .sort((a, b) => b.share - a.share);
}

export const percent = (share) => `${(100 * share).toFixed(share < 0.1 && share > 0 ? 1 : 0)} %`;
export const targetWords = (target) => targetsOf(target).map(({ version, share }) => `v${version}${share === undefined ? "" : ` ${percent(share)}`}`).join(", ");

// Of the runs that have ended: how many failed. A cancelled run is neither.
export function failures(runs) {
  const failed = runs.filter((run) => run.status === "FAILED").length;
  const ended = failed + runs.filter((run) => run.status === "COMPLETED").length;
  return { failed, ended };
}

export function FailureShare({ runs }) {
  const { failed, ended } = failures(runs);
  if (ended === 0) return html`<span class="none">${runs.length ? "none has ended" : "no runs"}</span>`;
  if (failed === 0) return html`<span class="state state-completed"><span class="icon" aria-hidden="true">✓</span>none of ${ended} failed</span>`;
  return html`<span class="state state-failed"><span class="icon" aria-hidden="true">✕</span>${failed} of ${ended} failed</span>`;
}

// Oldest first, so that the newest is where a line of text ends.
export function LastRuns({ runs }) {
  if (runs.length === 0) return html`<span class="last-runs"></span>`;
  const counts = {};
  for (const run of runs) counts[STATES[run.status][1]] = (counts[STATES[run.status][1]] ?? 0) + 1;
  const words = Object.entries(counts).map(([word, count]) => `${count} ${word}`).join(", ");
  return html`<span class="last-runs" role="img" aria-label=${`Last runs: ${words}`} title=${`Last runs, the newest on the right: ${words}`}>
    ${runs.toReversed().map((run) => html`<span key=${run.run_id} class=${`last fill-${STATES[run.status][1]}`}>${STATES[run.status][0]}</span>`)}</span>`;
}

// The pages read so far, live: an event of a run reads the first page again.
function useWorkflows(q) {
  const [state, setState] = useState({ q: null, items: null, cursor: null, error: null });
  const control = useRef(null);
  useEffect(() => {
    const leaving = new AbortController();
    const { signal } = leaving;
    const where = (cursor) => withQuery("/workflows", { limit: PAGE, runs: LAST_RUNS, q, cursor });
    const fail = (error) => signal.aborted || setState((now) => ({ ...now, error: error.status === 0 && now.items ? null : error }));
    let reading = false;
    let dirty = false;
    async function refresh() {
      dirty = true;
      if (reading) return;
      reading = true;
      while (dirty && !signal.aborted) {
        dirty = false;
        try {
          const page = await get(where(), signal);
          setState((now) => {
            // Pages that were read below the first one stay.
            const last = page.items.at(-1)?.name ?? "";
            const beyond = page.next_cursor && now.q === q ? now.items.filter((one) => one.name > last) : [];
            return { q, items: [...page.items, ...beyond], cursor: beyond.length ? now.cursor : page.next_cursor, error: null };
          });
        } catch (error) {
          fail(error);
        }
        await pause(REFRESH_MS, signal);
      }
      reading = false;
    }
    async function more(cursor) {
      try {
        const page = await get(where(cursor), signal);
        setState((now) => ({ ...now, items: [...now.items, ...page.items], cursor: page.next_cursor, error: null }));
      } catch (error) {
        fail(error);
      }
    }
    refresh();
    const stop = onRunEvents(refresh);
    // What is registered, and where aliases point, makes no event.
    const timer = setInterval(() => document.hidden || refresh(), POLL_MS);
    control.current = { more, refresh };
    return () => {
      stop();
      clearInterval(timer);
      leaving.abort();
    };
  }, [q]);
  return { ...state, more: (cursor) => control.current.more(cursor), refresh: () => control.current.refresh() };
}

const COLUMNS = [["c-name", "Workflow"], ["c-version", "Latest"], ["c-aliases", "Aliases"], ["last-runs", `Last ${LAST_RUNS} runs`], ["c-share", "Failures"], ["c-time", "Last run"]];

function Row({ one }) {
  const aliases = Object.entries(one.aliases).filter(([alias]) => alias !== "latest");
  const runs = one.runs ?? [];
  const { failed } = failures(runs);
  return html`<li class="row workflow">
    <a class="c-name" href=${link(["workflows", one.name])}>${one.name}</a>
    <span class="c-version">v${one.latest_version}</span>
    <span class="c-aliases">${aliases.map(([alias, target]) => html`<span class="tag" key=${alias}>${alias} → ${targetWords(target)}</span>`)}</span>
    <${LastRuns} runs=${runs} />
    <a class="c-share" href=${link(["runs"], { workflow: one.name, ...(failed ? { status: "FAILED" } : {}) })}><${FailureShare} runs=${runs} /></a>
    <span class="c-time">${runs.length > 0 && html`<${Time} at=${runs[0].created_at} />`}</span>
  </li>`;
}

export function WorkflowsScreen({ query }) {
  const { items, cursor, error, more, refresh } = useWorkflows(query.q);
  return html`<main tabindex="-1">
    <div class="title"><h1>Workflows</h1><span class="grow"></span>
      ${(items?.length > 0 || query.q) && html`<${TypedInput} aria-label="Search workflows" placeholder="Name" value=${query.q || ""} set=${(q) => setQuery({ q })} />`}
      <a class="button" href=${link(["editor"])}>New workflow</a></div>
    <${Trouble} error=${error} again=${refresh} />
    ${!items && !error && html`<${Loading} />`}
    ${items?.length === 0 && !query.q && html`<${Empty}><p>No workflow is registered.</p>
      <p><a href=${link(["editor"])}>Write one here</a>, or register a file: <code>dovetail workflows register flow.yaml</code></p><//>`}
    ${items?.length === 0 && query.q && !cursor && html`<${Empty}>No workflow matches. <button onClick=${() => setQuery({ q: "" })}>Show all workflows</button><//>`}
    ${items?.length > 0 && html`<${Heads} kind="workflow" columns=${COLUMNS} /><ul class="plain list flows">${items.map((one) => html`<${Row} key=${one.name} one=${one} />`)}</ul>`}
    ${cursor && html`<p class="more"><button onClick=${() => more(cursor)}>More workflows</button></p>`}
  </main>`;
}
