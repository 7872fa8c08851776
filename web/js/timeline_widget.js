// Puts the timeline into our nodes: hears the server while they run, and finds their renders again after a page reload.
import { app } from "../../../scripts/app.js";
import { api } from "../../../scripts/api.js";
import { TimelineView } from "./timeline_view.js";

const NODES = new Set(["LTXGraphSampler", "LTXGraphVideoDecode", "LTXGraphTimingParity", "LTXGraphParityRun"]);
const MESSAGE = "ltxgraph.phase";
const OUTPUT = "ltxgraph_timeline";
const LEAST_HEIGHT = 190;
// Which renders a node showed last. In the browser, not in the workflow: a render must not make a workflow "modified",
// nor stand in its undo history and its saved files. The events themselves stay on the server.
const STORE = "ltxgraph.timelines";
const MOST_STORED = 300;

const timelines = new Map();
const graphOfPrompt = new Map();
let graphReady = false;

const rootGraph = () => app.rootGraph ?? app.graph;

/** "12", or "405:12" for node 12 inside subgraph node 405: the id under which the server runs it. */
function executionId(node, graph = rootGraph(), prefix = "") {
  if (node.graph === graph) return `${prefix}${node.id}`;
  for (const inner of graph.nodes ?? []) {
    const found = inner.subgraph && executionId(node, inner.subgraph, `${prefix}${inner.id}:`);
    if (found) return found;
  }
  return null;
}

function nodeOf(id) {
  let graph = rootGraph();
  const path = String(id).split(":");
  const last = path.pop();
  for (const part of path) {
    graph = byId(graph, part)?.subgraph;
    if (!graph) return null;
  }
  return byId(graph, last);
}

const byId = (graph, id) => graph.getNodeById(id) ?? graph.getNodeById(Number(id)) ?? null;

function stored() {
  try {
    return JSON.parse(localStorage.getItem(STORE) ?? "{}");
  } catch {
    return {}; // not ours, or storage is switched off
  }
}

function store(key, entry) {
  const all = stored();
  if (entry) all[key] = { ...entry, at: Date.now() };
  else delete all[key];
  const kept = Object.entries(all).sort(([, a], [, b]) => b.at - a.at).slice(0, MOST_STORED);
  try {
    localStorage.setItem(STORE, JSON.stringify(Object.fromEntries(kept)));
  } catch (error) {
    console.warn("LTXGraph: timelines won't be shown again after a page reload:", error.message);
  }
}

/** A node's `ui` entry: a JSON text for each time that it ran in the prompt. */
function readOutputs(outputs) {
  const views = outputs.map((text) => JSON.parse(text));
  return {
    renders: views.flatMap((view) => view.renders),
    verdict: views.findLast((view) => view.verdict)?.verdict ?? null,
  };
}

/** A render of which only the id is known. most: how many of its events are this node's to show; null = all. */
const blank = (id) => ({ id, name: "", events: [], most: null, summary: null, residency: null, live: false });

/** The renders of one node: what arrives live, what its output names, and what the server's log files hold. */
class NodeTimeline {
  constructor(node) {
    this.node = node;
    this.renders = [];
    this.verdict = null;
    this.prompt = null;
    this.restored = null;
    this.view = new TimelineView({
      onWheel: (event) => {
        // Nodes drawn by Vue hand the wheel on themselves.
        if (window.LiteGraph?.vueNodesMode) return;
        event.preventDefault();
        event.stopPropagation();
        app.canvas.processMouseWheel(event);
      },
      onMiddle: (event) => {
        event.preventDefault();
        app.canvas.processMouseDown(event);
      },
      traceUrl: (id) => api.apiURL(`/view?${new URLSearchParams({ filename: `${id}.trace.json`, subfolder: "ltxgraph", type: "output" })}`),
    });
  }

  get key() {
    return `${rootGraph().id}:${executionId(this.node)}`;
  }

  show(follow = null) {
    this.view.show({ renders: this.renders, verdict: this.verdict, restored: this.restored, follow });
  }

  find(id, name = "") {
    let render = this.renders.find((r) => r.id === id);
    if (!render) {
      render = { ...blank(id), name };
      this.renders.push(render);
    }
    return render;
  }

  /** One message of the server. */
  hear({ prompt_id, render: id, name, first, events, done }) {
    if (prompt_id !== this.prompt) {
      this.prompt = prompt_id;
      this.renders = [];
      this.verdict = null;
      this.restored = null;
      this.view.chosen = false;
    }
    const render = this.find(id, name);
    if (first > render.events.length) {
      // This page was opened in mid-render. Its node may have ended before the log is here: then the first arm stays.
      this.load(render).then(() => this.show(render.live ? id : null));
    } else {
      render.events.splice(first, Infinity, ...events);
    }
    render.live = !done;
    if (done) render.most = first + events.length;
    render.lastT = events.at(-1)?.t_ms ?? render.lastT;
    render.lastAt = performance.now();
    this.show(id);
    // After a reading that is under way: it may have begun before the last events were written.
    if (done) Promise.resolve(render.loading).then(() => this.load(render)).then(() => this.show());
  }

  /** A node's ui output, also of one whose result came from the cache. */
  executed({ renders, verdict }) {
    const before = new Map(this.renders.map((r) => [r.id, r]));
    this.renders = renders.map(({ render: id, name, events, residency }) =>
      Object.assign(before.get(id) ?? blank(id), { name, most: events, residency, live: false }));
    this.verdict = verdict;
    this.restored = null;
    this.show(this.renders[0]?.id);
    for (const render of this.renders) if (!render.summary) this.load(render).then(() => this.show());
  }

