// The log of a run or of one node: live, filtered by the server, only the lines in view drawn.
import { html, useEffect, useLayoutEffect, useRef, useState } from "./html.js";
import { download, follow, path, withQuery } from "./api.js";
import { pieces } from "./ansi.js";
import { Copy, Empty, NodeInput, Rows, Trouble, TypedInput, clock, useNarrow } from "./ui.js";

const LINE_PX = 20;
const MAX_LINES = 50000;
const MAX_WRAPPED = 1000; // wrapped lines have different heights, so all of them are drawn
const LEVELS = ["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"];

// All lines of this query, as they come. The stream ends with the run; `again` starts it anew.
export function useLog(runId, query, again) {
  const [state, setState] = useState({ lines: [], error: null, loaded: false });
  const asked = withQuery(path("runs", runId, "logs"), query);
  useEffect(() => {
    const leaving = new AbortController();
    let lines = [];
    let waiting = null;
    setState({ lines, error: null, loaded: false });
    const show = () => {
      waiting = null;
      setState({ lines, error: null, loaded: true });
    };
    const soon = () => (waiting ??= setTimeout(show, 60));
    follow(asked, {
      signal: leaving.signal,
      first: "0",
      onOpen: soon,
      onEvents(more) {
        const last = lines.at(-1)?.time ?? "";
        lines = lines.concat(more);
        // The lines of several nodes come in the order in which they were stored.
        if (more.some((line, n) => line.time < (n ? more[n - 1].time : last))) lines.sort((a, b) => (a.time < b.time ? -1 : a.time > b.time ? 1 : a.seq - b.seq));
        if (lines.length > MAX_LINES) lines = lines.slice(-MAX_LINES);
        soon();
      },
    }).then(show, (error) => setState({ lines, error, loaded: true }));
    return () => {
      leaving.abort();
      clearTimeout(waiting);
    };
  }, [asked, again]);
  return state;
}

function plain(line) {
  const fields = line.fields ? " " + JSON.stringify(line.fields) : "";
  return `${line.time} ${line.level} ${line.node ?? ""} ${line.message}${fields}`;
}

export function Line({ line, withNode }) {
  const fields = line.fields && Object.keys(line.fields).length > 0;
  return html`<div class="line level-${line.level.toLowerCase()}" role="listitem">
    <span class="at" title=${line.time}>${clock(line.time)}</span>
    <span class="level">${line.level}</span>
    ${withNode && html`<span class="from">${line.node ?? ""}${line.item === null || line.item === undefined ? "" : `[${line.item}]`}</span>`}
    <span class="message">${pieces(line.message).map((piece) => html`<span class=${piece.classes || null}>${piece.text}</span>`)}
      ${fields && html` <span class="fields">${JSON.stringify(line.fields)}</span>`}</span>
  </div>`;
}

// Wrapped lines have different heights. `follow` keeps the last one in view.
function Wrapped({ lines, withNode, follow, onLeaveEnd }) {
  const box = useRef(null);
  const shown = lines.slice(-MAX_WRAPPED);
  useLayoutEffect(() => {
    if (follow) box.current.scrollTop = box.current.scrollHeight;
  }, [lines, follow]);
  const scrolled = () => {
    const { scrollHeight, scrollTop, clientHeight } = box.current;
    if (follow && scrollHeight - scrollTop - clientHeight > 3 * LINE_PX) onLeaveEnd();
  };
  return html`<div class="rows own wrapped" ref=${box} role="list" tabindex="0" aria-label="Log" onScroll=${scrolled}>
    ${lines.length > MAX_WRAPPED && html`<p class="none" role="listitem">The last ${MAX_WRAPPED.toLocaleString()} lines; without Wrap all are here.</p>`}
    ${shown.map((line) => html`<${Line} key=${`${line.seq} ${line.logger}`} line=${line} withNode=${withNode} />`)}</div>`;
}

// `query`: node, item, epoch, attempt, level, q. `set` changes it, in the address.
export function LogView({ runId, query, set, nodes, again, compact, wrap: wrapAtFirst }) {
  const { lines, error, loaded } = useLog(runId, query, again);
  const [following, setFollowing] = useState(true);
  const narrow = useNarrow();
  const [wrap, setWrap] = useState(Boolean(wrapAtFirst) || narrow);
  const [unsaved, setUnsaved] = useState(null);
  const withNode = !query.node;
  const leave = () => setFollowing(false);
  return html`<div class=${compact ? "log compact" : "log"}>
    <div class="bar">
      ${nodes && html`<label>Node <${NodeInput} nodes=${nodes} value=${query.node} placeholder="all" onChoose=${(node) => set({ node, item: "", epoch: "", attempt: "" })} /></label>`}
      ${set && (query.attempt || query.item) && html`<button class="chip" onClick=${() => set({ item: "", epoch: "", attempt: "" })}>
        ${query.item ? `item ${query.item}` : ""}${query.attempt ? `${query.epoch > 1 ? `epoch ${query.epoch}, ` : ""}attempt ${query.attempt}` : ""} ✕</button>`}
      ${set && html`<label>Level <select value=${query.level || ""} onChange=${(e) => set({ level: e.currentTarget.value })}>
        <option value="">all</option>
        ${LEVELS.map((level) => html`<option value=${level}>${level.toLowerCase()}</option>`)}
      </select></label>
      <${TypedInput} placeholder="Search the log" aria-label="Search the log" value=${query.q || ""} set=${(q) => set({ q })} />`}
      <label><input type="checkbox" checked=${following} onChange=${(e) => setFollowing(e.currentTarget.checked)} /> Follow</label>
      <label><input type="checkbox" checked=${wrap} onChange=${(e) => { setWrap(e.currentTarget.checked); set?.({ wrap: e.currentTarget.checked ? "1" : "" }); }} /> Wrap</label>
      <${Copy} text=${() => lines.map(plain).join("\n")} />
      <button class="quiet" onClick=${() => download(withQuery(path("runs", runId, "logs"), query), "text/plain", `${runId}.log`).then(() => setUnsaved(null), setUnsaved)}>Download</button>
      <span class="count">${lines.length === MAX_LINES ? "the last " : ""}${lines.length.toLocaleString()} ${lines.length === 1 ? "line" : "lines"}</span>
    </div>
    <${Trouble} error=${error || unsaved} />
    ${loaded && !error && lines.length === 0 && html`<${Empty}>
      ${query.q || query.level ? "No line matches." : "Nothing was logged. What a handler logs or prints is shown here while it runs."}<//>`}
    ${lines.length > 0 && (wrap
      ? html`<${Wrapped} lines=${lines} withNode=${withNode} follow=${following} onLeaveEnd=${leave} />`
      : html`<${Rows} own label="Log" items=${lines} height=${LINE_PX} follow=${following} onLeaveEnd=${leave}
          row=${(line) => html`<${Line} line=${line} withNode=${withNode} />`} />`)}
  </div>`;
}
