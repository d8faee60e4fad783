// Figures of several configurations as drawings: every run as a dot, mean and standard deviation as
// bar and whisker; and parallel coordinates. Needs dom.js.
const HUES = 12;
const hue = (place) => `c${place % HUES}`;

// Round numbers that cover [low, high] in about `count` parts.
function ticks(low, high, count) {
  const span = high - low || Math.abs(high) || 1;
  const rough = span / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step) {
    found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  }
  return found;
}

function tickWords(value) {
  const size = Math.abs(value);
  if (size >= 10_000) return value.toExponential(0);
  return String(Number(value.toPrecision(4)));
}

// One figure: a row per configuration. value(spread) has mean, std, values.
function spreadChart(title, help, rows, show, width) {
  const left = 8, right = 52, row = 20, top = 4;
  const known = rows.filter((r) => r.figure?.values);
  const all = known.flatMap((r) => r.figure.values.filter((v) => v !== null));
  const high = Math.max(...all, ...known.map((r) => r.figure.mean + (r.figure.std ?? 0))) * 1.04 || 1;
  const height = top + row * rows.length + 18;
  const x = (value) => left + (width - left - right) * (value / high);
  const svg = s("svg", { width, height, role: "img", "aria-label": title });
  for (const at of ticks(0, high, 4)) {
    svg.append(s("line", { class: "grid", x1: x(at), x2: x(at), y1: top, y2: top + row * rows.length }),
      s("text", { class: "tick", x: x(at), y: height - 4, "text-anchor": "middle" }, tickWords(at)));
  }
  rows.forEach(({ place, name, figure }, i) => {
    const y = top + row * i + row / 2;
    if (!figure?.values) {
      svg.append(s("text", { class: "tick", x: left + 4, y: y + 4 }, DASH));
      return;
    }
    const { mean, std, values } = figure;
    const bar = s("rect", { class: `bar ${hue(place)}`, x: left, y: y - 6,
      width: Math.max(1, x(mean) - left), height: 12, rx: 2 });
    bar.append(s("title", {}, `${name}: ${spreadWords(figure, show)} over ${plural(figure.num_runs, "run")}`));
    svg.append(bar);
    if (std !== null) {
      svg.append(s("path", { class: "whisker", d: `M${x(Math.max(0, mean - std))},${y}H${x(mean + std)}`
        + `M${x(Math.max(0, mean - std))},${y - 3}v6M${x(mean + std)},${y - 3}v6` }));
    }
    if (values.length > 1) for (const value of values) {
      if (value !== null) svg.append(s("circle", { class: `dot ${hue(place)}`, cx: x(value), cy: y, r: 2.4 }));
    }
    svg.append(s("text", { class: "value", x: width - 2, y: y + 4, "text-anchor": "end" }, show(mean)));
  });
  return h("figure", { class: "chart", tabindex: "0" },
    h("figcaption", { title: help }, title), svg);
}

const PARTS = ["draft", "verify", "accept", "other"];

// Where the time of a step goes: one stacked bar per configuration.
function splitChart(help, rows, width) {
  const left = 8, right = 52, row = 20, top = 4;
  const total = (split) => PARTS.reduce((sum, part) => sum + (split[`${part}_s`] ?? 0), 0);
  const high = Math.max(...rows.map((r) => total(r.split)), 1e-9) * 1.04;
  const height = top + row * rows.length + 18;
  const x = (seconds) => left + (width - left - right) * (seconds / high);
  const svg = s("svg", { width, height, role: "img", "aria-label": "time of a step" });
  for (const at of ticks(0, 1000 * high, 4)) {
    svg.append(s("text", { class: "tick", x: x(at / 1000), y: height - 4, "text-anchor": "middle" }, tickWords(at)));
  }
  rows.forEach(({ name, split }, i) => {
    let at = 0;
    const y = top + row * i + row / 2;
    for (const part of PARTS) {
      const seconds = split[`${part}_s`] ?? 0;
      const piece = s("rect", { class: `part ${part}`, x: x(at), y: y - 6,
        width: Math.max(0, x(at + seconds) - x(at)), height: 12 });
      piece.append(s("title", {}, `${name}: ${part} ${milliseconds(1000 * seconds)} ms`));
      svg.append(piece);
      at += seconds;
    }
    svg.append(s("text", { class: "value", x: width - 2, y: y + 4, "text-anchor": "end" },
      milliseconds(1000 * at)));
  });
  const legend = h("span", { class: "legend" }, ...PARTS.map((part) =>
    h("span", {}, h("i", { class: `part ${part}` }), part)));
  return h("figure", { class: "chart", tabindex: "0" },
    h("figcaption", { title: help }, "ms per step ", legend), svg);
}

// A line per run over an axis per setting and figure. Drag along an axis to keep a part of it.
class ParallelLines {
  // onOpen(id)
  constructor(onOpen) {
    this.onOpen = onOpen;
    this.frame = h("div", { class: "lines" });
    this.tip = h("div", { class: "tip", hidden: true });
    this.host = h("div", { class: "parallel" }, this.frame, this.tip);
    this.kept = new Map();
    new ResizeObserver(() => this.draw()).observe(this.frame);
  }

  // axes: [{ title, help, values, words }], words: [text] where values are places in it.
  show(lines, axes, titles) {
    this.lines = lines;
    this.axes = axes;
    this.titles = titles;
    this.kept.clear();
    this.drawn = 0;
    this.draw();
  }

