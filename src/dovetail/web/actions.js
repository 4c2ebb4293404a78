// Retry, cancel and fork of a run. Each shows what it will do before it does it.
import { html, useEffect, useLayoutEffect, useRef, useState } from "./html.js";
import { get, getText, newKey, parseJson, path, post } from "./api.js";
import { go } from "./route.js";
import { Dialog, Loading, NodeInput, Trouble } from "./ui.js";

const SHOWN_IDS = 30;

function Ids({ title, ids }) {
  const more = ids.length - SHOWN_IDS;
  return html`<div class="ids"><h3>${title} (${ids.length})</h3>
    <p>${ids.length === 0 ? html`<span class="none">none</span>` : ids.slice(0, SHOWN_IDS).map((id) => html`<code>${id}</code> `)}${more > 0 && ` and ${more} more`}</p></div>`;
}

function Plan({ plan }) {
  return html`<div class="plan"><${Ids} title="Runs again" ids=${plan.rerun} /><${Ids} title="Keeps its output" ids=${plan.reuse} /></div>`;
}

// Asks the server what would happen, whenever `ask` changes.
function usePlan(ask, key) {
  const [state, setState] = useState({ plan: null, error: null });
  useEffect(() => {
    let left = false;
    setState({ plan: null, error: null });
    const timer = setTimeout(() => {
      Promise.resolve().then(ask).then(
        (plan) => left || setState({ plan, error: null }),
        (error) => left || setState({ plan: null, error }),
      );
    }, key ? 300 : 0);
    return () => {
      left = true;
      clearTimeout(timer);
    };
  }, [key]);
  return state;
}

function useAct(act, onClose) {
  const [state, setState] = useState({ busy: false, error: null });
  const start = async () => {
    setState({ busy: true, error: null });
    try {
      await act();
      onClose();
    } catch (error) {
      setState({ busy: false, error });
    }
  };
  return { ...state, start };
}

export function RetryDialog({ run, from, onClose, onDone }) {
  const body = from ? { from } : {};
  const where = path("runs", run.run_id, "retry");
  const { plan, error } = usePlan(() => post(where, { ...body, dry_run: true }), "");
  const act = useAct(async () => { await post(where, body); onDone?.(); }, onClose);
  const ready = useRef(null);
  // The button can be pressed, and have the focus, once the plan is there.
  useLayoutEffect(() => { if (plan) ready.current.focus(); }, [plan]);
  return html`<${Dialog} title=${from ? `Retry from ${from}` : "Retry this run"} onClose=${onClose}>
    <p>The same run goes on, with the same definition and params.</p>
    ${plan ? html`<${Plan} plan=${plan} />` : !error && html`<${Loading} />`}
    <${Trouble} error=${act.error || error} />
    <div class="actions"><button class="primary" ref=${ready} disabled=${!plan || act.busy} onClick=${act.start}>Retry</button></div>
  <//>`;
}

export function CancelDialog({ run, onClose, onDone }) {
  const act = useAct(async () => { await post(path("runs", run.run_id, "cancel"), {}); onDone?.(); }, onClose);
  return html`<${Dialog} title="Cancel this run" onClose=${onClose}>
    <p>Nodes that run are stopped, others are not started. Outputs that exist are kept, and the run can be retried.</p>
    <${Trouble} error=${act.error} />
    <div class="actions"><button class="primary danger" autofocus disabled=${act.busy} onClick=${act.start}>Cancel the run</button></div>
  <//>`;
}

// The request, with the definition as it was written: reading it here could change large numbers.
// A definition in YAML makes the whole request YAML, of which JSON is a part.
function forkBody({ definition, version, params, from }, more) {
  const rest = { ...more };
  if (params.trim()) rest.params = parseJson(params);
  if (version) rest.version = Number(version);
  if (from) rest.from = from;
  const text = definition.trim();
  if (!text) return [rest];
  if (text.startsWith("{")) {
    JSON.parse(text); // or an error that says where
    return [JSON.stringify({ ...rest, definition: null }).replace(/null}$/, () => `${text}}`), { "Content-Type": "application/json" }];
  }
  const indented = definition.replace(/^---\s*\n/, "").split("\n").map((line) => "  " + line).join("\n");
  const fields = Object.entries(rest).map(([key, value]) => `${key}: ${JSON.stringify(value)}\n`).join("");
  return [`${fields}definition:\n${indented}\n`, { "Content-Type": "application/yaml" }];
}

export function ForkDialog({ run, from: given, changed, onClose }) {
  const [what, setWhat] = useState(changed ? "text" : "same");
  const [fields, setFields] = useState({ definition: "", version: "", params: "", from: given || "" });
  const [versions, setVersions] = useState([]);
  const set = (change) => setFields({ ...fields, ...change });
  const where = path("runs", run.run_id, "fork");
  useEffect(() => {
    if (run.version) get(path("workflows", run.workflow, "versions")).then((found) => setVersions(found.items.map((one) => one.version)), () => {});
  }, []);
  const fill = async () => {
    try {
      const found = await getText(path("runs", run.run_id, "definition"), "application/yaml");
      setFields((now) => ({ ...now, definition: now.definition || found }));
    } catch {
      // The field stays empty, to be pasted into.
    }
  };
  useEffect(() => {
    if (changed) fill();
  }, []);
  const choose = (event) => {
    const next = event.currentTarget.value;
    setWhat(next);
    set({ definition: "", version: next === "same" || next === "text" ? "" : next });
    if (next === "text") fill();
  };
  const key = JSON.stringify(fields);
  const { plan, error } = usePlan(() => post(where, ...forkBody(fields, { dry_run: true })), key);
  const act = useAct(async () => {
    const [body, headers] = forkBody(fields, {});
    const made = await post(where, body, { ...headers, "Idempotency-Key": newKey() });
    go(["runs", made.run_id]);
  }, onClose);
  return html`<${Dialog} title="Fork this run" onClose=${onClose}>
    <p>A new run that begins with the outputs of this one. This run stays as it is.</p>
    <label class="field"><span>Definition</span><select value=${what} onChange=${choose} autofocus>
      <option value="same">the same</option>
      ${versions.filter((version) => version !== run.version).map((version) => html`<option value=${String(version)}>version ${version}</option>`)}
      <option value="text">changed, as text</option>
    </select></label>
    ${what === "text" && html`<label class="field"><span>Changed definition, JSON or YAML</span>
      <textarea rows="12" spellcheck=${false} value=${fields.definition} onInput=${(e) => set({ definition: e.currentTarget.value })}></textarea></label>`}
    <label class="field"><span>Begin again at</span><${NodeInput} nodes=${run.nodes} value=${fields.from} placeholder="what changed or did not complete" onChoose=${(from) => set({ from })} /></label>
    <label class="field"><span>Other params, JSON</span><textarea rows="2" spellcheck=${false} placeholder=${JSON.stringify(run.params)} value=${fields.params} onInput=${(e) => set({ params: e.currentTarget.value })}></textarea></label>
    ${plan ? html`<${Plan} plan=${plan} />` : !error && html`<${Loading} />`}
    <${Trouble} error=${act.error || (error instanceof SyntaxError ? new Error(`This is no JSON: ${error.message}`) : error)} />
    <div class="actions"><button class="primary" disabled=${!plan || act.busy} onClick=${act.start}>Fork</button></div>
  <//>`;
}
