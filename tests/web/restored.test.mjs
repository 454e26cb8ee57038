// A text goes back into its own field, or nowhere; what counts as saved; and shared computers.

import assert from 'node:assert/strict';
import { beforeEach, test } from 'node:test';
import { Fields, Lock, forgetAll, keep, keeping, person, rows, settled, show, sleep, window } from './page.mjs';

const value = name => [...document.querySelectorAll(`#form [name="${name}"]`)].map(it => it.type === 'checkbox' ? it.checked : it.value);

beforeEach(forgetAll);

/** What is typed into this form, kept, and put back into another one. */
async function across(before, types, after, options) {
  await forgetAll();
  const one = await keep(show(before));
  types(document.querySelector('#form').elements ?? {}, document.querySelector('#form'));
  await one.crash();
  const form = show(after), two = await keep(form, { lock: new Lock(undefined, 'v2'), ...options });
  const left = two.found[0]?.restore();
  await sleep(20);
  const rest = { left, differences: two.found[0]?.differences };
  await two.end();
  return rest;
}

test('rows find their texts by their key, and the row of another person gets none', async () => {
  const row = (id, text) => `<div><input type=hidden name="rows[][id]" value="${id}"><input name="rows[][text]" value="${text}"></div>`;
  const types = (_, form) => person.types(form.querySelectorAll('[name="rows[][text]"]')[1], 'typed in 2');
  let { left } = await across(row(1, 'a') + row(2, 'b'), types, row(9, 'new') + row(1, 'a') + row(2, 'b'));
  assert.deepEqual([left, value('rows[][text]')], [{}, ['new', 'a', 'typed in 2']]);
  ({ left } = await across(row(1, 'a') + row(2, 'b'), types, row(1, 'a') + row(9, 'b')));
  assert.deepEqual([left, value('rows[][text]')], [{ 'rows[][text]': ['typed in 2'] }, ['a', 'b']]);
  // By `data-keep`, and numbered names: the second row is another one now.
  const keyed = (key, n, text) => `<p data-keep="${key}"><input name="item-${n}" value="${text}"></p>`;
  ({ left } = await across(keyed('x', 0, '') + keyed('y', 1, ''), form => person.types(form['item-1'], 'of y'), keyed('x', 0, '') + keyed('z', 1, '') + keyed('y', 2, '')));
  assert.deepEqual([left, value('item-1'), value('item-2')], [{ 'item-1': ['of y'] }, [''], ['']]);
});

test('without a key, fields with one name get their text only if their number and their stored values are the same', async () => {
  const types = (_, form) => person.types(form.querySelectorAll('[name=a]')[1], 'second');
  const two = '<input name=a value=1><input name=a value=2>';
  assert.deepEqual([(await across(two, types, two)).left, value('a')], [{}, ['1', 'second']]);
  for (const after of [two + '<input name=a value=3>', '<input name=a value=9><input name=a value=2>', '<input name=a value=2>', '<input name=a value=1><input name=a value=by-another>']) {
    const { left } = await across(two, types, after);
    assert.deepEqual([left, value('a').includes('second')], [{ a: ['second'] }, false], after);
  }
});

test('what a colleague has stored since is shown beside the text, and replaced only in a field that is surely the same', async () => {
  const types = name => form => person.types(form[name], 'typed');
  const named = await across('<input name=a value=1>', types('a'), '<input name=a value="of a colleague">');
  assert.deepEqual([named.left, value('a')], [{}, ['typed']]);
  // The only row of a list without keys is another one now.
  const only = await across('<input name="rows[]" value=1>', types('rows[]'), '<input name="rows[]" value=2>');
  assert.deepEqual([only.left, value('rows[]')], [{ 'rows[]': ['typed'] }, ['2']]);
  const numbered = await across('<input name=a_0 value=1><input name=a_1 value=2>', types('a_1'), '<input name=a_0 value=9><input name=a_1 value=1><input name=a_2 value=2>');
  assert.deepEqual([numbered.left, value('a_1'), value('a_2')], [{ a_1: ['typed'] }, ['1'], ['2']]);
  assert.deepEqual(numbered.differences, [{ name: 'a_1', label: 'a_1', kept: 'typed', now: '1' }]);
});

