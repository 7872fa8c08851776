// Opens bundled workflows from ComfyUI's template list in headless Chromium, checks, converts, runs, photographs them.
//
//   node workflows.mjs '{"url", "browser", "playwright", "artifacts", "workflows": [{"name", "id", "nodes", "run"}]}'
//
// Prints one JSON object: workflow name -> {hasPicture, missing, complaint, api, outcome, error}. test_browser.py starts it.
import path from 'node:path';

import { launch, newPage } from './chromium.mjs';

const options = JSON.parse(process.argv[2]);
const browser = await launch(options);

async function openPage() {
  const page = await newPage(browser, 2400, 1100);
  await page.goto(options.url);
  await page.waitForFunction(() => window.app?.graph && window.app.extensionManager);
  return page;
}

async function openTemplate(page, { name, id, nodes }) {
  await page.evaluate(() => window.app.extensionManager.command.execute('Comfy.BrowseTemplates'));
  const card = page.locator(`[data-testid="template-workflow-${name}"]`);
  await card.scrollIntoViewIfNeeded();
  // The list shows a copy of its own: by its pixels.
  const hasPicture = await card.locator('img').first().evaluate(async (img, name) => {
    const answer = await fetch(`/api/workflow_templates/ComfyUI-LTXGraph/${name}.jpg`);
    if (!answer.ok) return false;
    await img.decode();
    const pixels = (source, { width, height }) => {
      const context = new OffscreenCanvas(width, height).getContext('2d');
      context.drawImage(source, 0, 0);
      return context.getImageData(0, 0, width, height).data.join();
    };
    const file = await createImageBitmap(await answer.blob());
    return pixels(img, { width: img.naturalWidth, height: img.naturalHeight }) === pixels(file, file);
  }, name);
  await page.screenshot({ path: path.join(options.artifacts, 'templates.png') });
  await card.click();
  await page.waitForFunction(
    ([graph, count]) => window.app.graph.id === graph && window.app.graph.nodes.length === count, [id, nodes]);
  await page.waitForSelector('[data-testid="template-workflows-content"]', { state: 'detached' });
  return hasPicture;
}

// Types in the graph, subgraphs included, that no installed node registered.
function missingTypes() {
  const missing = new Set();
  const walk = (graph) => {
    for (const node of graph.nodes) {
      if (node.subgraph) walk(node.subgraph);
      else if (!(node.type in window.LiteGraph.registered_node_types)) missing.add(node.type);
    }
  };
  walk(window.app.graph);
  return [...missing];
}

// Queue the open workflow as the Run button does, and wait for its end.
function runToTheEnd() {
  return new Promise((resolve) => {
    for (const type of ['execution_success', 'execution_error', 'execution_interrupted']) {
      window.app.api.addEventListener(type, ({ detail }) =>
        resolve({ outcome: type, error: detail.exception_message ?? '' }), { once: true });
    }
    window.app.extensionManager.command.execute('Comfy.QueuePrompt');
  });
}

const results = {};
const page = await openPage();
for (const workflow of options.workflows) {
  const hasPicture = await openTemplate(page, workflow);
  const result = {
    hasPicture,
    missing: await page.evaluate(missingTypes),
    complaint: /missing node/i.test(await page.evaluate(() => document.body.innerText)),
    api: await page.evaluate(async () => (await window.app.graphToPrompt()).output),
  };
  if (workflow.run) Object.assign(result, await page.evaluate(runToTheEnd));
  await page.evaluate(() => window.app.extensionManager.command.execute('Comfy.Canvas.FitView'));
  // Pictures and videos of the outputs are loaded after the final event.
  await page.waitForLoadState('networkidle');
  await page.waitForTimeout(1500);
  await page.screenshot({ path: path.join(options.artifacts, `${workflow.name}.png`) });
  results[workflow.name] = result;
}
await browser.close();
console.log(JSON.stringify(results));
