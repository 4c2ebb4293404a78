// One workflow: trigger it, see how its versions do, point aliases elsewhere, compare versions.
import { html, useEffect, useMemo, useRef, useState } from "./html.js";
import { getText, onRunEvents, path, pause, post, put, remove, reread, save, withQuery } from "./api.js";
import { GraphView } from "./graph.js";
import { link, setQuery } from "./route.js";
import { TriggerForm } from "./trigger.js";
import { Copy, Dialog, Empty, Json, Later, Loading, State, Tabs, Time, Trouble, WriteButton, useRead } from "./ui.js";
import { FailureShare, failures, percent, targetWords, targetsOf } from "./workflows.js";

const RECENT_RUNS = 50;
const SHOWN_VERSIONS = 20;
const SHOWN_HISTORY = 10;
const REFRESH_MS = 1000;
const YAML = "application/yaml";
const TABS = [["", "Trigger and versions"], ["definition", "Definition"], ["graph", "Graph"], ["diff", "Compare versions"]];

const loadDiff = () => import("./diff.js");
const loadCode = () => import("./code.js");
const readYaml = (where, signal) => getText(where, YAML, signal);

// With its tag: a change is made only if the workflow is still what the page shows.
const readTagged = (where, signal) => reread(where, null, signal);

// ── aliases ─────────────────────────────────────────────────────────────────────────────

// What an alias named before, by the history of the workflow; else the newest older version that
// worked; else the one before.
function rollbackTarget(alias, current, versions, byVersion, history) {
  const older = versions.filter((one) => one < current);
  const moved = history.find(({ action, details }) => action === "alias" && details.alias === alias);
  if (moved && typeof moved.details.from === "number" && older.includes(moved.details.from)) return moved.details.from;
  const worked = older.find((one) => {
    const { failed, ended } = failures(byVersion.get(one) ?? []);
    return ended > 0 && failed * 2 < ended;
  });
  return worked ?? older[0];
}

// The dialog that rolls an alias back; null where there is no older version.
function rollbackOf(alias, { workflow, versions, byVersion, history }) {
  const current = Math.max(...targetsOf(workflow.aliases[alias]).map((one) => one.version));
  const target = rollbackTarget(alias, current, versions, byVersion, history);
  return target === undefined ? null : { kind: alias === "latest" ? "latest" : "rollback", alias, target };
}

function useChange(onDone) {
  const [state, setState] = useState({ busy: false, error: null });
  const start = async (change) => {
    setState({ busy: true, error: null });
    try {
      await change();
      setState({ busy: false, error: null });
      onDone();
    } catch (error) {
      setState({ busy: false, error });
    }
  };
  return { ...state, start };
}

// Somebody changed the workflow meanwhile: the page has to show it before it is changed again.
function ChangeTrouble({ error, again }) {
  return html`<${Trouble} error=${error} again=${error?.status === 412 ? again : null} />`;
}

function VersionSelect({ label, versions, value, set, autofocus }) {
  return html`<label class="field"><span>${label}</span><select autofocus=${autofocus} value=${String(value)} onChange=${(event) => set(Number(event.currentTarget.value))}>
    ${versions.map((one) => html`<option key=${one} value=${String(one)}>v${one}</option>`)}</select></label>`;
}

// Moves `latest`: a version is never changed, so an older definition becomes the newest version.
function LatestDialog({ name, latest, target, versions, tag, onClose, onDone, again }) {
  const [version, setVersion] = useState(target);
  const change = useChange(() => { onDone(); onClose(); });
  const restore = async () => {
    const text = await readYaml(withQuery(path("workflows", name), { version }));
    await post("/workflows", text, { "Content-Type": YAML, "If-Match": tag });
  };
  return html`<${Dialog} title=${`Roll back ${name}`} onClose=${onClose}>
    <p>The definition of the chosen version is registered as the newest version, v${latest + 1}. Runs without a version then use it. Runs that have started stay as they are.</p>
    <${VersionSelect} label="Back to" versions=${versions.filter((one) => one !== latest)} value=${version} set=${setVersion} />
    <p><a href=${link(["workflows", name, "diff"], { from: latest, to: version })}>Compare v${latest} with v${version}</a></p>
    <${ChangeTrouble} error=${change.error} again=${again} />
    <div class="actions"><${WriteButton} class="primary" autofocus disabled=${change.busy} onClick=${() => change.start(restore)}>Roll back to v${version}<//></div>
  <//>`;
}

