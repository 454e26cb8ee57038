//! Taking, confirming and releasing locks in a request.

use std::{
    cell::OnceCell,
    collections::{BTreeSet, HashSet},
    future::{Future, Ready, ready},
    iter,
    rc::Rc,
    time::{Duration, Instant},
};

use actix_web::{FromRequest, HttpMessage, HttpRequest, dev::Payload};
use tokio::time::timeout_at;

use crate::{
    actor::{Actor, Person},
    clock,
    error::{LockError, Result},
    key::LockKey,
    lock::{Aid, Lock, LockToken, Mode, PageId, TabId},
    manager::{Acquired, Provisional, Wait, Wanted, can_be_taken_over, watch::ends::came},
    store::{Acquisition, Confirmed, Released, StoredDocument},
    web::{
        access::Permissions,
        problem::{Problem, SERVED, misconfigured},
        request::{RequestLocks, Whose},
    },
};

/// For a page that was left before the server had carried out its request: a reload keeps the lock.
const GRACE: Duration = Duration::from_secs(4);

/// After a wait of this length the access policy is asked again.
const ASK_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// A lock of this session. Our own locks always have a token.
pub(in crate::web) struct Mine {
    pub(in crate::web) lock: Lock,
    pub(in crate::web) token: LockToken,
    pub(in crate::web) is_fresh: bool,
}

impl Mine {
    fn new(lock: Lock) -> Result<Self> {
        // Only possible if somebody has edited the lock record by hand.
        let token =
            lock.token.ok_or_else(|| LockError::Lost { key: lock.key.clone(), holder: None })?;
        Ok(Self { lock, token, is_fresh: false })
    }

    pub(in crate::web) fn acquisition(&self) -> Acquisition {
        let Lock { key, aid, mode, .. } = self.lock.clone();
        Acquisition { key, aid, token: self.token, mode }
    }
}

/// How to ask for a lock.
#[derive(Clone, Copy)]
pub(in crate::web) struct Ask<'a> {
    pub(in crate::web) mode: Mode,
    /// The tokens that the client sent: the lock must have one of them. If there are none, any
    /// acquisition will do.
    pub(in crate::web) offered: &'a [LockToken],
    pub(in crate::web) wait: Wait,
    /// True if the lock is taken from another tab, or from another session if the policy allows it.
    pub(in crate::web) take_over: bool,
    /// True if the lock of another tab of the session is confirmed, too. That tab keeps the lock.
    pub(in crate::web) any_tab: bool,
    /// True if the lock is of no use without its document.
    pub(in crate::web) of_document: bool,
    /// True if the document is read together with the lock, where one read suffices.
    pub(in crate::web) load: bool,
    /// The shared lock of the session that is to become exclusive, if the client has named it.
    pub(in crate::web) upgrades: Option<LockToken>,
}

/// The state of a lock that a request has taken or confirmed.
pub(in crate::web) struct Found {
    /// True if the lock was claimed: it was granted to this request, or this request has joined the grant of another
    /// one, and perhaps that one may not keep it. False if the lock was confirmed by a read.
    pub(in crate::web) is_claimed: bool,
    /// True if there was a wait, during which the person may have lost the permission.
    pub(in crate::web) has_waited: bool,
    /// The document, if it was read together with the lock.
    pub(in crate::web) document: Option<StoredDocument>,
}

impl Ask<'_> {
    /// Asks for the exclusive lock, without a token of the client.
    pub(in crate::web) fn exclusive(wait: Wait) -> Self {
        Self {
            mode: Mode::Exclusive,
            offered: &[],
            wait,
            take_over: false,
            any_tab: false,
            of_document: false,
            load: false,
            upgrades: None,
        }
    }
}

/// The answer to a request for a lock.
struct Taken {
    mine: Mine,
    /// Gives a fresh lock back.
    fresh: Option<Provisional>,
    /// As in [`Found`].
    is_claimed: bool,
    /// The document, if one read returned both.
    document: Option<StoredDocument>,
}

