// What a person has typed: a record for each field, by that person's own input events.

import assert from 'node:assert/strict';
import { beforeEach, test } from 'node:test';
import { Fields, Lock, forgetAll, keep, person, rows, show, sleep, trusted, versionIn, window } from './page.mjs';

const heard = (field, ...types) => { for (const type of types) field.dispatchEvent(new window.Event(type, { bubbles: true })); };

beforeEach(forgetAll);

test('programs, frameworks and odd fields make no record', async () => {
  const form = show(`<input name=title value=a><input type=range name=r min=0 max=1000 value=500><textarea name=t>one\r\ntwo</textarea>
    <input type=email multiple name=e value="a@x.y,  b@x.y"><input type=radio name=o><input type=checkbox name=c>
    <select multiple name=s><option>1<option>2</select><input type=date name=d><input type=checkbox name=q><input type=color name=k>`);
  const page = await keep(form), { title, o, c, s, t } = form.elements;
  title.value = 'by a program';
  heard(title, 'input', 'change');
  [o.value, c.value] = ['vue', 'react'];
  o.checked = c.checked = true;
  heard(o, 'click', 'input', 'change');
  s.options[1].selected = true;
  heard(s, 'change');
  t.value = 'one\r\ntwo\r\nthree';
  form.elements.q.click();   // by a program: the browser tells the change of the box itself
  await sleep(10);
  await page.keeper.flush();
  assert.equal(page.fields.records.size, 0);
  person.types(title, 'by a person');
  await page.keeper.flush();
  const [{ records }] = await rows();
  assert.deepEqual(records.map(it => [it.name, it.base, it.value]), [['title', 'by a program', 'by a person']]);
  person.types(title, 'by a program');   // as undo does
  await page.end();
  assert.deepEqual(await rows(), []);
});

test('typing makes a record in every kind of field, also by a label, autofill and a reset', async () => {
  const form = show(`<input name=title value=a><input type=checkbox name=c value=x><input type=radio name=o value=m checked><input type=radio name=o value=n>
    <select multiple name=s><option selected>1<option>2</select><select name=l><option>1<option>2</select><div id=rich contenteditable>old</div><button type=reset>R</button>`);
  const page = await keep(form), { c, o, s, l, title } = form.elements;
  title.value = 'autofill';
  trusted(title, 'input');
  person.ticks(c);
  person.ticks(o[1]);
  person.chooses(s, '2');
  person.chooses(l, '2');
  person.types(document.getElementById('rich'), '<b>new</b>');
  const all = [...page.fields.records.values()].map(it => [it.name, it.mark, it.base, it.value]);
  assert.deepEqual(all, [['title', null, 'a', 'autofill'], ['c', 'x', false, true], ['o', null, 'm', 'n'], ['s', '1', true, false], ['s', '2', false, true],
    ['l', null, '1', '2'], ['rich', null, 'old', '<b>new</b>']]);
  form.reset();   // by a program
  await sleep(10);
  assert.equal(page.fields.records.size, 7, 'what a program resets is not lost');
  trusted(form.querySelector('button'), 'click');
  form.reset();
  await sleep(10);
  assert.deepEqual([...page.fields.records.values()].map(it => it.name), ['rich']);
  await page.end();
});

test('a mask of the page writes the text in another way, and a field that is drawn anew goes on', async () => {
  const form = show('<div><input name=n value=1></div><div><textarea name=t>x</textarea></div>');
  const page = await keep(form), { n, t } = form.elements;
  n.addEventListener('input', () => { n.value = n.value.replace(/(\d)(\d{3})$/, '$1,$2'); });
  person.types(n, '1234');
  person.types(t, 'xy');
  await sleep(10);
  t.parentElement.innerHTML = '<textarea name=t>x</textarea>';
  person.types(form.elements.t, 'xz');
  assert.deepEqual([...page.fields.records.values()].map(it => [it.name, it.base, it.value]), [['n', '1', '1,234'], ['t', 'x', 'xz']]);
  form.elements.t.parentElement.innerHTML = '';
  await page.end();
  assert.deepEqual((await rows())[0].records.map(it => it.value), ['1,234', 'xz'], 'a field that has gone loses no text');
});

test('a text belongs to the document in which it was typed, whenever the page shows another one', async () => {
  for (const order of ['text before', 'text after']) {
    await forgetAll();
    const form = show('<input name=title value="of A">');
    const a = await keep(form, { lock: new Lock('/locks/item/A') });
    person.types(form.elements.title, 'typed in A');
    if (order === 'text before') form.elements.title.value = 'of B';
    await a.end();
    const b = await keep(form, { lock: new Lock('/locks/item/B', 'v9') });
    form.elements.title.value = 'of B';
    trusted(form.elements.title, 'change');
    await b.end();
    const all = await rows();
    assert.deepEqual(all.map(it => [it.url, it.version, it.records.map(it => it.value)]), [['/locks/item/A', 'v1', ['typed in A']]], order);
  }
});

