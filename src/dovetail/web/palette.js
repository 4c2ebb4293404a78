// The command palette (Ctrl-K) and the list of keys (?).
import { html, useEffect, useLayoutEffect, useRef, useState } from "./html.js";
import { forgetToken, get, hasToken, path, readOnly, withQuery } from "./api.js";
import { CancelDialog, ForkDialog, RetryDialog } from "./actions.js";
import { go, route } from "./route.js";
import { Dialog, STATES, copyText, isActive } from "./ui.js";

const FOUND_RUNS = 8;
const FOUND_WORKFLOWS = 8;

// Screens: words, the parts of the address, and the keys after g.
export const SCREENS = [
  ["Runs", ["runs"], "r"],
  ["Failed runs", ["runs"], null, { status: "FAILED" }],
  ["Workflows", ["workflows"], "w"],
  ["New workflow: the editor", ["editor"], "n e"],
  ["Batches", ["batches"], "b"],
  ["Operations: workers", ["operations", "workers"], "o"],
  ["Operations: queues", ["operations", "queues"], "q"],
  ["Operations: rate limits", ["operations", "limits"], "l"],
  ["Operations: dead letters", ["operations", "letters"], "x"],
  ["Documents", ["documents"], "d"],
];

const KEYS = [
  ["Ctrl-K", "Find a run, a workflow, a screen or an action"],
  ["/", "To the search of this screen"],
  ["?", "This list"],
  ...SCREENS.filter(([, , keys]) => keys).map(([words, , keys]) => [keys.split(" ").map((key) => `g ${key}`).join(", "), words]),
  ["Esc", "Close a dialog"],
  ["↑ ↓ Enter", "Choose in the palette; the arrow keys also move the graph"],
  ["Ctrl-Space, Ctrl-S", "In the editor: what fits here; register"],
  ["Esc, then Tab", "Leaves the text of the editor"],
  ["Ctrl-Enter", "In a review: approve, and open the next document"],
];

// What can be done with the run or workflow of this screen, and what can be done anywhere.
function actionsHere(at, run, open) {
  const [screen, name] = at.parts;
  if (screen === "workflows" && name) return [[`Show the runs of ${name}`, () => go(["runs"], { workflow: name })], [`Edit ${name}`, () => go(["editor"], { workflow: name })]];
  if (!run || readOnly.get()) return [];
  const called = `${run.workflow} ${run.run_id.slice(0, 8)}`;
  const move = isActive(run) ? [`Cancel this run: ${called}`, () => open("cancel")] : [`Retry this run: ${called}`, () => open("retry")];
  return [move, [`Fork this run: ${called}`, () => open("fork")]];
}

const actionsAnywhere = (open) => [
  ["Show the keys", () => open("keys")],
  ["Copy the address of this screen", () => copyText(location.href)],
  ["Open the page of the API, with a form for each call", () => location.assign("/docs")],
  ...(hasToken() ? [["Forget the token", forgetToken]] : []),
];

// What fits the words: screens and actions at once, workflows and runs as the server finds them.
function useChoices(text, documents, open) {
  const at = route.get();
  const [run, setRun] = useState(null);
  const [workflows, setWorkflows] = useState([]);
  const [runs, setRuns] = useState({ text: null, items: [] });
  useEffect(() => {
    get("/workflows?limit=1000").then((page) => setWorkflows(page.items), () => {});
    if (at.parts[0] === "runs" && at.parts[1]) get(path("runs", at.parts[1])).then(setRun, () => {});
  }, []);
  useEffect(() => {
    const leaving = new AbortController();
    const timer = setTimeout(() => {
      get(withQuery("/runs", { q: text.trim(), limit: FOUND_RUNS }), leaving.signal).then((page) => setRuns({ text, items: page.items }), () => {});
    }, text ? 200 : 0);
    return () => {
      clearTimeout(timer);
      leaving.abort();
    };
  }, [text]);
  const wanted = text.trim().toLowerCase().split(/\s+/).filter(Boolean);
  const fits = (words) => wanted.every((part) => words.toLowerCase().includes(part));
  const screens = SCREENS.filter(([words]) => documents || words !== "Documents");
  const actions = (found) => found.filter(([words]) => fits(words)).map(([words, act]) => ({ group: "action", words, act }));
  return [
    ...actions(actionsHere(at, run, open)),
    ...screens.filter(([words]) => fits(words)).map(([words, parts, , query]) => ({ group: "screen", words, act: () => go(parts, query) })),
    ...workflows.filter((one) => fits(one.name)).slice(0, FOUND_WORKFLOWS).map((one) => ({ group: "workflow", words: one.name, act: () => go(["workflows", one.name]) })),
    // Only runs that were found for these words.
    ...(runs.text === text ? runs.items : []).map((one) => ({ group: "run", words: `${one.workflow} ${one.run_id.slice(0, 8)}`, state: one.status, act: () => go(["runs", one.run_id]) })),
    ...actions(actionsAnywhere(open)),
  ];
}