// What an alias names: one version, or several by weights.
function Targets({ label, versions, rows, set, isRollback }) {
  const total = rows.reduce((sum, row) => sum + Number(row.weight), 0);
  const unused = versions.filter((one) => !rows.some((row) => row.version === one));
  const change = (at, more) => set(rows.map((row, n) => (n === at ? { ...row, ...more } : row)));
  if (rows.length === 1) return html`<${VersionSelect} label=${label} versions=${versions} value=${rows[0].version} set=${(version) => change(0, { version })} />
    ${!isRollback && unused.length > 0 && html`<button type="button" class="quiet" onClick=${() => set([{ ...rows[0], weight: "90" }, { version: unused[0], weight: "10" }])}>Divide runs with another version</button>`}`;
  return html`${rows.map((row, n) => html`<div class="weights" key=${n}>
      <${VersionSelect} label=${label} versions=${versions.filter((one) => one === row.version || unused.includes(one))} value=${row.version} set=${(version) => change(n, { version })} />
      <label class="field"><span>Weight</span><input type="number" min="0" step="any" required value=${row.weight} onInput=${(event) => change(n, { weight: event.currentTarget.value })} /></label>
      <span class="count">${total > 0 ? percent(Number(row.weight) / total) : ""}</span>
      <button type="button" class="quiet" aria-label=${`Without v${row.version}`} onClick=${() => set(rows.filter((_, other) => other !== n))}>✕</button></div>`)}
    ${unused.length > 0 && html`<button type="button" class="quiet" onClick=${() => set([...rows, { version: unused[0], weight: "10" }])}>Add a version</button>`}`;
}

function AliasDialog({ name, alias: given, current, target, versions, tag, isRollback, onClose, onDone, again }) {
  const [alias, setAlias] = useState(given ?? "");
  const divided = !isRollback && current !== undefined && typeof current !== "number";
  const [rows, setRows] = useState(divided
    ? Object.entries(current).map(([version, weight]) => ({ version: Number(version), weight: String(weight) }))
    : [{ version: target ?? versions[0], weight: "1" }]);
  const change = useChange(() => { onDone(); onClose(); });
  const where = path("workflows", name, "aliases", alias);
  const [{ version }] = rows;
  const set = (event) => {
    event.preventDefault();
    const body = rows.length === 1 ? { version } : { weights: Object.fromEntries(rows.map((row) => [row.version, Number(row.weight)])) };
    change.start(() => put(where, body, { "If-Match": tag }));
  };
  const title = isRollback ? `Roll back ${given}` : given ? `Change ${given}` : "New alias";
  return html`<${Dialog} title=${title} onClose=${onClose}>
    <form onSubmit=${set}>
      ${given ? html`<p>${given} names ${targetWords(current)}. Runs that are triggered by the alias use what it names then; runs that have started stay as they are.</p>`
        : html`<label class="field"><span>Alias</span><input required autofocus value=${alias} placeholder="stable" onInput=${(event) => setAlias(event.currentTarget.value)} /></label>`}
      <${Targets} label=${isRollback ? "Back to" : "Version"} versions=${versions} rows=${rows} set=${setRows} isRollback=${isRollback} />
      <${ChangeTrouble} error=${change.error} again=${again} />
      <div class="actions"><${WriteButton} class="primary" type="submit" autofocus=${Boolean(given)} disabled=${change.busy || !alias}>${isRollback ? `Roll back to v${version}` : "Set"}<//>
        ${given && !isRollback && html`<button type="button" disabled=${change.busy} onClick=${() => change.start(() => remove(where, { "If-Match": tag }))}>Remove the alias</button>`}</div>
    </form>
  <//>`;
}

function Aliases({ workflow, versions, byVersion, history, open }) {
  const names = Object.keys(workflow.aliases).sort((a, b) => (b === "latest") - (a === "latest") || a.localeCompare(b));
  return html`<section><header><h2>Aliases</h2><span class="grow"></span><${WriteButton} class="quiet" onClick=${() => open({ kind: "alias" })}>New alias…<//></header>
    <ul class="plain aliases">${names.map((alias) => {
      const named = targetsOf(workflow.aliases[alias]);
      const back = rollbackOf(alias, { workflow, versions, byVersion, history });
      return html`<li key=${alias}><div class="alias"><strong>${alias}</strong>
          ${named.map((one) => html`<span class="target" key=${one.version}>v${one.version}${one.share === undefined ? "" : ` ${percent(one.share)}`} <${FailureShare} runs=${byVersion.get(one.version) ?? []} /></span>`)}</div>
        <div class="actions">
          ${back && html`<${WriteButton} onClick=${() => open(back)}>Roll back to v${back.target}…<//>`}
          ${alias !== "latest" && html`<${WriteButton} class="quiet" onClick=${() => open({ kind: "alias", alias, target: named[0]?.version })}>Change…<//>`}
        </div></li>`;
    })}</ul></section>`;
}

