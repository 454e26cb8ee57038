// A page for the modules of `web/` without a browser: jsdom, IndexedDB in memory, and what else these modules use. The folder
// DOCLOCK_DOM (`scripts/tool dom`) has both packages.

import { createRequire } from 'node:module';

const load = createRequire(`${process.env.DOCLOCK_DOM}/package.json`);
const { JSDOM } = load('jsdom');
const { implSymbol } = load('jsdom/lib/jsdom/living/generated/utils.js');
load('fake-indexeddb/auto');

export const { window } = new JSDOM('<!DOCTYPE html><body></body>', { url: 'http://127.0.0.1/', pretendToBeVisual: true });

/** The Web Locks of all pages. `busy` delays each grant. */
export const locks = {
  held: new Map(), waiting: [], busy: 0,
  async query() {
    return { held: [...locks.held.keys()].map(name => ({ name })), pending: [] };
  },
  request(name, options, work) {
    return new Promise((done, fail) => {
      options.signal?.addEventListener('abort', () => fail(options.signal.reason));
      const grant = async () => {
        locks.held.set(name, true);
        if (locks.busy) await new Promise(done => setTimeout(done, locks.busy));
        if (options.signal?.aborted) return next();
        try { done(await work({ name })); } finally { next(); }
      };
      const next = () => {
        locks.held.delete(name);
        const n = locks.waiting.findIndex(it => it.name === name);
        if (n >= 0) locks.waiting.splice(n, 1)[0].grant();
      };
      locks.held.has(name) ? locks.waiting.push({ name, grant }) : grant();
    });
  },
};

for (const name of ['document', 'Document', 'location', 'localStorage', 'sessionStorage', 'Element', 'HTMLElement', 'HTMLFormElement', 'Event', 'CustomEvent', 'EventTarget',
  'MutationObserver', 'AbortController', 'AbortSignal', 'DOMException', 'customElements', 'Node', 'Blob', 'MouseEvent', 'CSSStyleSheet', 'DOMParser']) {
  Object.defineProperty(globalThis, name, { value: window[name] ?? class {}, configurable: true, writable: true });
}
Object.defineProperty(globalThis, 'navigator', { value: { locks, language: 'en', userAgent: 'jsdom' }, configurable: true });
globalThis.window = window;
globalThis.addEventListener = window.addEventListener.bind(window);
globalThis.dispatchEvent = window.dispatchEvent.bind(window);
globalThis.EventSource = class extends window.EventTarget { close() {} };
performance.getEntriesByType ??= () => [];

export const sleep = ms => new Promise(done => setTimeout(done, ms));

/** The server: each test gives its answers. */
export const server = { answer: () => ({ status: 404, body: {} }), sent: [] };
globalThis.fetch = async (url, init = {}) => {
  const request = { url: String(url), method: init.method ?? 'GET', body: init.body, headers: new Headers(init.headers) };
  server.sent.push(request);
  const { status, body = {}, person = 'alice', headers = {} } = await server.answer(request);
  return new Response(status === 204 ? null : typeof body === 'string' ? body : JSON.stringify(body), { status, headers: { ...person && { 'Doclock-Person': person }, Date: new Date().toUTCString(), ...headers } });
};

/** An event as the browser itself sends it. */
export function trusted(target, type, init = {}) {
  const event = new (type === 'click' ? window.MouseEvent : window.Event)(type, { bubbles: true, composed: true, ...init });
  event[implSymbol].isTrusted = true;
  target[implSymbol]._dispatch(event[implSymbol]);
}

/** What a person does with a field. */
export const person = {
  enters(field) {
    trusted(field, 'pointerdown');
    trusted(field, 'focusin');
  },
  types(field, text) {
    person.enters(field);
    trusted(field, 'beforeinput');
    field.hasAttribute('contenteditable') ? field.innerHTML = text : Reflect.set(Object.getPrototypeOf(field), 'value', text, field);   // as a browser, past React
    trusted(field, 'input');
  },
  clicks(field) {
    person.enters(field);
    trusted(field, 'click', { cancelable: true });   // ticks a box, as in a browser
  },
  ticks(field, isOn = true) {
    person.enters(field);
    field.checked = isOn;
    trusted(field, 'input');
    trusted(field, 'change');
  },
  chooses(select, ...values) {
    person.enters(select);
    for (const option of select.options) option.selected = values.includes(option.value);
    trusted(select, 'input');
    trusted(select, 'change');
  },
};

/** Shows a form with these fields, as the server delivers it. */
export function show(html) {
  document.body.innerHTML = `<form id="form" method="post" action="/x">${html}</form>`;
  return document.getElementById('form');
}

export const { DocLock, Fields, Typed, versionIn } = await import('../../web/client.js');
export const keeping = await import('../../web/keep.js');

/** A lock as far as `keep.js` uses it, of the version that the page shows. */
export class Lock extends window.EventTarget {
  constructor(url = '/locks/item/1', version = 'v1', token = 't1') {
    super();
    Object.assign(this, { url, version, token });
  }
  /** A write by a script. `saves`: what its answer says; `null`: it is not known. */
  saves(saves = true, during = () => {}) {
    const request = { saves: saves || true };
    for (const name of ['writing', 'sending']) this.dispatchEvent(new window.CustomEvent(name, { detail: request }));
    during();
    this.dispatchEvent(new window.CustomEvent('written', { detail: { request, saves } }));
  }
}

/** Keeps the text of a form as the person `alice`; `saved` is what the server knows of sent forms. */
export async function keep(form, { lock = new Lock(), saved = () => null, person: name = 'alice', ...options } = {}) {
  const found = [], problems = [], fields = form instanceof window.HTMLFormElement ? new Fields(form) : null;
  fields?.listen();
  const page = { person: name, ahead: 0, wasSaved: async sent => saved(sent) };
  const all = { onkept: text => found.push(text), onproblem: problem => problems.push(problem), ...options };
  const keeper = keeping.keep(lock, page, fields ?? form, all);
  await settled();
  const end = async () => { keeper.close(); await settled(); };
  return { lock, keeper, fields, found, problems, end, crash: async () => { await keeper.flush(); await end(); } };
}

/** All that is kept. */
export const rows = () => new Promise(done => {
  const request = indexedDB.open('doclock-kept');
  request.onsuccess = () => {
    const all = request.result.transaction('texts').objectStore('texts').getAll();
    all.onsuccess = () => { request.result.close(); done(all.result); };
  };
});

/** Until the database has done what it was asked to. */
export async function settled() {
  for (let n = 0; n < 4; n++) {
    await rows();
    await sleep(1);
  }
}

export const forgetAll = () => keeping.clear(undefined, () => true);
