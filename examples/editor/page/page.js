// The page of the example `editor`. At most one document is open; `view.mode` says how:
//   wait    asking the server
//   read    the text only: nobody is logged in, or somebody else is editing
//   edit    this page holds the lock and keeps it with a heartbeat
//   lost    the lock went while we held it: what was typed stays in the fields
// Whoever changes the state calls render(), which draws everything from it.
'use strict';

const REFRESH_MS = 4000, HEARTBEAT_MIN_MS = 1000, HEARTBEAT_MAX_MS = 60000, REQUEST_MS = 10000;
const $ = id => document.getElementById(id);
const docUrl = id => '/api/workitem/' + encodeURIComponent(id);
const lockUrl = id => '/locks/workitem/' + encodeURIComponent(id);

let me = null;            // who is logged in
let docs = [];            // the list, as of the last answer
let locks = {};           // id -> {state, holder, since, expires_in_ms, at}
let view = null;          // the open document: {id, mode, doc, token, ttl, until, …}
let trouble = '';         // why the list could not be refreshed
let skew = 0;             // the server's clock minus ours
let seq = 0;              // answers to an older refresh are dropped
let pollTimer = 0, toastTimer = 0;
let releasing = Promise.resolve();
let reloaded = sessionStorage.getItem('editing');   // what this very tab was editing before a reload
sessionStorage.removeItem('editing');
const tabs = new BroadcastChannel('editor');         // the other tabs of this browser

// ---- talking to the server ------------------------------------------------------------------

async function call(method, url, { json, token } = {}) {
  const headers = {};
  if (json) headers['Content-Type'] = 'application/json';
  if (token) headers['Lock-Token'] = token;
  try {
    const answer = await fetch(url, {
      method, headers, body: json && JSON.stringify(json), cache: 'no-store', signal: AbortSignal.timeout(REQUEST_MS),
    });
    const date = Date.parse(answer.headers.get('Date'));
    if (date) skew = date - Date.now();
    const text = await answer.text();
    let body = {};
    try { body = JSON.parse(text); } catch { /* no content, or not JSON */ }
    return { ok: answer.ok, status: answer.status, body, token: answer.headers.get('Lock-Token') };
  } catch {
    return { ok: false, status: 0, body: {} };
  }
}

function explain(answer) {
  if (answer.status === 503) return 'The database cannot be reached';
  if (answer.status === 0) return 'The server cannot be reached';
  if (answer.status === 404) return 'There is no such document';
  return answer.body.detail || answer.body.title || `The server answered ${answer.status}`;
}

const note = (id, lock) => { locks[id] = { ...lock, at: Date.now() }; };

async function refresh(whoToo) {
  clearTimeout(pollTimer);
  const mine = ++seq;
  const [list, who] = await Promise.all([call('GET', '/api/workitem'), whoToo && call('GET', '/api/me')]);
  const states = list.ok ? await Promise.all(list.body.map(d => call('GET', lockUrl(d.id)))) : [];
  if (who && who.ok) me = who.body.name;
  if (mine !== seq) return;
  trouble = list.ok ? '' : explain(list) + '. Trying again.';
  if (list.ok) {
    docs = list.body;
    docs.forEach((d, i) => note(d.id, states[i].ok ? states[i].body : {}));
    const fresh = view && docs.find(d => d.id === view.id);
    if (fresh && view.mode === 'read') Object.assign(view, { doc: fresh, error: '' });
  }
  render();
  pollLater();
}

function pollLater() {
  clearTimeout(pollTimer);
  pollTimer = setTimeout(() => document.hidden ? pollLater() : refresh(), REFRESH_MS);
}

// ---- opening, keeping, losing, leaving ------------------------------------------------------

