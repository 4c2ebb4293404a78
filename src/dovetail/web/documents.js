// Reviews of documents: the text or picture beside its fields, corrected and approved from the keyboard.
import { html, useEffect, useLayoutEffect, useRef, useState } from "./html.js";
import { dataUrl, download, get, path, post, withQuery } from "./api.js";
import { Mark, Table, usePolled } from "./operations.js";
import { go, link, setQuery } from "./route.js";
import { Copy, Empty, Loading, Tabs, Time, Trouble, WriteButton } from "./ui.js";

const SURE = 0.8; // what is below it is worth a look
const TYPES = ["invoice", "receipt", "contract", "letter", "other"];
const ITEM = ["description", "quantity", "unit_price", "amount"];
const NAME = "dovetail.reviewer";
const PAGE = 100;

const words = { type: "Type", vendor: "Vendor", date: "Date", currency: "Currency", total: "Total", line_items: "Line items" };
const Sure = ({ of }) => (of === undefined || of === null ? "" : of >= SURE ? html`<${Mark} kind="completed" icon="✓">${of.toFixed(2)}<//>` : html`<${Mark} kind="queued" icon="◔">${of.toFixed(2)} unsure<//>`);
const Status = ({ of }) => (of === "approved" ? html`<${Mark} kind="completed" icon="✓">approved<//>` : html`<${Mark} kind="pending" icon="○">pending<//>`);

// ── statistics ──────────────────────────────────────────────────────────────────────────

function Statistics({ query }) {
  const { value, error } = usePolled(withQuery("/documents/statistics", { target: query.target }), 10000);
  if (error) return html`<${Trouble} error=${error} />`;
  if (!value || value.documents + value.unfinished === 0) return null;
  const share = value.docs_per_hour === null ? null : Math.min(1, value.docs_per_hour / value.target);
  const [answer, ...more] = value.sentences;
  return html`<section class="card statistics" aria-label="Speed">
    <p><strong>${answer.charAt(0).toUpperCase() + answer.slice(1)}.</strong></p>
    ${share !== null && html`<div class="meter" role="img" aria-label=${`${Math.round(share * 100)} % of the target`}><span class=${value.met ? "fill-completed" : "fill-queued"} style=${{ width: `${share * 100}%` }}></span></div>`}
    ${more.length > 0 && html`<p class="facts">${more.join("; ")}.</p>`}
    <label class="facts">target an hour <input type="number" min="1" value=${query.target ?? value.target} onChange=${(e) => setQuery({ target: e.currentTarget.value })} /></label>
  </section>`;
}

// ── the queue ───────────────────────────────────────────────────────────────────────────

const amount = (fields) => (fields.total === null ? "" : `${fields.total.toLocaleString(undefined, { minimumFractionDigits: 2 })} ${fields.currency ?? ""}`);

