//! The record of a grant, and the clock that decides how long the grant lives.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use doclock_core::{
    Aid, Holder, Lock, LockId, LockKey, LockToken, Mode, StoreError, StoreErrorKind, TabId,
    store::{Active, Claim, NamedBy, PageId},
};
use serde::{Deserialize, Serialize};

/// A date of the store's clock: the time since the beginning of 1970.
type Date = Duration;

/// A reading of the store's clock.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Now {
    /// The caller's clock, before the store's clock was read.
    before: Instant,
    pub(crate) date: Date,
}

impl Now {
    pub(crate) fn read() -> Self {
        let before = Instant::now();
        Self { before, date: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default() }
    }
}

/// One grant. The row of a grant is named after its document and its session.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Grant {
    pub(crate) aid: Aid,
    pub(crate) token: LockToken,
    pub(crate) mode: Mode,
    tab: Option<TabId>,
    pub(crate) page: Option<PageId>,
    label: String,
    user: Option<String>,
    granted: Date,
    /// When the lock was taken or renewed.
    ts: Date,
    ttl: Duration,
    /// The end of `max_hold`.
    ends: Option<Date>,
    /// The end of the grace period of a page that has gone.
    pub(crate) leaves: Option<Date>,
    /// True if a second request was told of the lock, or a save used the lock.
    pub(crate) is_known: bool,
}

impl Grant {
    pub(crate) fn new(claim: &Claim, now: Now) -> Self {
        Self {
            aid: claim.aid.clone(),
            token: claim.token,
            mode: claim.mode,
            tab: claim.tab,
            page: claim.page,
            label: claim.holder.label.clone(),
            user: claim.holder.user.clone(),
            granted: now.date,
            ts: now.date,
            ttl: claim.ttl,
            ends: claim.max_hold.map(|held| now.date + held),
            leaves: None,
            is_known: false,
        }
    }

    /// The grant of `claim` to the session that had `from`: the lock keeps its start and its end.
    pub(crate) fn continuing(from: &Self, claim: &Claim, now: Now) -> Self {
        Self { granted: from.granted, ends: from.ends, ..Self::new(claim, now) }
    }

    pub(crate) fn expires(&self) -> Date {
        [self.ends, self.leaves].into_iter().flatten().fold(self.ts + self.ttl, Date::min)
    }

    pub(crate) fn is_live(&self, now: Now) -> bool {
        self.expires() > now.date
    }

    /// True if the lock is enough for the claim.
    pub(crate) fn covers(&self, claim: &Claim) -> bool {
        self.mode == Mode::Exclusive || claim.mode == Mode::Shared
    }

    /// True if this is the shared lock that the claim upgrades, or the lock that replaced it.
    pub(crate) fn may_become(&self, claim: &Claim) -> bool {
        match self.mode {
            Mode::Exclusive => self.token.is_of_same_claim(claim.token),
            _ => claim.upgrades == Some(self.token),
        }
    }

    /// True if the exclusive lock was granted to one tab, and another tab claims it.
    pub(crate) fn is_of_another_tab(&self, claim: &Claim) -> bool {
        let tabs = self.tab.zip(claim.tab);
        self.mode == Mode::Exclusive && tabs.is_some_and(|(mine, other)| mine != other)
    }

    /// The session takes the lock again.
    pub(crate) fn reenter(&mut self, claim: &Claim, now: Now) {
        self.ts = now.date;
        self.ttl = claim.ttl;
        self.page = claim.page.or(self.page);
        self.leaves = None;
        self.is_known |= !self.token.is_of_same_claim(claim.token);
    }

    /// Renews the lock for at least `ttl`.
    pub(crate) fn renew(&mut self, ttl: Duration, now: Now) {
        self.ts = now.date;
        self.ttl = self.ttl.max(ttl);
    }

    /// A save used the lock.
    pub(crate) fn renew_by_save(&mut self, now: Now) {
        self.ts = now.date;
        self.is_known = true;
    }

    /// True if the renewal of this session is for this lock.
    pub(crate) fn is_named_by(&self, active: &Active) -> bool {
        let named = |named: &NamedBy| match named {
            NamedBy::Tab(tab) => self.tab == Some(*tab),
            NamedBy::Token(token) => self.token == *token,
        };
        self.aid == active.aid
            && (self.mode == Mode::Shared
                || self.tab.is_none()
                || active.named.as_ref().is_none_or(|all| all.iter().any(named)))
    }

    /// Moves all dates of expiry back.
    pub(crate) fn age(&mut self, by: Duration) {
        let expiry = [Some(&mut self.ts), self.ends.as_mut(), self.leaves.as_mut()];
        expiry.into_iter().flatten().for_each(|date| *date = date.saturating_sub(by));
    }

    /// The lock as callers see it.
    pub(crate) fn lock(&self, key: &LockKey, now: Now) -> Lock {
        let holder = Holder::new(&self.label);
        Lock {
            key: key.clone(),
            description: None,
            mode: self.mode,
            aid: self.aid.clone(),
            token: Some(self.token),
            tab: self.tab,
            fence: None,
            holder: Some(match &self.user {
                Some(user) => holder.of_user(user),
                None => holder,
            }),
            since: UNIX_EPOCH + self.granted,
            expires_at: now.before + self.expires().saturating_sub(now.date),
            ends_at: self.ends.map(|ends| now.before + ends.saturating_sub(now.date)),
            asks: Vec::new(),
        }
    }
}

/// The name of a document's rows: its type in one letter, and its id. Equal numbers have one name, whatever their width.
pub(crate) fn name_of(id: &LockId) -> Result<String, StoreError> {
    let kind = match id {
        LockId::String(_) => 's',
        LockId::Int32(_) | LockId::Int64(_) => 'n',
        LockId::ObjectId(_) => 'o',
        LockId::Uuid(_) => 'u',
        _ => return Err(refused(format!("this store keeps no ids such as {id:?}"))),
    };
    Ok(format!("{kind}{id}"))
}

/// The document of the rows with this name.
pub(crate) fn key_of(collection: &str, name: &str) -> Result<LockKey, StoreError> {
    let unreadable = || refused(format!("{collection} has a row for {name:?}, which is no id"));
    let (kind, text) = name.split_at_checked(1).ok_or_else(unreadable)?;
    let id: Option<LockId> = match kind {
        "s" => Some(text.into()),
        "n" => {
            let narrow = text.parse::<i32>().map(LockId::from);
            narrow.or_else(|_| text.parse::<i64>().map(LockId::from)).ok()
        }
        "o" => {
            let bytes: Option<Vec<u8>> = (0..text.len() / 2)
                .map(|at| u8::from_str_radix(text.get(2 * at..2 * at + 2)?, 16).ok())
                .collect();
            bytes.and_then(|bytes| bytes.try_into().ok()).map(LockId::ObjectId)
        }
        "u" => text.parse().ok().map(LockId::Uuid),
        _ => None,
    };
    LockKey::new(collection, id.ok_or_else(unreadable)?).map_err(|_| unreadable())
}

pub(crate) fn refused(message: impl Into<String>) -> StoreError {
    StoreError::new(StoreErrorKind::Other, message)
}