test('ticks and options keep those of a colleague, and a choice that has gone is told', async () => {
  const box = (value, isOn) => `<input type=checkbox name=c value=${value} ${isOn ? 'checked' : ''}>`;
  const options = (...all) => `<select multiple name=s>${all.map(([it, on]) => `<option ${on ? 'selected' : ''}>${it}</option>`).join('')}</select>`;
  const types = form => { person.ticks(form.c[1]); person.chooses(form.s, '1', '3'); };
  const { left, differences } = await across(box('x') + box('y') + options(['1'], ['2'], ['3']), types, box('y') + box('x', true) + options(['2', true], ['1']));
  assert.deepEqual(value('c'), [true, true]);
  assert.deepEqual([...document.querySelector('#form [name=s]').selectedOptions].map(it => it.value), ['2', '1']);
  assert.deepEqual(left, { s: [{ value: '3', on: true }] });
  assert.ok(differences.some(it => it.name === 's' && it.kept === '☑ 3'));
  // Unticked here, and by nobody else; and a radio button that is not there any more.
  const radio = (...all) => all.map(([it, on]) => `<input type=radio name=r value=${it} ${on ? 'checked' : ''}>`).join('');
  const off = await across(box('x', true) + radio(['m', true], ['n']), form => { person.ticks(form.c, false); person.ticks(form.r[1]); }, radio(['m', true], ['k']) + box('x', true));
  assert.deepEqual([value('c'), off.left], [[false], { r: ['n'] }]);
});

test('a handler that draws a part of the form anew loses no text, at once or later', async () => {
  const html = '<select name=kind><option>a<option>b</select><div id=part><input name=t value=x></div><input name=u value=y>';
  for (const ms of [0, 50]) {
    await forgetAll();
    let form = show(html);
    const one = await keep(form);
    person.types(form.elements.t, 'typed');
    person.chooses(form.elements.kind, 'b');
    person.types(form.elements.u, 'more');
    await one.crash();
    form = show(html);
    form.elements.kind.addEventListener('change', () => {
      const draw = () => { document.getElementById('part').innerHTML = '<input name=t value=x>'; };
      ms ? setTimeout(draw, ms) : draw();
    });
    const two = await keep(form), left = two.found[0].restore();
    await sleep(600);
    assert.deepEqual([left, value('t'), value('u')], [{}, ['typed'], ['more']], `after ${ms} ms`);
    await two.crash();
    assert.deepEqual((await rows()).flatMap(it => it.records.map(it => it.value)).sort(), ['b', 'more', 'typed']);
  }
});

test('a field that appears because of another one gets its text then', async () => {
  const html = '<select name=kind><option>a<option>b</select><div id=part></div>', conditional = '<input name=why>';
  const draws = form => form.elements.kind.addEventListener('change', ({ target }) => { document.getElementById('part').innerHTML = target.value === 'b' ? conditional : ''; });
  let form = show(html);
  draws(form);
  const one = await keep(form);
  person.chooses(form.elements.kind, 'b');
  form.elements.kind.dispatchEvent(new window.Event('change'));
  person.types(form.elements.why, 'because');
  await one.crash();
  draws(form = show(html));
  const two = await keep(form);
  assert.deepEqual([two.found[0].restore(), value('why')], [{}, ['because']]);
  await two.end();
});

test('a save ends what was sent with it, in the fields that it says', async () => {
  const form = show('<input name=a><input name=b>'), page = await keep(form), { a, b } = form.elements;
  const left = () => [...page.fields.records.values()].map(it => [it.name, it.base, it.value]);
  person.types(a, '1');
  person.types(b, '2');
  page.lock.saves(false);
  assert.equal(left().length, 2);
  page.lock.saves(['a']);
  assert.deepEqual(left(), [['b', '', '2']]);
  page.lock.saves(true, () => person.types(b, '2 and more'));
  assert.deepEqual(left(), [['b', '2', '2 and more']]);
  person.types(a, 'again');
  assert.deepEqual(left().at(-1), ['a', '1', 'again']);
  page.lock.saves();
  await page.end();
  assert.deepEqual(await rows(), []);
});

