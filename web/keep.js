// Keeps what a person types until it is saved: in the IndexedDB of this browser, by person and document, each field with the value
// on which it was typed. `lock.keep` of client.js loads this file; its types are in client.d.ts.

import { Typed, channelOf, clearedKept, isPost, own, same } from './client.js';

const DATABASE = 'doclock-kept', STORE = 'texts';
const WITHIN_MS = 500;            // of a key, the text is written, however long a person goes on to type
const KEPT_MS = 30 * 86_400_000;  // browsers may forget sooner
const MOST = 50;                  // texts of a browser; the oldest goes
const LONGEST = 1_000_000;        // bytes of the typed values of one text
const LIMIT_MS = 5_000;           // a database that does not answer in this time will not do so later

// ---- the database: a text for each page in which something was typed ------------------------

const done = request => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

function inTime(work, otherwise = () => {}) {
  let timer;
  const late = new Promise((_, reject) => {
    timer = setTimeout(() => {
      otherwise();
      reject(new DOMException('the database does not answer', 'InvalidStateError'));
    }, LIMIT_MS);
  });
  return Promise.race([work, late]).finally(() => clearTimeout(timer));
}

function open() {
  return inTime(new Promise((resolve, reject) => {
    const request = indexedDB.open(DATABASE, 2);   // throws where storage is forbidden
    request.onupgradeneeded = ({ oldVersion }) => {
      if (oldVersion) request.result.deleteObjectStore(STORE);   // it does not say what a person has typed
      request.result.createObjectStore(STORE, { keyPath: ['person', 'url', 'id'] });
    };
    request.onblocked = () => reject(new DOMException('a tab of an older release has the database open', 'InvalidStateError'));
    request.onerror = () => reject(request.error);
    request.onsuccess = () => resolve(request.result);
  }));
}

let opened = null;
async function database() {
  try {
    const database = await (opened ??= open()), forget = () => { opened = null; };
    database.onclose = forget;
    database.onversionchange = () => { database.close(); forget(); };   // a tab of a later release needs it
    return database;
  } catch (error) {
    opened = null;
    throw error;
  }
}

/** Runs `work` in a transaction of its own. Resolves when the browser has committed it. `isAll`: `work` does nothing after its answers. */
async function within(mode, work, isAll = true) {
  const transaction = (await database()).transaction(STORE, mode);
  const ended = new Promise((resolve, reject) => {
    transaction.oncomplete = resolve;
    transaction.onabort = () => reject(transaction.error);
  });
  const result = work(transaction.objectStore(STORE));
  if (isAll) transaction.commit();   // a page that is being left does not wait for the answers
  const [value] = await inTime(Promise.all([result, ended]), () => { try { transaction.abort(); } catch { /* it has begun to end */ } });
  return value;
}

const keyOf = ({ person, url, id }) => [person, url, id];
const from = (...key) => IDBKeyRange.bound(key, [...key, []]);
const put = text => within('readwrite', store => { store.put(text); });
const remove = text => within('readwrite', store => { store.delete(keyOf(text)); });
// Another tab may have removed the text: it does not come back. And records of a page that has written more meanwhile are its own.
const change = (text, how) => within('readwrite', store => {
  store.get(keyOf(text)).onsuccess = ({ target: { result } }) => {
    if (!result || how.records && result.at !== text.at) return;
    how.records?.length === 0 ? store.delete(keyOf(text)) : store.put({ ...result, ...how });
  };
}, false);
const textsOf = (person, url) => within('readonly', store => done(store.getAll(from(person, url))));

/** Forgets what is old, and the oldest if there are too many. */
async function clean(now) {
  const all = (await within('readonly', store => done(store.getAll()))).sort((a, b) => b.at - a.at);
  const old = all.filter(({ at }, n) => n >= MOST || now - at > KEPT_MS);
  if (old.length) await within('readwrite', store => { for (const it of old) store.delete(keyOf(it)); });
}

/**
 * The text without its stored records; `null` if nothing is left for this page. The server knows that something was saved under the lock,
 * and not what: a field that is as it was before was not, and no later save changes that. Where nothing can be compared, the whole form
 * must have been sent, or its fields show the text.
 */
