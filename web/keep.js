// Keeps the text that a person types until it is saved: in the IndexedDB of this browser, by person and document, with
// the text and the version of the document on which it was typed. `lock.keep` of client.js loads this file; its types are in
// client.d.ts.

const DATABASE = 'doclock-kept', STORE = 'texts';
const PAUSE_MS = 400;             // without a key, before the text is written
const KEPT_MS = 30 * 86_400_000;  // browsers may forget sooner
const MOST = 50;                  // texts of a browser; the oldest goes
const LONGEST = 1_000_000;        // bytes of one text
const LIMIT_MS = 5_000;           // a database that does not answer in this time will not do so later

// ---- the database: a record for each page with a text ---------------------------------------

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
    const request = indexedDB.open(DATABASE, 1);   // throws where storage is forbidden
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: ['person', 'url', 'id'] });
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

/** Runs `work` in a transaction of its own. Resolves when the browser has committed it. */
async function within(mode, work) {
  const transaction = (await database()).transaction(STORE, mode);
  const ended = new Promise((resolve, reject) => {
    transaction.oncomplete = resolve;
    transaction.onabort = () => reject(transaction.error);
  });
  const result = work(transaction.objectStore(STORE));
  transaction.commit();   // a page that is being left does not wait for the answers
  const [value] = await inTime(Promise.all([result, ended]), () => { try { transaction.abort(); } catch { /* it has begun to end */ } });
  return value;
}

const keyOf = ({ person, url, id }) => [person, url, id];
const from = (...key) => IDBKeyRange.bound(key, [...key, []]);

/** Forgets what is old, and the oldest if there are too many. */
async function clean() {
  const all = (await within('readonly', store => done(store.getAll()))).sort((a, b) => b.at - a.at);
  const old = all.filter(({ at }, n) => n >= MOST || Date.now() - at > KEPT_MS);
  if (old.length) await within('readwrite', store => { for (const it of old) store.delete(keyOf(it)); });
}

const PROBLEMS = { QuotaExceededError: 'full', DataError: 'too_large' };

// ---- a form as a value ----------------------------------------------------------------------

const NEVER = ['password', 'file', 'hidden', 'submit', 'button', 'image', 'reset', 'fieldset', 'output'];
const isTick = field => field.type === 'checkbox' || field.type === 'radio';
// A field may have the name `elements`.
const elementsOf = form => Reflect.get(HTMLFormElement.prototype, 'elements', form);
const secrets = new WeakSet();   // fields that have been passwords: a button may show them

function isSecret(field) {
  if (field.type === 'password') secrets.add(field);
  return secrets.has(field) || /password|one-time-code|\bcc-/.test(field.getAttribute('autocomplete') ?? '');
}

/** The fields of a form that are kept, by name; several fields may have one name. */
function fieldsOf(form) {
  const found = new Map();
  for (const field of elementsOf(form)) {
    const name = field.name || field.id;
    if (isSecret(field) || !name || !('value' in field) || NEVER.includes(field.type) || field.closest('[data-doclock-keep=no]')) continue;
    if (!found.has(name)) found.set(name, []);
    found.get(name).push(field);
  }
  return found;
}

function valueOf(field) {
  if (isTick(field)) return { value: field.value, on: field.checked };
  if (field.type === 'select-multiple') return [...field.selectedOptions].map(option => option.value);
  return field.value;
}

/** The value with which the page was delivered. */
function defaultOf(field) {
  if (isTick(field)) return { value: field.value, on: field.defaultChecked };
  if (field.options) {
    const chosen = [...field.options].filter(option => option.defaultSelected).map(option => option.value);
    return field.type === 'select-multiple' ? chosen : chosen.at(-1) ?? field.value;
  }
  if (field.matches('textarea') || !field.defaultValue) return field.defaultValue || (/range|color/.test(field.type) ? field.value : '');
  return Object.assign(document.createElement('input'), { type: field.type, value: field.defaultValue }).value;   // as the browser reads it
}

