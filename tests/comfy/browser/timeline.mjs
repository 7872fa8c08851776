// The timeline widget in a headless Chromium: fills while a render runs, survives page reloads (one in mid-render), hover,
// pin, zoom, themes, both node designs, a narrow node.
//
//   node timeline.mjs '{"url", "browser", "playwright", "artifacts", "frontend", "workflow", "hold"}'
//
// workflow: a UI workflow with all the nodes that show a timeline. hold: the file by which the test pack makes a render wait. Prints one JSON object, which test_widget.py judges. Screenshots go to artifacts.
import { rename, rm, writeFile } from 'node:fs/promises';
import path from 'node:path';

import { launch, newPage } from './chromium.mjs';

const options = JSON.parse(process.argv[2]);
const browser = await launch(options);
const page = await newPage(browser, 1500, 1000);
const problems = [];
const ours = (text) => /ltxg|LTXGraph/.test(text ?? '');
page.on('pageerror', (error) => problems.push(`${error.message} ${error.stack}`));
page.on('console', (message) => {
  const told = `${message.text()} ${message.location().url}`;
  // ComfyUI itself asks for files that a new user doesn't have.
  if (message.type() === 'error' && ours(told)) problems.push(told);
});
page.on('response', (answer) => {
  if (answer.status() >= 400 && ours(answer.url())) problems.push(`${answer.status()} ${answer.url()}`);
});

async function ready() {
  // After a reload the last workflow is opened again.
  await page.waitForFunction(() => window.app?.graph?.nodes.length && window.app.extensionManager);
  await page.evaluate(() => {
    window.timelines = () => app.graph.nodes.filter((n) => n.widgets?.some((w) => w.name === 'timeline'));
    window.elementOf = (id) => app.graph.getNodeById(id)?.widgets.find((w) => w.name === 'timeline').element;
    window.frames2 = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
    // The chart as numbers: two equal strings are two equal pictures.
    window.picture = (element) => element.querySelector('canvas').toDataURL();
    window.shown = async () => {
      await frames2();
      return Object.fromEntries(timelines().map((n) => {
        const element = elementOf(n.id);
        const text = (name) => element.querySelector(name).innerText.trim();
        return [n.id, {
          type: n.type, ...element.dataset, summary: text('.ltxg-summary'), words: text('.ltxg-words'), arms: text('.ltxg-arms'),
          verdict: text('.ltxg-verdict'), picture: picture(element), trace: element.querySelector('a').getAttribute('href'),
        }];
      }));
    };
    window.queueOnly = (id) => {
      app.canvas.deselectAll();
      app.canvas.select(app.graph.getNodeById(id));
      app.extensionManager.command.execute('Comfy.QueueSelectedOutputNodes');
    };
    window.look = async (id) => {
      const node = app.graph.getNodeById(id);
      const widget = node.widgets.find((w) => w.name === 'timeline');
      const below = Math.max(0, (widget.y ?? 0) + (widget.computedHeight ?? 0) - 820);
      app.canvas.ds.scale = 1;
      app.canvas.ds.offset = [90 - node.pos[0], 110 - node.pos[1] - below];
      app.canvas.setDirty(true, true);
      await frames2();
    };
  });
}

const looked = async (id, name) => {
  await page.evaluate((id) => look(id), id);
  await page.waitForTimeout(400);
  if (name) await page.screenshot({ path: path.join(options.artifacts, `timeline-${options.frontend}-${name}.png`) });
};
const setting = (id, value) => page.evaluate(([id, value]) => app.extensionManager.setting.set(id, value), [id, value]);
const settled = (id) => page.waitForFunction(
  (id) => elementOf(id)?.dataset.live === 'false' && elementOf(id).querySelector('.ltxg-summary').innerText.includes('covered'), id);
const results = { problems };

const started = Date.now();
results.times = {};
const passed = (name) => (results.times[name] = Date.now() - started);

await page.goto(options.url);
await ready();
passed('open');
await setting('Comfy.VueNodes.Enabled', false);
await setting('Comfy.ColorPalette', 'dark');

// A render, watched: every painting of the element leaves its number of events
await page.evaluate((json) => app.loadGraphData(json), options.workflow);
await page.waitForTimeout(300);
const [sampler, decode, parity, run] = ['LTXGraphSampler', 'LTXGraphVideoDecode', 'LTXGraphTimingParity', 'LTXGraphParityRun'].map(
  (type) => options.workflow.nodes.find((n) => n.type === type).id);
await looked(sampler);
results.watched = await page.evaluate(([sampler, decode, parity]) => new Promise((resolve) => {
  const seen = {};
  for (const id of [sampler, decode]) {
    const element = elementOf(id);
    seen[id] = [];
    new MutationObserver(() => seen[id].push([Number(element.dataset.events), element.dataset.live, element.querySelector('.ltxg-summary').innerText]))
      .observe(element, { attributes: true, attributeFilter: ['data-events'] });
  }
  for (const type of ['execution_success', 'execution_error', 'execution_interrupted']) {
    app.api.addEventListener(type, ({ detail }) =>
      resolve({ outcome: type, error: detail.exception_message ?? '', sampler: seen[sampler], decode: seen[decode] }), { once: true });
  }
  queueOnly(parity);
}), [sampler, decode, parity]);
passed('rendered');
for (const id of [sampler, decode, parity]) await settled(id);
await looked(sampler, 'render');
results.before = await page.evaluate(() => shown());
results.trace = await page.evaluate(async (href) => (await fetch(href)).json(), results.before[decode].trace);
results.saved = await page.evaluate(() => JSON.stringify(app.graph.serialize()));

