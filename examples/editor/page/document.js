// The open document. `view.mode` says how it is open:
//   wait    the server has not answered yet
//   read    the text only: nobody is logged in, or another person is editing
//   edit    this page holds the lock
//   lost    this page has lost the lock: the typed text stays in the fields
// Another person may have logged in since the document was opened: nothing is locked or saved for them.
// Each change of the state is followed by render(), which draws everything from the state.

import { DocLock } from '/locks/client.js';
import { call, docUrl, explain, lockUrl, session } from './server.js';
import { $, ago, clock, discard, left, name, notice, put, quote, reallyDelete, show, toast } from './show.js';

let view = null;   // {id, mode, lock, doc: as saved, holder: the last one seen, conflict, error, …}

export const id = () => view ? view.id : '';
export const isEdited = id => Boolean(view && view.id === id && view.mode === 'edit');
export const isDirty = () => Boolean(view && (view.mode === 'edit' || view.mode === 'lost') && !same(fields(), view.doc));

// ---- opening, holding, losing, leaving ------------------------------------------------------

/** Opens a document: to edit, now or when the lock is granted; or only to read, if nobody is logged in. */
export function open(id, doc) {
  const v = view = { id, doc, me: session.me, mode: 'wait', kept: [] };
  v.lock = DocLock.open(lockUrl(id), {
    wait: session.me !== null,
    acquire: session.me !== null,
    onheld: () => held(v),
    onlost: loss => lost(v, loss),
    onstale: () => held(v),
    onsaved: () => load(v),
    onchange: () => changed(v),
  });
  load(v);
}

async function load(v) {
  const answer = await call('GET', docUrl(v.id));
  if (view !== v || v.mode === 'edit') return;
  if (answer.ok) shows(v, answer);
  v.conflict = v.mode === 'lost' && isDirty();   // the saved text beside the typed one
  v.error = answer.ok ? '' : explain(answer.body);
  render();
}

function shows(v, { body, version }) {
  v.doc = body;
  v.lock.version = version;   // saves are written onto this version only
}

// This page holds the lock, for the first time or again: somebody may have saved in between. Or it is told so at a save.
async function held(v) {
  const answer = await call('GET', docUrl(v.id));
  if (view !== v || !v.lock.token) return;
  if (!answer.ok) {
    v.error = explain(answer.body);
    return render();
  }
  const typed = isDirty() ? fields() : null;
  v.conflict = Boolean(typed && (v.conflict || !same(answer.body, v.doc)) && !same(answer.body, typed));
  shows(v, answer);
  Object.assign(v, { error: '', saved: 0 });
  if (!typed) fill(answer.body);
  if (!typed) v.keeper?.then(keeper => keeper.saved());
  v.keeper ??= v.lock.keep($('form'), { onkept: text => offer(v, text), onproblem: () => { v.isUnkept = true; } });
  if (v.mode === 'read' && v.holder) {
    v.isNews = document.hidden;
    notice('You can edit now: ', name(v.holder), ' has finished.');
  }
  enter(v, 'edit');
}

/** Text that was typed on this document before, and never saved. */
function offer(v, text) {
  v.kept.push(text);
  if (view === v) render();
}

function lost(v, { kind }) {
  if (v.mode === 'edit' || v.mode === 'lost') enter(v, v.loggedOut && !isDirty() ? 'read' : 'lost');
  if (kind === 'session_ended') dispatchEvent(new Event('editor:ended'));
}

function changed(v) {
  if (view !== v) return;
  if (v.lock.state === 'held') v.holder = v.lock.holder;
  const isAnswered = v.lock.state !== 'unknown' || v.lock.offline || v.lock.problem;
  if (v.mode === 'wait' && isAnswered && !v.lock.token) enter(v, 'read');
  if (v.lock.state !== 'held' && $('holder').open) $('holder').close();
  render();
}

function enter(v, mode) {
  const focused = document.activeElement;
  v.mode = mode;
  dispatchEvent(new Event('editor:mode'));
  if (!focused.checkVisibility()) $('heading').focus();   // otherwise the focus stays where the person has put it
}

async function save(close) {
  const v = view, typed = fields();
  if (!v || v.mode !== 'edit' || v.busy) return;
  Object.assign(v, { busy: true, closing: close, error: '' });
  render();
  const url = docUrl(v.id) + (close ? '?release=true' : '');
  const answer = await call('PUT', url, { json: typed, lock: v.lock, releases: close });
  Object.assign(v, { busy: false, closing: false });
  if (view !== v || v.mode !== 'edit') return;   // lost: the page shows that already
  if (answer.ok) {
    Object.assign(v, { doc: { ...v.doc, ...typed }, saved: Date.now(), conflict: false });
    dispatchEvent(new Event('editor:saved'));
    if (close) {
      v.mode = 'closed';
      location.hash = '#/';
      toast(`“${typed.title}” is saved and free for others.`);
    }
  } else if (answer.status === 404) {
    v.gone = true;
    enter(v, 'lost');
  } else {
    v.error = explain(answer.body);
  }
  render();
}