  draw() {
    const room = this.frame.clientWidth;
    if (!this.axes || !room || this.drawn === room) return;
    this.drawn = room;
    const top = 48, bottom = 14, height = 274, side = 70;
    const width = Math.max(room, 2 * side + 92 * (this.axes.length - 1));
    const step = this.axes.length > 1 ? (width - 2 * side) / (this.axes.length - 1) : 0;
    this.scales = this.axes.map((axis, i) => this.scale(axis, side + step * i, top, height - bottom));
    const svg = s("svg", { width, height, role: "img", "aria-label": "parallel coordinates" });
    this.paths = this.lines.runs.map((id, run) => this.path(id, run));
    svg.append(...this.paths.filter(Boolean), ...this.scales.map((scale, i) => this.axis(scale, i, top, height - bottom)));
    this.frame.replaceChildren(svg);
    this.fade();
  }

  scale(axis, x, top, bottom) {
    const values = axis.values.filter((value) => value !== null);
    let low = Math.min(...values), high = Math.max(...values);
    const only = low === high && !axis.words;
    if (low === high) { low -= 0.5; high += 0.5; }
    if (axis.words) { low -= 0.3; high += 0.3; }
    const y = (value) => bottom - (bottom - top) * (value - low) / (high - low);
    const value = (at) => low + (high - low) * (bottom - at) / (bottom - top);
    return { ...axis, x, y, value, low, high, only };
  }

  path(id, run) {
    const points = this.scales.filter((scale) => scale.values[run] !== null)
      .map((scale) => `${scale.x},${scale.y(scale.values[run]).toFixed(1)}`);
    if (points.length < 2) return null;
    const place = this.lines.setups[run];
    const path = s("path", { class: `run ${hue(place)}`, d: `M${points.join("L")}`, "data-run": id,
      onclick: () => this.onOpen(id),
      onpointerenter: (event) => this.hover(run, event), onpointerleave: () => this.leave() });
    return path;
  }

  // Titles take turns in two rows, so that neighbours have room.
  axis(scale, i, top, bottom) {
    const { x, words } = scale;
    const labels = words ? words.map((word, i) => [i, clip(word, 18)])
      : scale.only ? [[(scale.low + scale.high) / 2, tickWords((scale.low + scale.high) / 2)]]
        : ticks(scale.low, scale.high, 5).map((at) => [at, tickWords(at)]);
    const band = s("rect", { class: "band", x: x - 7, width: 14, y: top, height: bottom - top });
    const mark = s("rect", { class: "kept", x: x - 7, width: 14, y: top, height: 0 });
    scale.mark = mark;
    band.addEventListener("pointerdown", (event) => this.drag(scale, event, top, bottom));
    const title = s("text", { class: "title", x, y: i % 2 ? 29 : 14, "text-anchor": "middle" }, clip(scale.title, 20));
    title.append(s("title", {}, `${scale.title}${scale.help ? `: ${scale.help}` : ""}`));
    return s("g", { class: "axis" }, s("line", { x1: x, x2: x, y1: top, y2: bottom }), mark,
      ...labels.map(([at, word]) => s("text", { class: "tick", x: x + 9, y: scale.y(at) + 3.5 }, word)),
      band, title);
  }

  drag(scale, event, top, bottom) {
    const box = this.frame.querySelector("svg").getBoundingClientRect();
    const at = (moved) => Math.min(bottom, Math.max(top, moved.clientY - box.top));
    const from = at(event);
    event.target.setPointerCapture(event.pointerId);
    this.kept.delete(scale.title);
    const move = (moved) => {
      const [low, high] = [scale.value(Math.max(from, at(moved))), scale.value(Math.min(from, at(moved)))];
      if (Math.abs(from - at(moved)) > 3) this.kept.set(scale.title, [low, high]);
      this.fade();
    };
    const up = () => {
      event.target.removeEventListener("pointermove", move);
      event.target.removeEventListener("pointerup", up);
      this.fade();
    };
    event.target.addEventListener("pointermove", move);
    event.target.addEventListener("pointerup", up);
  }

  fade() {
    for (const scale of this.scales) {
      const kept = this.kept.get(scale.title);
      scale.mark.setAttribute("height", kept ? scale.y(kept[0]) - scale.y(kept[1]) : 0);
      if (kept) scale.mark.setAttribute("y", scale.y(kept[1]));
    }
    this.paths.forEach((path, run) => path?.classList.toggle("faded", !this.isKept(run)));
  }

  isKept(run) {
    return this.scales.every((scale) => {
      const kept = this.kept.get(scale.title), value = scale.values[run];
      return !kept || (value !== null && value >= kept[0] && value <= kept[1]);
    });
  }

  hover(run, event) {
    this.paths[run].parentNode.insertBefore(this.paths[run], this.frame.querySelector(".axis"));
    this.paths[run].classList.add("hot");
    const rows = this.scales.map((scale) => {
      const value = scale.values[run];
      const words = value === null ? DASH : scale.words ? scale.words[value] : tickWords(value);
      return h("div", {}, `${scale.title} `, h("b", {}, clip(words, 40)));
    });
    this.tip.replaceChildren(h("div", { class: hue(this.lines.setups[run]) },
      this.titles[this.lines.setups[run]]), ...rows);
    const box = this.host.getBoundingClientRect();
    this.tip.style.left = `${Math.min(event.clientX - box.left + 12, box.width - 210)}px`;
    this.tip.style.top = `${event.clientY - box.top + 12}px`;
    this.tip.hidden = false;
  }

  leave() {
    for (const path of this.paths) path?.classList.remove("hot");
    this.tip.hidden = true;
  }
}
