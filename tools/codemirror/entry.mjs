// What the page uses of CodeMirror 6. build.py makes one file of it: src/dovetail/web/vendor/codemirror.mjs.
export { EditorState, Compartment } from "@codemirror/state";
export {
  EditorView,
  drawSelection,
  highlightActiveLine,
  keymap,
  lineNumbers,
  placeholder,
} from "@codemirror/view";
export { defaultKeymap, history, historyKeymap, indentWithTab } from "@codemirror/commands";
export { HighlightStyle, bracketMatching, indentUnit, syntaxHighlighting } from "@codemirror/language";
export { lintGutter, lintKeymap, setDiagnostics } from "@codemirror/lint";
export { autocompletion, completionKeymap, startCompletion } from "@codemirror/autocomplete";
export { yaml } from "@codemirror/lang-yaml";
export { MergeView, unifiedMergeView } from "@codemirror/merge";
export { tags } from "@lezer/highlight";
