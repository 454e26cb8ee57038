// What a page makes of the answers to its lock, of what a person does, and of its end.

import assert from 'node:assert/strict';
import { afterEach, beforeEach, test } from 'node:test';
import { DocLock, locks, person, server, show, sleep, trusted, window } from './page.mjs';

const lock = { key: 'item/1', token: 't1', mode: 'exclusive', state: 'mine', expires_in_ms: 600_000 };
const until = async condition => { while (!condition()) await sleep(5); };
/** The server grants this lock, and answers to heartbeats and releases in this way; whoever looks sees a free document. */
function grants(granted, { beat = () => ({ status: 200, body: { held: [granted], lost: [] } }), release = () => ({ status: 204 }) } = {}) {
  server.answer = ({ url, method }) => {
    if (url.endsWith('/heartbeat')) return beat();
    if (url.endsWith('/release')) return release();
    return method === 'POST' ? { status: 201, body: { since: new Date().toISOString(), ...granted } } : { status: 200, body: { key: granted.key, state: 'free' } };
  };
}

const opened = [];
/** An object for the lock of the document, which is closed after the test. */
function opens(options) {
  const lock = DocLock.open('/locks/item/1', options);
  opened.push(lock);
  return lock;
}
beforeEach(() => {
  server.sent.length = 0;
  grants(lock);
});
afterEach(() => Promise.all(opened.splice(0).map(lock => lock.close())));

test('whoever refuses the heartbeats, the page says so at once, and gives its lock up when it expires', async () => {
  const beats = () => server.sent.filter(it => it.url.endsWith('/heartbeat')).length;
  for (const status of [400, 403, 404, 503]) {
    let trouble = null, lost = null;
    grants({ ...lock, expires_in_ms: 600 }, { beat: () => ({ status, body: '<h1>Of a proxy</h1>' }) });
    const one = opens({ onlost: it => { lost = [it.kind, it.at >= expiry]; }, onchange: it => { if (it.token && it.problem) trouble ??= [it.problem.status, it.offline]; } });
    await until(() => one.token);
    const expiry = one.expiresAt;
    for (let n = 0; n < 60 && !lost; n++) await sleep(50);
    assert.deepEqual([trouble, lost, one.token], [[status, false], ['expired', true], null], status);
  }
  const before = beats();
  await sleep(1_200);
  assert.equal(beats(), before, 'a page without a lock asks for none');
});

test('a page that sees many documents gives a lock up in time, although the server answers to all but heartbeats', async () => {
  let lost = null;
  grants({ ...lock, expires_in_ms: 600 }, { beat: () => ({ status: 403, body: '<h1>Of a proxy</h1>' }) });
  const one = opens({ onlost: () => { lost = Date.now(); } }), other = DocLock.open('/locks/item/2', { acquire: false });
  opened.push(other);
  await until(() => one.token);
  const expiry = one.expiresAt;
  for (let n = 0; n < 200 && !lost; n++) {
    await other.check();
    await sleep(10);
  }
  assert.ok(lost && lost - expiry < 500, `${lost - expiry}`);
});

test('a release that a proxy has refused is repeated, and one that the server has refused is not', async () => {
  for (const [body, times] of [['<h1>Not found</h1>', 2], [{ code: 'bad_body' }, 1]]) {
    let releases = 0;
    grants(lock, { release: () => ++releases > 1 ? { status: 204 } : { status: 404, body } });
    const one = opens();
    await until(() => one.token);
    await one.close();
    await sleep(1_200);
    assert.equal(releases, times);
  }
});