// Opens a document for editing if it is free, else for reading. `force` is a person's click on the
// button: it asks for the lock again, and takes it from another tab of the same person.
async function enter(v, force) {
  if (v.busy) return;
  v.busy = true;
  render();
  await releasing;
  const sent = Date.now();
  const lock = (await call('GET', lockUrl(v.id))).body;
  const again = reloaded === v.id && lock.state === 'mine';
  reloaded = null;
  let answer = null;
  if (me && (force || again || lock.state === 'free')) {
    if (lock.state === 'mine') {   // a new acquisition, so that the other tab's token no longer fits
      tabs.postMessage(v.id);
      await call('POST', lockUrl(v.id) + '/release');
    }
    answer = await call('POST', docUrl(v.id) + '/edit');
  }
  v.busy = false;
  if (view !== v) {
    if (answer && answer.ok && (!view || view.id !== v.id)) release(v.id, answer.token);
    return;
  }
  seq++;
  if (answer && answer.ok) {
    const state = await call('GET', lockUrl(v.id));
    note(v.id, state.ok ? state.body : { state: 'mine' });
    granted(v, answer, sent, state.body.expires_in_ms || 15000);
  } else {
    await refused(v, answer, lock);
  }
  pollLater();
}

function granted(v, answer, sent, ttl) {
  const typed = dirty() ? fields() : null;
  const changed = typed && !same(answer.body, v.doc) && !same(answer.body, typed);
  Object.assign(v, { doc: answer.body, token: answer.token, ttl, until: sent + ttl, conflict: changed, offline: false, error: '', saved: 0 });
  if (!typed) fill(answer.body);
  mode(v, 'edit');
  beatLater(v);
}

async function refused(v, answer, lock) {
  const problem = answer && answer.status !== 423 && answer.status !== 401 ? answer : null;
  if (answer && answer.status === 401) me = null;
  if (answer && answer.status === 423) lock = answer.body;
  note(v.id, lock);
  if (v.mode === 'lost' || dirty()) {
    v.mode = 'lost';
    toast(problem ? explain(problem) + '. Your text is kept.' : me ? `${holder(v.id)} is editing this now. Your text is kept.` : 'Log in first. Your text is kept.');
    return render();
  }
  const doc = await call('GET', docUrl(v.id));
  if (view !== v) return;
  if (doc.ok) v.doc = doc.body;
  v.error = problem || !doc.ok ? explain(problem || doc) : '';
  if (v.mode === 'read' && lock.state === 'held') toast(`${holder(v.id)} is still editing.`);
  v.mode === 'read' ? render() : mode(v, 'read');
}

// The server renews once in a third of the ttl: a beat a little later than that is never for nothing.
function beatLater(v, ms = Math.min(Math.max(v.ttl / 3 + 250, HEARTBEAT_MIN_MS), HEARTBEAT_MAX_MS)) {
  clearTimeout(v.timer);
  v.timer = setTimeout(() => beat(v), ms);
}

async function beat(v = view) {
  if (!v || v !== view || v.mode !== 'edit' || v.beating) return;
  v.beating = true;
  const sent = Date.now();   // from before the request: we give up before the server lets another in
  const token = v.token;
  const locks = { ['workitem/' + v.id]: token.replace(/^<urn:uuid:|>$/g, '') };
  const answer = await call('POST', '/locks/heartbeat', { json: { locks } });
  v.beating = false;
  if (v !== view || v.mode !== 'edit' || v.token !== token) return;
  const held = answer.ok && answer.body.held.find(l => l.collection === 'workitem' && l.id === v.id);
  if (held) Object.assign(v, { until: sent + held.expires_in_ms, offline: false });
  else if (v.closing) return;
  else if (answer.ok || answer.status === 401) return lost(v, answer);
  else v.offline = true;
  beatLater(v, held ? undefined : 3000);
  render();
}

function lost(v, answer = {}) {
  clearTimeout(v.timer);
  if (answer.status === 401) me = null;
  if (answer.status === 423) note(v.id, answer.body);
  Object.assign(v, { gone: answer.status === 404, error: '' });
  mode(v, 'lost');
  refresh(true);   // tells who has it now
}

function release(id, token) {
  note(id, { state: 'free' });
  releasing = call('POST', lockUrl(id) + '/release', { token }).then(() => refresh());
}

async function save(close) {
  const v = view, typed = fields();
  if (!v || v.mode !== 'edit' || v.busy) return;
  Object.assign(v, { busy: true, closing: close, error: '' });
  render();
  const answer = await call('PUT', docUrl(v.id) + (close ? '?release=true' : ''), { json: typed, token: v.token });
  Object.assign(v, { busy: false, closing: false });
  if (view !== v || v.mode !== 'edit') return;
  if (answer.ok) {
    Object.assign(v, { doc: { ...v.doc, ...typed }, saved: Date.now(), conflict: false });
    if (close) {
      v.mode = 'closed';
      note(v.id, { state: 'free' });
      location.hash = '#/';
      toast(`“${typed.title}” is saved and free for others.`);
    }
    refresh();
  } else if ([401, 404, 409, 412, 423].includes(answer.status)) {
    return lost(v, answer);
  } else {
    v.error = explain(answer);
  }
  render();
}

