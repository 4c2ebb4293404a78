// What one version of a workflow has that another has not: as a list, as text and as graphs.
import { html } from "./html.js";
import { getText, path, withQuery } from "./api.js";
import { MergeText } from "./code.js";
import { GraphView } from "./graph.js";
import { link, setQuery } from "./route.js";
import { Empty, Loading, Trouble, useNarrow, useRead } from "./ui.js";

const MAX_SHOWN = 200;
const MAX_OPEN = 12; // with more changes than this, the texts come first

const readYaml = (where, signal) => getText(where, "application/yaml", signal);

const shown = (value) => (value === null || value === undefined ? "nothing" : typeof value === "string" ? value : JSON.stringify(value));

function Fields({ fields }) {
  return html`<dl class="differences">${Object.entries(fields).map(([name, { from, to }]) => html`<div key=${name}><dt>${name}</dt>
    <dd><del><span class="sr">was </span>${shown(from)}</del> <ins><span class="sr">is </span>${shown(to)}</ins></dd></div>`)}</dl>`;
}

function Summary({ found, href }) {
  const { added, removed, changed, workflow } = found;
  const count = added.length + removed.length + changed.length;
  const rows = [
    ...removed.map((id) => ({ id, mark: "removed" })),
    ...added.map((id) => ({ id, mark: "added" })),
    ...changed.map(({ id, fields }) => ({ id, mark: "changed", fields })),
  ];
  return html`<section class="changes">
    ${Object.keys(workflow).length > 0 && html`<h2>The workflow itself</h2><${Fields} fields=${workflow} />`}
    ${count > 0 && html`<details open=${count <= MAX_OPEN}><summary>Nodes: ${[[added, "added"], [removed, "removed"], [changed, "changed"]].filter(([ids]) => ids.length).map(([ids, word]) => `${ids.length} ${word}`).join(", ")}</summary>
    <ul class="plain">${rows.slice(0, MAX_SHOWN).map(({ id, mark, fields }) => html`<li key=${`${mark} ${id}`} class=${`change change-${mark}`}>
      <p><span class="icon" aria-hidden="true">${MARKS[mark]}</span>${mark} <a href=${href(id, mark)}>${id}</a></p>${fields && html`<${Fields} fields=${fields} />`}</li>`)}</ul>
    ${rows.length > MAX_SHOWN && html`<p class="none">and ${rows.length - MAX_SHOWN} more</p>`}</details>`}
  </section>`;
}

const MARKS = { added: "+", removed: "−", changed: "~" };

function Texts({ name, from, to }) {
  const narrow = useNarrow();
  const where = (version) => withQuery(path("workflows", name), { version });
  const [a, b] = [useRead(where(from), readYaml), useRead(where(to), readYaml)];
  const error = a.error ?? b.error;
  if (error) return html`<${Trouble} error=${error} />`;
  if (a.value === null || b.value === null || !a.isNew || !b.isNew) return html`<${Loading} />`;
  return html`<${MergeText} from=${a.value} to=${b.value} labels=${[`Version ${from}`, `Version ${to}`]} narrow=${narrow} />`;
}

function OneGraph({ name, version, marks, query, link: href }) {
  const { value, error } = useRead(withQuery(path("workflows", name), { version }));
  if (!value) return error ? html`<${Trouble} error=${error} />` : html`<${Loading} />`;
  const nodes = value.definition.nodes.map(({ id }) => ({ id, mark: marks.get(id) }));
  return html`<section aria-label=${`Version ${version}`}><h2>v${version}</h2>
    <${GraphView} nodes=${nodes} where=${path("workflows", name, "versions", String(value.version), "graph")} query=${query} href=${href} /></section>`;
}

function Graphs({ name, from, to, found, query }) {
  const changed = found.changed.map(({ id }) => [id, "changed"]);
  const old = new Map([...changed, ...found.removed.map((id) => [id, "removed"])]);
  const made = new Map([...changed, ...found.added.map((id) => [id, "added"])]);
  const href = (id) => link(["workflows", name, "diff"], { ...query, node: id });
  return html`<div><p class="legend"><span class="change-removed">− removed</span><span class="change-added">+ added</span><span class="change-changed">~ changed</span></p>
    <div class="graphs">
      <${OneGraph} key=${`from ${from}`} name=${name} version=${from} marks=${old} query=${query} link=${href} />
      <${OneGraph} key=${`to ${to}`} name=${name} version=${to} marks=${made} query=${query} link=${href} /></div></div>`;
}

function Choice({ label, versions, value, name }) {
  return html`<label>${label} <select value=${String(value)} onChange=${(event) => setQuery({ [name]: event.currentTarget.value })}>
    ${versions.map((one) => html`<option key=${one} value=${String(one)}>v${one}</option>`)}
    ${!versions.some((one) => String(one) === String(value)) && html`<option value=${String(value)}>${value}</option>`}</select></label>`;
}

export function Diff({ workflow: name, versions, query }) {
  const to = query.to || String(versions[0]);
  const from = query.from || String(versions[1] ?? versions[0]);
  const { value: found, error, again } = useRead(withQuery(path("workflows", name, "diff"), { from, to }));
  const as = query.as === "graph" ? "graph" : "text";
  const href = (id, mark) => link(["workflows", name, "graph"], { version: mark === "removed" ? from : to, node: id });
  const isSame = found && [found.added, found.removed, found.changed].every((one) => one.length === 0) && Object.keys(found.workflow).length === 0;
  return html`<div>
    <div class="bar"><${Choice} label="From" name="from" versions=${versions} value=${from} /><${Choice} label="to" name="to" versions=${versions} value=${to} />
      <button class="quiet" onClick=${() => setQuery({ from: to, to: from })}>Swap</button>
      <span class="grow"></span>
      <div class="chips" role="group" aria-label="Shown as">${["text", "graph"].map((one) => html`<button class="chip" key=${one} aria-pressed=${as === one} onClick=${() => setQuery({ as: one === "text" ? "" : one })}>${one}</button>`)}</div></div>
    <${Trouble} error=${error} again=${again} />
    ${!found && !error && html`<${Loading} />`}
    ${isSame && html`<${Empty}>${from === to ? "Choose two versions to compare." : "The two versions do the same."}<//>`}
    ${found && !isSame && html`<${Summary} found=${found} href=${href} />`}
    ${found && !isSame && as === "text" && html`<${Texts} name=${name} from=${from} to=${to} />`}
    ${found && !isSame && as === "graph" && html`<${Graphs} name=${name} from=${from} to=${to} found=${found} query=${query} />`}
  </div>`;
}
