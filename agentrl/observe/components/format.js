// Numbers and times as text.

export function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e7)) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
}

export function count(value) {
  if (value === null || value === undefined) return "–";
  for (const [least, size, unit] of [[999.5e9, 1e12, "T"], [999.5e6, 1e9, "B"], [999.5e3, 1e6, "M"], [1e4, 1e3, "k"]]) {
    if (value >= least) return `${Number((value / size).toPrecision(3))}${unit}`;
  }
  return Math.round(value).toLocaleString("en");
}

export function percent(value, digits = 1) {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(digits)}%`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 10) return `${seconds.toFixed(seconds < 1 ? 2 : 1)} s`;
  const whole = Math.round(seconds), minutes = Math.floor(whole / 60), rest = whole % 60;
  if (minutes < 1) return `${rest} s`;
  return minutes < 60 ? `${minutes} min ${String(rest).padStart(2, "0")} s` : `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

export function ago(seconds) {
  const passed = Date.now() / 1000 - seconds;
  if (passed < 60) return "just now";
  if (passed < 3600) return `${Math.floor(passed / 60)} min ago`;
  if (passed < 48 * 3600) return `${Math.floor(passed / 3600)} h ago`;
  return `${Math.floor(passed / 86400)} days ago`;
}

export function signed(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  const text = number(Math.abs(value), digits);
  return value > 0 ? `+${text}` : value < 0 ? `−${text}` : text;
}

export const FORMS = {
  plain: (value) => number(value, 3),
  count,
  whole: (value) => number(value),
  round: (value) => Math.round(value).toLocaleString("en"),
  exponent: (value) => (value ? value.toExponential(0) : "0"),
  rate: (value) => value.toFixed(2),
  percent: (value) => percent(value, 0),
};
