"use strict";
// Draws the page's charts from the data in it: curves and stacked bars over steps, as SVG that follows the width of its place,
// with a read-out under the pointer (or the arrow keys) and a line at the same step in all others.

const NS = "http://www.w3.org/2000/svg";
const data = JSON.parse(document.getElementById("data").textContent);
const HEIGHT = 220, LEFT = 72, RIGHT = 14, TOP = 12, BOTTOM = 40;
const AROUND = 5; // steps before and after a step that its moving mean takes
const FEW = 40; // points, up to which each is drawn as a dot as well
const BEYOND = 2.5; // times what 95% of the bars stay under: a bar that is higher (a first step that compiles) ends at the edge
const charts = [];

const x = (point) => (point.length === 2 ? point[0] : (point[0] + point[1]) / 2);
const y = (point) => (point.length === 2 ? point[1] : point[2]);

function svg(name, attributes, parent, text) {
  const node = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

function html(name, className, parent, text) {
  const node = document.createElement(name);
  node.className = className;
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

function shown(value) {
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(4)));
}

function ticks(low, high, count) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((size) => size >= raw * 0.999);
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) found.push(Number((n * step).toPrecision(12)));
  return found;
}

function logTicks(low, high) {
  const found = [], first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  const every = Math.ceil((last - first) / 6), parts = last - first <= 2 ? [1, 2, 5] : [1];
  for (let power = first; power <= last; power += every) found.push(...parts.map((part) => part * 10 ** power));
  return found.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
}

function movingMean(points) {
  return points.map((point, i) => {
    const held = points.slice(Math.max(0, i - AROUND), i + AROUND + 1);
    return [point[0], held.reduce((sum, other) => sum + other[1], 0) / held.length];
  });
}

function nearest(points, step) {
  let low = 0, high = points.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (x(points[middle]) < step) low = middle + 1; else high = middle;
  }
  return low > 0 && step - x(points[low - 1]) < x(points[low]) - step ? points[low - 1] : points[low];
}

const stepName = (point) => (point.length === 2 ? `step ${point[0]}` : `steps ${point[0]} to ${point[1]}`);

class Chart {
  constructor(figure, spec) {
    Object.assign(this, { figure, spec, log: false });
    const head = html("figcaption", "", figure);
    this.title = html("span", "title", head, spec.kind === "stack" && data.runs.length > 1 ? `${spec.title}, ${data.runs[spec.run]}` : spec.title);
    this.button = html("button", "scale", head);
    this.button.type = "button";
    this.button.hidden = true;
    this.button.onclick = () => { this.log = !this.log; this.draw(); };
    this.legend = html("div", "legend", figure);
    this.place = html("div", "plot", figure);
    this.tip = html("div", "tip", this.place);
    this.tip.hidden = true;
    this.place.addEventListener("pointermove", (event) => this.point(this.stepAt(event)));
    this.place.addEventListener("pointerleave", () => this.leave());
    this.measure();
    this.label();
    this.draw();
    new ResizeObserver(() => { if (this.place.clientWidth !== this.width) this.draw(); }).observe(this.place);
  }

