// Draws the charts of a report, whose figures contain their data.

import { lineChart } from "./chart.js";

for (const figure of document.querySelectorAll("figure[data-chart]")) {
  const { series, ...options } = JSON.parse(figure.dataset.chart), width = figure.clientWidth || 640;
  figure.replaceWith(lineChart(series, { ...options, width, height: width < 500 ? Math.min(options.height, 220) : options.height }));
}
