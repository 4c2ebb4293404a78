// A form for the params of a workflow, made from their schema, and the same request to copy.
import { html, useEffect, useMemo, useRef, useState } from "./html.js";
import { get, hasToken, isRawNumber, newKey, parseJson, path, post } from "./api.js";
import { go, setQuery } from "./route.js";
import { Copy, STATES, Trouble, WriteButton, moment } from "./ui.js";

const SIMPLE = new Set(["string", "integer", "number", "boolean"]);
const MAX_REFERENCES = 10;
const LONG_TEXT = 200;

// ── the schema ──────────────────────────────────────────────────────────────────────────

// A subschema with its reference into the same schema followed. What cannot be followed is open.
function resolved(schema, root) {
  let found = schema;
  for (let n = 0; n < MAX_REFERENCES && found && typeof found.$ref === "string"; n++) {
    if (!found.$ref.startsWith("#/")) return {};
    const steps = found.$ref.slice(2).split("/").map((step) => decodeURIComponent(step).replaceAll("~1", "/").replaceAll("~0", "~"));
    const { $ref, ...beside } = found;
    const target = steps.reduce((at, step) => at?.[step], root);
    found = target && typeof target === "object" ? { ...target, ...beside } : {};
  }
  return found && typeof found === "object" ? found : {};
}

function kindOf(schema) {
  if (Array.isArray(schema.enum)) return "choice";
  if ("const" in schema) return "choice";
  const types = [schema.type].flat().filter((one) => one !== "null");
  return types.length === 1 && SIMPLE.has(types[0]) ? types[0] : "json";
}

const choicesOf = (schema) => (Array.isArray(schema.enum) ? schema.enum : [schema.const]);

export function fieldsOf(schema) {
  const root = schema || {};
  const required = new Set(Array.isArray(root.required) ? root.required : []);
  return Object.entries(root.properties || {}).map(([name, given]) => {
    const one = resolved(given, root);
    return { name, schema: one, kind: kindOf(one), required: required.has(name) };
  });
}

// ── text ↔ value ────────────────────────────────────────────────────────────────────────

function textOf(value, { kind }) {
  if (value === undefined) return undefined;
  return kind === "string" && typeof value === "string" ? value : JSON.stringify(value, null, kind === "json" ? 2 : 0);
}

// The value of a field; undefined where it is left empty. What is no number goes to the server as it
// is, which says what it wants.
function valueOf(text, { kind, schema }) {
  if (text === undefined || text === "") return undefined;
  if (kind === "string") return text;
  if (text.trim() === "") return undefined;
  if (kind === "choice") return choicesOf(schema).find((one) => JSON.stringify(one) === text);
  if (kind === "boolean") return text === "true";
  if (kind === "json") return parsed(text);
  const number = Number(text);
  if (!Number.isFinite(number)) return text; // JSON has no infinity, it would be null
  if (Number.isInteger(number) && !Number.isSafeInteger(number)) throw new Error("A browser cannot send a whole number of this size exactly: use the command line.");
  return number;
}

function parsed(text) {
  try {
    return parseJson(text);
  } catch (error) {
    throw new Error(`This is no JSON: ${error.message}`);
  }
}

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

// What is kept by the name of a param. A param may be called as what every object has, such as
// `constructor`.
const byName = (...given) => Object.assign(Object.create(null), ...given);

// The params of the form, and what is wrong with its texts by field.
function paramsOf(fields, texts) {
  const params = {};
  const wrong = byName();
  const set = (name, value) => Object.defineProperty(params, name, { value, enumerable: true, configurable: true, writable: true });
  for (const field of fields) {
    try {
      const value = valueOf(texts[field.name], field);
      if (value !== undefined) set(field.name, value);
    } catch (error) {
      wrong[field.name] = error.message;
    }
  }
  return { params, wrong };
}

function wholeOf(text) {
  if (!text.trim()) return { params: {}, wrong: byName() };
  try {
    const params = parsed(text);
    return isObject(params) ? { params, wrong: byName() } : { params: {}, wrong: { "": "The params are a JSON object, such as {\"name\": \"Ada\"}." } };
  } catch (error) {
    return { params: {}, wrong: { "": error.message } };
  }
}