test('a kept text never changes the version of the page, and the version of the server is saved onto', async () => {
  const html = value => `<input name=title value="${value}"><input type=range name=r value=5>`;
  let form = show(html('a'));
  const one = await keep(form);
  person.types(form.elements.title, 'typed');
  await one.crash();
  // A colleague has saved, and the browser shows the text of the earlier visit.
  form = show(html('by a colleague'));
  form.elements.title.value = 'typed';
  const two = await keep(form, { lock: new Lock(undefined, 'v2') });
  assert.equal(two.lock.version, 'v2');
  assert.equal(form.elements.title.value, 'by a colleague', 'what was delivered is saved, unless the person decides');
  assert.deepEqual(two.found.map(it => [it.version, it.fields.title]), [['v1', ['typed']]]);
  await two.end();
  // Of the same version: the text goes on.
  form = show(html('a'));
  form.elements.title.value = 'typed';
  const three = await keep(form);
  assert.equal(three.found.length, 0);
  assert.deepEqual((await rows()).map(it => it.records[0].base), ['a']);
  await three.end();
});

test('a page that shows a refused text goes on to keep it', async () => {
  let form = show('<input name=title value=a>');
  const one = await keep(form);
  person.types(form.elements.title, 'refused');
  await one.crash();
  form = show('<input name=title value=refused>');
  const two = await keep(form, { lock: new Lock(undefined, 'v2'), isUnsaved: true });
  await two.end();
  assert.deepEqual((await rows()).map(it => [it.version, it.records[0].base, it.records[0].value]), [['v2', 'a', 'refused']]);
  // And a text that the next page shows as stored is kept no longer.
  const three = await keep(show('<input name=title value=refused>'), { lock: new Lock(undefined, 'v3') });
  assert.deepEqual([three.found.length, await rows()], [0, []]);
  await three.end();
});

test('fields may have the names of methods', async () => {
  const names = ['dataset', 'setAttribute', 'getAttribute', 'getRootNode', 'closest', 'contains', 'ownerDocument', 'dispatchEvent', 'querySelectorAll', 'elements', 'method', 'id'];
  const html = names.map(it => `<input name=${it}>`).join('');
  let form = show(html);
  const one = await keep(form);
  for (const field of form.querySelectorAll?.('input') ?? document.querySelectorAll('#form input')) person.types(field, field.name + '!');
  form.dispatchEvent === undefined || window.EventTarget.prototype.dispatchEvent.call(form, new window.Event('submit', { bubbles: true, cancelable: true }));
  await one.crash();
  form = show(html);
  const two = await keep(form);
  assert.deepEqual(two.found[0].restore(), {});
  assert.deepEqual([...document.querySelectorAll('#form input')].map(it => it.value), names.map(it => it + '!'));
  await two.end();
});

test('an editor without a form tells of its changes', async () => {
  let shown = { body: 'a', title: 't' };
  const source = { read: () => shown, write: all => { shown = { ...shown, ...all }; } };
  const one = await keep(source);
  shown = { ...shown, body: 'typed' };
  one.keeper.changed();
  await one.crash();
  one.keeper.changed();   // closed
  shown = { body: 'a', title: 'by a colleague' };
  const two = await keep(source);
  assert.deepEqual(two.found.map(it => it.fields), [{ body: 'typed' }]);
  assert.deepEqual([two.found[0].restore(), shown], [{}, { body: 'typed', title: 'by a colleague' }]);
  await two.crash();
  shown = { body: 'of a colleague', title: 't' };
  const three = await keep(source, { lock: new Lock(undefined, 'v2') });
  assert.deepEqual(three.found[0].differences, [{ name: 'body', label: 'body', kept: 'typed', now: 'of a colleague' }]);
  assert.deepEqual([three.found[0].restore(), shown.body, three.keeper.problem], [{}, 'typed', null]);
  await three.end();
});

