// The page's frame: the bar on top, the token, the connection, and the screen of the address.
import { html, render, useEffect, useRef, useState } from "./html.js";
import { askScope, auth, connection, forgetToken, get, hasToken, readOnly, useToken } from "./api.js";
import { go, link, route } from "./route.js";
import { RunScreen } from "./run.js";
import { RunsScreen } from "./runs.js";
import { useStore } from "./store.js";
import { Empty, Later, READ_ONLY } from "./ui.js";

function TokenForm({ wrong }) {
  const [given, setGiven] = useState("");
  const submit = (event) => {
    event.preventDefault();
    if (given.trim()) useToken(given.trim());
  };
  return html`<main class="token">
    <h1>This server needs a token</h1>
    <p>${wrong ? "The server does not know this token. Check it for missing characters." : "It is one of the tokens in the server's setting DOVETAIL_TOKENS."}${" "}The page keeps it until you close this tab.</p>
    <form onSubmit=${submit}>
      <label>Token <input type="password" autocomplete="off" autofocus value=${given} onInput=${(e) => setGiven(e.currentTarget.value)} /></label>
      <button class="primary" type="submit">Use it</button>
    </form>
  </main>`;
}

const workflows = () => import("./workflows.js");
const workflow = () => import("./workflow.js");
const editor = () => import("./editor.js");
const operations = () => import("./operations.js");
const batches = () => import("./batches.js");
const documents = () => import("./documents.js");
const palette = () => import("./palette.js");

function Screen({ at }) {
  const [first, second, third] = at.parts;
  if (first === "runs" && second === undefined) return html`<${RunsScreen} query=${at.query} />`;
  if (first === "runs") return html`<${RunScreen} key=${second} id=${second} tab=${third} query=${at.query} />`;
  if (first === "workflows" && second === undefined) return html`<${Later} key="workflows" load=${workflows} part="WorkflowsScreen" isScreen query=${at.query} />`;
  if (first === "workflows") return html`<${Later} key=${`workflow ${second}`} load=${workflow} part="WorkflowScreen" isScreen name=${second} tab=${third} query=${at.query} />`;
  if (first === "editor") return html`<${Later} key=${`${at.query.workflow}@${at.query.version}`} load=${editor} part="EditorScreen" isScreen query=${at.query} />`;
  if (first === "operations") return html`<${Later} load=${operations} part="OperationsScreen" isScreen section=${second} />`;
  if (first === "batches" && second === undefined) return html`<${Later} key="batches" load=${batches} part="BatchesScreen" isScreen />`;
  if (first === "batches") return html`<${Later} key=${`batch ${second}`} load=${batches} part="BatchScreen" isScreen id=${second} query=${at.query} />`;
  if (first === "documents" && second === undefined) return html`<${Later} key="documents" load=${documents} part="DocumentsScreen" isScreen query=${at.query} />`;
  if (first === "documents") return html`<${Later} key=${`document ${second}`} load=${documents} part="ReviewScreen" isScreen id=${second} />`;
  return html`<main tabindex="-1"><h1>Not found</h1><${Empty}>There is no such screen. <a href=${link(["runs"])}>All runs</a><//></main>`;
}

// ── keys ────────────────────────────────────────────────────────────────────────────────

// The element itself, not the host of the shadow root that it is in.
const isTyping = (target) => target.isContentEditable || ["INPUT", "TEXTAREA", "SELECT"].includes(target.tagName);
const JUMPS = { r: ["runs"], w: ["workflows"], n: ["editor"], e: ["editor"], b: ["batches"], o: ["operations", "workers"], q: ["operations", "queues"], l: ["operations", "limits"], x: ["operations", "letters"], d: ["documents"] };

// Ctrl-K, ?, / and g with a letter.
function useKeys(open) {
  const jumps = useRef(0);
  useEffect(() => {
    const pressed = (event) => {
      if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k") open("palette");
      else if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event.composedPath()[0]) || document.querySelector("dialog[open]")) return;
      else if (event.key === "?") open("keys");
      else if (event.key === "/") document.querySelector('main input[type="search"]')?.focus();
      else if (event.key === "g") jumps.current = event.timeStamp;
      else if (JUMPS[event.key] && event.timeStamp - jumps.current < 1000) go(JUMPS[event.key]);
      else return;
      event.preventDefault();
    };
    document.addEventListener("keydown", pressed);
    return () => document.removeEventListener("keydown", pressed);
  }, []);
}

function App() {
  const at = useStore(route);
  const { lost } = useStore(connection);
  const { needed, wrong, generation } = useStore(auth);
  const isReader = useStore(readOnly);
  const [section] = at.parts;
  const [overlay, setOverlay] = useState(null);
  const [hasDocuments, setDocuments] = useState(false);
  useKeys(setOverlay);
  // Another screen closes what is open over this one; at once, before the next key.
  useEffect(() => {
    let before = route.get().parts.join("/");
    return route.subscribe(({ parts }) => {
      if (parts.join("/") !== before) setOverlay(null);
      before = parts.join("/");
    });
  }, []);
  useEffect(() => {
    if (needed) return;
    get("/documents").then((found) => setDocuments(found.in_use), () => {});
    askScope().catch(() => {});
  }, [needed, generation]);
  const bar = useRef(null);
  // On a phone not all screens fit into the bar: the current one is scrolled into view.
  useEffect(() => bar.current.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" }), [section, hasDocuments]);
  const shown = section === "editor" ? "workflows" : section;
  const to = (words, parts) => html`<a href=${link(parts)} aria-current=${shown === parts[0] ? "page" : null}>${words}</a>`;
  useEffect(() => {
    const parts = at.parts.length > 1 ? `${at.parts[1]} · ` : "";
    document.title = `${parts}Dovetail`;
  }, [at]);
  return html`
    <header class="top">
      <button class="skip" onClick=${() => document.querySelector("main")?.focus()}>To the content</button>
      <a class="brand" href=${link(["runs"])}>Dovetail</a>
      <nav aria-label="Screens" ref=${bar}>
        ${to("Runs", ["runs"])}${to("Workflows", ["workflows"])}${to("Batches", ["batches"])}${to("Operations", ["operations"])}${hasDocuments && to("Documents", ["documents"])}
      </nav>
      <span class="grow"></span>
      ${!needed && html`<button class="find" aria-keyshortcuts="Control+K" onClick=${() => setOverlay("palette")} aria-label="Find"><span aria-hidden="true">⌕ <span class="words">Find…</span> <kbd>Ctrl-K</kbd></span></button>`}
      ${isReader && !needed && html`<span class="tag" title=${READ_ONLY}>read only</span>`}
      ${hasToken() && !needed && html`<button class="quiet forget" onClick=${forgetToken}>Forget the token</button>`}
    </header>
    <div role="status" aria-live="polite">${lost && html`<p class="lost">The server does not answer. The page shows the last known state and tries again.</p>`}</div>
    ${needed ? html`<${TokenForm} key=${wrong} wrong=${wrong} />` : html`<${Screen} key=${generation} at=${at} />`}
    ${overlay && !needed && html`<${Later} load=${palette} part="Overlay" isOverlay what=${overlay} documents=${hasDocuments} open=${setOverlay} close=${() => setOverlay((now) => (now === overlay ? null : now))} />`}`;
}

render(html`<${App} />`, document.getElementById("app"));
