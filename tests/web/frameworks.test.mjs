// React 19 and Vue 3 draw a form with fields of all kinds: what they write is no typing, and they hear of a text that is put back.

import assert from 'node:assert/strict';
import { createRequire } from 'node:module';
import { beforeEach, test } from 'node:test';
import { forgetAll, keep, person, rows, settled, show, sleep, trusted, window } from './page.mjs';

globalThis.SVGElement = window.SVGElement;
globalThis.MathMLElement = class {};
globalThis.ShadowRoot = window.ShadowRoot;
globalThis.HTMLIFrameElement = window.HTMLIFrameElement;
const load = createRequire(`${process.env.DOCLOCK_DOM}/package.json`);
const { createElement: h, useState } = load('react'), { createRoot } = load('react-dom/client'), { flushSync } = load('react-dom');
const Vue = load('vue');

beforeEach(forgetAll);

const STORED = { title: 'stored', kind: 'm', flag: true, tags: ['1', '3'], level: 500, choice: 'b' };
let state;

function ReactForm() {
  const [all, set] = useState(STORED), change = name => ({ target: it }) => set(now => ({
    ...now, [name]: it.type === 'checkbox' ? it.checked : it.multiple ? [...it.selectedOptions].map(it => it.value) : name === 'level' ? Number(it.value) : it.value,
  }));
  state = { all, set };
  return [
    h('input', { key: 1, name: 'title', value: all.title, onChange: change('title') }),
    ...['m', 'n'].map(it => h('input', { key: it, type: 'radio', name: 'kind', value: it, checked: all.kind === it, onChange: change('kind') })),
    h('input', { key: 2, type: 'checkbox', name: 'flag', value: 'yes', checked: all.flag, onChange: change('flag') }),
    h('select', { key: 3, name: 'tags', multiple: true, value: all.tags, onChange: change('tags') }, ['1', '2', '3'].map(it => h('option', { key: it }, it))),
    h('input', { key: 4, type: 'range', name: 'level', min: 0, max: 1000, value: all.level, onChange: change('level') }),
    h('select', { key: 5, name: 'choice', value: all.choice, onChange: change('choice') }, ['a', 'b'].map(it => h('option', { key: it }, it))),
  ];
}

const VUE = `<input name=title v-model="title"><input type=radio name=kind value=m v-model="kind"><input type=radio name=kind value=n v-model="kind">
  <input type=checkbox name=flag value=yes v-model="flag"><select name=tags multiple v-model="tags"><option>1</option><option>2</option><option>3</option></select>
  <input type=range name=level min=0 max=1000 v-model.number="level"><select name=choice v-model="choice"><option>a</option><option>b</option></select>`;

const frameworks = {
  async react(form) {
    const root = createRoot(form);
    flushSync(() => root.render(h(ReactForm)));
    return { all: () => state.all, set: async change => flushSync(() => state.set(now => ({ ...now, ...change }))) };
  },
  async vue(form) {
    const all = Vue.reactive(structuredClone(STORED));
    Vue.createApp({ template: VUE, setup: () => Vue.toRefs(all) }).mount(form);
    return { all: () => structuredClone(Vue.toRaw(all)), set: async change => { Object.assign(all, change); await Vue.nextTick(); } };
  },
};

for (const [name, draw] of Object.entries(frameworks)) {
  test(`${name}: what it writes is no typing, and it hears of what is put back`, async () => {
    let form = show(''), view = await draw(form);
    const first = await keep(form);
    assert.equal(first.fields.records.size, 0);
    await view.set({ title: 'by a program', kind: 'n', flag: false, tags: ['2'], level: 7, choice: 'a' });
    assert.equal(form.elements.title.value, 'by a program');
    assert.equal(first.fields.records.size, 0, 'what the framework writes');
    await view.set(STORED);
    const { title, kind, flag, tags, level } = form.elements;
    person.types(title, 'typed');
    person.clicks([...kind].find(it => it.value === 'n'));
    person.clicks(flag);
    person.chooses(tags, '1', '2');
    person.types(level, '900');
    trusted(level, 'change');
    await sleep(30);
    const typed = { ...STORED, title: 'typed', kind: 'n', flag: false, tags: ['1', '2'], level: 900 };
    assert.deepEqual(view.all(), typed);
    await first.crash();
    assert.deepEqual((await rows())[0].records.map(it => [it.name, it.mark, it.base, it.value]), [['title', null, 'stored', 'typed'], ['kind', null, 'm', 'n'],
      ['flag', 'yes', true, false], ['tags', '2', false, true], ['tags', '3', true, false], ['level', null, '500', '900']]);
    view = await draw(form = show(''));
    const second = await keep(form);
    assert.deepEqual(view.all(), STORED);
    assert.deepEqual(second.found[0].restore(), {});
    await sleep(600);
    await settled();
    assert.deepEqual(view.all(), typed);
    await second.end();
  });
}
