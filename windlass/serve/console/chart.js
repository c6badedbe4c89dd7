// A line chart over time, drawn as SVG, with a crosshair that shows the values at the pointer.

import { h, svg } from "./dom.js";
import { clockTime, tick } from "./format.js";

const HEIGHT = 132;
const PAD = { top: 10, right: 4, bottom: 20, left: 50 };

// `series`: [{ key, label, color: 1 to 5, area }]; `format` writes a value; `max`: a fixed upper limit.
export class Chart {
  constructor({ title, hint, series, format, max = null, headline = null }) {
    Object.assign(this, { series, format, max, title, headline, samples: [], windowS: 300 });
    this.value = h("strong", { class: "chart-value" }, "–");
    this.plot = svg("svg", { class: "plot", height: HEIGHT, role: "img", tabindex: "0" });
    this.tip = h("div", { class: "tip", hidden: true });
    this.note = h("span", {});
    const legend = series.length > 1 && h("ul", { class: "legend" }, series.map((each) => h("li", { class: `c${each.color}` }, each.label)));
    this.element = h(
      "section",
      { class: "card chart", "aria-label": title },
      h("header", {}, h("h2", { title: hint }, title), this.value),
      h("div", { class: "plot-box" }, this.plot, this.tip, h("p", { class: "chart-empty" }, this.note)),
      legend || h("p", { class: "legend hint" }, hint),
    );
    this.plot.addEventListener("pointermove", (event) => this.showAt(event.offsetX));
    this.plot.addEventListener("pointerleave", () => this.hideTip());
    this.plot.addEventListener("blur", () => this.hideTip());
    this.plot.addEventListener("keydown", (event) => this.onKey(event));
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  update(samples, windowS, emptyText = "No data yet") {
    Object.assign(this, { samples, windowS, emptyText });
    this.draw();
  }

  draw() {
    const width = this.plot.clientWidth;
    if (!width) return; // the view is hidden
    const now = this.samples.at(-1)?.time ?? Date.now() / 1000;
    const shown = this.samples.filter((sample) => sample.time >= now - this.windowS);
    const values = shown.flatMap((sample) => this.series.map((each) => sample[each.key])).filter((value) => value !== null);
    const top = this.max ?? niceMax(Math.max(...values, 0));
    this.scale = {
      x: (time) => PAD.left + ((time - now) / this.windowS + 1) * (width - PAD.left - PAD.right),
      y: (value) => PAD.top + (1 - Math.min(value, top) / top) * (HEIGHT - PAD.top - PAD.bottom),
    };
    this.shown = shown;
    this.plot.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.plot.replaceChildren(...this.axes(width, top), ...this.series.flatMap((each) => this.lines(each)));
    this.note.textContent = values.length ? "" : this.emptyText;
    this.sayLatest();
    if (this.pointerX !== undefined) this.showAt(this.pointerX);
  }

  sayLatest() {
    const latest = this.samples.at(-1);
    const text = (each) => this.format(latest?.[each.key] ?? null);
    this.value.textContent = latest && this.headline ? this.headline(latest) : text(this.series[0]);
    this.plot.setAttribute("aria-label", `${this.title}: ${this.series.map((each) => `${each.label} ${text(each)}`).join(", ")}`);
  }

  axes(width, top) {
    const { y } = this.scale;
    const grid = [0, 0.5, 1].map((share) => {
      const at = y(share * top);
      return [
        svg("line", { class: "grid", x1: PAD.left, x2: width - PAD.right, y1: at, y2: at }),
        svg("text", { class: "tick", x: PAD.left - 8, y: at + 4, "text-anchor": "end" }, tick(this.format(share * top))),
      ];
    });
    const ago = this.windowS >= 120 ? `${this.windowS / 60} min ago` : `${this.windowS} s ago`;
    return [
      ...grid.flat(),
      svg("text", { class: "tick", x: PAD.left, y: HEIGHT - 4 }, ago),
      svg("text", { class: "tick", x: width - PAD.right, y: HEIGHT - 4, "text-anchor": "end" }, "now"),
    ];
  }

  // One path per stretch without a gap.
  lines({ key, color, area }) {
    const { x, y } = this.scale;
    const stretches = [[]];
    let last = null;
    for (const sample of this.shown) {
      const isGap = sample[key] === null || (last && sample.time - last.time > 10);
      if (isGap && stretches.at(-1).length) stretches.push([]);
      if (sample[key] !== null) stretches.at(-1).push([x(sample.time), y(sample[key])]);
      last = sample;
    }
    return stretches.filter((points) => points.length).flatMap((points) => {
      if (points.length === 1) return [svg("circle", { class: `dot c${color}`, cx: points[0][0], cy: points[0][1], r: 2 })];
      const d = `M${points.map(([px, py]) => `${px.toFixed(1)} ${py.toFixed(1)}`).join("L")}`;
      const line = svg("path", { class: `line c${color}`, d });
      if (!area) return [line];
      const base = y(0);
      return [svg("path", { class: `area c${color}`, d: `${d}L${points.at(-1)[0]} ${base}L${points[0][0]} ${base}Z` }), line];
    });
  }

  showAt(px) {
    if (!this.shown?.length) return;
    this.pointerX = px;
    const distance = (sample) => Math.abs(this.scale.x(sample.time) - px);
    const sample = this.shown.reduce((best, each) => (distance(each) < distance(best) ? each : best));
    const at = this.scale.x(sample.time);
    this.plot.querySelector(".cross")?.remove();
    const dots = this.series
      .filter((each) => sample[each.key] !== null)
      .map((each) => svg("circle", { class: `dot c${each.color}`, cx: at, cy: this.scale.y(sample[each.key]), r: 3 }));
    this.plot.append(svg("g", { class: "cross" }, svg("line", { x1: at, x2: at, y1: PAD.top, y2: HEIGHT - PAD.bottom }), dots));
    const rows = this.series.map((each) => h("div", { class: `c${each.color}` }, h("span", {}, each.label), h("b", {}, this.format(sample[each.key]))));
    this.tip.replaceChildren(h("time", {}, clockTime(sample.time)), ...rows);
    this.tip.hidden = false;
    const room = this.plot.clientWidth - this.tip.offsetWidth;
    this.tip.style.left = `${Math.max(0, Math.min(room, at > room / 1.6 ? at - this.tip.offsetWidth - 10 : at + 10))}px`;
  }

  hideTip() {
    this.pointerX = undefined;
    this.tip.hidden = true;
    this.plot.querySelector(".cross")?.remove();
  }

  onKey(event) {
    const step = { ArrowLeft: -8, ArrowRight: 8 }[event.key];
    if (!step) return;
    event.preventDefault();
    const width = this.plot.clientWidth;
    this.showAt(Math.max(PAD.left, Math.min(width - PAD.right, (this.pointerX ?? width) + step)));
  }
}

// The next of 1, 2, 5, 10, … above a value.
function niceMax(value) {
  if (value <= 0) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((factor) => factor * unit).find((limit) => limit >= value);
}
