// Registered workflows, and a form for the params of one of them.
import { html, useEffect, useState } from "./html.js";
import { get, newKey, path, post } from "./api.js";
import { go, link } from "./route.js";
import { Copy, Empty, Json, Loading, Time, Trouble } from "./ui.js";

function useRead(where) {
  const [state, setState] = useState({ value: null, error: null });
  const [turn, setTurn] = useState(0);
  useEffect(() => {
    const leaving = new AbortController();
    get(where, leaving.signal).then(
      (value) => setState({ value, error: null }),
      (error) => leaving.signal.aborted || setState({ value: null, error }),
    );
    return () => leaving.abort();
  }, [where, turn]);
  return { ...state, again: () => setTurn(turn + 1) };
}

// A version, or the weights of several.
function targetOf(target) {
  if (typeof target === "number") return `v${target}`;
  return Object.entries(target).map(([version, weight]) => `v${version}: ${weight}`).join(" / ");
}

export function WorkflowsScreen() {
  const { value, error, again } = useRead("/workflows?limit=1000");
  return html`<main tabindex="-1">
    <h1>Workflows</h1>
    <${Trouble} error=${error} again=${again} />
    ${!value && !error && html`<${Loading} />`}
    ${value && value.items.length === 0 && html`<${Empty}><p>No workflow is registered.</p><p>Register one: <code>dovetail workflows register flow.yaml</code></p><//>`}
    ${value && value.items.length > 0 && html`<ul class="plain list">${value.items.map((one) => html`<li class="row workflow">
      <a class="c-name" href=${link(["workflows", one.name])}>${one.name}</a>
      <span>v${one.latest_version}</span>
      <span class="c-error">${Object.entries(one.aliases).filter(([alias]) => alias !== "latest").map(([alias, target]) => `${alias} → ${targetOf(target)}`).join(", ")}</span>
      <span class="c-time"><${Time} at=${one.updated_at} /></span>
      <a href=${link(["runs"], { workflow: one.name })}>Runs</a>
    </li>`)}</ul>`}
  </main>`;
}

const SIMPLE = new Set(["string", "integer", "number", "boolean"]);

// What a field holds as text, as the value of its type; a field left empty is left out.
function valueOf(text, schema) {
  if (text === "" || text === undefined) return undefined;
  if (schema.enum) return schema.enum.find((one) => String(one) === text);
  if (schema.type === "string") return text;
  if (schema.type === "boolean") return text === "true";
  if (schema.type === "integer" || schema.type === "number") return Number.isNaN(Number(text)) ? text : Number(text);
  return JSON.parse(text);
}

function Field({ name, schema, required, value, set }) {
  const asText = (one) => (typeof one === "string" ? one : JSON.stringify(one));
  const given = schema.default === undefined ? "" : asText(schema.default);
  const choices = schema.enum || (schema.type === "boolean" ? [true, false] : null);
  const change = (event) => set(event.currentTarget.value);
  const simple = SIMPLE.has(schema.type);
  return html`<label class="field"><span>${name}${required ? " *" : ""}</span>
    ${choices
      ? html`<select value=${value ?? ""} onChange=${change}><option value="">${given ? `default: ${given}` : ""}</option>${choices.map((one) => html`<option value=${String(one)}>${String(one)}</option>`)}</select>`
      : simple
        ? html`<input type=${schema.type === "string" ? "text" : "number"} step=${schema.type === "integer" ? 1 : "any"} required=${required && schema.default === undefined} placeholder=${given} value=${value ?? ""} onInput=${change} />`
        : html`<textarea rows="3" spellcheck=${false} placeholder=${given || "JSON"} value=${value ?? ""} onInput=${change}></textarea>`}
    ${schema.description && html`<small>${schema.description}</small>`}
  </label>`;
}

export function WorkflowScreen({ name, query }) {
  const { value, error, again } = useRead(path("workflows", name) + (query.version ? `?version=${encodeURIComponent(query.version)}` : ""));
  const [fields, setFields] = useState({});
  const [trouble, setTrouble] = useState(null);
  const [busy, setBusy] = useState(false);
  if (!value) return html`<main tabindex="-1"><h1>${name}</h1>${error ? html`<${Trouble} error=${error} again=${again} />` : html`<${Loading} />`}</main>`;
  const schema = value.definition.params || {};
  const properties = Object.entries(schema.properties || {});
  const required = new Set(schema.required || []);
  const known = properties.length > 0;
  const params = () => {
    if (!known) return fields[""] ? JSON.parse(fields[""]) : {};
    const given = properties.map(([key, one]) => [key, valueOf(fields[key], one)]);
    return Object.fromEntries(given.filter(([, one]) => one !== undefined));
  };
  const body = () => ({ params: params(), ...(query.version ? { version: value.version } : {}) });
  const trigger = async (event) => {
    event.preventDefault();
    setBusy(true);
    setTrouble(null);
    try {
      const made = await post(path("workflows", name, "runs"), body(), { "Idempotency-Key": newKey() });
      go(["runs", made.run_id]);
    } catch (problem) {
      setTrouble(problem instanceof SyntaxError ? new Error(`A field is no JSON: ${problem.message}`) : problem);
      setBusy(false);
    }
  };
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const curl = () => `curl -X POST ${location.origin}/api/v1${path("workflows", name, "runs")} -H 'Content-Type: application/json' -d ${quoted(JSON.stringify(body()))}`;
  return html`<main tabindex="-1">
    <div class="title"><h1>${name}</h1><span class="count">v${value.version}</span><a href=${link(["runs"], { workflow: name })}>Its runs</a></div>
    <form class="trigger" onSubmit=${trigger}>
      <h2>Trigger a run</h2>
      ${known
        ? properties.map(([key, one]) => html`<${Field} key=${key} name=${key} schema=${one} required=${required.has(key)} value=${fields[key]} set=${(text) => setFields({ ...fields, [key]: text })} />`)
        : html`<label class="field"><span>params</span><textarea rows="3" spellcheck=${false} placeholder="{}" value=${fields[""] ?? ""} onInput=${(e) => setFields({ "": e.currentTarget.value })}></textarea>
            <small>This workflow has no schema for its params: any JSON object.</small></label>`}
      <${Trouble} error=${trouble} />
      <div class="actions"><button class="primary" type="submit" disabled=${busy}>Trigger</button><${Copy} text=${curl} label="Copy as curl" /></div>
    </form>
    <${Json} title="Definition" value=${value.definition} file=${`${name}-v${value.version}.json`} />
  </main>`;
}
