// What a key costs a page with an element, and lists of documents.

import assert from 'node:assert/strict';
import { beforeEach, test } from 'node:test';
import { DocLock, Fields, Lock, forgetAll, keep, locks, person, rows, server, settled, show, sleep, window } from './page.mjs';

// What jsdom does not have.
Object.defineProperty(window.ShadowRoot.prototype, 'adoptedStyleSheets', { get: () => [] });
globalThis.CSSStyleSheet = class { replaceSync() {} };
window.Element.prototype.checkVisibility = () => true;
await import('../../web/elements.js');

const mine = { key: 'item/1', token: 't1', mode: 'exclusive', state: 'mine', since: new Date().toISOString(), expires_in_ms: 600_000 };
beforeEach(async () => {
  await forgetAll();
  server.answer = ({ url, method }) => url.endsWith('/release') ? { status: 204 } : { status: method === 'POST' ? 201 : 200, body: mine };
});

/** An element with this form. */
async function opens(html) {
  document.body.innerHTML = `<doclock-form lock="/locks/item/1" version="${'1'.repeat(32)}"><form id=form method=post>${html}</form></doclock-form>`;
  const [element] = document.body.children;
  while (!element.lock?.token) await sleep(5);
  await settled();
  await sleep(20);
  const part = name => [...element.shadowRoot.querySelectorAll('*')].find(it => it.part === name);
  return { element, form: element.firstChild, part, closes: async () => { element.remove(); await settled(); await sleep(20); } };
}

test('a key does not compare an offered text again', async () => {
  const one = await opens('<input name=a><input name=b>');
  person.types(one.form.elements.a, 'of yesterday');
  await one.closes();
  const two = await opens('<input name=a value=stored><input name=b>'), { plain } = Fields.prototype;
  assert.equal(two.part('differences').textContent, 'aof yesterdayStored: \u2068stored\u2069');
  let compared = 0;
  Fields.prototype.plain = function (...all) {
    compared++;
    return plain.apply(this, all);
  };
  try {
    for (const text of ['x', 'xy', 'xyz']) person.types(two.form.elements.b, text);
    await sleep(5);
    assert.equal(compared, 0);
    // After a save, something else is stored.
    person.types(two.form.elements.a, 'saved');
    await two.element.lock.fetch('/api/1', { method: 'PUT' });
    await sleep(5);
    assert.equal(two.part('differences').textContent, 'aof yesterdayStored: \u2068saved\u2069');
  } finally {
    Fields.prototype.plain = plain;
  }
  await two.closes();
});

test('what has not changed is told to nobody', async () => {
  const form = show('<input name=a><input name=b><select multiple name=s><option selected>1<option>2</select>'), fields = new Fields(form);
  let told = 0;
  fields.listen();
  fields.hears.add(() => told++);
  person.types(form.elements.a, 'typed');
  await sleep(5);
  assert.equal(told, 1);
  person.types(form.elements.a, 'typed');
  person.types(form.elements.b, '');
  await sleep(5);
  assert.equal(told, 1);
  person.chooses(form.elements.s, '2');
  person.chooses(form.elements.s, '1');
  await sleep(5);
  assert.deepEqual([told, fields.records.size], [3, 1]);
  fields.close();
});

test('a server that is being deployed is not told as a wrong address to the holder of a lock', async () => {
  const one = await opens('<input name=a>'), { answer } = server, says = () => ['says', 'more'].map(it => one.part(it).textContent);
  server.answer = () => ({ status: 404, body: '<h1>Not found</h1>' });
  await one.element.lock.check();
  assert.match(says().join(), /^The server says: .*try again later.*,Your lock lasts until/);
  server.answer = ({ url }) => url.endsWith('/heartbeat') ? { status: 200, body: { held: [], lost: [] } } : { status: 404, body: '<h1>Not found</h1>' };
  await one.element.lock.check();
  await sleep(20);
  assert.match(says().join(), /^You do not have the lock any more.,The server says: /);
  server.answer = answer;
  await one.closes();
});

test('a list goes on after its callback has failed', async () => {
  const told = [], complaints = [], { error } = console;
  server.answer = ({ body }) => ({ status: 200, body: { locks: JSON.parse(body).keys.map(key => ({ key, state: 'free' })) } });
  console.error = it => complaints.push(it.message);
  const list = DocLock.list('/locks', ['item/1'], states => {
    told.push([...states.keys()]);
    if (told.length === 1) throw new Error('of the page');
  });
  await sleep(20);
  list.show(['item/1', 'item/2']);
  await sleep(20);
  console.error = error;
  list.close();
  assert.deepEqual([told, complaints], [[['item/1'], ['item/2']], ['of the page']]);
});

test('an element that comes back keeps a text that a later page has found not to be stored', async () => {
  for (const isRefused of [true, false]) {
    await forgetAll();
    const { answer } = server, saved = '2'.repeat(32), one = await opens('<input name=a>');
    server.answer = request => request.url.includes('saved_under') ? { status: 200, body: { ...mine, saved } } : answer(request);
    person.types(one.form.elements.a, 'typed');
    one.form.dispatchEvent(new window.SubmitEvent('submit', { bubbles: true, cancelable: true }));
    await sleep(5);
    const comes = name => window.dispatchEvent(Object.assign(new window.Event(name), { persisted: true }));
    comes('pagehide');
    await settled();
    locks.held.clear();   // of the page that was left
    if (isRefused) {
      const form = Object.assign(document.createElement('form'), { method: 'post', innerHTML: '<input name=a>' });
      document.body.append(form);
      const two = await keep(form, { saved: ({ token }) => token && saved, lock: new Lock(undefined, saved) });
      assert.equal(two.found.length, 1);
      await two.end();
    }
    comes('pageshow');
    await settled();
    await sleep(50);
    await one.closes();
    assert.deepEqual((await rows()).map(it => it.records.map(it => it.value)), isRefused ? [['typed']] : [], String(isRefused));
  }
});
