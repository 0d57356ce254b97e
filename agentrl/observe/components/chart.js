// Line charts as SVG: hover or arrow keys select a step, a click or Enter opens it.

import { h, svg } from "./dom.js";
import { FORMS } from "./format.js";

const MARGIN = { left: 46, right: 12, top: 10, bottom: 24 };

function round(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= value * (1 - 1e-9));
}

function ticks(low, high, wanted, least) {
  const step = Math.max(round(high > low ? (high - low) / wanted : 1), least);
  const first = Math.floor(low / step + 1e-9), last = Math.max(Math.ceil(high / step - 1e-9), first + 1);
  return Array.from({ length: last - first + 1 }, (_, n) => (first + n) * step);
}

// `series`: [{label, points: [[x, y]], line?, colour?, intervals?: [[x, low, high]]}]. With `line: false` points are marks.
// `options`: title, form, width, height, y_range, x_name, pick(x), flags: [x].
export function lineChart(series, options) {
  const width = options.width || 640, height = options.height || 200, form = FORMS[options.form || "plain"];
  const xs = series.flatMap((one) => one.points.map((point) => point[0]));
  const ys = series.flatMap((one) => one.points.map((point) => point[1])).concat(series.flatMap((one) => (one.intervals || []).flatMap((item) => [item[1], item[2]])));
  const yTicks = ticks(...(options.y_range || [Math.min(0, ...ys), Math.max(0, ...ys)]), height < 180 ? 3 : 4, options.form === "whole" ? 1 : 0);
  const [low, high] = [yTicks[0], yTicks[yTicks.length - 1]], least = Math.min(...xs), most = Math.max(...xs), pad = most > least ? 0 : 0.5;
  const x = (value) => MARGIN.left + 8 + ((value - least + pad) / (most - least + 2 * pad)) * (width - MARGIN.left - MARGIN.right - 16);
  const y = (value) => height - MARGIN.bottom - ((value - low) / (high - low)) * (height - MARGIN.top - MARGIN.bottom);
  const every = Math.max(1, round((most - least) / Math.max(2, width / 70)));
  const xTicks = ticks(least, most, 1e9, every).filter((tick) => tick >= least && tick <= most);
  const steps = [...new Set(xs)].sort((a, b) => a - b);
  const name = options.x_name || "step";

  const marked = series.filter((one) => one.line === false), apart = (one) => (one.line === false ? 10 * (marked.indexOf(one) - (marked.length - 1) / 2) : 0);

  const drawn = series.map((one, n) => {
    const colour = `c${one.colour || n + 1}`, dx = apart(one), line = one.line !== false && one.points.length > 1;
    const path = one.points.map((point) => `${x(point[0]).toFixed(1)},${y(point[1]).toFixed(1)}`).join("L");
    return svg("g", { class: colour },
      line && svg("path", { class: "line", d: `M${path}` }),
      (one.intervals || []).map(([at, from, to]) => svg("path", { class: "whisker", d: `M${x(at) + dx - 4},${y(to)}h8m-8,${y(from) - y(to)}h8m-4,0V${y(to)}` })),
      (!line || one.points.length <= 60) && one.points.map((point) => svg("circle", { class: line ? "point" : "mark", r: line ? 2.2 : 4.5, cx: x(point[0]) + dx, cy: y(point[1]) })));
  });
  const cursor = svg("line", { class: "cursor", y1: MARGIN.top, y2: height - MARGIN.bottom, x1: -9, x2: -9 });
  const tip = h("div", { class: "tip", hidden: true });
  const flags = (options.flags || []).filter((at) => at >= least && at <= most).map((at) => {
    const point = series[0].points.find((one) => one[0] === at);
    return point && svg("circle", { class: "flag", cx: x(at), cy: y(point[1]), r: 7 });
  });
  const summary = series.map((one) => {
    const last = one.points[one.points.length - 1];
    return `${one.label}: from ${form(one.points[0][1])} at ${name} ${one.points[0][0]} to ${form(last[1])} at ${name} ${last[0]}`;
  }).join("; ");
  const picture = svg("svg", { class: `chart${options.pick ? " picks" : ""}`, viewBox: `0 0 ${width} ${height}`, role: options.pick ? "application" : "img", "data-key": `chart ${options.title}`, tabindex: options.pick ? "0" : null,
    "aria-label": `${options.title}. ${summary}.${options.pick ? " Arrow keys select a step, Enter opens it." : ""}` },
    yTicks.map((tick) => svg("g", null, svg("line", { class: tick === 0 ? "axis" : "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(tick), y2: y(tick) }), svg("text", { x: MARGIN.left - 6, y: y(tick) + 4, "text-anchor": "end" }, form(tick)))),
    xTicks.map((tick) => svg("text", { x: x(tick), y: height - 6, "text-anchor": "middle" }, String(Math.round(tick * 100) / 100))),
    flags, drawn, cursor);

  let selected = null;
  const select = (at) => {
    selected = at;
    cursor.setAttribute("x1", x(at));
    cursor.setAttribute("x2", x(at));
    const values = series.map((one, n) => [one, n, one.points.find((point) => point[0] === at)]).filter((item) => item[2]);
    tip.replaceChildren(h("b", null, `${name} ${at}`), ...values.map(([one, n, point]) => h("span", { class: `c${one.colour || n + 1}` }, `${one.label} ${form(point[1])}`)));
    tip.hidden = false;
    tip.style.setProperty("left", `${(100 * x(at)) / width}%`);
    tip.classList.toggle("left", x(at) > width * 0.6);
  };
  const nearest = (event) => {
    const box = picture.getBoundingClientRect(), at = ((event.clientX - box.left) / box.width) * width;
    return steps.reduce((best, step) => (Math.abs(x(step) - at) < Math.abs(x(best) - at) ? step : best), steps[0]);
  };
  const leave = () => {
    tip.hidden = true;
    cursor.setAttribute("x1", -9);
    cursor.setAttribute("x2", -9);
  };
  picture.addEventListener("pointermove", (event) => select(nearest(event)));
  picture.addEventListener("pointerleave", leave);
  picture.addEventListener("blur", leave);
  if (options.pick) {
    picture.addEventListener("click", (event) => options.pick(nearest(event)));
    picture.addEventListener("keydown", (event) => {
      const at = steps.indexOf(selected);
      if (event.key === "ArrowRight") select(steps[Math.min(steps.length - 1, at + 1)]);
      else if (event.key === "ArrowLeft") select(steps[at < 0 ? steps.length - 1 : Math.max(0, at - 1)]);
      else if (event.key === "Enter" && selected !== null) options.pick(selected);
      else return;
      event.preventDefault();
    });
  }
  const legend = series.length > 1 && h("div", { class: "legend" }, series.map((one, n) => h("span", null, h("i", { class: `key c${one.colour || n + 1}${one.line === false ? " dot" : ""}` }), one.label)));
  return h("figure", { class: "figure" }, legend, h("div", { class: "plot" }, picture, tip));
}

// Bars that add up to a whole: [{label, value, style}].
export function stackedBar(parts, label) {
  const total = parts.reduce((sum, part) => sum + part.value, 0) || 1;
  return h("div", { class: "stack", role: "img", "aria-label": `${label}: ${parts.map((part) => `${part.label} ${Math.round((100 * part.value) / total)}%`).join(", ")}` },
    parts.map((part) => h("span", { class: part.style, style: { width: `${(100 * part.value) / total}%` }, title: `${part.label}: ${((100 * part.value) / total).toFixed(1)}%` })));
}