impl Taken {
    fn granted(fresh: Provisional) -> Self {
        let mine = Mine { lock: fresh.lock.clone(), token: fresh.token, is_fresh: true };
        Self { mine, fresh: Some(fresh), is_claimed: true, document: None }
    }

    fn joined(lock: Lock) -> Result<Self> {
        Ok(Self { mine: Mine::new(lock)?, fresh: None, is_claimed: true, document: None })
    }

    fn confirmed(Confirmed { lock, document, .. }: Confirmed) -> Result<Self> {
        Ok(Self { mine: Mine::new(lock)?, fresh: None, is_claimed: false, document })
    }
}

/// For the handlers of this crate.
pub(in crate::web) struct Locks(pub(in crate::web) Rc<RequestLocks>);

impl FromRequest for Locks {
    type Error = LockError;
    type Future = Ready<Result<Self>>;

    fn from_request(req: &HttpRequest, _: &mut Payload) -> Self::Future {
        ready(RequestLocks::of(req).map(Self))
    }
}

/// For the extractors and the lock API.
impl RequestLocks {
    /// # Errors
    /// If there is no wrap around the route, or if the page of this request was opened for another person.
    pub(in crate::web) fn of(req: &HttpRequest) -> Result<Rc<Self>> {
        let locks = Self::of_any_page(req)?;
        locks.check_person()?;
        Ok(locks)
    }

    /// # Errors
    /// If there is no wrap around the route.
    pub(in crate::web) fn of_any_page(req: &HttpRequest) -> Result<Rc<Self>> {
        req.extensions().get::<Rc<Self>>().cloned().ok_or_else(|| {
            misconfigured(
                "the application is not wrapped in `locks.session(…)` or `locks.clients(…)`: replace \
                 `.wrap(SessionMiddleware::new(store, key))` with \
                 `.wrap(locks.session(SessionMiddleware::new(store, key)))`",
            )
        })
    }

    /// The deadline of an operation that begins now.
    pub(in crate::web) fn begin(&self) -> Instant {
        let until = self.manager.parts.calls.until();
        self.until.set(Some(until));
        until
    }

    /// The wait of a client that asks for this long.
    pub(in crate::web) fn wait_at_most(&self, wanted: Duration) -> Wait {
        Wait::for_at_most(wanted.min(self.settings.longest_wait))
    }

    /// The aid of the session, if the session has ever locked anything or been saved.
    pub(in crate::web) fn aid(&self) -> Option<Aid> {
        self.aid.borrow().clone()
    }

    /// The live locks of the session.
    pub(in crate::web) async fn list(&self, until: Instant) -> Result<Vec<Lock>> {
        match self.aid() {
            Some(aid) => self.manager.parts.reads.list(Some(&aid), until).await,
            None => Ok(Vec::new()),
        }
    }

    pub(in crate::web) fn actor(&self) -> Actor {
        self.person()
            .unwrap_or_else(|| Actor::new(self.manager.parts.settings.holder.label.clone()))
    }

    pub(super) fn person(&self) -> Option<Actor> {
        match &*self.whose.borrow() {
            Whose::Session(session) => (self.settings.identify.as_ref()?)(session),
            Whose::Client(actor) => actor.clone(),
            Whose::Nobodys => None,
        }
    }

    /// Asks the policy before a route of the application takes or confirms these locks.
    ///
    /// # Errors
    /// The refusals of the policy: the answer for a missing document, or 401.
    pub(in crate::web) async fn may_lock(&self, keys: &[LockKey]) -> Result<()> {
        let refusals = if self.has_policy() { self.may_lock_each(keys).await? } else { Vec::new() };
        refusals.into_iter().flatten().next().map_or(Ok(()), Err)
    }

    /// True if a policy decides about locks in the routes of the application.
    pub(in crate::web) fn has_policy(&self) -> bool {
        self.settings.access.is_some() && !self.settings.extractors_do_not_ask
    }

