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

let toastTimer = 0;

export function toast(...parts) {
  clearTimeout(toastTimer);
  put($('toast'), ...parts);
  toastTimer = setTimeout(() => put($('toast')), 6000);
}

/** Asks whether to discard the unsaved text. */
export function discard() {
  const ask = $('ask');
  if (ask.open) return Promise.resolve(false);
  ask.returnValue = 'no';
  ask.showModal();
  return new Promise(done => ask.addEventListener('close', () => done(ask.returnValue === 'yes'), { once: true }));
}