async function remove() {
  const v = view;
  if (!v || v.mode !== 'edit' || v.busy || !await reallyDelete()) return;
  if (view !== v || v.mode !== 'edit') return;
  const title = v.doc.title || 'Untitled';
  Object.assign(v, { busy: true, closing: true, error: '' });
  render();
  const answer = await call('DELETE', docUrl(v.id), { lock: v.lock, releases: true });
  Object.assign(v, { busy: false, closing: false });
  if (view !== v || v.mode !== 'edit') return;
  if (answer.ok || answer.status === 404) {
    v.mode = 'closed';
    location.hash = '#/';
    dispatchEvent(new Event('editor:saved'));
    return toast(`“${title}” is deleted.`);
  }
  v.error = explain(answer.body);
  render();
}

export function close(isDiscarded) {
  view?.keeper?.then(keeper => isDiscarded && keeper.discard());
  view?.keeper?.then(keeper => keeper.close());
  view?.lock.close();
  view = null;
  if ($('holder').open) $('holder').close();
}

export function loggedIn() {
  if (!view) return;
  view.loggedOut = false;
  if (view.mode === 'read') view.lock.wait();
}

/** Somebody has logged in, perhaps in another tab. */
export function meet() {
  if (view?.mode === 'read' && session.me !== null && session.me !== view.me) openAgain();
}

function openAgain() {
  if (!view) return;
  const { id, doc } = view;
  close();
  open(id, doc);
}

export function loggedOut() {
  if (!view) return;
  view.loggedOut = true;
  view.lock.stopWaiting();
  view.lock.check();
}

/** Takes the texts as they are saved now. */
export function update(docs) {
  const fresh = view && docs.find(doc => doc.id === view.id);
  if (fresh && view.mode === 'read') Object.assign(view, { doc: fresh, error: '' });
}

// ---- the typed text -------------------------------------------------------------------------

const fields = () => ({ title: $('title').value, body: $('body').value });
const lines = text => text.replace(/\r\n?/g, '\n');   // as a textarea returns them
const same = (a, b) => a.title === b.title && lines(a.body) === lines(b.body);

function fill(doc) {
  $('title').value = doc.title;
  $('body').value = doc.body;
}

async function copyText() {
  const text = $('title').value + '\n\n' + $('body').value;
  try {
    await navigator.clipboard.writeText(text);
    toast('Your text is in the clipboard.');
  } catch {   // not a secure context: leave the text selected
    $('body').select();
    const copied = document.execCommand('copy');
    notice(copied ? 'The text is in the clipboard, without the title.' : 'The text is selected: copy it with the keyboard.');
  }
}

// ---- drawing --------------------------------------------------------------------------------

// The banner above the document: {kind, title, text, more, and the labels of the buttons enter, wait, holder}.
function banner(v) {
  const { mode, lock, error } = v;
  if (mode === 'lost') return bannerOfLoss(v);
  if (mode === 'edit' && error) return { kind: 'bad', title: ['Not saved.'], text: [`${error}. Your text is kept.`] };
  if (mode === 'edit' && lock.ending) {
    const { why, at, canExtend } = lock.ending;
    return {
      kind: 'held', title: [`Your lock ends in ${left(at)}.`],
      text: [{
        idle: 'Nobody has touched this page for a while.',
        session: 'Your login ends then. Save your text, and log in again.',
        max_hold: 'Nobody may lock a document for longer. Save your text.',
      }[why], v.isUnkept ? '' : ' Your text stays in this browser.'], enter: canExtend && 'Go on editing',
    };
  }
  if (mode === 'edit' && v.conflict) {
    return {
      kind: 'held', title: ['This document was changed while you did not have the lock.'],
      text: ['Your text is in the fields, the saved version is below. Saving replaces it with yours.'],
    };
  }
  if (mode !== 'read') return { kind: '' };
  if (error && (lock.token || !v.doc)) return { kind: 'bad', title: [error + '.'], enter: session.me && 'Try again' };
  if (lock.state === 'held') {
    return {
      kind: 'held', title: [name(lock.holder), ` is editing this${since(lock)}.`],
      text: [!session.me ? 'You can read it. To edit it later, log in.'
        : lock.waiting ? 'You can read it now. The page changes automatically when it is your turn to edit.'
        : 'You can read it. It becomes free when they finish, log out or become idle.'],
      more: `If they become idle now: in ${left(lock.expiresAt)} at the latest.`,
      wait: session.me && (lock.waiting ? 'Only read' : 'Edit when it is free'), holder: holderLabel(lock),
    };
  }
  if (!session.me) return { kind: 'info', title: ['Log in to edit.'], text: ['Without a login you can read everything.'], enter: 'Log in' };
  if (lock.state === 'mine_elsewhere') {
    return {
      kind: 'held', title: ['You are editing this in another tab.'],
      text: ['If you edit here, editing ends there; the text that you typed there stays in that tab.'], enter: 'Edit here',
    };
  }
  if (lock.token) return { kind: '' };   // the document is on its way
  if (lock.state === 'frozen') {
    const { reason, until } = lock.frozen;
    return {
      kind: 'info', title: [`No editing until ${clock(until)}.`], text: reason ? [quote(reason)] : [],
      more: 'The page shows when editing is possible again.',
    };
  }
  if (lock.state === 'free') {
    return {
      kind: 'free', title: v.holder ? [name(v.holder), ' is no longer editing: this document is free now.'] : ['This document is free.'],
      text: lock.problem ? [explain(lock.problem) + '.'] : [], enter: 'Edit now',
    };
  }
  return {
    kind: 'info', title: ['At the moment it is not known whether somebody is editing this.'],
    text: lock.problem ? [explain(lock.problem) + '.'] : lock.offline ? ['Trying again.'] : [], enter: lock.busy ? '' : 'Try again',
  };
}