const submit = (form, submitter) => form.dispatchEvent(new window.SubmitEvent('submit', { bubbles: true, cancelable: true, submitter }));

test('a dialog and a preview save nothing, and a form that was sent is kept until the server says that it was saved', async () => {
  const form = show('<input name=a><button formmethod=dialog>D</button><button formmethod=get>P</button><button>S</button>'), page = await keep(form);
  const [dialog, preview, save] = form.querySelectorAll('button');
  person.types(form.elements.a, 'typed');
  for (const by of [dialog, preview]) submit(form, by);
  await page.keeper.flush();
  assert.equal((await rows())[0].sent, null);
  submit(form, save);
  await page.crash();
  assert.deepEqual((await rows())[0].sent, { token: 't1', version: 'v1', isForm: true, isWhole: true, isElsewhere: false });
  // Not saved, as far as the server knows: it is offered as a text that was sent.
  const unknown = await keep(show('<input name=a>'), { lock: new Lock(undefined, 'v2', 't2') });
  assert.deepEqual(unknown.found.map(it => it.submitted), [true]);
  await unknown.end();
  // What was typed after that is not saved.
  await unknown.end();
  // A colleague has changed it since; but it was saved.
  const asked = [], later = await keep(show('<input name=a value="typed, and more by a colleague">'), { lock: new Lock(undefined, 'v3', 't3'), saved: sent => asked.push(sent.token) && 'v2' });
  assert.deepEqual([later.found.length, asked, await rows()], [0, ['t1'], []]);
  await later.end();
});

test('a view page without the form ends a text that was saved, and no other', async () => {
  const page = await keep(show('<input name=a>'));
  person.types(page.fields.form.elements.a, 'sent');
  submit(page.fields.form);
  await page.crash();
  const other = await keep(show('<input name=a>'), { lock: new Lock('/locks/item/2') });
  person.types(other.fields.form.elements.a, 'not sent');
  await other.crash();
  for (const url of ['/locks/item/1', '/locks/item/2']) await keeping.settle('alice', url, async () => null);
  assert.equal((await rows()).length, 2);
  for (const url of ['/locks/item/1', '/locks/item/2']) await keeping.settle('alice', url, async () => 'v2');
  assert.deepEqual((await rows()).map(it => it.url), ['/locks/item/2']);
});

test('after clearKept, open pages, other editors, closed keepers and offers keep and show nothing', async () => {
  const before = await keep(show('<input name=a>'), { lock: new Lock('/locks/item/2') });
  person.types(before.fields.form.elements.a, 'an earlier text');
  await before.crash();
  let shown = { body: '' };
  const form = await keep(show('<input name=a>'), { lock: new Lock('/locks/item/2') }), source = { read: () => shown, write: () => {} };
  const editor = await keep(source, { lock: new Lock('/locks/item/3') }), closed = await keep(source, { lock: new Lock('/locks/item/4') });
  shown = { body: 'typed' };
  closed.keeper.changed();
  closed.keeper.close();   // its last words are under way
  const [offer] = form.found;
  assert.equal(await keeping.clear('alice', () => true), true);
  person.types(form.fields.form.elements.a, 'typed after that');
  editor.keeper.changed();
  closed.keeper.changed();
  for (const { keeper } of [form, editor, closed]) { await keeper.flush(); await keeper.saved(); }
  await sleep(500);
  assert.deepEqual(await rows(), []);
  assert.deepEqual([offer.differences, offer.restore(), value('a')], [[], {}, ['typed after that']]);
  // The next person, and this person with a new page, keep theirs.
  const bob = await keep(show('<input name=a>'), { person: 'bob' });
  person.types(bob.fields.form.elements.a, 'of bob');
  await bob.crash();
  assert.deepEqual((await rows()).map(it => it.person), ['bob']);
});

test('a field that has ever been a password stays one, also if another element takes its name', async () => {
  const form = show('<div><input type=password name=p></div><input name=q autocomplete=one-time-code><input name=a>'), page = await keep(form);
  form.elements.p.type = 'text';
  person.types(form.elements.p, 'secret');
  form.elements.p.parentElement.innerHTML = '<input name=p>';
  person.types(form.elements.p, 'secret');
  form.elements.q.removeAttribute('autocomplete');
  person.types(form.elements.q, 'secret');
  person.types(form.elements.a, 'kept');
  await page.crash();
  assert.deepEqual((await rows())[0].records.map(it => it.name), ['a']);
});

