// Types of elements.js.

import type { DocLock } from './client.js';

/** The texts by language. Replace texts and add languages in the script that imports this module. A text that is missing is English. */
export const texts: Record<string, Record<string, string>>;

/** Locks the document of the form in it. See the guide for the attributes. */
export interface DocLockForm extends HTMLElement {
  /** `null` until there is a form. */
  get lock(): DocLock | null;
  /** The attribute `lock`, for frameworks that write attributes as properties. */
  set lock(url: string | null | undefined);
}

declare global {
  interface HTMLElementTagNameMap {
    'doclock-form': DocLockForm;
    'doclock-badge': HTMLElement;
    /** On a page without the form: see `settleKept` of `DocLock`. */
    'doclock-saved': HTMLElement;
  }
  interface HTMLElementEventMap {
    /** At the form, which is about to be submitted, before the handlers of the page: an editor of the page writes its text into its field. Also at a write by `fetch` of the lock, whose body is made already. */
    'doclock-read': CustomEvent<null>;
    /** At the form, which is closed or opened: an editor of the page does the same. */
    'doclock-close': CustomEvent<{ isClosed: boolean }>;
  }
}