    /// As `may_lock`, but returns for each document its refusal, or none.
    pub(in crate::web) async fn may_lock_each(
        &self,
        keys: &[LockKey],
    ) -> Result<Vec<Option<LockError>>> {
        if self.settings.extractors_do_not_ask {
            return Ok(keys.iter().map(|_| None).collect());
        }
        let refusals = self.permissions().check_each(keys).await?;
        let forbidden = refusals.iter().flatten().filter_map(|refusal| match refusal {
            LockError::NotFound { key } => Some(key),
            _ => None,
        });
        self.give_back(forbidden).await?;
        Ok(refusals)
    }

    /// Releases the locks on documents that the policy of the lock API forbids to this person. Where the extractors do not
    /// ask this policy, the routes of the application may have granted these locks by their own rules, so they stay.
    pub(in crate::web) async fn give_back_forbidden(
        &self,
        forbidden: impl Iterator<Item = &LockKey>,
    ) -> Result<()> {
        if self.has_policy() { self.give_back(forbidden).await } else { Ok(()) }
    }

    /// Releases the locks on documents that this person may not, or no longer, have: whichever tab holds them.
    async fn give_back(&self, forbidden: impl Iterator<Item = &LockKey>) -> Result<()> {
        let forbidden: HashSet<_> = forbidden.collect();
        let collections: BTreeSet<_> = forbidden.iter().map(|key| key.collection()).collect();
        for collection in collections {
            for lock in self.own_in(collection, self.begin()).await? {
                if forbidden.contains(&lock.key) {
                    self.release(&Mine::new(lock)?, self.begin()).await?;
                }
            }
        }
        Ok(())
    }

    /// Gives back the locks of the session that its person may no longer have. The policy is asked at most once a minute.
    pub(in crate::web) async fn ask_again(&self) {
        let Some(aid) = self.aid().filter(|_| self.has_policy() && !self.idle) else { return };
        if !self.manager.parts.granting.is_to_be_asked(&aid) {
            return;
        }
        let held = self.manager.parts.reads.list_known(Some(&aid), self.begin()).await;
        let keys: Vec<_> = held.into_iter().flatten().map(|lock| lock.key).collect();
        if !keys.is_empty() {
            // The log tells of a policy that fails. The locks stay then, and it is asked again.
            let _ = self.may_lock_each(&keys).await;
        }
    }

    /// The locks of this session in the collection. Nobody learns from the time of the answer about the locks of others.
    async fn own_in(&self, collection: &str, until: Instant) -> Result<Vec<Lock>> {
        match self.aid() {
            Some(aid) => self.manager.parts.reads.list_in(collection, &aid, until).await,
            None => Ok(Vec::new()),
        }
    }

    /// The person for whom the limits for each person count this request.
    pub(in crate::web) fn counts_as(&self) -> Person {
        let aid = self.aid_before.borrow();
        Person::of(self.person().as_ref(), aid.as_ref(), self.address)
    }

    /// The permissions of this person.
    pub(in crate::web) fn permissions(&self) -> Permissions {
        Permissions {
            manager: Rc::clone(&self.manager),
            person: self.person(),
            knows_people: self.settings.identify.is_some() || self.is_client(),
            admits_visitors: self.settings.admits_visitors,
            policy: self.settings.access.clone(),
            answers: Rc::clone(&self.settings.answers),
            actor: self.actor(),
            sees_all: OnceCell::new(),
        }
    }

    /// The tokens that the client sent; empty if there were none.
    pub(in crate::web) fn offered(&self) -> Result<&[LockToken]> {
        self.offered.as_deref().ok_or(LockError::MalformedToken)
    }

    /// Takes or confirms the lock and does `work` with it. Keeps no new lock if the work fails.
    ///
    /// # Cancel safety
    /// If the future is dropped, a fresh grant is given back.
    pub(in crate::web) async fn acquire<T, F>(
        &self,
        key: &LockKey,
        how: Ask<'_>,
        work: impl Fn(Found, Instant) -> F,
    ) -> Result<(Mine, T)>
    where
        F: Future<Output = Result<T>>,
    {
        let _ = SERVED.try_with(|it| it.borrow_mut().document = Some(key.clone()));
        match self.acquire_or_refuse(key, how, work).await {
            Ok(acquired) => Ok(acquired),
            Err(error) => Err(self.described(error).await),
        }
    }

