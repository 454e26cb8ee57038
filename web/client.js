// The lock API for pages: keeps the lock of a document while a person has the document open, and
// tells the page about each change of the lock. No dependencies, no build; types are in client.d.ts.
//
//   import { DocLock } from '/locks/client.js';
//   const lock = DocLock.open('/locks/workitem/42', {
//     onheld: async () => show(await load()),     // locked: load the document, it may have changed
//     onlost: loss => disableSaving(loss),        // keep the typed text; lock.acquire() asks again
//     onchange: lock => drawBanner(lock.state, lock.holder),
//   });
//   const answer = await lock.fetch('/api/workitem/42', { method: 'PUT', body });
//   lock.close();
//
// This file has five parts: the tab, the feed of events, the form, the lock, and the life of the page.

const TIMEOUT_MS = 10_000;
const WAIT_MS = 25_000;          // one request that waits; proxies close connections that are idle for longer
const KEEP_PLACE_MS = 2_500;     // a waiter that asks again within three seconds keeps its place in the queue
const GRACE_MS = 4_000;          // for a reload; a waiter should get the lock within six seconds of a closed tab
const POLL_MS = 4_000;           // while there is no stream
const LISTED_MS = 10_000;        // while the server only lists the locks: it misses those that are held for a moment
const TOUCH_MS = 5_000;          // between two notes to the other tabs that the person is active
const LOOK_MS = [5_000, 30_000]; // renewals by other sessions are not announced
const LONGEST_LIST = 4_000;      // of keys in a URL, in characters; servers and proxies accept 8 KiB
const SILENT_MS = 25_000;        // a stream without an event for this long is dead: the server sends a beat every 10 s
const ASK_MS = 2_000;            // between two requests for a lock because the person types
const WARN_MS = [60_000, 20_000]; // before an end, by default and at least (WCAG 2.2.1)
const KINDS = ['acquired', 'released', 'expired', 'broken', 'session_ended', 'saved', 'asked', 'answered', 'resync', 'beat'];
const SILENCE_MS = 60_000;       // after this time without an answer, the asker is told
const ASKED = [40, 8];           // how often the browser is asked who has the id of a tab: a silent page, and one that answers
const REPEAT_MS = 30_000;        // between two repetitions of an ask, which the server forgets after 90 s

const sleep = ms => new Promise(done => setTimeout(done, ms));
const clamp = (ms, low, high) => Math.min(Math.max(ms, low), high);
const visible = () => document.visibilityState === 'visible';
// Two clocks: the wall clock may be set, and the monotonic clock may stop while the computer sleeps.
const now = () => ({ wall: Date.now(), steady: performance.now() });
// Random, so that the pages of an office do not all come back at the same moment after an outage.
const backOff = (failures, most) => Math.min(500 * 2 ** failures, most) * (0.5 + Math.random() / 2);

// The requests that take or release the lock of one document, strictly in order: a late release must not
// end the lock that was taken after it.
const tails = new Map();
function inOrder(path, task) {
  const done = (tails.get(path) ?? Promise.resolve()).then(task), tail = done.catch(() => {});
  tails.set(path, tail);
  tail.then(() => tails.get(path) === tail && tails.delete(path));
  return done;
}

// ---- this tab -------------------------------------------------------------------------------

// `crypto.randomUUID` and `navigator.locks` exist on https and localhost only.
function uuid() {
  const hex = Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte, i) =>
    (i === 6 ? byte & 0x0f | 0x40 : i === 8 ? byte & 0x3f | 0x80 : byte).toString(16).padStart(2, '0')).join('');
  return hex.replace(/^(.{8})(.{4})(.{4})(.{4})/, '$1-$2-$3-$4-');
}

// All frames of a tab share the sessionStorage, and outlive a reload. Each frame counts as a tab of its own, and has its
// place in the tree of frames as its name: the first frame in the third frame of the page is `/2/0`.
function frame(of = window) {
  if (of === of.parent) return '';
  return `${frame(of.parent)}/${Array.from({ length: of.parent.length }, (_, n) => of.parent[n]).indexOf(of)}`;
}

/** To the other tabs of this browser. Firefox has none where a person forbids cookies: then each page is alone. */
export function channelOf(name) {
  try { return new BroadcastChannel(name); } catch { return { postMessage() {}, close() {} }; }
}

const NAME = /^doclock-([0-9a-f-]{36})$/;
const remembered = {   // where storage is forbidden, the window itself keeps its name
  get: () => { try { return sessionStorage.getItem('doclock-tab' + frame()); } catch { return window.name.match(NAME)?.[1] ?? null; } },
  set: id => {
    try { sessionStorage.setItem('doclock-tab' + frame(), id); } catch { if (!window.name || NAME.test(window.name)) window.name = 'doclock-' + id; }
  },
};

let tabId = null, leaveTab = () => {};

// Whether no other page has this id. A duplicated tab starts with a copy of the sessionStorage, and a
// reloaded page starts with its own. Therefore the id belongs to the page that holds a Web Lock of this name.
async function claim(id) {
  const name = 'doclock-tab:' + id, channel = channelOf(name), from = uuid(), ends = new AbortController();
  let isTaken = false, isMine = !navigator.locks, release = () => {};
  leaveTab = () => { channel.close(); release(); };
  channel.onmessage = ({ data }) => {
    if (data.from === from) return;
    if (!data.ask) isTaken = true;
    else if (id === tabId) channel.postMessage({ from });
  };
  channel.postMessage({ ask: true, from });
  if (navigator.locks) {
    navigator.locks.request(name, { signal: ends.signal }, () => {
      isMine = true;
      return new Promise(done => { release = done; });
    }).catch(() => {});
  } else await sleep(150);
  // A reloaded page may start before the old page has gone, and any page may be busy: an id is not given up by a timer, but to a page
  // that holds the lock each time when the browser is asked. One that answers is alive.
  for (let asked = 0; !isMine && asked < ASKED[Number(isTaken)]; asked++) {
    await sleep(100);
    const all = await navigator.locks.query().catch(() => null);
    if (!all) break;
    if (!all.held.some(it => it.name === name)) asked = 0;
  }
  if (isMine && !(isTaken && !navigator.locks)) return true;
  ends.abort();
  leaveTab();
  return false;
}

async function nameTab() {
  if (document.prerendering) {   // nobody sees this page yet, and perhaps nobody will
    await new Promise(seen => document.addEventListener('prerenderingchange', seen, { once: true }));
  }
  let id = remembered.get();
  if (!id || !await claim(id)) await claim(id = uuid());
  remembered.set(tabId = id);
  return id;
}

/** Changes each time when the kept texts of this browser are cleared. */
export function clearedKept(mark) {
  try {
    if (mark) localStorage.setItem('doclock-cleared', mark);
    return localStorage.getItem('doclock-cleared');
  } catch {
    return null;
  }
}

let tab, page, isLeft = false;   // `page` is this load: the beacon of an older load may arrive after its first request
let touched = now(), told = -Infinity, otherTabs = null;
function touch() {
  touched = now();
  if (touched.steady - told < TOUCH_MS) return;
  told = touched.steady;
  otherTabs?.postMessage('touched');   // the person may work in one tab and need the lock of another
  PageLock.each(lock => lock.isTouched());
}
function meetOtherTabs() {
  otherTabs = channelOf('doclock-touch');
  otherTabs.onmessage = () => {
    touched = now();
    PageLock.each(lock => lock.isTouched());
  };
}
const idleMs = () => Math.round(Math.max(Date.now() - touched.wall, performance.now() - touched.steady));

let me = null;          // the person of the latest answer, as the server names them
let ahead = 0;          // how far the clock of this page is ahead of the server's
let extra = null;       // what DocLock.headers was set to
let lastHeaders = {};   // a page that is being closed cannot wait
const headers = async () => lastHeaders = {
  ...await extra?.(), 'Doclock-Tab': await tab, 'Doclock-Page': page, 'Doclock-Idle-Ms': String(idleMs()),
};

const aborted = signal => new Promise((_, fail) => signal.addEventListener('abort', () => fail(signal.reason), { once: true }));

// What the answer to a call has, if it is the answer of the lock API.
const PROMISED = {
  lock: ({ body: { key, token, expires_in_ms: ms } }) => typeof key === 'string' && typeof token === 'string' && ms >= 0,
  state: ({ body }) => typeof body.state === 'string',
  states: ({ body }) => Array.isArray(body.locks),
  asked: ({ body }) => typeof body.ask === 'string',
  beat: ({ body }) => Array.isArray(body.held) && Array.isArray(body.lost),
  nothing: ({ status }) => status === 204,
};
const ANOTHER_PAGE = {
  status: 401, code: 'login_required', title: 'Login required',
  detail: 'another page has answered, perhaps a login page: log in, and try again',
};

// Never rejects: a missing answer is `status: 0`. With `keepalive`, the request outlives its page. An answer that is not
// what was `promised` is not `ok`, whatever its status.
async function request(method, url, promised, { body, signal, person, timeout = TIMEOUT_MS, keepalive = false } = {}) {
  const sent = now();
  // The scripts of a page that is left run on for a moment, and no beacon follows what they would ask for.
  if (isLeft && !keepalive) return { sent, status: 0, ok: false, body: {} };
  try {
    // The lock API redirects nobody, and a script may not read the login page of another origin.
    const init = { method, cache: 'no-store', redirect: 'manual', keepalive, signal: AbortSignal.timeout(timeout) };
    if (!extra) init.credentials = 'include';   // cookies, also to another origin
    if (signal) init.signal = AbortSignal.any([signal, init.signal]);
    init.headers = await Promise.race([headers(), aborted(init.signal)]);
    if (person) init.headers['Doclock-Person'] = person;
    if (body) {
      init.headers['Content-Type'] = 'application/json';
      init.body = JSON.stringify(body);
    }
    const response = await fetch(url, init), { status, statusText: title, ok } = response;
    if (response.type === 'opaqueredirect') return { sent, status: 302, ok, body: ANOTHER_PAGE };
    const text = await response.text();
    const date = Date.parse(response.headers.get('Date'));
    let told = ok ? {} : { status, title, detail: 'the server cannot answer at the moment; try again later' };
    try { told = Object(JSON.parse(text)); } catch { /* no content, or the error page of a proxy */ }
    const answer = { sent, date, status, ok, body: told, person: response.headers.get('Doclock-Person') };
    me = answer.person ?? me;
    if (date) ahead = skewOf(date);
    return !ok || promised(answer) ? answer : { ...answer, ok: false, body: ANOTHER_PAGE };
  } catch {
    return { sent, status: 0, ok: false, body: {}, aborted: Boolean(signal?.aborted) };
  }
}

/** To the server although this page is being left: no answer is heard. */
function sendLast(url, body) {
  body = JSON.stringify(body);
  // A beacon sends no headers; and a browser may have none, or too many of them already.
  if (!extra && navigator.sendBeacon?.(url, body)) return;
  const init = extra ? { headers: lastHeaders } : { credentials: 'include' };
  fetch(url, { method: 'POST', body, ...init, keepalive: true }).catch(() => {});
}

