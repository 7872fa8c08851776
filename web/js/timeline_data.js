// The phase log as bars on an axis, and numbers as words. No DOM in here.
// The same rules as ltx_runtime/timing.py (summarize) and pictures.py (timeline_picture), where they overlap.

export const SEGMENT = "segment";

// Rows stand in the order in which a render goes through them, whatever came first.
const ORDER = [
  "load.read", "load.place", "prepare.connectors", "prepare.constants", "encode", "sample.measure", "sample.warmup",
  "sample.capture", "sample.step", "sample.replay", "upscale", "decode", "transfer.to_host",
];

/** Events of one render -> {bars, segments, notes, rows, end}. Times in ms; `open` marks what has not ended yet. */
export function readEvents(events, now = null) {
  const begun = new Map();
  const counts = new Map();
  const bars = [];
  const segments = [];
  const notes = [];
  let end = -Infinity;
  for (const event of events) {
    end = Math.max(end, event.t_ms);
    const attrs = event.attrs ?? {};
    if (event.event === "note") {
      notes.push({ t: event.t_ms, phase: event.phase, message: event.message });
    } else if (event.event === "begin") {
      if (!begun.has(event.phase)) begun.set(event.phase, []);
      begun.get(event.phase).push(event);
    } else if (event.phase === SEGMENT) {
      begun.get(SEGMENT)?.pop();
      segments.push({ name: attrs.name, start: event.t_ms - event.wall_ms, end: event.t_ms });
    } else {
      // Phases of one name may overlap (steps in flight); they end in the order in which they began.
      begun.get(event.phase)?.shift();
      bars.push(bar(event.phase, event.t_ms - event.wall_ms, event.t_ms, event, false, counts));
    }
  }
  const edge = Math.max(end, now ?? end);
  for (const [phase, open] of begun) {
    for (const event of open) {
      if (phase === SEGMENT) segments.push({ name: event.attrs.name, start: event.t_ms, end: edge, open: true });
      else bars.push(bar(phase, event.t_ms, edge, event, true, counts));
    }
  }
  segments.sort((a, b) => a.start - b.start);
  bars.sort((a, b) => a.start - b.start);
  const measured = bars.find((b) => b.phase === "sample.measure" && b.event.gpu_ms != null && b.event.attrs?.eager_wall_ms);
  for (const b of bars) [b.busy, b.inferred] = gpuShare(b, measured);
  return { bars, segments, notes, rows: rowsOf(bars), end: edge };
}

function bar(phase, start, end, event, open, counts) {
  const number = counts.get(phase) ?? 0;
  counts.set(phase, number + 1);
  return { phase, start, end, event, open, id: `${phase}#${number}` };
}

// Measuring stretches the wall of the step that is measured: its GPU time stands against the eager step timed before it,
// and eager steps, which do the same work, take their share from there.
function gpuShare({ phase, event }, measured) {
  const inferable = phase === "sample.measure" || (phase === "sample.step" && !event.gpu_busy);
  if (!inferable) return [event.gpu_busy ?? null, false];
  if (!measured) return [null, false];
  return [Math.min(measured.event.gpu_ms / measured.event.attrs.eager_wall_ms, 1), true];
}

function rowsOf(bars) {
  const rank = (phase) => {
    const at = ORDER.findIndex((known) => phase === known || phase.startsWith(`${known}.`));
    return at < 0 ? ORDER.length : at;
  };
  return [...new Set(bars.map((b) => b.phase))].sort((a, b) => rank(a) - rank(b));
}

export function union(intervals) {
  const merged = [];
  for (const [start, end] of intervals.filter(([a, b]) => b > a).sort((a, b) => a[0] - b[0])) {
    const last = merged.at(-1);
    if (last && start <= last[1]) last[1] = Math.max(last[1], end);
    else merged.push([start, end]);
  }
  return merged;
}

const length = (intervals) => union(intervals).reduce((sum, [start, end]) => sum + end - start, 0);

/** The stretches of `stays` that `covered` leaves free. */
export function uncovered(stays, covered) {
  const found = [];
  const taken = union(covered);
  for (const [start, end] of union(stays)) {
    let edge = start;
    for (const [a, b] of taken) {
      if (b <= edge || a >= end) continue;
      if (a > edge) found.push([edge, a]);
      edge = Math.max(edge, b);
    }
    if (edge < end) found.push([edge, end]);
  }
  return found;
}

/**
 * Time to a place in 0..1. Stretches in which other nodes had the machine are cut, and a long load is drawn shorter than
 * it was: `hatched` lists both, as {start, end, words}.
 */
export class Axis {
  constructor({ bars, segments }) {
    const spans = bars.map((b) => [b.start, b.end]);
    let live = union([...segments.map((s) => [s.start, s.end]), ...spans]);
    if (!live.length) live = [[0, 1]];
    this.start = live[0][0];
    this.end = live.at(-1)[1];
    const total = length(live);
    const cuts = live.slice(1).map(([start], i) => [live[i][1], start]).filter(([a, b]) => b - a > 0.02 * total);
    const share = Math.min(0.03, 0.15 / cuts.length);
    this.hatched = cuts.map(([start, end]) => ({ start, end, room: share, words: `${timeWords(end - start)} elsewhere` }));
    const isLoad = (b) => b.phase.startsWith("load.");
    const ofKind = (kind) => bars.filter((b) => isLoad(b) === kind).map((b) => [b.start, b.end]);
    const loads = uncovered(ofKind(true), ofKind(false));
    const loading = length(loads);
    const rest = total - loading;
    if (ofKind(false).length && rest > 0 && loading > 0.25 * rest) {
      for (const [start, end] of loads) {
        this.hatched.push({ start, end, room: (0.15 * (end - start)) / loading, words: `${timeWords(end - start)} load` });
      }
    }
    this.hatched.sort((a, b) => a.start - b.start);
    const squeezed = this.hatched.reduce((sum, h) => sum + h.end - h.start, 0);
    const room = this.hatched.reduce((sum, h) => sum + h.room, 0);
    /** Share of the whole width per ms, where time is drawn to scale. */
    this.scale = (1 - room) / Math.max(this.end - this.start - squeezed, 1e-3);
  }

