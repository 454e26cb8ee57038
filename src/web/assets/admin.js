// The administrator's table of all locks, as of now. Mounted under any scope: all URLs are relative.

import { DocLock } from './client.js';

const RELOAD_MS = 15_000;   // renewals are not announced
const $ = id => document.getElementById(id);
const rows = new Map();     // name -> {lock, row}
// Locks of foreign programs have no token.
const nameOf = lock => lock.token ?? lock.key;
let list = { locks: [], more: false };
let isLive = false, timer = 0, loading = false, loadAgain = false, breaking = null;

async function ask(method, path, body) {
  const init = { method, cache: 'no-store', signal: AbortSignal.timeout(10_000) };
  if (body) Object.assign(init, { headers: { 'Content-Type': 'application/json' }, body: JSON.stringify(body) });
  try {
    const answer = await fetch(new URL(path, import.meta.url), init);
    const text = await answer.text(), date = Date.parse(answer.headers.get('Date'));
    return { ok: answer.ok, status: answer.status, at: Date.now(), date, body: text ? JSON.parse(text) : {} };
  } catch {
    return { ok: false, status: 0, body: {} };
  }
}

function explain({ status, body }) {
  if (status === 0) return 'The server cannot be reached.';
  if (status === 503) return 'The database cannot be reached.';
  if (status === 401 || status === 403) return body.detail || 'You may not do this.';
  return body.detail || body.title || `The server answered ${status}.`;
}

// Several events at once, as when a session ends, lead to one reload.
function reloadIn(ms) {
  clearTimeout(timer);
  timer = setTimeout(reload, ms);
}

async function reload() {
  clearTimeout(timer);
  if (document.hidden) return;   // becoming visible calls again
  if (loading) return void (loadAgain = true);
  loading = true;
  loadAgain = false;
  const answer = await ask('GET', 'admin.json');
  loading = false;
  put($('trouble'), answer.ok ? '' : explain(answer));
  if (answer.ok) {
    const skew = Math.abs(answer.at - answer.date) > 2000 ? answer.at - answer.date : 0;
    list = answer.body;
    for (const lock of list.locks) {
      lock.from = Date.parse(lock.since) + skew;
      lock.until = answer.at + lock.expires_in_ms;
    }
    list.locks.sort((a, b) => a.from - b.from);
  } else {
    isLive = false;
    if (answer.status === 401 || answer.status === 403) list.locks = [];
  }
  render();
  reloadIn(loadAgain ? 200 : answer.ok ? RELOAD_MS : 3000);
}

// ---- drawing --------------------------------------------------------------------------------

function put(el, text) { if (el.textContent !== text) el.textContent = text; }

function age(ms) {
  const min = Math.max(0, Math.floor(ms / 60_000)), h = Math.floor(min / 60), d = Math.floor(h / 24);
  return d ? `${d} d ${h % 24} h` : h ? `${h} h ${min % 60} min` : min ? `${min} min` : '< 1 min';
}

function left(ms) {
  const s = Math.max(0, Math.ceil(ms / 1000));
  return `${Math.floor(s / 60)}:${String(s % 60).padStart(2, '0')}`;
}

const label = lock => lock.holder?.label || 'Unknown';

function matches(lock, words) {
  const text = `${lock.key} ${label(lock)} ${lock.mode}`.toLowerCase();
  return words.every(word => text.includes(word));
}