test('what counts is the clock of the server, and a wrong clock of the computer deletes no text', async () => {
  const real = Date.now;
  Date.now = () => real() - 25 * 365 * 86_400_000;   // the computer was started without its clock
  const form = show('<input name=a>'), fields = new Fields(form);
  fields.listen();
  const one = keeping.keep(new Lock(), { person: 'alice', ahead: Date.now() - real() }, fields, {});
  person.types(form.elements.a, 'typed');
  await one.flush();
  one.close();
  Date.now = real;
  try {
    for (const year of [2001, 2060]) {
      Date.now = () => new Date(`${year}-01-01`).getTime();
      const ahead = Date.now() - real(), found = [];
      const lock = new Lock(undefined, 'v2'), keeper = keeping.keep(lock, { person: 'alice', ahead, wasSaved: async () => null }, { read: () => ({}), write() {} }, { onkept: it => found.push(it) });
      await sleep(50);
      assert.equal(found.length, 1, String(year));
      keeper.close();
    }
  } finally {
    Date.now = real;
  }
  assert.equal((await rows()).length, 1);
});

test('only typed text counts for 1 MB, and a browser that keeps again says so', async () => {
  const page = await keep(show(`<textarea name=a>${'x'.repeat(700_000)}</textarea>`)), { a } = page.fields.form.elements;
  person.types(a, 'y'.repeat(700_000));
  await page.keeper.flush();
  assert.deepEqual([page.problems, page.keeper.problem], [[], null]);
  person.types(a, 'y'.repeat(1_100_000));
  await page.keeper.flush();
  assert.deepEqual([page.problems, page.keeper.problem], [['too_large'], 'too_large']);
  let changes = 0;
  page.lock.addEventListener('change', () => changes++);
  person.types(a, 'short');
  await page.keeper.flush();
  assert.deepEqual([page.problems, page.keeper.problem, changes], [['too_large'], null, 1]);
  await page.end();
});

test('what was typed after a form was sent is not saved with it', async () => {
  const form = show('<input name=a><input name=b>'), page = await keep(form);
  person.types(form.elements.a, 'sent');
  submit(form);
  person.types(form.elements.b, 'typed after that');
  await page.crash();
  const next = await keep(show('<input name=a value=sent><input name=b>'), { lock: new Lock(undefined, 'v2', 't2'), saved: () => 'v2' });
  assert.deepEqual([next.found.map(it => it.fields), (await rows()).map(it => it.records.length)], [[{ b: ['typed after that'] }], [1]]);
  await next.end();
});

test('texts that give way to others at the same moment are all kept', async () => {
  const visit = async (text, version) => {
    const form = show('<input name=title value=a>'), page = await keep(form, { lock: new Lock(undefined, version) });
    person.types(form.elements.title, text);
    return page;
  };
  for (const [n, text] of ['one', 'two', 'three'].entries()) await (await visit(text, `v${n + 1}`)).crash();
  const page = await visit('four', 'v4');
  for (const found of [...page.found]) found.restore();
  await page.crash();
  const all = (await rows()).map(it => it.records[0].value);
  assert.deepEqual(all.sort(), ['four', 'one', 'three', 'two']);
});

test('a text that is stored already waits for no save when it is put back', async () => {
  const html = (title, note) => `<input name=title value="${title}"><input name=note value="${note}">`, one = await keep(show(html('a', 'b')));
  person.types(document.getElementById('form').elements.title, 'typed');
  person.types(document.getElementById('form').elements.note, 'also');
  await one.crash();
  const form = show(html('typed', 'c')), two = await keep(form, { lock: new Lock(undefined, 'v2') });
  assert.deepEqual(two.found[0].restore(), {});
  assert.deepEqual([form.elements.title.value, form.elements.note.value], ['typed', 'also']);
  await two.crash();
  assert.deepEqual((await rows()).map(it => it.records.map(it => it.name)), [['note']]);
});