  place(t) {
    let at = (t - this.start) * this.scale;
    for (const { start, end, room } of this.hatched) {
      const inside = Math.min(Math.max(t, start), end) - start;
      at += inside * (room / (end - start) - this.scale);
    }
    return at;
  }

  /** Times for tick marks at least `least` (a share of the width) apart. */
  ticks(least) {
    const every = nice(least / this.scale);
    const found = [];
    for (let i = Math.ceil(this.start / every); i * every <= this.end && found.length < 400; i++) {
      const t = i * every;
      if (!this.hatched.some((h) => h.start <= t && t < h.end)) found.push(t);
    }
    return { every, times: found };
  }
}

function nice(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1e-3)));
  return [1, 2, 5, 10].map((m) => m * power).find((v) => v >= value * 0.999);
}

export function timeWords(ms) {
  if (ms >= 60_000) return `${Math.floor(ms / 60_000)} min ${Math.round((ms % 60_000) / 1e3)} s`;
  if (ms >= 1000) return `${(ms / 1e3).toFixed(2)} s`;
  if (ms >= 100) return `${ms.toFixed(0)} ms`;
  return ms >= 0.01 ? `${+ms.toPrecision(2)} ms` : "0 ms";
}

export function tickWords(ms, every) {
  if (every >= 1000) return `${Math.round(ms / 1e3)} s`;
  return every >= 100 ? `${(ms / 1e3).toFixed(1)} s` : `${+ms.toPrecision(6)} ms`;
}

export const shareWords = (share) => `${(100 * share).toFixed(share > 0.99 && share < 1 ? 1 : 0)}%`;

function bytesWords(bytes) {
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (bytes >= size) return `${(bytes / size).toFixed(bytes >= 100 * size ? 0 : 1)} ${unit}`;
  }
  return `${bytes} B`;
}

/** "sample.step 3": steps, chunks and tiles count from 1, as the progress bar does. */
export function barTitle({ phase, event }) {
  const part = ["step", "chunk", "tile"].find((key) => event.attrs?.[key] != null);
  return part ? `${phase}, ${part} ${event.attrs[part] + 1}` : phase;
}

/** All that the log knows of one bar, as [name, words] pairs; `brief` keeps to the measured numbers. */
export function barFacts(b, brief) {
  const { event } = b;
  const attrs = event.attrs ?? {};
  const facts = [];
  if (attrs.error) facts.push(["failed", attrs.error]);
  facts.push(["wall", b.open ? `${timeWords(b.end - b.start)}, still running` : timeWords(event.wall_ms)]);
  if (event.gpu_ms != null) {
    const busy = b.busy != null ? `, busy ${shareWords(b.busy)}` : "";
    facts.push(["GPU", `${timeWords(event.gpu_ms)}${busy} (${event.gpu_method})`]);
  } else if (!b.open) {
    facts.push(["GPU", b.inferred ? `busy ${shareWords(b.busy)}, from the measured step` : "not measured"]);
  }
  if (event.stream_ms != null) facts.push(["stream", timeWords(event.stream_ms)]);
  if (event.cpu_ms != null) facts.push(["CPU", timeWords(event.cpu_ms)]);
  if (event.mem_peak_bytes != null) facts.push(["memory peak", bytesWords(event.mem_peak_bytes)]);
  const nvml = event.nvml;
  if (nvml?.samples) {
    facts.push(["NVML", `mean ${shareWords(nvml.util_mean)}, zero in ${shareWords(nvml.util_zero_share)} of ${nvml.samples} samples`]);
  }
  if (brief) return facts;
  facts.push(["begins at", timeWords(Math.abs(b.start)) + (b.start < 0 ? " before the render" : "")]);
  for (const [name, value] of Object.entries(attrs)) {
    if (name === "error" || ["step", "chunk", "tile"].includes(name)) continue;
    facts.push([name.replaceAll("_", " "), attrWords(name, value)]);
  }
  return facts;
}

function attrWords(name, value) {
  if (Array.isArray(value)) return value.join(" × ");
  if (typeof value === "number" && name.endsWith("bytes")) return bytesWords(value);
  if (typeof value === "number" && name.endsWith("_ms")) return timeWords(value);
  return String(value);
}

/** One line for a finished render: wall, coverage, unaccounted, memory. */
export function summaryWords(summary) {
  const parts = [timeWords(summary.wall_ms)];
  if (summary.coverage != null) {
    parts.push(`${shareWords(summary.coverage)} covered`, `${timeWords(summary.unaccounted_ms)} unaccounted`);
  }
  if (summary.mem_peak_bytes != null) parts.push(`peak ${bytesWords(summary.mem_peak_bytes)}`);
  return parts.join(" · ");
}
