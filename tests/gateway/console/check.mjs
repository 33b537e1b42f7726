// The console of a running gateway in a browser: check.mjs NODE_MODULES CHROMIUM BASE_URL ADMIN_URL MODEL SCREENSHOTS [FLEET CHECK...].
// Fails by assertion; puts pictures into the folder SCREENSHOTS. FLEET says in JSON what is there, if it is not `moongate up`; then only
// the named checks are made.

import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { join } from 'node:path';

import { fleet, manyEngines } from './fleets.mjs';

const [modules, executablePath, baseURL, adminURL, model, screenshots, given, ...named] = process.argv.slice(2);
/** How many of each there are, and parts of engines' names. */
const { prefill, decode, store, engines } = JSON.parse(given ?? '{ "prefill": 2, "decode": 2, "store": 2, "engines": [] }');
const require = createRequire(`${modules}/`);
const { chromium } = require('playwright-core');
const axe = readFileSync(require.resolve('axe-core/axe.min.js'), 'utf8');

const flags = ['--no-sandbox', '--disable-gpu', '--no-first-run', '--disable-background-networking', '--disable-component-update', '--disable-sync'];
const browser = await chromium.launch({ executablePath, args: flags });
const PHONE = { viewport: { width: 390, height: 844 }, isMobile: true, hasTouch: true };
const DESK = { viewport: { width: 1040, height: 900 } };

/** A page on which everything that goes wrong is noted. */
async function open(options = DESK, prepare = async () => {}) {
  const context = await browser.newContext(options);
  context.setDefaultTimeout(30_000);
  const page = await context.newPage();
  const wrong = [];
  page.on('pageerror', (error) => wrong.push(String(error)));
  page.on('console', (message) => {
    // The page asks for what it is refused, and the browser reports that.
    if (message.type() === 'error' && !message.text().startsWith('Failed to load resource')) wrong.push(message.text());
  });
  page.on('request', (request) => {
    if (!request.url().startsWith(`${adminURL}/`) && !request.url().startsWith('data:')) wrong.push(`asked for ${request.url()}`);
  });
  await prepare(page);
  await page.goto(`${adminURL}/console`);
  const close = async () => {
    await context.close();
    assert.deepEqual(wrong, []);
  };
  return { page, close };
}

const shown = (page, selector, text) => page.locator(selector).filter({ hasText: text }).first().waitFor();
const pretend = (state) => (page) => page.route('**/debug/fleet', (route) => route.fulfill({ json: state }));
const picture = (page, name, options = {}) => page.screenshot({ path: join(screenshots, `${name}.png`), ...options });

async function isAccessible(page) {
  await page.evaluate(axe);
  const { violations } = await page.evaluate(() => window.axe.run(document, { resultTypes: ['violations'] }));
  assert.deepEqual(violations.map(({ id, nodes }) => `${id}: ${nodes.map((node) => node.html).join(' ')}`), []);
}

async function fits(page) {
  const [wide, room] = await page.evaluate(() => [document.documentElement.scrollWidth, innerWidth]);
  assert.ok(wide <= room, `${wide} pixels on a screen of ${room}`);
}

/** Pastes a prompt, and asks until it is known where it is: a busy engine may not tell its tokens in time. */
async function look(page, text) {
  await page.getByLabel(/A prompt, a JSON list/).fill(text);
  const answer = page.locator('#prompt-answer').filter({ hasText: /Interpreted|No prediction/ });
  for (let attempt = 0; attempt < 100; attempt += 1) {
    await page.getByRole('button', { name: 'Look up' }).click();
    await answer.waitFor();
    const told = await answer.textContent();
    if (told.includes('Interpreted')) return told;
  }
  throw new Error('no engine tells the tokens of a prompt');
}

const story = Array.from({ length: 900 }, (_, at) => `word${at}`).join(' ');
const chat = async (content) => {
  const body = JSON.stringify({ model, max_tokens: 4, messages: [{ role: 'user', content }] });
  const answer = await fetch(`${baseURL}/chat/completions`, { method: 'POST', headers: { 'content-type': 'application/json' }, body });
  assert.equal(answer.status, 200);
  await answer.text();
};