  draw() {
    this.width = this.place.clientWidth;
    if (!this.width) return; // in a part of the page that is folded up
    this.svg?.remove();
    this.svg = svg("svg", { width: this.width, height: HEIGHT, role: "img", tabindex: 0, "aria-label": this.spoken() }, this.place);
    this.svg.addEventListener("keydown", (event) => this.key(event));
    this.svg.addEventListener("blur", () => this.leave());
    this.axes();
    this.marks();
    this.cross = svg("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" }, this.svg);
  }

  px(step) { return LEFT + ((step - this.x0) / (this.x1 - this.x0)) * (this.width - LEFT - RIGHT); }

  py(value) {
    const [low, high, at] = this.log ? [this.y0, this.y1, value].map(Math.log10) : [this.y0, this.y1, value];
    return HEIGHT - BOTTOM - ((at - low) / (high - low)) * (HEIGHT - BOTTOM - TOP);
  }

  axes() {
    const right = this.width - RIGHT, bottom = HEIGHT - BOTTOM;
    for (const tick of this.log ? logTicks(this.y0, this.y1) : ticks(this.y0, this.y1, 5)) {
      const at = this.py(tick);
      svg("line", { class: "grid", x1: LEFT, x2: right, y1: at, y2: at }, this.svg);
      svg("text", { class: "tick", x: LEFT - 6, y: at + 4, "text-anchor": "end" }, this.svg, shown(tick));
    }
    svg("line", { class: "axis", x1: LEFT, x2: right, y1: bottom, y2: bottom }, this.svg);
    const low = this.x0 + this.inset, high = this.x1 - this.inset;
    const whole = high - low < 1 ? [Math.round(low)] : ticks(low, high, Math.max(2, this.width / 110)).filter(Number.isInteger);
    for (const tick of whole) {
      svg("line", { class: "axis", x1: this.px(tick), x2: this.px(tick), y1: bottom, y2: bottom + 4 }, this.svg);
      svg("text", { class: "tick", x: this.px(tick), y: bottom + 17, "text-anchor": "middle" }, this.svg, tick.toLocaleString("en"));
    }
    svg("text", { class: "unit", x: (LEFT + right) / 2, y: HEIGHT - 5, "text-anchor": "middle" }, this.svg, this.spec.x);
    const turned = { class: "unit", transform: `translate(11 ${(TOP + bottom) / 2}) rotate(-90)`, "text-anchor": "middle" };
    svg("text", turned, this.svg, this.spec.unit);
  }

  stepAt(event) {
    const at = event.clientX - this.place.getBoundingClientRect().left;
    return this.x0 + ((at - LEFT) / (this.width - LEFT - RIGHT)) * (this.x1 - this.x0);
  }

  point(step) {
    const lines = this.read(step);
    if (!lines) return this.leave();
    this.at = lines.step;
    for (const chart of charts) if (chart.spec.x === this.spec.x) chart.mark(lines.step);
    this.tip.replaceChildren();
    html("b", "", this.tip, lines.head);
    for (const [swatch, text] of lines.rows) {
      const row = html("div", "", this.tip);
      row.append(swatch, text);
    }
    this.tip.hidden = false;
    const left = this.px(lines.step), wide = this.tip.offsetWidth;
    this.tip.style.left = `${left + 12 + wide > this.width ? Math.max(0, left - 12 - wide) : left + 12}px`;
  }

  mark(step) {
    if (!this.cross) return;
    const inside = step >= this.x0 && step <= this.x1;
    this.cross.setAttribute("visibility", inside ? "visible" : "hidden");
    this.cross.setAttribute("x1", this.px(step));
    this.cross.setAttribute("x2", this.px(step));
  }

  leave() {
    this.tip.hidden = true;
    for (const chart of charts) chart.cross?.setAttribute("visibility", "hidden");
  }

  key(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const step = (this.at ?? this.x0) + by * this.spec.width;
    this.point(Math.min(this.x1 - this.inset, Math.max(this.x0 + this.inset, step)));
  }
}

function swatch(className, filled) {
  const icon = document.createElementNS(NS, "svg");
  icon.setAttribute("class", "swatch");
  icon.setAttribute("viewBox", "0 0 18 10");
  if (filled === "dot") svg("circle", { class: className, cx: 9, cy: 5, r: 4 }, icon);
  else if (filled) svg("rect", { class: className, x: 4, y: 0, width: 10, height: 10, rx: 2 }, icon);
  else svg("line", { class: className, x1: 0, x2: 18, y1: 5, y2: 5 }, icon);
  return icon;
}

class Lines extends Chart {
  measure() {
    const all = this.spec.series.flatMap((series) => series.points);
    const bad = this.spec.series.flatMap((series) => series.bad);
    const steps = [...all.map(x), ...bad], low = Math.min(...steps), high = Math.max(...steps);
    this.inset = high > low ? 0 : 0.5;
    [this.x0, this.x1] = [low - this.inset, high + this.inset];
    const ends = all.flatMap((point) => (point.length === 2 ? [point[1]] : [point[3], point[4]]));
    [this.least, this.most] = ends.length ? [Math.min(...ends), Math.max(...ends)] : [0, 1];
    this.button.hidden = !(this.least > 0 && this.most / this.least > 3);
    this.log = this.spec.log && !this.button.hidden;
  }

