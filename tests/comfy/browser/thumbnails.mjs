// Draws the graphs of bundled workflows as ComfyUI's canvas shows them, each into a small JPEG.
//
//   node thumbnails.mjs '{"url", "browser", "playwright", "width", "height", "quality", "files": [[workflow.json, picture.jpg]]}'
//
// make_thumbnails.py starts it.
import { readFile, writeFile } from 'node:fs/promises';

import { launch, newPage } from './chromium.mjs';

const options = JSON.parse(process.argv[2]);
const browser = await launch(options);
const page = await newPage(browser, 2200, 1300);
await page.goto(options.url);
await page.waitForFunction(() => window.app?.graph && window.app.extensionManager);

// The canvas holds the nodes and links without the page's menus, and without the text fields that lie over it.
async function picture({ width, height, quality }) {
  const { canvas, graph } = window.app;
  // Notes say in text what no small picture shows, and the red frames are of files that this machine doesn't have.
  for (const node of [...graph.nodes]) {
    node.has_errors = false;
    if (node.type === 'MarkdownNote') graph.remove(node);
  }
  const boxes = graph.nodes.map((node) => [node.pos[0], node.pos[1] - 30, ...node.size]);
  const left = Math.min(...boxes.map(([x]) => x));
  const top = Math.min(...boxes.map(([, y]) => y));
  const right = Math.max(...boxes.map(([x, , w]) => x + w));
  const bottom = Math.max(...boxes.map(([, y, , h]) => y + h + 30));
  const area = canvas.canvas;
  const shown = Math.min(area.width, (area.height * width) / height); // the largest part of the picture's proportions
  const scale = 0.94 * Math.min(shown / (right - left), (shown * height) / width / (bottom - top));
  canvas.ds.scale = scale;
  canvas.ds.offset = [
    shown / 2 / scale - (left + right) / 2,
    (shown * height) / width / 2 / scale - (top + bottom) / 2,
  ];
  canvas.show_info = false;
  canvas.draw(true, true);
  const small = new OffscreenCanvas(width, height);
  const context = small.getContext('2d');
  context.imageSmoothingQuality = 'high';
  context.drawImage(area, 0, 0, shown, (shown * height) / width, 0, 0, width, height);
  const blob = await small.convertToBlob({ type: 'image/jpeg', quality });
  return [...new Uint8Array(await blob.arrayBuffer())];
}

for (const [workflow, target] of options.files) {
  await page.evaluate((json) => window.app.loadGraphData(json), JSON.parse(await readFile(workflow, 'utf8')));
  await page.waitForTimeout(1000);
  await writeFile(target, Buffer.from(await page.evaluate(picture, options)));
}
await browser.close();
