// What can be written at a place of a definition in YAML, by the JSON Schema that `GET /schema` gives.
const LINE = /^(\s*)((?:-\s+)*)(?:(?:"([^"]+)"|'([^']+)'|([\w.-]+))\s*:(?=\s|$)\s*(.*))?/;
const MAX_LINES = 5000; // looked at, upwards or downwards

// A line's dashes and key, with their columns.
function read(text) {
  const [, spaces, dashes, double, single, plain, rest] = LINE.exec(text);
  const columns = [...dashes.matchAll(/-/g)].map((one) => spaces.length + one.index);
  const key = double ?? single ?? plain;
  return { dashes: columns, key, column: spaces.length + dashes.length, rest: rest ?? "", isBlank: /^\s*(#.*)?$/.test(text) };
}

// The keys and lists around a column of a line: outermost first.
export function placeAt(line, number, column) {
  const path = [];
  let [keyLimit, dashLimit] = [column, column];
  for (let n = number; n >= 1 && n > number - MAX_LINES; n--) {
    const found = read(line(n));
    if (found.isBlank && n !== number) continue;
    if (n !== number && found.key !== undefined && found.column < keyLimit) {
      path.unshift({ key: found.key, line: n, column: found.column });
      keyLimit = dashLimit = found.column;
    }
    for (const dash of found.dashes.toReversed()) {
      if (dash >= dashLimit) continue;
      path.unshift({ item: true, line: n, column: dash });
      [keyLimit, dashLimit] = [dash + 1, dash]; // the list's key may be in the same column
    }
  }
  return path;
}

// The other keys of the mapping that has a key in this column, with their values.
export function siblings(line, lines, number, column) {
  const keys = new Map();
  const take = (n) => {
    const found = read(line(n));
    if (found.isBlank) return true;
    if (found.key !== undefined && found.column === column) keys.set(found.key, found.rest);
    const first = found.dashes[0] ?? (found.key !== undefined ? found.column : line(n).search(/\S/));
    return first >= column;
  };
  if (!take(number) && read(line(number)).dashes.length === 0) return keys;
  const isFirst = read(line(number)).dashes.length > 0;
  for (let n = number - 1; !isFirst && n >= 1 && n > number - MAX_LINES; n--) {
    if (!take(n)) break; // the line with the dash was taken, and is the first one
  }
  for (let n = number + 1; n <= lines && n < number + MAX_LINES; n++) {
    const found = read(line(n));
    if (!found.isBlank && (found.dashes[0] ?? line(n).search(/\S/)) < column) break;
    take(n);
  }
  return keys;
}

// ── the schema ──────────────────────────────────────────────────────────────────────────

function branches(schema, root) {
  const found = [];
  const todo = [schema];
  for (let n = 0; todo.length && n < 200; n++) {
    const one = todo.pop();
    if (!one || typeof one !== "object") continue;
    found.push(one);
    if (typeof one.$ref === "string" && one.$ref.startsWith("#/$defs/")) todo.push(root.$defs?.[one.$ref.slice(8)]);
    for (const keyword of ["anyOf", "oneOf", "allOf"]) todo.push(...(one[keyword] ?? []).toReversed());
  }
  return found;
}

function step(schema, key, root) {
  for (const one of branches(schema, root)) {
    if (key === undefined) {
      if (one.items) return one.items;
    } else if (one.properties && Object.hasOwn(one.properties, key)) return one.properties[key];
    else if (one.additionalProperties && typeof one.additionalProperties === "object") return one.additionalProperties;
  }
  return null;
}

const plain = (text) => text.replace(/\s+#.*$/, "").replace(/^["']|["']$/g, "");

function schemaAt(path, root, line, lines) {
  let schema = root;
  for (let n = 0; n < path.length && schema; n++) {
    const { key, line: number, column } = path[n];
    if (key === "config" && n === 2 && path[0].key === "nodes") {
      const handler = plain(siblings(line, lines, number, column).get("handler") ?? "");
      schema = root.$defs?.[`config.${handler}`] ?? null;
    } else schema = step(schema, key, root);
  }
  return schema;
}

const words = (schema, root) => branches(schema, root).map((one) => one.description).find(Boolean);
const types = (schema, root) => [...new Set(branches(schema, root).flatMap((one) => one.type ?? []))].filter((one) => one !== "null").join(" or ");

function keysOf(schema, root, present) {
  const found = new Map();
  for (const one of branches(schema, root)) {
    for (const [name, below] of Object.entries(one.properties ?? {})) {
      if (!found.has(name) && !present.has(name)) found.set(name, { label: name, type: "property", detail: types(below, root), info: words(below, root), apply: `${name}: ` });
    }
  }
  return [...found.values()];
}

function valuesOf(schema, root) {
  const found = new Map();
  for (const one of branches(schema, root)) {
    const values = [...(one.enum ?? []), ...("const" in one ? [one.const] : []), ...([one.type].flat().includes("boolean") ? [true, false] : [])];
    for (const value of values) if (value !== null) found.set(String(value), { label: String(value), type: "enum", info: one.description });
  }
  return [...found.values()];
}

const LISTS_OF_NODES = new Set(["dependencies", "depends_on"]);

function nodeIds(line, lines, own) {
  const found = [];
  for (let n = 1; n <= Math.min(lines, MAX_LINES); n++) {
    const { key, rest } = read(line(n));
    if (key === "id" && plain(rest) && plain(rest) !== own) found.push({ label: plain(rest), type: "variable" });
  }
  return found;
}

// A source of completions for CodeMirror.
export function completer(root) {
  return (context) => {
    const { doc } = context.state;
    const at = doc.lineAt(context.pos);
    if (/^\s*\{/.test(doc.sliceString(0, 200))) return null; // JSON
    const line = (n) => doc.line(n).text;
    const before = at.text.slice(0, context.pos - at.from);
    const own = read(before);
    const path = placeAt(line, at.number, own.column);
    const word = /[\w.-]*$/.exec(before)[0];
    const from = context.pos - word.length;
    const result = (options) => (options.length ? { from, options, validFor: /^[\w.-]*$/ } : null);
    const last = path.findLast((one) => one.key !== undefined);
    if (own.key !== undefined || (path.at(-1)?.item && LISTS_OF_NODES.has(last?.key))) {
      const key = own.key ?? last.key;
      if (/["'{]/.test(own.rest)) return null;
      if (LISTS_OF_NODES.has(key)) {
        const column = own.key === undefined ? last.column : own.column;
        return result(nodeIds(line, doc.lines, plain(siblings(line, doc.lines, own.key === undefined ? last.line : at.number, column).get("id") ?? "")));
      }
      if (own.rest.trim() !== word) return null;
      const here = own.key === undefined ? path : [...path, { key, line: at.number, column: own.column }];
      return result(valuesOf(schemaAt(here, root, line, doc.lines), root));
    }
    if (before.slice(own.column) !== word || (!word && !context.explicit)) return null;
    const schema = schemaAt(path, root, line, doc.lines);
    return schema ? result(keysOf(schema, root, siblings(line, doc.lines, at.number, own.column))) : null;
  };
}