  draw() {
    const spread = this.most - this.least || 10 * (Math.abs(this.most) || 1); // a constant lies in the middle of the axis' first tenths
    const low = this.spec.zero && this.least >= 0 ? 0 : this.least - spread * 0.06;
    [this.y0, this.y1] = this.log ? [this.least / 1.2, this.most * 1.2] : [low, this.most + spread * 0.06];
    this.button.textContent = this.log ? "linear axis" : "log axis";
    super.draw();
  }

  colour(series) {
    return data.runs.length > 1 ? `run${series.run} dash${series.metric}` : `metric${series.metric}`;
  }

  name(series) {
    if (data.runs.length === 1) return series.label;
    const several = new Set(this.spec.series.map((other) => other.label)).size > 1;
    return several ? `${data.runs[series.run]}: ${series.label}` : data.runs[series.run];
  }

  smooth(series) { return series.style === "smooth" && this.spec.width === 1 && series.points.length > 4 * AROUND; }

  label() {
    for (const series of this.spec.series) {
      const item = html("span", "", this.legend), dots = series.style === "dots";
      item.append(swatch(`${dots ? "dot" : "curve"} ${this.colour(series)}`, dots && "dot"), this.name(series));
      if (series.bad.length) html("span", "bad", item, ` × ${series.bad.length} NaN or infinite`);
    }
    const smooth = this.spec.series.some((series) => this.smooth(series));
    if (smooth) html("span", "quiet", this.title, ` bold: mean of ${2 * AROUND + 1} steps`);
  }

  spoken() {
    const told = this.spec.series.filter((series) => series.points.length).map((series) => {
      const [first, last] = [series.points[0], series.points.at(-1)];
      return `${this.name(series)} from ${shown(y(first))} at ${stepName(first)} to ${shown(y(last))} at ${stepName(last)}`;
    });
    return `${this.spec.title}, ${this.spec.unit}: ${told.join("; ")}`;
  }

  path(points, gaps = []) { // it breaks off where a step has no number
    return points.map((point, i) => {
      const apart = i === 0 || gaps.some((step) => step > x(points[i - 1]) && step < x(point));
      return `${apart ? "M" : "L"}${this.px(x(point)).toFixed(1)} ${this.py(y(point)).toFixed(1)}`;
    }).join("");
  }

  marks() {
    for (const series of this.spec.series) {
      const { points } = series, colour = this.colour(series);
      if (this.spec.width > 1 && points[0]?.length > 2) {
        const upper = points.map((point) => [x(point), point[4]]), lower = points.map((point) => [x(point), point[3]]).reverse();
        svg("path", { class: `band ${colour}`, d: `${this.path([...upper, ...lower])}Z` }, this.svg);
      }
      if (series.style !== "dots") {
        const smooth = this.smooth(series);
        svg("path", { class: `curve ${colour}${smooth ? " faint" : ""}`, d: this.path(points, series.bad) }, this.svg);
        if (smooth) svg("path", { class: `curve bold ${colour}`, d: this.path(movingMean(points), series.bad) }, this.svg);
      }
      if (points.length <= FEW) {
        const radius = series.style === "dots" ? 4.5 : 2.5;
        for (const point of points) svg("circle", { class: `dot ${colour}`, cx: this.px(x(point)), cy: this.py(y(point)), r: radius }, this.svg);
      }
      for (const step of series.bad) {
        const cross = svg("text", { class: "bad", x: this.px(step), y: TOP + 4, "text-anchor": "middle" }, this.svg, "×");
        svg("title", {}, cross, `${this.name(series)} is NaN or infinite at step ${step}`);
      }
    }
  }

  read(step) {
    const curves = this.spec.series.filter((series) => series.points.length && series.style !== "dots");
    const closest = curves.map((series) => nearest(series.points, step)).sort((a, b) => Math.abs(x(a) - step) - Math.abs(x(b) - step))[0];
    const anchor = closest ?? this.spec.series.flatMap((series) => series.points)[0];
    if (!anchor) return null;
    const rows = [];
    for (const series of this.spec.series) {
      if (!series.points.length) continue;
      const point = nearest(series.points, x(anchor)), dots = series.style === "dots";
      if (Math.abs(x(point) - x(anchor)) > (dots ? Math.max(1, this.spec.width) : this.spec.width / 2)) continue;
      const range = point.length === 2 ? "" : ` (${shown(point[3])} to ${shown(point[4])})`;
      rows.push([swatch(`${dots ? "dot" : "curve"} ${this.colour(series)}`, dots && "dot"), `${shown(y(point))}${range}  ${this.name(series)}`]);
    }
    return { step: x(anchor), head: stepName(anchor), rows };
  }
}

