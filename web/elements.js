// Two elements for ordinary pages, which need no script of their own:
//
//   <script type="module" src="/locks/elements.js"></script>
//   <doclock-form lock="/locks/workitem/42" version="…"><form method="post" action="/workitem/42">…</form></doclock-form>
//   <doclock-badge lock="/locks/workitem/42"></doclock-badge>
//
// `doclock-form` locks the document of the form in it, and says what happens to the lock. `doclock-badge` says in a list who is
// editing. The guide has their attributes; types are in elements.d.ts.

import { DocLock, Fields, isPost, own, place, versionIn } from './client.js';

const AGAIN_MS = 1_000;    // a second submit within this time is a double click
const SETTLED_MS = 400;    // a click within this time may be meant for the button that stood there before
const SLOW_MS = 1_000;     // after this time without an answer, the person is told
const PASSED_MS = 30_000;  // how long a save may take that hands the document over
const FOLLOWS_MS = 3_000;  // a page whose load began later does not follow that save, but another page
const LEAVING_MS = 5_000;  // after a submit, the page is probably about to go

// ---- the texts ------------------------------------------------------------------------------

/** By language; most names are those of states, losses, ends and problems. Pages may replace texts and add languages. */
export const texts = {
  en: {
    somebody: 'Somebody', asking: 'Waiting for the server.', address: 'This form has no lock: its address is wrong.',
    held: '{holder} has been editing this since {since}.', other: '{holder} is editing this.', mine: 'You are editing this.',
    mine_elsewhere: 'You are editing this in another tab.', mine_session: 'You have been editing this since {since}, in another browser or before a new login.', free: 'Nobody is editing this now.', granted: 'You can edit now.', turn: 'It is your turn. This document has been saved since this page was opened.',
    waiting: 'You can edit as soon as it is free. This page will tell you.',
    sure: '{holder} cannot save any more then, and keeps the typed text. Take over?', sure_session: 'You cannot save there any more then. What you typed there stays there. Take over?',
    frozen: 'Nobody can start to edit before {until}.', reason: 'Reason: {reason}', offline: 'The server cannot be reached.',
    problem: 'The server says: {detail}', login_required: 'Log in to edit this.', until: 'Your lock lasts until {until}.',
    stale: 'This document has been saved since this page was opened.', saved: '{by} has saved this document.',
    unknown: 'You do not have the lock any more.', released: 'You do not have the lock any more.', expired: 'Your lock has expired.',
    broken: '{by} has ended your lock.', session_ended: 'Your login has ended. Log in again in another tab, then go on here.',
    person_changed: 'Somebody else is logged in now, who cannot save your text.', unsaved: 'Your text is not saved.', deleted: 'This document has been deleted.',
    idle: 'Nobody has touched this page for a while: your lock ends at {at}.', session: 'Your login ends at {at}. Save your text.',
    max_hold: 'Nobody may edit for longer: your lock ends at {at}. Save your text.',
    older: 'The document has been saved since then.', left: 'This was not put into the form: its field has changed or has gone. Copy what you need:',
    unkept: 'This browser keeps no text: save often.', kept: 'You typed this ({at}) and did not save it:',
    sent: 'You sent this ({at}), and something else is stored now:', now: 'Stored: {now}',
    edit: 'Edit', again: 'Go on editing', here: 'Edit here', takeOver: 'Take over…', yes: 'Take over', no: 'No',
    wait: 'Edit when it is free', stop: 'Only read', extend: 'Go on editing', stored: 'Show the saved document',
    replace: 'Replace it with my text', restore: 'Put it into the form', discard: 'Discard it',
    ask: 'Ask for it…', why: 'What do you need it for?', send: 'Ask', cancel: 'Do not ask', asked: 'You have asked for it, and wait.',
    behind: 'You have asked for it. People ahead of you: {ahead}.', silent: 'No answer yet. You still wait.',
    told_soon: 'The answer is: soon. {reply}', told_no: 'The answer is: not now. {reply}',
    asks: '{by} asks for this document.', asks_for: '{by} asks for this document: {message}', word: 'Your answer in a few words, if you like', soon: 'Soon', refuse: 'Not now',
    pass: 'Save and hand over', promised: 'You have told {by}: soon.',
    nobody_hears: 'Nobody would hear you: readers, a program or another tab have it.', too_many_asks: 'Too many people ask for this. Ask again in a minute.',
  },
  de: {
    somebody: 'Jemand', asking: 'Der Server hat noch nicht geantwortet.', address: 'Dieses Formular hat keine Sperre: Seine Adresse ist falsch.',
    held: '{holder} bearbeitet dies seit {since}.', other: '{holder} bearbeitet dies.', mine: 'Sie bearbeiten dies.',
    mine_elsewhere: 'Sie bearbeiten dies in einem anderen Tab.', mine_session: 'Sie bearbeiten dies seit {since}, in einem anderen Browser oder vor einer neuen Anmeldung.', free: 'Niemand bearbeitet dies jetzt.', granted: 'Sie können es jetzt bearbeiten.', turn: 'Sie sind an der Reihe. Das Dokument wurde gespeichert, seit diese Seite geöffnet wurde.',
    waiting: 'Sie können es bearbeiten, sobald es frei ist. Diese Seite sagt es Ihnen.',
    sure: '{holder} kann dann nicht mehr speichern und behält den getippten Text. Übernehmen?', sure_session: 'Dort können Sie dann nicht mehr speichern. Was Sie dort getippt haben, bleibt dort. Übernehmen?',
    frozen: 'Vor {until} kann niemand mit dem Bearbeiten beginnen.', reason: 'Grund: {reason}', offline: 'Der Server ist nicht erreichbar.',
    problem: 'Der Server sagt: {detail}', login_required: 'Melden Sie sich an, um dies zu bearbeiten.', until: 'Ihre Sperre gilt bis {until}.',
    stale: 'Das Dokument wurde gespeichert, seit diese Seite geöffnet wurde.', saved: '{by} hat dieses Dokument gespeichert.',
    unknown: 'Sie haben die Sperre nicht mehr.', released: 'Sie haben die Sperre nicht mehr.', expired: 'Ihre Sperre ist abgelaufen.',
    broken: '{by} hat Ihre Sperre beendet.', session_ended: 'Ihre Anmeldung ist zu Ende. Melden Sie sich in einem anderen Tab an, und fahren Sie dann hier fort.',
    person_changed: 'Jetzt ist jemand anderes angemeldet und kann Ihren Text nicht speichern.', unsaved: 'Ihr Text ist nicht gespeichert.', deleted: 'Das Dokument wurde gelöscht.',
    idle: 'Seit einer Weile hat niemand diese Seite benutzt: Ihre Sperre endet um {at}.', session: 'Ihre Anmeldung endet um {at}. Speichern Sie Ihren Text.',
    max_hold: 'Länger darf niemand bearbeiten: Ihre Sperre endet um {at}. Speichern Sie Ihren Text.',
    older: 'Das Dokument wurde seither gespeichert.', left: 'Das wurde nicht in das Formular übernommen: Sein Feld hat sich geändert oder fehlt. Kopieren Sie, was Sie brauchen:',
    unkept: 'Dieser Browser bewahrt keinen Text auf: Speichern Sie oft.', kept: 'Sie haben dies getippt ({at}) und nicht gespeichert:',
    sent: 'Sie haben dies abgeschickt ({at}), und gespeichert ist jetzt etwas anderes:', now: 'Gespeichert: {now}',
    edit: 'Bearbeiten', again: 'Weiter bearbeiten', here: 'Hier bearbeiten', takeOver: 'Übernehmen…', yes: 'Übernehmen', no: 'Nein',
    wait: 'Bearbeiten, sobald es frei ist', stop: 'Nur lesen', extend: 'Weiter bearbeiten', stored: 'Gespeichertes Dokument zeigen',
    replace: 'Durch meinen Text ersetzen', restore: 'In das Formular übernehmen', discard: 'Verwerfen',
    ask: 'Darum bitten…', why: 'Wofür brauchen Sie es?', send: 'Bitten', cancel: 'Nicht bitten', asked: 'Sie haben darum gebeten und warten.',
    behind: 'Sie haben darum gebeten. Vor Ihnen: {ahead}.', silent: 'Noch keine Antwort. Sie warten weiter.',
    told_soon: 'Die Antwort ist: bald. {reply}', told_no: 'Die Antwort ist: jetzt nicht. {reply}',
    asks: '{by} bittet um dieses Dokument.', asks_for: '{by} bittet um dieses Dokument: {message}', word: 'Ihre Antwort in wenigen Worten, wenn Sie mögen', soon: 'Bald', refuse: 'Jetzt nicht',
    pass: 'Speichern und übergeben', promised: 'Sie haben {by} gesagt: bald.',
    nobody_hears: 'Niemand würde Sie hören: Leser, ein Programm oder ein anderer Tab haben es.', too_many_asks: 'Zu viele bitten darum. Bitten Sie in einer Minute noch einmal.',
  },
};

