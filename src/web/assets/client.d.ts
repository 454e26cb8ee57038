// Types of client.js.

/** How a document stands, for the page that asks. */
export interface Standing {
  /**
   * `mine`: this page has the lock. `mine_elsewhere`: another tab of the same person has it.
   * `held`: somebody else has it. `free`: nobody has it.
   */
  state: 'mine' | 'mine_elsewhere' | 'held' | 'free';
  mode: Mode | null;
  /** Who has it, for display only. Show it as text: it was typed by somebody. */
  holder: string | null;
  since: Date | null;
  /** In ms as `Date.now()`: when it ends unless it is renewed. */
  expiresAt: number | null;
  /** Whether `takeOver` is allowed. */
  mayTakeOver: boolean;
}

export type Mode = 'exclusive' | 'shared';

/** Why a page has its lock no more. May be completed by a later `change`. */
export interface Loss {
  /** `broken`: removed or taken over; who has it now, if anybody, the lock tells. */
  kind: 'broken' | 'expired' | 'released' | 'session_ended' | 'unknown';
  /** Who broke it, for display only. */
  by: string | null;
  /** Why, in the words of who broke it. */
  reason: string | null;
  at: Date;
}

/** An RFC 9457 problem. */
export interface Problem {
  status?: number;
  code?: string;
  title?: string;
  detail?: string;
}

export interface Options {
  /** Default: `exclusive`. */
  mode?: Mode;
  /** `false`: only look. Default: true. */
  acquire?: boolean;
  /** Stand in line if somebody else has it. Default: false. */
  wait?: boolean;
  /** Stop standing in line when the person has not touched the page for so long. Default: ten minutes. */
  waitIdleMs?: number;
  /** The lock is here, for the first time or again: load the document, it may have changed. */
  onheld?(lock: DocLock): void;
  /** The lock is gone. What was typed is the page's to keep. */
  onlost?(loss: Loss, lock: DocLock): void;
  /** Nobody has the lock any more. */
  onfree?(lock: DocLock): void;
  /** Any of the fields has changed. */
  onchange?(lock: DocLock): void;
}

/** What happened to a lock. `resync`: look at everything; `hint`: look at this one. */
export type LockEvent =
  /** `isLive`: there is a stream; else this comes every few seconds, while the page is visible. */
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
    };

/** The lock of one document. Also tells `held`, `lost`, `free` and `change` as an `EventTarget`. */
export class DocLock extends EventTarget {
  /** Opens the lock of a document, `url` as in `/locks/workitem/42`, and asks for it. */
  static open(url: string | URL, options?: Options): DocLock;
  /** How a document stands, asked once; `null` if the server did not say. */
  static look(url: string | URL): Promise<Standing | null>;
  /** What happens to the locks of the lock API at `base`, as in `/locks`. Returns what ends it. */
  static events(base: string, callback: (event: LockEvent) => void): () => void;

  readonly url: string;
  /** As events and heartbeats name it: `collection/id`. */
  readonly key: string;
  readonly mode: Mode;
  /**
   * As in `Standing`. `unknown`: not answered yet; or this page had it and its time is up, as after a
   * sleep, until the server has said whether it is still there.
   */
  readonly state: Standing['state'] | 'unknown';
  readonly holder: string | null;
  readonly since: Date | null;
  readonly expiresAt: number | null;
  readonly mayTakeOver: boolean;
  /** Of this acquisition. */
  readonly token: string | null;
  /** Why this page has it no more; `null` once it has it again. */
  readonly lost: Loss | null;
  /** The page stands in line. */
  readonly waiting: boolean;
  /** What the person asked for is under way. */
  readonly busy: boolean;
  /** The server did not answer lately. A lock that is `mine` is so until `expiresAt` all the same. */
  readonly offline: boolean;
  /** Why the server refused the last request, other than that somebody has the lock. */
  readonly problem: Problem | null;

  /** Asks for the lock, also after a loss. Never rejects. */
  acquire(): Promise<DocLock['state']>;
  /** Takes the lock from another tab, or from somebody else if `mayTakeOver`. Never rejects. */
  takeOver(): Promise<DocLock['state']>;
  /** Stands in line until the lock is here, while the page is visible and the person is there. */
  wait(): void;
  stopWaiting(): void;
  /** Asks the server how things stand. */
  check(): Promise<void>;
  /** Gives the lock up, and goes on telling who has it. */
  release(): Promise<void>;
  /** Gives the lock up; nothing is told any more. */
  close(): Promise<void>;
  /**
   * `fetch` with the proof that this page holds the lock. A refusal because of the lock is `lost`
   * when this resolves. Rejects if this page does not have the lock. `releases`: the server releases
   * the lock with this request.
   */
  fetch(url: RequestInfo | URL, init?: RequestInit, options?: { releases?: boolean }): Promise<Response>;
}