// Both arms in one node, and a reload while the second one stands in its third step or later. Its log reaches the new page
// only after the node has ended.
await looked(run);
await writeFile(`${options.hold}.new`, '-eager-repeated 12');
await rename(`${options.hold}.new`, options.hold);
await page.evaluate((id) => queueOnly(id), run);
await page.waitForFunction(
  (id) => elementOf(id)?.dataset.render.endsWith('-eager-repeated') && Number(elementOf(id).dataset.events) >= 12, run);
await looked(run, 'live');
results.middle = (await page.evaluate(() => shown()))[run];
let letThrough;
const gate = new Promise((resolve) => (letThrough = resolve));
await page.route('**/ltxgraph/timeline/*-eager-repeated*', (route) => gate.then(() => route.continue()));
await page.reload();
await ready();
for (const id of [sampler, decode, parity]) await settled(id);
await looked(sampler, 'render-after-reload');
results.after = await page.evaluate(() => shown());
passed('reloaded');
await page.evaluate((id) => {
  window.painted = [];
  const element = elementOf(id);
  new MutationObserver(() => painted.push([element.dataset.render, element.dataset.live]))
    .observe(element, { attributes: true, attributeFilter: ['data-live', 'data-render'] });
}, run);
await rm(options.hold);
await page.waitForFunction((id) => elementOf(id)?.querySelector('.ltxg-verdict').innerText, run);
results.painted = await page.evaluate(() => painted);
letThrough();
const arm = (index) => page.evaluate(([id, index]) => elementOf(id).querySelectorAll('.ltxg-arms button')[index].click(), [run, index]);
const log = (id) => page.evaluate(async (id) => (await app.api.fetchApi(`/ltxgraph/timeline/${id}`)).json(), id);
await page.waitForFunction((id) => /eager repeated [0-9]/.test(elementOf(id).querySelector('.ltxg-arms').innerText), run);
await settled(run);
await looked(run, 'parity');
results.end = (await page.evaluate(() => shown()))[run];
results.log = await log(results.end.render);
await arm(1);
await settled(run);
results.second = (await page.evaluate(() => shown()))[run];
results.secondLog = await log(results.second.render);
await arm(0);
passed('parity');

// Hover, pin, zoom
const box = async () => (await page.evaluate((id) => {
  const { x, y, width, height } = elementOf(id).querySelector('canvas').getBoundingClientRect();
  return { x, y, width, height };
}, run));
const tip = () => page.evaluate(() => (document.querySelector('.ltxg-tip').hidden ? '' : document.querySelector('.ltxg-tip').innerText));
async function findStep() {
  const { x, y, width, height } = await box();
  for (let down = 0.25; down < 1; down += 0.08) {
    for (let right = 0.36; right < 0.8; right += 0.06) {
      await page.mouse.move(x + right * width, y + down * height);
      if ((await tip()).includes('sample.step')) return;
    }
  }
}
await findStep();
results.tip = await tip();
await page.mouse.down();
await page.mouse.up();
await page.waitForTimeout(300);
results.pin = await page.evaluate((id) => elementOf(id).querySelector('.ltxg-pin').innerText, run);
const scale = () => page.evaluate(() => app.canvas.ds.scale);
results.zoom = { before: await page.evaluate((id) => picture(elementOf(id)), run), graph: [await scale()] };
await page.mouse.wheel(0, -300);
await page.waitForTimeout(300);
results.zoom.after = await page.evaluate((id) => picture(elementOf(id)), run);
results.zoom.graph.push(await scale());
await page.screenshot({ path: path.join(options.artifacts, `timeline-${options.frontend}-pinned.png`) });
await page.keyboard.press('Escape');
await page.keyboard.press('0');
await page.waitForTimeout(300);
results.zoom.back = await page.evaluate((id) => elementOf(id).querySelector('.ltxg-pin').hidden, run);

passed('zoomed');

// Themes, designs, a narrow node
const geometry = () => page.evaluate((id) => {
  const element = elementOf(id);
  const { left, right, top, bottom, width, height } = element.getBoundingClientRect();
  const node = app.graph.getNodeById(id);
  const vue = document.querySelector(`[data-node-id="${id}"]`)?.getBoundingClientRect();
  const [x, y] = [0, 1].map((i) => node.pos[i] + app.canvas.ds.offset[i]);
  const canvas = app.canvas.canvas.getBoundingClientRect();
  const body = vue ?? { left: x + canvas.left, right: x + canvas.left + node.size[0], top: y + canvas.top - 30, bottom: y + canvas.top + node.size[1] };
  const inside = left >= body.left && right <= body.right && top >= body.top && bottom <= body.bottom;
  return { inside, width, height, overflows: element.scrollWidth > element.clientWidth + 1, paper: getComputedStyle(element).backgroundColor };
}, run);
results.dark = await geometry();
await setting('Comfy.ColorPalette', 'light');
await looked(run, 'light');
results.light = await geometry();
await page.evaluate((id) => app.graph.getNodeById(id).setSize([230, 760]), run);
await looked(run, 'narrow');
results.narrow = await geometry();
await setting('Comfy.VueNodes.Enabled', true);
await page.waitForTimeout(800);
await looked(run, 'vue');
results.vue = await geometry();
results.vue.events = (await page.evaluate(() => shown()))[run].events;
passed('end');
await browser.close();
console.log(JSON.stringify(results));