const isOfAnother = ({ me }) => me !== null && session.me !== null && me !== session.me;

function bannerOfLoss(v) {
  const { lock, gone } = v;
  const kept = isDirty() ? ' Your text is still below and not saved.' : ' You had no unsaved changes.';
  const bad = (title, text, buttons) => ({ kind: 'bad', title, text: [...text, kept], ...buttons });
  if (gone) return bad(['This document no longer exists.'], []);
  if (!session.me) return bad(['Your session ended, and your lock is gone.'], ['Log in, then open the document again.'], { enter: 'Edit again' });
  if (isOfAnother(v)) {
    const text = isDirty() ? ['You can copy the text, but not save it as this person.'] : [];
    return bad(['Somebody else is logged in now.'], text, { enter: 'Open again' });
  }
  if (lock.state === 'mine_elsewhere') {
    return bad(['You are editing this in another tab.'], ['This tab no longer has the lock.'], { enter: 'Edit here' });
  }
  const { kind, by, reason } = lock.lost ?? {};
  const why = by ? [name(by), lock.state === 'held' ? ' has taken it over.' : ' has broken your lock.']
    : [kind === 'expired' ? 'Your lock has expired.' : 'Your lock is gone.'];
  if (reason) why.push(' Reason: ', quote(reason), '.');
  if (lock.state === 'held') {
    const wait = lock.waiting ? 'Stop waiting' : 'Edit when it is free';
    return bad([name(lock.holder), ` is editing this now${since(lock)}.`], why, { wait, holder: holderLabel(lock) });
  }
  if (lock.state === 'free') why.push(' Nobody is editing the document now.');
  if (lock.state === 'frozen') why.push(` No editing until ${clock(lock.frozen.until)}.`);
  return bad(['Your lock on this document is gone.'], why, { enter: 'Edit again' });
}

const since = lock => lock.since ? `, since ${clock(lock.since)}` : '';
const holderLabel = lock => lock.mayTakeOver ? 'Take over…' : 'Details…';

export function render() {
  const v = view;
  show($('doc'), Boolean(v));
  if (v) v.isNews &&= document.hidden;
  document.title = (v?.isNews ? 'You can edit now: ' : '') + (v?.doc ? v.doc.title + ' – ' : '') + 'Editor';
  if (!v) return;
  const { lock } = v, isEditing = v.mode === 'edit' || v.mode === 'lost';
  const { kind, title = [], text = [], more = '', ...buttons } = banner(v);
  const read = lock.waiting && lock.state === 'held' ? 'Read only · waiting' : 'Read only';
  $('doc').dataset.mode = v.mode;
  put($('kicker'), { wait: 'Opening…', read, edit: 'Editing', lost: 'Not locked' }[v.mode] ?? '');
  put($('heading'), v.doc ? v.doc.title || 'Untitled' : v.mode === 'wait' ? '' : 'Document');
  $('banner').dataset.kind = kind;
  $('banner-live').setAttribute('aria-live', kind === 'bad' ? 'assertive' : 'polite');
  put($('banner-title'), ...title);
  put($('banner-text'), ...text);
  put($('banner-more'), more);
  for (const [button, label] of [[$('enter'), buttons.enter], [$('wait'), buttons.wait], [$('take-over'), buttons.holder]]) {
    if (label) put(button, label);
    show(button, Boolean(label));
  }
  $('enter').disabled = lock.busy || (v.mode === 'lost' && !session.me);
  show($('copy'), v.mode === 'lost' && isDirty() || Boolean(v.conflict));
  show($('read'), !isEditing && Boolean(v.doc));
  put($('read'), v.doc?.body ?? '');
  show($('form'), isEditing);
  if (isEditing) renderForm(v);
  if ($('holder').open) renderHolder(lock);
}

