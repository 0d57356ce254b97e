// Checks that tests run in a page. Each expression is a function.
({
  // The basic checks of axe-core: names of controls, unique ids, labels of fields, headings, landmarks, a language, the focus.
  outline() {
    const shown = (e) => e.getClientRects().length > 0;
    const name = (e) => (e.getAttribute("aria-label") || e.textContent || e.title || "").trim();
    const controls = [...document.querySelectorAll("a[href], button, [role=button], svg[tabindex], [role=region], nav")].filter(shown);
    const ids = [...document.querySelectorAll("[id]")].map((e) => e.id);
    const fields = [...document.querySelectorAll("input, select, textarea")].filter(shown);
    return {
      unnamed: controls.filter((e) => !name(e)).map((e) => e.outerHTML.slice(0, 120)),
      doubled: ids.filter((id, n) => ids.indexOf(id) !== n),
      unlabelled: fields.filter((e) => !e.getAttribute("aria-label") && !e.closest("label")).map((e) => e.outerHTML.slice(0, 120)),
      h1: document.querySelectorAll("h1").length,
      main: document.querySelectorAll("main").length,
      lang: document.documentElement.lang,
      focus: document.activeElement.tagName,
    };
  },

  // Texts whose contrast to their background is below 4.5 (WCAG 2.2, 1.4.3).
  pale() {
    const parse = (text) => {
      const n = text.match(/[\d.]+/g).map(Number), scale = text.startsWith("color(srgb") ? 255 : 1;
      return [n[0] * scale, n[1] * scale, n[2] * scale, n[3] ?? 1];
    };
    const over = (top, under) => [0, 1, 2].map((i) => top[i] * top[3] + under[i] * (1 - top[3])).concat(1);
    const linear = (v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
    const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
    const ground = (e) => {
      const layers = [];
      for (let at = e; at; at = at.parentElement) layers.push(parse(getComputedStyle(at).backgroundColor));
      return layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255, 1]);
    };
    const pale = new Set();
    for (const e of document.querySelectorAll("body *")) {
      const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
      if (!own || !e.getClientRects().length || e.closest("[disabled], .tokens, svg")) continue;
      const under = ground(e), ink = over(parse(getComputedStyle(e).color), under);
      const [a, b] = [light(ink), light(under)].sort((x, y) => y - x), ratio = (a + 0.05) / (b + 0.05);
      if (ratio < 4.5) pale.add(`${ratio.toFixed(2)} ${e.tagName}.${e.className} ${e.textContent.slice(0, 40)}`);
    }
    return [...pale];
  },

  // Bytes of the page and of everything that it loaded.
  weight() {
    const loaded = [...performance.getEntriesByType("resource"), ...performance.getEntriesByType("navigation")];
    return loaded.reduce((sum, entry) => sum + entry.decodedBodySize, 0);
  },

  // Inserts a picture with a handler, as a defect of a page might.
  insertPicture() {
    const picture = document.createElement("img");
    picture.src = "http://evil.example/x";
    document.body.append(picture);
    try {
      picture.setAttribute("onerror", "window.owned = 1");
      return "";
    } catch (error) {
      return error.name;
    }
  },

  refusesMarkup() {
    try {
      document.body.innerHTML = "<b>x</b>";
      return "";
    } catch (error) {
      return error.name;
    }
  },
})
