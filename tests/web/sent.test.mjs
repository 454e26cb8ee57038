// A text that was sent is kept until it is known that this text was stored: that something was saved under its lock says less.

import assert from 'node:assert/strict';
import { beforeEach, test } from 'node:test';
import { DocLock, Lock, forgetAll, keep, keeping, locks, person, rows, server, settled, show, sleep, trusted, window } from './page.mjs';

const V = n => String(n).repeat(32);
const names = texts => texts.map(it => Object.keys(it.fields));
const left = async () => (await rows()).map(it => it.records.map(it => it.name));
const submit = (form, submitter = null) => form.dispatchEvent(new window.SubmitEvent('submit', { bubbles: true, cancelable: true, submitter }));

/** A server with one document. It gives each write to `store(request)`, which returns the answer; a 200 is a new version, saved under the lock. */
const doc = { version: 1, saved: null, store: async () => ({ status: 200 }) };
async function answer(request) {
  const { pathname, searchParams } = new URL(request.url, 'http://127.0.0.1/');
  const mine = { key: 'item/1', token: 't1', mode: 'exclusive', state: 'mine', since: new Date().toISOString(), expires_in_ms: 600_000 };
  if (pathname.startsWith('/api/')) {
    const told = await doc.store(request);
    if (told.status === 200) doc.saved = V(++doc.version);
    return { headers: { ETag: `"${V(doc.version)}"` }, ...told };
  }
  if (pathname.endsWith('/release')) return { status: 204 };
  if (pathname.endsWith('/heartbeat')) return { status: 200, body: { held: [mine], lost: [] } };
  return request.method === 'POST' ? { status: 201, body: mine } : { status: 200, body: { ...mine, saved: searchParams.has('saved_under') ? doc.saved : null } };
}

/** A page with this form, its lock, and what it is offered. `leaves` is a reload: the tab keeps its lock. */
async function visits(html) {
  const form = show(html), found = [], lock = DocLock.open('/locks/item/1', { version: V(doc.version) });
  await new Promise(done => lock.addEventListener('held', done));
  const keeper = await lock.keep(form, { onkept: text => found.push(text) });
  await settled();
  return { form, lock, keeper, found, leaves: async () => { await keeper.flush(); keeper.close(); await lock.close(); await settled(); } };
}
const stores = (page, how, body = '') => page.lock.fetch('/api/1', { method: 'PUT', body }, how);

beforeEach(async () => {
  await forgetAll();
  Object.assign(doc, { version: 1, saved: null, store: async () => ({ status: 200 }) });
  server.answer = answer;
});

const html = (title = '', body = '') => `<input name=title value="${title}"><textarea name=body>${body}</textarea><button>S</button><button formaction=/status>B</button><button name=action value=status>C</button>`;

test('a save of some fields is no save of the others', async () => {
  const one = await visits(html());
  person.types(one.form.elements.title, 'new');
  person.types(one.form.elements.body, 'typed');
  await stores(one, { saves: ['title'] });
  await one.leaves();
  const two = await visits(html('new'));
  assert.deepEqual([names(two.found), two.found.map(it => it.submitted)], [[['body']], [false]]);
  await two.leaves();
});

test('a refused text is not stored by the next write under the same lock', async () => {
  for (const status of [422, 500]) {
    await forgetAll();
    doc.saved = null;
    const one = await visits(html());
    person.types(one.form.elements.body, 'refused');
    doc.store = async () => ({ status });
    await stores(one, {});
    doc.store = async () => ({ status: 200 });
    await stores(one, { saves: false });
    await one.leaves();
    // Somebody else has changed the field since.
    const two = await visits(html('', 'another text'));
    assert.deepEqual(names(two.found), [['body']], String(status));
    await two.leaves();
  }
});

test('a page that answers a save without the application is no save', async () => {
  const one = await visits(html());
  person.types(one.form.elements.body, 'typed');
  doc.store = async () => ({ status: 200, person: null, headers: {} });   // a login page, by a proxy
  await stores(one, {});
  assert.equal(one.lock.version, V(1), 'the next save has the same condition');
  Object.assign(doc, { version: 1, saved: null });
  await one.leaves();
  const two = await visits(html());
  assert.deepEqual(names(two.found), [['body']]);
  await two.leaves();
});