test('what was not put back is shown, and nothing beside it, in the words of the page', async () => {
  const row = key => `<p data-keep=${key}><input aria-label="Text" name=row_text><input type=checkbox name=taxed value=${key} id=${key}><label for=${key}>taxed</label></p>`;
  const rich = '<div contenteditable id=note aria-label=Note>old</div><select name=kind aria-label=Kind><option value=i>Invoice<option value=o>Offer</select>';
  const types = (_, form) => {
    for (const field of form.querySelectorAll('[name=row_text]')) person.types(field, `of ${field.closest('p').dataset.keep}`);
    person.ticks([...form.querySelectorAll('[name=taxed]')].at(-1));
    person.types(form.querySelector('#note'), '<p>bold <b>move</b></p>');
    person.chooses(form.elements.kind, 'o');
  };
  const { left, differences } = await across(row('k2') + row('k3') + rich, types, row('k2') + row('k4'));
  assert.deepEqual([value('row_text'), left.row_text], [['of k2', ''], ['of k3']]);
  assert.deepEqual(differences.map(it => [it.label, it.kept]), [['Text', 'of k3'], ['taxed', '☑ k3'], ['note', 'bold move'], ['kind', 'o']]);
  const here = await across(row('k2') + rich, types, row('k2').replace('<input', '<input value=other') + rich.replace('old', '<i>new</i>').replace('value=i', 'value=i selected'), {});
  assert.deepEqual([here.left, here.differences, value('row_text')], [{}, [], ['of k2']]);
});

test('what a page was delivered with is read by the field itself', async () => {
  for (const [attributes, typed] of [['type=range min=0 max=1000', '524'], ['type=range min=-50 max=-10 step=5', '-35'], ['type=email multiple', 'a@x.y,b@x.y']]) {
    const input = value => `<input name=a ${attributes} value="${value}">`;
    const { left } = await across(input('-45'), form => person.types(form.a, typed), input(typed.replace(',', ' , ')));
    assert.deepEqual([left, value('a')], [undefined, [typed]], `${attributes}: stored already, and left alone`);
  }
});

test('the last words do not wait for a write that is under way', async () => {
  const page = await keep(show('<input name=a>')), { a } = page.fields.form.elements;
  const { put } = IDBObjectStore.prototype, puts = [];
  IDBObjectStore.prototype.put = function (text) {
    puts.push(text.records[0].value);
    return put.call(this, text);
  };
  try {
    person.types(a, 'first');
    const first = page.keeper.flush();
    person.types(a, 'last words');
    window.dispatchEvent(new window.Event('pagehide'));
    for (let n = 0; n < 9; n++) await null;   // no answer of the database has come yet
    assert.deepEqual(puts, ['first', 'last words']);
    await first;
  } finally {
    IDBObjectStore.prototype.put = put;
  }
  await page.end();
  assert.deepEqual((await rows()).map(it => it.records[0].value), ['last words']);
});

test('what comes while a write is under way is written after it', async () => {
  const page = await keep(show('<input name=a>')), { a } = page.fields.form.elements;
  person.types(a, 'first');
  const writes = [page.keeper.flush()];
  person.types(a, 'second');
  writes.push(page.keeper.flush());
  page.lock.saves();
  await Promise.all(writes);
  await page.end();
  assert.deepEqual(await rows(), []);
});

test('a write and a read that have failed are repeated', async () => {
  const before = await keep(show('<input name=a>'));
  person.types(before.fields.form.elements.a, 'of yesterday');
  await before.crash();
  const { transaction } = IDBDatabase.prototype, fails = () => { throw new DOMException('full', 'QuotaExceededError'); };
  IDBDatabase.prototype.transaction = fails;
  let page;
  try {
    const form = show('<input name=a>'), fields = new Fields(form), found = [], problems = [], lock = new Lock(undefined, 'v2');
    fields.listen();
    page = { found, problems, lock, keeper: keeping.keep(lock, { person: 'alice', ahead: 0, wasSaved: async () => null }, fields, { onkept: it => found.push(it), onproblem: it => problems.push(it) }) };
    await sleep(5);
    person.types(form.elements.a, 'typed');
    await page.keeper.flush();
    lock.dispatchEvent(new window.Event('change'));
    await sleep(5);
    assert.deepEqual([problems, page.keeper.problem], [['full'], 'full'], 'told once');
  } finally {
    IDBDatabase.prototype.transaction = transaction;
  }
  await page.keeper.flush();
  await sleep(20);
  assert.deepEqual([page.keeper.problem, page.found.map(it => it.fields.a)], [null, [['of yesterday']]]);
  assert.deepEqual((await rows()).map(it => it.records[0].value).sort(), ['of yesterday', 'typed']);
  page.keeper.close();
});

