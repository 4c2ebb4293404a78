// The page's frame: the bar on top, the token, the connection, and the screen of the address.
import { html, render, useEffect, useState } from "./html.js";
import { auth, connection, forgetToken, hasToken, useToken } from "./api.js";
import { link, route } from "./route.js";
import { RunScreen } from "./run.js";
import { RunsScreen } from "./runs.js";
import { useStore } from "./store.js";
import { Empty, Lazy } from "./ui.js";
import { WorkflowScreen } from "./workflow.js";
import { WorkflowsScreen } from "./workflows.js";

const loadEditor = () => import("./editor.js");

function TokenForm({ wrong }) {
  const [given, setGiven] = useState("");
  const submit = (event) => {
    event.preventDefault();
    if (given.trim()) useToken(given.trim());
  };
  return html`<main class="token">
    <h1>This server needs a token</h1>
    <p>${wrong ? "The server does not know this token. Check it for missing characters." : "It is one of the tokens in the server's setting DOVETAIL_TOKENS."}
      The page keeps it until you close this tab.</p>
    <form onSubmit=${submit}>
      <label>Token <input type="password" autocomplete="off" autofocus value=${given} onInput=${(e) => setGiven(e.currentTarget.value)} /></label>
      <button class="primary" type="submit">Use it</button>
    </form>
  </main>`;
}

function Screen({ at }) {
  const [first, second, third] = at.parts;
  if (first === "runs" && second === undefined) return html`<${RunsScreen} query=${at.query} />`;
  if (first === "runs") return html`<${RunScreen} key=${second} id=${second} tab=${third} query=${at.query} />`;
  if (first === "workflows" && second === undefined) return html`<${WorkflowsScreen} query=${at.query} />`;
  if (first === "workflows") return html`<${WorkflowScreen} key=${second} name=${second} tab=${third} query=${at.query} />`;
  if (first === "editor") return html`<${Lazy} load=${loadEditor} name="EditorScreen" key=${`${at.query.workflow}@${at.query.version}`} query=${at.query} />`;
  return html`<main><${Empty}>There is no such screen. <a href=${link(["runs"])}>All runs</a><//></main>`;
}

function App() {
  const at = useStore(route);
  const { lost } = useStore(connection);
  const { needed, wrong, generation } = useStore(auth);
  const [section] = at.parts;
  useEffect(() => {
    const parts = at.parts.length > 1 ? `${at.parts[1]} · ` : "";
    document.title = `${parts}Dovetail`;
  }, [at]);
  return html`
    <a class="skip" href="#main" onClick=${(e) => { e.preventDefault(); document.querySelector("main")?.focus(); }}>To the content</a>
    <header class="top">
      <a class="brand" href=${link(["runs"])}>Dovetail</a>
      <nav aria-label="Screens">
        <a href=${link(["runs"])} aria-current=${section === "runs" ? "page" : null}>Runs</a>
        <a href=${link(["workflows"])} aria-current=${section === "workflows" || section === "editor" ? "page" : null}>Workflows</a>
      </nav>
      <span class="grow"></span>
      ${hasToken() && !needed && html`<button class="quiet" onClick=${forgetToken}>Forget the token</button>`}
    </header>
    <div role="status" aria-live="polite">${lost && html`<p class="lost">The server does not answer. The page shows the last known state and tries again.</p>`}</div>
    ${needed ? html`<${TokenForm} key=${wrong} wrong=${wrong} />` : html`<${Screen} key=${generation} at=${at} />`}`;
}

render(html`<${App} />`, document.getElementById("app"));