    /// The same refusal, with the title of its document.
    async fn described(&self, mut error: LockError) -> LockError {
        self.describe_each([&mut error]).await;
        error
    }

    /// Adds the titles of their documents to the refusals that lack them, by one call.
    pub(super) async fn describe_each(&self, errors: impl IntoIterator<Item = &mut LockError>) {
        let mut locks = Vec::new();
        for error in errors {
            if let LockError::Held(lock)
            | LockError::HeldByOtherTab(lock)
            | LockError::WouldDeadlock { holder: Some(lock), .. } = error
                && lock.description.is_none()
            {
                locks.push(lock);
            }
        }
        if locks.is_empty() {
            return;
        }
        let keys: Vec<_> = locks.iter().map(|lock| lock.key.clone()).collect();
        let (person, asker) = (self.person(), self.counts_as());
        let parts = &self.manager.parts;
        let titles = parts.descriptions_for(person.as_ref(), Some(&asker), &keys).await;
        for lock in locks {
            lock.description = titles.get(&lock.key).cloned().map(Box::new);
        }
    }

    /// # Errors
    /// If this request may take no lock at all.
    pub(super) fn check_may_lock(&self) -> Result<()> {
        if self.speculative { Err(LockError::Speculative) } else { self.check_client() }
    }

    async fn acquire_or_refuse<T, F>(
        &self,
        key: &LockKey,
        how: Ask<'_>,
        work: impl Fn(Found, Instant) -> F,
    ) -> Result<(Mine, T)>
    where
        F: Future<Output = Result<T>>,
    {
        self.check_may_lock()?;
        let mut how = how;
        if !how.offered.is_empty() && !how.take_over {
            let until = self.begin();
            match self.confirm(key, how.mode, how.offered, how.load, until).await {
                Ok((mine, document)) => {
                    let found = Found { is_claimed: false, has_waited: false, document };
                    let worked = work(found, until).await;
                    return self.keep_if_found(mine, None, worked, until).await;
                }
                Err(e) => how = self.upgrade(how, e)?,
            }
        }
        let mut aid = self.aid_for_lock()?;
        // Confirmed, and not acquired again: otherwise the record would say that another request was told of the lock,
        // and the end of this request would not give the lock back.
        if self.has_taken(key, &aid, how.mode) {
            let until = self.begin();
            let (mut mine, document) = self.confirm(key, how.mode, &[], how.load, until).await?;
            mine.is_fresh = true;
            let found = Found { is_claimed: true, has_waited: false, document };
            let worked = work(found, until).await;
            return self.keep_if_found(mine, None, worked, until).await;
        }
        self.manager.parts.granting.may_ask(key, &aid, self.begin()).await?;
        if how.of_document
            && !self.manager.parts.granting.may_exist(key, &aid, self.begin()).await?
        {
            self.give_back(iter::once(key)).await?;
            return Err(LockError::NotFound { key: key.clone() });
        }
        let began = clock::now();
        loop {
            let Taken { mine, fresh, is_claimed, document } = self.take(key, how, &aid).await?;
            let until = self.begin();
            let has_waited = is_claimed && clock::since(began) > ASK_AGAIN_AFTER;
            // A session that ends at this moment either releases this lock, or has already left its
            // tombstone. A lock from an earlier request was released by that end. The same applies to a page that is left.
            let alive = async {
                if is_claimed {
                    self.manager.parts.sessions.refuse_ended(&aid, self.page, until).await
                } else {
                    Ok(())
                }
            };
            let room = async {
                if is_claimed {
                    self.manager.parts.granting.may_keep(&mine.lock, until).await
                } else {
                    Ok(())
                }
            };
            let found = Found { is_claimed, has_waited, document };
            let (alive, room, worked) = tokio::join!(alive, room, work(found, until));
            if let Err(refused) = alive.and(room) {
                aid = self.take_again_as(refused, &mine, fresh, until).await?;
                continue;
            }
            let kept = self.keep_if_found(mine, fresh, worked, until).await?;
            if is_claimed && !kept.0.is_fresh {
                self.manager.parts.granting.told(&kept.0.lock);
            }
            return Ok(kept);
        }
    }

