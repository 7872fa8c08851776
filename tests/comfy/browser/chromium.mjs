// A headless Chromium of this machine for the other scripts here, and its pages.
import { createRequire } from 'node:module';
import path from 'node:path';

// options.browser: the executable; options.playwright: the folder of playwright-core's package.
export async function launch(options) {
  const { chromium } = createRequire(path.join(options.playwright, 'package.json'))('playwright-core');
  return chromium.launch({
    executablePath: options.browser,
    args: [
      '--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage', '--disable-quic', '--no-first-run', '--disable-sync',
      '--disable-background-networking', '--disable-component-update',
      '--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1',
    ],
  });
}

// This machine may have no way out, and the page asks for pages outside: every such connection must fail at once.
export async function newPage(browser, width, height) {
  const page = await browser.newPage({ viewport: { width, height } });
  page.setDefaultTimeout(120_000); // a busy machine of two cores, which the server shares
  await page.route('**/*', (route) =>
    new URL(route.request().url()).hostname === '127.0.0.1' ? route.continue() : route.abort());
  return page;
}
