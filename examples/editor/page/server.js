// Talking to the server.

const REQUEST_MS = 10000;

/** The login: `me` is a name or null. */
export const session = { me: null };

export const docUrl = id => '/api/workitem/' + encodeURIComponent(id);
export const lockUrl = id => '/locks/workitem/' + encodeURIComponent(id);

/** Never rejects: a missing answer is `status: 0`. With `lock`, the request proves that this page holds the lock. */
export async function call(method, url, { json, lock, releases } = {}) {
  const init = { method, cache: 'no-store', signal: AbortSignal.timeout(REQUEST_MS) };
  if (json) Object.assign(init, { headers: { 'Content-Type': 'application/json' }, body: JSON.stringify(json) });
  try {
    const answer = await (lock ? lock.fetch(url, init, { releases }) : fetch(url, init));
    const text = await answer.text();
    let body = { status: answer.status };
    try { body = JSON.parse(text); } catch { /* no content, or not JSON */ }
    return { ok: answer.ok, status: answer.status, body, version: answer.headers.get('ETag')?.replaceAll('"', '') };
  } catch {
    return { ok: false, status: 0, body: { detail: 'the server cannot be reached; try again' } };
  }
}

/** What the problem says, as the beginning of a sentence. */
export function explain({ status, detail, title }) {
  if (status === 404) return 'There is no such document';
  const text = (detail || title || `the server answered ${status}; try again`).replace(/\.$/, '');
  return text[0].toUpperCase() + text.slice(1);
}
