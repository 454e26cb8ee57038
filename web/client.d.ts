// Types of client.js. It needs Chromium 116, Firefox 124 or Safari 17.4, or later.

/** The state of a document, for the page that asks. */
export interface Standing {
  /**
   * `mine`: this page holds the lock. `mine_elsewhere`: another tab of the same person holds it.
   * `held`: another person holds it. `free`: nobody holds it. `frozen`: nobody can take it at the
   * moment. `unknown`: see `problem`.
   */
  state: 'mine' | 'mine_elsewhere' | 'held' | 'free' | 'frozen' | 'unknown';
  mode: Mode | null;
  /** The holder, for display only. Show it as plain text: a person may have typed it. */
  holder: string | null;
  since: Date | null;
  /** In ms as `Date.now()`: when the lock expires unless it is renewed. */
  expiresAt: number | null;
  /** Whether `takeOver` is allowed. */
  mayTakeOver: boolean;
  /** The holder is the same person, in another session: another browser, or before a new login. */
  samePerson: boolean;
  /** Somebody may hear an ask for the lock. */
  mayAsk: boolean;
  /** `malformed_key`: the key names no document. */
  problem: string | null;
  /** Why no new lock is granted at the moment; `null` if locks are granted. */
  frozen: Frozen | null;
}

/** No new locks are granted until then. */
export interface Frozen {
  reason: string;
  until: Date;
}

export type Mode = 'exclusive' | 'shared';

/** Why a page has lost its lock. May be completed by a later `change`. */
export interface Loss {
  /**
   * `broken`: removed or taken over; see the lock for the new holder, if there is one. `released`: also by another tab of the
   * same person, which took it over. `person_changed`: somebody else
   * is logged in now, for whom this object neither locks nor saves. Close it, and open a new one, when the text is no
   * longer needed.
   */
  kind: 'broken' | 'expired' | 'released' | 'session_ended' | 'person_changed' | 'unknown';
  /** The person who broke it, for display only. */
  by: string | null;
  /** The reason that this person gave. */
  reason: string | null;
  at: Date;
}

/** An end of the lock that comes although the page is alive. */
export interface Ending {
  /**
   * `idle`: the person does nothing; any key or click on the page extends the lock. `max_hold`: nobody may hold a lock for
   * longer. `session`: the login ends.
   */
  why: 'idle' | 'max_hold' | 'session';
  at: Date;
  /** Whether `extend` helps. */
  canExtend: boolean;
}

/** A save of the document by somebody else, or in another tab. */
export interface Save {
  /** The person, for display only. `null` if the save was noticed later, after a gap in the events. */
  by: string | null;
  /** `null`: look. The document may have been deleted. */
  version: string | null;
}

/** A request to the holder of a lock for the document. */
export interface Ask {
  id: string;
  /** The asker. For display only. */
  by: string;
  /** The reason: one line, perhaps empty. */
  message: string;
  at: Date;
  /** `soon`: the holder will release the lock; `no`: not now. `null`: no answer yet. */
  answer: 'soon' | 'no' | null;
  /** The holder's words, perhaps none. */
  reply: string;
}

/** The ask of this page. */
export interface OwnAsk extends Ask {
  /** How many others were known to wait or to have asked before, at least. */
  ahead: number;
  /** The holder did not answer for a minute, and has not answered since. */
  isSilent: boolean;
}

/** A text that was typed and not saved, when this browser was closed, for example. Nothing is restored silently. */
export interface KeptText {
  /** When it was typed. */
  at: Date;
  /** The version of the document on which it was typed. */
  version: string | null;
  /** Whether the page still shows this version. */
  readonly isCurrent: boolean;
  /** Whether its form was submitted, and it is not known that this text was saved. It may be stored, or changed by the server. */
  submitted: boolean;
  /** The typed values by name: for forms a list, because fields may share a name. A tick or an option is `{ value, on }`. */
  fields: Record<string, unknown>;
  /**
   * The fields into which the person typed, if they differ from the stored text now, with their labels and as people read them; after
   * `restore()` those that have no place.
   */
  readonly differences: { name: string; label: string; kept: string; now: string }[];
  /**
   * Puts each typed value into its own field, if that field is still there; the others stay. Counts
   * as input. Returns the values that have no place, by name: show them. A text that was in the page and not stored is offered by
   * `onkept` then.
   */
  restore(): Record<string, unknown>;
  /** Forgets it. */
  discard(): Promise<void>;
}

