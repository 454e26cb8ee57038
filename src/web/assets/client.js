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
// This file has three parts: the tab, the feed of events, and the lock.

const TIMEOUT_MS = 10_000;
const WAIT_MS = 25_000;          // one request that waits; proxies close connections that are idle for longer
const GRACE_MS = 4_000;          // for a reload; a waiter should get the lock within six seconds of a closed tab
const POLL_MS = 4_000;           // while there is no stream
const LOOK_MS = [5_000, 30_000]; // renewals by other sessions are not announced
const KINDS = ['acquired', 'released', 'expired', 'broken', 'session_ended', 'resync'];

const sleep = ms => new Promise(done => setTimeout(done, ms));
const clamp = (ms, low, high) => Math.min(Math.max(ms, low), high);
const visible = () => document.visibilityState === 'visible';
// Two clocks: the wall clock may be set, and the monotonic clock may stop while the computer sleeps.
const now = () => ({ wall: Date.now(), steady: performance.now() });
// Random, so that the pages of an office do not all come back at the same moment after an outage.
const backOff = (failures, most) => Math.min(500 * 2 ** failures, most) * (0.5 + Math.random() / 2);

// ---- this tab -------------------------------------------------------------------------------

// `crypto.randomUUID` and `navigator.locks` exist on https and localhost only.
function uuid() {
  const hex = Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte, i) =>
    (i === 6 ? byte & 0x0f | 0x40 : i === 8 ? byte & 0x3f | 0x80 : byte).toString(16).padStart(2, '0')).join('');
  return hex.replace(/^(.{8})(.{4})(.{4})(.{4})/, '$1-$2-$3-$4-');
}

const remembered = {   // storage may be forbidden: then each reload counts as a new tab
  get: () => { try { return sessionStorage.getItem('doclock-tab'); } catch { return null; } },
  set: id => { try { sessionStorage.setItem('doclock-tab', id); } catch { /* as above */ } },
};

let tabId = null, leaveTab = () => {};

// Whether no other page has this id. A duplicated tab starts with a copy of the sessionStorage, and a
// reloaded page starts with its own. Therefore the id belongs to the page that holds a Web Lock of this name.
function claim(id) {
  if (!navigator.locks) return ask(id);
  return new Promise(claimed => {
    // A reloaded page may start a little before the old page has gone.
    navigator.locks.request('doclock-tab:' + id, { signal: AbortSignal.timeout(700) }, () => {
      claimed(true);
      return new Promise(leave => { leaveTab = leave; });
    }).catch(() => claimed(false));
  });
}