function render() {
  const words = $('filter').value.toLowerCase().split(/\s+/).filter(Boolean);
  const shown = list.locks.filter(lock => matches(lock, words)), body = $('locks').tBodies[0];
  const names = new Set(shown.map(nameOf));
  for (const [name, { row }] of rows) {
    if (names.has(name)) continue;
    const neighbour = row.nextElementSibling ?? row.previousElementSibling;
    if (row.contains(document.activeElement)) neighbour?.querySelector('button:not([hidden])')?.focus();
    row.remove();
    rows.delete(name);
  }
  shown.forEach((lock, i) => {
    const { row } = rows.get(nameOf(lock)) ?? { row: $('row').content.firstElementChild.cloneNode(true) };
    rows.set(nameOf(lock), { lock, row });
    if (body.children[i] !== row) body.insertBefore(row, body.children[i] ?? null);
    draw(row, lock);
  });
  put($('count'), list.locks.length === shown.length ? `${shown.length} locked` : `${shown.length} of ${list.locks.length}`);
  if (list.more) put($('count'), $('count').textContent + ', and more that are not listed here');
  put($('live'), isLive ? 'Live' : 'Not live: reloading every few seconds');
  $('live').dataset.live = isLive;
  $('locks').hidden = !shown.length;
  $('none').hidden = Boolean(shown.length || $('trouble').textContent);
  put($('none'), list.locks.length ? 'No lock matches the filter.' : 'Nothing is locked.');
}

function draw(row, lock) {
  const cell = name => row.querySelector('.' + name), now = Date.now();
  row.dataset.key = lock.key;
  put(cell('collection'), lock.collection);
  put(cell('id'), lock.id);
  put(cell('holder'), label(lock));
  cell('id').title = lock.key;
  cell('holder').title = label(lock);
  put(cell('mode'), lock.mode);
  cell('mode').dataset.mode = lock.mode;
  put(cell('age'), age(now - lock.from));
  cell('age').title = new Date(lock.from).toLocaleString();
  put(cell('left'), lock.until > now ? left(lock.until - now) : 'expiring');
  lock.ttl = row.ttl = Math.max(row.ttl ?? 0, lock.until - now);   // the longest time seen
  cell('bar').style.setProperty('--part', `${Math.max(0, (lock.until - now) / lock.ttl * 100)}%`);
  cell('break').hidden = !lock.may_break;
  cell('break').setAttribute('aria-label', `Break the lock of ${label(lock).slice(0, 100)} on ${lock.key.slice(0, 100)}`);
}

// ---- breaking -------------------------------------------------------------------------------

$('locks').addEventListener('click', event => {
  const row = event.target.closest('.break')?.closest('tr');
  if (!row) return;
  breaking = [...rows.values()].find(entry => entry.row === row).lock;
  put($('break-key'), breaking.key);
  put($('break-holder'), label(breaking));
  put($('break-age'), age(Date.now() - breaking.from));
  put($('break-trouble'), '');
  $('reason').value = '';
  $('break').showModal();
  $('reason').focus();
});

$('reason').addEventListener('input', () => {
  const isLong = new TextEncoder().encode($('reason').value).length > 500;
  $('reason').setCustomValidity(isLong ? 'Too long: 500 bytes at most.' : '');
});

$('break-no').addEventListener('click', () => $('break').close());
$('break').addEventListener('submit', async event => {
  event.preventDefault();
  $('break-yes').disabled = true;
  // With the token, so that a new holder's lock is not broken.
  const { collection, id, token } = breaking;
  const path = `${encodeURIComponent(collection)}/${encodeURIComponent(id)}/break`;
  const answer = await ask('POST', path, { reason: $('reason').value.trim(), token: token ?? undefined });
  $('break-yes').disabled = false;
  if (!answer.ok) return put($('break-trouble'), explain(answer));
  $('break').close();
  list.locks = list.locks.filter(lock => nameOf(lock) !== nameOf(breaking));
  render();
  if (document.activeElement === document.body) $('filter').focus();
  reload();
});

// ---- events ---------------------------------------------------------------------------------

$('filter').addEventListener('input', render);
document.addEventListener('visibilitychange', () => { if (!document.hidden) reload(); });
setInterval(() => { if (!document.hidden) render(); }, 1000);
DocLock.events(new URL('.', import.meta.url).pathname, event => {
  if (event.type === 'resync') isLive = event.isLive;
  reloadIn(event.type === 'resync' ? 0 : 150);
});
reload();