test('a text that got no answer is known as saved later, unless its field is as it was before', async () => {
  for (const [body, kept] of [['typed, and normalised', []], ['', [['body']]]]) {
    await forgetAll();
    Object.assign(doc, { saved: null });
    const one = await visits(html());
    person.types(one.form.elements.body, 'typed');
    doc.store = async () => { throw new TypeError('no network'); };
    await assert.rejects(stores(one, {}));
    await one.leaves();
    doc.saved = V(++doc.version);
    const two = await visits(html('', body));
    assert.deepEqual(names(two.found), kept);
    await two.leaves();
  }
});

test('a button whose handler stores only a part ends no other text', async () => {
  for (const n of [1, 2]) {
    await forgetAll();
    const one = await keep(show(html())), { form } = one.fields;
    person.types(form.elements.body, 'typed');
    submit(form, form.querySelectorAll('button')[n]);
    await one.crash();
    // A page without the form cannot compare.
    await keeping.settle('alice', '/locks/item/1', async () => 'v2');
    assert.deepEqual(await left(), [['body']]);
    const two = await keep(show(html()), { lock: new Lock(undefined, 'v2'), saved: () => 'v2' });
    assert.deepEqual(two.found.map(it => [it.fields, it.submitted]), [[{ body: ['typed'] }, true]]);
    await two.end();
    // What was not stored at that visit is not stored by a colleague, and what another page shows is stored.
    const three = await keep(show(html('', 'typed, and more by a colleague')), { lock: new Lock(undefined, 'v3'), saved: ({ token }) => token && 'v2' });
    assert.deepEqual([three.found.length, await left()], [1, [['body']]]);
    await three.end();
    const four = await keep(show(html('', 'typed')), { lock: new Lock(undefined, 'v4'), saved: ({ token }) => token && 'v2' });
    assert.deepEqual([four.found.length, await left()], [0, []]);
    await four.end();
  }
});

test('a text that was not stored stays so when a colleague changes its field', async () => {
  const visit = async (body, version) => {
    const page = await keep(show(html('', body)), { lock: new Lock(undefined, version), saved: ({ token }) => token && 'v2' });
    await page.end();
    return page.found.map(it => it.submitted);
  };
  // By a button with an address of its own, also if the page was not opened meanwhile.
  for (const [n, ...bodies] of [[0, '', 'by a colleague'], [2, '', 'by a colleague'], [1, 'by a colleague']]) {
    await forgetAll();
    const one = await keep(show(html()));
    person.types(one.fields.form.elements.body, 'typed');
    submit(one.fields.form, one.fields.form.querySelectorAll('button')[n]);
    await one.crash();
    for (const [n, body] of bodies.entries()) assert.deepEqual([await visit(body, `v${n + 2}`), await left()], [[true], [['body']]], body);
  }
});

test('what a button with a name has stored is known, also in fields that cannot be told apart, and in new rows', async () => {
  const two = (a, b) => `<input name=a value="${a}"><input name=a value="${b}"><button name=commit>S</button>`;
  const row = (n, id, text) => `<p>${id && `<input type=hidden name="items[${n}].id" value=${id}>`}<input name="items[${n}].text" value="${text}"></p>`;
  const rowsOf = (...all) => all.map((it, n) => row(n, ...it)).join('') + '<button name=_save>S</button>';
  for (const [before, after, kept] of [
    [two('', ''), two('first', 'second'), []], [two('', ''), two('first', 'third'), [['a']]],
    [rowsOf([5, 'a'], ['', ''], ['', '']), rowsOf([5, 'a'], [6, 'first'], [7, ' second ']), []],
    [rowsOf([5, 'a'], ['', ''], ['', '']), rowsOf([5, 'a'], [6, 'first']), [['items[2].text']]],
  ]) {
    await forgetAll();
    const one = await keep(show(before)), { form } = one.fields;
    for (const [n, text] of ['first', 'second'].entries()) person.types([...form.querySelectorAll('input:not([type=hidden])')].at(n - 2), text);
    submit(form, form.querySelector('button'));
    await one.crash();
    const next = await keep(show(after), { lock: new Lock(undefined, 'v2'), saved: () => 'v2' });
    assert.deepEqual([next.found.length, await left()], [kept.length, kept], after);
    await next.end();
  }
});

test('a text of another form of the document is offered there only', async () => {
  const step = (name, value = '') => `<input name=${name} value="${value}"><button name=go>N</button>`;
  const one = await keep(show(step('a'))), { form } = one.fields;
  person.types(form.elements.a, 'first');
  submit(form, form.querySelector('button'));
  await one.crash();
  for (const [html, offered, kept] of [[step('b'), 0, [['a']]], [step('b') + step('a', 'first'), 0, []]]) {
    const page = await keep(show(html), { lock: new Lock(undefined, 'v2'), saved: () => 'v2' });
    assert.deepEqual([page.found.length, await left()], [offered, kept]);
    await page.end();
  }
});