// A temporary failure of the network, the database or a proxy, or a login that is missing: the request may succeed later.
const isTrouble = ({ ok, status }) => !ok && ([408, 429].includes(status) || status < 400 || status >= 500);

// Of `fetch`, of an XMLHttpRequest, or of another library.
const headerOf = (answer, name) =>
  answer.headers?.get?.(name) ?? answer.headers?.[name.toLowerCase()] ?? answer.getResponseHeader?.(name) ?? null;

/** The body as JSON; empty if it is none. */
async function problemIn(answer) {
  try {
    const body = answer instanceof Response ? await answer.clone().text() : answer.data ?? answer.responseText;
    return Object(typeof body === 'string' ? JSON.parse(body) : body);
  } catch {
    return {};
  }
}

// Why a lock is lost by this answer, if the answer says so.
function lossIn({ status, body }) {
  if (body.code === 'person_changed') return { kind: body.code };
  if (status === 401) return { kind: 'session_ended' };
  return body.cause ? { ...body, kind: body.cause === 'taken_over' ? 'broken' : body.cause } : {};
}

const REFUSALS = [401, 409, 412, 423];   // perhaps because of a lock
const isRefusal = status => status >= 400 && status < 500;   // nothing is stored; after another answer, that is not known

const PERSON_CHANGED = {
  status: 409, code: 'person_changed', title: 'Conflict',
  detail: 'somebody else has logged in since this page was opened: open the page again',
};

/** The version in an `ETag`, if it is one of ours. A proxy that compresses makes it weak, and may add its own ending. */
export const versionIn = tag => tag?.match(/^(?:W\/)?"?([0-9a-f]{32})(?![\p{L}\p{N}])[^"]*"?$/u)?.[1] ?? null;

/** The address without what the headers say. */
function bare(url) {
  if (url instanceof Request) return url;
  const whole = new URL(url, document.baseURI), said = ['lock_token', 'tab', 'version'].filter(name => whole.searchParams.has(name));
  for (const name of said) whole.searchParams.delete(name);
  return said.length ? whole : url;
}

// How far the clock of this page is ahead of the server's. `Date` has seconds only.
const skewOf = date => Math.abs(Date.now() - date) > 2000 ? Date.now() - date : 0;

/** An ask, as the page sees it. */
function askIn({ date }, { ask: id, by, message, at, answer = null, reply = '' }) {
  return Object.freeze({ id, by, message, at: new Date(Date.parse(at) + skewOf(date)), answer, reply });
}

// The state of a document, in the terms and by the clock of this page.
function standing({ sent, date, body }) {
  const freeze = body.state === 'frozen' ? body : body.frozen;
  const skew = skewOf(date);
  return {
    state: body.state === 'free' && freeze ? 'frozen' : body.state,
    mode: body.mode ?? null,
    holder: body.holder?.label ?? null,
    since: body.since ? new Date(Date.parse(body.since) + skew) : null,
    expiresAt: body.expires_in_ms === undefined ? null : sent.wall + body.expires_in_ms,
    mayTakeOver: Boolean(body.may_take_over),
    samePerson: Boolean(body.same_person),
    mayAsk: body.state === 'held' && body.may_ask !== false,
    problem: body.state === 'unknown' ? body.problem : null,
    frozen: freeze ? { reason: freeze.reason, until: new Date(Date.parse(freeze.until) + skew) } : null,
  };
}

/** The path, after the origin if that is another one: the lock API may have an origin of its own. */
function absolute(url) {
  const { origin, pathname } = new URL(url, document.baseURI);
  return (origin === location.origin ? '' : origin) + pathname;
}

/** The parts of the URL of a lock: the lock API, the path, and the name in events and heartbeats. */
export function place(url) {
  const [, base, collection, id] = absolute(url).match(/^(.*)\/([^/]+)\/([^/]+)\/?$/) ?? [];
  if (!id) throw new TypeError(`${url} is not the URL of a lock: it must end with the collection and the id.`);
  return { base, path: `${base}/${collection}/${id}`, key: `${decoded(collection)}/${decoded(id)}` };
}

function decoded(part) {
  try { return decodeURIComponent(part); } catch { return part; }   // not UTF-8
}

/** Which version the server has stored for the form that was sent with this token and version; `null` if none, or if it does not know. */
async function wasSaved(url, { token, version }) {
  if (!token || !version) return null;
  const { body } = await request('GET', `${url}?shown=${version}&saved_under=${token}`, PROMISED.state);
  return versionIn(body.saved);
}

const AT_ONCE = 200;   // as many as the server allows

/**
 * The states of these documents, without those for which no answer came. `names` learns which of them the server
 * writes in another way.
 */
async function lookAt(base, keys, names = new Map()) {
  const found = new Map();
  for (let from = 0; from < keys.length; from += AT_ONCE) {
    const answer = await request('POST', base + '/status', PROMISED.states, { body: { keys: keys.slice(from, from + AT_ONCE) } });
    if (!answer.ok) continue;
    for (const body of answer.body.locks) {
      found.set(body.asked ?? body.key, standing({ ...answer, body }));
      if (body.asked) names.set(body.key, body.asked);
    }
  }
  return found;
}

class List {
  #base; #callback; #end;
  #keys = new Set();
  #names = new Map();   // as the server writes them → as the page does
  #due = new Set();
  #isLooking = false;

