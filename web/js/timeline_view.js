// The widget's element: summary, arms, chart (a canvas), details of the pinned bar. Knows the DOM, not ComfyUI.
import { Axis, barFacts, barTitle, readEvents, shareWords, summaryWords, tickWords, timeWords, uncovered } from "./timeline_data.js";

// The colours of ltx_runtime/pictures.py, by phase or its first part.
const COLOURS = {
  load: [120, 134, 156], prepare: [86, 160, 168], "sample.step": [58, 110, 196], "sample.replay": [34, 139, 84],
  "sample.measure": [214, 170, 28], "sample.warmup": [238, 150, 66], "sample.capture": [208, 52, 44],
  encode: [160, 110, 180], decode: [132, 84, 176], upscale: [200, 90, 150], transfer: [140, 108, 84],
};
const OTHER = [120, 126, 134];
const RED = [208, 52, 44];
const UNACCOUNTED = [226, 140, 60];

const ROW = { least: 12, most: 44 };
const NODES_HEIGHT = 15;
const AXIS_HEIGHT = 15;
const MOST_ZOOM = 2000;

const STYLE = `
.ltxg { --ltxg-ink: var(--input-text, #ddd); --ltxg-faint: var(--descrip-text, #999); --ltxg-line: var(--border-color, #4e4e4e);
  --ltxg-paper: var(--comfy-menu-bg, #1c1c1c); box-sizing: border-box; display: flex; flex-direction: column; gap: 2px; width: 100%;
  height: 100%; min-height: 148px; min-width: 0; padding: 4px 6px 2px; overflow: hidden; border: 1px solid var(--ltxg-line);
  border-radius: 6px; background: var(--ltxg-paper); color: var(--ltxg-ink); font: 11px/1.4 Inter, system-ui, sans-serif;
  font-variant-numeric: tabular-nums; user-select: none; }
.ltxg-head, .ltxg-arms { display: flex; align-items: center; gap: 6px; min-width: 0; flex: none; }
.ltxg-summary { flex: 1; min-width: 0; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; font-weight: 600; }
.ltxg-words { flex: none; color: var(--ltxg-faint); overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.ltxg [hidden] { display: none !important; }
.ltxg-verdict { flex: none; padding: 0 6px; border-radius: 4px; color: #fff; font-weight: 700; text-transform: uppercase; font-size: 10px; }
.ltxg-running { flex: none; width: 8px; height: 8px; border-radius: 50%; background: rgb(34 160 90); animation: ltxg-pulse 1s infinite alternate; }
@keyframes ltxg-pulse { to { opacity: .25; } }
.ltxg button, .ltxg a { flex: none; margin: 0; padding: 0 5px; border: 1px solid transparent; border-radius: 4px; background: none;
  color: var(--ltxg-faint); font: inherit; line-height: 15px; cursor: pointer; text-decoration: none; }
.ltxg button:hover, .ltxg a:hover { color: var(--ltxg-ink); border-color: var(--ltxg-line); }
.ltxg button:focus-visible, .ltxg a:focus-visible { outline: 1px solid var(--ltxg-ink); }
.ltxg-tools { display: flex; flex: none; }
.ltxg-narrow:not(:hover, :focus-within) .ltxg-tools { display: none; }
.ltxg-arms { overflow-x: auto; scrollbar-width: none; }
.ltxg-arms button { border-color: var(--ltxg-line); }
.ltxg-arms button[aria-pressed=true] { color: var(--ltxg-ink); border-color: var(--ltxg-ink); font-weight: 600; }
.ltxg-chart { position: relative; flex: 1; min-height: 40px; overflow-x: hidden; overflow-y: auto; scrollbar-width: thin; cursor: grab;
  outline: none; border-radius: 3px; touch-action: none; }
.ltxg-chart:focus-visible, .ltxg-chart:focus { box-shadow: inset 0 0 0 1px var(--ltxg-line); }
.ltxg-chart canvas { position: absolute; left: 0; top: 0; }
.ltxg-empty { position: absolute; inset: 0; display: flex; align-items: center; justify-content: center; color: var(--ltxg-faint);
  text-align: center; cursor: default; }
.ltxg-pin { position: relative; flex: none; max-height: 45%; overflow-y: auto; scrollbar-width: thin; padding: 2px 18px 2px 0;
  border-top: 1px solid var(--ltxg-line); user-select: text; }
.ltxg-pin button { position: absolute; right: 0; top: 1px; }
.ltxg-facts b { margin-right: 8px; }
.ltxg-facts span { display: inline-block; margin-right: 10px; }
.ltxg-facts i { font-style: normal; color: var(--ltxg-faint); margin-right: 4px; }
.ltxg-tip { --ltxg-ink: var(--input-text, #ddd); --ltxg-faint: var(--descrip-text, #999); position: fixed; z-index: 10000; max-width: 320px;
  padding: 5px 8px; border: 1px solid var(--border-color, #4e4e4e); border-radius: 5px; background: var(--comfy-menu-bg, #1c1c1c);
  color: var(--ltxg-ink); font: 12px/1.45 Inter, system-ui, sans-serif; font-variant-numeric: tabular-nums; pointer-events: none;
  box-shadow: 0 2px 8px rgb(0 0 0 / .35); }
.ltxg-tip b { display: block; }
.ltxg-tip span { display: block; }
.ltxg-tip i { font-style: normal; color: var(--ltxg-faint); margin-right: 6px; }
`;

