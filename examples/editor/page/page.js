// The page of the example `editor`: the login, the list, and the open document.

import { DocLock } from '/locks/client.js';
import * as open from './document.js';
import { call, explain, session } from './server.js';
import { $, ago, clock, discard, name, notice, put, show } from './show.js';

const REFRESH_MS = 10000;   // the texts; changes of the locks are reported at once
const RETRY_MS = 3000;

let docs = [];       // from the last answer
const locks = new Map();       // collection/id -> the state of its lock
let trouble = '';    // why the list could not be loaded
let timer = 0, due = null, refreshing = null;

/** Loads the list; also the login (`who`) and the `lockStates`. Resolves when no older answer can arrive any more. */
function refresh(also) {
  due = { ...due, ...also };
  return refreshing ??= refreshAll();
}

async function refreshAll() {
  clearTimeout(timer);
  while (due) {
    const { who, lockStates } = due;
    due = null;
    const [list, me] = await Promise.all([call('GET', '/api/workitem'), who && call('GET', '/api/me')]);
    if (me?.ok) {
      session.me = me.body.name;
      show($('admin'), Boolean(me.body.admin));
      open.meet();
    }
    if (list.ok) {
      docs = list.body;
      rows.show(docs.map(doc => keyOf(doc.id)));
    }
    open.update(docs);
    if (list.ok && (lockStates || trouble)) rows.look();
    trouble = list.ok ? '' : explain(list.body) + '. Trying again.';
    render();
  }
  timer = setTimeout(() => document.hidden || refresh(), trouble ? RETRY_MS : REFRESH_MS);
  refreshing = null;
}

const keyOf = id => 'workitem/' + id;

const rows = DocLock.list('/locks', [], found => {
  for (const [key, lock] of found) locks.set(key, lock);
  render();
});

const BADGES = {
  free: () => ['Free'],
  frozen: () => ['No editing now'],
  held: lock => [name(lock.holder), ' is editing'],
  mine: (_, isOpen) => [isOpen ? 'You are editing' : 'You were just editing'],
  mine_elsewhere: () => ['You are editing in another tab'],
  unknown: () => ['Not known at the moment'],
};

function render() {
  show($('login'), session.me === null);
  show($('logged-in'), session.me !== null);
  show($('new'), session.me !== null);
  put($('me'), name(session.me));
  put($('trouble'), trouble);
  const list = $('list');
  docs.forEach((doc, i) => {
    const link = (list.children[i] ?? list.appendChild($('item').content.firstElementChild.cloneNode(true))).firstElementChild;
    const [title, excerpt, badge, when] = link.children;
    const lock = trouble ? null : locks.get(keyOf(doc.id)), state = lock?.state ?? 'unknown';
    link.href = '#/' + doc.id;
    if (open.id() === doc.id) link.setAttribute('aria-current', 'true'); else link.removeAttribute('aria-current');
    put(title, doc.title || 'Untitled');
    put(excerpt, doc.body.slice(0, 160));
    badge.dataset.state = state;
    put(badge, ...BADGES[state](lock, open.isEdited(doc.id)));
    put(when, lock?.since ? `since ${clock(lock.since)} · ${ago(lock.since)}` : '');
    when.title = lock?.since ? lock.since.toLocaleString() : '';
  });
  while (list.children.length > docs.length) list.lastChild.remove();
  document.body.classList.toggle('open', open.id() !== '');
  show($('empty'), open.id() === '');
  open.render();
}

async function route() {
  const id = location.hash.replace(/^#\/?/, ''), before = open.id();
  if (before === id) return;
  if (open.isDirty()) {
    location.hash = '#/' + before;
    if (!await discard()) return;
    open.close(true);
    location.hash = '#/' + id;
    return;
  }
  open.close();
  const isDots = /^\.\.?$/.test(id);   // a URL cannot end with such an id
  if (isDots) notice('There is no such document.');
  if (id && !isDots) open.open(id, docs.find(doc => doc.id === id));
  render();
  if (open.id()) $('heading').focus();
  if (!id) document.querySelector(`a[href="${CSS.escape('#/' + before)}"]`)?.focus();
}

$('login').addEventListener('submit', async event => {
  event.preventDefault();
  const answer = await call('POST', '/login', { json: { name: $('name').value.trim() } });
  if (!answer.ok) return notice('Not logged in: ' + explain(answer.body));
  DocLock.reconnect();
  await refresh({ who: true, lockStates: true });
  $('logout').focus();
  open.loggedIn();
});

$('logout').addEventListener('click', async () => {
  const answer = await call('POST', '/logout');
  if (!answer.ok && answer.status !== 401) return notice('Still logged in: ' + explain(answer.body));
  session.me = null;
  DocLock.reconnect();
  open.loggedOut();
  await refresh({ who: true, lockStates: true });
  $('name').focus();
});

$('new').addEventListener('click', async () => {
  const answer = await call('POST', '/api/workitem', { json: { title: '', body: '' } });
  if (!answer.ok) return notice('Not created: ' + explain(answer.body));
  await refresh({ lockStates: true });
  location.hash = '#/' + answer.body.id;
});

addEventListener('hashchange', route);
addEventListener('editor:mode', render);
addEventListener('editor:ended', () => refresh({ who: true }));
addEventListener('editor:saved', () => refresh());
const awake = () => refresh({ who: true, lockStates: true });
for (const event of ['focus', 'online', 'pageshow']) addEventListener(event, awake);
document.addEventListener('visibilitychange', () => { if (!document.hidden) awake(); });
setInterval(() => { if (!document.hidden) render(); }, 1000);   // the time that is left

refresh({ who: true, lockStates: true }).then(route);
