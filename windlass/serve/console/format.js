// Numbers as people read them.

const integers = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const count = (value) => (value === null || value === undefined ? "–" : integers.format(value));

export function compact(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 1e9) return `${(value / 1e9).toFixed(1)} G`;
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  return value >= 100 || Number.isInteger(value) ? integers.format(value) : value.toFixed(1);
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 86400) return `${Math.floor(value / 86400)} d ${Math.floor((value % 86400) / 3600)} h`;
  if (value >= 3600) return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
  if (value >= 100) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
  if (value >= 1) return `${value.toFixed(value >= 10 ? 1 : 2)} s`;
  if (value >= 0.1) return `${(value * 1e3).toFixed(0)} ms`;
  if (value >= 1e-3) return `${(value * 1e3).toFixed(1)} ms`;
  return value > 0 ? `${(value * 1e6).toFixed(0)} µs` : "0 ms";
}

export const percent = (share) =>
  share === null || share === undefined ? "–" : `${(100 * share).toFixed(share > 0 && share < 0.0995 ? 1 : 0)} %`;

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  let unit = "B";
  for (const next of ["KiB", "MiB", "GiB", "TiB"]) {
    if (Math.abs(value) < 1024) break;
    value /= 1024;
    unit = next;
  }
  return `${unit === "B" ? value : value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0)} ${unit}`;
}

// Three significant digits, at least two decimals: a token costs far less than a cent.
export function dollars(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "$0";
  if (value >= 100) return `$${integers.format(value)}`;
  const digits = Math.max(2, Math.min(12, 2 - Math.floor(Math.log10(value))));
  return `$${value.toFixed(digits).replace(/(\.\d\d\d*?)0+$/, "$1")}`;
}

// A tick of an axis needs no zeros behind the point.
export const tick = (text) => text.replace(/(\.\d*?)0+(?= |$)/, "$1").replace(/\.(?= |$)/, "");

export const clockTime = (epoch) =>
  new Date(epoch * 1000).toLocaleTimeString("en", { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });

export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