async function unsaved(text, wasSaved, typed = null) {
  const { sent } = text;
  if (!text.records.some(it => it.isSent) || !await wasSaved(sent)) return text;
  const isRefused = it => it.isSent && typed?.hasBase(it) === true;
  // A request of a script names the fields that it saves, and another address may have a handler of its own.
  const isSure = it => sent.isWhole || !sent.isElsewhere && typed?.hasBase(it) === false;
  const records = text.records.filter(it => !it.isSent || isRefused(it) || !isSure(it) && !typed?.isStored(it));
  const left = { records, sent: records.some(isRefused) ? { ...sent, token: null } : sent };
  await change(text, left);
  return records.some(it => !it.isSent || typed?.knows(it) !== false) ? { ...text, ...left } : null;
}

export async function settle(person, url, wasSaved) {
  if (person) for (const text of await textsOf(person, url)) await unsaved(text, wasSaved);
}

const PROBLEMS = { QuotaExceededError: 'full', DataError: 'too_large' };

// ---- editors that are no form, which tell of each change -------------------------------------

class Told extends Typed {
  #source; #before;

  constructor(source) {
    super();
    this.#source = source;
    this.notes();
  }

  #read() { return JSON.parse(JSON.stringify(this.#source.read())); }
  /** The editor shows stored values. Of the values that were just saved, `saved` is stored: words that were typed since may be told later. */
  notes(saved = []) { this.#before = { ...this.#read(), ...Object.fromEntries(saved) }; }
  read() {}
  close() {}

  hear() {
    let isChanged = false;
    for (const [name, value] of Object.entries(this.#read())) {
      const known = this.records.get(name), base = known ? known.base : Object.hasOwn(this.#before, name) ? this.#before[name] : undefined;
      if (same(known ? known.value : base, value)) continue;
      isChanged = true;
      same(value, base) ? this.records.delete(name) : this.records.set(name, { name, base, value });
    }
    if (isChanged) this.changed();
  }

  stored({ name }) { return this.records.get(name)?.base ?? this.#read()[name]; }
  shows({ name, value }) { return same(this.#read()[name], value); }
  hasBase(record) { return same(this.stored(record), record.base); }
  isStored(record) { return same(this.stored(record), record.value); }
  knows() { return true; }
  isFilled() { return false; }
  isBlank() { return false; }
  adopt(records) { for (const it of records) if (!this.records.has(it.name)) this.records.set(it.name, { ...it, isSent: false }); }

  put(records) {
    const before = new Map(this.records);
    for (const it of records) {
      const base = this.stored(it);
      same(base, it.value) ? this.records.delete(it.name) : this.records.set(it.name, { ...it, base, isSent: false });
    }
    const left = this.#source.write(this.show(records)) ?? {};
    for (const name of Object.keys(left)) before.has(name) ? this.records.set(name, before.get(name)) : this.records.delete(name);
    this.changed();
    return records.filter(it => Object.hasOwn(left, it.name));
  }

  label({ name }) { return name; }
  plain(_, value) { return value && typeof value === 'object' ? JSON.stringify(value) : String(value ?? ''); }
  show(records) { return Object.fromEntries(records.map(({ name, value }) => [name, value])); }
}

// ---- keeping --------------------------------------------------------------------------------

const keepers = new Set();   // also closed ones, until they have written
const forget = person => { for (const keeper of [...keepers]) keeper.forgets(person); };

let others = null;   // the other tabs: a person may clear the texts in one of them
function listen() {
  if (others || !keepers.size) return;
  others = channelOf('doclock-kept');
  others.onmessage = ({ data }) => forget(data);
}
if (globalThis.document) {
  addEventListener('pagehide', () => {
    others?.close();
    others = null;
  });
  addEventListener('pageshow', listen);
}

class Keeper {
  problem = null;
  #lock; #page; #typed; #options; #version; #timer = null;
  #id = crypto.getRandomValues(new Uint32Array(4)).join('-');
  #own = null;          // the text as it is to be kept; `null`: there is none
  #sent = null;         // how the marked records were sent: the token, the version, and whether by the form itself
  #values = null;       // what the form itself has sent last
  #asides = 0;          // texts of this page that have given way to others
  #isDue = false; #reading = null; #isForgotten = false;
  #offers = new Map();  // by text
  #ends = new AbortController();
  #release = () => {};
  #hears = () => this.#due();

  constructor(lock, page, source, options) {
    const { signal } = this.#ends, flush = () => this.flush(), sent = new Map();
    [this.#lock, this.#page, this.#options, this.#version] = [lock, page, options, lock.version];
    const typed = this.#typed = source instanceof Typed ? source : new Told(source), { form } = typed;
    typed.hears.add(this.#hears);
    if (form) {
      const root = own(form, 'getRootNode')();
      // Before the page reads the form.
      root.addEventListener('submit', ({ target }) => { if (target === form) typed.read(); }, { signal, capture: true });
      root.addEventListener('submit', event => {
        const { submitter } = event;
        if (event.target !== form || event.defaultPrevented || !isPost(form, submitter)) return;
        // A button with a name or an address of its own may have a handler that stores only a part.
        const isElsewhere = Boolean(submitter?.hasAttribute('formaction')), isWhole = !submitter?.name && !isElsewhere;
        this.#sends({ isForm: true, isWhole, isElsewhere }, true, this.#values = typed.values);
        this.flush();
      }, { signal });
    }
    addEventListener('pagehide', () => {
      this.flush();
      this.#release();   // a page with a Web Lock does not go into the back/forward cache
    }, { signal });
    addEventListener('pageshow', ({ persisted }) => persisted && this.#comesBack(), { signal });
    document.addEventListener('visibilitychange', flush, { signal });
    lock.addEventListener('writing', ({ detail }) => {
      typed.read();
      sent.set(detail, typed.values);
    }, { signal });
    lock.addEventListener('sending', ({ detail }) => sent.has(detail) && this.#sends({}, detail.saves, sent.get(detail)), { signal });
    lock.addEventListener('written', ({ detail: { request, saves } }) => {
      if (saves !== null) this.#sends(null);
      this.#version = lock.version;
      if (saves && sent.has(request)) typed.saved(sent.get(request), saves);
      sent.delete(request);
    }, { signal });
    lock.addEventListener('loaded', () => {
      if (!form && lock.version !== this.#version) this.#loads();
      this.#version = lock.version;
    }, { signal });
    lock.addEventListener('change', () => this.#look(), { signal });
    this.#hold();
    keepers.add(this);
    listen();
    if (typed.records.size) this.#due();
    this.#look();
  }

  // As long as this page lives, other tabs do not offer its text.
  #hold() {
    const { signal } = this.#ends;
    navigator.locks?.request('doclock-kept:' + this.#id, { signal }, () => new Promise(release => {
      if (signal.aborted) release();
      else this.#release = release;
    })).catch(() => {});
  }

  async #comesBack() {
    this.#hold();
    const sent = this.#sent, values = this.#values, own = this.#own, records = own?.records.filter(it => it.isSent) ?? [];
    if (!sent?.isForm || !await this.#page.wasSaved(sent) || await this.isRefused() || this.#ends.signal.aborted) return;
    if (records.length && !sent.isWhole && this.#page.person) this.#putAside({ ...own, records });   // the next visit can compare
    this.#typed.saved(values);
  }

  /** True if a later page has found that the text of this page was sent, and is not stored. */
  async isRefused() {
    const texts = this.#page.person ? await textsOf(this.#page.person, this.#lock.url).catch(() => []) : [], { sent } = texts.find(it => it.id === this.#id) ?? {};
    if (!sent || sent.token) return false;
    this.#sent = sent;
    return true;
  }

  /** An editor without a form shows the text of another version: nobody has typed it here. */
  #loads() {
    const { records } = this.#typed, gone = [...records.values()].filter(it => !this.#typed.shows(it));
    if (gone.length) this.#setAside();
    for (const { name } of gone) records.delete(name);
    this.#typed.notes();
    if (gone.length) this.#due();
  }

  #due() {
    if (this.#ends.signal.aborted) return;
    this.#isDue = true;
    this.#timer ??= setTimeout(() => this.flush(), WITHIN_MS);
  }

  /**
   * Marks the records with these values as sent; without `how`, an answer has come, and none is. The server knows only that something
   * was saved under the lock, so what was sent before, or is offered, does not count as saved any more.
   */
  #sends(how, names = false, values = null) {
    const { token, version } = this.#lock, { records } = this.#typed;
    this.#sent = how && { token, version, ...how };
    for (const [id, it] of records) it.isSent = Boolean(names) && (names === true || names.includes(it.name)) && same(values.get(id), it.value);
    for (const text of how ? this.#offers.keys() : []) {
      if (!text.sent?.token) continue;
      text.sent = { ...text.sent, token: null };
      change(text, { sent: text.sent }).catch(error => this.#report(error));
    }
    if (records.size) this.#due();
  }

  /** The page tells of an editor of its own. */
  changed() { this.#typed.hear?.({}); }
  async saved() {
    return this.#all(() => {
      this.#typed.saved(this.#typed.values);
      this.#typed.notes();
    });
  }

  async discard() { return this.#all(() => this.#typed.discard()); }

  async #all(change) {
    if (this.#ends.signal.aborted) return;
    this.#typed.read();
    change();
    return this.flush();
  }

  async flush() {
    if (!this.#ends.signal.aborted) this.#take();
    if (this.#isDue) await this.#write();
  }

  close() {
    if (this.#ends.signal.aborted) return;
    this.#take();
    this.#stop();
    this.flush().finally(() => keepers.delete(this));
  }

  forgets(person) {
    if (this.#page.person !== person && person) return;
    this.#isForgotten = true;
    // A write of this page may have come after the one that has cleared the texts.
    const texts = [{ person: this.#page.person, url: this.#lock.url, id: this.#id }, ...this.#offers.keys()];
    for (const text of texts) if (text.person) remove(text).catch(() => {});
    for (const offer of this.#offers.values()) offer.isGone = true;
    this.#offers.clear();
    keepers.delete(this);
    this.#stop();
    this.#lock.dispatchEvent(new CustomEvent('forgotten'));
  }

  #stop() {
    clearTimeout(this.#timer);
    this.#typed.hears.delete(this.#hears);
    this.#typed.close();
    this.#ends.abort();
    this.#release();
  }

  /** The typed text as it is now. */
  #take() {
    clearTimeout(this.#timer);
    this.#timer = null;
    if (!this.#isDue) return;
    const records = [...this.#typed.records.values()].map(it => ({ ...it })), { version } = this.#lock;
    this.#own = records.length ? { version, at: Date.now() - this.#page.ahead, records, sent: this.#sent } : null;
  }

  // At once: a page that is left waits for nothing, and the database itself keeps the order.
  async #write() {
    if (!this.#page.person) return this.#reading;   // and then
    const own = this.#own, record = { person: this.#page.person, url: this.#lock.url, id: this.#id, ...own };
    this.#isDue = false;
    try {
      const typed = own?.records.map(it => JSON.stringify(it.value)) ?? [];
      if (new Blob(typed).size > LONGEST) throw new DOMException('the text is longer than 1 MB', 'DataError');
      await within('readwrite', store => {
        if (!this.#isForgotten) own ? store.put(record) : store.delete(keyOf(record));
      });
      this.#tell(null);
      return true;
    } catch (error) {
      this.#isDue = true;
      this.#report(error);
    }
  }

  #report(error) { this.#tell(PROBLEMS[error?.name] ?? 'unavailable', error); }

  #tell(problem, error) {
    if (problem === this.problem) return;
    this.problem = problem;
    if (problem) this.#options.onproblem?.(problem, error);
    this.#lock.dispatchEvent(new CustomEvent('change'));
  }

  // Not before the server has named the person: the text is theirs, and nobody else may see it.
  #look() {
    if (this.#page.person) this.#reading ??= this.#readKept();
    else if (this.#lock.token) this.#tell('nobody', new DOMException('nobody is logged in for whom the text could be kept', 'NotAllowedError'));
  }

  async #readKept() {
    try {
      const texts = await textsOf(this.#page.person, this.#lock.url), old = Date.now() - this.#page.ahead - KEPT_MS;
      const held = (await navigator.locks?.query())?.held.map(({ name }) => name) ?? [];
      for (const text of texts) {
        const isOpen = text.id.startsWith(this.#id) || held.includes('doclock-kept:' + text.id);   // here, or in another tab
        const isOffered = [...this.#offers.keys()].some(it => it.id === text.id);
        if (!isOpen && !isOffered && text.at > old && !this.#isForgotten) await this.#meet(text);
      }
      clean(old + KEPT_MS).catch(() => {});
    } catch (error) {
      this.#report(error);
      this.#reading = null;   // the next change of the lock reads again
    }
    if (this.#isDue) {
      this.#take();
      this.#write();
    }
  }

  /** A text of an earlier page is stored, is shown by this page as it was typed, or is offered. */
  async #meet(text) {
    const typed = this.#typed, { isUnsaved } = this.#options, { version } = this.#lock;
    if (!isUnsaved) text = await unsaved(text, sent => this.#page.wasSaved(sent), typed);
    if (!text || this.#ends.signal.aborted) return;
    const { records } = text, isShown = records.every(it => typed.shows(it)), filled = records.filter(it => typed.isFilled(it));
    if (isShown && (isUnsaved || (version ? text.version === version : filled.length))) {
      typed.adopt(records);
      this.#isDue = true;
      this.#take();
      if (await this.#write()) await remove(text);
      return;
    }
    if (isShown && !filled.length) return records.some(it => typed.isBlank(it)) || remove(text);
    if (isShown) for (const it of filled) typed.putBack(it);   // over another version, it would be saved unseen
    this.#options.onkept?.(this.#offer(text));
  }

  #offer(text) {
    const { version, records, sent } = text, lock = this.#lock, typed = this.#typed, keeper = this;
    let open = records;   // which have no place in this page, or were not put back
    const offer = {
      at: new Date(text.at + this.#page.ahead), version, fields: typed.show(records), submitted: Boolean(sent?.isForm && records.some(it => it.isSent)),
      get isCurrent() { return Boolean(version) && version === lock.version; },
      get differences() {
        if (offer.isGone) return [];
        const differ = open.map(it => ({ it, now: typed.stored(it) })).filter(({ it, now }) => !same(it.value, now));
        return differ.map(({ it, now }) => ({ name: it.name, label: typed.label(it), kept: typed.plain(it, it.value), now: now === undefined || now === null ? '' : typed.plain(it, now) }));
      },
      restore() {
        if (offer.isGone) return {};
        if (typed.records.size) keeper.#setAside();
        const isKept = !keeper.#ends.signal.aborted, left = open = typed.put(records);
        keeper.flush().then(() => isKept && !left.length && !keeper.problem && keeper.#forget(text));
        return typed.show(left);
      },
      discard: () => this.#forget(text),
    };
    this.#offers.set(text, offer);
    return offer;
  }

  #forget(text) {
    this.#offers.delete(text);
    return remove(text).catch(error => this.#report(error));
  }

  /** The text of this page gives way to another one, and is offered beside it. */
  #setAside() {
    this.#isDue = true;
    this.#take();
    this.#options.onkept?.(this.#offer(this.#putAside({ ...this.#own, version: this.#version })));
  }

  #putAside(own) {
    const text = { ...own, person: this.#page.person, url: this.#lock.url, id: `${this.#id}-${++this.#asides}` };
    put(text).catch(error => this.#report(error));
    return text;
  }
}

export const keep = (...all) => new Keeper(...all);

/** Forgets all texts of this person in this browser, after asking; of everybody, if it is not known who that is. */
export async function clear(person, ask = count => confirm(`Delete ${count} unsaved texts from this browser?`)) {
  const range = person ? from(person) : null;
  const count = await within('readonly', store => done(store.count(range)));
  if (count && !await ask(count)) return false;
  forget(person);
  channelOf('doclock-kept').postMessage(person);
  clearedKept(crypto.getRandomValues(new Uint32Array(4)).join('-'));
  await within('readwrite', store => { range ? store.delete(range) : store.clear(); });
  return true;
}