  /** What this node showed before the page was loaded. */
  async restore() {
    let entry = stored()[this.key];
    if (!entry || this.renders.length) return;
    if (entry.renders.some((r) => r.events === null)) entry = await this.missed(entry);
    if (this.renders.length) return; // its next message was faster
    this.renders = entry.renders.map((r) => ({ ...blank(r.render), name: r.name, most: r.events ?? null, residency: r.residency ?? null }));
    this.verdict = entry.verdict ?? null;
    this.prompt = entry.prompt; // it may still be running
    const mine = this.renders;
    await Promise.all(mine.map((render) => this.load(render)));
    if (this.renders !== mine) return; // another began meanwhile
    this.renders = mine.filter((render) => render.events.length || render.live);
    if (!this.renders.length) {
      this.verdict = null;
      store(this.key, null);
    }
    const time = this.renders.at(-1)?.time;
    this.restored = time ? `rendered ${new Date(time).toLocaleString()}` : null;
    this.show();
  }

  /** The page was loaded while the node ran: when it has ended since, its output stands in the history. */
  async missed(entry) {
    const answer = await api.fetchApi(`/history/${entry.prompt}`).catch(() => null);
    const history = answer?.ok ? await answer.json() : {};
    const outputs = history[entry.prompt]?.outputs?.[executionId(this.node)]?.[OUTPUT];
    if (!outputs) return entry;
    const ended = { prompt: entry.prompt, ...readOutputs(outputs) };
    store(this.key, ended);
    return ended;
  }

  /** The server is gone: nothing is known to run any more. */
  lost() {
    for (const render of this.renders) render.live = false;
    this.show();
  }

  /** Events and totals out of the render's log file. */
  async load(render) {
    const most = render.most === null ? "" : `?events=${render.most}`;
    render.loading ??= api.fetchApi(`/ltxgraph/timeline/${encodeURIComponent(render.id)}${most}`).then(async (answer) => {
      if (!answer.ok) {
        render.problem = `no log of render ${render.id}`;
        return;
      }
      const { events, summary, time } = await answer.json();
      if (events.length < render.events.length) return; // it went on meanwhile
      Object.assign(render, { events, time });
      if (!render.live) render.summary = summary;
    }).catch((error) => {
      render.problem = `the log of render ${render.id} could not be read: ${error.message}`;
    }).finally(() => {
      render.loading = null;
    });
    return render.loading;
  }
}

/** The timeline of a node of the open workflow; undefined for a node without one, null when another workflow is open. */
function timelineOf(graph, id) {
  return graphReady && graph === rootGraph().id ? timelines.get(nodeOf(id)) : null;
}

function onPhase({ detail }) {
  const { prompt_id: prompt, node, render, name, first, events, done } = detail;
  const graph = detail.graph ?? (graphReady ? rootGraph().id : null);
  graphOfPrompt.set(prompt, graph);
  const timeline = timelineOf(graph, node);
  if (timeline === undefined) return;
  // What belongs to another workflow is in store when the user comes back to it.
  const key = `${graph}:${node}`;
  const entry = stored()[key];
  const known = entry?.prompt === prompt ? entry.renders : [];
  if (done || !known.some((r) => r.render === render)) {
    const mine = { render, name, events: done ? first + events.length : null };
    const renders = known.filter((r) => r.render !== render);
    renders.splice(known.findIndex((r) => r.render === render) >>> 0, 0, mine); // in its place, or at the end
    store(key, { prompt, renders, verdict: null });
  }
  timeline?.hear(detail);
}

function onExecuted({ detail }) {
  const outputs = detail.output?.[OUTPUT];
  if (!outputs) return;
  const graph = graphOfPrompt.get(detail.prompt_id) ?? (graphReady ? rootGraph().id : null);
  const node = detail.display_node ?? detail.node;
  const timeline = timelineOf(graph, node);
  if (timeline === undefined) return;
  const shown = readOutputs(outputs);
  store(`${graph}:${node}`, { prompt: detail.prompt_id, ...shown });
  timeline?.executed(shown);
}

// At once, not in setup: a page that is loaded in mid-render hears messages before it has a graph.
api.addEventListener(MESSAGE, onPhase);
api.addEventListener("executed", onExecuted);
api.addEventListener("reconnecting", () => timelines.forEach((timeline) => timeline.lost()));

app.registerExtension({
  name: "LTXGraph.Timeline",
  setup() {
    graphReady = true;
  },
  nodeCreated(node) {
    if (!NODES.has(node.comfyClass)) return;
    const timeline = new NodeTimeline(node);
    timelines.set(node, timeline);
    const widget = node.addDOMWidget("timeline", "LTXGRAPH_TIMELINE", timeline.view.element, {
      serialize: false,
      hideOnZoom: false,
      getMinHeight: () => LEAST_HEIGHT,
      getValue: () => "",
      setValue: () => {},
      onDraw: () => timeline.view.zoomed(),
    });
    widget.serialize = false; // options.serialize keeps it out of the prompt, this out of the saved workflow
    const { onConfigure, onRemoved } = node;
    node.onConfigure = function (...args) {
      onConfigure?.apply(this, args);
      // Once the graph around the node is whole and has its id.
      setTimeout(() => this.graph && timeline.restore());
    };
    node.onRemoved = function (...args) {
      onRemoved?.apply(this, args);
      timelines.delete(node);
      timeline.view.destroy();
    };
  },
});