/** The language of this part of the page, if `Intl` knows it. */
function languageOf(element) {
  const said = element.closest('[lang]')?.lang || navigator.language;
  try { return Intl.getCanonicalLocales(said)[0] ?? 'en'; } catch { return 'en'; }
}

/** A name cannot reverse the direction of its sentence. */
const isolated = text => `\u2068${String(text).replace(/[\u202a-\u202e\u2066-\u2069]/g, '')}\u2069`;

/** The sentence in the language of the element. The time of another day has its date. */
function say(element, name, values = {}) {
  const language = languageOf(element), table = [language, language.split('-')[0]].map(it => texts[it]).find(Boolean);
  const text = table?.[name] ?? texts.en[name] ?? name;
  return text.replace(/\{(\w+)\}/g, (_, key) => {
    const value = values[key];
    if (['message', 'reply'].includes(key)) return value ? isolated(value) : '';
    if (!(value instanceof Date)) return isolated(value || table?.somebody || texts.en.somebody);
    const isToday = value.toDateString() === new Date().toDateString();
    return value.toLocaleString(language, { timeStyle: 'short', ...!isToday && { dateStyle: 'short' } });
  });
}

/** A screen reader reads everything aloud that is put into the page, even if it was there before. */
function put(node, text) { if (node.textContent !== text) node.textContent = text; }
function reveal(node, isShown) { if (node.hidden === isShown) node.hidden = !isShown; }

// A strict Content-Security-Policy forbids <style>, but not this.
function styled(css) {
  const sheet = new CSSStyleSheet();
  sheet.replaceSync(css);
  return sheet;
}

const make = (name, properties, ...children) => {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children);
  return node;
};

// A server that renders pages may import this file, too.
const Base = globalThis.HTMLElement ?? class {};

// ---- the form -------------------------------------------------------------------------------

const steady = () => performance.timeOrigin + performance.now();