test('an editor that pastes, cuts and breaks lines itself has a record, and what it does for a program has none', async () => {
  const form = show('<div id=rich contenteditable><p>old</p></div>'), rich = document.getElementById('rich'), page = await keep(form);
  const values = () => [...page.fields.records.values()].map(it => it.value);
  for (const type of ['paste', 'cut', 'drop', 'keydown']) {
    rich.addEventListener(type, event => { event.preventDefault(); rich.innerHTML = event.isTrusted ? `<p>${type}</p>` : '<p>by a script</p>'; });
  }
  rich.dispatchEvent(new window.Event('paste', { bubbles: true }));
  await sleep(5);
  assert.deepEqual(values(), []);
  for (const type of ['paste', 'cut', 'drop', 'keydown']) {
    trusted(rich.querySelector('p'), type, { cancelable: true });
    await sleep(5);
    assert.deepEqual([...page.fields.records.values()].map(it => [it.base, it.value]), [['<p>by a script</p>', `<p>${type}</p>`]]);
  }
  trusted(rich, 'keydown');   // an arrow
  rich.innerHTML = 'by a program, later';
  await page.end();
});

test('a form is closed with its editors, and what the page closes itself stays closed', async () => {
  const form = show(`<textarea name=t>x</textarea><input type=checkbox name=c><select name=s><option>1</select><input name=own readonly><div id=rich contenteditable=plaintext-only>y</div>
    <button type=button>B</button><button>S</button><input name=later>`);
  const told = [], fields = new Fields(form), { t, c, s, own, later } = form.elements, rich = document.getElementById('rich');
  form.addEventListener('doclock-close', ({ detail }) => told.push(detail.isClosed));
  const closed = () => [t.readOnly, c.disabled, s.disabled, own.readOnly, rich.getAttribute('contenteditable') === 'false', ...[...form.querySelectorAll('button')].map(it => it.disabled), later.readOnly];
  fields.open(true);
  assert.deepEqual(closed(), [false, false, false, true, false, false, false, false]);
  fields.open(false);
  assert.deepEqual(closed(), [true, true, true, true, true, false, true, true]);
  s.disabled = true;        // by the page
  later.readOnly = true;
  await sleep(1);
  fields.open(false);
  // Another element takes the form over, and closes it for itself.
  new Fields(form).open(true);
  const next = new Fields(form);
  next.open(false);
  await sleep(1);
  next.open(true);
  assert.deepEqual(closed(), [false, false, true, true, false, false, false, true]);
  assert.equal(rich.getAttribute('contenteditable'), 'plaintext-only');
  // Removed, opened, and put back, as by a framework.
  next.open(false);
  form.remove();
  next.open(true);
  document.body.append(form);
  next.open(false);
  await sleep(1);
  next.open(true);
  assert.deepEqual(closed(), [false, false, true, true, false, false, false, true]);
  assert.deepEqual(told.slice(0, 2), [false, true], 'told once for each change');
});

test('a version is known by its digits, whatever a proxy has added', () => {
  const version = '0123456789abcdef'.repeat(2);
  for (const tag of [version, `"${version}"`, `W/"${version}"`, ...['-gzip', '--gzip', ';br', '_zstd', '+', '/1'].map(it => `"${version}${it}"`)]) assert.equal(versionIn(tag), version, tag);
  for (const tag of [null, '', '"x"', `"${version}0"`, `"${version}a"`, `"${version.slice(1)}"`]) assert.equal(versionIn(tag), null, tag);
});

test('an element that takes its value over after this script has heard of the input has a record from the first one on', async () => {
  // As a form-associated element, which jsdom does not have: the event of its inner field comes from the element itself.
  const form = show('<x-own name=own></x-own>'), element = Object.assign(form.firstChild, { value: 'old', form }), fields = new Fields(form);
  const elements = Object.getOwnPropertyDescriptor(HTMLFormElement.prototype, 'elements');
  Object.defineProperty(HTMLFormElement.prototype, 'elements', { configurable: true, get: () => [element] });
  try {
    fields.listen();
    person.enters(element);
    element.addEventListener('input', () => { element.value = 'typed'; });
    trusted(element, 'input');
    await sleep(5);
    assert.deepEqual([...fields.records.values()].map(it => [it.base, it.value]), [['old', 'typed']]);
  } finally {
    fields.close();
    Object.defineProperty(HTMLFormElement.prototype, 'elements', elements);
  }
});

test('an editor that is an element of its form and a contenteditable is one field, and gets its text back', async () => {
  const elements = Object.getOwnPropertyDescriptor(HTMLFormElement.prototype, 'elements');
  const shows = () => {
    const form = show('<x-editor name=own contenteditable>old</x-editor>');
    Object.assign(form.firstChild, { value: '', form });
    Object.defineProperty(HTMLFormElement.prototype, 'elements', { configurable: true, get() { return this.children; } });
    return form;
  };
  try {
    const one = await keep(shows());
    person.types(document.querySelector('x-editor'), 'typed');
    await one.crash();
    const two = await keep(shows());
    assert.deepEqual(await two.found[0].restore(), {});
    assert.equal(document.querySelector('x-editor').innerHTML, 'typed');
    two.fields.open(false);
    two.fields.open(true);
    assert.equal(document.querySelector('x-editor').outerHTML, '<x-editor name="own" contenteditable="">typed</x-editor>');
    await two.end();
  } finally {
    Object.defineProperty(HTMLFormElement.prototype, 'elements', elements);
  }
});