/** For editors that are no form. `write` may return what has no place any more. */
export interface TextSource {
  read(): Record<string, unknown>;
  write(fields: Record<string, unknown>): Record<string, unknown> | void;
}

export interface KeepOptions {
  /** A kept text differs from the stored one: show both, and let the person decide. */
  onkept?(text: KeptText): void;
  /**
   * A text was not kept: the browser's storage is `full` or `unavailable` (as in private windows), the text has more
   * than 1 MB, or the server names `nobody` for whom it could be kept.
   */
  onproblem?(problem: 'full' | 'too_large' | 'unavailable' | 'nobody', error: unknown): void;
  /** The page shows an unsaved text from the beginning, as after a save that was refused: what was typed before goes on to be kept. */
  isUnsaved?: boolean;
}

export interface Keeper {
  /** Why the latest text is not kept, as `onproblem` was told; `null` once it is kept again. A `change` of the lock tells so. */
  readonly problem: string | null;
  /** The person has changed the text. Not needed for forms: an editor in a form dispatches the event `doclock-typed` at its field. */
  changed(): void;
  /** The text in the page is the stored one now. Saves by `fetch` of the lock are noticed without it. After `close` and `clearKept` a keeper does nothing. */
  saved(): Promise<void>;
  /** Forgets the typed text, until more is typed. */
  discard(): Promise<void>;
  /** Resolves when the typed text is kept. */
  flush(): Promise<void>;
  close(): void;
}

/** An RFC 9457 problem. */
export interface Problem {
  status: number;
  code?: string;
  title: string;
  /** What happened and what to do, for the person. */
  detail: string;
  /** In a refusal, if the application names its documents. */
  document?: { title: string; link: string | null };
}

export interface Options {
  /** Default: `exclusive`. */
  mode?: Mode;
  /** `false`: only show the state. Default: true. */
  acquire?: boolean;
  /**
   * Lock at the first input here (or `doclock-typed` of an editor), instead of at once. While another person or tab holds the
   * lock, the fields of a form are read-only; typed text stays. The form has the state in its attribute `data-doclock`.
   */
  on?: HTMLFormElement | EventTarget;
  /**
   * The version of the document that this page shows, as its answer said in `ETag` (without the quotes). Then the page is
   * told if the document has changed since, and `fetch` of the lock writes onto this version only.
   */
  version?: string | null;
  /** How long before an end the page is told. Default: 60 000; at least 20 000. */
  warnMs?: number;
  /** Wait if there is another holder. Default: false. */
  wait?: boolean;
  /** Stop waiting when the person has not touched the page for this long. Default: ten minutes. */
  waitIdleMs?: number;
  /** This page holds the lock, for the first time or again: load the document, it may have changed. */
  onheld?(lock: DocLock): void;
  /**
   * The lock is gone; or it has expired while the server could not be reached. The page should keep the text that was
   * typed.
   */
  onlost?(loss: Loss, lock: DocLock): void;
  /**
   * The document has changed since this page has shown it: show both texts. After an acquire the page holds the lock
   * nevertheless; after a save nothing was written.
   */
  onstale?(now: { version: string }, lock: DocLock): void;
  /**
   * Somebody else, or another tab, has saved: load the document, or offer it. Not told while this page holds the lock, unless the
   * page names no version, and the save of the holder before is told late.
   */
  onsaved?(save: Save, lock: DocLock): void;
  /** The lock will end. See `ending` for a later change. */
  onending?(ending: Ending, lock: DocLock): void;
  /** Somebody asks for the lock of this page. See `asks` for all. */
  onasked?(ask: Ask, lock: DocLock): void;
  /** The holder answers the ask of this page. */
  onanswered?(ask: OwnAsk, lock: DocLock): void;
  /** Nobody holds the lock; also called when the page learns this for the first time. */
  onfree?(lock: DocLock): void;
  /** Any of the fields has changed. */
  onchange?(lock: DocLock): void;
}