const VERDICT_COLOURS = { equal: "#22885a", different: "#c82e2e" };
const AMBER = "#b87208";

function make(tag, className, attributes = {}) {
  const element = document.createElement(tag);
  element.className = className;
  for (const [name, value] of Object.entries(attributes)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  return element;
}

const luminance = ([r, g, b]) => 0.3 * r + 0.59 * g + 0.11 * b;
const rgb = ([r, g, b], alpha = 1) => `rgba(${r}, ${g}, ${b}, ${alpha})`;

// Any CSS colour in its numbers: a pixel of it, read back.
const pixel = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
function numbers(css) {
  pixel.clearRect(0, 0, 1, 1);
  pixel.fillStyle = css;
  pixel.fillRect(0, 0, 1, 1);
  return [...pixel.getImageData(0, 0, 1, 1).data.slice(0, 3)];
}

const views = new Set();
let tip = null;

function prepareDocument() {
  if (tip) return;
  document.head.append(make("style", "", { textContent: STYLE }));
  tip = make("div", "ltxg-tip", { hidden: true });
  document.body.append(tip);
  // A palette change is a change of these elements' style or class.
  const repaint = new MutationObserver(() => views.forEach((view) => view.paint()));
  for (const element of [document.documentElement, document.body]) {
    repaint.observe(element, { attributes: true, attributeFilter: ["style", "class"] });
  }
}

/**
 * Shows `renders`: objects {id, name, events, summary, residency, live}, given by `show`. Calls nobody but
 * `onWheel(event)` for wheel turns that it leaves to the graph, and `onMiddle(event)` for the middle button.
 */
export class TimelineView {
  constructor({ onWheel = () => {}, onMiddle = () => {}, traceUrl = () => null } = {}) {
    prepareDocument();
    views.add(this);
    this.renders = [];
    this.verdict = null;
    this.restored = null;
    this.selected = null;
    this.pinned = null;
    this.window = [0, 1];
    this.marks = [];
    this.traceUrl = traceUrl;
    this.build(onWheel, onMiddle);
    this.resizing = new ResizeObserver(() => this.paint());
    this.resizing.observe(this.chart);
  }

  build(onWheel, onMiddle) {
    this.element = make("div", "ltxg");
    this.badge = make("span", "ltxg-verdict", { hidden: true });
    this.resident = make("span", "ltxg-verdict", { hidden: true });
    this.running = make("span", "ltxg-running", { hidden: true });
    this.summary = make("span", "ltxg-summary");
    const tools = [
      make("button", "", { textContent: "−", title: "Zoom out (−)", onclick: () => this.zoom(1 / 1.6) }),
      make("button", "", { textContent: "+", title: "Zoom in (+)", onclick: () => this.zoom(1.6) }),
      make("button", "", { textContent: "fit", title: "Show all (0, double click)", onclick: () => this.fit() }),
    ];
    this.trace = make("a", "", { textContent: "trace", title: "Download the Chrome trace; it opens in ui.perfetto.dev", hidden: true });
    this.tools = make("span", "ltxg-tools");
    this.tools.append(...tools, this.trace);
    const head = make("div", "ltxg-head");
    head.append(this.badge, this.resident, this.running, this.summary, this.tools);
    this.words = make("div", "ltxg-words", { hidden: true });
    this.arms = make("div", "ltxg-arms", { hidden: true });
    this.chart = make("div", "ltxg-chart", { tabIndex: 0, role: "img", "data-capture-wheel": "true" });
    this.canvas = make("canvas", "");
    this.empty = make("div", "ltxg-empty", { textContent: "Fills while this node renders." });
    this.chart.append(this.canvas, this.empty);
    this.pin = make("div", "ltxg-pin", { hidden: true });
    this.element.append(head, this.words, this.arms, this.chart, this.pin);

    let drag = null;
    this.chart.addEventListener("pointerdown", (event) => {
      if (event.button === 1) return onMiddle(event);
      if (event.button !== 0) return;
      event.stopPropagation();
      this.chart.focus({ preventScroll: true });
      if (event.target === this.chart) return; // its scroll bar
      this.chart.setPointerCapture(event.pointerId);
      drag = { x: event.clientX, window: this.window, moved: false };
    });
    this.chart.addEventListener("pointermove", (event) => {
      if (!drag) return this.hover(event);
      drag.moved ||= Math.abs(event.clientX - drag.x) > 3;
      if (!drag.moved) return;
      this.hideTip();
      const share = (event.clientX - drag.x) / this.onScreen() / this.plotWidth;
      const shift = -share * (drag.window[1] - drag.window[0]);
      this.setWindow(drag.window[0] + shift, drag.window[1] + shift);
    });
    this.chart.addEventListener("pointerup", (event) => {
      if (drag && !drag.moved) this.togglePin(this.markAt(event));
      drag = null;
    });
    this.chart.addEventListener("pointercancel", () => (drag = null));
    this.chart.addEventListener("pointerleave", () => this.hideTip());
    this.chart.addEventListener("dblclick", (event) => {
      event.stopPropagation();
      this.fit();
    });
    this.element.addEventListener("wheel", (event) => {
      // Like a text box: the wheel is the graph's until this is clicked.
      const scrolls = event.target.closest?.(".ltxg-pin") && this.pin.scrollHeight > this.pin.clientHeight;
      if (scrolls) return event.stopPropagation();
      if (event.ctrlKey || document.activeElement !== this.chart) return onWheel(event);
      event.preventDefault();
      event.stopPropagation();
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan((event.deltaX || event.deltaY) / 600);
      else this.zoom(Math.exp(-event.deltaY / 300), this.shareAt(event));
    }, { passive: false });
    this.chart.addEventListener("keydown", (event) => {
      const act = {
        "+": () => this.zoom(1.6), "=": () => this.zoom(1.6), "-": () => this.zoom(1 / 1.6), 0: () => this.fit(),
        ArrowLeft: () => this.pan(-0.15), ArrowRight: () => this.pan(0.15), Escape: () => this.togglePin(null),
      }[event.key];
      if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      event.stopPropagation();
      act();
    });
  }

  destroy() {
    views.delete(this);
    this.resizing.disconnect();
    clearInterval(this.clock);
    this.hideTip();
  }

  /** Show what is known now. verdict: {status, words} or null. restored: words for renders of an earlier visit, or null. */
  show({ renders, verdict = null, restored = null, follow = null }) {
    this.renders = renders;
    this.verdict = verdict;
    this.restored = restored;
    if (follow && !this.chosen) this.selected = follow;
    if (!renders.some((r) => r.id === this.selected)) {
      this.selected = renders[0]?.id ?? null;
      this.chosen = false;
      this.pinned = null;
      this.window = [0, 1];
    }
    const live = renders.some((r) => r.live);
    if (live && !this.clock) this.clock = setInterval(() => this.paint(), 100);
    if (!live) {
      clearInterval(this.clock);
      this.clock = null;
    }
    this.paint();
  }

  get render() {
    return this.renders.find((r) => r.id === this.selected) ?? null;
  }

  choose(id) {
    this.selected = id;
    this.chosen = true;
    this.pinned = null;
    this.window = [0, 1];
    this.paint();
  }

  // Window of the axis that is in sight

  setWindow(from, to) {
    const width = Math.min(Math.max(to - from, 1 / MOST_ZOOM), 1);
    const start = Math.min(Math.max(from, 0), 1 - width);
    this.window = [start, start + width];
    this.paint();
  }

  zoom(factor, at = 0.5) {
    const [from, to] = this.window;
    const centre = from + at * (to - from);
    const width = Math.min((to - from) / factor, 1);
    this.setWindow(centre - at * width, centre - at * width + width);
  }

  pan(share) {
    const [from, to] = this.window;
    this.setWindow(from + share * (to - from), to + share * (to - from));
  }

  fit() {
    this.setWindow(0, 1);
  }

  // Pointer

  /** Screen pixels per pixel of ours: the graph's zoom. */
  onScreen() {
    return this.chart.getBoundingClientRect().width / (this.chart.offsetWidth || 1) || 1;
  }

  toChart(event) {
    const box = this.chart.getBoundingClientRect();
    const scale = this.onScreen();
    return [(event.clientX - box.left) / scale, (event.clientY - box.top) / scale + this.chart.scrollTop];
  }

  shareAt(event) {
    return Math.min(Math.max((this.toChart(event)[0] - this.plotLeft) / this.plotWidth, 0), 1);
  }

  markAt(event) {
    const [x, y] = this.toChart(event);
    let best = null;
    for (const mark of this.marks) {
      if (y < mark.top || y > mark.bottom) continue;
      const away = Math.max(mark.left - x, x - mark.right, 0);
      if (away <= 3 && (!best || away < best.away || (away === best.away && mark.right - mark.left < best.width))) {
        best = { mark, away, width: mark.right - mark.left };
      }
    }
    return best?.mark ?? null;
  }

  hover(event) {
    const mark = this.markAt(event);
    this.chart.style.cursor = mark?.bar ? "pointer" : "";
    if (!mark) return this.hideTip();
    tip.replaceChildren(...this.facts(mark.title, mark.bar ? barFacts(mark.bar, true) : mark.facts));
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 12, innerWidth - width - 4))}px`;
    tip.style.top = `${event.clientY + 16 + height < innerHeight ? event.clientY + 16 : event.clientY - height - 10}px`;
    this.tipped = true;
  }

  hideTip() {
    if (this.tipped) tip.hidden = true;
    this.tipped = false;
  }

  facts(title, facts) {
    const lines = facts.map(([name, words]) => {
      const line = make("span", "");
      line.append(make("i", "", { textContent: name }), words);
      return line;
    });
    return [make("b", "", { textContent: title }), ...lines];
  }

  togglePin(mark) {
    const id = mark?.bar?.id ?? null;
    this.pinned = id === this.pinned ? null : id;
    this.hideTip();
    this.paint();
  }

  // Painting

  paint() {
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => {
      this.waiting = null;
      this.paintNow();
    });
  }

  /** For the graph's draw hook: a canvas drawn at another zoom would be blurred. */
  zoomed() {
    if (Math.abs(this.onScreen() - (this.paintedZoom ?? 1)) > 0.05) this.paint();
  }

  paintNow() {
    const render = this.render;
    const now = render?.live ? render.lastT + performance.now() - render.lastAt : null;
    const model = readEvents(render?.events ?? [], now);
    Object.assign(this.element.dataset, { render: render?.id ?? "", events: render?.events.length ?? 0, live: Boolean(render?.live) });
    this.paintHead(render, model);
    this.paintArms();
    this.empty.hidden = model.bars.length > 0 || model.segments.length > 0;
    this.paintPin(model);
    this.paintChart(model, render);
  }

  paintHead(render, model) {
    this.badge.hidden = !this.verdict;
    if (this.verdict) {
      this.badge.textContent = this.verdict.status;
      this.badge.title = this.verdict.words;
      this.badge.style.background = VERDICT_COLOURS[this.verdict.status] ?? AMBER;
    }
    const resident = !render?.live && /^resident: (yes|no)\b/.exec(render?.residency ?? "")?.[1];
    this.resident.hidden = !resident;
    this.resident.textContent = resident === "yes" ? "resident" : "not resident";
    this.resident.title = render?.residency ?? "";
    this.resident.style.background = VERDICT_COLOURS[resident === "yes" ? "equal" : "different"];
    this.running.hidden = !render?.live;
    let line = "";
    if (render?.live) {
      const busy = model.bars.filter((b) => b.open).at(-1);
      line = `${timeWords(model.end - (model.segments[0]?.start ?? 0))} · ${busy ? barTitle(busy) : "between phases"}`;
    } else if (render?.summary) {
      line = summaryWords(render.summary);
      if (model.segments.some((s) => s.open)) line = `ended early · ${line}`;
    } else if (render) {
      line = render.problem ?? "";
    }
    this.summary.textContent = line;
    const more = render?.summary?.outside_ms ? `, ${timeWords(render.summary.outside_ms)} elsewhere between our nodes, not counted` : "";
    this.summary.title = render ? `${line}${more}\nrender ${render.id}` : "";
    const words = [this.verdict?.words.replace(`${this.verdict.status}: `, ""), render?.live ? null : render?.residency, render?.live ? null : this.restored];
    this.words.textContent = words.filter(Boolean).join(" · ");
    this.words.title = words.filter(Boolean).join("\n");
    this.words.hidden = !this.words.textContent;
    const trace = render && !render.live && render.events.length ? this.traceUrl(render.id) : null;
    this.element.classList.toggle("ltxg-narrow", this.element.offsetWidth < 440);
    this.tools.hidden = !model.bars.length || this.element.offsetWidth < 260;
    this.trace.hidden = !trace;
    if (trace) {
      this.trace.href = trace;
      this.trace.download = `${render.id}.trace.json`;
    }
    this.chart.setAttribute("aria-label", `Timeline of the render: ${line || "empty"}`);
  }

  paintArms() {
    this.arms.hidden = this.renders.length < 2;
    if (this.arms.hidden) return this.arms.replaceChildren();
    const wanted = this.renders.map((r, i) => {
      const wall = r.summary ? ` ${timeWords(r.summary.wall_ms)}` : "";
      return { id: r.id, text: `${r.name || i + 1}${wall}`, pressed: String(r.id === this.selected) };
    });
    // Made anew only when the renders change: a click must find the button that it began on.
    if (wanted.map((w) => w.id).join() !== this.armIds) {
      this.armIds = wanted.map((w) => w.id).join();
      this.arms.replaceChildren(...wanted.map(({ id }) => make("button", "", { onclick: () => this.choose(id) })));
    }
    wanted.forEach(({ text, pressed }, i) => {
      this.arms.children[i].textContent = text;
      this.arms.children[i].setAttribute("aria-pressed", pressed);
    });
  }

  paintPin(model) {
    const pinned = this.pinned && model.bars.find((b) => b.id === this.pinned);
    this.pin.hidden = !pinned;
    if (!pinned) return;
    const close = make("button", "", { textContent: "×", title: "Close (Esc)", onclick: () => this.togglePin(null) });
    const facts = make("div", "ltxg-facts");
    facts.append(...this.facts(barTitle(pinned), barFacts(pinned, false)));
    this.pin.replaceChildren(close, facts);
  }

  paintChart(model, render) {
    const width = this.chart.clientWidth;
    const visible = this.chart.clientHeight;
    this.marks = [];
    if (!width || !visible) return;
    const rows = model.rows;
    const rowHeight = Math.min(Math.max((visible - NODES_HEIGHT - AXIS_HEIGHT) / Math.max(rows.length, 1), ROW.least), ROW.most);
    const height = Math.max(NODES_HEIGHT + rows.length * rowHeight + AXIS_HEIGHT, Math.min(visible, 40));
    const zoom = this.onScreen();
    this.paintedZoom = zoom;
    const ratio = Math.min(devicePixelRatio * Math.max(zoom, 1), 4);
    const { canvas } = this;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
    }
    const paper = canvas.getContext("2d");
    paper.setTransform(ratio, 0, 0, ratio, 0, 0);
    paper.clearRect(0, 0, width, height);
    if (!model.segments.length && !model.bars.length) return;
    new Chart(this, paper, model, { width, height, rowHeight, summary: render?.summary }).paint();
  }
}

/** One painting of the chart. */
class Chart {
  constructor(view, paper, model, { width, height, rowHeight, summary }) {
    Object.assign(this, { view, paper, model, width, height, rowHeight, summary });
    const style = getComputedStyle(view.element);
    this.ink = numbers(style.color);
    this.faint = numbers(getComputedStyle(view.words).color);
    this.back = numbers(style.backgroundColor);
    this.dark = luminance(this.back) < 128;
    this.fontSize = Math.min(Math.max(rowHeight * 0.72, 9), 11);
    paper.font = `${this.fontSize}px Inter, system-ui, sans-serif`;
    this.short = width < 330;
    this.painted = new Map(); // by row, how far its bars reach
    const names = model.rows.map((row) => this.rowName(row));
    const widest = Math.max(...names.map((name) => paper.measureText(name).width), 20);
    this.left = Math.min(widest + 8, 0.34 * width);
    this.right = width - (width > 420 ? 92 : 2);
    this.axis = new Axis(model);
    view.plotLeft = this.left;
    view.plotWidth = Math.max(this.right - this.left, 1);
  }

  rowName(phase) {
    return this.short ? phase.split(".").at(-1).replace("_", " ") : phase;
  }

  x(t) {
    const [from, to] = this.view.window;
    return this.left + ((this.axis.place(t) - from) / (to - from)) * (this.right - this.left);
  }

  top(row) {
    return NODES_HEIGHT + row * this.rowHeight;
  }

  colour(phase) {
    const base = COLOURS[phase] ?? COLOURS[phase.split(".")[0]] ?? OTHER;
    return this.dark ? base.map((c) => Math.round(c + (255 - c) * 0.18)) : base;
  }

  text(words, x, y, { colour = this.ink, align = "left", room = Infinity, bold = false } = {}) {
    const { paper } = this;
    paper.font = `${bold ? "600 " : ""}${this.fontSize}px Inter, system-ui, sans-serif`;
    if (paper.measureText(words).width > room) {
      while (words && paper.measureText(`${words}…`).width > room) words = words.slice(0, -1);
      if (!words) return;
      words += "…";
    }
    paper.fillStyle = rgb(colour);
    paper.textAlign = align;
    paper.textBaseline = "middle";
    paper.fillText(words, x, y);
  }

  paint() {
    const { paper, model, left, right } = this;
    const bottom = this.top(model.rows.length);
    this.paintGrid(bottom);
    paper.save();
    paper.beginPath();
    paper.rect(left, 0, right - left, bottom + AXIS_HEIGHT);
    paper.clip();
    this.paintNodes();
    const rows = new Map(model.rows.map((phase, row) => [phase, row]));
    for (const bar of model.bars) this.paintBar(bar, this.top(rows.get(bar.phase)));
    this.paintFlags(bottom);
    this.paintNotes(bottom);
    paper.restore();
    model.rows.forEach((phase, row) => {
      const y = this.top(row) + this.rowHeight / 2;
      this.text(this.rowName(phase), 0, y, { room: left - 6 });
      this.paintTotals(phase, y);
    });
  }

  paintGrid(bottom) {
    const { paper, axis, model } = this;
    paper.strokeStyle = rgb(this.faint, 0.22);
    paper.lineWidth = 1;
    for (let row = 0; row <= model.rows.length; row++) {
      const y = Math.round(this.top(row)) + 0.5;
      paper.beginPath();
      paper.moveTo(0, y);
      paper.lineTo(this.width, y);
      paper.stroke();
    }
    const [from, to] = this.view.window;
    const { every, times } = axis.ticks((42 / (this.right - this.left)) * (to - from));
    let last = -Infinity;
    for (const t of times) {
      const x = this.x(t);
      if (x < this.left - 1 || x > this.right + 1) continue;
      paper.beginPath();
      paper.moveTo(Math.round(x) + 0.5, NODES_HEIGHT);
      paper.lineTo(Math.round(x) + 0.5, bottom + 3);
      paper.stroke();
      if (x - last < 38) continue;
      const words = tickWords(t, every);
      const half = paper.measureText(words).width / 2;
      this.text(words, Math.min(Math.max(x, this.left + half), this.right - half), bottom + 9, { colour: this.faint, align: "center" });
      last = x;
    }
    for (const { start, end, words } of axis.hatched) {
      const [x0, x1] = [Math.max(this.x(start), this.left), Math.min(this.x(end), this.right)];
      if (x1 <= x0) continue;
      this.hatch(x0, NODES_HEIGHT, x1, bottom);
      this.view.marks.push({ left: x0, right: x1, top: bottom, bottom: bottom + AXIS_HEIGHT, title: words, facts: [["", "not drawn to scale"]] });
    }
  }

  hatch(x0, y0, x1, y1) {
    const { paper } = this;
    paper.save();
    paper.beginPath();
    paper.rect(x0, y0, x1 - x0, y1 - y0);
    paper.clip();
    paper.strokeStyle = rgb(this.faint, 0.35);
    for (let x = x0 - (y1 - y0); x < x1; x += 7) {
      paper.beginPath();
      paper.moveTo(x, y1);
      paper.lineTo(x + (y1 - y0), y0);
      paper.stroke();
    }
    paper.restore();
  }

  paintNodes() {
    const { paper, model } = this;
    for (const segment of model.segments) {
      const [x0, x1] = [this.x(segment.start), Math.max(this.x(segment.end), this.x(segment.start) + 1)];
      paper.fillStyle = rgb(this.faint, 0.25);
      paper.fillRect(x0, 1, Math.max(x1 - x0 - 1, 1), NODES_HEIGHT - 3);
      const [a, b] = [Math.max(x0, this.left), Math.min(x1, this.right)];
      const name = segment.name.replace(/^LTXGraph/, "");
      if (b - a > 30) this.text(name, (a + b) / 2, NODES_HEIGHT / 2, { align: "center", room: b - a - 6 });
      this.view.marks.push({ left: x0, right: x1, top: 0, bottom: NODES_HEIGHT - 4, title: segment.name, facts: [["wall", timeWords(segment.end - segment.start)]] });
    }
    const free = uncovered(model.segments.map((s) => [s.start, s.end]), model.bars.map((b) => [b.start, b.end]));
    for (const [start, end] of free) {
      const [x0, x1] = [this.x(start), this.x(end)];
      // Fainter where it is less than a pixel: a thousand short gaps are no solid line.
      paper.fillStyle = rgb(UNACCOUNTED, Math.min(x1 - x0, 1));
      paper.fillRect(x0, NODES_HEIGHT - 4, Math.max(x1 - x0, 1), 3);
      this.view.marks.push({ left: x0, right: x1, top: NODES_HEIGHT - 4, bottom: NODES_HEIGHT, title: "unaccounted", facts: [["wall", timeWords(end - start)], ["", "no named phase ran"]] });
    }
  }

  paintBar(bar, top) {
    const { paper } = this;
    const x0 = this.x(bar.start);
    const x1 = Math.max(this.x(bar.end), x0 + 1.5);
    if (x1 < this.left || x0 > this.right) return;
    // Neighbouring steps must stay apart.
    const width = Math.max(x1 - x0 - (x1 - x0 > 6 ? 1 : 0), 1.5);
    const [y, tall] = [top + 2, this.rowHeight - 3];
    const colour = this.colour(bar.phase);
    // What the row has not painted yet: half-tones of bars thinner than a pixel would add up to a full tone.
    const left = Math.max(x0, this.painted.get(bar.phase) ?? x0);
    const rest = Math.max(x0 + width - left, 0);
    this.painted.set(bar.phase, left + rest);
    // Whole bar: wall. Filled from below: GPU busy, lighter where it comes from the measured step. Half-tone: not measured.
    paper.fillStyle = rgb(colour, bar.busy == null ? 0.7 : 0.25);
    paper.fillRect(left, y, rest, tall);
    if (bar.busy != null) {
      const level = Math.min(bar.busy, 1) * tall;
      paper.fillStyle = rgb(colour, bar.inferred ? 0.65 : 1);
      paper.fillRect(left, y + tall - level, rest, level);
    }
    if (bar.open) {
      paper.fillStyle = rgb(this.ink, 0.8);
      paper.fillRect(x0 + width - 2, y, 2, tall);
    }
    const failed = bar.event.attrs?.error;
    if (failed || bar.id === this.view.pinned) {
      paper.strokeStyle = failed ? rgb(RED) : rgb(this.ink);
      paper.lineWidth = failed ? 2 : 1.5;
      paper.strokeRect(x0, y - 0.5, width, tall + 1);
      paper.lineWidth = 1;
    }
    const number = bar.event.attrs?.step ?? bar.event.attrs?.chunk ?? bar.event.attrs?.tile;
    const share = bar.busy == null ? "" : shareWords(bar.busy);
    const [a, b] = [Math.max(x0, this.left), Math.min(x0 + width, this.right)];
    // The longest label that fits: number and share, or the number alone.
    const labels = number == null ? [share] : [[number + 1, share].filter(Boolean).join(" · "), `${number + 1}`];
    const label = labels.find((words) => words && b - a >= 8 && paper.measureText(words).width < b - a - 4);
    if (label) {
      let alpha = bar.inferred ? 0.65 : 1; // of what is behind the label, half-way up the bar
      if (bar.busy == null) alpha = 0.7;
      else if (bar.busy < 0.5) alpha = 0.25;
      const behind = colour.map((c, i) => c * alpha + this.back[i] * (1 - alpha));
      this.text(label, (a + b) / 2, y + tall / 2, { colour: luminance(behind) < 150 ? [255, 255, 255] : [20, 22, 26], align: "center" });
    }
    this.view.marks.push({ left: x0, right: x0 + width, top, bottom: top + this.rowHeight, title: barTitle(bar), bar });
  }

  /** Captures and failures stand out through all rows. */
  paintFlags(bottom) {
    const { paper } = this;
    const flags = this.model.bars.filter((b) => b.phase === "sample.capture" || b.event.attrs?.error);
    let free = -Infinity;
    for (const bar of flags) {
      const failed = bar.event.attrs?.error;
      const x = Math.round(this.x(failed ? bar.end : bar.start)) + 0.5;
      if (x < this.left || x > this.right) continue;
      paper.strokeStyle = rgb(RED);
      paper.setLineDash([3, 3]);
      paper.beginPath();
      paper.moveTo(x, NODES_HEIGHT);
      paper.lineTo(x, bottom);
      paper.stroke();
      paper.setLineDash([]);
      paper.fillStyle = rgb(RED);
      paper.beginPath();
      paper.moveTo(x - 5, NODES_HEIGHT - 1);
      paper.lineTo(x + 5, NODES_HEIGHT - 1);
      paper.lineTo(x, NODES_HEIGHT + 5);
      paper.fill();
      const words = failed ? "failed" : "captured";
      const room = paper.measureText(words).width + 12;
      if (x < free) continue;
      const atLeft = x + room > this.right;
      paper.fillStyle = rgb(this.back, 0.8);
      paper.fillRect(atLeft ? x - room : x + 6, NODES_HEIGHT + 1, room - 6, this.fontSize + 2);
      const y = NODES_HEIGHT + 2 + this.fontSize / 2;
      this.text(words, atLeft ? x - 8 : x + 8, y, { colour: RED, align: atLeft ? "right" : "left", bold: true });
      free = x + room;
    }
  }

  /** What was decided on the way: dots on the axis. */
  paintNotes(bottom) {
    const { paper } = this;
    let mark = null;
    for (const note of this.model.notes) {
      const x = this.x(note.t);
      if (mark && x - mark.left < 10) {
        mark.facts.push(["•", note.message]);
        continue;
      }
      paper.fillStyle = rgb(this.ink, 0.75);
      paper.beginPath();
      paper.arc(x, bottom, 2.5, 0, 7);
      paper.fill();
      mark = { left: x - 4, right: x + 4, top: bottom - 4, bottom: bottom + 5, title: "notes", facts: [["•", note.message]] };
      this.view.marks.push(mark);
    }
  }

  paintTotals(phase, y) {
    if (this.right > this.width - 20) return;
    const bars = this.model.bars.filter((b) => b.phase === phase);
    const wall = this.summary?.phases[phase]?.wall_ms ?? bars.reduce((sum, b) => sum + b.end - b.start, 0);
    this.text(timeWords(wall), this.width - 34, y, { align: "right", room: 56 });
    if (this.summary?.wall_ms) {
      const share = wall / this.summary.wall_ms;
      this.text(share < 0.01 ? "<1%" : `${Math.round(share * 100)}%`, this.width - 2, y, { colour: this.faint, align: "right" });
    }
  }
}