const same = (a, b) => {
  if (Object.is(a, b)) return true;
  if (a === null || b === null || typeof a !== "object" || typeof b !== "object" || Array.isArray(a) !== Array.isArray(b)) return false;
  const [keys, others] = [Object.keys(a), Object.keys(b)];
  return keys.length === others.length && keys.every((key) => Object.hasOwn(b, key) && same(a[key], b[key]));
};

// Params as texts for the fields; null if the fields cannot hold them exactly.
function textsOf(params, fields) {
  const texts = byName();
  for (const field of fields) {
    const text = textOf(Object.hasOwn(params, field.name) ? params[field.name] : undefined, field);
    if (text !== undefined) texts[field.name] = text;
  }
  const back = paramsOf(fields, texts);
  return same(back.params, params) && Object.keys(back.wrong).length === 0 ? texts : null;
}

// ── the server's findings, by field ─────────────────────────────────────────────────────

// `params.who`, `params.list[0]`, `params["a b"]` → the name of the param.
export function fieldOfPath(where) {
  const plain = /^params\.([^.[]+)/.exec(where);
  if (plain) return plain[1];
  const quoted = /^params\[("(?:[^"\\]|\\.)*")\]/.exec(where);
  try {
    return quoted ? JSON.parse(quoted[1]) : null;
  } catch {
    return null;
  }
}

// ── the same request elsewhere ──────────────────────────────────────────────────────────

// For POSIX shells: between single quotes nothing has a meaning but a single quote.
const quoted = (text) => (/^[A-Za-z0-9_@%+:,./=-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

function python(value) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (isRawNumber(value)) return JSON.stringify(value);
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([key, one]) => `${JSON.stringify(key)}: ${python(one)}`).join(", ")}}`;
  return JSON.stringify(value);
}

// Whether `-p name=text` means this value, by its schema.
const isPlainParam = (name, value, fields) => {
  const field = fields.find((one) => one.name === name);
  return field && !name.includes("=") && !name.startsWith("-") && field.kind !== "json" && field.kind !== "choice" && [field.schema.type].flat().length === 1 && (typeof value === "string") === (field.kind === "string") && typeof value !== "object";
};

export function commandsFor({ name, version, params, fields }) {
  const server = location.origin;
  const body = JSON.stringify(version === undefined ? { params } : { params, version });
  const token = hasToken() ? ` \\\n  -H "Authorization: Bearer $DOVETAIL_TOKEN"` : "";
  const wanted = version === undefined ? "" : ` --version ${quoted(String(version))}`;
  const entries = Object.entries(params);
  const given = entries.every(([key, value]) => isPlainParam(key, value, fields))
    ? entries.map(([key, value]) => ` -p ${quoted(`${key}=${value}`)}`).join("")
    : ` --params - <<'END'\n${JSON.stringify(params)}\nEND`;
  const args = [JSON.stringify(name), python(params), ...(version === undefined ? [] : [`version=${python(version)}`])].join(", ");
  return {
    "Command line": `dovetail trigger ${quoted(name)} --server ${quoted(server)}${wanted}${given}`,
    curl: `curl -sS ${quoted(`${server}/api/v1${path("workflows", name, "runs")}`)}${token} \\\n  -H 'Content-Type: application/json' \\\n  -d ${quoted(body)}`,
    Python: `import asyncio\n\nfrom dovetail import Dovetail\n\n\nasync def main():\n    async with Dovetail(${JSON.stringify(server)}) as dt:\n        run = await dt.run(${args})\n        print(run.status, run.result)\n\n\nasyncio.run(main())`,
  };
}

function SameAs(props) {
  const [which, setWhich] = useState("Command line");
  const commands = commandsFor(props);
  return html`<details class="same-as"><summary>The same on the command line, with curl or in Python</summary>
    <div class="bar"><div class="chips" role="group" aria-label="As">${Object.keys(commands).map((one) => html`<button type="button" class="chip" key=${one} aria-pressed=${one === which} onClick=${() => setWhich(one)}>${one}</button>`)}</div>
      <${Copy} text=${() => commands[which]} /></div>
    <pre tabindex="0" role="group" aria-label=${which}>${commands[which]}</pre>
    ${hasToken() && html`<p class="none">The token is not part of it: set DOVETAIL_TOKEN.</p>`}
  </details>`;
}

// ── the form ────────────────────────────────────────────────────────────────────────────

function Field({ field, text, set, wrong }) {
  const { name, schema, kind, required } = field;
  const id = useMemo(() => `param-${Math.random().toString(36).slice(2)}`, []);
  const given = schema.default === undefined ? "" : textOf(schema.default, field);
  const common = { id, "aria-invalid": wrong ? "true" : null, "aria-describedby": `${id}-about`, "aria-required": required ? "true" : null };
  const change = (event) => set(event.currentTarget.value);
  const choices = kind === "choice" ? choicesOf(schema) : kind === "boolean" ? [true, false] : null;
  const shown = (one) => (typeof one === "string" ? one : JSON.stringify(one));
  const isLong = kind === "string" && ((text ?? "").includes("\n") || (text ?? "").length > LONG_TEXT || schema.maxLength > LONG_TEXT || schema.format === "textarea");
  let control;
  if (choices) {
    control = html`<select ...${common} value=${text ?? ""} onChange=${change}>
      <option value="">${given ? `default: ${given}` : required ? "choose" : "left out"}</option>
      ${choices.map((one) => html`<option key=${JSON.stringify(one)} value=${JSON.stringify(one)}>${shown(one)}</option>`)}</select>`;
  } else if (kind === "json" || isLong) {
    control = html`<textarea ...${common} rows=${kind === "json" ? 4 : 6} spellcheck=${false} placeholder=${given || (kind === "json" ? "JSON" : "")} value=${text ?? ""} onInput=${change}></textarea>`;
  } else {
    const mode = kind === "string" ? null : kind === "integer" ? "numeric" : "decimal";
    control = html`<input ...${common} type="text" inputmode=${mode} autocomplete="off" placeholder=${given} value=${text ?? ""} onInput=${change} />`;
  }
  return html`<div class="field"><label for=${id}><span>${name}${required ? html`<span class="star" title="required"> *</span>` : null} <small>${kind === "choice" ? "" : [schema.type ?? "any"].flat().join(" or ")}</small></span></label>
    ${control}
    <div id=${`${id}-about`}>${wrong && html`<p class="wrong">${wrong}</p>`}${schema.description && html`<small>${schema.description}</small>`}</div>
  </div>`;
}

function VersionChoice({ versions, aliases, current }) {
  const named = Object.keys(aliases).filter((alias) => alias !== "latest");
  return html`<label>Version <select value=${current ?? ""} onChange=${(event) => setQuery({ version: event.currentTarget.value })}>
    <option value="">latest</option>
    ${named.map((alias) => html`<option key=${alias} value=${alias}>${alias}</option>`)}
    ${versions.map((one) => html`<option key=${one} value=${String(one)}>v${one}</option>`)}
  </select></label>`;
}

export function TriggerForm({ workflow, query, versions, recent }) {
  const { name, definition, aliases } = workflow;
  const fields = useMemo(() => fieldsOf(definition.params), [definition]);
  const [texts, setTexts] = useState(byName);
  const [whole, setWhole] = useState(null); // all params as JSON text, in place of the fields
  const [found, setFound] = useState({ error: null, byField: byName() });
  const [busy, setBusy] = useState(false);
  const form = useRef(null);
  const isWhole = whole !== null || fields.length === 0;
  const { params, wrong } = isWhole ? wholeOf(whole ?? "") : paramsOf(fields, texts);
  // A version is sent as it was chosen: an alias may name another version by the time of the run.
  const version = query.version ? (/^\d+$/.test(query.version) ? Number(query.version) : query.version) : undefined;

  const prefill = (given) => {
    const held = textsOf(given, fields);
    setTexts(held ?? byName());
    setWhole(held === null || fields.length === 0 ? JSON.stringify(given, null, 2) : null);
    setFound({ error: null, byField: byName() });
  };
  useEffect(() => {
    if (!query.from) return undefined;
    const leaving = new AbortController();
    get(`${path("runs", query.from)}?nodes=false`, leaving.signal).then(
      (run) => prefill(run.params ?? {}),
      (error) => leaving.signal.aborted || setFound({ error, byField: byName() }),
    );
    return () => leaving.abort();
  }, [query.from, fields]);

  const toggle = () => {
    if (!isWhole) return setWhole(JSON.stringify(params, null, 2));
    const held = Object.keys(wrong).length ? null : textsOf(params, fields);
    if (held === null) return setFound({ error: new Error("The fields cannot hold these params: they name params that the schema does not, or have other types."), byField: byName() });
    setTexts(held);
    return setWhole(null);
  };
  const submit = async (event) => {
    event.preventDefault();
    const toWrong = () => requestAnimationFrame(() => form.current?.querySelector("[aria-invalid]")?.focus());
    if (Object.keys(wrong).length) {
      setFound({ error: null, byField: wrong });
      return toWrong();
    }
    setBusy(true);
    setFound({ error: null, byField: byName() });
    try {
      const body = version === undefined ? { params } : { params, version };
      const made = await post(path("workflows", name, "runs"), body, { "Idempotency-Key": newKey() });
      return go(["runs", made.run_id]);
    } catch (error) {
      const byField = byName();
      const rest = [];
      for (const one of error.errors ?? []) {
        const field = fieldOfPath(one.path ?? "");
        if (!isWhole && fields.some((known) => known.name === field)) byField[field] = [byField[field], one.message].filter(Boolean).join("; ");
        else rest.push(one);
      }
      const isElsewhere = rest.length > 0 || Object.keys(byField).length === 0;
      setFound({ error: isElsewhere ? Object.assign(new Error(error.message), { errors: rest }) : null, byField });
      setBusy(false);
      return toWrong();
    }
  };
  const shown = byName(found.byField, wrong);
  return html`<form class="trigger" ref=${form} onSubmit=${submit} noValidate aria-label="Trigger a run">
    <header><h2>Trigger a run</h2><span class="grow"></span>
      <${VersionChoice} versions=${versions} aliases=${aliases} current=${query.version} /></header>
    ${recent.length > 0 && html`<label class="field"><span>Params as in an earlier run</span>
      <select value=${query.from ?? ""} onChange=${(event) => { setQuery({ from: event.currentTarget.value }); if (!event.currentTarget.value) prefill({}); }}>
        <option value="">none</option>
        ${query.from && !recent.some((run) => run.run_id === query.from) && html`<option value=${query.from}>${query.from.slice(0, 8)}</option>`}
        ${recent.slice(0, 20).map((run) => html`<option key=${run.run_id} value=${run.run_id}>${run.run_id.slice(0, 8)}, ${STATES[run.status][1]}, ${moment(run.created_at)}</option>`)}
      </select></label>`}
    ${!isWhole && fields.map((field) => html`<${Field} key=${field.name} field=${field} text=${texts[field.name]} wrong=${shown[field.name]} set=${(text) => { setTexts(byName(texts, { [field.name]: text })); if (found.byField[field.name]) setFound({ ...found, byField: byName(found.byField, { [field.name]: undefined }) }); }} />`)}
    ${isWhole && html`<div class="field"><label for="params-json"><span>params <small>JSON</small></span></label>
      <textarea id="params-json" rows="6" spellcheck=${false} placeholder="{}" aria-invalid=${shown[""] ? "true" : null} aria-describedby="params-about" value=${whole ?? ""} onInput=${(event) => setWhole(event.currentTarget.value)}></textarea>
      <div id="params-about">${shown[""] && html`<p class="wrong">${shown[""]}</p>`}${fields.length === 0 && html`<small>This workflow has no schema with fields for its params: any JSON object.</small>`}</div></div>`}
    <${Trouble} error=${found.error} />
    <div class="actions"><${WriteButton} class="primary" type="submit" disabled=${busy}>Trigger<//>
      ${fields.length > 0 && html`<button type="button" class="quiet" onClick=${toggle}>${isWhole ? "As fields" : "As JSON"}</button>`}</div>
    <${SameAs} name=${name} version=${version} params=${params} fields=${fields} />
  </form>`;
}
