// "Try it" of /docs: a form for each call, sent with the token that the page keeps.
import { html, render, useEffect, useRef, useState } from "./html.js";
import { auth, forgetToken, hasToken, parseJson, rawCall, useToken } from "./api.js";
import { useStore } from "./store.js";

const MAX_SHOWN = 200_000;

function address({ path, params }, values) {
  const filled = path.replace(/\{(\w+)\}/g, (_, name) => encodeURIComponent(values[name] ?? ""));
  const query = params.filter((one) => one.in === "query" && values[one.name]).map((one) => [one.name, values[one.name]]);
  return query.length ? `${filled}?${new URLSearchParams(query)}` : filled;
}

const headersOf = ({ params, has_body }, values) => ({
  ...Object.fromEntries(params.filter((one) => one.in === "header" && values[one.name]).map((one) => [one.name, values[one.name]])),
  ...(has_body && values[""] ? { "Content-Type": values[""].trimStart().startsWith("{") ? "application/json" : "application/yaml" } : {}),
});

function pretty(text) {
  try {
    return JSON.stringify(parseJson(text), null, 1);
  } catch {
    return text;
  }
}

function TryIt({ call }) {
  const [open, setOpen] = useState(false);
  const examples = Object.fromEntries(call.params.filter((one) => one.in === "path").map((one) => [one.name, one.example]));
  const [values, setValues] = useState({ ...examples, "": call.body === null ? "" : JSON.stringify(call.body, null, 1) });
  const [reply, setReply] = useState(null);
  const reading = useRef(null);
  useEffect(() => () => reading.current?.abort(), []);
  const set = (name) => (event) => setValues({ ...values, [name]: event.currentTarget.value });
  const send = async (event) => {
    event.preventDefault();
    setReply({ status: "…", text: "" });
    reading.current?.abort();
    const { signal } = (reading.current = new AbortController());
    const began = performance.now();
    try {
      const got = await rawCall(call.method, address(call, values), headersOf(call, values), call.has_body ? values[""] : undefined, signal);
      const status = `${got.status} ${got.statusText}, ${Math.round(performance.now() - began)} ms`;
      if (!(got.headers.get("Content-Type") ?? "").startsWith("text/event-stream")) return setReply({ status, text: pretty(await got.text()).slice(0, MAX_SHOWN) });
      // A stream is shown as it comes, until it ends or the form is closed.
      const stream = got.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let text = "", part = { value: "" }; !part.done && text.length < MAX_SHOWN; part = await stream.read()) {
        text += part.value;
        setReply({ status: `${status}, a stream`, text });
      }
      return reading.current.abort();
    } catch {
      return signal.aborted || setReply({ status: "The server does not answer.", text: "" });
    }
  };
  const close = () => {
    reading.current?.abort();
    setReply(null);
    setOpen(false);
  };
  const what = `${call.method} ${call.path}`;
  if (!open) return html`<button aria-label=${`Try ${what}`} onClick=${() => setOpen(true)}>Try it</button>`;
  return html`<form aria-label=${what} onSubmit=${send}>
    ${call.params.map((one) => html`<label><span>${one.name} <small>${one.in}</small></span> <input value=${values[one.name] ?? ""} onInput=${set(one.name)} /></label>`)}
    ${call.has_body && html`<label><span>body, JSON or YAML</span> <textarea rows="6" spellcheck=${false} value=${values[""]} onInput=${set("")}></textarea></label>`}
    <button type="submit">Send</button> <button type="button" onClick=${close}>Close</button>
    ${reply && html`<div class="reply" role="status"><p>${reply.status}</p><pre tabindex="0" aria-label="Reply">${reply.text}</pre></div>`}
  </form>`;
}

function Token() {
  useStore(auth);
  const [given, setGiven] = useState("");
  if (hasToken()) return html`<p class="token">Calls are sent with the token of this tab. <button onClick=${forgetToken}>Forget it</button></p>`;
  return html`<form class="token" onSubmit=${(event) => { event.preventDefault(); if (given.trim()) useToken(given.trim()); }}>
    <label><span>Token, if the server needs one</span> <input type="password" autocomplete="off" value=${given} onInput=${(e) => setGiven(e.currentTarget.value)} /></label>
    <button type="submit">Use it</button> <small>It is kept until you close this tab.</small>
  </form>`;
}

render(html`<${Token} />`, document.getElementById("token"));
for (const place of document.querySelectorAll("[data-call]")) render(html`<${TryIt} call=${JSON.parse(place.dataset.call)} />`, place);