test('a text of a row that is not there is offered, although something was saved', async () => {
  const one = await keep(show('<input name=title><input name="items[0].text"><button name=commit>S</button>')), { form } = one.fields;
  person.types(form.elements[1], 'typed');
  submit(form, form.querySelector('button'));
  await one.crash();
  const two = await keep(show('<input name=title><button name=commit>S</button>'), { lock: new Lock(undefined, 'v2'), saved: () => 'v2' });
  assert.deepEqual(two.found.map(it => it.fields), [{ 'items[0].text': ['typed'] }]);
  await two.end();
});

test('what a living page writes while another one asks the server stays', async () => {
  for (const isWhole of [true, false]) {
    await forgetAll();
    const page = await keep(show(html())), { form } = page.fields;
    person.types(form.elements.body, 'sent');
    submit(form, isWhole ? null : form.querySelectorAll('button')[2]);
    await page.keeper.flush();
    let answer;
    const settling = keeping.settle('alice', '/locks/item/1', () => new Promise(done => { answer = done; }));
    while (!answer) await sleep(1);
    person.types(form.elements.body, 'sent, and more');
    await page.keeper.flush();
    answer('v2');
    await settling;
    assert.deepEqual((await rows()).map(it => it.records.map(it => it.value)), [['sent, and more']]);
    await page.end();
  }
});

test('an offered text outlives what is saved later under the same lock', async () => {
  for (const later of ['title', 'body']) {
    await forgetAll();
    const one = await keep(show(html()));
    person.types(one.fields.form.elements.body, 'refused');
    submit(one.fields.form);
    await one.crash();
    const two = await keep(show(html()));
    assert.deepEqual(two.found.map(it => it.submitted), [true]);
    person.types(two.fields.form.elements[later], 'later');
    two.lock.saves();
    await two.crash();
    const three = await keep(show(html(...later === 'title' ? ['later'] : ['', 'later'])), { lock: new Lock(undefined, 'v2'), saved: ({ token }) => token && 'v2' });
    assert.deepEqual(three.found.map(it => [it.fields, it.submitted]), [[{ body: ['refused'] }, true]], later);
    // Nor does a text come back that was discarded.
    await three.found[0].discard();
    three.lock.saves();
    await three.crash();
    assert.deepEqual(await left(), []);
  }
});

test('a save that waits for another one saves what stood in the page when it was asked for', async () => {
  const one = await visits(html());
  let answers;
  doc.store = () => new Promise(done => { answers = () => done({ status: 200 }); });
  const first = stores(one, { saves: false });
  person.types(one.form.elements.body, 'one');
  const second = stores(one, {}, 'one');
  person.types(one.form.elements.body, 'one two');
  while (!answers) await sleep(1);
  doc.store = async () => ({ status: 200 });
  answers();
  await Promise.all([first, second]);
  await one.leaves();
  assert.deepEqual((await rows()).flatMap(it => it.records.map(it => [it.base, it.value])), [['one', 'one two']]);
});

test('a save that is never sent has sent no text', async () => {
  const one = await visits(html());
  person.types(one.form.elements.body, 'typed');
  const both = await Promise.allSettled([stores(one, { saves: false, releases: true }), stores(one, {})]);
  assert.deepEqual(both.map(it => it.status), ['fulfilled', 'rejected']);
  await one.leaves();
  const two = await visits(html('', 'another text'));
  assert.deepEqual(names(two.found), [['body']]);
  await two.leaves();
});

/** Away to another page, and back from the back/forward cache. */
async function backAndForth() {
  for (const name of ['pagehide', 'pageshow']) window.dispatchEvent(Object.assign(new window.Event(name), { persisted: true }));
  await settled();
}

test('a page that comes back keeps what was typed after its form was sent', async () => {
  const one = await keep(show(html()), { saved: () => 'v2' }), { form } = one.fields;
  person.types(form.elements.title, 'sent');
  person.types(form.elements.body, 'sent');
  submit(form);
  person.types(form.elements.body, 'sent and more');
  await backAndForth();
  await one.crash();
  assert.deepEqual((await rows()).flatMap(it => it.records.map(it => [it.name, it.base, it.value])), [['body', 'sent', 'sent and more']]);
});