class Stack extends Chart {
  measure() {
    this.columns = this.spec.layers[0].points.map((point, i) => ({ point, total: this.spec.layers.reduce((sum, layer) => sum + y(layer.points[i]), 0) }));
    this.inset = this.spec.width / 2;
    const steps = data.charts.filter((spec) => spec.kind === "stack").flatMap((spec) => spec.layers[0].points.map(x));
    [this.x0, this.x1] = [Math.min(...steps) - this.inset, Math.max(...steps) + this.inset];
    const totals = data.charts.filter((spec) => spec.kind === "stack").flatMap(
      (spec) => spec.layers[0].points.map((_, i) => spec.layers.reduce((sum, layer) => sum + y(layer.points[i]), 0)),
    ).sort((a, b) => a - b);
    const usual = totals[Math.floor(0.95 * (totals.length - 1))], most = totals.at(-1);
    [this.y0, this.y1] = [0, (most > BEYOND * usual && totals.length > 4 ? usual * 1.3 : most * 1.05) || 1];
  }

  label() {
    for (const layer of this.spec.layers) {
      const item = html("span", "", this.legend);
      item.append(swatch(`layer ${this.colour(layer)}`, true), layer.label);
    }
    const beyond = this.columns.filter((column) => column.total > this.y1);
    if (beyond.length) {
      const told = beyond.slice(0, 3).map((column) => `${stepName(column.point)} took ${shown(column.total)} s`).join(", ");
      html("span", "quiet", this.legend, `▴ beyond the axis: ${told}${beyond.length > 3 ? `, and ${beyond.length - 3} more` : ""}`);
    }
  }

  colour(layer) { return `phase${layer.colour}`; }

  spoken() {
    const last = this.columns.at(-1);
    return `${this.spec.title}: ${stepName(last.point)} took ${shown(last.total)} seconds; ${this.spec.layers.map((layer) => `${layer.label} ${shown(y(layer.points.at(-1)))}`).join(", ")}`;
  }

  marks() {
    const base = this.columns.map(() => 0), half = this.spec.width / 2, gap = this.columns.length <= 120 ? 0.08 * this.spec.width : 0;
    for (const layer of this.spec.layers) {
      let d = "";
      layer.points.forEach((point, i) => {
        const from = Math.min(base[i], this.y1), to = Math.min((base[i] += y(point)), this.y1);
        if (to <= from) return;
        const left = this.px(x(point) - half + gap).toFixed(1), right = this.px(x(point) + half - gap).toFixed(1);
        d += `M${left} ${this.py(from).toFixed(1)}V${this.py(to).toFixed(1)}H${right}V${this.py(from).toFixed(1)}Z`;
      });
      svg("path", { class: `layer ${this.colour(layer)}`, d }, this.svg);
    }
    for (const { point, total } of this.columns) {
      if (total > this.y1) svg("text", { class: "beyond", x: this.px(x(point)), y: TOP, "text-anchor": "middle" }, this.svg, "▴");
    }
  }

  read(step) {
    const at = this.columns.map((column) => column.point).indexOf(nearest(this.spec.layers[0].points, step));
    const { point, total } = this.columns[at];
    const rows = this.spec.layers.filter((layer) => y(layer.points[at]) > 0).reverse();
    return {
      step: x(point),
      head: `${stepName(point)}: ${shown(total)} s`,
      rows: rows.map((layer) => [swatch(`layer ${this.colour(layer)}`, true), `${shown(y(layer.points[at]))} s  ${layer.label}`]),
    };
  }
}

for (const figure of document.querySelectorAll("figure[data-chart]")) {
  const spec = data.charts[figure.dataset.chart];
  charts.push(new (spec.kind === "stack" ? Stack : Lines)(figure, spec));
}