function Versions({ workflow, items, byVersion, current }) {
  const [shown, setShown] = useState(SHOWN_VERSIONS);
  const { name } = workflow;
  const named = (version) => Object.keys(workflow.aliases).filter((alias) => targetsOf(workflow.aliases[alias]).some((one) => one.version === version));
  return html`<section><header><h2>Versions</h2></header>
    <ul class="plain versions">${items.slice(0, shown).map((one, n) => html`<li key=${one.version} aria-current=${one.version === current ? "true" : null}>
      <span class="c-version"><a href=${link(["workflows", name, "definition"], { version: one.version })}>v${one.version}</a></span>
      <span class="c-time"><${Time} at=${one.created_at} /></span>
      <span class="grow">${named(one.version).map((alias) => html`<span class="tag" key=${alias}>${alias}</span>`)}</span>
      <${FailureShare} runs=${byVersion.get(one.version) ?? []} />
      ${items[n + 1] ? html`<a href=${link(["workflows", name, "diff"], { from: items[n + 1].version, to: one.version })}>Changes</a>` : html`<span class="first">first</span>`}
    </li>`)}</ul>
    ${items.length > shown && html`<p class="more"><button onClick=${() => setShown(shown + 200)}>${items.length - shown} older</button></p>`}</section>`;
}

function Recent({ name, runs }) {
  return html`<section><header><h2>Last runs</h2><span class="grow"></span><a href=${link(["runs"], { workflow: name })}>All its runs</a></header>
    ${runs.length === 0 ? html`<p class="none">It has not run yet.</p>`
      : html`<ul class="plain recent">${runs.slice(0, 8).map((run) => html`<li key=${run.run_id}><a href=${link(["runs", run.run_id])}><${State} of=${run.status} /> <code>${run.run_id.slice(0, 8)}</code></a>
        <span class="c-version">${run.version ? `v${run.version}` : ""}</span> <${Time} at=${run.created_at} /></li>`)}</ul>`}</section>`;
}

function words({ action, details }) {
  if (action === "register") return `registered v${details.version}`;
  if (action === "alias") return `${details.alias} → ${targetWords(details.version ?? details.weights)}${details.from ? `, before ${targetWords(details.from)}` : ""}`;
  if (action === "delete") return `removed ${details.alias ?? (details.version ? `v${details.version}` : "the workflow")}`;
  return action;
}

function History({ items }) {
  if (items.length === 0) return null;
  return html`<section><header><h2>History</h2></header>
    <ul class="plain recent">${items.map((one, n) => html`<li key=${n}><span class="grow">${words(one)}</span><span class="none">${one.actor}</span> <${Time} at=${one.time} /></li>`)}</ul></section>`;
}

// ── the definition ──────────────────────────────────────────────────────────────────────

function Definition({ name, version }) {
  const where = withQuery(path("workflows", name), { version });
  const { value, error, again } = useRead(where, readYaml);
  if (value === null) return error ? html`<${Trouble} error=${error} again=${again} />` : html`<${Loading} />`;
  return html`<div><div class="bar"><${Copy} text=${value} />
      <button class="quiet" onClick=${() => save(new Blob([value], { type: YAML }), `${name}-v${version}.yaml`)}>Download</button>
      <a href=${link(["editor"], { workflow: name, version })}>Edit</a></div>
    <${Later} load=${loadCode} part="CodeView" text=${value} label=${`Definition of ${name}, version ${version}`} key=${where} /></div>`;
}

function VersionGraph({ workflow, query }) {
  const { name, version, definition } = workflow;
  const nodes = definition.nodes;
  const chosen = nodes.find((one) => one.id === query.node);
  const href = (id) => link(["workflows", name, "graph"], { ...query, node: id });
  return html`<div class="split"><div class="content"><${GraphView} key=${version} nodes=${nodes} where=${path("workflows", name, "versions", String(version), "graph")} query=${query} href=${href} /></div>
    ${chosen && html`<aside class="panel" aria-label=${`Node ${chosen.id}`}><header><h2>${chosen.id}</h2><span class="grow"></span>
      <a class="quiet" href=${link(["workflows", name, "graph"], { ...query, node: "" })} aria-label="Close the panel">✕</a></header>
      <${Json} title="As defined" value=${chosen} /></aside>`}</div>`;
}

// ── the screen ──────────────────────────────────────────────────────────────────────────

// Calls `act` after events of runs of this workflow, at most once in so long, and after a break of
// the connection.
function useRunsOf(name, act) {
  const latest = useRef(act);
  latest.current = act;
  useEffect(() => {
    const leaving = new AbortController();
    let waits = false;
    let broke = false;
    const stop = onRunEvents(async (events, again) => {
      broke ||= events === null && again;
      if (waits || !(broke || events?.some((event) => event.workflow === name))) return;
      waits = true;
      await pause(REFRESH_MS, leaving.signal);
      if (leaving.signal.aborted) return;
      latest.current(broke);
      waits = broke = false;
    });
    return () => {
      stop();
      leaving.abort();
    };
  }, [name]);
}