test('what was typed before this script was there is typed on the delivered text', () => {
  for (const [types, base] of [[['keydown', 'beforeinput'], 'old'], [['focusin', 'pointerdown'], 'old'], [[], 'old'], ['saved', 'old, and more']]) {
    const { a } = show('<textarea name=a>old</textarea>').elements, fields = new Fields(a.form);
    a.focus();
    a.value = 'old, and more';
    fields.listen();
    if (types === 'saved') fields.saved(new Map());
    else for (const type of types) trusted(a, type);
    a.value = 'old, and more, and more';
    trusted(a, 'input');
    assert.deepEqual([...fields.records.values()].map(it => [it.base, it.value]), [[base, 'old, and more, and more']], String(types));
    fields.close();
  }
});

test('an editor writes its text into its field before any handler of the page reads the form', async () => {
  const form = show('<input name=text value=old>'), page = await keep(form), read = [];
  form.addEventListener('doclock-read', () => { form.elements.text.value = 'of the editor'; });
  form.addEventListener('submit', event => {
    event.preventDefault();
    read.push(new window.FormData(form).get('text'));
  });
  form.dispatchEvent(new window.SubmitEvent('submit', { bubbles: true, cancelable: true }));
  assert.deepEqual(read, ['of the editor']);
  await page.end();
});

test('a form in a shadow tree is known as sent', async () => {
  const root = document.body.appendChild(document.createElement('div')).attachShadow({ mode: 'open' });
  root.innerHTML = '<form method=post><input name=a></form>';
  const form = root.firstChild, page = await keep(form);
  person.types(form.elements.a, 'typed');
  form.dispatchEvent(new window.SubmitEvent('submit', { bubbles: true, cancelable: true }));
  await page.crash();
  assert.equal((await rows())[0].sent?.isForm, true);
});

test('what an editor without a form has loaded is not typed, and typed text that gives way to it is offered', async () => {
  let shown = { body: 'a', title: 't' };
  const page = await keep({ read: () => shown, write: all => { shown = { ...shown, ...all }; } }), { lock, keeper } = page;
  const loads = (version, all) => {
    shown = { ...shown, ...all };
    lock.version = version;
    lock.dispatchEvent(new window.Event('loaded'));
  }, types = body => {
    shown = { ...shown, body };
    keeper.changed();
  }, kept = async () => { await keeper.flush(); return (await rows()).flatMap(it => it.records.map(record => [it.version, record.name, record.base, record.value])); };
  loads('v2', { title: 'by a colleague' });
  types('typed');
  assert.deepEqual(await kept(), [['v2', 'body', 'a', 'typed']]);
  loads('v3', {});   // the person keeps the text
  assert.deepEqual([page.found.length, await kept()], [0, [['v2', 'body', 'a', 'typed']]]);
  loads('v4', { body: 'of a colleague' });
  assert.deepEqual(page.found.map(it => it.fields), [{ body: 'typed' }]);
  types('of a colleague, and more');
  assert.deepEqual((await kept()).sort(), [['v3', 'body', 'a', 'typed'], ['v4', 'body', 'of a colleague', 'of a colleague, and more']]);
  // A save of its own: more is typed, and told later.
  lock.saves(true, () => {
    shown.body = 'of a colleague, and more, and more';
    lock.version = 'v5';
    lock.dispatchEvent(new window.Event('change'));
  });
  types('of a colleague, and more, and more!');
  assert.deepEqual([page.found.length, (await kept()).map(it => it.at(-1)).sort()], [1, ['of a colleague, and more, and more!', 'typed']]);
  await page.end();
});

test('what was typed into an editor without a form while it was saved stays kept, also if the page tells of it later', async () => {
  let shown = { body: 'a' };
  const one = await keep({ read: () => shown, write: all => { shown = all; } });
  shown = { body: 'ab' };
  one.keeper.changed();
  one.lock.saves(true, () => { shown = { body: 'abc' }; });
  await one.keeper.flush();
  assert.deepEqual(await rows(), [], 'an editor may show what the server has made of its text, before the page tells that it was saved');
  one.keeper.changed();
  await one.crash();
  assert.deepEqual((await rows()).map(it => it.records.map(({ base, value }) => [base, value])), [[['ab', 'abc']]]);
});