test('the first input takes the lock, also of an editor that carries it out itself or tells of it', async () => {
  const ways = {
    'a field': form => person.types(form.elements.a, 'typed'),
    'an editor that writes into its field': form => {
      form.elements.a.value = 'typed';
      form.elements.a.dispatchEvent(new window.Event('doclock-typed', { bubbles: true }));
    },
    'an editor whose field is not kept': form => form.elements.b.dispatchEvent(new window.Event('doclock-typed', { bubbles: true })),
    'an editor that breaks a line itself': form => {
      const rich = form.querySelector('#rich');
      rich.onkeydown = event => { event.preventDefault(); rich.innerHTML = '<br>'; };
      trusted(rich, 'keydown', { cancelable: true });
    },
  };
  for (const [who, types] of Object.entries(ways)) {
    const form = show('<textarea name=a></textarea><textarea name=b data-doclock-keep=no></textarea><div id=rich contenteditable></div><button type=reset>R</button>');
    const one = opens({ on: form });
    await until(() => one.state === 'free');
    trusted(form.querySelector('#rich'), 'keydown');   // an arrow
    trusted(form.querySelector('button'), 'click');
    form.reset();
    await sleep(20);
    assert.equal(one.busy || Boolean(one.token), false, 'who only reads takes no lock');
    types(form);
    await sleep(20);
    assert.equal(one.state, 'mine', who);
    await one.close();
    server.sent.length = 0;
    types(form);
    await sleep(20);
    assert.deepEqual(server.sent, [], `${who}: the lock is closed`);
  }
});

test('a person who types into an editor is active, although the page hears no key of its iframe', async () => {
  const form = show('<textarea name=a></textarea>'), real = Date.now;
  const idleHours = async () => {
    await DocLock.look('/locks/item/1');
    return Math.floor(server.sent.at(-1).headers.get('Doclock-Idle-Ms') / 3_600_000);
  };
  try {
    Date.now = () => real() + 3_600_000;
    assert.equal(await idleHours(), 1);
    form.elements.a.dispatchEvent(new window.Event('doclock-typed', { bubbles: true }));
    assert.equal(await idleHours(), 0);
  } finally {
    Date.now = real;
  }
});

test('a page that is left releases its locks without a beacon, too', async () => {
  const left = name => window.dispatchEvent(Object.assign(new window.Event(name), { persisted: true }));
  for (const sendBeacon of [undefined, () => false, () => true]) {
    const one = opens(), other = DocLock.open('/locks/item/2');
    await until(() => one.token && other.token);
    server.sent.length = 0;
    Object.assign(navigator, { sendBeacon });
    left('pagehide');
    const released = server.sent.filter(it => it.url.endsWith('/release')).map(it => it.url);
    assert.deepEqual([...new Set(released)], sendBeacon?.() ? [] : ['/locks/item/1/release', '/locks/item/2/release'], String(sendBeacon));
    await sleep(5);
    assert.deepEqual([...locks.held.keys()], [], 'the next page of this tab gets its id at once');
    left('pageshow');
    await other.close();
    await one.close();
  }
  delete navigator.sendBeacon;
});

test('a page whose browser forbids storage, and all that tabs share, has its lock nevertheless', async () => {
  const forbids = () => { throw new DOMException('The operation is insecure.', 'SecurityError'); };
  const [Channel, { request, query }] = [globalThis.BroadcastChannel, locks], { getItem } = window.Storage.prototype, { open } = indexedDB;
  globalThis.BroadcastChannel = class { constructor() { forbids(); } };
  indexedDB.open = forbids;
  window.Storage.prototype.getItem = forbids;
  Object.assign(locks, { request: async () => forbids(), query: async () => forbids() });
  try {
    const { DocLock: Alone } = await import('../../web/client.js?alone'), one = Alone.open('/locks/item/1');
    await until(() => one.token);
    assert.ok(server.sent[0].headers.get('Doclock-Tab'));
    const keeper = await one.keep({ read: () => ({}), write() {} });
    await until(() => keeper.problem === 'unavailable');
    keeper.close();
    await one.close();
  } finally {
    globalThis.BroadcastChannel = Channel;
    indexedDB.open = open;
    window.Storage.prototype.getItem = getItem;
    Object.assign(locks, { request, query });
  }
});