// A form that was sent to be saved and handed over may be followed by a page with the same form. It was saved if that page is no
// refusal, and shows another version; or if nothing in it was another text than the stored one.
const passed = {
  at: 'doclock-passed',
  set({ url, version }, isSame) {
    try { sessionStorage.setItem(this.at, JSON.stringify({ url, version, isSame, sent: steady() })); } catch { /* the person keeps the lock */ }
  },
  forget() { try { sessionStorage.removeItem(this.at); } catch { /* as above */ } },
  take({ url, version }) {
    let last = null;
    try { last = JSON.parse(sessionStorage.getItem(this.at)); } catch { /* as above */ }
    if (last?.url !== url) return false;
    this.forget();
    const isRefusal = performance.getEntriesByType('navigation')[0]?.responseStatus >= 400;
    const follows = performance.timeOrigin - last.sent < FOLLOWS_MS && steady() - last.sent < PASSED_MS;
    return !isRefusal && (last.isSame || last.version !== version) && follows;
  },
};

// By form: they know what was typed, also if the element is removed and put back; not if the form shows another document.
const known = new WeakMap();
function fieldsOf(form, url) {
  if (known.get(form)?.url !== url) known.set(form, { url, fields: new Fields(form) });
  return known.get(form).fields;
}

/** One form and the lock of its document. `draw` is called at each change. */
class Editing {
  lock; fields; kept = [];   // texts that were typed earlier
  stale = null;              // the version that is stored instead of the one in this form; '' if it is not known
  #form; #element; #draw; #explain; #isLazy; #keeper = null;
  #kept = null; #saved = null; #sent = null; #asksAbout = null; #isNews = false; #hasAsked = false; #isAsking = false; #writesTo = null;
  #differences = null;       // of the first kept text
  #passing = null;           // a save under way that hands the document over: its request, if a script sends it
  #arrives = false;          // this page follows such a save
  #began = performance.now(); #submitted = -Infinity; #left = -Infinity;
  #addresses = new Map();    // by element: the name of its attribute, its own address, and the one that was written here
  #ends = new AbortController();
  #hears = () => this.#draw();