const hasDefault = field => field.defaultValue || field.defaultChecked || [...field.options ?? []].some(it => it.defaultSelected);

/** As the browser does when a person types: React hears of no value that a script writes by the property of the field itself. */
const puts = (field, name, value) => Reflect.set(Object.getPrototypeOf(field), name, value, field);

/** Sets the field, if the value has a place there: the page may have changed since. */
function sets(field, value) {
  if (isTick(field)) {
    if (value?.value !== field.value) return false;
    if (field.checked === Boolean(value.on)) return true;
    puts(field, 'checked', Boolean(value.on));
    if (field.type === 'radio' && !value.on) return true;   // another one of its group is chosen
    field.dispatchEvent(new Event('click', { bubbles: true }));   // changes nothing, and is what React hears
  } else if (field.type === 'select-multiple') {
    if (!Array.isArray(value)) return false;
    for (const option of field.options) option.selected = value.includes(option.value);
  } else {
    if (typeof value !== 'string') return false;
    const before = field.value;
    puts(field, 'value', value);
    if (lines(field.value) !== lines(value)) {   // such as a date in a field that is a number by now
      puts(field, 'value', before);
      return false;
    }
  }
  for (const event of ['input', 'change']) field.dispatchEvent(new Event(event, { bubbles: true }));
  return true;
}

const lines = text => text.replace(/\r\n?/g, '\n');
const all = (form, value) => Object.fromEntries([...fieldsOf(form)].map(([name, fields]) => [name, fields.map(value)]));

const ofForm = form => ({
  form,
  read: () => all(form, valueOf),
  // The browser may have put the text of an earlier visit into the fields, before any script runs. If the page was delivered
  // with blank fields, a script has filled them; unless the person has typed into them since.
  stored(isTyped) {
    if ([...fieldsOf(form).values()].flat().some(hasDefault)) return all(form, defaultOf);
    return isTyped ? {} : this.read();
  },
  write(values) {
    const fields = fieldsOf(form), left = Object.create(null);
    for (const [name, kept] of Object.entries(values)) {
      const places = [...fields.get(name) ?? []];
      for (const value of kept) {
        const at = places.findIndex(field => sets(field, value));
        if (at >= 0) places.splice(at, 1);
        else (left[name] ??= []).push(value);
      }
    }
    return { ...left };
  },
});

// ---- comparing ------------------------------------------------------------------------------

const plain = value => {
  if (Array.isArray(value)) return value.map(plain).join('\n');
  if (value && typeof value === 'object' && 'on' in value) return value.on ? value.value : '';
  return typeof value === 'object' ? JSON.stringify(value) : String(value ?? '');
};
const at = (fields, name) => Object.hasOwn(fields, name) ? fields[name] : undefined;
const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);
const typedIn = ({ fields, base }) => Object.keys(fields).filter(name => !same(fields[name], at(base, name)));

// ---- keeping --------------------------------------------------------------------------------

const keepers = new Set();
const forget = person => { for (const keeper of [...keepers]) keeper.forgets(person); };