/** An event of a lock. `resync`: check all documents; `hint`: check this document. */
export type LockEvent =
  /** `isLive`: there is a stream. Otherwise this comes every few seconds while the page is visible. */
  | { type: 'resync'; isLive: boolean }
  | { type: 'hint'; key: string }
  | {
      type: 'acquired'; key: string; collection: string; id: string;
      state: 'mine' | 'mine_elsewhere' | 'held'; mode: Mode; holder: { label: string } | null;
      since: string; expires_in_ms: number;
    }
  | {
      type: 'released' | 'expired' | 'broken' | 'session_ended'; key: string; collection: string; id: string;
      state: 'free'; was: 'mine' | 'mine_elsewhere' | 'held'; holder: { label: string } | null;
      by?: string; reason?: string;
    }
  | {
      type: 'saved'; key: string; collection: string; id: string; whose: 'mine' | 'mine_elsewhere' | 'held';
      by: string; version: string | null;
    }
  /** `asked`: for the holder. `answered`: for the asker. */
  | {
      type: 'asked' | 'answered'; key: string; collection: string; id: string; whose: 'mine' | 'mine_elsewhere' | 'held';
      ask: string; by: string; message: string; at: string; answer?: 'soon' | 'no'; reply?: string;
    };

/** The events of a `DocLock`. */
export interface DocLockEvents {
  held: CustomEvent<null>;
  lost: CustomEvent<Loss>;
  free: CustomEvent<null>;
  stale: CustomEvent<{ version: string }>;
  saved: CustomEvent<Save>;
  ending: CustomEvent<Ending>;
  asked: CustomEvent<Ask>;
  answered: CustomEvent<OwnAsk>;
  change: CustomEvent<null>;
}

/** What a lock says at one moment. */
export type Snapshot = Readonly<Pick<DocLock, 'url' | 'key' | 'mode' | 'state' | 'holder' | 'since' | 'expiresAt' | 'mayTakeOver' | 'samePerson' | 'mayAsk'
  | 'frozen' | 'lost' | 'waiting' | 'busy' | 'problem' | 'token' | 'offline' | 'current' | 'deleted' | 'ending' | 'asks' | 'asking' | 'askProblem' | 'version'>>;

/**
 * The lock of one document. All objects of a page for one document and mode share one lock, which is released when none of
 * them needs it any more.
 */
export class DocLock extends EventTarget {
  addEventListener<K extends keyof DocLockEvents>(
    type: K, listener: (this: DocLock, event: DocLockEvents[K]) => void, options?: boolean | AddEventListenerOptions,
  ): void;
  addEventListener(type: string, listener: EventListenerOrEventListenerObject | null, options?: boolean | AddEventListenerOptions): void;

  /** Opens the lock of a document, `url` as in `/locks/workitem/42`, and asks for the lock. */
  static open(url: string | URL, options?: Options): DocLock;
  /**
   * For applications without cookies: headers for each request. Set it before anything else. Such a page has
   * no stream of events, and polls instead.
   */
  static set headers(headers: () => Record<string, string> | Promise<Record<string, string>>);
  /** The state of a document, from one request; `null` if the server did not answer. */
  static look(url: string | URL): Promise<Standing | null>;
  /** The states of several documents of one lock API, from one request for every 200 documents. */
  static look(urls: (string | URL)[]): Promise<(Standing | null)[]>;
  /**
   * Keeps a list of documents live. Calls back with the states by `collection/id`: at first of all `keys`,
   * then of those that have changed; `null` if the server did not answer.
   */
  static list(
    base: string, keys: string[], callback: (states: Map<string, Standing | null>) => void,
  ): { show(keys: string[]): void; look(): void; close(): void };
  /** Reports the events of the lock API at `base`, as in `/locks`. Returns a function that ends this. */
  static events(base: string, callback: (event: LockEvent) => void): () => void;
  /**
   * Tells that the person is active. Call it at input that this page does not receive, as in an iframe. Keys,
   * the pointer and any other input of the page itself are noticed without it, and so is `doclock-typed`.
   */
  static touch(): void;
  /**
   * Call it after a login or a logout without a new page: all tabs of this browser get the events of the person
   * who is logged in now, and the locks of this page are checked.
   */
  static reconnect(): void;