test('a page that comes back from a button whose handler stores only a part leaves its text to the next visit', async () => {
  const one = await keep(show(html()), { saved: () => 'v2' }), { form } = one.fields;
  person.types(form.elements.body, 'typed');
  submit(form, form.querySelectorAll('button')[2]);
  await backAndForth();
  await one.crash();
  const two = await keep(show(html()), { lock: new Lock(undefined, 'v2'), saved: () => 'v2' });
  assert.deepEqual(two.found.map(it => it.fields), [{ body: ['typed'] }]);
  await two.end();
});

test('a page that comes back keeps a text that a later page has found not to be stored', async () => {
  const saved = ({ token }) => token && 'v2', one = await keep(show(html()), { saved }), { form } = one.fields;
  person.types(form.elements.body, 'refused');
  submit(form);
  const comes = name => window.dispatchEvent(Object.assign(new window.Event(name), { persisted: true }));
  comes('pagehide');
  await settled();
  locks.held.clear();   // of the page that was left
  const two = await keep(show(html()), { saved });
  assert.deepEqual(two.found.map(it => it.submitted), [true]);
  await two.crash();
  document.body.replaceChildren(form);
  comes('pageshow');
  await settled();
  assert.deepEqual([...one.fields.records.values()].map(it => it.value), ['refused']);
  // Nor does it count as saved when more is typed.
  person.types(form.elements.title, 'more');
  await one.crash();
  assert.deepEqual((await rows()).map(it => [it.records.map(it => it.value), it.sent.token]), [[['refused', 'more'], null]]);
});

test('what is sent while the text is written down is not marked in that text', async () => {
  const one = await keep(show(html())), { put } = IDBObjectStore.prototype;
  const puts = [];
  IDBObjectStore.prototype.put = function (text) {
    puts.push([text.records[0].isSent ?? false, Boolean(text.sent)]);
    return put.call(this, text);
  };
  try {
    person.types(one.fields.form.elements.body, 'typed');
    const written = one.keeper.flush();
    one.lock.saves(null);
    await written;
    await one.keeper.flush();
  } finally {
    IDBObjectStore.prototype.put = put;
  }
  assert.deepEqual(puts, [[false, false], [true, true]]);
  await one.end();
});

test('a text that another tab has discarded or cleared does not come back', async () => {
  const sends = async () => {
    const page = await keep(show(html()));
    person.types(page.fields.form.elements.title, 'sent');
    submit(page.fields.form);
    person.types(page.fields.form.elements.body, 'typed after that');
    await page.crash();
  };
  await sends();
  const one = await keep(show(html())), two = await keep(show(html()));
  await one.found[0].discard();
  person.types(two.fields.form.elements.title, 'later');
  two.lock.saves();
  await two.crash();
  await one.end();
  assert.deepEqual(await left(), []);
  // While the server is asked; and nor does a part of it.
  await sends();
  let answers;
  const page = await keep(show(html('sent')), { lock: new Lock(undefined, 'v2'), saved: () => new Promise(done => { answers = done; }) });
  while (!answers) await sleep(1);
  await forgetAll();
  answers('v2');
  await settled();
  assert.deepEqual(await left(), []);
  await page.end();
});

test('typed text that gives way to a loaded one is offered, also while a write is under way', async () => {
  for (const how of ['none', 'headers', 'fetch']) {
    await forgetAll();
    const lock = DocLock.open('/locks/item/1', { version: V(1) }), found = [];
    await new Promise(done => lock.addEventListener('held', done));
    let shown = { body: 'a' }, answers;
    const keeper = await lock.keep({ read: () => shown, write: all => { shown = all; } }, { onkept: it => found.push(it) });
    const types = body => { shown = { body }; keeper.changed(); };
    await settled();
    types('typed');
    if (how === 'headers') lock.headers();   // and no answer is told
    doc.store = () => new Promise(done => { answers = () => done({ status: 422 }); });
    const sent = how === 'fetch' && lock.fetch('/api/1', { method: 'PUT' });
    shown = { body: 'of a colleague' };
    lock.version = V(2);
    await settled();
    types('of a colleague!');
    await keeper.flush();
    answers?.();
    await sent;
    assert.deepEqual(found.map(it => it.fields), [{ body: 'typed' }], how);
    assert.deepEqual((await rows()).flatMap(it => it.records.map(it => [it.base, it.value])).sort(), [['a', 'typed'], ['of a colleague', 'of a colleague!']]);
    keeper.close();
    await lock.close();
    await settled();
  }
});