test('a number in the name of a field is not that of its row', async () => {
  const row = (id, name, texts, key) => `<tr><td><input type=hidden name="${key}" value=${id}></td><td>${texts.map((text, n) => `<input name="${name + (n + 1)}" value="${text}">`).join('')}</td></tr>`;
  const table = rows => `<table>${rows.join('')}</table>`;
  // By the number of the row, by nothing, and by the key alone.
  const names = { 'items[N].line': 'items[N].id', 'form-N-address_line_': 'form-N-id', 'rows[][line': 'rows[][id]', phone: 'id' };
  for (const [name, key] of Object.entries(names)) {
    const of = (n, id, ...texts) => {
      const html = row(id, name.replace('N', n), texts, key.replace('N', n));
      return name.endsWith('[line') ? html.replace(/\[line\d/g, '$&]') : html;
    };
    const lines = () => [...document.querySelectorAll('#form tr')].map(it => [...it.querySelectorAll('input:not([type=hidden])')].map(it => it.value));
    const types = (_, form) => person.types(form.querySelectorAll('tr')[0].querySelectorAll('input')[2], 'of 5');
    for (const before of [[of(0, 5, 'A', ''), of(1, 6, 'B', '')], ...name === 'phone' ? [] : [[of(0, 5, 'A', '')]]]) {
      // The number of the first row is that of another one by now, or its text is that of a colleague.
      const after = table([of(0, 9, 'new', ''), of(1, 5, 'A', ''), of(2, 6, 'B', '')]), { left } = await across(table(before), types, after);
      const isNumbered = name.includes('N'), place = isNumbered ? [] : ['of 5'];
      assert.deepEqual([Object.values(left).flat(), lines()[0], lines()[1][1]], [isNumbered ? ['of 5'] : [], ['new', ''], place[0] ?? ''], name);
      const here = await across(table(before), types, table([of(0, 5, 'A', 'of a colleague'), of(1, 7, '', '')]));
      assert.deepEqual([here.left, lines()], [{}, [['A', 'of 5'], ['', '']]], name);
    }
  }
  // A field for each row, and texts of a list in a row: the number is that of the row, or of the text.
  const each = (n, id, text) => `<tr><td><input type=hidden name=id value=${id}></td><td><input name=phone${n} value="${text}"></td></tr>`;
  const phone = form => person.types(form.phone1, 'typed');
  assert.deepEqual((await across(table([each(1, 5, ''), each(2, 6, '')]), phone, table([each(1, 9, ''), each(2, 5, '')]))).left, { phone1: ['typed'] });
  const tags = (...all) => `<p><input type=hidden name="items[0].id" value=5>${all.map((it, n) => `<input name="items[0].tags[${n}]" value="${it}">`).join('')}</p>`;
  assert.deepEqual((await across(tags('a', 'b'), form => person.types(form['items[0].tags[1]'], 'typed'), tags('new', 'a', 'b'))).left, { 'items[0].tags[1]': ['typed'] });
});

test('an id around the rows is the key of none, and a row without an id has none of its neighbour', async () => {
  const row = (n, text, id = '') => `<tr><td>${id && `<input type=hidden name="items[${n}].id" value="${id}">`}<input name="items[${n}].note" value="${text}"></td></tr>`;
  const order = rows => `<div><input type=hidden name=orderId value=17><table>${rows.join('')}</table></div>`;
  const types = n => form => person.types(form[`items[${n}].note`], 'typed');
  const notes = form => [0, 1, 2].map(n => document.getElementById('form').elements[`items[${n}].note`]?.value);
  // The second row is another one by now; also if there was only one.
  let { left } = await across(order([row(0, 'a'), row(1, 'b')]), types(1), order([row(0, 'a'), row(1, 'new'), row(2, 'b')]));
  assert.deepEqual([left, notes()], [{ 'items[1].note': ['typed'] }, ['a', 'new', 'b']]);
  ({ left } = await across(order([row(0, 'a')]), types(0), order([row(0, 'new'), row(1, 'a')])));
  assert.deepEqual([left, notes()], [{ 'items[0].note': ['typed'] }, ['new', 'a', undefined]]);
  ({ left } = await across(order([row(0, 'a')]), types(0), order([row(0, 'new')])));
  assert.deepEqual([left, notes()], [{ 'items[0].note': ['typed'] }, ['new', undefined, undefined]]);
  ({ left } = await across(order([row(0, 'a')]), types(0), order([row(0, 'a')])));
  assert.deepEqual([left, notes()], [{}, ['typed', undefined, undefined]]);
  // One stored row, and a new one; the new one is stored by somebody else, in another way.
  ({ left } = await across(order([row(0, 'a', 5), row(1, '')]), types(1), order([row(0, 'a', 5), row(1, 'b', 6)])));
  assert.deepEqual([left, notes()], [{ 'items[1].note': ['typed'] }, ['a', 'b', undefined]]);
  ({ left } = await across(order([row(0, 'a', 5), row(1, '')]), types(0), order([row(0, 'of a colleague', 5), row(1, 'b', 6)])));
  assert.deepEqual([left, notes()], [{}, ['typed', 'b', undefined]]);
  const same = (id, text) => `<p>${id && `<input type=hidden name="rows[][id]" value=${id}>`}<input name="rows[][text]" value="${text}"><input type=checkbox name="rows[][tags]" value=x><input type=checkbox name="rows[][tags]" value=y></p>`;
  const ticks = form => { person.types(form['rows[][text]'][1], 'typed'); person.ticks(form['rows[][tags]'][1]); };
  ({ left } = await across(`<div>${same(1, 'a') + same('', '')}</div>`, ticks, `<div>${same(1, 'a') + same(2, '') + same('', '')}</div>`));
  assert.deepEqual([left, value('rows[][text]'), value('rows[][tags]')], [{}, ['a', '', 'typed'], [false, true, false, false, false, false]]);
});

test('a key in a long list looks at each row once, whether it has an id or not', async () => {
  const rows = Array.from({ length: 200 }, (_, n) => `<tr><td>${n % 2 ? '' : `<input type=hidden name="rows[][id]" value=${n}>`}</td><td><input name="rows[][text]"></td></tr>`);
  const form = show(`<table>${rows.join('')}</table>`), fields = new Fields(form), { querySelectorAll } = window.Element.prototype;
  fields.listen();
  let found = 0;
  window.Element.prototype.querySelectorAll = function (...all) {
    const list = querySelectorAll.apply(this, all);
    found += list.length;
    return list;
  };
  try { person.types(form.querySelectorAll('[name="rows[][text]"]')[100], 'typed'); } finally { window.Element.prototype.querySelectorAll = querySelectorAll; }
  fields.close();
  assert.deepEqual([...fields.records.values()].map(it => it.row), ['100']);
  assert.ok(found < 1_000, `${found} fields were looked at`);
});

test('a write of another tab that comes just after clearKept is deleted by that tab', async () => {
  const page = await keep(show('<input name=a>'));
  person.types(page.fields.form.elements.a, 'typed');
  await page.keeper.flush();
  // This tab hears of it after its write.
  new BroadcastChannel('doclock-kept').postMessage('alice');
  await sleep(50);
  await settled();
  assert.deepEqual(await rows(), []);
});

test('a text that the browser may have put into a blank field over another version stays kept', async () => {
  const html = (body = '') => `<textarea name=body>${body}</textarea>`;
  const one = await keep(show(html()));
  person.types(one.fields.form.elements.body, 'typed');
  await one.crash();
  const form = show(html());
  form.elements.body.value = 'typed';   // by the browser, or by a script that has loaded it
  const two = await keep(form, { lock: new Lock(undefined, 'v2') });
  assert.deepEqual([two.found.length, two.fields.records.size, (await rows()).length], [0, 0, 1]);
  await two.crash();
  const three = await keep(show(html('by a colleague')), { lock: new Lock(undefined, 'v3') });
  assert.deepEqual(three.found.map(it => it.fields), [{ body: ['typed'] }]);
  await three.end();
  const four = await keep(show(html('typed')), { lock: new Lock(undefined, 'v4') });
  assert.deepEqual([four.found.length, await rows()], [0, []]);
  await four.end();
});

test('a cleared field is no text that the browser may have put there', async () => {
  const html = (title, note) => `<input name=title value="${title}"><textarea name=note>${note}</textarea>`;
  const one = await keep(show(html('a', 'old'))), { title, note } = one.fields.form.elements;
  person.types(title, 'new');
  person.types(note, '');
  await one.crash();
  const two = await keep(show(html('new', '')), { lock: new Lock(undefined, 'v2') });
  assert.deepEqual([two.found.length, await rows()], [0, []], 'what the page shows is stored');
  await two.end();
});

test('a text that is put back into a page that keeps nothing any more stays kept', async () => {
  const one = await keep(show('<input name=a>'));
  person.types(one.fields.form.elements.a, 'typed');
  await one.crash();
  const two = await keep(show('<input name=a>'));
  two.keeper.close();
  assert.deepEqual(two.found[0].restore(), {});
  await settled();
  assert.equal((await rows()).length, 1);
});

test('a field that has its name for itself gets its text, whatever id stands beside it', async () => {
  const form = (text, id, name = 'request_id') => `<div><textarea name=text>${text}</textarea><input type=hidden name=${name} value="${id}"></div>`;
  const types = ({ text }) => person.types(text, 'typed');
  // Another id at each visit.
  assert.deepEqual([(await across(form('', 'r1'), types, form('', 'r2'))).left, value('text')], [{}, ['typed']]);
  assert.deepEqual([(await across(form('old', ''), types, form('old', 'r2'))).left, value('text')], [{}, ['typed']]);
  // A list of choices writes the id of the chosen one, and the person goes on.
  const chooses = ({ text, person_id: id }) => {
    person.types(text, 'bo');
    id.value = '2';
    person.types(text, 'bob');
    id.value = '3';
    person.types(text, 'bob and carol');
  };
  const chosen = await across(form('ann', '1', 'person_id'), chooses, form('ann', '1', 'person_id'));
  assert.deepEqual([chosen.left, value('text')], [{}, ['bob and carol']]);
  // Put back, and typed on.
  const more = await keep(show(form('old', 'r1')));
  types(more.fields.form.elements);
  await more.crash();
  const next = await keep(show(form('old', 'r2'))), texts = () => [...next.fields.records.values()].map(it => [it.base, it.value]);
  await next.found[0].restore();
  person.types(next.fields.form.elements.text, 'typed, and more');
  assert.deepEqual(texts(), [['old', 'typed, and more']]);
  await next.end();
  // A script has filled the field, and the person has begun to type.
  await forgetAll();
  const first = await keep(show(form('old', 'r1')));
  types(first.fields.form.elements);
  await first.crash();
  const filled = show(form('', 'r2'));
  filled.elements.text.value = 'old';
  const second = await keep(filled);
  person.types(filled.elements.text, 'begun');
  assert.deepEqual([second.found[0].differences.map(it => it.now), await second.found[0].restore(), filled.elements.text.value], [['old'], {}, 'typed']);
  await second.end();
  // It may be another row by now; and a row of several is not this one.
  assert.deepEqual([(await across(form('old', 'r1'), types, form('new', 'r2'))).left, value('text')], [{ text: ['typed'] }, ['new']]);
  const row = id => `<p><input type=hidden name=id value=${id}><input name=text></p>`, inFirst = form => person.types(form.text[0] ?? form.text, 'typed');
  const keyed = key => `<p data-keep=${key}><input name=text></p>`;
  for (const [before, after] of [[row(7) + row(8), row(8)], [row(7) + row(8), row(8) + row(9)], [row(7), row(8) + row(9)], [keyed(7), keyed(8)]]) {
    const { left } = await across(before, inFirst, after);
    assert.deepEqual([left, value('text').join('')], [{ text: ['typed'] }, ''], before);
  }
});