export function DocumentsScreen({ query }) {
  const about = usePolled("/documents");
  const status = query.status ?? "pending";
  const asked = status === "all" ? undefined : status;
  const { value, error, again } = usePolled(withQuery("/documents/reviews", { status: asked, limit: PAGE, cursor: query.after }));
  const counts = about.value?.counts;
  const items = value?.items;
  const tabs = [["pending", counts ? `to review (${counts.pending.toLocaleString()})` : "to review"], ["approved", counts ? `approved (${counts.approved.toLocaleString()})` : "approved"], ["all", "all"]];
  return html`<main tabindex="-1"><div class="title"><h1>Documents</h1>
      ${items?.length > 0 && status === "pending" && html`<a class="button primary" href=${link(["documents", items[0].document_id])}>Review the first</a>`}</div>
    <${Statistics} query=${query} />
    <${Tabs} label="State" current=${status} items=${tabs.map(([key, said]) => [key, said, link(["documents"], { status: key })])} />
    <${Trouble} error=${error || about.error} again=${again} />
    ${!items && !error && html`<${Loading} />`}
    ${items?.length === 0 && (status === "pending" && counts?.approved
      ? html`<${Empty}><p>All documents are approved.</p><//>`
      : html`<${Empty}><p>There is no document here.</p><p>Process some: <code>dovetail documents process PATH</code>. This server shows the folder <code>${about.value?.out ?? ""}</code>; <code>DOVETAIL_DOCUMENTS_OUT</code> names another.</p><//>`)}
    ${items?.length > 0 && html`<${Table} label="Documents" kind="stack" heads=${["Document", "Type", "Vendor", "Date", "#Total", "Confidence", "State"]}>
      ${items.map((one) => html`<tr key=${one.document_id}><th scope="row"><a href=${link(["documents", one.document_id])}>${one.document_id}</a></th>
        <td>${one.fields.type}</td><td class="clip">${one.fields.vendor ?? ""}</td><td>${one.fields.date ?? ""}</td><td class="number">${amount(one.fields)}</td><td><${Sure} of=${one.confidence} /></td><td><${Status} of=${one.status} /></td></tr>`)}<//>`}
    ${value?.next_cursor && html`<p class="more"><a class="button" href=${link(["documents"], { ...query, after: value.next_cursor })}>More documents</a></p>`}
  </main>`;
}

// ── one review ──────────────────────────────────────────────────────────────────────────

function Original({ id, picture }) {
  const [found, setFound] = useState({});
  useEffect(() => {
    const leaving = new AbortController();
    const where = path("documents", "reviews", id);
    const set = (more) => leaving.signal.aborted || setFound((now) => ({ ...now, ...more }));
    if (picture) dataUrl(`${where}/file`, leaving.signal).then((url) => set({ url }), (error) => set({ error }));
    get(`${where}/text`, leaving.signal).then((text) => set({ text }), (error) => set({ error }));
    return () => leaving.abort();
  }, [id, picture]);
  const { url, text, error } = found;
  return html`<section class="original" aria-label="The document">
    <header><h2>The document</h2>${text?.pages > 1 && html`<span class="count">${text.pages} pages</span>`}<span class="grow"></span>
      <button class="quiet" onClick=${() => download(path("documents", "reviews", id, "file"), "*/*", id).catch((problem) => setFound({ ...found, error: problem }))}>Download</button></header>
    <${Trouble} error=${error || (text?.problem ? new Error(text.problem) : null)} />
    ${!text && !error && html`<${Loading} />`}
    ${url && html`<img src=${url} alt="The document as a picture" />`}
    ${text?.text && html`<pre tabindex="0" aria-label="Text of the document">${text.text}</pre>`}
  </section>`;
}

const asText = (value) => (value === null || value === undefined ? "" : String(value));
const asNumber = (text) => (text.trim() === "" ? null : Number.isNaN(Number(text.replace(",", "."))) ? text : Number(text.replace(",", ".")));

function draftOf(review) {
  const { line_items: items, ...plain } = review.fields;
  return { ...Object.fromEntries(Object.entries(plain).map(([name, value]) => [name, asText(value)])),
    line_items: items.map((item) => Object.fromEntries(ITEM.map((key) => [key, asText(item[key])]))) };
}

// What a person has changed, as values.
function changesOf(review, draft) {
  const before = draftOf(review);
  const changes = {};
  for (const name of Object.keys(words)) {
    if (JSON.stringify(draft[name]) === JSON.stringify(before[name])) continue;
    if (name === "line_items") {
      changes[name] = draft[name].filter((item) => Object.values(item).some((text) => text.trim()))
        .map((item) => ({ description: item.description, ...Object.fromEntries(ITEM.slice(1).map((key) => [key, asNumber(item[key])])) }));
    } else if (name === "total") changes[name] = asNumber(draft[name]);
    else changes[name] = draft[name].trim() === "" ? null : draft[name].trim();
  }
  return changes;
}

function Items({ items, set }) {
  const change = (at, key) => (event) => set(items.map((item, n) => (n === at ? { ...item, [key]: event.currentTarget.value } : item)));
  return html`${items.length > 0 && html`<div class="scroller" tabindex="0" role="region" aria-label="Line items"><table class="grid items"><thead><tr><th scope="col">Description</th><th scope="col">Quantity</th><th scope="col">Price</th><th scope="col">Amount</th><th scope="col"><span class="hidden">Remove</span></th></tr></thead>
    <tbody>${items.map((item, at) => html`<tr key=${at}>${ITEM.map((key) => html`<td><input class=${key === "description" ? "words" : "number"} aria-label=${`${key.replace("_", " ")} of item ${at + 1}`} inputmode=${key === "description" ? "text" : "decimal"} value=${item[key]} onInput=${change(at, key)} /></td>`)}
      <td><button type="button" class="quiet" aria-label=${`Remove item ${at + 1}`} onClick=${() => set(items.filter((_, n) => n !== at))}>✕</button></td></tr>`)}</tbody></table></div>`}
    <button type="button" class="quiet" onClick=${() => set([...items, Object.fromEntries(ITEM.map((key) => [key, ""]))])}>Add an item</button>`;
}

function Field({ name, review, draft, set, first }) {
  const value = draft[name];
  const locked = review.locked.includes(name);
  const note = locked ? html`<${Mark} kind="running" icon="✎">corrected by ${review.corrected_by}<//>` : html`<${Sure} of=${review.confidences[name]} />`;
  const change = (event) => set({ ...draft, [name]: event.currentTarget.value });
  const input = name === "type"
    ? html`<select value=${value} onChange=${change} autofocus=${first}>${TYPES.map((one) => html`<option value=${one}>${one}</option>`)}</select>`
    : html`<input autocomplete="off" inputmode=${name === "total" ? "decimal" : "text"} placeholder=${name === "date" ? "2026-03-31" : name === "currency" ? "EUR" : ""} value=${value} onInput=${change} />`;
  if (name === "line_items") {
    return html`<fieldset class="field"><legend>${words[name]} ${note}</legend><${Items} items=${value} set=${(items) => set({ ...draft, line_items: items })} /></fieldset>`;
  }
  return html`<label class="field" data-field=${name}><span>${words[name]} ${note}</span>${input}</label>`;
}

