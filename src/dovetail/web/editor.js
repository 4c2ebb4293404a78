// Write a definition: the server checks it while you type, the graph is beside it.
import { html, useEffect, useMemo, useRef, useState } from "./html.js";
import { get, getText, newKey, parseJson, path, post, reread, save, withQuery } from "./api.js";
import { CodeEditor } from "./code.js";
import { completer } from "./complete.js";
import { GivenGraph } from "./graph.js";
import { go, link } from "./route.js";
import { Dialog, Loading, Trouble, WriteButton } from "./ui.js";

const DRAFT = "dovetail.draft";
const CHECK_MS = 250;
const MAX_FILE = 1 << 20; // the server takes no more
const SHOWN_FINDINGS = 50;
const STARTER = `# A workflow to start from. The server checks it while you type; Ctrl-Space shows what fits.
name: hello
params:
  type: object
  properties:
    who: {type: string, default: world}
nodes:
  - id: start
    handler: input
  - id: end
    handler: output
    dependencies: [start]
    config:
      text: "Hello {{ start.who }}"
`;

const isJson = (text) => /^\s*\{/.test(text);
const asText = (text) => ({ "Content-Type": isJson(text) ? "application/json" : "application/yaml" });

// What the server finds in the newest text. An older answer that comes late is dropped.
function useCheck(text) {
  const [state, setState] = useState({ of: null, found: null, error: null });
  useEffect(() => {
    if (text === null) return undefined;
    const leaving = new AbortController();
    const check = async () => {
      try {
        const found = await post("/workflows/validate?graph=true", text, asText(text), leaving.signal);
        if (!leaving.signal.aborted) setState({ of: text, found, error: null });
      } catch (error) {
        if (!leaving.signal.aborted) setState((now) => ({ ...now, of: text, error }));
      }
    };
    const timer = setTimeout(check, CHECK_MS);
    return () => {
      clearTimeout(timer);
      leaving.abort();
    };
  }, [text]);
  return { ...state, isNew: state.of === text };
}

// The text to begin with: what was written in this tab before, else a version of a workflow, else a
// start. A draft is kept until it is registered, so that a look at a try run does not lose it.
function useStart(query) {
  const [start, setStart] = useState(null);
  const [error, setError] = useState(null);
  useEffect(() => {
    const key = query.workflow ? `${DRAFT}:${query.workflow}@${query.version ?? ""}` : DRAFT;
    const draft = JSON.parse(sessionStorage.getItem(key));
    if (!query.workflow) {
      setStart({ text: draft?.text ?? STARTER, kept: STARTER, key, name: null, tag: null });
      return undefined;
    }
    const leaving = new AbortController();
    const { signal } = leaving;
    const where = path("workflows", query.workflow);
    Promise.all([getText(withQuery(where, { version: query.version }), "application/yaml", signal), reread(where, null, signal)]).then(
      // The tag is that of the workflow when the draft was begun.
      ([text, latest]) => setStart({ text: draft?.text ?? text, kept: text, key, name: query.workflow, tag: draft?.tag ?? latest.tag }),
      (problem) => signal.aborted || setError(problem),
    );
    return () => leaving.abort();
  }, []);
  return { start, error };
}

function keepDraft({ key, kept }, text, tag) {
  if (text === kept) return sessionStorage.removeItem(key);
  try {
    return sessionStorage.setItem(key, JSON.stringify({ text, tag }));
  } catch {
    return undefined; // the browser has no room for it: it is only not kept
  }
}

function Findings({ found, show }) {
  const all = [...found.errors.map((one) => ({ ...one, kind: "error" })), ...found.warnings.map((one) => ({ ...one, kind: "warning" }))];
  if (all.length === 0) return null;
  return html`<ul class="plain findings" aria-label="Findings">${all.slice(0, SHOWN_FINDINGS).map((one, n) => html`<li key=${n} class=${`finding finding-${one.kind}`}>
      <button class="quiet" onClick=${() => show({ line: one.line, column: one.column })}>line ${one.line ?? 1}</button>
      <span><span class="icon" aria-hidden="true">${one.kind === "error" ? "✕" : "!"}</span>${one.kind}: ${one.message} ${one.path && html`<code>${one.path}</code>`}</span></li>`)}
    ${all.length > SHOWN_FINDINGS && html`<li class="none">and ${all.length - SHOWN_FINDINGS} more</li>`}</ul>`;
}

function Verdict({ found, error, isNew, text }) {
  if (error) return html`<span class="state state-failed">not checked</span>`;
  if (!found || !isNew) return html`<span class="count">checking…</span>`;
  if (!text.trim()) return html`<span class="count">empty</span>`;
  const { errors, warnings, layers } = found;
  const nodes = layers.reduce((sum, ids) => sum + ids.length, 0);
  const warned = warnings.length ? `, ${warnings.length} ${warnings.length === 1 ? "warning" : "warnings"}` : "";
  return found.valid
    ? html`<span class="state state-completed"><span class="icon" aria-hidden="true">✓</span>valid, ${nodes} ${nodes === 1 ? "node" : "nodes"}${warned}</span>`
    : html`<span class="state state-failed"><span class="icon" aria-hidden="true">✕</span>${errors.length} ${errors.length === 1 ? "error" : "errors"}${warned}</span>`;
}

// A run of the text as it is, which registers nothing.
function TryDialog({ text, onClose }) {
  const [params, setParams] = useState("");
  const [state, setState] = useState({ busy: false, error: null });
  const start = async (event) => {
    event.preventDefault();
    setState({ busy: true, error: null });
    try {
      const given = params.trim() ? parseJson(params) : {};
      // The text stays as it is, a part of the request: reading it here could change large numbers.
      const body = isJson(text)
        ? `{"params": ${JSON.stringify(given)}, "definition": ${text}}`
        : `params: ${JSON.stringify(given)}\ndefinition:\n${text.replace(/^---\s*\n/, "").split("\n").map((line) => `  ${line}`).join("\n")}\n`;
      const made = await post("/runs", body, { ...asText(text), "Idempotency-Key": newKey() });
      go(["runs", made.run_id]);
    } catch (error) {
      setState({ busy: false, error: error instanceof SyntaxError ? new Error(`The params are no JSON: ${error.message}`) : error });
    }
  };
  return html`<${Dialog} title="Try run" onClose=${onClose}><form onSubmit=${start}>
    <p>Runs the text as it is. Nothing is registered; handlers do what they do in every run.</p>
    <label class="field"><span>Params, JSON</span><textarea rows="4" autofocus spellcheck=${false} placeholder="{}" value=${params} onInput=${(event) => setParams(event.currentTarget.value)}></textarea></label>
    <${Trouble} error=${state.error} />
    <div class="actions"><${WriteButton} class="primary" type="submit" disabled=${state.busy}>Run it<//></div></form><//>`;
}

function Writing({ start }) {
  const [given, setGiven] = useState({ text: start.text, turn: 0 }); // what the editor begins with
  const [text, setText] = useState(start.text);
  const [schema, setSchema] = useState(null);
  const [reveal, setReveal] = useState(null);
  const [dialog, setDialog] = useState(false);
  const [outcome, setOutcome] = useState({ busy: false, error: null, made: null, refused: null });
  const [dropping, setDropping] = useState(false);
  const lastGraph = useRef(null);
  const choose = useRef(null);
  const tag = useRef(start.tag);
  const { found, error, isNew } = useCheck(text);
  if (found?.graph) lastGraph.current = found.graph;
  const graph = lastGraph.current;
  const complete = useMemo(() => (schema ? completer(schema) : null), [schema]);
  useEffect(() => {
    get("/schema").then(setSchema, () => {}); // without it nothing is suggested
  }, []);
  const change = (next) => {
    setText(next);
    setOutcome({ busy: false, error: null, made: null, refused: null });
    keepDraft(start, next, tag.current);
  };
  const replace = (next) => {
    setGiven({ text: next, turn: given.turn + 1 });
    change(next);
  };
  const load = async (file) => {
    if (!file) return;
    if (file.size > MAX_FILE) return setOutcome({ error: new Error(`${file.name} is larger than 1 MiB, which is more than a definition may have.`) });
    return replace(await file.text());
  };
  const drop = (event) => {
    event.preventDefault();
    setDropping(false);
    load(event.dataTransfer.files[0]);
  };
  const over = (event) => {
    if (![...event.dataTransfer.types].includes("Files")) return;
    event.preventDefault();
    setDropping(true);
  };
  const register = async (isForced) => {
    setOutcome({ busy: true, error: null, made: null });
    try {
      // A version that another user registered meanwhile is not replaced without a question.
      const made = await post("/workflows", text, { ...asText(text), ...(tag.current && !isForced ? { "If-Match": tag.current } : {}) });
      if (start.name === made.name) tag.current = (await reread(path("workflows", made.name), null)).tag;
      setOutcome({ busy: false, error: null, made });
      sessionStorage.removeItem(start.key);
    } catch (problem) {
      setOutcome({ busy: false, error: problem, made: null, refused: problem.status === 412 });
    }
  };
  const isReady = isNew && !error && found?.valid;
  const { made } = outcome;
  return html`<main tabindex="-1" class=${`wide editor${dropping ? " dropping" : ""}`} onDragOver=${over} onDragLeave=${() => setDropping(false)} onDrop=${drop}>
    <p class="crumbs"><a href=${link(["workflows"])}>Workflows</a>${start.name && html` / <a href=${link(["workflows", start.name])}>${start.name}</a>`}</p>
    <div class="title"><h1>${start.name ? `Edit ${start.name}` : "New workflow"}</h1>
      <span role="status" aria-live="polite"><${Verdict} found=${found} error=${error} isNew=${isNew} text=${text} /></span>
      <span class="grow"></span>
      <div class="actions">
        <input type="file" class="sr" tabindex="-1" aria-hidden="true" accept=".yaml,.yml,.json" ref=${choose} onChange=${(event) => { load(event.currentTarget.files[0]); event.currentTarget.value = ""; }} />
        ${text !== start.kept && html`<button class="quiet" onClick=${() => replace(start.kept)}>Discard changes</button>`}
        <button onClick=${() => choose.current.click()}>Open a file…</button>
        <button onClick=${() => save(new Blob([text]), `${start.name ?? "workflow"}.${isJson(text) ? "json" : "yaml"}`)}>Download</button>
        <${WriteButton} disabled=${!isReady} onClick=${() => setDialog(true)}>Try run…<//>
        <${WriteButton} class="primary" disabled=${!isReady || outcome.busy} onClick=${() => register(false)}>Register<//>
      </div></div>
    <div role="status" aria-live="polite">${made && html`<p class="done"><span class="icon" aria-hidden="true">✓</span>${made.name} version ${made.version} ${made.created ? "is registered" : "has this content already"}. <a href=${link(["workflows", made.name])}>Trigger it</a></p>`}</div>
    <${Trouble} error=${error ?? outcome.error} />
    ${outcome.refused && html`<p>Another version was registered since you began. <a href=${link(["workflows", start.name, "diff"])}>See what changed</a>, or <${WriteButton} onClick=${() => register(true)}>Register yours all the same<//></p>`}
    <div class="desk">
      <div class="writing"><${CodeEditor} key=${given.turn} initial=${given.text} label="Definition" onChange=${change} complete=${complete} found=${isNew ? found : null} reveal=${reveal} onSave=${() => isReady && register(false)} />
        <p class="hint">Drop a file here. Ctrl-Space suggests, Ctrl-S registers, Esc and then Tab leaves the text.</p></div>
      <div class="checked">
        ${found && html`<${Findings} found=${found} show=${(place) => setReveal(place)} />`}
        ${graph ? html`<div class=${found?.valid ? null : "stale"}>${!found?.valid && html`<p class="none">The graph of the last valid text:</p>`}
          <${GivenGraph} graph=${graph} /></div>` : html`<p class="none">The graph appears when the text is valid.</p>`}
      </div>
    </div>
    ${dialog && html`<${TryDialog} text=${text} onClose=${() => setDialog(false)} />`}
  </main>`;
}

export function EditorScreen({ query }) {
  const { start, error } = useStart(query);
  if (start) return html`<${Writing} start=${start} />`;
  return html`<main tabindex="-1"><h1>Edit ${query.workflow}</h1>${error ? html`<${Trouble} error=${error} /><p><a href=${link(["workflows"])}>All workflows</a></p>` : html`<${Loading} />`}</main>`;
}