export function WorkflowScreen({ name, tab = "", query }) {
  // While versions are compared, `version` is of another tab.
  const wanted = tab === "diff" ? "" : query.version;
  const read = useRead(withQuery(path("workflows", name), { version: wanted }), readTagged);
  const latest = useRead(path("workflows", name), readTagged);
  const known = useRead(path("workflows", name, "versions"));
  const runs = useRead(withQuery("/runs", { workflow: name, limit: RECENT_RUNS }));
  const past = useRead(withQuery(path("workflows", name, "history"), { limit: SHOWN_HISTORY }));
  const history = past.value?.items ?? [];
  const [dialog, setDialog] = useState(null);
  const items = useMemo(() => [...(known.value?.items ?? [])].sort((a, b) => b.version - a.version), [known.value]);
  const recent = runs.value?.items ?? [];
  const byVersion = useMemo(() => Map.groupBy(recent, (run) => run.version), [runs.value]);
  const again = () => [read, latest, known, runs, past].forEach((one) => one.again());
  useRunsOf(name, (isAll) => (isAll ? again() : runs.again()));
  useEffect(() => setDialog(null), [tab]);
  const workflow = read.value?.value;
  // A link of a failed run: opens the roll back of the alias that names its version.
  const failed = Number(query.rollback);
  const isRead = [read, known, runs, past].every((one) => one.value || one.error);
  useEffect(() => {
    if (!failed || !isRead || !workflow) return;
    const names = (alias) => targetsOf(workflow.aliases[alias]).some((one) => one.version === failed);
    const found = Object.keys(workflow.aliases).filter(names).sort((a, b) => (a === "latest") - (b === "latest"));
    setQuery({ rollback: "" });
    if (found.length) setDialog(rollbackOf(found[0], { workflow, versions: items.map((one) => one.version), byVersion, history }));
  }, [failed, isRead]);
  if (!workflow || !known.value) {
    const error = read.error ?? known.error;
    return html`<main tabindex="-1"><h1>${name}</h1>${error ? html`<${Trouble} error=${error} again=${again} />
      <p>${query.version && html`<button onClick=${() => setQuery({ version: "" })}>Show the latest version</button> `}<a href=${link(["workflows"])}>All workflows</a></p>` : html`<${Loading} />`}</main>`;
  }
  const versions = items.map((one) => one.version);
  const shared = {
    name,
    versions,
    tag: latest.value?.tag ?? "*",
    onClose: () => setDialog(null),
    onDone: again,
    again: () => { again(); setDialog(null); },
  };
  const kept = { version: query.version };
  return html`<main tabindex="-1">
    <p class="crumbs"><a href=${link(["workflows"])}>Workflows</a></p>
    <div class="title"><h1>${name} <small>v${workflow.version}</small></h1><span class="grow"></span>
      <div class="actions"><a class="button" href=${link(["editor"], { workflow: name, version: workflow.version })}>Edit</a></div></div>
    ${typeof workflow.definition.description === "string" && html`<p class="facts">${workflow.definition.description}</p>`}
    <${Tabs} label="Parts of the workflow" current=${tab} items=${TABS.map(([key, words]) => [key, words, link(["workflows", name, ...(key ? [key] : [])], key === "diff" ? {} : kept)])} />
    <${Trouble} error=${runs.error} again=${runs.again} />
    ${tab === "" && html`<div class="columns">
      <${TriggerForm} workflow=${workflow} query=${query} versions=${versions} recent=${recent} />
      <div class="beside">
        <${Aliases} workflow=${workflow} versions=${versions} byVersion=${byVersion} history=${history} open=${setDialog} />
        <${Versions} workflow=${workflow} items=${items} byVersion=${byVersion} current=${workflow.version} />
        <${Recent} name=${name} runs=${recent} />
        <${History} items=${history} />
      </div></div>`}
    ${tab === "definition" && html`<${Definition} name=${name} version=${workflow.version} />`}
    ${tab === "graph" && html`<${VersionGraph} workflow=${workflow} query=${query} />`}
    ${tab === "diff" && html`<${Later} load=${loadDiff} part="Diff" workflow=${name} versions=${versions} query=${query} />`}
    ${!TABS.some(([key]) => key === tab) && html`<${Empty}>There is no such part. <a href=${link(["workflows", name])}>The workflow</a><//>`}
    ${dialog?.kind === "latest" && html`<${LatestDialog} ...${shared} latest=${versions[0]} target=${dialog.target} />`}
    ${dialog?.kind === "rollback" && html`<${AliasDialog} ...${shared} isRollback alias=${dialog.alias} current=${workflow.aliases[dialog.alias]} target=${dialog.target} />`}
    ${dialog?.kind === "alias" && html`<${AliasDialog} ...${shared} alias=${dialog.alias} current=${workflow.aliases[dialog.alias]} target=${dialog.target} />`}
  </main>`;
}