async function ask(id) {
  const channel = new BroadcastChannel('doclock-tab:' + id), me = uuid();
  let taken = false;
  channel.onmessage = ({ data }) => {
    if (data.from === me) return;
    if (!data.ask) taken = true;
    else if (id === tabId) channel.postMessage({ from: me });
  };
  leaveTab = () => channel.close();
  channel.postMessage({ ask: true, from: me });
  await sleep(150);
  if (taken) channel.close();
  return !taken;
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

let tab = nameTab();
let page = uuid();   // this load: the beacon of an older load may arrive after the first request of this load
addEventListener('pagehide', () => leaveTab());
addEventListener('pageshow', event => {
  if (!event.persisted) return;
  tab = nameTab();
  page = uuid();
});

let touched = Date.now();
for (const event of ['pointerdown', 'pointermove', 'keydown', 'wheel', 'touchstart']) {
  addEventListener(event, () => { touched = Date.now(); }, { capture: true, passive: true });
}

let extra = null;   // what DocLock.headers was set to
const headers = async () => ({ ...await extra?.(), 'Doclock-Tab': await tab, 'Doclock-Page': page, 'Doclock-Idle-Ms': String(Date.now() - touched) });

// If the timers of a visible page stopped, the computer slept or its clock was set.
const everySecond = new Set();
let lastTick = Date.now();
setInterval(() => {
  const overslept = visible() && Math.abs(Date.now() - lastTick) > 5000;
  lastTick = Date.now();
  for (const task of everySecond) task(overslept);
}, 1000);

const aborted = signal => new Promise((_, fail) => signal.addEventListener('abort', () => fail(signal.reason), { once: true }));

// Never rejects: a missing answer is `status: 0`.
async function request(method, url, { body, signal, timeout = TIMEOUT_MS } = {}) {
  const init = { method, cache: 'no-store', signal: AbortSignal.timeout(timeout) };
  if (signal) init.signal = AbortSignal.any([signal, init.signal]);
  const sent = now();
  try {
    init.headers = await Promise.race([headers(), aborted(init.signal)]);
    if (body) {
      init.headers['Content-Type'] = 'application/json';
      init.body = JSON.stringify(body);
    }
    const response = await fetch(url, init);
    const text = await response.text();
    const date = Date.parse(response.headers.get('Date'));
    return { sent, date, status: response.status, ok: response.ok, body: text ? JSON.parse(text) : {} };
  } catch {
    return { sent, status: 0, ok: false, body: {}, aborted: Boolean(signal?.aborted) };
  }
}

// A temporary failure of the network, the database or a proxy: the request may succeed later.
const isTrouble = answer => [0, 408, 429].includes(answer.status) || answer.status >= 500;

// The state of a document, in the terms and by the clock of this page.
function standing({ sent, date, body }) {
  const freeze = body.state === 'frozen' ? body : body.frozen;
  const skew = Math.abs(Date.now() - date) > 2000 ? Date.now() - date : 0;   // `Date` has seconds only
  return {
    state: body.state === 'free' && freeze ? 'frozen' : body.state,
    mode: body.mode ?? null,
    holder: body.holder?.label ?? null,
    since: body.since ? new Date(Date.parse(body.since) + skew) : null,
    expiresAt: body.expires_in_ms === undefined ? null : sent.wall + body.expires_in_ms,
    mayTakeOver: Boolean(body.may_take_over),
    frozen: freeze ? { reason: freeze.reason, until: new Date(Date.parse(freeze.until) + skew) } : null,
  };
}

/** The parts of the URL of a lock: the lock API, the path, and the name in events and heartbeats. */
function place(url) {
  const { pathname } = new URL(url, document.baseURI);
  const [, base, collection, id] = pathname.match(/^(.*)\/([^/]+)\/([^/]+)\/?$/);
  return { base, path: `${base}/${collection}/${id}`, key: `${decodeURIComponent(collection)}/${decodeURIComponent(id)}` };
}

const AT_ONCE = 200;   // as many as the server allows

/** The states of these documents, without those for which no answer came. */
async function lookAt(base, keys) {
  const found = new Map();
  for (let from = 0; from < keys.length; from += AT_ONCE) {
    const answer = await request('POST', base + '/status', { body: { keys: keys.slice(from, from + AT_ONCE) } });
    if (!answer.ok) continue;
    for (const body of answer.body.locks ?? []) found.set(body.key, standing({ ...answer, body }));
  }
  return found;
}

class List {
  #base; #callback; #end;
  #keys = new Set();
  #due = new Set();
  #isLooking = false;

  constructor(base, keys, callback) {
    [this.#base, this.#callback] = [base, callback];
    this.#end = Feed.of(base).listen(({ type, key }) => {
      if (type === 'resync') this.look();
      else if (this.#keys.has(key)) this.#look([key]);
    });
    this.show(keys);
  }

  show(keys) {
    const before = this.#keys;
    this.#keys = new Set(keys);
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
      const found = await lookAt(this.#base, these);   // an event that comes meanwhile makes its document due again
      const shown = these.filter(key => this.#keys.has(key));   // `show` or `close` may have come meanwhile
      if (shown.length) this.#callback(new Map(shown.map(key => [key, found.get(key) ?? null])));
    }
    this.#isLooking = false;
  }
}

// ---- the feed: tells every page of this browser about the locks -----------------------------

// HTTP/1.1 allows six connections to a server: with a stream for each tab, the seventh tab would have
// no connection. So only the tab with the Web Lock has a stream, and it passes the events on.
class Feed {
  static #feeds = new Map();

  static of(base) {
    if (!Feed.#feeds.has(base)) Feed.#feeds.set(base, new Feed(base));
    return Feed.#feeds.get(base);
  }

  static {
    addEventListener('pagehide', () => Feed.#each('leave'));   // a page in the back/forward cache has no stream
    addEventListener('pageshow', () => Feed.#each('join'));
    addEventListener('online', () => Feed.#each('reconnect'));
    document.addEventListener('freeze', () => Feed.#each('leave'));
    document.addEventListener('resume', () => Feed.#each('join'));
    document.addEventListener('visibilitychange', () => {
      if (!navigator.locks) Feed.#each(visible() ? 'join' : 'leave');   // own stream per page: only while visible
    });
    everySecond.add(overslept => Feed.#each(overslept ? 'reconnect' : 'poll'));
  }

  static #each(what) { for (const feed of Feed.#feeds.values()) feed[what](); }

  listeners = new Set();
  #base; #channel; #source; #place; #resign; #retry; #failures = 0;
  #isLive = false;         // some tab has a stream
  #polled = Date.now();

  constructor(base) { this.#base = base; }

  listen(callback) {
    this.listeners.add(callback);
    this.join();
    return () => {
      this.listeners.delete(callback);
      if (!this.listeners.size) this.leave();
    };
  }

  join() {
    if (this.#channel || !this.listeners.size) return;
    this.#channel = new BroadcastChannel('doclock:' + this.#base);
    this.#channel.onmessage = ({ data }) => {
      if (data.type !== 'who') this.#tell(data);
      else if (this.#source && this.#isLive) this.#channel.postMessage({ type: 'resync', isReply: true });
    };
    this.#channel.postMessage({ type: 'who' });
    if (!navigator.locks) return this.#connect();
    this.#place = new AbortController();
    navigator.locks.request('doclock-events:' + this.#base, { signal: this.#place.signal }, () => {
      this.#connect();
      return new Promise(resign => { this.#resign = resign; });
    }).catch(() => {});
  }

  leave() {
    clearTimeout(this.#retry);
    this.#source?.close();
    this.#place?.abort();
    this.#resign?.();
    this.#channel?.close();
    this.#channel = this.#source = this.#place = this.#resign = null;
    this.#isLive = false;
  }

  /** Tells the other tabs at once that their state of this document may be outdated. */
  hint(key) { this.#channel?.postMessage({ type: 'hint', key }); }

  /** After a sleep of the computer, the stream may be a dead connection. */
  reconnect() { if (this.#source) this.#connect(); }

  /** Without a stream, pages poll. */
  poll() {
    if (this.#isLive || !visible() || Date.now() - this.#polled < POLL_MS) return;
    this.#polled = Date.now();
    for (const listener of this.listeners) listener({ type: 'resync', isLive: false });
  }

  async #connect() {
    const channel = this.#channel, id = await tab;
    if (!channel || channel !== this.#channel || extra) return;   // an EventSource sends no headers: this page polls
    clearTimeout(this.#retry);
    this.#source?.close();
    const source = this.#source = new EventSource(`${this.#base}/events?tab=${id}`);
    const pass = event => {
      this.#channel?.postMessage(event);
      this.#tell(event);
    };
    for (const type of KINDS) {
      source.addEventListener(type, ({ data }) => {
        this.#failures = 0;
        pass({ ...JSON.parse(data), type });
      });
    }
    source.onerror = () => {
      pass({ type: 'down' });
      // After a network error the browser reconnects; after a refusal it does not.
      if (source === this.#source && source.readyState === EventSource.CLOSED) {
        this.#retry = setTimeout(() => this.#connect(), backOff(++this.#failures, 30_000));
      }
    };
  }

  #tell(event) {
    if (event.isReply && this.#isLive) return;   // a reply for a tab that has just joined
    if (event.type === 'down') {
      this.#isLive = false;
      this.#polled = Date.now();
    } else {
      if (event.type === 'resync') event = { type: 'resync', isLive: this.#isLive = true };
      for (const listener of this.listeners) listener(event);
    }
  }
}

// ---- the lock -------------------------------------------------------------------------------

/**
 * The lock of one document, with its state and its operations. The fields show the current state;
 * each change of a field is followed by a `change` event.
 */
export class DocLock extends EventTarget {
  url; key; mode;
  /** The holder, if it is not this page; the start and the latest end of the lock, in ms as in Date.now(). */
  holder = null; since = null; expiresAt = null; mayTakeOver = false;
  /** Why no new lock is granted at the moment: {reason, until}; null if locks are granted. */
  frozen = null;
  /** Why this page has lost the lock: {kind, by, reason, at}; null once it holds the lock again. */
  lost = null;
  /** This page waits for the lock. */
  waiting = false;
  /** An operation that the person asked for is under way. */
  busy = false;
  /** Why the server refused the last request: its RFC 9457 problem, or null. */
  problem = null;

  static #apis = new Map();
  #api; #state = 'unknown'; #token = null; #until = null; #ttl = 0; #closed = false; #waitIdleMs;
  #turn = 0;             // an answer is dropped if something newer has happened since its request
  #wanted = false;       // requested, but no answer arrived: this page may hold the lock
  #releasing = false;    // a save that releases is under way
  #news = null;          // the latest event that may have ended the lock
  #line = null; #poll = null; #nudge = () => {}; #lookTimer;

  /**
   * For applications without cookies: a function, perhaps asynchronous, whose headers are sent with each
   * request, as in `DocLock.headers = () => ({ Authorization: 'Bearer ' + token })`. Set it before anything
   * else. Such a page has no stream of events, and polls instead.
   */
  static set headers(headers) { extra = async () => DocLock.#last = await headers(); }
  static #last = {};     // a page that is being closed cannot wait

  /**
   * Opens the lock of a document, `url` as in `/locks/workitem/42`, and asks for the lock unless
   * `acquire` is false. With `wait`, waits for the lock if there is another holder.
   */
  static open(url, options) { return new DocLock(url, options); }

  /**
   * The state of a document, from one request:
   * {state, mode, holder, since, expiresAt, mayTakeOver, frozen}, or null.
   * For an array of documents: an array of their states, from one request for every 200 documents.
   */
  static async look(url) {
    if (Array.isArray(url)) {
      const found = await lookAt(url.length ? place(url[0]).base : '', url.map(it => place(it).key));
      return url.map(it => found.get(place(it).key) ?? null);
    }
    const answer = await request('GET', url);
    return answer.ok ? standing(answer) : null;
  }

  /**
   * Keeps a list of documents live: calls back with a Map from `collection/id` to what `look` returns,
   * at first for all `keys`, then for those that have changed. Returns {show(keys), look(), close()}:
   * other documents, all of them once more, and the end.
   */
  static list(base, keys, callback) { return new List(base.replace(/\/$/, ''), keys, callback); }

  /**
   * Calls back with {type, key, …} for each event of the locks of the API at `base`. At a `resync`,
   * which comes every few seconds if there is no stream, check all shown documents. At any other
   * event, check its document, because `mine` may be the view of another tab.
   * Returns a function that ends the callbacks.
   */
  static events(base, callback) { return Feed.of(base.replace(/\/$/, '')).listen(callback); }

  constructor(url, options = {}) {
    super();
    const { base, path, key } = place(url);
    Object.assign(this, { url: path, key });
    this.mode = options.mode ?? 'exclusive';
    this.#waitIdleMs = options.waitIdleMs ?? 600_000;
    for (const name of ['held', 'lost', 'free', 'change']) {
      const callback = options['on' + name];
      if (callback) this.addEventListener(name, ({ detail }) => callback(detail ?? this, this));
    }
    this.#api = DocLock.#join(base, this);
    queueMicrotask(() => {   // not before the caller knows this lock
      if (options.acquire === false) this.check();
      else if (options.wait) this.wait();
      else this.acquire();
    });
  }

  /**
   * `mine`: this page holds the lock. `mine_elsewhere`: another tab of the same person holds it.
   * `held`: another person holds it. `free`: nobody holds it. `frozen`: nobody can take it at the
   * moment; `frozen` says why, and until when. `unknown`: there is no answer yet; or
   * this page held the lock until it expired, as after a sleep, and the server has not yet confirmed it.
   */
  get state() { return this.#state === 'mine' && !this.#isInTime() ? 'unknown' : this.#state; }

  /** The token of this acquisition, or null. */
  get token() { return this.#token; }

  /** The server did not answer recently. A lock that is `mine` remains so until `expiresAt`. */
  get offline() { return this.#api.failures > 0; }

  /** Asks for the lock, also after a loss. Resolves to the state, as `takeOver` does. Never rejects. */
  acquire() { return this.#ask({}); }

  /** Takes the lock from another tab, or from another person if `mayTakeOver`. */
  takeOver() { return this.#ask({ take_over: true }); }

  /**
   * Waits until this page holds the lock, `stopWaiting` is called, or the person has not touched the
   * page for `waitIdleMs`. A hidden page does not wait: nobody would see that it holds the lock.
   */
  wait() {
    if (this.waiting || this.#closed || this.#token) return;
    this.waiting = true;
    this.#changed();
    this.#standInLine(this.#line = {});
  }

  stopWaiting() {
    if (!this.waiting) return;
    this.waiting = false;
    this.#line = null;
    this.#poll?.abort();
    this.#nudge();
    this.#changed();
  }

  /** Asks the server for the current state. */
  async check() { await (this.#token ? DocLock.#beat(this.#api) : this.#look()); }

  /** Gives the lock up, and goes on reporting its holder. */
  async release() {
    this.stopWaiting();
    if (!this.#token) return;
    const body = { token: this.#token };
    this.#end('free');
    this.#tell('free');
    this.#changed();
    await request('POST', this.url + '/release', { body });
    this.#api.feed.hint(this.key);
  }

  /** Gives the lock up, and reports nothing any more. */
  async close() {
    if (this.#closed) return;
    this.#closed = true;
    clearTimeout(this.#lookTimer);
    DocLock.#part(this.#api, this);
    await this.release();
  }

  /**
   * `fetch` with the proof that this page holds the lock. If the server refuses the request because
   * of the lock, `lost` is set when this resolves. `releases`: this request also releases the lock.
   */
  async fetch(url, init = {}, { releases = false } = {}) {
    const token = this.#token, all = new Headers(init.headers);
    // Without a token the server would check only the session, which may hold the lock in another tab.
    if (!token) throw new Error('This page does not have the lock.');
    for (const [name, value] of Object.entries(await headers())) all.set(name, value);
    all.set('Lock-Token', `<urn:uuid:${token}>`);
    this.#releasing = releases;
    let response;
    try {
      response = await fetch(url, { ...init, headers: all });
    } finally {
      this.#releasing = false;
    }
    if (token !== this.#token) return response;
    if (response.ok && releases) {
      this.#end('free');
      this.#tell('free');
      this.#changed();
    } else if (response.status === 401) {
      this.#lose('session_ended');
    } else if ([409, 412, 423].includes(response.status)) {
      const problem = await response.clone().json().catch(() => ({}));
      if (problem.state === 'lost') this.#lose();
      else await this.check();   // it may be a conflict of the application itself
    }
    return response;
  }

  // -- asking and waiting

  async #ask(body) {
    if (this.busy || this.#closed) return this.state;
    this.busy = true;
    this.problem = null;
    this.#poll?.abort();
    this.#changed();
    await this.#post(body);
    this.busy = false;
    this.#nudge();
    this.#changed();
    return this.state;
  }

  async #standInLine(line) {
    let waitMs = this.#state === 'unknown' ? 0 : WAIT_MS;   // 0: show the holder at once
    let failures = 0;
    while (this.#line === line && !this.#token) {
      if (this.busy || !visible()) {
        await this.#pause(LOOK_MS[1]);
        continue;
      }
      if (Date.now() - touched > this.#waitIdleMs) {
        this.stopWaiting();
        return this.check();
      }
      const poll = this.#poll = new AbortController(), began = Date.now();
      const answer = await this.#post({ wait_ms: waitMs }, { signal: poll.signal, timeout: waitMs + TIMEOUT_MS });
      if (this.#poll === poll) this.#poll = null;
      if (answer.aborted) continue;
      failures = isTrouble(answer) ? failures + 1 : 0;
      if (failures) await this.#pause(backOff(failures, 15_000));
      else if (!answer.ok && answer.status !== 423) return this.stopWaiting();
      // Refused without a wait: another tab of this person holds the lock, so waiting does not help.
      else if (waitMs && Date.now() - began < 1000) await this.#pause(WAIT_MS);
      waitMs = WAIT_MS;
    }
  }

  #pause(ms) {
    return new Promise(done => {
      this.#nudge = done;
      setTimeout(done, ms);
    });
  }

  async #post(body, options) {
    const turn = this.#turn;
    this.#wanted = true;
    const answer = await request('POST', this.url, { body: { mode: this.mode, ...body }, ...options });
    if (answer.aborted) return answer;
    DocLock.#noteTrouble(this.#api, answer);
    if (answer.ok && this.#closed) {   // too late
      request('POST', this.url + '/release', { body: { token: answer.body.token } });
    } else if (answer.ok) {
      this.#gain(answer);
    } else if (isTrouble(answer)) {
      if (!this.#token) this.#lookIn(backOff(this.#api.failures, 15_000));
    } else {
      this.#wanted = false;
      this.problem = answer.status === 423 ? null : answer.body;
      this.#lose(answer.status === 401 ? 'session_ended' : undefined);
      if (answer.status === 423 && turn === this.#turn) this.#saw(standing(answer));
      else this.#lookIn(0);
      this.#changed();
    }
    return answer;
  }

  // -- looking

  async #look() {
    if (this.#closed || this.#token || this.busy || !visible()) return;
    const turn = ++this.#turn, answer = await request('GET', this.url);
    DocLock.#noteTrouble(this.#api, answer);
    if (this.#closed || this.busy || turn !== this.#turn) return;
    if (answer.ok) this.#saw(standing(answer));
    else if (isTrouble(answer)) this.#lookIn(backOff(this.#api.failures, 15_000));
    else this.problem = answer.body;
    this.#changed();
  }

  #lookIn(ms) {
    clearTimeout(this.#lookTimer);
    this.#lookTimer = setTimeout(() => this.#look(), ms);
  }

  #saw({ state, mode, ...facts }) {
    if (state === 'mine') {
      // The lock belongs to this tab: its answer is under way or was lost, or it was granted before a reload.
      if (this.#poll) return this.#lookIn(1000);
      if (this.#wanted && visible()) return void this.acquire();
      state = 'free';
    }
    const before = this.#state;
    this.#state = state;
    Object.assign(this, facts, (state === 'free' || state === 'frozen') && { holder: null, since: null, expiresAt: null });
    if (state !== before) this.#nudge();
    if (state === 'free' && state !== before) this.#tell('free');
    const until = state === 'frozen' ? this.frozen.until : this.expiresAt;
    if (state !== 'free') this.#lookIn(clamp((until - Date.now()) / 3, ...LOOK_MS));
    this.#changed();
  }

  // -- holding and losing

  #isInTime() { return Date.now() < this.#until.wall && performance.now() < this.#until.steady; }

  // Counted from before the request was sent: this page gives up before the server grants the lock to others.
  #renew({ sent }, ms) {
    this.#until = { wall: sent.wall + ms, steady: sent.steady + ms };
    this.#ttl = Math.max(this.#ttl, ms);
    this.expiresAt = this.#until.wall;
  }

  #gain(answer) {
    clearTimeout(this.#lookTimer);
    const { key, token, expires_in_ms } = answer.body, { since } = standing(answer);
    Object.assign(this, { key, since, holder: null, mayTakeOver: false, frozen: null, lost: null, problem: null, waiting: false });
    this.#turn++;
    this.#wanted = false;
    this.#news = this.#line = null;
    this.#token = token;
    this.#state = 'mine';
    this.#renew(answer, expires_in_ms);
    DocLock.#schedule(this.#api);
    this.#api.feed.hint(key);
    this.#tell('held');
    this.#changed();
  }

  #end(state) {
    this.#turn++;
    this.#wanted = false;
    this.#state = state;
    this.#token = this.#until = this.since = this.expiresAt = null;
  }

  #lose(kind) {
    if (!this.#token) return;
    kind ??= this.#isInTime() ? 'unknown' : 'expired';
    this.#end('unknown');
    this.lost = { kind, by: null, reason: null, at: new Date() };
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

  #hear(event) {
    if (event.state === 'free' && (this.#token || this.lost) && !this.#releasing) {
      this.#news = { ...event, at: Date.now() };
      this.#explain();
    }
    this.check();
  }

  #tell(name, detail) { if (!this.#closed) this.dispatchEvent(new CustomEvent(name, { detail })); }
  #changed() { this.#tell('change'); }

  // -- keeping: the locks of one API share the heartbeat and the feed

  static #join(base, lock) {
    let api = DocLock.#apis.get(base);
    if (!api) {
      api = { base, feed: Feed.of(base), locks: new Set(), timer: 0, beat: null, failures: 0, deafen: null };
      DocLock.#apis.set(base, api);
    }
    api.locks.add(lock);
    api.deafen ??= api.feed.listen(event => {
      for (const lock of api.locks) if (!event.key || event.key === lock.key) lock.#hear(event);
    });
    return api;
  }

  static #part(api, lock) {
    api.locks.delete(lock);
    if (api.locks.size) return;
    api.deafen();
    api.deafen = null;
  }

  static #schedule(api) {
    clearTimeout(api.timer);
    const ttls = [...api.locks].filter(lock => lock.#token).map(lock => lock.#ttl);
    if (!ttls.length) return;
    const ttl = Math.min(...ttls);
    // The server renews once in a third of the ttl: a slightly later heartbeat always renews.
    const ms = api.failures ? backOff(api.failures, clamp(ttl / 6, 500, 15_000)) : ttl / 3 + 250;
    api.timer = setTimeout(() => DocLock.#beat(api), ms);
  }

  static #beat(api) {
    return api.beat ??= DocLock.#sendBeat(api).finally(() => {
      api.beat = null;
      DocLock.#schedule(api);
    });
  }

  static async #sendBeat(api) {
    const believed = [...api.locks].filter(lock => lock.#token).map(lock => ({ lock, token: lock.#token, turn: lock.#turn }));
    if (!believed.length) return;
    const locks = Object.fromEntries(believed.map(({ lock, token }) => [lock.key, token]));
    const answer = await request('POST', api.base + '/heartbeat', { body: { locks } });
    DocLock.#noteTrouble(api, answer);
    if (!answer.ok && answer.status !== 401) return;
    const held = new Map((answer.body.held ?? []).map(one => [one.token, one]));
    for (const { lock, token, turn } of believed) {
      if (lock.#turn !== turn || lock.busy) continue;   // something newer decides
      if (held.has(token)) {
        lock.#renew(answer, held.get(token).expires_in_ms);
        lock.#changed();
      } else if (!lock.#releasing) {
        lock.#lose(answer.ok ? undefined : 'session_ended');
      }
    }
  }

  static #noteTrouble(api, answer) {
    const wasOffline = api.failures > 0;
    api.failures = isTrouble(answer) ? api.failures + 1 : 0;
    if (wasOffline !== api.failures > 0) for (const lock of api.locks) lock.#changed();
  }

  // -- the life of the page

  static #each(task) {
    for (const api of DocLock.#apis.values()) for (const lock of api.locks) task(lock);
  }

  static #wake() {
    DocLock.#each(lock => {
      lock.#nudge();
      lock.#changed();
      lock.check();
    });
  }

  static {
    addEventListener('online', DocLock.#wake);
    document.addEventListener('resume', DocLock.#wake);
    document.addEventListener('visibilitychange', () => {
      if (visible()) DocLock.#wake();
      else DocLock.#each(lock => lock.#poll?.abort());
    });
    // Not earlier: a person may still be working on a hidden tab.
    addEventListener('pagehide', () => DocLock.#each(lock => {
      const body = JSON.stringify({ token: lock.#token, page, grace_ms: GRACE_MS });
      if (!lock.#token) return;
      if (extra) fetch(lock.url + '/release', { method: 'POST', body, headers: DocLock.#last, keepalive: true });
      else navigator.sendBeacon(lock.url + '/release', body);   // sends no headers
    }));
    addEventListener('pageshow', event => {   // the page is back, but its beacon was sent
      if (event.persisted) DocLock.#each(lock => lock.#token ? lock.acquire() : lock.check());
    });
    everySecond.add(overslept => {
      if (overslept) DocLock.#wake();
      DocLock.#each(lock => {
        if (lock.#state !== 'mine' || lock.#isInTime()) return;
        lock.#changed();
        if (!lock.offline) lock.check();
      });
    });
  }
}