const checks = {
  async topology() {
    const { page, close } = await open();
    await shown(page, '#status', 'Serving');
    assert.equal(await page.locator('.box.prefill').count(), prefill);
    assert.equal(await page.locator('.box.decode').count(), decode);
    await shown(page, '.box.store', 'store node');
    assert.equal(await page.locator('.box.store').count(), store);
    // Every prefill makes a pair with every decode, and reads from every store.
    const [pairs, reads] = [prefill * decode, prefill * store];
    await page.locator('.lines .link').nth(pairs + reads - 1).waitFor({ state: 'attached' });
    assert.equal(await page.locator('.lines .link:not(.fetch)').count(), pairs);
    assert.equal(await page.locator('.lines .link.fetch').count(), reads);
    assert.equal(await page.locator('#engine-rows tr').count(), prefill + decode);
    for (const name of engines) await shown(page, '#engine-rows tr', name);
    for (const count of [prefill, decode]) await shown(page, '#rollout', `${count} of ${count} serving`);
    await close();
  },

  async traffic() {
    const { page, close } = await open();
    await shown(page, '.tile', 'Requests');
    // The third finds what the first or the second has left, whichever engines they went to.
    for (let turn = 0; turn < 3; turn += 1) await chat(`${story} and on`.repeat(turn + 1));
    await shown(page, '.tile:has-text("Requests") .value', /[1-9]/);
    await shown(page, '.tile:has-text("Cache hits") .value', /[1-9]\d*\s%/);
    await shown(page, '#engine-rows td[data-head="Hit rate"]', /[1-9]\d*\s%/);
    await close();
  },

  async prompt() {
    await chat(story);
    const { page, close } = await open();
    const told = await look(page, story);
    assert.match(told, /Interpreted as a user's message: \d+ tokens.*have some of them/);
    const tokens = await page.locator('#prompt-answer td[data-head="L1"]').first().textContent();
    assert.match(tokens, /[1-9]/);
    // What one engine has computed is in the store a moment later, for the others.
    const fresh = `told once: ${story}`;
    await chat(fresh);
    const stored = page.locator('#prompt-answer td[data-head="L3"]').filter({ hasText: /[1-9]/ });
    await look(page, fresh);
    for (let attempt = 0; attempt < 100 && (await stored.count()) === 0; attempt += 1) await look(page, fresh);
    assert.ok((await stored.count()) > 0, 'no engine would find the prompt in the store');
    assert.match(await look(page, JSON.stringify([{ role: 'user', content: story }])), /Interpreted as 1 message:/);
    await close();
  },

  async decisions() {
    const { page, close } = await open();
    const first = page.locator('#decision-rows a').first();
    await first.focus();
    await page.keyboard.press('Enter');
    await shown(page, '#decision h3', 'Why');
    assert.equal(await page.locator('#decision tr.chosen').count(), 1);
    // The address opens the same for somebody else.
    await page.reload();
    await shown(page, '#decision h3', 'Why');
    await page.getByRole('link', { name: 'Close' }).click();
    await page.locator('#decision').waitFor({ state: 'hidden' });
    await close();
  },

  async silence() {
    const { page, close } = await open();
    await shown(page, '#status', 'Serving');
    await page.route('**/debug/fleet', (route) => route.abort());
    await shown(page, '#status', 'does not respond');
    assert.ok(await page.locator('#content.stale').isVisible(), 'what was known is still shown');
    await page.unroute('**/debug/fleet');
    await shown(page, '#status', 'Serving');
    assert.equal(await page.locator('#content.stale').count(), 0);
    await close();
  },

  async token() {
    const given = [];
    const { page, close } = await open(DESK, async (page) => {
      await page.route('**/debug/**', (route) => {
        const token = route.request().headers()['authorization'];
        given.push(token);
        return token === 'Bearer right' ? route.continue() : route.fulfill({ status: 401, json: {} });
      });
    });
    await page.getByLabel(/requires its admin token/).fill('wrong');
    await page.getByRole('button', { name: 'Open' }).click();
    await shown(page, '#token-refused', 'rejected');
    await page.getByLabel(/requires its admin token/).fill('right');
    await page.keyboard.press('Enter');
    await shown(page, '#status', 'Serving');
    await page.reload();
    await shown(page, '#status', 'Serving');
    assert.ok(given.includes(undefined) && given.includes('Bearer wrong') && given.at(-1) === 'Bearer right', String(given));
    await isAccessible(page);
    await close();
  },

  async no_engines() {
    const { page, close } = await open(DESK, pretend(fleet([])));
    await shown(page, '#status', 'No engines yet');
    await shown(page, '#topology-note', 'No engines yet');
    await isAccessible(page);
    await close();
  },

  async many_engines() {
    const { page, close } = await open(DESK, pretend(fleet(manyEngines(500))));
    await shown(page, '#engine-count', '500 total');
    assert.equal(await page.locator('#engine-rows tr').count(), 50);
    assert.match(await page.locator('#engine-rows tr').first().textContent(), /unhealthy/);
    await page.getByRole('button', { name: 'Show 50 more of 450' }).click();
    assert.equal(await page.locator('#engine-rows tr').count(), 100);
    await page.getByLabel('Find').fill('decode zone-b');
    await shown(page, '#engine-count', /^\d+ of 500$/);
    assert.ok((await page.locator('.map .box').count()) <= 24, 'engines are put together');
    await shown(page, '#legend', 'same zone');
    await shown(page, '#rollout', '2 versions in use');
    await isAccessible(page);
    await page.getByLabel('Find').fill('');
    await page.evaluate(() => scrollTo(0, 0));
    await picture(page, 'many');
    await close();
  },

  async looks() {
    const long = { fullPage: true, clip: { x: 0, y: 0, width: PHONE.viewport.width, height: 1600 } };
    for (const [name, options, colorScheme, part] of [['light', DESK, 'light', { fullPage: true }], ['dark', DESK, 'dark', {}], ['phone', PHONE, 'dark', long]]) {
      const { page, close } = await open({ ...options, colorScheme });
      await shown(page, '#status', 'Serving');
      for (let turn = 0; turn < 4; turn += 1) await chat(`${story} ${name} ${turn}`);
      await shown(page, '.tile:has-text("Cache hits") .value', /[1-9]\d*\s%/);
      await look(page, `${story} and on and on`);
      await page.locator('#decision-rows a').first().click();
      await shown(page, '#decision h3', 'Why');
      await page.evaluate(() => scrollTo(0, 0));
      await isAccessible(page);
      await fits(page);
      await picture(page, name, part);
      await close();
    }
  },
};

for (const name of named.length > 0 ? named : Object.keys(checks)) {
  await checks[name]();
  console.log(`ok ${name}`);
}
await browser.close();
