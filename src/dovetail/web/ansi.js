// A log message as pieces of text: SGR colours become classes, other control characters are shown.
const SGR = /\x1b\[([0-9;]*)m/g;
// Also the characters that reorder text: a line must read as it is stored.
const CONTROL = /[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]/g;
const COLOURS = ["black", "red", "green", "yellow", "blue", "magenta", "cyan", "white"];

export function printable(text) {
  return text.replace(CONTROL, (sign) => {
    const code = sign.codePointAt(0);
    return code < 256 ? "\\x" + code.toString(16).padStart(2, "0") : "\\u" + code.toString(16).padStart(4, "0");
  });
}

export function pieces(message) {
  const found = [];
  let style = { colour: null, bold: false, dim: false, underline: false };
  let from = 0;
  const push = (text) => {
    if (!text) return;
    const classes = [style.colour && `ansi-${style.colour}`, style.bold && "ansi-bold", style.dim && "ansi-dim", style.underline && "ansi-underline"];
    found.push({ text: printable(text), classes: classes.filter(Boolean).join(" ") });
  };
  for (const match of message.matchAll(SGR)) {
    push(message.slice(from, match.index));
    from = match.index + match[0].length;
    style = applied(style, match[1].split(";").map(Number));
  }
  push(message.slice(from));
  return found;
}

function applied(style, codes) {
  let next = { ...style };
  for (let n = 0; n < codes.length; n++) {
    const code = codes[n];
    if (code === 0) next = { colour: null, bold: false, dim: false, underline: false };
    else if (code === 1) next.bold = true;
    else if (code === 2) next.dim = true;
    else if (code === 4) next.underline = true;
    else if (code === 22) next.bold = next.dim = false;
    else if (code === 24) next.underline = false;
    else if (code >= 30 && code <= 37) next.colour = COLOURS[code - 30];
    else if (code >= 90 && code <= 97) next.colour = COLOURS[code - 90];
    else if (code === 39) next.colour = null;
    else if (code === 38 || code === 48) n += codes[n + 1] === 5 ? 2 : 4; // a palette that is not ours
  }
  return next;
}
