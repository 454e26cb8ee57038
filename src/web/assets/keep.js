// Keeps the text that a person types until it is saved: in the IndexedDB of this browser, by person and document, with
// the version of the document on which it was typed. `lock.keep` of client.js loads this file; its types are in client.d.ts.

const DATABASE = 'doclock-kept', STORE = 'texts';
const PAUSE_MS = 400;             // without a key, before the text is written
const KEPT_MS = 30 * 86_400_000;  // browsers may forget sooner
const MOST = 50;                  // documents of a browser; the oldest goes
const MOST_TEXTS = 3;             // of one document: a new one does not replace one about which nobody has decided
const LONGEST = 1_000_000;        // bytes of one text
const OPEN_MS = 5_000;            // a browser that does not open its database in this time will not do so later

// ---- the database ---------------------------------------------------------------------------

const done = request => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

function open() {
  return new Promise((resolve, reject) => {
    const fail = why => reject(new DOMException(why, 'InvalidStateError'));
    setTimeout(fail, OPEN_MS, 'the database did not open');
    const request = indexedDB.open(DATABASE, 1);   // throws where storage is forbidden
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: ['person', 'url'] });
    request.onblocked = () => fail('a tab of an older release has the database open');
    request.onerror = () => reject(request.error);
    request.onsuccess = () => resolve(request.result);
  });
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

/** Runs `work` in a transaction. Resolves when the browser has committed it. */
async function within(mode, work) {
  const transaction = (await database()).transaction(STORE, mode);
  const ended = new Promise((resolve, reject) => {
    transaction.oncomplete = resolve;
    transaction.onabort = () => reject(transaction.error);
  });
  const [result] = await Promise.all([work(transaction.objectStore(STORE)), ended]);
  return result;
}

async function put(text) {
  if (new Blob([JSON.stringify(text)]).size > LONGEST) throw new DOMException('the text is longer than 1 MB', 'DataError');
  await within('readwrite', async store => {
    store.put(text);
    const all = (await done(store.getAll())).sort((a, b) => b.at - a.at);
    for (const [n, { person, url, at }] of all.entries()) {
      if (n >= MOST || Date.now() - at > KEPT_MS) store.delete([person, url]);
    }
  });
}

const PROBLEMS = { QuotaExceededError: 'full', DataError: 'too_large' };

// ---- a form as a value ----------------------------------------------------------------------

const NEVER = ['password', 'file', 'hidden', 'submit', 'button', 'image', 'reset', 'fieldset', 'output'];
const isTick = field => field.type === 'checkbox' || field.type === 'radio';

