// Text with lines: an editor, a reader and two texts side by side, all CodeMirror.
//
// CodeMirror adds style sheets. The policy of the page allows no inline style, so each view is in a
// shadow root, where CodeMirror uses constructed style sheets.
import { html, useEffect, useRef } from "./html.js";
import {
  Compartment, EditorState, EditorView, HighlightStyle, MergeView, autocompletion, bracketMatching, completionKeymap, defaultKeymap,
  drawSelection, highlightActiveLine, history, historyKeymap, indentUnit, indentWithTab, keymap, lineNumbers, lintGutter, lintKeymap,
  setDiagnostics, syntaxHighlighting, tags, unifiedMergeView, yaml,
} from "./vendor/codemirror.mjs";

const THEME = {
  "&": { color: "var(--ink)", backgroundColor: "var(--paper)", fontSize: "13px", height: "100%" },
  "&.cm-focused": { outline: "none" }, // its host has the outline
  ".cm-scroller": { fontFamily: "var(--mono)", lineHeight: "1.5" },
  ".cm-content": { caretColor: "var(--ink)" },
  ".cm-cursor, .cm-dropCursor": { borderLeftColor: "var(--ink)" },
  ".cm-gutters": { backgroundColor: "var(--raised)", color: "var(--soft)", borderRight: "1px solid var(--line)" },
  ".cm-activeLine, .cm-activeLineGutter": { backgroundColor: "color-mix(in srgb, var(--focus) 8%, transparent)" },
  "&.cm-focused > .cm-scroller > .cm-selectionLayer .cm-selectionBackground, .cm-selectionBackground": { backgroundColor: "color-mix(in srgb, var(--focus) 28%, transparent)" },
  ".cm-tooltip": { color: "var(--ink)", backgroundColor: "var(--raised)", border: "1px solid var(--line)", borderRadius: "6px", maxWidth: "480px", zIndex: "20" },
  ".cm-tooltip-autocomplete ul li[aria-selected]": { color: "#fff", backgroundColor: "#1d55b4" },
  ".cm-completionInfo": { padding: "6px 10px", maxWidth: "360px", fontFamily: "system-ui, sans-serif" },
  ".cm-completionDetail": { color: "var(--soft)" },
  "li[aria-selected] .cm-completionDetail": { color: "#fff" },
  ".cm-diagnostic": { padding: "6px 10px", fontFamily: "system-ui, sans-serif", whiteSpace: "pre-wrap" },
  ".cm-diagnostic-error": { borderLeft: "4px solid var(--bad-fill)" },
  ".cm-diagnostic-warning": { borderLeft: "4px solid var(--waiting-fill)" },
  ".cm-collapsedLines:before, .cm-collapsedLines:after": { content: "none" }, // characters that few fonts have
  ".cm-collapsedLines": { color: "var(--soft)", background: "var(--raised)", padding: "4px 8px" },
  ".cm-changedLine, .cm-insertedLine": { backgroundColor: "color-mix(in srgb, var(--ok-fill) 14%, transparent)" },
  ".cm-deletedLine, .cm-deletedChunk": { backgroundColor: "color-mix(in srgb, var(--bad-fill) 14%, transparent)" },
};
const COLOURS = [
  { tag: [tags.propertyName, tags.definition(tags.propertyName)], color: "var(--link)" },
  { tag: [tags.string, tags.special(tags.string), tags.content], color: "var(--ok)" },
  { tag: [tags.number, tags.bool, tags.null, tags.keyword], color: "var(--off)" },
  { tag: [tags.lineComment, tags.comment], color: "var(--soft)", fontStyle: "italic" },
  { tag: [tags.separator, tags.punctuation, tags.squareBracket, tags.brace], color: "var(--soft)" },
];

const dark = matchMedia("(prefers-color-scheme: dark)");
const themed = () => EditorView.theme(THEME, { dark: dark.matches });

function common(label) {
  return [
    lineNumbers(),
    syntaxHighlighting(HighlightStyle.define(COLOURS)),
    yaml(),
    drawSelection(),
    EditorView.contentAttributes.of({ "aria-label": label, spellcheck: "false", tabindex: "0" }),
  ];
}

const readOnly = [EditorState.readOnly.of(true), EditorView.editable.of(false)];

// Text that replaces a selection. The browser itself would keep the look of the selected lines with
// inline styles, which the policy of the page forbids.
const replaceSelection = EditorView.domEventHandlers({
  beforeinput(event, view) {
    if (event.inputType !== "insertText" || event.isComposing || event.data === null || view.state.selection.main.empty) return false;
    view.dispatch(view.state.replaceSelection(event.data), { userEvent: "input.type", scrollIntoView: true });
    event.preventDefault();
    return true;
  },
});

