#!/usr/bin/env node
// TinyMCE and Quill from npm in a form of `doclock-form`, as docs/typed-text.md shows it, in Chromium.
//
//     scripts/browsers/rich-editors.mjs URL
//
// URL is the example `forms`. Needs CHROMIUM (the path of a Chromium), chromedriver and npm.
// Serves the modules of web/ and two pages in front of the example. Prints what was seen, and fails at the first promise that does not hold.

import assert from 'node:assert/strict';
import { execFileSync, spawn } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync } from 'node:fs';
import http from 'node:http';
import { tmpdir } from 'node:os';
import path from 'node:path';
import { fileURLToPath } from 'node:url';

const { port } = new URL(process.argv[2]), web = path.join(path.dirname(fileURLToPath(import.meta.url)), '../../web');
const folder = mkdtempSync(path.join(tmpdir(), 'rich-editors-')), pause = ms => new Promise(done => setTimeout(done, ms));
execFileSync('npm', ['install', '--silent', '--no-audit', '--no-fund', '--ignore-scripts', '--prefix', folder, 'tinymce@7.9.3', 'quill@2.0.3']);

const page = (scripts, field, script) => `<!DOCTYPE html><title>rich</title><link rel=icon href="data:,">${scripts}<script type=module src=/locks/elements.js></script>
  <doclock-form lock="/locks/article/about-us"><form id=form method=post action="/article/about-us"><input name=title value="${Math.random()}">${field}<button id=save>Save</button></form></doclock-form><script>${script}</script>`;
const pages = {
  '/quill': page('<script src=/npm/quill/dist/quill.js></script>', '<input type=hidden name=text value="<p>old</p>"><div id=editor></div>', `
    const field = form.elements.text;
    window.quill = new Quill('#editor');
    quill.root.id = 'text-editor';
    quill.clipboard.dangerouslyPasteHTML(field.value);
    form.addEventListener('doclock-read', () => { field.value = quill.root.innerHTML; });
    quill.on('text-change', (change, before, source) => {
      if (source === 'user') quill.root.dispatchEvent(new Event('doclock-typed', { bubbles: true }));
    });
    window.embolden = () => quill.formatText(0, 3, 'bold', true, 'user');
    window.html = () => quill.root.innerHTML;
    window.isClosed = () => quill.root.getAttribute('contenteditable') === 'false';
    window.isReady = true;`),
  '/tinymce': page('<script src=/npm/tinymce/tinymce.min.js></script>', '<textarea name=text>&lt;p&gt;old&lt;/p&gt;</textarea>', `
    tinymce.init({ license_key: 'gpl', target: form.elements.text, setup(editor) {
      const field = form.elements.text;
      let isClosed = false;
      const close = () => { if (editor.initialized) editor.mode.set(isClosed ? 'readonly' : 'design'); };
      editor.on('init', close);
      editor.on('keydown mousedown wheel', async () => (await import('/locks/client.js')).DocLock.touch());
      editor.on('input change undo redo', () => { editor.save(); field.dispatchEvent(new Event('doclock-typed', { bubbles: true })); });
      editor.on('init', () => { window.isReady = true; });
      field.addEventListener('change', () => editor.setContent(field.value));
      form.addEventListener('doclock-read', () => editor.save());
      form.addEventListener('doclock-close', ({ detail }) => { isClosed = detail.isClosed; close(); });
      window.embolden = () => { editor.selection.select(editor.getBody(), true); editor.execCommand('Bold'); };
      window.html = () => editor.getContent();
      window.isClosed = () => editor.mode.get() === 'readonly';
    } });`),
};

const server = http.createServer((request, response) => {
  const { pathname } = new URL(request.url, 'http://x'), file = pathname.startsWith('/npm/') ? path.join(folder, 'node_modules', pathname.slice(5))
    : /^\/locks\/(client|keep|elements)\.js$/.test(pathname) ? path.join(web, path.basename(pathname)) : null;
  if (pages[pathname] || file) {
    response.setHeader('Content-Type', pages[pathname] ? 'text/html' : pathname.endsWith('.css') ? 'text/css' : 'text/javascript');
    const answers = () => { try { response.end(pages[pathname] ?? readFileSync(file)); } catch { response.writeHead(404).end(); } };
    return void setTimeout(answers, pathname.includes('/skins/') ? 1_500 : 0);   // the lock comes before the editor is there
  }
  const asked = http.request({ host: '127.0.0.1', port, path: request.url, method: request.method, headers: request.headers }, answer => {
    response.writeHead(answer.statusCode, answer.headers);
    answer.pipe(response);
  });
  asked.on('error', () => response.destroy());
  response.on('close', () => asked.destroy());
  request.pipe(asked);
});
await new Promise(done => server.listen(0, '127.0.0.1', done));
const url = `http://127.0.0.1:${server.address().port}`;