let others = null;   // the other tabs: a person may clear the texts in one of them
function listen() {
  if (others || !keepers.size) return;
  others = new BroadcastChannel('doclock-kept');
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
  #lock; #page; #source; #options; #timer;
  #id = crypto.getRandomValues(new Uint32Array(4)).join('-');
  #stored;              // the text that is stored, as far as this page knows
  #own = null;          // the typed text as it is to be kept; `null`: there is none
  #isTyped = false;     // something may have been typed since the last write
  #reading = null; #writing = null; #isDue = false; #isTold = false;
  #sent = new Map();    // what the page showed when each save was sent
  #ends = new AbortController();
  #release = () => {};

  constructor(lock, page, source, options, isTyped) {
    const { signal } = this.#ends, flush = () => this.flush();
    [this.#lock, this.#page, this.#options] = [lock, page, options];
    this.#source = source.read ? source : ofForm(source);
    const { form } = this.#source;
    this.#stored = options.isUnsaved || isTyped && !form ? {} : this.#source.stored?.(isTyped) ?? this.#read();
    this.#isTyped = Boolean(options.isUnsaved) || isTyped || !same(this.#stored, this.#read());
    if (form) {
      // Fields may stand outside of their form.
      const hears = ({ target }) => { if (target.form === form || form.contains(target)) this.changed(); };
      for (const event of ['input', 'change', 'reset']) form.getRootNode().addEventListener(event, hears, { signal });
      form.ownerDocument.addEventListener('submit', event => {
        if (event.target !== form || event.defaultPrevented) return;
        this.#take(true);
        this.#write();
      }, { signal });
    }
    addEventListener('pagehide', () => {
      this.flush();
      this.#release();   // a page with a Web Lock does not go into the back/forward cache
    }, { signal });
    addEventListener('pageshow', ({ persisted }) => persisted && this.#hold(), { signal });
    document.addEventListener('visibilitychange', flush, { signal });
    lock.addEventListener('writing', ({ detail }) => this.#sent.set(detail, this.#read()), { signal });
    lock.addEventListener('written', ({ detail }) => {
      const shown = this.#sent.get(detail.request);
      this.#sent.delete(detail.request);
      if (detail.isSaved && shown) this.#isNow(shown);
    }, { signal });
    lock.addEventListener('change', () => this.#look(), { signal });
    this.#hold();
    keepers.add(this);
    listen();
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

  changed() {
    this.#isTyped = true;
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.flush(), PAUSE_MS);
  }

  saved() { return this.#isNow(this.#read()); }

  discard() {
    this.#isTyped = false;
    this.#own = null;
    this.#isDue = true;
    clearTimeout(this.#timer);
    return this.#write();
  }

  async flush() {
    if (this.#isTyped) this.#take();
    if (this.#isDue) await this.#write();
  }

  close() {
    this.flush();
    this.#stop();
  }

  forgets(person) {
    if (this.#page.person !== person && person) return;
    clearTimeout(this.#timer);
    this.#stop();
  }

  #stop() {
    keepers.delete(this);
    this.#ends.abort();
    this.#release();
  }

  #read() { return JSON.parse(JSON.stringify(this.#source.read())); }

  #isNow(stored) {
    this.#stored = stored;
    this.#take();
    return this.#write();
  }

  /** Takes the text as it is in the page now. */
  #take(submitted = false, fields = this.#read()) {
    clearTimeout(this.#timer);
    this.#isTyped = false;
    const { version } = this.#lock, base = this.#stored;
    this.#own = same(fields, base) ? null : { version, at: Date.now(), base, fields, submitted };
    this.#isDue = true;
  }

  // One write at a time, and then one more if something has come meanwhile.
  #write() {
    if (!this.#page.person) return this.#reading;   // and then
    return this.#writing ??= this.#writeAll().finally(() => { this.#writing = null; });
  }

  async #writeAll() {
    try {
      do {
        this.#isDue = false;
        const record = { person: this.#page.person, url: this.#lock.url, id: this.#id, ...this.#own };
        if (new Blob([JSON.stringify(this.#own)]).size > LONGEST) throw new DOMException('the text is longer than 1 MB', 'DataError');
        await within('readwrite', store => { this.#own ? store.put(record) : store.delete(keyOf(record)); });
      } while (this.#isDue);
      return true;
    } catch (error) {
      this.#report(error);
    }
  }

  #report(error) { this.#options.onproblem?.(PROBLEMS[error?.name] ?? 'unavailable', error); }

  // Not before the server has named the person: the text is theirs, and nobody else may see it.
  #look() {
    if (this.#page.person) this.#reading ??= this.#readKept();
    else if (this.#lock.token && !this.#isTold) {
      this.#isTold = true;
      this.#options.onproblem?.('nobody', new DOMException('nobody is logged in for whom the text could be kept', 'NotAllowedError'));
    }
  }

  async #readKept() {
    try {
      const range = from(this.#page.person, this.#lock.url);
      const texts = await within('readonly', store => done(store.getAll(range)));
      const held = (await navigator.locks?.query())?.held.map(({ name }) => name) ?? [];
      const now = this.#read(), adopted = [];
      for (const text of texts) {
        const names = typedIn(text), isShown = names.every(name => same(text.fields[name], at(now, name)));
        const isStored = names.every(name => same(text.fields[name], at(this.#stored, name)));
        const isOpen = text.id === this.#id || held.includes('doclock-kept:' + text.id);   // here, or in another tab
        if (isOpen || Date.now() - text.at > KEPT_MS) continue;
        if (isStored && (!text.version || text.version !== this.#lock.version)) this.#forget(text);   // by a form of the browser
        else if (isShown) adopted.push(text);
        else this.#options.onkept?.(this.#offer(text));
      }
      for (const text of adopted) this.#adopt(text);
      this.#replace(adopted);
      clean().catch(() => {});
    } catch (error) {
      this.#report(error);
    }
    this.#replace([]);
  }

  // The browser has restored it, or the server has refused it: a save under another version than the one on which it was
  // typed would overwrite another person's text.
  #adopt({ version, base }) {
    [this.#isTyped, this.#stored] = [true, base];
    // A page that shows an unsaved text says itself which version it shows.
    if (version && !(this.#options.isUnsaved && this.#lock.version)) this.#lock.version = version;
  }

  /** Writes the text of this page, and forgets these then. */
  async #replace(texts) {
    if (this.#isTyped) this.#take();
    if (this.#isDue && await this.#write()) for (const text of texts) this.#forget(text);
  }

  #forget(text) {
    return within('readwrite', store => { store.delete(keyOf(text)); }).catch(error => this.#report(error));
  }

  #offer(text) {
    const { version, fields, submitted } = text, lock = this.#lock, stored = () => this.#stored;
    return {
      at: new Date(text.at), version, fields, submitted: Boolean(submitted),
      get isCurrent() { return Boolean(version) && version === lock.version; },
      get differences() {
        const names = typedIn(text).map(name => ({ name, kept: plain(fields[name]), now: plain(at(stored(), name)) }));
        return names.filter(({ kept, now }) => kept !== now);
      },
      restore: () => {
        if (this.#isTyped) this.#take();
        if (this.#own) this.#setAside();
        const typed = Object.fromEntries(typedIn(text).map(name => [name, fields[name]]));
        const left = this.#source.write(typed) ?? {};
        // An editor may show it later.
        this.#take(false, { ...this.#read(), ...Object.fromEntries(Object.entries(typed).filter(([name]) => !Object.hasOwn(left, name))) });
        this.#replace(Object.keys(left).length ? [] : [text]);
        return left;
      },
      discard: () => this.#forget(text),
    };
  }

  /** The text of this page gives way to another one, and is offered beside it. */
  #setAside() {
    const text = { ...this.#own, person: this.#page.person, url: this.#lock.url, id: `${this.#id}-${Date.now()}` };
    within('readwrite', store => { store.put(text); }).catch(error => this.#report(error));
    this.#options.onkept?.(this.#offer(text));
  }
}

export const keep = (...all) => new Keeper(...all);

/** Forgets all texts of this person in this browser, after asking; of everybody, if it is not known who that is. */
export async function clear(person, ask = count => confirm(`Delete ${count} unsaved texts from this browser?`)) {
  const range = person ? from(person) : null;
  const count = await within('readonly', store => done(store.count(range)));
  if (count && !await ask(count)) return false;
  forget(person);
  new BroadcastChannel('doclock-kept').postMessage(person);
  if (count) await within('readwrite', store => { range ? store.delete(range) : store.clear(); });
  return true;
}