  constructor(base, keys, callback) {
    [this.#base, this.#callback] = [base, callback];
    this.#end = Feed.of(base).listen(({ type, key }) => {
      if (['saved', 'asked', 'answered'].includes(type)) return;   // the lock has not changed
      if (type === 'resync') return this.look();
      const shown = [key, this.#names.get(key)].filter(it => this.#keys.has(it));
      if (shown.length) this.#look(shown);
    }, () => this.#keys);
    this.show(keys);
  }

  show(keys) {
    const before = this.#keys;
    this.#keys = new Set(keys);
    Feed.of(this.#base).announce();
    this.#look(keys.filter(key => !before.has(key)));
  }

  look() { this.#look(this.#keys); }

  close() {
    this.#end();
    this.#keys.clear();
    this.#due.clear();
  }

  async #look(keys) {
    for (const key of keys) this.#due.add(key);
    if (this.#isLooking) return;
    this.#isLooking = true;
    while (this.#due.size) {
      const these = [...this.#due].slice(0, AT_ONCE);
      for (const key of these) this.#due.delete(key);
      const found = await lookAt(this.#base, these, this.#names);   // an event that comes meanwhile makes its document due again
      const shown = these.filter(key => this.#keys.has(key));   // `show` or `close` may have come meanwhile
      try {
        if (shown.length) this.#callback(new Map(shown.map(key => [key, found.get(key) ?? null])));
      } catch (error) {
        console.error(error);
      }
    }
    this.#isLooking = false;
  }
}

// HTTP/1.1 allows six connections to a server, and a waiting request takes one. So only one page of a browser waits at a
// time, and the others ask often; on plain http, where there are no Web Locks, the visible pages wait.
const isNarrow = () => !/^h[23]/.test(performance.getEntriesByType('navigation')[0]?.nextHopProtocol);

/** A function that ends the turn of this page to wait; `null` if it is the turn of another page. */
function turnToWait(base) {
  if (!isNarrow()) return () => {};
  if (!navigator.locks) return visible() ? () => {} : null;
  return new Promise(begin => {
    navigator.locks.request('doclock-wait:' + base, { ifAvailable: true }, turn =>
      turn ? new Promise(end => begin(end)) : begin(null)).catch(() => begin(null));
  });
}

// ---- the feed: tells every page of this browser about the locks -----------------------------

// HTTP/1.1 allows six connections to a server: with a stream for each tab, the seventh tab would have
// no connection. So only the tab with the Web Lock has a stream, and it passes the events on.
const EVERY = '';   // instead of a key: every document

class Feed {
  static #feeds = new Map();

  static of(base) {
    if (!Feed.#feeds.has(base)) Feed.#feeds.set(base, new Feed(base));
    return Feed.#feeds.get(base);
  }

  static each(what) { for (const feed of Feed.#feeds.values()) feed[what](); }

  #listeners = new Map();     // each callback with its function that returns its keys
  #keys = new Map();          // the keys of each page of this browser
  #base; #channel; #source; #reported; #place; #resign; #timer; #failures = 0;
  #isLive = false;            // some tab has a stream
  #isTold = true;             // the server is told of all changes
  #heard = now();             // the last event of that stream
  #polled = performance.now();

  constructor(base) { this.#base = base; }

  /** Calls back with the events of these `keys()`, and perhaps with others; of all documents without `keys`. */
  listen(callback, keys = () => [EVERY]) {
    this.#listeners.set(callback, keys);
    this.join();
    this.announce();
    return () => {
      this.#listeners.delete(callback);
      if (!this.#listeners.size) this.leave();
    };
  }

  /** Tells the tab with the stream which documents this page listens to. */
  announce() { this.#post({ type: 'keys', page, keys: [...this.#listeners.values()].flatMap(keys => [...keys()]) }); }

  /** Opens the stream anew, in whatever tab it is. */
  reopen() { this.#post({ type: 'reconnect' }); }

  join() {
    if (this.#channel || !this.#listeners.size) return;
    const name = 'doclock-feed3:' + this.#base;   // a tab of an older release knows fewer events
    this.#channel = channelOf(name);
    this.#channel.onmessage = ({ data }) => this.#receive(data);
    this.#channel.postMessage({ type: 'who' });
    this.announce();
    if (!navigator.locks) return this.#connect();
    this.#place = new AbortController();
    navigator.locks.request(name, { signal: this.#place.signal }, () => {
      this.#connect();
      return new Promise(resign => { this.#resign = resign; });
    }).catch(() => {});
  }

  leave() {
    this.#channel?.postMessage({ type: 'keys', page, keys: [] });
    clearTimeout(this.#timer);
    this.#source?.close();
    this.#place?.abort();
    this.#resign?.();
    this.#channel?.close();
    this.#channel = this.#source = this.#place = this.#resign = this.#reported = null;
    this.#keys.clear();
    this.#isLive = false;
  }

  /** Tells the other tabs at once that their state of this document may be outdated. */
  hint(key) { this.#channel?.postMessage({ type: 'hint', key }); }

  reconnect() {
    this.#failures = 0;
    if (this.#source) this.#connect();
  }

  /** Without a stream, pages poll. A silent stream is opened anew, in whatever tab it is: that tab may be hidden. */
  poll() {
    if (this.#isSilent()) this.#post({ type: 'silent' });
    const isTold = this.#isLive && this.#isTold;
    if (isTold || !visible() || performance.now() - this.#polled < (this.#isLive ? LISTED_MS : POLL_MS)) return;
    this.#polled = performance.now();
    for (const listener of this.#listeners.keys()) listener({ type: 'resync', isLive: this.#isLive });
  }

  #isSilent() {
    const { wall, steady } = now();
    return Math.max(wall - this.#heard.wall, steady - this.#heard.steady) > SILENT_MS;
  }

  async #connect() {
    this.#heard = now();
    const channel = this.#channel, id = await tab;
    if (!channel || channel !== this.#channel || extra) return;   // an EventSource sends no headers: this page polls
    clearTimeout(this.#timer);
    this.#source?.close();
    this.#reported = new Set([...this.#keys.values()].flat());
    this.#source = null;
    if (!this.#reported.size) return;
    const some = [...this.#reported].map(encodeURIComponent).join(',');
    const isSome = !this.#reported.has(EVERY) && !some.includes('%2C') && some.length <= LONGEST_LIST;
    if (!isSome) this.#reported.add(EVERY);
    const source = this.#source = new EventSource(
      `${this.#base}/events?tab=${id}${isSome ? '&keys=' + some : ''}`, { withCredentials: true });
    for (const type of KINDS) {
      source.addEventListener(type, ({ data }) => {
        this.#failures = 0;
        this.#post({ ...JSON.parse(data), type });
      });
    }
    source.onerror = () => {
      this.#post({ type: 'down' });
      // After a network error the browser reconnects; after a refusal it does not.
      if (source === this.#source && source.readyState === EventSource.CLOSED) {
        this.#timer = setTimeout(() => this.#connect(), backOff(++this.#failures, 30_000));
      }
    };
  }

  /** To all pages of this browser, this one included. */
  #post(event) {
    this.#channel?.postMessage(event);
    if (this.#channel) this.#receive(event);
  }

  #receive(event) {
    if (KINDS.includes(event.type)) this.#heard = now();
    switch (event.type) {
      case 'beat': return;
      case 'who':
        if (this.#source && this.#isLive) this.#channel.postMessage({ type: 'resync', isReply: true, told: this.#isTold });
        return this.announce();
      case 'keys': return this.#learn(event);
      case 'reconnect': return this.reconnect();
      case 'silent':
        if (!this.#isSilent()) return;   // another page was quicker
        this.#heard = now();
        this.reconnect();
      // falls through
      case 'down':
        this.#isLive = false;
        this.#polled = performance.now();
        return;
      case 'resync':
        if (event.isReply && this.#isLive) return;   // a reply for a tab that has just joined
        this.#isTold = event.told ?? this.#isTold;
        event = { type: 'resync', isLive: this.#isLive = true };
    }
    for (const listener of this.#listeners.keys()) listener(event);
  }

  #learn({ page, keys }) {
    this.#keys.set(page, keys);
    if (!keys.length) this.#keys.delete(page);
    const isReported = key => this.#reported.has(key) || this.#reported.has(EVERY);
    if (!this.#reported || keys.every(isReported)) return;
    clearTimeout(this.#timer);   // a moment later: more keys may come
    this.#timer = setTimeout(() => this.#connect(), 50);
  }
}

// ---- a form ---------------------------------------------------------------------------------

/** A property or a method of a form, whose fields may have this name. */
export function own(form, name) {
  const it = Reflect.get(HTMLFormElement.prototype, name, form);
  return typeof it === 'function' ? it.bind(form) : it;
}

/** True if a submit by this button sends the form to be saved. */
export const isPost = (form, submitter) =>
  /^post$/i.test(submitter?.getAttribute('formmethod') ?? own(form, 'getAttribute')('method') ?? '');

export const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);
const lines = value => typeof value === 'string' ? value.replace(/\r\n?/g, '\n') : value;

/** What a person has typed: a record for each field, with the value that the field had before (`base`), and the typed one. */
export class Typed {
  records = new Map();
  hears = new Set();    // called at each change

  get values() { return new Map([...this.records].map(([id, { value }]) => [id, value])); }

  changed() { for (const hears of this.hears) hears(); }

  /** These values are stored, in all fields or in those with these names. What was typed since then stays. */
  saved(values, names = true) {
    const saved = [...values].filter(([id]) => this.records.has(id) && (names === true || names.includes(this.records.get(id).name)));
    for (const [id, value] of saved) {
      const record = this.records.get(id);
      if (same(record.value, value)) this.records.delete(id);
      else this.records.set(id, { ...record, base: value, isSent: false });
    }
    this.notes(saved);
    this.changed();
  }

  discard() {
    this.records.clear();
    this.notes();
    this.changed();
  }
}

const WITHOUT_TEXT = ['checkbox', 'radio', 'file', 'range', 'color', 'submit', 'image', 'reset'];
const NEVER = ['password', 'file', 'submit', 'button', 'image', 'reset', 'fieldset', 'output'];
const SECRET = /password|one-time-code|\bcc-/;
const ROW_ID = /(^|[-_.[])id\]?$|[a-z]Id\]?$/;   // the name of a hidden field that names a row

// Marks a field that is closed because of a lock by this attribute, also in a copy of the page that a script has kept.
const CLOSED = 'data-doclock-closed';

// What the page itself opens or closes while a form is closed, is so when the form is opened. There is one observer for all forms,
// wherever they stand: they do not take each other for the page.
function hearPage(all) {
  for (const { target, attributeName } of all) {
    if (target.getAttribute(CLOSED)?.toLowerCase().split(':')[0] === attributeName) target.removeAttribute(CLOSED);
  }
}
const closings = globalThis.MutationObserver && new MutationObserver(hearPage);

const nameOf = field => field.getAttribute('name') || field.id;
// A number in a name is the number of a row; but `items[0].line2` is the second line of a row.
const kindOf = name => name.replace(/(?:\d|\[\]).*[a-z]_?\d+\]?$/i.test(name) ? /\d+(?!\d*\]?$)/g : /\d+/g, '#');
const LISTED = /\d|\[\]/;   // the name of a field of a list
const isRich = field => field.hasAttribute('contenteditable');

/** As the browser does when a person types: React hears of no value that a script writes by the property of the field itself. */
const puts = (field, name, value) => Reflect.set(Object.getPrototypeOf(field), name, value, field);

/** One value of a form: a text, a tick, an option of several, or the choice among radio buttons. */
class Place {
  constructor(form, field, option, beside) {
    Object.assign(this, { form, field, option, beside, name: nameOf(field), node: option ?? field });
    this.mark = option ? option.value : field.type === 'checkbox' ? field.value : null;
  }

  /** The key of its row: rows may come and go. A row ends where the next field of its kind stands; where there is none, an id may be one of the form. */
  get row() {
    const { field, form, beside } = this, keyed = field.closest('[data-keep]');
    if (keyed) return keyed.getAttribute('data-keep');
    const isKey = ({ name }) => ROW_ID.test(name) && (beside.length || !LISTED.test(this.name) || LISTED.test(name));
    for (let at = field.parentElement; at && at !== form && !beside.some(it => at.contains(it)); at = at.parentElement) {
      const ids = [...at.querySelectorAll('input[type=hidden]')].filter(it => it.form === form && isKey(it));
      if (ids.length) return ids.length === 1 ? ids[0].value : '';
    }
    return '';
  }

  get #radios() { return [...own(this.form, 'elements')].filter(it => it.type === 'radio' && nameOf(it) === this.name); }

  get value() {
    const { field, option } = this;
    if (option) return option.selected;
    if (field.type === 'checkbox') return field.checked;
    if (field.type === 'radio') return this.#radios.find(it => it.checked)?.value ?? null;
    return isRich(field) ? field.innerHTML : field.value;
  }

  /** The value with which the page was delivered; `undefined` if a script has filled the field, or it was delivered blank. */
  get delivered() {
    const { field, option } = this;
    if (option) return option.defaultSelected || undefined;
    if (field.type === 'checkbox') return field.defaultChecked || undefined;
    if (field.type === 'radio') return this.#radios.find(it => it.defaultChecked)?.value;
    if (field.options) return [...field.options].filter(it => it.defaultSelected).at(-1)?.value;
    if (!field.defaultValue) return undefined;
    // As this field reads it: the text may be of another form, or beyond its `max`.
    return field.matches('input') ? Object.assign(field.cloneNode(), { value: field.defaultValue }).value : field.defaultValue;
  }

  /** The button of this choice; of none, the button that is chosen. */
  radio(value) { return this.#radios.find(it => value === null ? it.checked : it.value === value); }

  /** Returns false if the value has no place here any more. */
  put(value) {
    const { field, option } = this, before = this.value;
    if (same(before, value)) return true;
    let heard = field;
    if (option) option.selected = value;
    else if (field.type === 'radio') {
      heard = this.radio(value);
      if (!heard) return false;
      puts(heard, 'checked', value !== null);
    } else if (field.type === 'checkbox') puts(field, 'checked', value);
    else if (isRich(field)) field.innerHTML = value;
    else puts(field, 'value', value);
    if (!same(lines(this.value), lines(value))) {   // such as a date in a field that is a number by now
      if (!isRich(field)) puts(field, 'value', before);
      return false;
    }
    // The click changes nothing, and is what React hears.
    for (const type of /checkbox|radio/.test(field.type) ? ['click', 'input', 'change'] : ['input', 'change']) heard.dispatchEvent(new Event(type, { bubbles: true }));
    return true;
  }
}

const idOf = ({ name, row, mark, n }) => JSON.stringify([name, row, mark, n]);

/** The fields of a form, wherever they stand in the page, and whatever their names. */
export class Fields extends Typed {
  form;
  #before = new WeakMap();   // the values before the first input
  #early = new WeakMap();    // the values that were perhaps typed before this script was there
  #ids = new WeakMap();      // of the records, by field
  #secrets = new Set();      // the names of fields that have ever been passwords: a button may show them
  #listening = null; #byProgram = null; #isReset = false; #isOpen = null; #shown; #uses = 0;

  constructor(form) {
    super();
    this.form = form;
    this.#shown = this.#all;
    this.notes();
  }

  /** True if a field has another value than at the last save, whoever has changed it. */
  get isChanged() { return this.#shown !== this.#all; }
  get #all() { return JSON.stringify(this.#places().map(it => it.value)); }
  // An element may be both.
  get #elements() {
    const rich = `[contenteditable]:not([contenteditable=false]), [${CLOSED}^=contenteditable]`;
    return [...new Set([...own(this.form, 'elements'), ...own(this.form, 'querySelectorAll')(rich)])];
  }

  #isKept(field) {
    if (!nameOf(field)) return false;
    if (field.type === 'password' || SECRET.test(field.getAttribute('autocomplete') ?? '')) this.#secrets.add(nameOf(field));
    return !this.#secrets.has(nameOf(field)) && !NEVER.includes(field.type) && ('value' in field || isRich(field)) && !field.closest('[data-doclock-keep=no]');
  }

  /** The places with this name, or all; each knows the fields of its kind before and after it. */
  #places(name) {
    const radios = new Set(), last = new Map(), once = new Set(), shared = new Set(), isAll = name === undefined, kind = isAll || kindOf(name);
    const fields = this.#elements.filter(it => (isAll || kindOf(nameOf(it)) === kind) && this.#isKept(it)
      && !(it.type === 'radio' && radios.size === radios.add(nameOf(it)).size));
    const tick = it => it.type === 'checkbox' ? '=' + it.value : '', whole = it => nameOf(it) + tick(it);
    for (const it of fields) (once.has(whole(it)) ? shared : once).add(whole(it));
    const places = fields.flatMap(field => {
      // If the rows share a name, the number in this name is not the number of a row.
      const key = shared.has(whole(field)) ? whole(field) : kindOf(nameOf(field)) + tick(field), before = last.get(key), it = { field, beside: [] };
      if (field.type !== 'hidden') {
        if (before) it.beside.push(before.field) && before.beside.push(field);
        last.set(key, it);
      }
      return (field.type === 'select-multiple' ? [...field.options] : [null]).map(option => new Place(this.form, field, option, it.beside));
    });
    return isAll ? places : places.filter(it => it.name === name);
  }

  /** Those that the page cannot tell apart but by their order. */
  #group({ name, row, mark }) { return this.#places(name).filter(it => it.mark === mark && it.row === row); }

  #recordOf(place) {
    const { name, row, mark } = place, group = this.#group({ name, row, mark });
    const n = group.findIndex(it => it.node === place.node), beside = group.map((it, n) => this.#storedIn(it, { name, row, mark, n }));
    const isAlone = !place.beside.length && !LISTED.test(name) && !place.field.closest('[data-keep]');
    return { name, row, mark, n, of: group.length, ...group.length > 1 && { beside }, ...isAlone && { isAlone }, ...isRich(place.field) && { isRich: true } };
  }

  #storedIn(place, at) {
    const last = this.records.get(this.#ids.get(place.node));
    return (this.records.get(idOf(at)) ?? (last?.isAlone ? last : null))?.base ?? place.value;
  }

  /** Where this text was typed, unless the form has changed there. */
  #find(record) {
    const group = this.#group(record), isOther = (it, n) => n !== record.n && !same(this.#storedIn(it, { ...record, n }), record.beside[n]);
    if (record.isAlone && !group.length) return this.#findAlone(record);
    return group.length === record.of && !(record.of > 1 && group.some(isOther)) ? group[record.n] : null;
  }

  // The hidden id near a field that has its name for itself may name no row, but a chosen person, or this visit: the field is the same if its text is.
  #findAlone(record) {
    const [place, ...others] = this.#places(record.name).filter(it => it.mark === record.mark), isBase = it => same(lines(it), lines(record.base));
    return place && !others.length && [this.#storedIn(place, record), place.delivered].some(isBase) ? place : null;
  }

  /** The value in this place, as far as it is stored. */
  stored(record) {
    const place = this.#find(record);
    return place && this.#storedIn(place, record);
  }

  shows(record) {
    const place = this.#find(record);
    return Boolean(place) && same(place.value, record.value);
  }

  /** True if the field has the value on which this text was typed, or was delivered with it; `null` if the field is gone. */
  hasBase(record) {
    const place = this.#find(record), isBase = it => same(lines(it), lines(record.base));
    return place && (isBase(this.#storedIn(place, record)) || !this.records.has(idOf(record)) && isBase(place.delivered));
  }

  /** True if the page was delivered with this text in its field; if that is gone, in any field of its kind. */
  isStored(record) {
    const place = this.#find(record), plain = value => typeof value === 'string' ? lines(value).trim() : value;
    const all = place ? [place] : this.#ofKind(record).filter(({ mark }) => mark === record.mark);
    return all.some(it => same(plain(it.delivered ?? it.value), plain(record.value)));
  }

  /** False if this form has no such field, but another form of the document. A row may have gone, or not be there yet. */
  knows(record) { return LISTED.test(record.name) || this.#ofKind(record).length > 0; }

  #ofKind({ name }) { return this.#places().filter(it => kindOf(it.name) === kindOf(name)); }

  /** True if the browser has put this text of an earlier visit over the one that was delivered. */
  isFilled(record) {
    const delivered = this.#find(record)?.delivered;
    return delivered !== undefined && !this.records.has(idOf(record)) && !same(delivered, record.value);
  }

  /** True if the field was delivered blank: the browser may have put the text there, or a script the stored text. */
  isBlank(record) { return record.mark === null && record.value !== '' && this.#find(record)?.field.defaultValue === '' && !this.records.has(idOf(record)); }

  putBack(record) {
    const place = this.#find(record);
    if (place) place.put(place.delivered);
  }

  /** As typed, in a text of an earlier page whose values this page shows. */
  adopt(records) { for (const it of records) if (!this.records.has(idOf(it))) this.records.set(idOf(it), { ...it, isSent: false }); }

  /** Puts texts back, each into its own field. Returns those whose field is gone or has another stored value. */
  put(records) {
    const put = new Map(), left = [];
    const puts = record => {
      const place = this.#find(record), before = this.records.get(idOf(record));
      if (!place || put.get(record) === place.node) return Boolean(place);   // a handler may give it another form
      // A name of a list, or with a number, may be that of another row by now; otherwise the person has seen what is stored beside the typed text.
      const isSure = record.of === 1 && (record.row || !LISTED.test(record.name)), isBase = this.hasBase(record);
      const base = isBase ? record.base : this.#storedIn(place, record);
      if (!isSure && !same(place.value, record.value) && !isBase) return false;
      put.set(record, place.node);
      this.#ids.set(place.node, idOf(record));
      // What is stored already is no text that waits to be saved.
      if (same(lines(base), lines(record.value))) this.records.delete(idOf(record));
      else this.records.set(idOf(record), { ...record, base, isSent: false });
      if (place.put(record.value)) return true;
      before ? this.records.set(idOf(record), before) : this.records.delete(idOf(record));
      return false;
    };
    for (const record of records) if (!puts(record)) left.push(record);
    // A handler may have drawn a part of the form anew, at once or when the server has answered.
    const again = () => { for (const record of records) if (same(this.records.get(idOf(record))?.value, record.value) || left.includes(record)) puts(record); };
    again();
    for (const ms of [0, 500, 2_000]) setTimeout(() => this.#listening && again(), ms);
    this.changed();
    return left.filter(record => !this.shows(record));
  }

  /** As people read it. */
  plain(record, value) {
    const place = this.#find(record), { field } = place ?? {}, labelOf = it => it?.labels?.[0]?.textContent.trim();
    if (record.mark !== null) return (value ? '☑ ' : '☐ ') + (place?.option?.text || labelOf(field) || record.mark);
    if (value !== null && field?.type === 'radio') return labelOf(place.radio(value)) || value;
    if (field?.options) return [...field.options].find(it => it.value === value)?.text ?? String(value ?? '');
    return record.isRich ? new DOMParser().parseFromString(value ?? '', 'text/html').body.textContent : String(value ?? '');
  }

  /** By name. */
  show(records) {
    const all = Object.create(null);
    for (const { name, mark, value } of records) (all[name] ??= []).push(mark === null ? value : { value: mark, on: value });
    return { ...all };
  }

  // -- hearing

  listen() {
    if (this.#uses++) return;
    this.#listening = new AbortController();
    const root = own(this.form, 'getRootNode')(), options = { signal: this.#listening.signal, capture: true };
    const on = (types, hears) => { for (const type of types) root.addEventListener(type, hears, options); };
    on(['focusin', 'pointerdown'], () => this.notes());
    on(['keydown', 'beforeinput'], ({ target }) => this.#hears(target) && this.#places(nameOf(target)).forEach(it => this.#note(it)));
    on(['click'], event => this.#click(event));
    // Programs and frameworks tell of their changes, too. A `change` may tell of a text that a script has written since.
    on(['input'], ({ isTrusted, target }) => isTrusted && target !== this.#byProgram && this.#hear(target));
    on(['doclock-typed'], ({ target }) => this.#hear(target));   // an editor of the page
    // An editor that carries out such an event itself, as for a pasted text, tells of no input.
    on(['keydown', 'paste', 'cut', 'drop'], ({ isTrusted, target }) => {
      const editor = target.closest?.('[contenteditable]:not([contenteditable=false])');
      if (!isTrusted || !editor) return;
      this.#places(nameOf(editor)).forEach(it => this.#note(it));
      setTimeout(() => this.#listening && this.#hear(editor));
    });
    on(['reset'], ({ target }) => target === this.form && this.#isReset && setTimeout(() => this.#reset()));
    // Typed before this script was there.
    const { activeElement } = root;
    if (activeElement && this.#hears(activeElement) && this.#isKept(activeElement)) {
      for (const it of this.#places(nameOf(activeElement)).filter(it => it.field === activeElement && it.delivered !== undefined)) {
        this.#before.set(it.node, it.delivered);
        this.#early.set(it.node, it.value);
      }
    }
  }

  /** The last user ends it, or `all` at once: the form shows another document. */
  close(all = false) {
    this.#uses = all ? 0 : Math.max(this.#uses - 1, 0);
    if (this.#uses) return;
    this.#listening?.abort();
    this.#listening = null;
  }

  #hears(target) { return target instanceof Element && (target.form === this.form || own(this.form, 'contains')(target)); }
  hear(event) { return this.#hears(event.target); }

  #note(place) {
    const { node, value } = place, id = this.#ids.get(node), last = this.records.get(id);
    if (!last && !same(this.#early.get(node), value)) this.#before.set(node, value);
    if (!last?.isAlone || last.row === place.row || !same(last.value, value)) return;
    // The hidden id beside the text has changed.
    const record = { ...last, row: place.row };
    this.records.delete(id);
    this.records.set(idOf(record), record);
    this.#ids.set(node, idOf(record));
  }

  /** The values of now are those before the next input. */
  notes() { for (const it of this.#places()) this.#note(it); }

  saved(values, names) {
    this.#early = new WeakMap();
    super.saved(values, names);
    this.#shown = this.#all;
  }

  // A click by a program ticks a box, too; and then the browser itself tells the change.
  #click({ isTrusted, target }) {
    const field = target.closest?.('label')?.control ?? target;
    if (!isTrusted) this.#byProgram = field;
    else if (target.closest?.('[type=reset]')?.form === this.form) this.#isReset = true;
    setTimeout(() => { this.#byProgram = null; this.#isReset = false; });
  }

  #reset() {
    for (const [id, record] of this.records) if (this.#find(record) && same(this.#find(record).value, record.base)) this.records.delete(id);
    this.changed();
  }

  #hear(target) {
    if (!this.#hears(target) || !this.#isKept(target)) return;
    this.#take(target);
    // A mask may write it in another way; and another element may know its value only now.
    setTimeout(() => this.#listening && this.#hears(target) && this.#take(target, target.matches('input, textarea, select') || isRich(target)));
  }

  #take(target, isLater = false) {
    const isRadio = target.type === 'radio';
    let isChanged = false;
    for (const place of this.#places(nameOf(target)).filter(it => it.field === target || isRadio && it.field.type === 'radio')) {
      const at = this.#recordOf(place), id = idOf(at), known = this.records.get(id), { value } = place;
      const base = known ? known.base : this.#before.has(place.node) ? this.#before.get(place.node) : place.delivered ?? (at.mark === null ? '' : false);
      if (known && same(known.value, value) || isLater && !known) continue;
      if (same(value, base)) isChanged = !isLater && this.records.delete(id) || isChanged;   // what a script takes back is not lost
      else {
        isChanged = true;
        this.records.set(id, { ...at, base, value });
        this.#ids.set(place.node, id);
      }
    }
    if (isChanged) this.changed();
  }

  // -- opening and closing

  /** What people call the field. */
  label({ name, ...record }) {
    const field = this.#find({ name, ...record })?.field ?? this.#places(name)[0]?.field;
    const label = field?.labels?.[0]?.cloneNode(true);
    for (const control of label?.querySelectorAll('textarea, select, button') ?? []) control.remove();
    return label?.textContent.trim() || field?.getAttribute('aria-label') || field?.getAttribute('title') || name;
  }

  /** The editors of the page write their texts into their fields. */
  read() { own(this.form, 'dispatchEvent')(new CustomEvent('doclock-read', { bubbles: true })); }

  /** Opens what was closed, or closes all fields, so that their text can still be read and copied. */
  open(isOpen) {
    closings.observe(own(this.form, 'getRootNode')(), { subtree: true, attributeFilter: ['disabled', 'readonly', 'contenteditable'] });
    hearPage(closings.takeRecords());
    for (const field of this.#elements) {
      const [closed, before] = field.getAttribute(CLOSED)?.toLowerCase().split(':') ?? [];
      if (isOpen && closed) {
        closed === 'contenteditable' ? field.setAttribute(closed, before) : field.removeAttribute(closed);
        field.removeAttribute(CLOSED);
      }
      const hasText = field.matches('textarea, input') && !WITHOUT_TEXT.includes(field.type);
      const how = isRich(field) ? 'contenteditable' : hasText ? 'readonly' : 'disabled', is = field.getAttribute(how);
      if (isOpen || closed || (isRich(field) ? is === 'false' : is !== null || ['fieldset', 'output', 'hidden', 'button', 'object'].includes(field.type ?? field.localName))) continue;
      field.setAttribute(how, isRich(field) ? 'false' : '');
      field.setAttribute(CLOSED, isRich(field) ? `${how}:${is}` : how);
    }
    closings.takeRecords();
    if (isOpen !== this.#isOpen) own(this.form, 'dispatchEvent')(new CustomEvent('doclock-close', { bubbles: true, detail: { isClosed: !isOpen } }));
    this.#isOpen = isOpen;
  }
}

// ---- the lock -------------------------------------------------------------------------------

const FACTS = ['url', 'key', 'mode', 'state', 'holder', 'since', 'expiresAt', 'mayTakeOver', 'samePerson', 'mayAsk', 'frozen', 'lost', 'waiting', 'busy',
  'problem', 'token', 'offline', 'current', 'deleted', 'ending', 'asks', 'asking', 'askProblem'];

/** What pages use; client.d.ts says what everything does. The objects of one page for one document share a `PageLock`. */
export class DocLock extends EventTarget {
  #lock; #waitIdleMs; #isClosed = false; #endOnInput = null; #askTimer; #snapshot = null;

  static set headers(headers) { extra = headers; }
  static open(url, options) { return new DocLock(url, options); }
  static list(base, keys, callback) { return new List(absolute(base).replace(/\/$/, ''), keys, callback); }
  static events(base, callback) { return Feed.of(absolute(base).replace(/\/$/, '')).listen(callback); }
  static touch() { touch(); }

  static async look(url) {
    if (Array.isArray(url)) {
      const found = await lookAt(url.length ? place(url[0]).base : '', url.map(it => place(it).key));
      return url.map(it => found.get(place(it).key) ?? null);
    }
    const answer = await request('GET', url, PROMISED.state);
    return answer.ok ? standing(answer) : null;
  }

  static reconnect() {
    Feed.each('reopen');
    PageLock.wake();
  }

  constructor(url, options = {}) {
    super();
    this.#waitIdleMs = options.waitIdleMs ?? 600_000;
    for (const name of ['held', 'lost', 'free', 'change', 'stale', 'saved', 'ending', 'asked', 'answered']) {
      const callback = options['on' + name];
      if (callback) this.addEventListener(name, ({ detail }) => callback(detail ?? this, this));
    }
    const lock = this.#lock = PageLock.of(url, options.mode ?? 'exclusive');
    lock.viewers.add(this);
    this.addEventListener('change', () => { this.#snapshot = null; });
    if ('version' in options) this.version = options.version;
    lock.warnMs = Math.max(lock.warnMs, options.warnMs ?? WARN_MS[0], WARN_MS[1]);
    if (options.on) this.#lockAtInput(options.on);
    queueMicrotask(() => {   // not before the caller knows this lock
      if (options.acquire === false || options.on) this.check();
      else if (options.wait) this.wait();
      else this.acquire();
    });
  }

  static {
    for (const name of FACTS) Object.defineProperty(this.prototype, name, { get() { return this.#lock[name]; } });
  }

  // Functions of their own: a framework calls them without their object.
  subscribe = listener => {
    const hears = () => listener();
    this.addEventListener('change', hears);
    return () => this.removeEventListener('change', hears);
  };
  getSnapshot = () => this.#snapshot ??= Object.freeze(Object.fromEntries([...FACTS, 'version'].map(name => [name, this[name]])));

  get version() { return this.#lock.version ?? null; }
  set version(tag) { this.#lock.shows(versionIn(tag), true); }

  acquire() { return this.#ask({}); }
  takeOver() { return this.#ask({ take_over: true }); }
  async resume() {
    if (this.token) return this.state;
    const state = await this.acquire();
    return this.token && !this.current ? 'stale' : state;
  }
  extend() { return this.#lock.extend(); }
  async ask(message = '') { return this.#isClosed ? null : this.#lock.askHolder(message, this, this.#waitIdleMs); }
  answer(id, answer, message = '') { return this.#lock.answer(id, answer, message); }

  async keep(source, options = {}) {
    const isForm = source instanceof HTMLFormElement, fields = options.fields ?? (isForm ? new Fields(source) : null);
    // The browser should not put the text of an earlier visit over the stored one.
    if (isForm) own(source, 'setAttribute')('autocomplete', 'off');
    fields?.listen();
    return import('./keep.js').then(({ keep }) => keep(this, this.#lock, fields ?? source, options), error => {
      options.onproblem?.('unavailable', error);   // a server of the release before does not have the file
      const nothing = async () => {};
      return { problem: 'unavailable', changed() {}, saved: nothing, discard: nothing, flush: nothing, close() { fields?.close(); } };
    });
  }

  /** For a form that the browser has sent with this token and version: the version that it has stored, or `null`. */
  wasSaved(sent) { return wasSaved(this.url, sent); }

  /** The text that this browser has sent, and the server has saved, is kept no longer: for a page without its form. */
  static async settleKept(url) {
    await DocLock.look(url);
    return (await import('./keep.js')).settle(me, absolute(url), sent => wasSaved(absolute(url), sent));
  }

  static async clearKept(ask) { return (await import('./keep.js')).clear(me, ask); }
  async #ask(body) { return this.#isClosed ? this.state : this.#lock.ask(body, this); }
  wait() { if (!this.#isClosed) this.#lock.wait(this, this.#waitIdleMs); }
  stopWaiting() { this.#lock.stopWaiting(this); }
  async check() { await this.#lock.check(); }
  release() { return this.#lock.giveUp(this); }

  close() {
    this.#isClosed = true;
    this.#endOnInput?.();
    this.#lock.viewers.delete(this);
    return this.release();
  }

  // Whoever types has the lock, or is told before the second word that another person has it.
  #lockAtInput(target) {
    let asked = -Infinity;
    const asks = () => {
      clearTimeout(this.#askTimer);
      if (this.token || this.busy || this.waiting || this.#isClosed) return;
      const wait = asked + ASK_MS - performance.now();
      if (wait > 0) return void (this.#askTimer = setTimeout(asks, wait));
      asked = performance.now();
      this.acquire();
    };
    const fields = target instanceof HTMLFormElement ? new Fields(target) : null, root = fields ? own(target, 'getRootNode')() : target;
    const hears = event => { if (!fields || fields.hear(event)) asks(); };
    if (fields) own(target, 'setAttribute')('autocomplete', 'off');   // as `keep`
    for (const type of ['input', 'doclock-typed']) root.addEventListener(type, hears);
    fields?.listen();   // also to an editor that tells of no input
    fields?.hears.add(() => { if (fields.records.size) asks(); });   // a reset is no wish
    const draws = () => {
      const data = fields ? own(target, 'dataset') : target.dataset;
      if (data && this.#isClosed) delete data.doclock;
      else if (data) data.doclock = this.state;
      fields?.open(this.#isClosed || !['held', 'mine_elsewhere', 'frozen'].includes(this.state));
    };
    this.addEventListener('change', draws);
    this.#endOnInput = () => {
      for (const type of ['input', 'doclock-typed']) root.removeEventListener(type, hears);
      fields?.close();
      draws();
    };
  }

  headers() { return this.#lock.headers(); }
  address(url) { return this.#lock.address(url); }
  saved(answer, saves = true) { this.#lock.saved(versionIn(headerOf(answer, 'ETag')), saves); }
  async refused(answer) { return this.#lock.refused({ status: answer.status, body: await problemIn(answer) }); }

  /** `locks`: other `DocLock`s that this request needs as well. */
  async fetch(url, init = {}, { releases = false, saves = !/^patch$/i.test(init.method ?? url.method), locks = [] } = {}) {
    return this.#lock.fetch(bare(url), init, { releases, saves }, locks.map(it => it.#lock));
  }
}

const NOTHING = Object.freeze([]);

/** The lock of one document, mode and page. It is released when none of its viewers needs it any more. */
class PageLock {
  url; key; mode; holder = null; since = null; expiresAt = null; mayTakeOver = false; samePerson = false; mayAsk = false; frozen = null; lost = null;
  waiting = false; token = null; ending = null; warnMs = 0;
  asks = NOTHING;        // the asks of others, while this page has the lock
  asking = null;         // the ask of this page, while another person has the lock
  askProblem = null;     // why the server has refused to ask or to answer
  version = undefined;   // of the document, as this page shows it; `undefined` if this page names no versions
  current = null;        // whether the document still had this version when the lock was granted
  deleted = false;
  viewers = new Set();   // the `DocLock`s that are open

  static #apis = new Map();
  static #unheard = new Map();   // the bodies of releases that no server has confirmed yet, each with its URL
  #api; #name; #state = 'unknown'; #until = null; #ttl = 0; #problem = null;
  #keepers = new Map();  // the viewers that need the lock, each with the token that it was told of, or ''
  #asks = 0;             // operations that the person asked for
  #turn = 0;             // an answer is dropped if something newer has happened since its request
  #person = null;        // for whom the document was opened, as the server names them
  #opened = 0;           // counts the openings: each of them learns its person anew
  #ends = 0;             // events that may have ended the lock of this page
  #isUnconfirmed = false;   // the last heartbeat has not said whether the lock is still there
  #wanted = false;       // requested, but no answer arrived: this page may hold the lock, or get it later
  #unwantedUntil = 0;    // a wait that this page has given up may be granted until then
  #releasing = 0;        // saves under way that release the lock
  #sent = new Set();     // requests under way by `fetch`
  #saves = Promise.resolve();   // one after the other
  #written;              // the version that this page has written last, until it is told of the write
  #foreign = null;       // the request of another library that is under way
  #told;                 // the version of which this page was told last; `null` if it was not known, or there was none
  #longest = 0;          // the longest time before an idle end
  #end = null;           // the next end that no heartbeat moves: its two clocks, and why
  #news = null;          // the latest event that may have ended the lock
  #line = null; #poll = null; #nudge = () => {}; #lookTimer; #expiry;

  static of(url, mode) {
    const { base, path, key } = place(url), name = `${mode} ${path}`;
    let api = PageLock.#apis.get(base);
    if (!api) {
      api = { base, feed: Feed.of(base), locks: new Map(), failures: 0, offline: false, problem: null };
      PageLock.#apis.set(base, api);
    }
    if (!api.locks.has(name)) api.locks.set(name, Object.assign(new PageLock(), { url: path, key, mode }));
    const lock = api.locks.get(name), all = () => [...api.locks.values()];
    [lock.#api, lock.#name] = [api, name];
    if (!lock.viewers.size) {
      lock.#person = null;
      lock.#opened++;
    }
    api.deafen ??= api.feed.listen(event => {
      for (const lock of all()) if (!event.key || event.key === lock.key) lock.#hear(event);
    }, () => all().map(lock => lock.key));
    api.feed.announce();
    return lock;
  }

  static each(task) {
    for (const api of PageLock.#apis.values()) for (const lock of api.locks.values()) task(lock);
  }

  static wake() {
    PageLock.each(lock => {
      lock.#nudge();
      lock.#changed();
      lock.check();
    });
  }

  // A lock that has expired here, as after a sleep, is not known until the server has confirmed it.
  get state() { return this.#state === 'mine' && !this.#isInTime() ? 'unknown' : this.#state; }
  get busy() { return this.#asks > 0; }
  get offline() { return this.#api.offline; }
  get person() { return this.#person; }
  get ahead() { return ahead; }
  wasSaved(sent) { return wasSaved(this.url, sent); }
  get problem() { return this.#problem ?? this.#api.problem; }

  // -- asking, waiting and giving up

  /** `by`: the viewer that asks; without it, for the viewers that need the lock already. */
  async ask(body, by) {
    if (by) this.#keep(by);
    this.#asks++;
    this.#problem = null;
    this.#poll?.abort();
    this.#changed();
    // The viewer may have been closed meanwhile; or the page may hold the lock, unless a beacon has released it.
    await inOrder(this.url, () => this.#keepers.size && !(by && this.state === 'mine') && this.#post(body));
    this.#asks--;
    this.#nudge();
    this.#changed();
    this.#tellOnce(by);
    return this.state;
  }

  wait(by, waitIdleMs) {
    this.#keep(by);
    if (this.token && !this.#releasing) {
      this.#changed();
      return this.#tellOnce(by);
    }
    if (this.waiting) return;
    this.waiting = true;
    this.#changed();
    this.#standInLine(this.#line = {}, by, waitIdleMs);
  }

  stopWaiting(by) {
    if (!this.waiting) return;
    const line = this.#line;
    this.#keepers.delete(by);
    this.waiting = false;
    this.#line = null;
    this.#poll?.abort();
    this.#nudge();
    if (line?.asks) this.#withdraw();
    this.#changed();
    if (by) this.giveUp(by);   // the lock may have been granted already
  }

  // -- asking the holder, and answering

  /** An ask belongs to the wait of its page, and ends with it. */
  async askHolder(message, by, waitIdleMs) {
    if (this.token) return null;
    this.wait(by, waitIdleMs);
    return this.#line && this.#say(this.#line, { message });
  }

  #say(line, body) {
    line.asks = true;
    line.said = performance.now();
    return inOrder(this.url + '/ask', async () => {
      if (this.#line !== line) return null;
      this.askProblem = null;
      const answer = await request('POST', this.url + '/ask', PROMISED.asked, { body, person: this.#personAt(this.url) });
      if (this.#line !== line) return null;   // the end of the wait has withdrawn the ask, after this request
      const { code } = answer.body, isOfPerson = this.#isOfPerson(answer);
      if (answer.ok && isOfPerson) this.#isAsking(answer, answer.body);
      else if (code === 'no_such_ask') this.asking = null;   // it has gone with the lock
      else if (answer.status && code !== 'free') this.askProblem = isOfPerson ? answer.body : PERSON_CHANGED;
      if (!isOfPerson) this.#withdraw();
      this.#changed();
      return this.asking;
    });
  }

  #isAsking(answer, body) {
    const before = this.asking, now = askIn(answer, body), isSame = now.id === before?.id;
    const { answer: told = null, reply = '', ahead = body.ahead ?? 0 } = isSame ? before : {};
    // An answer that was under way may not know of the holder's.
    this.asking = Object.freeze({ ...now, ...!now.answer && { answer: told, reply }, at: isSame ? before.at : now.at, ahead, isSilent: false });
    if (now.answer && (told !== now.answer || reply !== now.reply)) this.#tell('answered', this.asking);
    this.#noticeSilence();
    this.#changed();
  }

  #noticeSilence() {
    const { asking } = this;
    if (!asking || asking.answer || asking.isSilent || Date.now() - asking.at < SILENCE_MS) return;
    this.asking = Object.freeze({ ...asking, isSilent: true });
    this.#changed();
  }

  #withdraw() {
    this.asking = null;
    const options = { body: {}, person: this.#personAt(this.url), keepalive: true };
    inOrder(this.url + '/ask', () => request('POST', this.url + '/withdraw', PROMISED.nothing, options));
  }

  #hearAsks(answer, asks) {
    if (!asks) return;   // of a server of the release before
    const before = new Map(this.asks.map(it => [it.id, it]));
    const now = asks.map(it => askIn(answer, it)).map(it => it.answer ? it : before.get(it.id) ?? it);
    this.asks = now.length ? Object.freeze(now) : NOTHING;
    for (const ask of now) if (!before.has(ask.id)) this.#tell('asked', ask);
  }

  /** Whether the asker is told: it may have left. */
  async answer(id, answer, message) {
    this.#need();
    const body = { ask: id, answer, message }, url = `${this.url}/answer?lock_token=${this.token}`;
    const told = await request('POST', url, PROMISED.nothing, { body, person: this.#personAt(this.url) });
    const isGone = told.body.code === 'no_such_ask', of = ask => ask.id === id;
    if (told.ok) this.asks = Object.freeze(this.asks.map(it => of(it) ? Object.freeze({ ...it, answer, reply: message }) : it));
    if (isGone) this.asks = Object.freeze(this.asks.filter(it => !of(it)));
    this.askProblem = told.ok || isGone || !told.status ? null : told.body;
    this.#changed();
    if (told.status === 412) this.check();
    return told.ok;
  }

  // The last viewer that needs the lock releases it, unless another viewer comes before its turn.
  giveUp(by) {
    this.#keepers.delete(by);
    return inOrder(this.url, async () => {
      if (this.#keepers.size) return;
      this.stopWaiting();
      if (!this.viewers.size) this.#part();
      const { token } = this, isAnswerMissing = this.#wanted;
      this.#wanted = false;
      if (isAnswerMissing) this.#unwantedUntil = performance.now() + WAIT_MS;
      if (token) this.#free();
      if (token || isAnswerMissing) await this.#release(token ? { token } : {});
    });
  }

  // Until the server has heard it: otherwise the lock would live as long as its tab.
  async #release(body, failures = 0) {
    // The lock of the other mode is another one, unless it is this one.
    const isOfBody = it => !body.token || it.mode === this.mode || it.token === body.token;
    const isNeeded = [...this.#api.locks.values()].some(it => it.url === this.url && it.#keepers.size && isOfBody(it));
    PageLock.#unheard.delete(body);
    if (isNeeded) return;   // and released by its new keeper
    const url = this.url + '/release';
    PageLock.#unheard.set(body, url);
    const answer = await request('POST', url, PROMISED.nothing, { body, keepalive: true });
    this.#api.feed.hint(this.key);
    const again = () => inOrder(this.url, () => this.#release(body, failures + 1));
    // A refusal without a code is not of the lock API: as the page of a proxy, or of a server that is being deployed.
    if (isTrouble(answer) || !answer.ok && answer.status !== 401 && !answer.body.code) setTimeout(again, backOff(failures, 30_000));
    else PageLock.#unheard.delete(body);
  }

  #keep(by) { if (!this.#keepers.has(by)) this.#keepers.set(by, ''); }

  // A viewer that came when this page held the lock already.
  #tellOnce(by) {
    if (!this.token || (this.#keepers.get(by) ?? this.token) === this.token) return;
    this.#keepers.set(by, this.token);
    by.dispatchEvent(new CustomEvent('held'));
  }

  async #standInLine(line, by, waitIdleMs) {
    let isFirst = this.#state === 'unknown', failures = 0;   // the first request shows the holder at once
    let isNext = false;   // a wait extends no session, the request after it does
    while (this.#line === line) {
      const endTurn = isFirst || isNext ? null : await turnToWait(this.#api.base);
      await tails.get(this.url);
      if (this.#line !== line) return endTurn?.();
      if (this.token || idleMs() > waitIdleMs) {
        endTurn?.();
        this.stopWaiting();
        this.#tellOnce(by);
        return this.check();
      }
      const waitMs = isFirst ? 0 : endTurn ? WAIT_MS : 1;
      const began = performance.now(), sentBy = page, poll = this.#poll = new AbortController();
      const ask = () => this.#post({ wait_ms: waitMs }, { signal: poll.signal, timeout: waitMs + TIMEOUT_MS });
      // In order if it is short: whoever gives up waits for its answer, and knows what must be released.
      const answer = await (endTurn ? ask() : inOrder(this.url, ask));
      endTurn?.();
      if (this.#poll === poll) this.#poll = null;
      if (answer.aborted || sentBy !== page) continue;   // the page was left meanwhile, and is back
      if (this.#line === line && this.asking && performance.now() - line.said > REPEAT_MS) this.#say(line, { ask: this.asking.id });
      failures = isTrouble(answer) ? failures + 1 : 0;
      if (failures) await this.#pause(backOff(failures, 15_000));
      else if (!answer.ok && answer.status !== 423) return this.stopWaiting();
      // Refused without a wait: another tab of this person holds the lock, so waiting does not help.
      else if (this.#state === 'mine_elsewhere' || endTurn && performance.now() - began < 1000) await this.#pause(WAIT_MS);
      else if (!endTurn && !isFirst && !isNext) await this.#pause(KEEP_PLACE_MS);
      [isFirst, isNext] = [false, Boolean(endTurn)];
    }
  }

  #pause(ms) {
    return new Promise(done => {
      this.#nudge = done;
      setTimeout(done, ms);
    });
  }

  async #post(body, options) {
    const turn = this.#turn, ends = this.#ends, opened = this.#opened;
    this.#wanted = true;
    this.#unwantedUntil = 0;
    body = { mode: this.mode, ...this.version && { version: this.version }, ...body };
    let answer = await request('POST', this.url, PROMISED.lock, { body, person: this.#personAt(this.url), ...options });
    if (answer.aborted) return answer;
    if (answer.ok && !this.#isOfPerson(answer)) {   // of another origin, or of an older server
      this.#giveBack(answer.body.token);
      answer = { ...answer, ok: false, status: 409, body: PERSON_CHANGED };
    }
    this.#learn(answer, opened);
    PageLock.#note(this.#api, answer);
    this.#problem = answer.ok || answer.status === 423 || !answer.status ? null : answer.body;
    if (answer.ok) {
      this.#gain(answer);
      if (!this.#keepers.size) this.giveUp();   // too late
    } else if (isTrouble(answer)) {
      if (!this.token) this.#lookIn(backOff(this.#api.failures, 15_000));
    } else {
      this.#wanted = false;
      this.#lose(lossIn(answer));
      if (answer.status === 423) this.#named(answer);
      if (answer.status === 423 && turn === this.#turn) this.#saw(standing(answer));
      else this.#lookIn(0);
    }
    this.#changed();
    if (this.token && ends !== this.#ends) this.check();   // the event may be newer than this answer
    return answer;
  }

  // -- looking

  check() { return this.token ? PageLock.#beat(this.#api) : this.#look(); }

  async #look() {
    if (!this.viewers.size || this.busy || !visible()) return;
    const turn = ++this.#turn, opened = this.#opened, { version } = this;
    const answer = await request('GET', this.url + (version ? '?shown=' + version : ''), PROMISED.state);
    const { current, version: stored = null } = answer.body;
    if (current === false && version === this.version && stored !== this.#told) this.#tellSave({ by: null, version: stored });
    PageLock.#note(this.#api, answer, true);
    if (this.busy || turn !== this.#turn) return;
    this.#learn(answer, opened);
    if (answer.ok) {
      this.deleted = current === false && stored === null;
      if (['login_required', 'person_changed'].includes(this.#problem?.code) && this.#isOfPerson(answer)) this.#problem = null;
      if (this.lost && answer.person && this.#isOfPerson(answer)) this.lost.isBack = true;   // has logged in again
      this.#named(answer);
      this.#saw(standing(answer));
      if (this.asking && answer.body.ask?.ask === this.asking.id) this.#isAsking(answer, answer.body.ask);
    } else if (isTrouble(answer)) this.#lookIn(backOff(this.#api.failures, 15_000));
    else this.#problem = answer.body;
    this.#changed();
  }

  /** The server may write the id in another way than the URL. */
  #named({ body: { key } }) {
    if (!key || key === this.key) return;
    this.key = key;
    this.#api.feed.announce();
  }

  // -- the person for whom the document was opened

  #learn({ person }, opened) { if (opened === this.#opened) this.#person ??= person; }
  #isOfPerson({ person }) { return !person || !this.#person || person === this.#person; }

  // To the origin of this page only: a server of another origin may not accept the header.
  #personAt(url) {
    return new URL(url.url ?? url, document.baseURI).origin === location.origin ? this.#person : null;
  }

  // The viewers keep what was typed. Whoever opens the document from now on has a `PageLock` of their own.
  #disown() {
    const { locks } = this.#api;
    this.#keepers.clear();
    this.#line = this.asking = null;   // nothing is to be withdrawn for the next person
    this.waiting = false;
    if (this.token) this.#giveBack(this.token);
    if (this.lost) this.lost.kind = 'person_changed';
    if (locks.get(this.#name) === this) locks.delete(this.#name);
    locks.set(this.#name = this, this);
  }

  #giveBack(token) { request('POST', this.url + '/release', PROMISED.nothing, { body: { token }, keepalive: true }); }

  // -- looking further

  #lookIn(ms) {
    clearTimeout(this.#lookTimer);
    this.#lookTimer = setTimeout(() => this.token || this.#look(), ms);
  }

  #saw({ state, mode, problem, ...facts }) {
    if (state === 'mine') {
      // The lock belongs to this tab: its answer is under way or was lost, or it was granted before a reload.
      if (this.#poll) return this.#lookIn(1000);
      if (performance.now() < this.#unwantedUntil) inOrder(this.url, () => this.#release({}));
      this.#unwantedUntil = 0;
      if (this.#wanted && visible()) return void this.ask({});
      state = 'free';
    }
    const before = this.#state;
    this.#state = state;
    Object.assign(this, facts, (state === 'free' || state === 'frozen') && { holder: null, since: null, expiresAt: null });
    if (state !== 'held') this.asking = this.askProblem = null;
    if (state !== before) this.#nudge();
    if (state === 'free' && state !== before) this.#tell('free');
    const until = state === 'frozen' ? this.frozen.until : this.expiresAt;
    if (state !== 'free') this.#lookIn(clamp((until - Date.now()) / 3, ...LOOK_MS));
    this.#changed();
  }

  // -- holding and losing

  #isInTime() { return Date.now() < this.#until.wall && performance.now() < this.#until.steady; }

  // Counted from before the request was sent: this page gives up before the server grants the lock to others.
  #renew({ sent }, { expires_in_ms: ms, ends_in_ms: end, ends_why: why }) {
    this.#end = end === undefined ? null : { why, wall: sent.wall + end, steady: sent.steady + end };
    if (why === 'idle') this.#longest = Math.max(this.#longest, end);
    this.#warn();
    this.#until = { wall: sent.wall + ms, steady: sent.steady + ms };
    this.#isUnconfirmed = false;
    this.#ttl = Math.max(this.#ttl, ms);
    this.expiresAt = this.#until.wall;
    clearTimeout(this.#expiry);
    this.#expiry = setTimeout(() => this.expire(), ms + 5 - (performance.now() - sent.steady));
  }

  #gain(answer) {
    clearTimeout(this.#lookTimer);
    const { key, token, current = null, version } = answer.body, { since } = standing(answer);
    Object.assign(
      this, { key, token, since, current, holder: null, mayTakeOver: false, samePerson: false, mayAsk: false, frozen: null, lost: null, deleted: false, waiting: false, asking: null, askProblem: null });
    this.#turn++;
    this.#wanted = false;
    this.#news = this.#line = null;
    this.#state = 'mine';
    this.#renew(answer, answer.body);
    PageLock.#schedule(this.#api);
    this.#api.feed.announce();   // the server may write the id in another way
    this.#api.feed.hint(key);
    for (const by of this.#keepers.keys()) this.#keepers.set(by, token);
    this.#tell('held');
    if (current === false) this.#tell('stale', { version });
    this.#hearAsks(answer, answer.body.asks);
  }

  // -- an end that comes although this page is alive

  // At each answer, and each second. The page is told once, and again if another end comes sooner.
  #warn() {
    const { ending } = this, end = this.token && this.#end;
    const left = end ? Math.min(end.wall - Date.now(), end.steady - performance.now()) : Infinity;
    // An idle person has longer than the warning.
    if (left > (end?.why === 'idle' ? Math.min(this.warnMs, this.#longest / 2) : this.warnMs)) {
      this.ending = null;
      if (ending) this.#changed();
    } else if (ending?.why !== end.why) {
      this.ending = { why: end.why, at: new Date(end.wall), canExtend: end.why === 'idle' };
      this.#tell('ending', this.ending);
      this.#changed();
    } else if (Math.abs(ending.at - end.wall) > 1000) {
      this.ending = { ...ending, at: new Date(end.wall) };
      this.#changed();
    }
  }

  isTouched() { if (this.ending?.canExtend) this.check(); }

  async extend() {
    touch();
    await this.check();
    return Boolean(this.token) && !this.ending;
  }

  async fetch(url, init, { releases, saves }, others) {
    const locks = [...new Set([this, ...others])], isWrite = !/^(get|head)$/i.test(init.method ?? url.method ?? 'get');
    const request = { isWrite, releases, saves: isWrite && saves }, send = () => this.#sendInTurn(url, init, locks, request);
    if (isWrite) this.#tell('writing', request);   // its body is what the page shows now
    // Two saves at once would name the same version, and the second one would meet the first.
    const done = this.version ? this.#saves.then(send) : send();
    if (this.version) this.#saves = done.catch(() => {});
    return done.finally(() => request.isSent || this.#tell('written', { request, saves: null }));
  }

  async #sendInTurn(url, init, locks, request) {
    if (!request.releases) return this.#send(url, init, locks, request);
    for (const lock of locks) lock.#releasing++;
    try {
      // In order: a viewer that comes before the answer acquires the lock after that.
      const send = () => this.#send(url, init, locks, request);
      const paths = [...new Set(locks.map(lock => lock.url))].sort();   // so that two requests never wait for each other
      return await paths.reduce((send, path) => () => inOrder(path, send), send)();
    } finally {
      for (const lock of locks) lock.#releasing--;
      if (locks.some(lock => lock.token)) this.check();   // meanwhile, no heartbeat was believed that a lock is gone
    }
  }

  // Without a token the server would check only the session, which may hold the lock in another tab.
  #need() { if (!this.token) throw new Error('This page does not have the lock.'); }

  // For a request of another library. `saved` or `refused` ends it, or else the next one.
  headers() {
    this.#need();
    this.#answered(null);
    this.#foreign = { saves: true };
    for (const name of ['writing', 'sending']) this.#tell(name, this.#foreign);
    return {
      'Lock-Token': `<urn:uuid:${this.token}>`, 'Doclock-Tab': tabId, 'Doclock-Page': page, 'Doclock-Idle-Ms': String(idleMs()),
      ...this.#person && { 'Doclock-Person': this.#person }, ...this.version && { 'If-Match': `"${this.version}"` },
    };
  }

  #answered(saves) {
    if (this.#foreign) this.#tell('written', { request: this.#foreign, saves });
    this.#foreign = null;
  }

  saved(version, saves) {
    this.#wrote(version, saves);
    this.#answered(saves);
    this.#changed();
  }

  address(url) {
    this.#need();
    const whole = new URL(url, document.baseURI), { searchParams: said } = whole;
    if (whole.origin !== new URL(this.url, document.baseURI).origin) throw new TypeError(`${url} is not of the site of the lock.`);
    said.set('lock_token', this.token);
    if (/^[0-9a-f-]{36}$/.test(said.get('tab') ?? tabId)) said.set('tab', tabId);   // or it is a parameter of the application
    if (this.version) said.set('version', this.version);
    else if (this.version === null) said.delete('version');   // it is not known after a save
    return whole.href;
  }

  async #send(url, init, locks, request) {
    const tokens = locks.map(lock => lock.token), all = new Headers(init.headers ?? url.headers);   // or a Request
    for (const lock of locks) lock.#need();
    for (const [name, value] of Object.entries(await headers())) all.set(name, value);
    if (this.#personAt(url)) all.set('Doclock-Person', this.#person);
    all.set('Lock-Token', tokens.map(token => `<urn:uuid:${token}>`).join(', '));
    const { isWrite, releases, saves } = request, named = locks.length === 1 && this.version;
    if (named && isWrite && !all.has('If-Match')) all.set('If-Match', `"${named}"`);
    request.isSent = true;
    if (isWrite) this.#tell('sending', request);
    // A redirect may lead to a login page; and a proxy or a service worker may answer without the application.
    const isReached = ({ redirected, headers }) => !redirected && (!all.has('Doclock-Person') || headers.has('Doclock-Person'));
    let told = null;   // what is saved, if that is known
    const sent = fetch(url, { ...init, headers: all }).then(response => {
      const { ok, status, redirected } = response;
      if (ok ? isReached(response) : isRefusal(status) && !redirected) told = ok && saves;
      if (ok && isReached(response) && isWrite && locks.length === 1) this.#wrote(versionIn(response.headers.get('ETag')), saves);
      return response;
    }).finally(() => isWrite && this.#tell('written', { request, saves: told }));
    for (const lock of locks) lock.#sent.add(sent);
    const response = await sent.finally(() => { for (const lock of locks) lock.#sent.delete(sent); });
    if (locks.some((lock, n) => lock.token !== tokens[n])) return response;
    if (response.ok && releases) {
      for (const lock of locks) if (isReached(response) || await lock.#isGone()) lock.#free();
    } else if (REFUSALS.includes(response.status)) {
      if (locks.length === 1) await this.refused({ status: response.status, body: await problemIn(response) });
      else await this.check();   // tells which of them is lost
    }
    return response;
  }

  /** Believes a refusal of a request with this lock. Returns whether it may have been one because of the lock. */
  async refused({ status, body }) {
    this.#answered(isRefusal(status) ? false : null);
    if (!REFUSALS.includes(status)) return false;
    if (body.code === 'stale_copy') this.#tell('stale', { version: body.version });
    else if (status === 401 || body.state === 'lost') this.#lose(lossIn({ status, body }));
    else if (status === 412 && !body.code && this.version) await this.#compare();   // perhaps a page of the application
    else await this.check();   // it may be a conflict of the application itself
    return true;
  }

  async #compare() {
    const { body } = await request('GET', `${this.url}?shown=${this.version}`, PROMISED.state);
    if (body.current === false) this.#tell('stale', { version: body.version });
    else await this.check();
  }

  // After a save whose answer names no version, the version is not known.
  #wrote(version, isSave) {
    this.#written = version;
    if (this.version !== undefined && (version || isSave)) this.shows(version);
  }

  /** `isLoaded`: the page says so, and not the answer to its save. */
  shows(version, isLoaded = false) {
    [this.version, this.#told] = [version, undefined];
    queueMicrotask(() => {   // not before the caller knows this lock
      if (isLoaded) this.#tell('loaded');
      this.#changed();
    });
  }

  async #isGone() {
    const answer = await request('GET', this.url, PROMISED.state);
    return answer.ok && answer.body.state !== 'mine';
  }

  #free() {
    this.#finish('free');
    this.#tell('free');
    this.#changed();
  }

  #finish(state) {
    this.#turn++;
    this.#wanted = false;
    this.#state = state;
    this.token = this.#until = this.since = this.expiresAt = this.#end = this.ending = this.current = null;
    this.asks = NOTHING;
    this.askProblem = null;
  }

  #lose({ kind, by = null, reason = null } = {}) {
    if (kind === 'person_changed') this.#disown();
    if (!this.token) return;
    kind ??= this.#isInTime() ? 'unknown' : 'expired';
    this.#finish('unknown');
    this.lost = { kind, by, reason, at: new Date() };
    this.#explain();
    this.#tell('lost', this.lost);
    this.#changed();
    this.#lookIn(0);
  }

  // An event tells the reason. It may arrive before or after the end is noticed.
  #explain() {
    const { lost } = this, news = this.#news;
    if (lost?.kind !== 'unknown' || !news || Math.abs(lost.at - news.at) > 10_000) return;
    Object.assign(lost, { kind: news.type, by: news.by ?? null, reason: news.reason ?? null });
    this.#changed();
  }

  // The answer tells of a save of this page, and nobody else saves while this page has the lock.
  async #hearSave({ by, version, whose }) {
    await Promise.allSettled(this.#sent);
    if (version === this.#written) this.#written = undefined;
    else this.#tellSave({ by, version }, whose);
  }

  // Once for each version: after a gap in the events, the page asks whether its version is still the stored one.
  #tellSave(save, whose) {
    const isKnown = save.version && [this.version, this.#told].includes(save.version);
    // A page that names no version may have got the lock before it hears of the last save of the holder before.
    const isLate = whose === 'held' && this.current === null && !this.version;
    if (isKnown || this.token && !isLate) return;
    this.#told = save.version;
    this.#tell('saved', save);
  }

  #hear(event) {
    if (event.type === 'saved') return this.#hearSave(event);
    if (event.type === 'answered' && event.ask === this.asking?.id) this.#isAsking({}, event);   // also in a hidden page, which does not look
    if (event.state && event.state !== 'mine' && event.was !== 'held') this.#ends++;
    if (event.state === 'free' && (this.token || this.lost) && !this.#releasing) {
      this.#news = { ...event, at: Date.now() };
      this.#explain();
    }
    this.check();
  }

  #tell(name, detail) { for (const by of [...this.viewers]) by.dispatchEvent(new CustomEvent(name, { detail })); }
  #changed() { this.#tell('change'); }

  #part() {
    const api = this.#api;
    clearTimeout(this.#lookTimer);
    if (api.locks.get(this.#name) === this) api.locks.delete(this.#name);   // it may have parted before
    if (api.locks.size) return;
    api.deafen?.();
    api.deafen = null;
  }

  // -- keeping

  static #schedule(api) {
    clearTimeout(api.timer);
    const ttls = [...api.locks.values()].filter(lock => lock.token).map(lock => lock.#ttl);
    if (!ttls.length) return;
    const ttl = Math.min(...ttls);
    // The server renews once in a third of the ttl: a slightly later heartbeat always renews.
    const ms = api.failures ? backOff(api.failures, clamp(ttl / 6, 500, 15_000)) : ttl / 3 + 250;
    api.timer = setTimeout(() => PageLock.#beat(api), ms);
  }

  // By a heartbeat that is sent after this call: one that is under way may not know what the caller has heard.
  static #beat(api) {
    if (api.beat) {
      return api.next ??= api.beat.then(() => {
        api.next = null;
        return PageLock.#beat(api);
      });
    }
    return api.beat = PageLock.#sendBeat(api).finally(() => {
      api.beat = null;
      PageLock.#schedule(api);
    });
  }

  static async #sendBeat(api) {
    const believed = [...api.locks.values()].filter(lock => lock.token).map(lock => ({ lock, token: lock.token, turn: lock.#turn }));
    if (!believed.length) return;
    const locks = Object.fromEntries(believed.map(({ lock, token }) => [lock.key, token]));
    const answer = await request('POST', api.base + '/heartbeat', PROMISED.beat, { body: { locks } });
    const isUnheard = !answer.ok && answer.status !== 401;   // a refusal of the server or of a proxy: nothing is known of the locks
    PageLock.#note(api, answer, true, isUnheard);
    if (isUnheard) return believed.forEach(({ lock }) => { lock.#isUnconfirmed = true; });
    const held = new Map((answer.body.held ?? []).map(one => [one.token, one]));
    for (const { lock, token, turn } of believed) {
      if (lock.#turn !== turn || lock.busy) continue;   // something newer decides
      const isOfPerson = lock.#isOfPerson(answer);
      if (held.has(token) && isOfPerson) {
        lock.#renew(answer, held.get(token));
        lock.#hearAsks(answer, held.get(token).asks);
        lock.#changed();
      } else if (!lock.#releasing) {
        lock.#lose(isOfPerson ? lossIn(answer) : { kind: 'person_changed' });
      }
    }
  }

  // `isForAll`: its problem is not one of a single lock.
  static #note(api, answer, isForAll = false, isBad = isTrouble(answer)) {
    const { offline, problem } = api;
    api.failures = isBad ? api.failures + 1 : 0;
    api.offline = answer.status === 0;
    if (isForAll || !isBad || api.offline) api.problem = isBad && !api.offline ? answer.body : null;
    if (offline === api.offline && problem === api.problem) return;
    for (const lock of api.locks.values()) lock.#changed();
  }

  // -- the life of the page

  // A beacon without a token also stops what this page has asked for and is not granted yet.
  static leave() {
    const of = { tab: tabId, page };
    for (const [body, url] of PageLock.#unheard) sendLast(url, { ...of, ...body });
    PageLock.each(lock => {
      const url = lock.url + '/release', last = { ...of, grace_ms: lock.#keepers.size ? GRACE_MS : 0 };
      if (lock.token) sendLast(url, { ...last, token: lock.token });
      if (lock.#wanted || performance.now() < lock.#unwantedUntil) sendLast(url, last);
      if (lock.#line?.asks) sendLast(lock.url + '/withdraw', {});
      lock.asking = null;
    });
  }

  /** The page is back, but its beacon was sent. */
  show() { this.token ? this.ask({}) : this.check(); }

  /** At the expiry, and each second after it until the server has said whether the lock is still there. */
  expire() {
    if (this.token) this.#warn();
    else this.#noticeSilence();
    if (!this.token || this.#isInTime()) return;
    if (this.#isUnconfirmed) return this.#lose();   // it cannot say so at the moment
    this.#changed();
    this.check();
  }
}

// ---- the life of the page -------------------------------------------------------------------

if (globalThis.document) {   // a server that renders pages may import this file, too
  [tab, page] = [nameTab(), uuid()];
  meetOtherTabs();
  for (const event of ['pointerdown', 'pointermove', 'keydown', 'input', 'doclock-typed', 'wheel', 'touchstart']) {
    addEventListener(event, touch, { capture: true, passive: true });
  }
  // Not earlier than `pagehide`: a person may still be working on a hidden tab. Firefox may abort the first listener of
  // a page part-way when its tab closes. So the first one only sends the beacons, and the second one sends them again.
  const leave = () => {
    isLeft = true;
    PageLock.leave();
  };
  let cleared = null;
  addEventListener('pagehide', leave);
  addEventListener('pagehide', () => {
    leave();
    leaveTab();
    cleared = clearedKept();
    otherTabs?.close();
    otherTabs = null;
    Feed.each('leave');   // a page in the back/forward cache has no stream
  });
  addEventListener('pageshow', ({ persisted }) => {
    isLeft = false;
    // The texts of this browser were cleared while the page was in the back/forward cache: the next person may not see its text.
    if (persisted && cleared !== clearedKept()) {
      document.documentElement.hidden = true;
      return location.reload();
    }
    if (persisted) {
      [tab, page] = [nameTab(), uuid()];
      meetOtherTabs();
    }
    Feed.each('join');
    if (persisted) PageLock.each(lock => lock.show());
  });
  addEventListener('online', () => {
    Feed.each('reconnect');
    PageLock.wake();
  });
  document.addEventListener('freeze', () => Feed.each('leave'));
  document.addEventListener('resume', () => {
    Feed.each('join');
    PageLock.wake();
  });
  document.addEventListener('visibilitychange', () => {
    if (!navigator.locks) Feed.each(visible() ? 'join' : 'leave');   // own stream per page: only while visible
    if (visible()) PageLock.wake();
  });
  // If the timers of a visible page stopped, the computer slept or its clock was set: the stream may be a dead connection.
  let lastTick = Date.now();
  setInterval(() => {
    const overslept = visible() && Math.abs(Date.now() - lastTick) > 5000;
    lastTick = Date.now();
    Feed.each(overslept ? 'reopen' : 'poll');
    if (overslept) PageLock.wake();
    PageLock.each(lock => lock.expire());
  }, 1000);
}