// Makes a view in a shadow root of an element, and follows a change between light and dark.
function useView(make, key) {
  const host = useRef(null);
  useEffect(() => {
    const shadow = host.current.shadowRoot ?? host.current.attachShadow({ mode: "open" });
    const look = new Compartment();
    const { views, destroy } = make(shadow, look.of(themed()));
    const change = () => views.forEach((view) => view.dispatch({ effects: look.reconfigure(themed()) }));
    dark.addEventListener("change", change);
    return () => {
      dark.removeEventListener("change", change);
      destroy();
      shadow.replaceChildren();
    };
  }, [key]);
  return host;
}

export function CodeView({ text, label }) {
  const host = useView((shadow, look) => {
    const state = EditorState.create({ doc: text, extensions: [look, common(label), readOnly] });
    const view = new EditorView({ state, root: shadow, parent: shadow });
    return { views: [view], destroy: () => view.destroy() };
  }, text);
  return html`<div class="code" ref=${host}></div>`;
}

// From the place that the server names to the end of the word there.
function diagnosticOf(doc, { line, column, message }, severity) {
  const at = doc.line(Math.min(Math.max(1, line ?? 1), doc.lines));
  const from = Math.min(at.from + Math.max(0, (column ?? 1) - 1), at.to);
  const word = /^[^\s,:{}[\]]+/.exec(doc.sliceString(from, at.to));
  return { from, to: Math.min(from + (word ? word[0].length : 1), at.to), severity, message };
}

// `found`: errors and warnings of the server. `reveal`: a place to go to, a new object each time.
export function CodeEditor({ initial, label, onChange, complete, found, reveal, onSave }) {
  const view = useRef(null);
  const current = useRef({});
  current.current = { onChange, complete, onSave };
  const host = useView((shadow, look) => {
    const source = (context) => current.current.complete?.(context) ?? null;
    const save = () => {
      current.current.onSave?.();
      return true;
    };
    const state = EditorState.create({
      doc: initial,
      extensions: [
        look,
        common(label),
        history(),
        bracketMatching(),
        highlightActiveLine(),
        indentUnit.of("  "),
        EditorState.tabSize.of(2),
        replaceSelection,
        lintGutter(),
        autocompletion({ override: [source], icons: false }),
        keymap.of([{ key: "Mod-s", preventDefault: true, run: save }, ...completionKeymap, ...defaultKeymap, ...historyKeymap, ...lintKeymap, indentWithTab]),
        EditorView.updateListener.of((update) => update.docChanged && current.current.onChange(update.state.doc.toString())),
      ],
    });
    view.current = new EditorView({ state, root: shadow, parent: shadow });
    return { views: [view.current], destroy: () => view.current.destroy() };
  }, initial);
  useEffect(() => {
    if (!found) return;
    const { state } = view.current;
    const all = [...found.errors.map((one) => [one, "error"]), ...found.warnings.map((one) => [one, "warning"])];
    const marks = all.map(([one, severity]) => diagnosticOf(state.doc, one, severity));
    view.current.dispatch(setDiagnostics(state, marks));
  }, [found]);
  useEffect(() => {
    if (!reveal) return;
    const { from } = diagnosticOf(view.current.state.doc, reveal, "error");
    view.current.dispatch({ selection: { anchor: from }, effects: EditorView.scrollIntoView(from, { y: "center" }) });
    view.current.focus();
  }, [reveal]);
  return html`<div class="code editing" ref=${host}></div>`;
}

const COLLAPSED = { margin: 3, minSize: 6 };

// Two texts, side by side or, where there is no room, one below the other line by line.
export function MergeText({ from, to, labels, narrow }) {
  const host = useView((shadow, look) => {
    if (narrow) {
      const extensions = [look, common(labels.join(" and ")), readOnly, unifiedMergeView({ original: from, mergeControls: false, collapseUnchanged: COLLAPSED })];
      const view = new EditorView({ state: EditorState.create({ doc: to, extensions }), root: shadow, parent: shadow });
      return { views: [view], destroy: () => view.destroy() };
    }
    const side = (doc, label) => ({ doc, extensions: [look, common(label), readOnly] });
    const merge = new MergeView({ a: side(from, labels[0]), b: side(to, labels[1]), root: shadow, parent: shadow, collapseUnchanged: COLLAPSED });
    return { views: [merge.a, merge.b], destroy: () => merge.destroy() };
  }, JSON.stringify([from, to, narrow]));
  return html`<div class="code" ref=${host}></div>`;
}