    /// How to ask for the exclusive lock if the client has named its own shared lock. Two readers that waited would wait for
    /// each other.
    ///
    /// # Errors
    /// If the acquisition that the client has named is gone.
    fn upgrade<'a>(&self, how: Ask<'a>, error: LockError) -> Result<Ask<'a>> {
        Err(match error {
            LockError::Lost { holder: Some(lock), .. }
                if self.is_own(&lock) && is_among(how.offered, &lock) =>
            {
                return Ok(Ask { upgrades: lock.token, wait: Wait::no(), ..how });
            }
            LockError::Lost { holder: Some(lock), .. } if !self.is_own(&lock) => {
                LockError::Held(lock)
            }
            LockError::WrongSession { lock, .. } => LockError::WrongSession { lock, asked: true },
            LockError::Lost { key, .. } => LockError::StaleToken { key },
            other => other,
        })
    }

    /// Gives back a lock that this request may not keep. Returns the new aid of a session that came back, which may try
    /// again.
    ///
    /// # Errors
    /// The refusal, for all others.
    async fn take_again_as(
        &self,
        refused: LockError,
        mine: &Mine,
        fresh: Option<Provisional>,
        until: Instant,
    ) -> Result<Aid> {
        match &refused {
            // The request that was granted the lock gives it back, or it is an old one.
            LockError::TooManyLocks { .. } if fresh.is_none() => {}
            LockError::SessionEnded { .. } | LockError::TooManyLocks { .. } => {
                // Other requests of the session may have been told that they hold this lock, and may not keep it either.
                self.release(mine, until).await?;
                if let Some(fresh) = fresh {
                    fresh.forget();
                }
            }
            // This request has made the lock one of its page, whose beacon has come before.
            LockError::PageLeft if fresh.is_none() && mine.lock.mode == Mode::Exclusive => {
                let granting = &self.manager.parts.granting;
                granting.release_in(&mine.acquisition(), self.page, GRACE, until).await?;
            }
            _ => {}
        }
        match refused {
            // A token that was logged out stays so.
            LockError::SessionEnded { ago } if ago > self.news_for() && !self.is_client() => {
                Ok(self.replace_aid(&mine.lock.aid))
            }
            refused => {
                if let LockError::SessionEnded { .. } = refused {
                    self.has_ended.set(true);
                }
                Err(refused)
            }
        }
    }

    /// True if this request has taken such a lock on this document.
    fn has_taken(&self, key: &LockKey, aid: &Aid, mode: Mode) -> bool {
        let is_such = |lock: &Lock| lock.key == *key && lock.aid == *aid && lock.mode.covers(mode);
        self.fresh.borrow().iter().map(|fresh| &fresh.lock).any(is_such)
    }

    /// Sends one command, if there is no wait.
    async fn take(&self, key: &LockKey, how: Ask<'_>, aid: &Aid) -> Result<Taken> {
        let (actor, manager) = (self.actor(), &self.manager);
        let (key, aid, mode) = (key.clone(), aid.clone(), how.mode);
        let (holder, ttl) = (actor.holder(), manager.parts.settings.ttl);
        let (tab, page) = (self.tab, self.page);
        let (person, upgrades) = (Some(self.counts_as()), how.upgrades);
        let wanted = Wanted { key, aid, person, holder, tab, page, mode, upgrades, ttl };
        // A request of an idle page renews nothing else, so it must renew this lock.
        if !self.idle
            && upgrades.is_none()
            && let Some(confirmed) =
                manager.parts.granting.reenter(&wanted, how.load, self.begin()).await?
        {
            return Taken::confirmed(confirmed);
        }
        let (began, mut has_waited) = (clock::now(), false);
        loop {
            self.begin();
            let wait = if has_waited { Wait::no() } else { how.wait.since(began) };
            let acquired = self.acquire_or_wait(&wanted, wait).await?;
            // A new deadline, but not after an error: the answer need not wait until an unwanted lock is given back.
            let until = self.begin();
            let from = match acquired {
                Acquired::Granted(fresh) => return Ok(Taken::granted(fresh)),
                Acquired::Lost(key) => return Err(LockError::StaleToken { key }),
                // Another request of the session has got the lock during this wait.
                Acquired::Held(lock) if lock.aid == wanted.aid && !has_waited => {
                    has_waited = true;
                    continue;
                }
                Acquired::AlreadyMine(lock) => {
                    if how.any_tab || !self.is_of_another_tab(&lock) {
                        return Taken::joined(lock);
                    }
                    if !how.take_over {
                        return Err(LockError::HeldByOtherTab(Box::new(lock)));
                    }
                    lock
                }
                Acquired::Held(lock) => {
                    if !how.take_over || !can_be_taken_over(&lock) {
                        return Err(LockError::Held(Box::new(lock)));
                    }
                    if !manager.parts.may_take_over(&actor, &lock) {
                        return Err(LockError::TakeOverRefused { key: lock.key });
                    }
                    // Otherwise nobody would have the lock in the end.
                    if manager.parts.granting.room(&wanted.aid, until).await? == 0 {
                        return Err(manager.parts.granting.too_many_locks());
                    }
                    lock
                }
            };
            let taken = manager.parts.take_over(&from, &wanted, &actor, &self.scope, until).await?;
            if let Some(fresh) = taken {
                return Ok(Taken::granted(fresh));
            }
            // The lock is gone in the meantime, so it may be free now.
        }
    }

    /// A wait ends with its session, and with its page, on whatever server they have ended.
    ///
    /// # Errors
    /// [`LockError::SessionEnded`], [`LockError::PageLeft`] if they end during the wait.
    async fn acquire_or_wait(&self, wanted: &Wanted, wait: Wait) -> Result<Acquired> {
        let parts = &self.manager.parts;
        let acquired = parts.acquire_or_wait(wanted, &wanted.aid, wait, &self.scope);
        if wait == Wait::no() {
            return acquired.await;
        }
        self.has_waited.set(true);
        let end = parts.end_of(&wanted.aid);
        let left = wanted.page.map(|page| parts.end_of(&wanted.aid.of_page(page)));
        tokio::select! {
            biased;
            // A waiter that has left must not take the lock of the page that was loaded instead.
            () = came(left.as_ref()) => Err(LockError::PageLeft),
            acquired = acquired => acquired,
            () = end.came() => {
                self.has_ended.set(true);
                Err(LockError::SessionEnded { ago: Duration::ZERO })
            }
        }
    }

    fn is_own(&self, lock: &Lock) -> bool {
        self.aid.borrow().as_ref() == Some(&lock.aid)
    }

    /// True if another tab of this session holds this lock. A shared lock belongs to all tabs of its
    /// session.
    pub(in crate::web) fn is_of_another_tab(&self, lock: &Lock) -> bool {
        let tabs = self.tab.zip(lock.tab);
        lock.mode == Mode::Exclusive && tabs.is_some_and(|(this, of_lock)| this != of_lock)
    }

    /// The refusal that the lock API sends for this error. If somebody holds the lock, it also names the document, and
    /// says whether this person may take the lock over.
    pub(in crate::web) fn problem(&self, error: LockError) -> Problem {
        let told = match &error {
            LockError::Held(lock) => Some((lock.key.to_string(), self.may_take_over(lock))),
            LockError::HeldByOtherTab(lock) => Some((lock.key.to_string(), true)),
            _ => None,
        };
        let problem = Problem::from(error);
        match told {
            Some((key, may)) => problem.with("key", key).with("may_take_over", may),
            None => problem,
        }
    }

    pub(in crate::web) fn may_take_over(&self, lock: &Lock) -> bool {
        self.manager.parts.may_take_over(&self.actor(), lock)
    }

    /// Releases the lock of this tab, whatever its token.
    pub(in crate::web) async fn release_key(&self, key: &LockKey) -> Result<Released> {
        let until = self.begin();
        let own = self.own_in(key.collection(), until).await?;
        match own.into_iter().find(|lock| lock.key == *key) {
            None => Ok(Released::AlreadyGone),
            Some(lock) if self.is_of_another_tab(&lock) => {
                Err(LockError::StaleToken { key: key.clone() })
            }
            Some(lock) => self.release(&Mine::new(lock)?, until).await,
        }
    }

    /// The page of this tab has been left, and may not know yet which lock it has been granted: its exclusive lock on the
    /// document expires after `grace`. A lock that is granted to it later is given back at once, on every server. Its
    /// shared lock stays, which another tab may have taken.
    pub(in crate::web) async fn leave(
        &self,
        key: &LockKey,
        tab: Option<TabId>,
        page: PageId,
        grace: Duration,
    ) -> Result<()> {
        let Some(aid) = self.aid() else { return Ok(()) };
        let (parts, until) = (&self.manager.parts, self.begin());
        parts.sessions.end_page(&aid, page, until).await?;
        let own = self.own_in(key.collection(), until).await?;
        let is_of_tab = |lock: &Lock| {
            lock.key == *key && lock.mode == Mode::Exclusive && tab.is_some() && lock.tab == tab
        };
        if let Some(lock) = own.into_iter().find(is_of_tab) {
            let held = Mine::new(lock)?.acquisition();
            parts.granting.release_in(&held, Some(page), grace, until).await?;
        }
        Ok(())
    }

    async fn keep_if_found<T>(
        &self,
        mine: Mine,
        fresh: Option<Provisional>,
        worked: Result<T>,
        until: Instant,
    ) -> Result<(Mine, T)> {
        match worked {
            Ok(value) => {
                self.fresh.borrow_mut().extend(fresh);
                self.remember(&mine);
                Ok((mine, value))
            }
            Err(e) => {
                if let LockError::NotFound { .. } = e {
                    self.manager.parts.granting.missed(&mine.lock.aid);
                }
                if let LockError::NotFound { .. } | LockError::LoginRequired = e {
                    // Such a lock is of no use, not even one from an earlier request.
                    self.release(&mine, until).await?;
                    if let Some(fresh) = fresh {
                        fresh.forget();
                    }
                }
                Err(e)
            }
        }
    }

    fn remember(&self, mine: &Mine) {
        let mut held = self.held.borrow_mut();
        if !held.contains(&mine.token) {
            held.push(mine.token);
        }
        self.names(&mine.lock);
    }

    /// A new aid for a session that came back, unless another extractor has already given it one.
    fn replace_aid(&self, dead: &Aid) -> Aid {
        let mut aid = self.aid.borrow_mut();
        if aid.as_ref() == Some(dead) {
            *aid = None;
        }
        aid.get_or_insert_with(Aid::new).clone()
    }

    /// Makes sure that this session already holds the lock; if tokens are offered, the lock must have one of
    /// them. With `load`, returns the document as well, where one read suffices.
    pub(in crate::web) async fn confirm(
        &self,
        key: &LockKey,
        mode: Mode,
        offered: &[LockToken],
        load: bool,
        until: Instant,
    ) -> Result<(Mine, Option<StoredDocument>)> {
        let _ = SERVED.try_with(|it| it.borrow_mut().document = Some(key.clone()));
        self.check_client()?;
        let aid = self.aid();
        let confirmed = match &aid {
            Some(aid) => self.manager.parts.reads.confirm(key, aid, load, until).await?,
            None => None,
        };
        let (lock, document) = match confirmed {
            Some(Confirmed { lock, document, .. }) if lock.mode.covers(mode) => (lock, document),
            _ => (self.own_lock(key, mode, aid, offered, until).await?, None),
        };
        let mine = Mine::new(lock)?;
        let is_known = if offered.is_empty() {
            !self.is_of_another_tab(&mine.lock)
        } else {
            offered.contains(&mine.token)
        };
        if !is_known {
            return Err(LockError::StaleToken { key: key.clone() });
        }
        self.remember(&mine);
        Ok((mine, document))
    }

    /// The lock of this session, or why it has none.
    async fn own_lock(
        &self,
        key: &LockKey,
        mode: Mode,
        aid: Option<Aid>,
        offered: &[LockToken],
        until: Instant,
    ) -> Result<Lock> {
        let lost = |holder| LockError::Lost { key: key.clone(), holder };
        if aid.is_none() && offered.is_empty() {
            return Err(lost(None));
        }
        match self.manager.parts.reads.inspect(key, aid.as_ref(), until).await? {
            Some(lock) if Some(&lock.aid) == aid.as_ref() && lock.mode.covers(mode) => Ok(lock),
            Some(lock) if Some(&lock.aid) != aid.as_ref() && is_among(offered, &lock) => {
                let advice = if self.is_client() {
                    "keep the id of its login when the token is refreshed"
                } else {
                    "let it send the cookies back, or use `locks.clients(…)`"
                };
                self.manager.parts.log_limit.warn("session", || {
                    format!(
                        "a client sent the `Lock-Token` of {key:?} in a request of another session, so that \
                         its lock is of no use to it: {advice}"
                    )
                });
                Err(LockError::WrongSession { lock: Box::new(lock), asked: false })
            }
            other => {
                let Some(aid) = aid else { return Err(lost(None)) };
                // A shared lock does not cover what the client wants, but it is there.
                let is_there = other.as_ref().is_some_and(|lock| is_among(offered, lock));
                let lost = match self.manager.parts.sessions.refuse_ended(&aid, None, until).await {
                    Err(LockError::SessionEnded { ago }) if ago > self.news_for() => lost(None),
                    Err(e) => return Err(e),
                    Ok(()) => lost(other.map(Box::new)),
                };
                if let Some(token) = offered.first().filter(|_| !is_there) {
                    self.manager.parts.granting.missed_lock(key, *token, "request");
                }
                Err(lost)
            }
        }
    }

    /// Releases this acquisition, even if other requests were told that the session holds it.
    pub(in crate::web) async fn release(&self, mine: &Mine, until: Instant) -> Result<Released> {
        let released = self.manager.parts.granting.release_by(&mine.acquisition(), until).await?;
        self.forget(mine.token);
        Ok(released)
    }

    /// As `release`, but a release that fails goes on in the background: the document is already `done`.
    pub(in crate::web) async fn let_go(&self, mine: &Mine, done: &str) {
        if let Err(e) = self.release(mine, self.begin()).await {
            let held = mine.acquisition();
            log::warn!(
                target: "actix_doclock::web",
                "{:?} is {done}, but its lock is not released yet: {e}", held.key,
            );
            self.forget(held.token);
            self.manager.parts.granting.release_in_background(held);
        }
    }

    /// Notes that this request no longer holds this acquisition.
    pub(in crate::web) fn forget(&self, token: LockToken) {
        self.held.borrow_mut().retain(|held| *held != token);
        for gone in self.fresh.borrow_mut().extract_if(.., |fresh| fresh.token == token) {
            gone.forget();
        }
    }

    /// Notes that this request holds no locks any more.
    pub(in crate::web) fn forget_all(&self) {
        self.held.take();
        for gone in self.fresh.take() {
            gone.forget();
        }
    }

    /// Waits for the renewal that this request has started, if it has started one.
    pub(in crate::web) async fn renewed(&self, until: Instant) {
        let renewal = self.renewal.take();
        if let Some(renewal) = renewal {
            let _ = timeout_at(until.into(), renewal).await;
        }
    }
}

fn is_among(offered: &[LockToken], lock: &Lock) -> bool {
    lock.token.is_some_and(|token| offered.contains(&token))
}