/** The fields of a form that are kept, by name; several fields may have one name. */
function fieldsOf(form) {
  const found = new Map();
  for (const field of form.elements) {
    const name = field.name || field.id;
    if (!name || !('value' in field) || NEVER.includes(field.type) || field.closest('[data-doclock-keep=no]')) continue;
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

function setValue(field, value) {
  if (isTick(field)) field.checked = Boolean(value.on);
  else if (field.type === 'select-multiple') for (const option of field.options) option.selected = value.includes(option.value);
  else field.value = value;
  for (const event of ['input', 'change']) field.dispatchEvent(new Event(event, { bubbles: true }));
}

/** A kept value fits the field: the page may have changed since. */
function fits(field, value) {
  if (isTick(field)) return value?.value === field.value;
  if (field.type === 'select-multiple') return Array.isArray(value);
  if (field.type === 'select-one') return [...field.options].some(option => option.value === value);
  return typeof value === 'string';
}

const ofForm = form => ({
  read: () => Object.fromEntries([...fieldsOf(form)].map(([name, fields]) => [name, fields.map(valueOf)])),
  /** Returns what has no place in the form any more. */
  write: values => {
    const fields = fieldsOf(form), left = {};
    for (const [name, kept] of Object.entries(values)) {
      const places = [...fields.get(name) ?? []];
      for (const value of kept) {
        const at = places.findIndex(field => fits(field, value));
        if (at >= 0) setValue(places.splice(at, 1)[0], value);
        else (left[name] ??= []).push(value);
      }
    }
    return left;
  },
  target: form,
});

const text = value => {
  if (Array.isArray(value)) return value.map(text).join('\n');
  if (value && typeof value === 'object' && 'on' in value) return value.on ? value.value : '';
  return typeof value === 'object' ? JSON.stringify(value) : String(value ?? '');
};

/** The fields of two texts that differ, as `{ name, kept, now }`, each as plain text. */
export function differences(kept, now) {
  const names = new Set([...Object.keys(kept), ...Object.keys(now)]);
  const both = [...names].map(name => ({ name, kept: text(kept[name]), now: text(now[name]) }));
  return both.filter(({ kept, now }) => kept !== now);
}

// ---- keeping --------------------------------------------------------------------------------

class Keeper {
  #lock; #page; #source; #options; #saved; #timer;
  #last = Promise.resolve();   // the writes, one after the other
  #isTyped = false;            // something was typed since the last write
  #reading = null;             // resolves when it is known whether there is a kept text
  #isRead = false;
  #early = null;               // the text that was to be written before this was known
  #open = [];                  // the kept texts about which the person has not decided yet, the latest last
  #ends = new AbortController();

  constructor(lock, page, source, options) {
    const { signal } = this.#ends, changed = () => this.changed(), flush = () => this.flush();
    [this.#lock, this.#page, this.#options] = [lock, page, options];
    this.#source = source.read ? source : ofForm(source);
    this.#saved = options.isUnsaved ? '{}' : this.#read();
    this.#isTyped = Boolean(options.isUnsaved);
    for (const event of ['input', 'change']) this.#source.target?.addEventListener(event, changed, { signal });
    addEventListener('pagehide', flush, { signal });
    document.addEventListener('visibilitychange', flush, { signal });
    lock.addEventListener('written', () => this.saved(), { signal });
    lock.addEventListener('change', () => this.#look(), { signal });
    this.#look();
  }

  /** The text may have changed: for editors that are no form. */
  changed() {
    this.#isTyped = true;
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.flush(), PAUSE_MS);
  }

  /** The text that is in the page now is the stored one. */
  saved() {
    this.#saved = this.#read();
    return this.#write();
  }

  /** Writes the text that was typed since the last pause. Resolves when it is kept. */
  flush() {
    if (this.#isTyped && !this.#isRead) this.#early = this.#read();
    return this.#isTyped && this.#isRead ? this.#write() : Promise.resolve(this.#reading).then(() => this.#last);
  }

  close() {
    this.flush();
    this.#ends.abort();
  }

  #read() { return JSON.stringify(this.#source.read()); }

  // The typed text, with those that are open; or only those; or nothing.
  #write(fields = this.#read()) {
    clearTimeout(this.#timer);
    const { person } = this.#page, { url, version } = this.#lock;
    if (!person || !this.#isRead) return this.#last;
    this.#isTyped = false;
    const typed = fields === this.#saved ? [] : [{ version, at: Date.now(), fields: JSON.parse(fields) }];
    const texts = [...this.#open, ...typed].slice(-MOST_TEXTS), at = Date.now();
    const write = () => texts.length ? put({ person, url, at, texts })
      : within('readwrite', store => done(store.delete([person, url])));
    return this.#last = this.#last.then(write).catch(error => this.#report(error));
  }

  #report(error) { this.#options.onproblem?.(PROBLEMS[error?.name] ?? 'unavailable', error); }

  // Not before the server has named the person: the text is theirs, and nobody else may see it.
  #look() { if (this.#page.person) this.#reading ??= this.#readKept(); }

  async #readKept() {
    const name = [this.#page.person, this.#lock.url];
    const kept = await within('readonly', store => done(store.get(name))).catch(error => this.#report(error));
    const isOpen = ({ at, fields }) => Date.now() - at < KEPT_MS && differences(fields, JSON.parse(this.#saved)).length;
    this.#open = kept?.texts.filter(isOpen) ?? [];
    this.#isRead = true;
    if (this.#isTyped || kept && !this.#open.length) this.#write(this.#early ?? undefined);
    for (const text of [...this.#open]) this.#options.onkept?.(this.#offer(text));
  }

  #offer(text) {
    const { at, version, fields } = text, lock = this.#lock, saved = () => JSON.parse(this.#saved);
    const decided = () => {
      this.#open = this.#open.filter(it => it !== text);
      return this.#write();
    };
    return {
      at: new Date(at), version, fields,
      get isCurrent() { return Boolean(version) && version === lock.version; },
      get differences() { return differences(fields, saved()); },
      restore: () => {
        const left = this.#source.write(fields) ?? {};
        decided();
        return left;
      },
      discard: decided,
    };
  }
}

export const keep = (lock, page, source, options = {}) => new Keeper(lock, page, source, options);

/** Forgets all texts of this person in this browser, after asking. */
export async function clear(person, ask = count => confirm(`Delete ${count} unsaved texts from this browser?`)) {
  const all = IDBKeyRange.bound([person], [person, []]);
  const count = person ? await within('readonly', store => done(store.count(all))) : 0;
  if (count && !await ask(count)) return false;
  if (count) await within('readwrite', store => done(store.delete(all)));
  return true;
}
