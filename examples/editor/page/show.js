// Display: text with names in it, times, notes, questions.

export const $ = id => document.getElementById(id);

/** Typed text in one of our sentences: it cannot reverse the direction of the sentence. Names are also cut. */
export const quote = text => ({ text });
export const name = text => ({ text: text || 'Somebody', isName: true });

const shown = new WeakMap();

/** Shows strings and names. Unchanged content is left alone: a screen reader would read it aloud again. */
export function put(el, ...parts) {
  const key = JSON.stringify(parts);
  if (shown.get(el) === key) return;
  shown.set(el, key);
  el.replaceChildren(...parts.map(part => {
    if (typeof part === 'string') return part;
    const bdi = document.createElement('bdi');
    bdi.textContent = part.text;
    if (part.isName) Object.assign(bdi, { className: 'name', title: part.text });
    return bdi;
  }));
}

export function show(el, on) { if (el.hidden === on) el.hidden = !on; }

export const clock = when => new Date(when).toLocaleTimeString([], { hour: '2-digit', minute: '2-digit' });

export function ago(since) {
  const min = Math.floor((Date.now() - since) / 60000), h = Math.floor(min / 60);
  return min < 1 ? 'just now' : h < 1 ? `${min} min ago` : h < 24 ? `${h} h ago` : `${Math.floor(h / 24)} d ago`;
}

/** 2:10 */
export function left(expiresAt) {
  const s = Math.max(0, Math.ceil((expiresAt - Date.now()) / 1000));
  return `${Math.floor(s / 60)}:${String(s % 60).padStart(2, '0')}`;
}

const TOAST_MS = 6000;
let toastEnds = Infinity;

/** A note. After six seconds, the next key or click removes it. */
export function toast(...parts) {
  notice(...parts);
  toastEnds = performance.now() + TOAST_MS;
}
for (const event of ['pointerdown', 'keydown']) {
  addEventListener(event, () => { if (performance.now() > toastEnds) notice(); }, { capture: true });
}

/** A note that stays until the person closes it, or until the next one. */
export function notice(...parts) {
  toastEnds = Infinity;
  put($('toast'), ...parts);
  show($('toast-close'), parts.length > 0);
}
$('toast-close').addEventListener('click', () => notice());

/** Asks a question. Resolves to true for yes. */
function ask({ head, note, no, yes }) {
  const dialog = $('ask');
  if (dialog.open) return Promise.resolve(false);
  for (const [id, text] of Object.entries({ 'ask-head': head, 'ask-note': note, 'ask-no': no, 'ask-yes': yes })) put($(id), text);
  dialog.returnValue = 'no';
  dialog.showModal();
  return new Promise(done => dialog.addEventListener('close', () => done(dialog.returnValue === 'yes'), { once: true }));
}

export const discard = () => ask({
  head: 'Discard your changes?', note: 'The text since the last save will be lost.', no: 'Keep my text', yes: 'Discard',
});

export const reallyDelete = () => ask({
  head: 'Delete this document?', note: 'Nobody can bring it back.', no: 'Keep the document', yes: 'Delete',
});