const driver = spawn('chromedriver', ['--port=0'], { stdio: ['ignore', 'pipe', 'ignore'] });
const base = await new Promise(done => driver.stdout.on('data', text => { const at = /on port (\d+)\./.exec(text); if (at) done(`http://127.0.0.1:${at[1]}`); }));
let session = '/session';
async function ask(method, place, body = {}) {
  const { value } = await (await fetch(base + session + place, { method, body: method === 'POST' ? JSON.stringify(body) : undefined })).json();
  if (value?.error) throw new Error(`${value.error}: ${value.message}`);
  return value;
}
const options = { binary: process.env.CHROMIUM, args: ['--headless=new', '--no-sandbox', '--disable-gpu'] };
session = `/session/${(await ask('POST', '', { capabilities: { alwaysMatch: { 'goog:chromeOptions': options } } })).sessionId}`;
const run = script => ask('POST', '/execute/sync', { script, args: [] });
const wait = body => ask('POST', '/execute/async', { script: `const done = arguments[0]; (async () => { ${body} })().then(done, error => done('failed: ' + error))`, args: [] });
const find = value => ask('POST', '/element', { using: 'css selector', value });
async function sees(condition) {
  for (const until = Date.now() + 30_000; Date.now() < until; await pause(50)) if (await run(`return Boolean(${condition})`).catch(() => false)) return;
  assert.fail(condition);
}
const element = "document.querySelector('doclock-form')", part = name => `${element}.shadowRoot.querySelector('[part=${name}]')`;
const values = () => kept('value'), kept = (what = 'name') => wait(`return new Promise(done => { const open = indexedDB.open('doclock-kept'); open.onsuccess = () => {
  const all = open.result.transaction('texts').objectStore('texts').getAll(); all.onsuccess = () => { open.result.close(); done(all.result.flatMap(it => it.records.map(it => it.${what}))); }; }; })`);

try {
  await ask('POST', '/url', { url: `${url}/` });
  await run("document.querySelector('[name=name]').value = 'alice'; document.forms[0].submit()");
  await sees("document.querySelector('form')?.action.endsWith('/logout')");
  for (const [name, place] of [['quill', '#text-editor'], ['tinymce', '#tinymce']]) {
    const says = what => console.log(`${name}: ${what}`), opens = async () => {
      await ask('POST', '/url', { url: `${url}/${name}` });
      // As a server writes it into the page.
      await wait(`${element}.setAttribute('version', (await (await fetch('/locks/article/about-us?shown=' + '0'.repeat(32))).json()).version)`);
    };
    await opens();
    await sees(`${element}.lock.token && window.isReady && !isClosed()`);
    await pause(1000);
    assert.deepEqual(await kept(), []);
    says('the editor itself has typed nothing');
    if (name === 'tinymce') await ask('POST', '/frame', { id: await find('iframe') });
    const [id] = Object.values(await find(place));
    await ask('POST', `/element/${id}/click`);
    await ask('POST', `/element/${id}/value`, { text: ' typed' });
    await ask('POST', '/frame', { id: null });
    await pause(1000);
    assert.deepEqual(await kept(), [name === 'quill' ? 'text-editor' : 'text']);
    says('what was typed is kept');
    await run('embolden()');
    await pause(1000);
    assert.ok((await values()).join().includes('<strong>'), (await values()).join());
    says('what the toolbar has done is kept');
    await opens();
    await sees(`window.isReady && ${part('restore')}.checkVisibility() && html().includes('old') && !html().includes('typed')`);
    await pause(500);
    await run(`${part('restore')}.click()`);
    await sees("html().includes('typed')");
    says('it is put back');
    await wait(`await ${element}.lock.release()`);
    await sees('isClosed()');
    await pause(500);
    await run(`${part('edit')}.click()`);
    await sees('!isClosed()');
    says('it is closed and opened with the form');
    await ask('POST', `/element/${Object.values(await find('#save'))[0]}/click`);
    await sees("document.getElementById('text')?.value.includes('typed')");
    await sees(`${element}.lock.token`);
    await pause(1000);
    assert.deepEqual(await kept(), []);
    says('the save has its text, and ends it');
  }
} finally {
  await ask('DELETE', '').catch(() => {});
  driver.kill();
  server.close();
  server.closeAllConnections();
  rmSync(folder, { recursive: true });
}