function leave() {
  const v = view;
  view = null;
  if (!v) return;
  clearTimeout(v.timer);
  if (v.mode === 'edit') release(v.id, v.token);
}

async function route() {
  const id = location.hash.replace(/^#\/?/, '');
  if ((view ? view.id : '') === id) return;
  if (dirty()) {
    location.hash = '#/' + view.id;
    if (!await discard()) return;
    leave();
    location.hash = '#/' + id;
    return;
  }
  const from = view && document.querySelector(`a[href="${CSS.escape('#/' + view.id)}"]`);
  leave();
  if (id) {
    view = { id, mode: 'wait', doc: docs.find(d => d.id === id) };
    enter(view);
  }
  render();
  if (!id && from) from.focus();
}

// ---- what was typed -------------------------------------------------------------------------

const fields = () => ({ title: $('title').value, body: $('body').value });
const lines = text => text.replace(/\r\n?/g, '\n');   // as a textarea gives them back
const same = (a, b) => a.title === b.title && lines(a.body) === lines(b.body);
const dirty = () => Boolean(view && (view.mode === 'edit' || view.mode === 'lost') && !same(fields(), view.doc));

function fill(doc) {
  $('title').value = doc.title;
  $('body').value = doc.body;
}

function discard() {
  const ask = $('ask');
  if (ask.open) return Promise.resolve(false);
  ask.returnValue = 'no';
  ask.showModal();
  return new Promise(done => ask.addEventListener('close', () => done(ask.returnValue === 'yes'), { once: true }));
}

async function copyText() {
  const text = $('title').value + '\n\n' + $('body').value;
  try {
    await navigator.clipboard.writeText(text);
    toast('Your text is in the clipboard.');
  } catch {   // not a secure context: leave it selected
    $('body').select();
    toast(document.execCommand('copy') ? 'The text is in the clipboard, without the title.' : 'The text is selected: copy it with the keyboard.');
  }
}

// ---- drawing --------------------------------------------------------------------------------

const clock = ms => new Date(ms).toLocaleTimeString([], { hour: '2-digit', minute: '2-digit' });
const holder = id => locks[id]?.holder?.label || 'Somebody';

function since(lock) {
  const at = Date.parse(lock.since);
  if (!at) return { at: '', ago: '', full: '' };
  const min = Math.floor((Date.now() + skew - at) / 60000);
  const ago = min < 1 ? 'just now' : min < 60 ? `${min} min ago` : min < 1440 ? `${Math.floor(min / 60)} h ago` : `${Math.floor(min / 1440)} d ago`;
  return { at: ' since ' + clock(at), ago, full: new Date(at).toLocaleString() };
}

function left(lock) {   // 2:10
  const s = Math.max(0, Math.ceil((lock.expires_in_ms - (Date.now() - lock.at)) / 1000));
  return `${Math.floor(s / 60)}:${String(s % 60).padStart(2, '0')}`;
}

// The banner over the open document: [kind, title, text, more (not read aloud), label of the button]
function banner(v) {
  const lock = locks[v.id] || {}, name = holder(v.id), t = since(lock);
  if (v.mode === 'lost') {
    const kept = dirty() ? ' What you typed is still below and not saved.' : ' You had no unsaved changes.';
    const why = v.gone ? ['This document no longer exists.', '']
      : !me ? ['Your session ended, your lock is gone.', 'Log in, then open the document again.']
      : lock.state === 'held' ? [`${name} is editing this now.`, `Your lock is gone; ${name} has had it${t.at}.`]
      : lock.state === 'mine' ? ['You are editing this in another tab.', 'This tab no longer has the lock.']
      : ['Your lock on this document is gone.', 'It ran out or was removed. Nobody has taken the document so far.'];
    return ['bad', why[0], why[1] + kept, '', v.gone ? '' : 'Open again'];
  }
  if (v.mode === 'edit' && v.error) return ['bad', 'Not saved.', v.error + '; your text is kept, try again.', '', ''];
  if (v.mode === 'edit' && v.conflict) {
    return ['held', 'This document was changed while you did not have the lock.', 'Your text is in the fields, the saved version is below. Saving replaces it with yours.', '', ''];
  }
  if (v.mode === 'read' && v.error) return ['bad', v.error + '.', '', '', 'Try again'];
  if (v.mode !== 'read') return ['', '', '', '', ''];
  if (lock.state === 'held') {
    v.waited = name;
    return ['held', `${name} is editing this${t.at && `,${t.at}`}.`, `You can read it; it becomes free when they finish, log out or fall silent.${me ? '' : ' To edit it then, log in.'}`,
      lock.expires_in_ms ? `If they fall silent now: in ${left(lock)} at the latest.` : '', me ? 'Try again' : ''];
  }
  if (!me) return ['info', 'Log in to edit.', 'Without that you can read everything.', '', 'Log in'];
  if (lock.state === 'mine') return ['held', 'You are editing this in another tab.', 'Editing here ends it there; what you typed there stays in that tab.', '', 'Edit here'];
  if (lock.state !== 'free') return ['info', 'Whether somebody is editing this is not known at the moment.', '', '', 'Try again'];
  return ['free', v.waited ? `${v.waited} is no longer editing: this document is free now.` : 'This document is free.', '', '', 'Edit now'];
}

function put(el, text) { if (el.textContent !== text) el.textContent = text; }
function show(el, on) { if (el.hidden === on) el.hidden = !on; }

function mode(v, next) {
  v.mode = next;
  render();
  if (next !== 'lost') $('heading').focus();   // never take the focus from somebody who is typing
}

function render() {
  show($('login'), me === null);
  show($('logged-in'), me !== null);
  put($('me'), me || '');
  put($('trouble'), trouble);
  renderList();
  const v = view;
  document.body.classList.toggle('open', Boolean(v));
  show($('doc'), Boolean(v));
  show($('empty'), !v);
  document.title = (v && v.doc ? v.doc.title + ' – ' : '') + 'Editor';
  if (v) renderDoc(v);
}

function renderList() {
  const list = $('list');
  docs.forEach((doc, i) => {
    let item = list.children[i];
    if (!item) {
      item = document.createElement('li');
      const link = item.appendChild(document.createElement('a'));
      for (const part of ['title', 'excerpt', 'badge', 'when']) link.appendChild(document.createElement('span')).className = part;
      list.appendChild(item);
    }
    const link = item.firstChild, [title, excerpt, badge, when] = link.children, lock = locks[doc.id] || {}, t = since(lock);
    link.href = '#/' + doc.id;
    if (view && view.id === doc.id) link.setAttribute('aria-current', 'true'); else link.removeAttribute('aria-current');
    put(title, doc.title || 'Untitled');
    put(excerpt, doc.body.slice(0, 160));
    const here = view && view.id === doc.id && view.mode === 'edit';
    badge.dataset.state = trouble ? 'unknown' : lock.state || 'unknown';
    put(when, !trouble && t.at ? `${t.at} · ${t.ago}`.trim() : '');
    when.title = t.full;
    put(badge, { free: 'Free', mine: here ? 'You are editing' : 'You are editing in another tab', unknown: 'Not known at the moment',
      held: `${holder(doc.id)} is editing` }[badge.dataset.state]);
  });
  while (list.children.length > docs.length) list.lastChild.remove();
}

function renderDoc(v) {
  const editing = v.mode === 'edit' || v.mode === 'lost';
  const [kind, title, text, more, label] = banner(v);
  put($('kicker'), { wait: 'Opening…', read: 'Read only', edit: 'Editing', lost: 'Not locked' }[v.mode] || '');
  put($('heading'), v.doc ? v.doc.title || 'Untitled' : v.mode === 'wait' ? '' : 'Document');
  $('doc').dataset.mode = v.mode;
  $('banner').dataset.kind = kind;
  $('banner-live').setAttribute('aria-live', kind === 'bad' ? 'assertive' : 'polite');
  put($('banner-title'), title);
  put($('banner-text'), text);
  put($('banner-more'), more);
  put($('enter'), label);
  show($('enter'), Boolean(label));
  $('enter').disabled = Boolean(v.busy) || (v.mode === 'lost' && !me);
  show($('copy'), v.mode === 'lost' || Boolean(v.conflict));
  show($('read'), !editing && Boolean(v.doc));
  put($('read'), v.doc ? v.doc.body : '');
  show($('form'), editing);
  if (!editing) return;
  for (const id of ['save', 'save-close']) $(id).disabled = v.mode !== 'edit' || Boolean(v.busy);
  for (const id of ['title', 'body']) $(id).readOnly = Boolean(v.closing);
  show($('saved'), Boolean(v.conflict));
  put($('saved-title'), v.doc.title);
  put($('saved-body'), v.doc.body);
  put($('save-state'), v.busy ? 'Working…' : dirty() ? 'Unsaved changes' : v.saved ? `Saved at ${clock(v.saved)}` : '');
  $('save-state').dataset.dirty = dirty();
  put($('close'), dirty() ? 'Close without saving' : 'Close');
  $('lock-line').dataset.offline = Boolean(v.offline);
  put($('lock-line'), v.mode !== 'edit' ? ''
    : !v.offline ? `Locked for you as long as this page is open; without a connection until ${clock(v.until)}.`
    : v.until > Date.now() ? `No connection. The document stays locked for you until ${clock(v.until)}; trying again.`
    : 'No connection, and the lock may have run out. Your text is kept; trying again.');
}

function toast(text) {
  clearTimeout(toastTimer);
  put($('toast'), text);
  toastTimer = setTimeout(() => put($('toast'), ''), 6000);
}

// ---- events ---------------------------------------------------------------------------------

$('login').addEventListener('submit', async event => {
  event.preventDefault();
  const answer = await call('POST', '/login', { json: { name: $('name').value.trim() } });
  if (!answer.ok) return toast('Not logged in: ' + explain(answer));
  await refresh(true);
  $('logout').focus();
  if (view && view.mode === 'read') enter(view);
});

$('logout').addEventListener('click', async () => {
  const answer = await call('POST', '/logout');
  if (!answer.ok && answer.status !== 401) return toast('Still logged in: ' + explain(answer));
  me = null;
  if (view && view.mode === 'edit') {
    clearTimeout(view.timer);
    mode(view, dirty() ? 'lost' : 'read');
  }
  await refresh(true);
  $('name').focus();
});

$('enter').addEventListener('click', () => me ? enter(view, true) : $('name').focus());
$('copy').addEventListener('click', copyText);
$('form').addEventListener('submit', event => { event.preventDefault(); save(false); });
$('form').addEventListener('input', () => { view.saved = 0; render(); });
$('save-close').addEventListener('click', () => save(true));
$('close').addEventListener('click', () => { location.hash = '#/'; });
$('use-saved').addEventListener('click', async () => {
  if (!await discard()) return;
  fill(view.doc);
  view.conflict = false;
  render();
  $('heading').focus();
});

addEventListener('keydown', event => {
  if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === 's' && view && view.mode === 'edit') {
    event.preventDefault();
    save(false);
  }
});
addEventListener('hashchange', route);
addEventListener('beforeunload', event => { if (dirty()) event.preventDefault(); });
// Only `pagehide` means that the page goes; a hidden tab is still somebody's work.
addEventListener('pagehide', () => {
  if (!view || view.mode !== 'edit') return;
  sessionStorage.setItem('editing', view.id);
  // With the token: a beacon that comes late must not release what another tab has taken since.
  navigator.sendBeacon(lockUrl(view.id) + '/release', JSON.stringify({ token: view.token }));
});
addEventListener('pageshow', event => {
  if (!event.persisted) return;
  sessionStorage.removeItem('editing');
  if (view && view.mode === 'edit') {   // back again: `pagehide` has released the lock
    view.mode = 'lost';
    enter(view, true);
  }
  awake();
});
for (const name of ['focus', 'online']) addEventListener(name, awake);
document.addEventListener('visibilitychange', () => { if (!document.hidden) awake(); });
tabs.addEventListener('message', ({ data }) => { if (view && view.mode === 'edit' && view.id === data) lost(view); });

function awake() {
  beat();
  refresh(true);
}

refresh(true).then(route);
setInterval(() => { if (!document.hidden) render(); }, 1000);