function Palette({ documents, close, open }) {
  const [text, setText] = useState("");
  const [at, setAt] = useState(0);
  const list = useRef(null);
  const choices = useChoices(text, documents, open);
  const chosen = Math.min(at, choices.length - 1);
  useLayoutEffect(() => {
    list.current?.querySelector('[aria-selected="true"]')?.scrollIntoView({ block: "nearest" });
  }, [chosen, choices.length]);
  const [isEager, setEager] = useState(false);
  const take = (choice) => {
    close();
    choice.act();
  };
  // Enter may come before the server has found something: then the first of it is taken.
  useEffect(() => {
    if (isEager && choices.length > 0) take(choices[0]);
  }, [isEager, choices.length]);
  const key = (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step) setAt(choices.length ? (chosen + step + choices.length) % choices.length : 0);
    else if (event.key !== "Enter") return;
    else if (choices.length > 0) take(choices[chosen]);
    else setEager(true);
    event.preventDefault();
  };
  return html`<div class="palette">
    <input type="text" autocomplete="off" role="combobox" aria-expanded="true" aria-controls="choices" aria-activedescendant=${choices.length ? `choice-${chosen}` : null} aria-label="Find a run, a workflow, a screen or an action"
      placeholder="A run's id or params, a workflow, a screen, an action" autofocus value=${text} onInput=${(e) => { setText(e.currentTarget.value); setAt(0); setEager(false); }} onKeyDown=${key} />
    <ul id="choices" class="plain" role="listbox" aria-label="Choices" ref=${list}>
      ${choices.map((choice, n) => html`<li key=${`${choice.group} ${choice.words} ${n}`} id=${`choice-${n}`} role="option" aria-selected=${n === chosen ? "true" : "false"} onClick=${() => take(choice)}>
        <span class="words">${choice.state && html`<span class="icon state-${STATES[choice.state][1]}" aria-hidden="true">${STATES[choice.state][0]}</span>`}${choice.words}</span><span class="count">${choice.state ? STATES[choice.state][1] : ""} ${choice.group}</span></li>`)}
    </ul>
    ${choices.length === 0 && html`<p class="none" role="status">Nothing is called so.</p>`}
  </div>`;
}

function Keys() {
  return html`<dl class="keys">${KEYS.map(([keys, words]) => html`<div><dt><kbd>${keys}</kbd></dt><dd>${words}</dd></div>`)}</dl>`;
}

// One of: palette, keys, or a dialog about the run of the address.
export function Overlay({ what, documents, open, close }) {
  const [run, setRun] = useState(null);
  const [, runId] = route.get().parts;
  const about = { retry: RetryDialog, cancel: CancelDialog, fork: ForkDialog }[what];
  useEffect(() => {
    if (about) get(path("runs", runId)).then(setRun, close);
  }, [what]);
  if (what === "palette") return html`<${Dialog} key="palette" title="Go to" onClose=${close}><${Palette} documents=${documents} close=${close} open=${open} /><//>`;
  if (what === "keys") return html`<${Dialog} key="keys" title="Keys" onClose=${close}><${Keys} /><//>`;
  return about && run ? html`<${about} run=${run} onClose=${close} />` : null;
}