  /** Throws if the address of the lock is wrong. */
  constructor(element, form, draw, explain) {
    [this.#element, this.#form, this.#explain] = [element, form, explain];
    this.#draw = () => { if (!this.#ends.signal.aborted) draw(); };
    const url = element.getAttribute('lock'), { signal } = this.#ends;
    if (!url) throw new TypeError('The attribute `lock` is missing.');
    this.#isLazy = element.getAttribute('on') === 'input';
    own(form, 'setAttribute')('autocomplete', 'off');   // the browser should not put the text of an earlier visit over the stored one
    this.lock = DocLock.open(url, {
      ...this.#isLazy && { on: form }, version: this.#named(own(form, 'getAttribute')('action')) ?? element.getAttribute('version'),
      onheld: () => this.#holds(),
      onstale: ({ version }) => { if (!version || version !== this.lock.version) this.stale = version ?? ''; this.#draw(); },
      onsaved: ({ by }) => this.#hear(by ?? ''),
      onchange: this.#draw,
    });
    this.fields = fieldsOf(form, this.lock.url);
    this.fields.listen();
    this.fields.hears.add(this.#hears);
    this.#arrives = passed.take(this.lock) && !this.#isLazy && !element.hasAttribute('unsaved');
    if (this.lock.token) this.lock.acquire();   // of an earlier form or element of this page, which is about to give it up
    if (element.getAttribute('keep') !== 'no') this.#keep();
    this.#listen(signal);
    setTimeout(this.#draw, SLOW_MS + 50);
  }

  #keep() {
    this.#keeper = this.lock.keep(this.#form, {
      onkept: text => { this.kept.push(text); this.#draw(); },
      isUnsaved: this.#element.hasAttribute('unsaved'), fields: this.fields,
    });
    this.#keeper.then(keeper => { this.#kept = keeper; this.#draw(); });
  }

  get #isKept() { return !this.#kept?.problem; }

  #listen(signal) {
    const root = own(this.#form, 'getRootNode')();
    // In the capture phase, because other listeners may read the address.
    root.addEventListener('submit', event => event.target === this.#form && this.#submit(event), { signal, capture: true });
    root.addEventListener('input', event => {
      if (!this.#isNews || !this.fields.hear(event)) return;
      this.#isNews = false;
      this.#draw();
    }, { signal });
    document.addEventListener('visibilitychange', this.#draw, { signal });
    addEventListener('pageshow', ({ persisted }) => persisted && this.#comesBack(), { signal });
    this.lock.addEventListener('forgotten', () => { this.kept = []; this.#draw(); });
    // A request of a script: the page stays.
    const sent = new Map();
    this.lock.addEventListener('writing', ({ detail }) => {
      sent.set(detail, this.fields.values);
      if (this.#passing && detail.saves) this.#passing.request ??= detail;
    });
    this.lock.addEventListener('written', ({ detail: { request, saves } }) => {
      if (saves && sent.has(request)) this.#isSaved(sent.get(request), saves);
      sent.delete(request);
      if (this.#passing?.request !== request) return;
      this.#staysHere();
      if (saves && !this.hasUnsaved) this.lock.release();
    });
  }

  #isSaved(values, names) {
    this.#differences = null;
    this.fields.saved(values, names);
    if (names === true) this.#element.removeAttribute('unsaved');
  }

  /** By Back, from the page that has followed the form: if that was saved, this page shows what is stored. */
  async #comesBack() {
    this.#staysHere();
    this.#submitted = this.#left = -Infinity;
    const sent = this.#sent, version = sent && await this.lock.wasSaved(sent);
    this.#sent = null;
    if (!version || await this.#kept?.isRefused?.()) return;
    this.#isSaved(sent.values, true);
    if (this.stale === version || this.stale === null && this.lock.version === sent.version) this.shows(version);
    if (!this.lock.token && !this.#isLazy) this.lock.acquire();   // as a page that is opened
    this.#draw();
  }

  close() {
    this.#ends.abort();
    this.fields.hears.delete(this.#hears);
    this.fields.close(known.get(this.#form)?.fields !== this.fields);
    this.fields.open(true);
    for (const [node, { name, before, ours }] of this.#addresses) {
      if (own(node, 'getAttribute')(name) !== ours) continue;   // the page has set another one
      before === null ? own(node, 'removeAttribute')(name) : own(node, 'setAttribute')(name, this.#withVersion(before));
    }
    this.#keeper?.then(keeper => keeper.close());
    this.lock.close();
  }

  #holds() {
    this.#writesTo = null;
    if (this.#arrives) {
      this.#arrives = false;
      return this.lock.release();
    }
    // Without a version, nothing else tells that the page shows an older text.
    this.stale = (this.#saved !== null || this.stale === '') && !this.lock.current ? '' : null;
    [this.#isNews, this.#hasAsked, this.#saved] = [this.#hasAsked, false, null];
    this.#draw();
  }

  #hear(by) {
    if (this.lock.token) this.stale = '';   // the lock was granted before the event came
    else this.#saved = by;
    this.#draw();
  }

  get isNews() { return this.#isNews; }
  /** As of its offer, or of a later save: not at each key. */
  get differences() {
    const [text] = this.kept;
    if (!text) return [];
    if (this.#differences?.text !== text) this.#differences = { text, all: text.differences };
    return this.#differences.all;
  }
  get isOpen() { return Boolean(this.lock.token) && this.stale === null; }
  /** True if a text that was typed earlier can be put into the fields. */
  get takesText() { return this.#isLazy || this.isOpen; }
  get hasUnsaved() { return this.#element.hasAttribute('unsaved') || this.fields.records.size > 0; }

  // -- what the person does

  #ask(how) {
    this.#arrives = false;
    this.#hasAsked = true;
    this.lock[how]();
  }

  edit() { this.#ask('acquire'); }
  wait() { this.#ask('wait'); }
  extend() { this.lock.extend(); }
  stop() {
    this.#hasAsked = false;
    this.lock.stopWaiting();
  }

  takeOver() {
    if (this.lock.state === 'mine_elsewhere') return this.#ask('takeOver');
    this.#asksAbout = this.#holder;
    this.#draw();
  }

  yes() {
    this.#asksAbout = null;
    this.#ask('takeOver');
  }

  no() {
    this.#asksAbout = null;
    this.#draw();
  }

  get #holder() { return this.lock.since?.getTime() ?? this.lock.holder; }

  ask() { this.#writes(this.#holder); }
  cancel() { this.#writes(null); }
  async send({ why }) {
    this.#arrives = false;
    this.#hasAsked = true;
    this.#writes(null);
    if (await this.lock.ask(why.value)) why.value = '';   // or it can be sent again
  }

  #writes(to) {
    this.#writesTo = to;
    this.#draw();
  }

  /** The first ask without an answer, or else the first one to which this person has said "soon". */
  get asked() { return this.lock.asks.find(it => !it.answer) ?? this.lock.asks.find(it => it.answer === 'soon'); }

  soon(parts) { this.#answer('soon', parts); }
  refuse(parts) { this.#answer('no', parts); }

  async #answer(answer, { word }) {
    const { asked } = this;
    if (this.lock.token && asked && await this.lock.answer(asked.id, answer, word.value)) word.value = '';
  }

  /** The button that Enter presses. */
  get #button() {
    return [...own(this.#form, 'elements')].find(it => it.type === 'submit' && !it.disabled) ?? null;
  }

  get canPass() { return this.isOpen && isPost(this.#form, this.#button); }

  /** Gives the document to the next waiter, after the form is saved: an editor of the page may have text of which nobody knows. */
  pass() {
    if (!this.canPass) return;
    const before = this.#left;
    this.#passing = { request: null };
    own(this.#form, 'requestSubmit')(this.#button);
    if (!(this.#left > before)) this.#staysHere();   // the browser may have found a mistake in the form
  }

  #staysHere() {
    if (this.#passing) passed.forget();
    [this.#passing, this.#arrives] = [null, false];
  }

  replace() { this.shows(this.stale); }
  restore() { this.#decide('restore'); }
  discard() { this.#decide('discard'); }

  async #decide(what) {
    const text = this.kept.shift();
    if (!text) return;
    this.#draw();
    const left = await text[what]();
    // What has no place in this form can only be read, and discarded.
    if (what === 'restore' && Object.keys(left).length) this.kept.unshift(Object.assign(Object.create(text), { isLeft: true }));
    this.#draw();
  }

  shows(version) {
    [this.stale, this.#saved, this.#differences] = [null, null, null];
    this.lock.version = version;
    this.#draw();
  }

  // -- the ordinary request of the form

  async #submit(event) {
    const { submitter } = event;
    if (!isPost(this.#form, submitter)) return;
    this.fields.read();
    const isAgain = this.#isAsking || performance.now() - this.#submitted < AGAIN_MS;
    if (this.isOpen && !isAgain) {
      this.#left = performance.now();
      const { token, version } = this.lock, isPassing = Boolean(this.#passing);
      if (isPassing) passed.set(this.lock, false);
      setTimeout(this.#draw, LEAVING_MS + 50);
      setTimeout(() => {   // the page may check its fields, or send the form itself
        if (!event.defaultPrevented) {
          this.#sent = { token, version, values: this.fields.values };
          if (isPassing && !this.hasUnsaved && !this.fields.isChanged) passed.set({ ...this.#sent, url: this.lock.url }, true);
          return void (this.#submitted = performance.now());
        }
        this.#left = -Infinity;
        this.#passing?.request ? passed.forget() : this.#staysHere();
      });
      return this.#address(submitter);
    }
    event.preventDefault();
    event.stopImmediatePropagation();
    if (isAgain) return;
    this.#left = -Infinity;
    // Whoever types and presses Enter at once is sent when the lock is there.
    this.#isAsking = true;
    if (!this.lock.token) await this.lock.acquire();
    this.#isAsking = false;
    if (this.#ends.signal.aborted) return;
    if (this.isOpen) return own(this.#form, 'requestSubmit')(submitter?.form === this.#form ? submitter : null);
    this.#draw();
    this.#explain();
  }

  /** The version in this address. */
  #named(address) {
    try { return versionIn(new URL(address ?? '', document.baseURI).searchParams.get('version')); } catch { return null; }
  }

  /** An address of the page itself, with the version of now if it named one. */
  #withVersion(address) {
    const named = this.#named(address);
    return named && this.lock.version ? address.replace(named, this.lock.version) : address;
  }

  /** Writes lock, tab and version into the address to which the form is sent. */
  #address(submitter = null) {
    const places = [[this.#form, 'action'], ...submitter?.hasAttribute('formaction') ? [[submitter, 'formaction']] : []];
    for (const [node, name] of places) {
      const written = own(node, 'getAttribute')(name), known = this.#addresses.get(node);
      // The page has set another address, perhaps with the text of another version.
      const named = this.#named(written);
      if (known && written !== known.ours && named && named !== this.lock.version) this.shows(named);
      const before = known && written === known.ours ? known.before : written;
      let ours;
      try { ours = this.lock.address(written || location.href); } catch { continue; }   // of another site, which should not learn of the lock
      this.#addresses.set(node, { name, before, ours });
      if (ours !== written) own(node, 'setAttribute')(name, ours);
    }
  }

  // -- what is shown

  /** Before each drawing: opens or closes the fields, and writes the address, because a script may submit the form without an event. */
  settle() {
    if (!this.#isLazy) this.fields.open(this.isOpen);   // the lock itself closes a lazy form
    if (this.isOpen && isPost(this.#form)) this.#address();
    if (!this.lock.token && this.lock.state !== 'unknown') this.#arrives = false;   // somebody else was quicker
  }

  /** What is said: its weight, its sentences, and what the person can do. */
  get view() {
    const { lock } = this, { state, token, lost, ending } = lock;
    const unsaved = this.hasUnsaved && ['unsaved'], trouble = this.#trouble();
    if (token) {
      if (this.stale !== null) return { kind: 'warn', says: [this.#isNews ? 'turn' : 'stale'], more: ending ? [ending.why, ending] : unsaved, does: this.stale && this.hasUnsaved ? ['stored', 'replace'] : ['stored'] };
      if (ending) return { kind: 'warn', says: [ending.why, ending], does: ending.canExtend ? ['extend'] : [] };
      if (trouble) return { kind: 'warn', says: trouble, more: ['until', { until: new Date(lock.expiresAt) }] };
      if (this.#isNews) return { kind: 'info', says: ['granted'], more: !this.#isKept && ['unkept'] };
      return this.#isKept ? {} : { kind: 'info', says: ['unkept'] };
    }
    if (state === 'held' && this.#asksAbout !== null && this.#asksAbout === this.#holder) {
      return { kind: 'warn', says: [lock.samePerson ? 'sure_session' : 'sure', lock], does: ['no', 'yes'] };
    }
    if (lock.deleted) return performance.now() - this.#left < LEAVING_MS ? {} : { kind: 'bad', says: ['deleted'], more: unsaved };
    const asked = lock.asking && this.#whatIsAsked(lock.asking);
    if (state === 'held' && this.#writesTo !== null && this.#writesTo === this.#holder) return { kind: 'info', says: this.#standing(), asks: true, does: ['send', 'cancel'] };
    const does = lock.waiting ? ['stop'] : state === 'held' ? ['wait'] : ['mine_elsewhere', 'frozen'].includes(state) ? [] : ['edit'];
    if (state === 'held' && lock.holder && lock.mayAsk && !lock.samePerson && !asked && this.#element.getAttribute('ask') !== 'no') does.push('ask');
    if (lock.mayTakeOver || state === 'mine_elsewhere') does.push('takeOver');
    if (lost) {
      if (performance.now() - this.#left < LEAVING_MS) return {};
      const says = this.#loss(lost), more = trouble?.[0] === says[0] ? null : trouble;
      return { kind: 'bad', says, more: more || asked || (lost.reason ? ['reason', lost] : unsaved), does };
    }
    if (this.#saved !== null) return { kind: 'info', says: ['saved', { by: this.#saved }], more: trouble || asked || ['held', 'mine_elsewhere', 'frozen'].includes(state) && this.#standing(), does: [...does, 'stored'] };
    if (state === 'held') return { kind: 'info', says: this.#standing(), more: trouble || asked || lock.waiting && ['waiting'], does };
    if (['mine_elsewhere', 'frozen'].includes(state)) return { kind: 'info', says: this.#standing(), more: trouble || lock.frozen?.reason && ['reason', lock.frozen], does };
    if (trouble) return { kind: 'bad', says: trouble, does };
    if (this.#isLazy) return {};   // nobody has typed yet
    if (state === 'free') return { kind: 'info', says: ['free'], does };
    return performance.now() - this.#began < SLOW_MS ? {} : { kind: 'info', says: ['asking'] };
  }

  #trouble() {
    const { offline, askProblem } = this.lock, problem = this.lock.problem ?? askProblem;
    if (offline) return ['offline'];
    if (!problem) return null;
    if (problem.deleted) return ['deleted'];
    const isKnown = this.lock.token || this.lock.lost;   // then a deployment answers with the 404
    if (!isKnown && problem !== askProblem && !problem.code && (problem.status ?? 404) === 404) return ['address'];   // no answer of a lock API
    return texts.en[problem.code] ? [problem.code] : ['problem', { detail: problem.detail || problem.title || `${problem.status}` }];
  }

  #whatIsAsked({ answer, reply, isSilent, ahead }) {
    if (answer) return ['told_' + answer, { reply }];
    return isSilent ? ['silent'] : ahead ? ['behind', { ahead }] : ['asked'];
  }

  #standing() {
    const { state, since, frozen, samePerson } = this.lock;
    return state === 'frozen' ? ['frozen', frozen] : [state !== 'held' ? state : samePerson ? 'mine_session' : since ? 'held' : 'other', this.lock];
  }

  #loss({ kind, by }) {
    if (kind === 'person_changed' || kind === 'session_ended' && !this.lock.lost.isBack) return [kind];
    if (['held', 'mine_elsewhere', 'frozen'].includes(this.lock.state)) return this.#standing();
    return [kind === 'session_ended' ? 'unknown' : kind, { by }];
  }

  get labels() {
    return { edit: this.lock.lost ? 'again' : 'edit', takeOver: this.lock.state === 'mine_elsewhere' ? 'here' : 'takeOver' };
  }
}

const LOOKS = globalThis.document && styled(`
  :host { display: block }
  :host([hidden]), [hidden] { display: none !important }
  section {
    margin-block-end: 1rem; padding: .6rem .9rem; border: 1px solid; border-inline-start-width: .35rem; border-radius: .25rem;
    background: Canvas; color: CanvasText; overflow-wrap: anywhere;
  }
  section[data-kind=""] { margin: 0; border: 0; padding: 0 }   /* not hidden: a screen reader listens to what is there already */
  .top { position: sticky; inset-block-start: 0; z-index: 2; max-block-size: 50vh; overflow: auto }
  section[data-kind=bad] { border-color: #b3261e }
  section[data-kind=warn] { border-color: #8a5a00 }
  p, dl { margin: 0 0 .4rem }
  :empty { margin: 0 }
  dt { font-weight: bold }
  dd { margin: 0 0 .4rem; white-space: pre-wrap; max-block-size: 12rem; overflow: auto }
  label { display: block; margin-block-end: .4rem }
  label span { display: block; margin-block-end: .2rem }
  input { font: inherit; box-sizing: border-box; inline-size: 100%; max-inline-size: 30rem; min-block-size: 2.25rem }
  .buttons { display: flex; flex-wrap: wrap; gap: .5rem; align-items: center }
  button, a { font: inherit; min-block-size: 2.25rem; padding-inline: .8rem }
  a { display: inline-flex; align-items: center; color: LinkText }
  :focus-visible { outline: 2px solid; outline-offset: 2px }
`);

const BUTTONS = ['edit', 'takeOver', 'no', 'yes', 'wait', 'ask', 'send', 'cancel', 'stop', 'extend', 'replace'];
const OF_ASK = ['soon', 'refuse', 'pass'], OF_TEXT = ['restore', 'discard'], LONGEST = 160;   // characters of a message

class DocLockForm extends Base {
  static observedAttributes = ['lock', 'version', 'on', 'lang'];

  #editing = null; #form = null; #asked;
  #parts = {}; #title = null;
  #offers = {}; #settled = {};   // what the buttons of each section say, and since when
  // The form may come later than its element, and be another one after a while.
  #observer = globalThis.MutationObserver && new MutationObserver(() => this.#meet());

  constructor() {
    super();
    this.attachShadow({ mode: 'open' }).adoptedStyleSheets.push(LOOKS);
    const part = (name, tag, properties, ...children) => this.#parts[name] = make(tag, { part: name, ...properties }, ...children);
    const button = name => part(name, 'button', { type: 'button', hidden: true, onclick: event => this.#press(event, name) });
    const told = (...nodes) => {
      const node = make('div', {}, ...nodes);
      node.setAttribute('aria-live', 'polite');
      return node;
    };
    // A line of text, and the button that Enter presses.
    const line = (name, enters) => this.#parts[name + 'Label'] = make('label', { hidden: true }, make('span', {}), part(name, 'input', {
      maxLength: LONGEST, autocomplete: 'off', dir: 'auto', onkeydown: event => { if (event.key === 'Enter' && !event.isComposing && event.keyCode !== 229 && !event.repeat) this.#press(event, enters); },
    }));
    this.shadowRoot.append(make('div', { className: 'top' },
      part('bar', 'section', {},
        this.#parts.told = told(part('says', 'p', { tabIndex: -1 }), part('more', 'p')),
        line('why', 'send'),
        make('div', { className: 'buttons' }, ...BUTTONS.map(button), 
          part('stored', 'a', { hidden: true, onclick: event => { if (this.#isHasty(event)) event.preventDefault(); } }))),
      part('asks', 'section', {},
        told(part('asksSays', 'p')), line('word', 'soon'),
        make('div', { className: 'buttons' }, ...OF_ASK.map(button)))),
      part('kept', 'section', {},
        told(part('keptAt', 'p'), part('keptOn', 'p')), part('differences', 'dl'),
        make('div', { className: 'buttons' }, ...OF_TEXT.map(button))),
      make('slot'));
  }

  /** The lock; `null` until there is a form. */
  get lock() { return this.#editing?.lock ?? null; }
  /** Frameworks write attributes as properties. */
  set lock(url) { url == null ? this.removeAttribute('lock') : this.setAttribute('lock', url); }

  // An element that is moved is removed and put back at once; it keeps its lock.
  connectedCallback() {
    this.#observer.observe(this, { childList: true, subtree: true });
    if (document.readyState !== 'loading') return this.#meet();
    document.addEventListener('DOMContentLoaded', () => this.#meet(), { once: true });   // all fields of the form are there
  }

  disconnectedCallback() {
    queueMicrotask(() => {
      if (this.isConnected) return;
      this.#observer.disconnect();
      this.#begin(null);
    });
  }

  attributeChangedCallback(name, before, value) {
    if (before === value || !this.#form) return;
    if (name === 'lang') this.#draw();
    else if (name === 'version' && this.#editing) this.#editing.shows(value);
    else this.#begin(this.isConnected ? this.#form : null);
  }

  #meet() {
    if (!this.isConnected || document.readyState === 'loading') return;
    const isOurs = form => form && own(form, 'closest')('doclock-form') === this;
    const form = isOurs(this.#form) ? this.#form : [...this.querySelectorAll('form')].find(isOurs) ?? null;
    if (form === this.#form) this.#draw();   // it may have new fields
    else this.#begin(form);
  }

  /** The next form is there before the one before is closed: it takes the lock over. */
  #begin(form) {
    const before = this.#editing;
    let next = null;
    try {
      if (form) next = new Editing(this, form, () => this.#editing === next && this.#draw(), () => this.#explain());
    } catch (error) {
      console.error('doclock-form:', error);   // the form works as without JavaScript
      new Fields(form).open(true);
    }
    [this.#form, this.#editing] = [form, next];
    before?.close();
    this.#draw();
  }

  #isHasty(event) {
    const section = event.target.closest('section');
    return event.isTrusted && performance.now() - this.#settled[section?.part.value] < SETTLED_MS;
  }

  #settles(section, ...offers) {
    if (this.#offers[section] !== String(offers)) [this.#offers[section], this.#settled[section]] = [String(offers), performance.now()];
  }

  #press(event, name) {
    if (this.#isHasty(event)) return;
    this.#editing?.[name](this.#parts);
    if (name === 'ask') this.#parts.why.focus();
  }

  /** Nothing happens although the person has asked for it: what is said tells why. */
  #explain() { this.#parts.says.focus(); }

  #draw() {
    const editing = this.#editing, parts = this.#parts, focused = this.shadowRoot.activeElement;
    editing?.settle();
    const { kind = '', says, more, asks = false, does = [] } = editing ? editing.view : this.#form ? { kind: 'bad', says: ['address'] } : {};
    parts.bar.dataset.kind = kind;
    parts.told.setAttribute('aria-live', kind === 'bad' ? 'assertive' : 'polite');
    put(parts.says, says ? say(this, ...says) : '');
    put(parts.more, more ? say(this, ...more) : '');
    for (const name of [...BUTTONS, 'stored']) {
      put(parts[name], say(this, editing?.labels[name] ?? name));
      reveal(parts[name], does.includes(name));
    }
    this.#drawLine('why', asks);
    parts.stored.href = this.getAttribute('page') ?? location.pathname + location.search;
    parts.stored.target = editing?.hasUnsaved ? '_blank' : '';   // what was typed stays here
    const text = editing?.kept[0];
    this.#drawKept(text);
    const asked = editing?.asked;
    this.#drawAsk(asked);
    const news = asked && !asked.answer ? [this.#asksHow(asked), asked] : editing?.isNews && [editing.isOpen ? 'granted' : 'turn'];
    this.#drawTitle(news && document.hidden ? say(this, ...news) : null);
    this.#settles('bar', ...does);
    this.#settles('asks', asked?.id, asked?.answer);
    this.#settles('kept', text?.at, editing?.takesText);
    if (focused && !focused.checkVisibility()) this.#explain();   // the focus would be lost with its button
  }

  #drawLine(name, isShown) {
    const label = this.#parts[name + 'Label'];
    put(label.firstChild, say(this, name));
    reveal(label, isShown);
  }

  #asksHow({ message }) { return message ? 'asks_for' : 'asks'; }

  #drawAsk(asked) {
    const parts = this.#parts, isNew = asked && !asked.answer;
    if (asked?.id !== this.#asked) [this.#asked, parts.word.value] = [asked?.id, ''];   // these words were for somebody else
    parts.asks.dataset.kind = isNew ? 'warn' : asked ? 'info' : '';
    put(parts.asksSays, asked ? say(this, isNew ? this.#asksHow(asked) : 'promised', asked) : '');
    this.#drawLine('word', Boolean(isNew));
    for (const name of OF_ASK) {
      put(parts[name], say(this, name));
      reveal(parts[name], Boolean(name === 'pass' ? asked && this.#editing.canPass : isNew));
    }
  }

  #drawKept(text) {
    const parts = this.#parts;
    parts.kept.dataset.kind = text ? 'info' : '';
    put(parts.keptAt, text ? say(this, text.isLeft ? 'left' : text.submitted ? 'sent' : 'kept', text) : '');
    put(parts.keptOn, text?.version && !text.isCurrent ? say(this, 'older') : '');
    for (const name of OF_TEXT) {
      put(parts[name], say(this, name));
      reveal(parts[name], Boolean(text) && !(name === 'restore' && (text.isLeft || !this.#editing.takesText)));
    }
    const rows = this.#editing?.differences.flatMap(({ label, kept, now }) => [
      make('dt', { textContent: label }), make('dd', { textContent: kept, tabIndex: 0 }),
      ...now ? [make('dd', { textContent: say(this, 'now', { now }), tabIndex: 0 })] : []]) ?? [];
    if (parts.differences.textContent !== rows.map(row => row.textContent).join('')) parts.differences.replaceChildren(...rows);
  }

  // The tab of a page that has waited says that its turn has come.
  #drawTitle(news) {
    if (!news && this.#title === null) return;
    // A title that the page has set meanwhile is its own.
    const [before, ours] = this.#title ?? [], title = document.title === ours ? before : document.title;
    if (news || document.title === ours) document.title = news ? `● ${news} ${title}` : title;
    this.#title = news ? [title, document.title] : null;
  }
}

// ---- the badge ------------------------------------------------------------------------------

const BADGE = globalThis.document && styled(':host { white-space: nowrap } :host([data-state=free]) { display: none }');

/** The badges of one lock API: one request and one stream for all of them. */
class Badges {
  static #all = new Map();

  static of(base) {
    if (!Badges.#all.has(base)) Badges.#all.set(base, new Badges(base));
    return Badges.#all.get(base);
  }

  #base; #list = null; #isDue = false;
  #badges = new Map();   // by key
  #states = new Map();

  constructor(base) { this.#base = base; }

  add(key, badge) {
    if (!this.#badges.has(key)) this.#badges.set(key, new Set());
    this.#badges.get(key).add(badge);
    badge.show(this.#states.get(key) ?? null);
    this.#tell();
  }

  remove(key, badge) {
    this.#badges.get(key).delete(badge);
    this.#tell();
  }

  // Once for all badges that come and go together: one that is moved, as when a list is sorted, keeps its state.
  #tell() {
    if (this.#isDue) return;
    this.#isDue = true;
    queueMicrotask(() => {
      this.#isDue = false;
      for (const [key, badges] of this.#badges) if (!badges.size) this.#badges.delete(key) && this.#states.delete(key);
      const keys = [...this.#badges.keys()];
      if (!keys.length) {
        this.#list?.close();
        this.#list = null;
      } else if (this.#list) this.#list.show(keys);
      else this.#list = DocLock.list(this.#base + '/', keys, states => this.#learn(states));
    });
  }

  #learn(states) {
    for (const [key, state] of states) {
      if (!this.#badges.has(key)) continue;
      this.#states.set(key, state);
      for (const badge of this.#badges.get(key)) badge.show(state);
    }
  }
}

class DocLockBadge extends Base {
  static observedAttributes = ['lock', 'lang'];
  #place = null; #state = null;

  constructor() {
    super();
    this.attachShadow({ mode: 'open' }).adoptedStyleSheets.push(BADGE);
    this.shadowRoot.append(make('span', { part: 'text' }));
  }

  connectedCallback() { this.#join(); }
  disconnectedCallback() { this.#leave(); }

  attributeChangedCallback(name, before, value) {
    if (before === value) return;
    if (name === 'lang') return this.show(this.#state);
    this.#leave();
    if (this.isConnected) this.#join();
  }

  #join() {
    const url = this.getAttribute('lock');
    try {
      if (!url) throw new TypeError('The attribute `lock` is missing.');
      this.#place = place(url);
    } catch (error) {
      return console.error('doclock-badge:', error);
    }
    Badges.of(this.#place.base).add(this.#place.key, this);
  }

  #leave() {
    if (this.#place) Badges.of(this.#place.base).remove(this.#place.key, this);
    this.#place = null;
    this.show(null);
  }

  /** `null`: the server has not answered. */
  show(state) {
    this.#state = state;
    this.dataset.state = state?.state ?? 'unknown';
    const name = { held: 'other', mine: 'mine', mine_elsewhere: 'mine', frozen: 'frozen' }[state?.state];
    put(this.shadowRoot.firstChild, name ? say(this, name, name === 'frozen' ? state.frozen : state) : '');
  }
}

// ---- a page that follows a form, and has none -------------------------------------------------

class DocLockSaved extends Base {
  connectedCallback() {
    passed.forget();   // the next form follows this page
    DocLock.settleKept(this.getAttribute('lock')).catch(error => console.error('doclock-saved:', error));
  }
}

for (const [name, element] of [['doclock-form', DocLockForm], ['doclock-badge', DocLockBadge], ['doclock-saved', DocLockSaved]]) {
  if (globalThis.customElements && !customElements.get(name)) customElements.define(name, element);   // this file may be loaded twice
}