  readonly url: string;
  /** The name in events and heartbeats: `collection/id`. */
  readonly key: string;
  readonly mode: Mode;
  /**
   * As in `Standing`. `unknown`: there is no answer yet; or this page held the lock until it expired,
   * as after a sleep, and the server has not yet confirmed it.
   */
  readonly state: Standing['state'];
  readonly holder: string | null;
  readonly since: Date | null;
  readonly expiresAt: number | null;
  readonly mayTakeOver: boolean;
  readonly samePerson: boolean;
  readonly mayAsk: boolean;
  /** The token of this acquisition. */
  readonly token: string | null;
  /** Why no new lock is granted at the moment; `null` if locks are granted. */
  readonly frozen: Frozen | null;
  /**
   * The version that this page shows, if it names versions. `fetch` keeps it up to date if the answers have an `ETag`;
   * set it whenever the page shows another version. An `ETag` may be set as it is, with its quotes.
   */
  version: string | null;
  /** Whether the document still had that version when this page got the lock; `null` if that is not known. */
  readonly current: boolean | null;
  /** Whether the document has been deleted, as the server said when a page that names a version asked last. */
  readonly deleted: boolean;
  /** The end of the lock that comes soon; `null` if none does. */
  readonly ending: Ending | null;
  /** The asks for the lock of this page, at most 8, the first one first. */
  readonly asks: readonly Ask[];
  /** The ask of this page, while another person has the lock; `null` if there is none. */
  readonly asking: OwnAsk | null;
  /** Why the server has refused the latest `ask` or `answer`; `null` once another holder is known. */
  readonly askProblem: Problem | null;
  /** Why this page has lost the lock; `null` once it holds the lock again. */
  readonly lost: Loss | null;
  /** This page waits for the lock. */
  readonly waiting: boolean;
  /** An operation that the person asked for is under way. */
  readonly busy: boolean;
  /** No answer came recently. A lock that is `mine` remains so until `expiresAt`. */
  readonly offline: boolean;
  /**
   * Why the server refused the last request, unless the reason is another holder; or why it cannot answer at the
   * moment (429, 5xx, or any refusal of a heartbeat, as a 403 of a proxy), although it is not `offline`; or `login_required`, if
   * another page has answered.
   */
  readonly problem: Problem | null;

