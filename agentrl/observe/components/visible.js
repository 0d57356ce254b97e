// Shows text of third parties: characters that hide or reorder text become visible.

const HIDDEN = /[\p{Cc}\p{Cf}\p{Co}\u2028\u2029\uFE00-\uFE0F]/u;
const PIECES = /([\p{Cc}\p{Cf}\p{Co}\u2028\u2029\uFE00-\uFE0F]+)/u;

const escapeOf = (char) => {
  const code = char.codePointAt(0);
  return code < 0x100 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u${code.toString(16).padStart(4, "0")}`;
};

// A fragment with the text; characters that hide or reorder text are shown as escapes.
export function visible(text) {
  const fragment = document.createDocumentFragment();
  if (!HIDDEN.test(text)) {
    fragment.append(text);
    return fragment;
  }
  for (const piece of text.split(PIECES)) {
    if (!piece) continue;
    if (!HIDDEN.test(piece)) {
      fragment.append(piece);
      continue;
    }
    for (const run of piece.split(/([\n\t]+)/)) {
      if (/^[\n\t]/.test(run)) fragment.append(run);
      else if (run) fragment.append(element("span", "hidden-char", Array.from(run, escapeOf).join("")));
    }
  }
  return fragment;
}

export function element(tag, name, ...children) {
  const built = document.createElement(tag);
  if (name) built.className = name;
  built.append(...children);
  return built;
}