// The next document that waits after this one, else the first of them.
async function nextPending(id) {
  for (const cursor of [id, undefined]) {
    const { items } = await get(withQuery("/documents/reviews", { status: "pending", limit: 2, cursor }));
    const found = items.find((one) => one.document_id !== id);
    if (found) return found.document_id;
  }
  return null;
}

export function ReviewScreen({ id }) {
  const [state, setState] = useState({ review: null, draft: null, error: null });
  const [busy, setBusy] = useState(false);
  const [name, setName] = useState(sessionStorage.getItem(NAME) ?? "");
  const form = useRef(null);
  const { review, draft, error } = state;
  // What was typed last: a key may come before the page is drawn again.
  const typed = useRef(null);
  const show = (found) => {
    typed.current = draftOf(found);
    setState({ review: found, draft: typed.current, error: null });
  };
  const load = () => get(path("documents", "reviews", id)).then(
    show,
    (problem) => setState((now) => ({ ...now, error: problem })),
  );
  useEffect(() => { load(); }, [id]);
  // The cursor is where a look is worth most.
  useLayoutEffect(() => {
    if (!review) return;
    const unsure = Object.keys(words).filter((one) => one !== "line_items" && !review.locked.includes(one));
    const [least] = unsure.sort((a, b) => (review.confidences[a] ?? 1) - (review.confidences[b] ?? 1));
    form.current?.querySelector(`[data-field="${least ?? "type"}"] input, [data-field="${least ?? "type"}"] select`)?.focus();
  }, [review?.document_id]);
  const act = async (verb) => {
    const fields = changesOf(review, typed.current);
    const changed = Object.keys(fields).length > 0;
    if (verb === "correct" && !changed) return;
    setBusy(true);
    try {
      const body = { ...(changed ? { fields } : {}), ...(name.trim() ? { by: name.trim() } : {}), seen: review.updated_at };
      const done = await post(path("documents", "reviews", id, verb), body);
      show(done);
      if (verb === "approve") await next();
    } catch (problem) {
      setState((now) => ({ ...now, error: problem }));
    }
    setBusy(false);
  };
  const next = async () => {
    const found = await nextPending(id);
    go(found ? ["documents", found] : ["documents"]);
  };
  const skip = () => next().catch((problem) => setState((now) => ({ ...now, error: problem })));
  useEffect(() => {
    const key = (event) => {
      const ctrl = event.ctrlKey || event.metaKey;
      if (ctrl && event.key === "Enter") act("approve");
      else if (ctrl && event.key.toLowerCase() === "s") act("correct");
      else if (event.altKey && event.key === "ArrowRight") skip();
      else return;
      event.preventDefault();
    };
    document.addEventListener("keydown", key);
    return () => document.removeEventListener("keydown", key);
  });
  const keepName = (event) => {
    setName(event.currentTarget.value);
    sessionStorage.setItem(NAME, event.currentTarget.value);
  };
  if (!review) return html`<main tabindex="-1"><h1>${id}</h1>${error ? html`<${Trouble} error=${error} again=${load} />` : html`<${Loading} />`}</main>`;
  const changed = Object.keys(changesOf(review, draft)).length;
  return html`<main tabindex="-1">
    <div class="title"><h1>${review.document_id}</h1><${Status} of=${review.status} />${review.approved_by && html`<span class="count">by ${review.approved_by}</span>`}<${Sure} of=${review.confidence} />
      <span class="grow"></span><a href=${link(["documents"])}>All documents</a></div>
    <p class="facts"><code>${review.file_path}</code> <${Copy} text=${review.file_path} /></p>
    ${review.warnings.map((one) => html`<p class="warning"><${Mark} kind="queued" icon="!">${one}<//></p>`)}
    <div class="review">
      <${Original} key=${`${review.document_id} ${review.sha256}`} id=${review.document_id} picture=${review.has_picture} />
      <form ref=${form} class="fields" aria-label="Fields" onSubmit=${(event) => { event.preventDefault(); act("approve"); }}>
        <h2>What was found</h2>
        ${Object.keys(words).map((one) => html`<${Field} key=${one} name=${one} review=${review} draft=${draft} set=${(more) => { typed.current = more; setState({ ...state, draft: more }); }} />`)}
        <label class="field"><span>Your name</span><input autocomplete="name" placeholder="the token’s, if you leave this empty" value=${name} onInput=${keepName} /></label>
        <${Trouble} error=${error} again=${error?.status === 409 ? load : null} />
        <div class="actions sticky">
          <${WriteButton} class="primary" type="submit" disabled=${busy}>${changed ? `Correct ${changed} and approve` : "Approve"}, next<//>
          <${WriteButton} type="button" disabled=${busy || !changed} onClick=${() => act("correct")}>Save<//>
          <button type="button" onClick=${skip}>Skip</button>
        </div>
        <p class="facts">Enter or Ctrl-Enter approves and opens the next one, Ctrl-S saves, Alt-→ skips. Changed <${Time} at=${review.updated_at} />.</p>
      </form>
    </div>
  </main>`;
}