  /** Asks for the lock, also after a loss. Never rejects. */
  acquire(): Promise<DocLock['state']>;
  /**
   * `acquire` after a loss. Resolves with `stale` if this page has the lock again, but the document has changed since, or
   * the page names no versions.
   */
  resume(): Promise<DocLock['state'] | 'stale'>;
  /** The person is active: postpones an `idle` end. Resolves with whether no end comes soon. */
  extend(): Promise<boolean>;
  /**
   * Keeps what the person types into a form, or into another editor, in this browser until it is saved: by person and document, for 30
   * days (browsers may forget sooner), at most 1 MB each and 50 documents. Call it when the stored text is in the page. Only the
   * person's own input counts, field by field; changes by scripts do not.
   * Not kept: passwords, files, hidden fields, fields within `data-doclock-keep="no"`, and texts of visitors without a
   * name (see `identify` of the server). It sets `autocomplete="off"` on the form: otherwise browsers put the text of an
   * earlier visit over the stored one.
   */
  keep(source: HTMLFormElement | TextSource, options?: KeepOptions): Promise<Keeper>;
  /**
   * For shared computers, before the person's own logout: forgets the texts of this person (of everybody, if this page has
   * heard of no person yet), and keeps none in the open pages any more, if `ask` says so. Default: the browser asks. Resolves
   * with `false` if the person wants to keep them.
   */
  static clearKept(ask?: (count: number) => boolean | Promise<boolean>): Promise<boolean>;
  /**
   * For a page without the form, to which a save leads: forgets the text that was sent, if the server knows of a save under its lock, and
   * the button had no `name` and no `formaction`. `doclock-saved` does the same.
   */
  static settleKept(url: string | URL): Promise<void>;
  /**
   * Asks what became of a form that the browser has sent with this token and version: resolves with the version that was saved under
   * that lock, or with `null` if none was, or if the server does not know.
   */
  wasSaved(sent: { token: string; version: string }): Promise<string | null>;
  /** Takes the lock from another tab, or from another person if `mayTakeOver`. Never rejects. */
  takeOver(): Promise<DocLock['state']>;
  /**
   * Waits until this page holds the lock, or the person has not touched the page for `waitIdleMs`. A hidden page
   * waits, too: `onheld` should tell the person, as by the title.
   */
  wait(): void;
  /**
   * Waits as `wait` does, and asks the holder for the document, in at most 500 bytes: asking changes no order. The ask ends
   * with the wait, with the lock of that holder, and when this page is left. Resolves with `null` if no ask stands: nobody held the
   * lock, or see `askProblem`. Never rejects.
   */
  ask(message?: string): Promise<OwnAsk | null>;
  /**
   * Answers one of `asks`. To give the document away, save and `release`: its next waiter is in. Resolves with whether the
   * asker is told: it may have left. Rejects if this page does not hold the lock.
   */
  answer(id: string, answer: 'soon' | 'no', message?: string): Promise<boolean>;
  /** Stops waiting and asking, for all objects of this page. A lock that is granted at this moment is released. */
  stopWaiting(): void;
  /** Asks the server for the current state. */
  check(): Promise<void>;
  /** Gives the lock up, unless another object of this page needs it, and goes on reporting its holder. */
  release(): Promise<void>;
  /** Gives the lock up, unless another object of this page needs it, and reports nothing any more. */
  close(): Promise<void>;
  /**
   * `fetch` with the proof that this page holds the lock. If the server refuses the request because
   * of the lock, `lost` is set when this resolves. Rejects if this page does not hold the lock.
   * `locks`: other locks of this page that the request needs. `releases`: this request also releases them all. `saves`:
   * whether a write stores the text of the page (default: true, and `false` for a PATCH); say `false` for a comment or an attachment, so
   * that the text stays kept, or the names of the fields that are saved. `lock_token`, `tab` and `version` are taken out of the address: the headers say them. A save that names a
   * version waits for the one before. It saves what the page shows at the call, and nothing that is typed after it.
   */
  fetch(
    url: RequestInfo | URL,
    init?: RequestInit,
    options?: { releases?: boolean, saves?: boolean | string[], locks?: DocLock[] },
  ): Promise<Response>;

  // For requests that `fetch` of the lock does not send.

  /**
   * The headers that prove that this page holds the lock; also `If-Match`, if the page names versions. Throws if this page does
   * not hold the lock. Headers that `DocLock.headers` gives are not among them. For one write at a time: tell its answer by
   * `saved` or `refused`.
   */
  headers(): Record<string, string>;
  /**
   * The address with `lock_token`, `tab` (unless it is a parameter of your own) and `version` (if the page names one), which mean what the headers mean: for an HTML form. Throws if this
   * page does not hold the lock, and for an address of another site.
   */
  address(url: string | URL): string;
  /**
   * The write with `headers()` is stored: takes the version from the `ETag`, and keeps the text no longer that the page showed when
   * `headers` was called, in all fields or in those with these names. Do not call it for another page that has answered, such as a login
   * page after a redirect.
   */
  saved(answer: Response | XMLHttpRequest | { headers: object }, saves?: boolean | string[]): void;
  /**
   * The write with `headers()` is not stored. Resolves with `true` if it may have been refused because of the lock; `lost` is set by
   * then, if the lock is lost. The body is JSON, as text or as a value in `data`; other bodies are ignored.
   */
  refused(answer: Response | XMLHttpRequest | { status: number; data?: unknown }): Promise<boolean>;

  // For frameworks that draw when something changes, as `useSyncExternalStore` of React. Both may be called without their object.

  /** Calls back at each change. Returns a function that ends this. */
  subscribe(listener: () => void): () => void;
  /** The same object until something changes. */
  getSnapshot(): Snapshot;
}
