// Shows text of third parties: terminal colours are removed, markdown and code are laid out.
// No link loads anything, no image is fetched, and no HTML passes through.

import { element, visible } from "./visible.js";

const COLOURS = /\x1b\[[0-9;:]*m/g; // eslint-disable-line no-control-regex
const LONGEST_LINE = 2000;

export function plain(text) {
  return text.replace(COLOURS, "").replace(/\r\n/g, "\n");
}

// Text as typed, with line breaks.
export function pre(text, name) {
  return element("pre", name || "", visible(plain(text)));
}

const WORDS = {
  python: /\b(?:and|as|assert|async|await|break|class|continue|def|del|elif|else|except|finally|for|from|global|if|import|in|is|lambda|None|not|or|pass|raise|return|True|False|try|while|with|yield)\b/y,
  js: /\b(?:async|await|break|case|catch|class|const|continue|default|else|export|false|finally|for|function|if|import|in|let|new|null|of|return|switch|this|throw|true|try|typeof|undefined|var|while|yield)\b/y,
  sh: /\b(?:case|do|done|elif|else|esac|export|fi|for|function|if|in|then|while)\b/y,
  sql: /\b(?:SELECT|FROM|WHERE|GROUP|ORDER|BY|JOIN|LEFT|ON|AS|AND|OR|NOT|NULL|INSERT|UPDATE|DELETE|LIMIT|COUNT|SUM|select|from|where|group|order|by|join|left|on|as|and|or|not|null|limit)\b/y,
  json: /\b(?:true|false|null)\b/y,
};
const STRING = /"(?:[^"\\\n]|\\.){0,2000}"|'(?:[^'\\\n]|\\.){0,2000}'|`(?:[^`\\]|\\.){0,2000}`/y; // bounded: hostile code would take minutes
const COMMENT = { python: /#[^\n]*/y, sh: /#[^\n]*/y, js: /\/\/[^\n]*/y, sql: /--[^\n]*/y };
const NUMBER = /\b\d+(?:\.\d+)?(?:[eE][+-]?\d+)?\b/y;
const PLAIN = /[A-Za-z_]\w*|[^\w"'`#/-]+|[\s\S]/y;
const MOST_CODE = 20000;

export function language(name, text) {
  const known = { py: "python", python: "python", js: "js", javascript: "js", ts: "js", sh: "sh", bash: "sh", shell: "sh", sql: "sql", json: "json" }[name];
  if (known) return known;
  if (/^\s*[{[]/.test(text)) return "json";
  return /\b(?:def|import|print)\b/.test(text) ? "python" : "";
}

// Code with colours for words, strings, numbers and comments. Long code stays plain.
export function code(text, name) {
  const shown = plain(text), kind = language(name, shown);
  const built = document.createElement("pre");
  built.className = "code";
  if (!kind || shown.length > MOST_CODE) {
    built.append(visible(shown));
    return built;
  }
  let at = 0, unstyled = "";
  const flush = () => {
    if (unstyled) built.append(visible(unstyled));
    unstyled = "";
  };
  while (at < shown.length) {
    let taken = "", style = "";
    for (const [rule, as] of [[COMMENT[kind], "c"], [STRING, "s"], [WORDS[kind], "k"], [NUMBER, "n"], [PLAIN, ""]]) {
      if (!rule) continue;
      rule.lastIndex = at;
      const match = rule.exec(shown);
      if (match && match[0]) {
        taken = match[0];
        style = as;
        break;
      }
    }
    if (!taken) taken = shown[at];
    at += taken.length;
    if (style) {
      flush();
      built.append(element("span", `code-${style}`, visible(taken)));
    } else unstyled += taken;
  }
  flush();
  return built;
}

const INLINE = /(`[^`\n]+`)|(\*\*[^*\n]+\*\*)|(\*[^*\s][^*\n]*\*)|(!?\[[^\]\n]{0,500}\]\([^)\s]{0,2000}\))/;

function inline(text) {
  const fragment = document.createDocumentFragment();
  let rest = text;
  for (let count = 0; count < 500; count += 1) {
    const match = rest.length < LONGEST_LINE * 10 ? INLINE.exec(rest) : null;
    if (!match) break;
    fragment.append(visible(rest.slice(0, match.index)));
    const [piece] = match;
    if (match[1]) fragment.append(element("code", "", visible(piece.slice(1, -1))));
    else if (match[2]) fragment.append(element("strong", "", visible(piece.slice(2, -2))));
    else if (match[3]) fragment.append(element("em", "", visible(piece.slice(1, -1))));
    else fragment.append(element("span", "link-text", visible(piece)));
    rest = rest.slice(match.index + piece.length);
  }
  fragment.append(visible(rest));
  return fragment;
}

// Markdown: headings, lists, quotes, tables as typed, code. Everything else is a paragraph with its line breaks.
export function markdown(text) {
  const root = element("div", "markdown"), lines = plain(text).split("\n");
  let paragraph = [], list = null;
  const flush = () => {
    if (paragraph.length) root.append(element("p", "", ...paragraph.flatMap((line, n) => (n ? [document.createElement("br"), inline(line)] : [inline(line)]))));
    paragraph = [];
  };
  for (let at = 0; at < lines.length; at += 1) {
    const line = lines[at];
    const fence = /^\s{0,3}(```+|~~~+)\s*([\w+-]{0,20})/.exec(line);
    if (fence) {
      flush();
      list = null;
      let end = at + 1;
      while (end < lines.length && !lines[end].trim().startsWith(fence[1])) end += 1;
      root.append(code(lines.slice(at + 1, end).join("\n"), fence[2]));
      at = end;
      continue;
    }
    const short = line.length <= LONGEST_LINE, heading = short && /^(#{1,6})\s+(.*)$/.exec(line), item = short && /^\s{0,6}(?:[-*+]|\d{1,4}[.)])\s+(.*)$/.exec(line);
    if (heading) {
      flush();
      list = null;
      root.append(element("p", `heading h${Math.min(heading[1].length, 4)}`, inline(heading[2])));
    } else if (item) {
      flush();
      if (!list) root.append((list = element(/^\s*\d/.test(line) ? "ol" : "ul", "")));
      list.append(element("li", "", inline(item[1])));
    } else if (/^\s*\|.*\|\s*$/.test(line)) {
      flush();
      list = null;
      const start = at;
      while (at + 1 < lines.length && /^\s*\|.*\|\s*$/.test(lines[at + 1])) at += 1;
      root.append(element("pre", "typed", visible(lines.slice(start, at + 1).join("\n"))));
    } else if (!line.trim()) {
      flush();
      list = null;
    } else {
      list = null;
      paragraph.push(line.replace(/^\s{0,3}>\s?/, "› "));
    }
  }
  flush();
  return root;
}

export function looksLikeMarkdown(text) {
  return text.length < 100000 && /^#{1,6}\s|^[ \t]{0,12}[-*+]\s|```|\*\*|`/m.test(text);
}
