// Forms at random: two people type into them, save, crash and restore, rows come and go, and programs fill and redraw. No text comes
// into a wrong field, none is lost, none is kept that nobody has typed, and the version of the server is never replaced.
//
// DOCLOCK_SECONDS=3600 DOCLOCK_SEED=7 node --test tests/web/random.test.mjs

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { Lock, forgetAll, keep, person, rows, show, sleep, trusted, window } from './page.mjs';

const FOR_MS = 1000 * (process.env.DOCLOCK_SECONDS ?? 0);   // at a commit the same twelve documents each time
let seed = Number(process.env.DOCLOCK_SEED ?? 1);
const random = () => {   // mulberry32
  seed = seed + 0x6D2B79F5 | 0;
  let t = Math.imul(seed ^ seed >>> 15, 1 | seed);
  t = t + Math.imul(t ^ t >>> 7, 61 | t) ^ t;
  return ((t ^ t >>> 14) >>> 0) / 2 ** 32;
};
const below = n => Math.floor(random() * n), chance = part => random() < part, one = list => list[below(list.length)];
let counted = 0;

const escape = text => String(text).replace(/&/g, '&amp;').replace(/"/g, '&quot;').replace(/</g, '&lt;');

/** A document: a few fields, and rows with ids of their own. */
const create = () => ({
  version: 1, title: 'stored title', note: 'two\nlines', flag: chance(0.5), kind: one(['m', 'n']), tags: ['1'], level: '500', mails: 'a@x.y, b@x.y',
  rows: Array.from({ length: below(4) }, () => addRow()),
});
const addRow = () => ({ id: `r${++counted}`, text: `row ${counted}`, done: chance(0.5) });

/** The form of a document. By `keys` rows are told apart; if a script fills the fields, the server delivers them blank. */
function html(doc, keys, isFilled) {
  const v = value => isFilled ? '' : escape(value), on = (is, name) => is && !isFilled ? name : '';
  const row = ({ id, text, done }) => `<div class=row ${keys === 'data-keep' ? `data-keep="${id}"` : ''} data-id="${id}">
    ${keys === 'hidden' ? `<input type=hidden name="rows[][id]" value="${id}">` : ''}
    <input name="rows[][text]" value="${v(text)}"><input type=checkbox name="rows[][done]" value=yes ${on(done, 'checked')}></div>`;
  return `<input type=hidden name=csrf value="${++counted}"><div id=part><input name=title value="${v(doc.title)}"></div><textarea name=note>\n${v(doc.note)}</textarea>
    <input type=checkbox name=flag value=yes ${on(doc.flag, 'checked')}><input type=radio name=kind value=m ${on(doc.kind === 'm', 'checked')}><input type=radio name=kind value=n ${on(doc.kind === 'n', 'checked')}>
    <select multiple name=tags>${['1', '2', '3'].map(it => `<option ${on(doc.tags.includes(it), 'selected')}>${it}</option>`).join('')}</select>
    <input type=range name=level min=0 max=1000 value="${v(doc.level)}"><input type=email multiple name=mails value="${v(doc.mails)}">${doc.rows.map(row).join('')}`;
}

const rowOf = field => field.closest('.row')?.dataset.id ?? '';
const nameOf = field => field.name + rowOf(field);
const valueOf = field => field.type === 'select-multiple' ? [...field.selectedOptions].map(it => it.value).join() : /checkbox|radio/.test(field.type) ? field.checked : field.value;
const fieldsOf = form => [...form.elements].filter(it => it.type !== 'hidden');

/** As Vue or a script does. */
function fill(form, doc) {
  const { elements: it } = form;
  [it.title.value, it.note.value, it.flag.checked, it.level.value, it.mails.value] = [doc.title, doc.note, doc.flag, doc.level, doc.mails];
  for (const radio of it.kind) radio.checked = radio.value === doc.kind;
  for (const option of it.tags.options) option.selected = doc.tags.includes(option.value);
  for (const field of fieldsOf(form)) {
    const row = doc.rows.find(it => it.id === rowOf(field));
    if (row) field.type === 'checkbox' ? field.checked = row.done : field.value = row.text;
    if (chance(0.3)) for (const type of ['input', 'change']) field.dispatchEvent(new window.Event(type, { bubbles: true }));
  }
}

/** What the form says, as the server stores it. */
function stored(form, doc) {
  const { elements: it } = form, all = fieldsOf(form);
  return {
    version: doc.version + 1, title: it.title.value, note: it.note.value, flag: it.flag.checked, kind: it.kind.value, level: it.level.value, mails: it.mails.value,
    tags: [...it.tags.selectedOptions].map(it => it.value),
    rows: doc.rows.map(({ id }) => ({ id, text: all.find(it => rowOf(it) === id && it.type === 'text').value, done: all.find(it => rowOf(it) === id && it.type === 'checkbox').checked })),
  };
}

/** A program changes what nobody has typed. */
function disturb(form, typed) {
  const field = one(fieldsOf(form));
  if (typed.has(nameOf(field))) return;
  if (field.type === 'checkbox' && chance(0.5)) {
    field.click();
    field.click();
  } else field.dispatchEvent(new window.Event('change', { bubbles: true }));
  if (field.name === 'title') document.getElementById('part').innerHTML = `<input name=title value="${escape(field.value)}">`;
}

function types(form, typed, open) {
  const field = one(fieldsOf(form)), text = /^(text|textarea)$/.test(field.type);
  open.delete(field.value);   // typed over by the same person
  if (text) person.types(field, `«${nameOf(field)}» ${++counted}`);
  else if (field.type === 'range') person.types(field, String(below(1000)));
  else if (field.type === 'email') person.types(field, `p${++counted}@x.y`);
  else if (field.type === 'select-multiple') person.chooses(field, ...['1', '2', '3'].filter(() => chance(0.5)));
  else if (!field.checked || field.type === 'checkbox') person.ticks(field, !field.checked);
  else return;
  typed.set(nameOf(field), true);
  if (text) open.add(field.value);
}

test('forms at random', { timeout: 2 * FOR_MS + 600_000 }, async () => {
  const until = Date.now() + FOR_MS;
  let runs = 0, restored = 0, returned = 0;
  while (Date.now() < until || runs < 12) {
    const began = seed;
    try {
      await forgetAll();
      let doc = create();
      const keys = one(['hidden', 'data-keep', 'none']), isFilled = chance(0.4), open = { alice: new Set(), bob: new Set() }, ever = { alice: new Set(), bob: new Set() };
      for (let visit = 0; visit < 8; visit++) {
        const who = one(['alice', 'bob']), form = show(html(doc, keys, isFilled)), typed = new Map();
        if (isFilled) fill(form, doc);
        const lock = new Lock('/locks/item/1', `v${doc.version}`, `t${++counted}`), page = await keep(form, { lock, person: who, saved: () => null });
        if (chance(0.3)) disturb(form, typed);
        assert.equal(page.fields.records.size, 0, 'a record without an input');
        assert.equal(lock.version, `v${doc.version}`, 'a version that the server has not delivered');
        for (let n = below(4); n > 0; n--) types(form, typed, open[who]);
        for (const text of [...page.found]) {
          if (chance(0.2)) {
            for (const it of Object.values(text.fields).flat()) open[who].delete(it);
            await text.discard();
          } else if (chance(0.6)) {
            const before = new Map(fieldsOf(form).map(it => [it, valueOf(it)])), left = text.restore(), put = Object.keys(text.fields);
            restored++;
            returned += Object.keys(left).length;
            for (const [field, was] of before) if (!put.includes(field.name)) assert.equal(valueOf(field), was, `${nameOf(field)} was not typed`);
            for (const it of Object.values(left).flat()) if (typeof it === 'string') open[who].add(it);
          }
        }
        for (const field of fieldsOf(form)) {
          const [, name] = /^«(.*)»/.exec(field.value) ?? [];
          assert.ok(!name || name === nameOf(field), `${field.value} stands in ${nameOf(field)}`);
        }
        if (chance(0.2)) disturb(form, typed);
        if (chance(0.5)) types(form, typed, open[who]);
        const shown = fieldsOf(form).map(it => it.value), end = below(4);
        if (end === 0) {   // a save of the page; a colleague's rows come and go later
          doc = stored(form, doc);
          lock.version = `v${doc.version}`;
          page.lock.saves();
          for (const text of [...open[who]]) if (shown.includes(text)) open[who].delete(text);
        } else if (end === 1) page.lock.saves(false);
        else if (end === 2) trusted(form, 'submit', { cancelable: true });
        await page.crash();
        const all = await rows(), kept = JSON.stringify(all);
        for (const name of typed.keys()) ever[who].add(name.replace(/r\d+$/, ''));
        for (const { person, records } of all) for (const { name } of records) assert.ok(ever[person].has(name), `${name} was never typed by ${person}`);
        for (const name of ['alice', 'bob']) for (const text of open[name]) assert.ok(kept.includes(JSON.stringify(text).slice(1, -1)), `${name} has lost ${text}`);
        const comes = chance(0.3), goes = chance(0.2);
        if (comes) doc.rows.splice(below(doc.rows.length + 1), 0, addRow());
        if (goes) doc.rows.splice(below(doc.rows.length), 1);
        if (comes || goes || chance(0.4)) doc = { ...doc, version: doc.version + 1 };
      }
      runs++;
    } catch (error) {
      error.message = `DOCLOCK_SEED=${began}: ${error.message}`;
      throw error;
    }
  }
  console.log(`${runs} documents, ${restored} texts put back, ${returned} returned`);
  assert.ok(restored && returned, 'nothing was put back');
  await sleep(1);
});