function renderForm(v) {
  const { lock } = v;
  for (const id of ['save', 'save-close', 'delete']) $(id).disabled = v.mode !== 'edit' || Boolean(v.busy);
  for (const id of ['title', 'body']) $(id).readOnly = Boolean(v.closing);
  show($('saved'), Boolean(v.conflict));
  const [kept] = v.kept;
  show($('kept'), Boolean(kept));
  put($('kept-when'), kept ? `Typed ${ago(kept.at)}, and not saved` : '');
  put($('kept-text'), kept ? kept.differences.map(it => it.kept).join('\n\n') : '');
  put($('saved-title'), v.doc.title);
  put($('saved-body'), v.doc.body);
  put($('save-state'), v.busy ? 'Working…' : isDirty() ? 'Unsaved changes' : v.saved ? `Saved at ${clock(v.saved)}` : '');
  $('save-state').dataset.dirty = isDirty();
  put($('close'), isDirty() ? 'Close without saving' : 'Close');
  $('lock-line').dataset.offline = lock.offline;
  put($('lock-line'), v.mode !== 'edit' ? ''
    : lock.state !== 'mine' ? 'The lock may have expired. Your text is kept; asking the server.'
    : lock.offline ? `No connection. The document stays locked for you until ${clock(lock.expiresAt)}; trying again.`
    : lock.problem ? `${explain(lock.problem)}. The document stays locked for you until ${clock(lock.expiresAt)}.`
    : `Locked for you as long as this page is open; without a connection until ${clock(lock.expiresAt)}.`);
}

function renderHolder(lock) {
  put($('holder-who'), name(lock.holder));
  put($('holder-since'), lock.since ? `${clock(lock.since)} · ${ago(lock.since)}` : 'not known');
  put($('holder-until'), `in ${left(lock.expiresAt)}, if they become idle`);
  put($('holder-note'), lock.mayTakeOver
    ? 'A takeover ends their editing at once. They see your name, and keep the text that they have typed.'
    : 'Only they or an administrator can end this.');
  show($('holder-take'), lock.mayTakeOver && session.me !== null);
  $('holder-take').disabled = lock.busy;
}

// ---- the buttons ----------------------------------------------------------------------------

$('enter').addEventListener('click', () => {
  const { lock } = view;
  if (!session.me) $('name').focus();
  else if (isOfAnother(view)) isDirty() ? discard().then(sure => sure && openAgain()) : openAgain();
  else if (lock.ending) lock.extend();
  else if (lock.state === 'mine_elsewhere') lock.takeOver();
  else lock.acquire();
});
$('wait').addEventListener('click', () => view.lock.waiting ? view.lock.stopWaiting() : view.lock.wait());
$('take-over').addEventListener('click', () => {
  renderHolder(view.lock);
  $('holder').showModal();
});
$('holder-take').addEventListener('click', async () => {
  const { lock } = view;
  if (await lock.takeOver() === 'mine') return;
  if ($('holder').open) $('holder').close();
  notice(lock.problem ? explain(lock.problem) : 'The takeover failed.');
});
$('copy').addEventListener('click', copyText);
$('form').addEventListener('submit', event => { event.preventDefault(); save(false); });
$('form').addEventListener('input', () => { view.saved = 0; render(); });
$('save-close').addEventListener('click', () => save(true));
$('delete').addEventListener('click', remove);
$('close').addEventListener('click', () => { location.hash = '#/'; });
for (const what of ['restore', 'discard']) {
  $('kept-' + what).addEventListener('click', () => {
    view.kept.shift()[what]();
    render();
    $('body').focus();
  });
}
$('use-saved').addEventListener('click', async () => {
  if (!await discard()) return;
  fill(view.doc);
  (await view.keeper)?.saved();
  view.conflict = false;
  render();
  $('heading').focus();
});

addEventListener('keydown', event => {
  if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === 's' && isEdited(id())) {
    event.preventDefault();
    save(false);
  }
});
addEventListener('beforeunload', event => { if (isDirty()) event.preventDefault(); });
