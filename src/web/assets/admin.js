// The administrator's table of all locks, as of now. Mounted under any scope: all URLs are relative.

import { DocLock } from './client.js';

const RELOAD_MS = 15_000;   // renewals are not announced
const $ = id => document.getElementById(id);
const GAP_MS = 1_000;        // between two reloads, however busy the site is
const rows = new Map();     // name -> its row, with its lock
const inView = new Set();   // rows
// Locks of foreign programs have no token.
const nameOf = lock => lock.token ?? lock.key;
const picked = new Set();   // names of the selected locks
const collator = new Intl.Collator(undefined, { numeric: true });
let list = { locks: [], more: false };
let isLive = false, timer = 0, due = Infinity, last = -Infinity, loading = false, loadAgain = false, breaking = [];
let sort = { by: 'age', down: true };   // the oldest lock first

async function ask(method, path, body) {
  const init = { method, cache: 'no-store', signal: AbortSignal.timeout(10_000) };
  if (body) Object.assign(init, { headers: { 'Content-Type': 'application/json' }, body: JSON.stringify(body) });
  try {
    const answer = await fetch(new URL(path, import.meta.url), init);
    const text = await answer.text(), date = Date.parse(answer.headers.get('Date'));
    const broken = answer.headers.get('Doclock-Broken');
    const read = { ok: answer.ok, status: answer.status, at: Date.now(), date, broken, body: {} };
    try { read.body = text ? Object(JSON.parse(text)) : {}; } catch { /* no answer of ours */ }
    if (!read.ok || (body ? answer.status === 204 : Array.isArray(read.body.locks))) return read;
    const detail = 'Another page has answered, perhaps a login page. Log in, and load this page again.';
    return { ok: false, status: 401, body: { detail } };
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

// Several events at once, as when a session ends, lead to one reload. Events that go on do not postpone it.
function reloadIn(ms) {
  const at = Math.max(performance.now() + ms, last + GAP_MS);
  if (at >= due) return;
  clearTimeout(timer);
  due = at;
  timer = setTimeout(reload, at - performance.now());
}

async function reload() {
  clearTimeout(timer);
  due = Infinity;
  if (document.hidden) return;   // becoming visible calls again
  if (loading) return void (loadAgain = true);
  loading = true;
  loadAgain = false;
  const answer = await ask('GET', 'admin.json');
  loading = false;
  last = performance.now();
  put($('trouble'), answer.ok ? '' : explain(answer));
  $('csv').disabled = !answer.ok;
  if (answer.ok) {
    const skew = Math.abs(answer.at - answer.date) > 2000 ? answer.at - answer.date : 0;
    list = answer.body;
    for (const lock of list.locks) {
      lock.from = Date.parse(lock.since) + skew;
      lock.until = answer.at + lock.expires_in_ms;
    }
    list.locks.sort((a, b) => a.from - b.from);
    choices($('collection'), 'All', list.locks.map(lock => lock.collection));
    choices($('person'), 'Everybody', list.locks.map(label));
  } else {
    isLive = false;
    if (answer.status === 401 || answer.status === 403) list.locks = [];
  }
  render();
  reloadIn(loadAgain ? 0 : answer.ok ? RELOAD_MS : 3000);
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

const nameForPeople = lock => lock.title ?? lock.key;

// Keeps the choice, even if there is no such lock now.
function choices(select, all, found) {
  const chosen = select.value, values = [...new Set(chosen ? [chosen, ...found] : found)].sort(collator.compare);
  const shown = [...select.options].slice(1).map(option => option.value);
  if (values.length === shown.length && values.every((value, i) => value === shown[i])) return;
  select.replaceChildren(new Option(all, ''), ...values.map(value => {
    const option = new Option(value.length > 60 ? value.slice(0, 60) + '…' : value, value);
    option.dir = 'auto';
    return option;
  }));
  select.value = chosen;
}

function filter() {
  const words = $('filter').value.toLowerCase().split(/\s+/).filter(Boolean);
  const collection = $('collection').value, person = $('person').value;
  return list.locks.filter(lock => {
    if (collection && lock.collection !== collection || person && label(lock) !== person) return false;
    const text = `${lock.title ?? ''} ${lock.key} ${label(lock)} ${lock.mode}`.toLowerCase();
    return words.every(word => text.includes(word));
  });
}

const columns = {
  document: nameForPeople, holder: label, mode: lock => lock.mode, age: lock => -lock.from, left: lock => lock.until,
};

function inOrder(a, b) {
  const x = columns[sort.by](a), y = columns[sort.by](b);
  const order = typeof x === 'string' ? collator.compare(x, y) : x - y;
  return sort.down ? -order : order;
}

function render() {
  const shown = filter().sort(inOrder), body = $('locks').tBodies[0];
  const names = new Set(shown.map(nameOf)), focused = document.activeElement;
  for (const [name, row] of rows) {
    if (names.has(name)) continue;
    const neighbour = row.nextElementSibling ?? row.previousElementSibling;
    if (row.contains(document.activeElement)) neighbour?.querySelector('button:not([hidden])')?.focus();
    row.remove();
    rows.delete(name);
  }
  let next = body.firstElementChild;
  for (const lock of shown) {
    const row = rows.get(nameOf(lock)) ?? newRow(lock);
    row.lock = lock;
    if (row === next) next = next.nextElementSibling;
    else body.insertBefore(row, next);
    draw(row);
  }
  // A row that moves loses the focus.
  if (document.activeElement !== focused && body.contains(focused)) focused.focus({ preventScroll: true });
  put($('count'), list.locks.length === shown.length ? `${shown.length} locked` : `${shown.length} of ${list.locks.length}`);
  if (list.more) put($('count'), $('count').textContent + ', and more that are not listed here');
  put($('frozen'), (list.frozen ?? []).map(({ collection, reason, ends_in_ms }) =>
    `No new locks ${collection ? 'in ' + collection : 'in any collection'} for ${age(ends_in_ms)}: ${reason}`).join(' · '));
  put($('live'), isLive ? 'Live' : 'Not live: reloading every few seconds');
  $('live').dataset.live = isLive;
  $('locks').hidden = !shown.length;
  $('none').hidden = Boolean(shown.length || $('trouble').textContent);
  put($('none'), list.locks.length ? 'No lock matches the filter.' : 'Nothing is locked.');
  renderSelection(shown);
}

function newRow(lock) {
  const row = $('row').content.firstElementChild.cloneNode(true);
  rows.set(nameOf(lock), row);
  view.observe(row);
  return row;
}

// Each second, only what a person sees is drawn: a thousand rows cost a third of a second.
const view = new IntersectionObserver(changes => {
  for (const { target: row, isIntersecting } of changes) {
    if (isIntersecting) draw(row);
    inView[isIntersecting ? 'add' : 'delete'](row);
  }
});

function renderSelection(shown) {
  const present = new Set(list.locks.filter(lock => lock.may_break).map(nameOf));
  for (const name of picked) if (!present.has(name)) picked.delete(name);
  const possible = shown.filter(lock => lock.may_break), chosen = possible.filter(lock => picked.has(nameOf(lock)));
  $('all').checked = Boolean(possible.length) && chosen.length === possible.length;
  $('all').indeterminate = chosen.length > 0 && chosen.length < possible.length;
  $('all').disabled = !possible.length;
  $('all-label').hidden = $('break-picked').hidden = !present.size;
  $('break-picked').disabled = !picked.size;
  put($('break-picked'), `Break selected (${picked.size})`);
}

function draw(row) {
  const cell = name => row.querySelector('.' + name), now = Date.now(), { lock } = row;
  row.dataset.key = lock.key;
  const link = cell('title').firstElementChild;
  cell('title').hidden = !lock.title;
  put(link, lock.title ?? '');
  cell('title').title = lock.title ?? '';
  // The server sends links to pages only.
  if (!lock.link) link.removeAttribute('href');
  else if (link.getAttribute('href') !== lock.link) link.setAttribute('href', lock.link);
  cell('mark').hidden = !lock.may_break;
  cell('mark').checked = picked.has(nameOf(lock));
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
  const what = `the lock of ${label(lock).slice(0, 100)} on ${nameForPeople(lock).slice(0, 100)}`;
  cell('break').setAttribute('aria-label', `Break ${what}`);
  cell('mark').setAttribute('aria-label', `Select ${what}`);
}

// ---- for spreadsheets (RFC 4180) ------------------------------------------------------------

// A spreadsheet would take a cell that begins like this for a formula. It may drop quotes and invisible characters, and
// some end a cell at a semicolon or a tab, even within quotes.
const FORMULA = /(?<=^|[;\t])(?=[\s\p{C}\p{M}"'\\]*[=+\-@＝＋－＠]|[\t\r\n])/gu;

function quoted(text) {
  text = String(text).replace(FORMULA, "'");
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

// The shown locks. Spreadsheets take a text without the mark at its begin for Latin 1.
$('csv').addEventListener('click', () => {
  const lines = [['collection', 'id', 'title', 'mode', 'holder', 'since', 'expires_in_s']];
  for (const lock of filter().sort(inOrder)) {
    const holder = (lock.holder?.label ?? '').replace(/\p{Cc}/gu, ' ');
    const left = Math.max(0, Math.floor((lock.until - Date.now()) / 1000));
    lines.push([lock.collection, lock.id, lock.title ?? '', lock.mode, holder, lock.since, left]);
  }
  const text = lines.map(cells => cells.map(quoted).join(',') + '\r\n').join('');
  const url = URL.createObjectURL(new Blob(['\ufeff', text], { type: 'text/csv' }));
  Object.assign(document.createElement('a'), { href: url, download: 'locks.csv' }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
});

// ---- sorting and selecting ------------------------------------------------------------------

$('locks').tHead.addEventListener('click', event => {
  const by = event.target.closest('button')?.closest('th').dataset.sort;
  if (!by) return;
  sort = { by, down: sort.by === by && !sort.down };
  for (const th of $('locks').querySelectorAll('th[data-sort]')) {
    if (th.dataset.sort !== by) th.removeAttribute('aria-sort');
    else th.setAttribute('aria-sort', sort.down ? 'descending' : 'ascending');
  }
  render();
});

function pick(lock, isPicked) {
  if (isPicked && lock.may_break) picked.add(nameOf(lock));
  else picked.delete(nameOf(lock));
}

$('locks').addEventListener('change', event => {
  pick(event.target.closest('tr').lock, event.target.checked);
  renderSelection(filter());
});

$('all').addEventListener('change', () => {
  for (const lock of filter()) pick(lock, $('all').checked);
  render();
});

// ---- breaking -------------------------------------------------------------------------------

$('locks').addEventListener('click', event => {
  const row = event.target.closest('.break')?.closest('tr');
  if (row) askToBreak([row.lock]);
});

$('break-picked').addEventListener('click', () => {
  // Also those that the filter hides: the dialog lists them all.
  askToBreak(list.locks.filter(lock => picked.has(nameOf(lock))).sort(inOrder));
});

const NOTE = $('break-note').textContent;
const NOTE_OF_MANY = 'The holders are told at once and can no longer save; others can then lock the documents. The log records this with your name.';

function askToBreak(locks) {
  breaking = locks;
  const [lock] = locks, isOne = locks.length === 1;
  if (!lock) return;
  put($('break-head'), isOne ? 'Break this lock?' : `Break ${locks.length} locks?`);
  put($('break-yes'), isOne ? 'Break the lock' : `Break ${locks.length} locks`);
  put($('break-note'), isOne ? NOTE : NOTE_OF_MANY);
  put($('reason-label'), isOne ? 'Reason, shown to the holder' : 'Reason, shown to the holders');
  $('break-one').hidden = !isOne;
  $('break-many').hidden = isOne;
  put($('break-key'), nameForPeople(lock));
  put($('break-id'), lock.title ? lock.key : '');
  put($('break-holder'), label(lock));
  put($('break-age'), age(Date.now() - lock.from));
  $('break-many').replaceChildren(...locks.map(lock => {
    const item = document.createElement('li');
    for (const text of [nameForPeople(lock), label(lock)]) {
      item.appendChild(document.createElement('bdi')).textContent = text;
    }
    return item;
  }));
  put($('break-trouble'), '');
  put($('report'), '');
  $('reason').value = '';
  $('break').showModal();
  $('reason').focus();
}

// Four at a time. After an outage the rest is not tried.
async function breakAll(locks, reason) {
  const done = { broken: [], gone: [], refused: [], failed: [] }, queue = [...locks];
  const work = async () => {
    for (let lock; (lock = queue.shift());) {
      // With the token, so that a new holder's lock is not broken.
      const { key, collection, id, token } = lock, body = { reason, token: token ?? undefined };
      const answer = await (/^\.{0,2}$/.test(id)   // no URL can name such an id
        ? ask('POST', 'break', { key, ...body })
        : ask('POST', `${encodeURIComponent(collection)}/${encodeURIComponent(id)}/break`, body));
      const outcome = answer.ok ? (answer.broken === '0' ? 'gone' : 'broken') : answer.status === 403 ? 'refused' : 'failed';
      done[outcome].push(lock);
      if (!answer.ok) done.why = explain(answer);
      if (outcome === 'failed') done.failed.push(...queue.splice(0));
    }
  };
  await Promise.all([work(), work(), work(), work()]);
  return done;
}

function report({ broken, gone, refused, failed, why }) {
  const say = ({ length }, one, many) => length ? [`${length} ${length === 1 ? 'lock ' + one : 'locks ' + many}.`] : [];
  return [
    ...say(broken, 'was broken', 'were broken'),
    ...say(gone, 'was already gone', 'were already gone'),
    ...say(refused, 'was refused', 'were refused'),
    ...say(failed, 'was not broken', 'were not broken'),
    ...(why ? [why] : []),
  ].join(' ');
}

$('reason').addEventListener('input', () => {
  const isLong = new TextEncoder().encode($('reason').value).length > 500;
  $('reason').setCustomValidity(isLong ? 'Too long: 500 bytes at most.' : '');
});

$('break-no').addEventListener('click', () => $('break').close());
$('break').addEventListener('submit', async event => {
  event.preventDefault();
  $('break-yes').disabled = true;
  const isOne = breaking.length === 1, done = await breakAll(breaking, $('reason').value.trim());
  $('break-yes').disabled = false;
  if (isOne && done.why) return put($('break-trouble'), done.why);
  $('break').close();
  const names = new Set([...done.broken, ...done.gone].map(nameOf));
  list.locks = list.locks.filter(lock => !names.has(nameOf(lock)));
  if (!isOne) put($('report'), report(done));
  render();
  if (document.activeElement === document.body) $('filter').focus();
  reload();
});

// ---- events ---------------------------------------------------------------------------------

for (const id of ['filter', 'collection', 'person']) $(id).addEventListener('input', render);
document.addEventListener('visibilitychange', () => { if (!document.hidden) reload(); });
setInterval(() => { if (!document.hidden) for (const row of inView) draw(row); }, 1000);
DocLock.events(new URL('.', import.meta.url).pathname, event => {
  if (event.type === 'saved') return;
  if (event.type === 'resync') isLive = event.isLive;
  reloadIn(event.type === 'resync' ? 0 : 150);
});
reload();
