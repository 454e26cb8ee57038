//! The update of a record by a claim, and the fields of the answer.

use mongodb::bson::{Bson, Document, doc};

use crate::{
    lock::Mode,
    store::{
        Claim, MAX_READERS, Rules,
        mongo::{
            codec::{is, literal, millis},
            grant::{
                Grant, due_again, is_leaving, is_live, is_live_reader, is_reader, is_shared,
                next_fence, readers, readers_that, replace_with, some_reader,
            },
            queue::{after, first_of, in_the_way_of},
            read::{exclusive_fields, latest, lock_fields, reader_field},
            settle::settle,
        },
    },
};

/// In the answer to a claim: the expired grants that are in its way and still lack a trace, so that the
/// claim was not granted. `[ { aid, lease } ]`, where `lease` names the token and its last
/// renewal.
pub(super) const FORMER: &str = "former";
/// In the answer to a claim: the record has expired, but a name stands twice in it.
pub(super) const ODD: &str = "odd";
/// In the answer to a claim that upgrades a shared lock: true if that lock is gone.
pub(super) const LOST: &str = "lost";
/// In the answer to the short form of a claim: the full form must follow.
pub(super) const MORE: &str = "more";

/// The update of a record by a claim.
#[derive(Clone, Copy)]
pub(in crate::store::mongo) struct Update<'a> {
    pub(in crate::store::mongo) claim: &'a Claim,
    /// The leases of expired grants that have a trace.
    pub(in crate::store::mongo) traced: &'a [String],
    pub(in crate::store::mongo) rules: &'a Rules,
}

type Branch = (Document, Bson);

/// The first of these branches whose condition is true, or else `default`.
fn switch(branches: Vec<Branch>, default: Document) -> Vec<Document> {
    let branches = branches.into_iter().map(|(case, then)| doc! { "case": case, "then": then });
    let branches: Vec<_> = branches.collect();
    vec![replace_with(doc! { "$switch": { "branches": branches, "default": default } })]
}

impl Update<'_> {
    /// The full form: takes the lock if no other session is in the way, and renews it if it is the session's own. If
    /// the lock is another session's, leaves the record as it is (no write, no change event). An expired lock of
    /// another session is replaced only if it is among the `traced`.
    ///
    /// Modelled on DistributedLock's `MongoDistributedLock`: one upsert by `_id`, on server time.
    pub(super) fn in_full(&self) -> Vec<Document> {
        let is_shared = self.claim.mode == Mode::Shared;
        let mut branches = if is_shared { self.shared() } else { self.exclusive() };
        branches.push((doc! { "$ne": [self.former(), []] }, "$$ROOT".into()));
        let mut stages = switch(branches, self.granted(self.grant()));
        if self.rules.fair || is_shared {
            stages.extend(settle(self.rules));
        }
        stages
    }

    /// The short form, for an exclusive claim in a collection that is not fair: does nothing if there is
    /// [more to it](short_answer_fields). It is half as long as the full form, and nearly always enough. (Without it, a
    /// re-entry costs the server 39 % more processor time, and a refusal by a write 27 %.)
    pub(super) fn shortly(&self) -> Vec<Document> {
        let is_live = || is_live(self.rules.ttl);
        let others_hold = doc! { "$and": [is_live(), { "$ne": ["$aid", self.aid()] }] };
        let is_leaving = doc! { "$and": [is_leaving(), is_live()] };
        let mut left_alone = vec![is_shared(), others_hold, is_leaving];
        left_alone.extend(self.is_of_another_tab());
        let former = doc! { "$ne": [self.without_trace(self.former_exclusive()), []] };
        let branches = vec![
            (doc! { "$or": left_alone }, "$$ROOT".into()),
            (is_live(), self.reentered(false).into()),
            (former, "$$ROOT".into()),
        ];
        switch(branches, self.granted(self.grant()))
    }

    /// The shortest form, for a document that is expected to be free: does nothing to a record with any content. For an
    /// exclusive claim in a collection that is neither fair nor fenced.
    pub(super) fn if_free(&self) -> Vec<Document> {
        let granted = self.granted(self.grant());
        let is_new = doc! { "$eq": [{ "$size": { "$objectToArray": "$$ROOT" } }, 1] };
        vec![doc! { "$replaceWith": { "$cond": [is_new, granted, "$$ROOT"] } }]
    }

    /// A free document is the usual case, and passes with the least effort: its `ts` is missing.
    fn exclusive(&self) -> Vec<Branch> {
        let is_live = || is_live(self.rules.ttl);
        let other_reader =
            some_reader(doc! { "$and": [{ "$ne": ["$$r.aid", self.aid()] }, is_live_reader()] });
        let others_hold = doc! { "$and": [
            is_live(),
            { "$ne": ["$aid", self.aid()] },
            { "$or": [{ "$not": [is_shared()] }, other_reader] },
        ] };
        let mine = doc! { "$and": [is_live(), { "$eq": ["$aid", self.aid()] }] };
        let lost = lost_upgrade(self.claim, self.rules);
        let mut branches: Vec<_> = lost.map(|lost| (lost, "$$ROOT".into())).into_iter().collect();
        branches.push((others_hold, "$$ROOT".into()));
        branches.extend(self.is_of_another_tab().map(|other| (other, self.left_alone())));
        branches.push((mine, self.reentered_or_back()));
        if self.rules.fair {
            // An upgrade does not queue: the waiters are waiting for its session.
            let must_wait = doc! { "$and": [self.is_behind(), { "$not": [self.is_reader()] }] };
            branches.push((must_wait, "$$ROOT".into()));
        }
        branches
    }

    fn shared(&self) -> Vec<Branch> {
        let exclusive = doc! { "$and": [{ "$not": [is_shared()] }, is_live(self.rules.ttl)] };
        let others = doc! { "$and": [exclusive.clone(), { "$ne": ["$aid", self.aid()] }] };
        let mut branches = vec![(others, "$$ROOT".into())];
        branches.extend(self.is_of_another_tab().map(|other| (other, self.left_alone())));
        branches.extend([
            (exclusive, self.reentered_or_back()),
            (self.is_reader(), self.read_on().into()),
        ]);
        if self.rules.fair {
            branches.push((self.is_behind(), "$$ROOT".into()));
        }
        let full = |readers: Document| doc! { "$gte": [{ "$size": readers }, MAX_READERS as i64] };
        // Live readers are counted only if the list is long enough, expired readers included.
        let full = doc! { "$and": [full(readers()), full(readers_that(is_live_reader()))] };
        branches.push((full, "$$ROOT".into()));
        branches
    }

    /// True if another tab of the session holds the exclusive lock. `None` if the claim names no tab.
    fn is_of_another_tab(&self) -> Option<Document> {
        let tab = self.claim.tab?;
        Some(doc! { "$and": [
            is_live(self.rules.ttl),
            { "$eq": ["$aid", self.aid()] },
            is("$tab", "string"),
            { "$ne": ["$tab", tab.to_string()] },
        ] })
    }

    /// The lock of another tab. The waiter is told of it, and leaves the queue.
    fn left_alone(&self) -> Bson {
        if self.claim.turn.is_none() || !self.rules.fair {
            return "$$ROOT".into();
        }
        doc! { "$mergeObjects": ["$$ROOT", self.queued(doc! {})] }.into()
    }

    fn aid(&self) -> Document {
        literal(self.claim.aid.as_str())
    }

    fn holder(&self) -> Document {
        let holder = &self.claim.holder;
        let mut fields = doc! { "label": literal(&holder.label) };
        if let Some(user) = &holder.user {
            fields.insert("user", literal(user));
        }
        fields
    }

    /// True if other waiters are ahead of this claim in the queue.
    fn is_behind(&self) -> Document {
        doc! { "$ne": [in_the_way_of(self.claim), []] }
    }

    fn is_reader(&self) -> Document {
        some_reader(doc! { "$and": [{ "$eq": ["$$r.aid", self.aid()] }, is_live_reader()] })
    }

    /// The record once the claim is granted.
    pub(in crate::store::mongo) fn granted(&self, grant: Document) -> Document {
        let granted = match self.claim.mode {
            Mode::Exclusive => self.alone(grant),
            Mode::Shared => self.joined(grant),
        };
        self.queued(granted)
    }

    /// A new document instead of a merge: nothing of an earlier holder stays.
    fn alone(&self, grant: Document) -> Document {
        let mut granted = doc! { "_id": "$_id" };
        granted.extend(grant);
        let ttl = self.first_ttl();
        if ttl < millis(self.rules.ttl) {
            granted.insert("due", doc! { "$add": ["$$NOW", ttl] });
        }
        granted
    }

    /// These fields, and the queue after the claim was answered.
    fn queued(&self, mut fields: Document) -> Document {
        if self.rules.fair {
            fields.insert("queue", after(self.claim));
        }
        fields
    }

    /// The expired grants that the claim would replace before a reaper could hear of them.
    pub(super) fn former(&self) -> Document {
        let all = doc! { "$concatArrays": [self.former_exclusive(), self.former_readers()] };
        self.without_trace(all)
    }

    fn without_trace(&self, former: Document) -> Document {
        let is_traced = doc! { "$setIsSubset": ["$$former.lease", { "$literal": self.traced }] };
        doc! { "$let": {
            "vars": { "former": former }, "in": { "$cond": [is_traced, [], "$$former"] },
        } }
    }

    /// The expired exclusive lock, if there is one. The lock of a foreign program has no token, and is
    /// left out.
    fn former_exclusive(&self) -> Document {
        let expired = doc! { "$and": [
            is("$aid", "string"),
            is("$token", "string"),
            { "$not": [is_live(self.rules.ttl)] },
            self.is_of_idle_session(Grant::Exclusive),
        ] };
        doc! { "$cond": [expired, [Grant::Exclusive.lease()], []] }
    }

    /// The expired readers that the claim would remove.
    fn former_readers(&self) -> Document {
        let gone = readers_that(doc! { "$and": [
            is_reader(),
            { "$not": [is_live_reader()] },
            self.is_of_idle_session(Grant::Reader),
        ] });
        let gone = doc! { "$map": { "input": gone, "as": "r", "in": Grant::Reader.lease() } };
        if self.claim.mode == Mode::Shared {
            doc! { "$cond": [self.are_few(), [], gone] }
        } else {
            gone
        }
    }

    /// True if the grant is not of this session, which is active, and did not end with its `max_hold`.
    fn is_of_idle_session(&self, grant: Grant) -> Document {
        doc! { "$and": [
            { "$ne": [grant.field("aid"), self.aid()] },
            { "$not": [grant.has_reached_max_hold()] },
        ] }
    }

    fn are_few(&self) -> Document {
        doc! { "$lt": [{ "$size": readers() }, MAX_READERS as i64] }
    }

    /// Adds a reader. Expired readers are left to the sweep, which announces their sessions, unless
    /// there are too many of them.
    fn joined(&self, grant: Document) -> Document {
        let stays = doc! { "$and": [
            is_reader(),
            { "$ne": ["$$r.aid", self.aid()] },
            { "$or": [self.are_few(), is_live_reader()] },
        ] };
        let mut joined = doc! {
            "_id": "$_id",
            "readers": { "$concatArrays": [readers_that(stays), [grant]] },
        };
        if self.rules.fenced {
            joined.insert("fence", next_fence());
        }
        joined
    }

    pub(in crate::store::mongo) fn grant(&self) -> Document {
        let mut grant = doc! {
            "ts": "$$NOW",
            "ttl": self.first_ttl(),
            "aid": self.aid(),
            "token": literal(&self.claim.token.to_string()),
            "since": "$$NOW",
            "holder": self.holder(),
        };
        if let Some(tab) = self.claim.tab {
            grant.insert("tab", tab.to_string());
        }
        if let Some(page) = self.claim.page {
            grant.insert("page", page.to_string());
        }
        if let Some(max_hold) = self.claim.max_hold {
            grant.insert("until", doc! { "$add": ["$$NOW", millis(max_hold)] });
        }
        if self.rules.fenced {
            grant.insert("fence", next_fence());
        }
        grant
    }

    fn first_ttl(&self) -> i64 {
        millis(self.claim.max_hold.map_or(self.claim.ttl, |max_hold| max_hold.min(self.claim.ttl)))
    }

    /// Re-entry: renews the exclusive lock that the session has. If the session `comes_back` within a grace period,
    /// removes the limit of that period.
    fn reentered(&self, comes_back: bool) -> Document {
        let mut fields = self.renewed(Grant::Exclusive);
        if comes_back {
            let (ttl, until) = self.lease_that_goes_on();
            fields.insert("ttl", ttl);
            // Null, because a merge cannot remove a field.
            fields.insert("until", doc! { "$ifNull": [until, Bson::Null] });
            fields.insert("leaving", Bson::Null);
        }
        fields.insert("due", due_again(fields.get("ttl").cloned(), self.rules));
        if let Some(page) = self.claim.page {
            fields.insert("page", page.to_string());
        }
        doc! { "$mergeObjects": ["$$ROOT", self.queued(fields), self.again(Grant::Exclusive)] }
    }

    /// As `reentered`, for a lock that may be in its grace period because its page has gone.
    fn reentered_or_back(&self) -> Bson {
        doc! { "$cond": [is_leaving(), self.reentered(true), self.reentered(false)] }.into()
    }

    /// The ttl and the end of `max_hold` of an exclusive lock that continues, without the limit of a
    /// grace period.
    pub(in crate::store::mongo) fn lease_that_goes_on(&self) -> (Document, Document) {
        let until = doc! { "$cond": [is_leaving(), "$leaving.until", "$until"] };
        let ends = doc! { "$eq": [{ "$type": until.clone() }, "date"] };
        let ttl = millis(self.claim.ttl);
        let left = doc! { "$subtract": [{ "$max": [until.clone(), "$$NOW"] }, "$$NOW"] };
        (
            doc! { "$cond": [ends.clone(), { "$min": [ttl, left] }, ttl] },
            doc! { "$cond": [ends, until, "$$REMOVE"] },
        )
    }

    /// Renews the shared lock that the session has.
    fn read_on(&self) -> Document {
        let mine = doc! { "$and": [{ "$eq": ["$$r.aid", self.aid()] }, is_live_reader()] };
        let renewed = doc! {
            "$mergeObjects": ["$$r", self.renewed(Grant::Reader), self.again(Grant::Reader)]
        };
        let each = doc! { "$cond": [mine, renewed, "$$r"] };
        let changed = doc! { "readers": { "$map": { "input": readers(), "as": "r", "in": each } } };
        doc! { "$mergeObjects": ["$$ROOT", self.queued(changed)] }
    }

    fn renewed(&self, grant: Grant) -> Document {
        doc! {
            "ts": grant.not_before(),
            "ttl": grant.capped(millis(self.claim.ttl)),
            "holder": self.holder(),
        }
    }

    /// Marks the lock as known to another request, except for a repetition whose first reply was lost.
    fn again(&self, grant: Grant) -> Document {
        doc! { "$cond": [is_of_same_claim(self.claim, grant), {}, { "again": true }] }
    }
}

/// True if an attempt of this claim was granted.
fn is_of_same_claim(claim: &Claim, grant: Grant) -> Document {
    let token = grant.field("token");
    doc! { "$and": [
        { "$gte": [&token, claim.token.first_attempt().to_string()] },
        { "$lte": [&token, claim.token.last_attempt().to_string()] },
    ] }
}

/// True if the shared lock that the claim upgrades is not live, and no attempt of the claim has replaced it. `None` if
/// the claim upgrades nothing.
fn lost_upgrade(claim: &Claim, rules: &Rules) -> Option<Document> {
    let shared = claim.upgrades?;
    let is_mine = |grant: Grant| doc! { "$eq": [grant.field("aid"), literal(claim.aid.as_str())] };
    let reads = some_reader(doc! { "$and": [
        is_mine(Grant::Reader),
        { "$eq": ["$$r.token", shared.to_string()] },
        is_live_reader(),
    ] });
    let has_upgraded = doc! { "$and": [
        { "$not": [is_shared()] },
        is_mine(Grant::Exclusive),
        is_of_same_claim(claim, Grant::Exclusive),
        is_live(rules.ttl),
    ] };
    Some(doc! { "$not": [{ "$or": [reads, has_upgraded] }] })
}

/// For the answer to the short form: the fields of an exclusive lock, and whether the full form must follow, because
/// there are readers, or the session comes back to a lock in its grace period.
pub(in crate::store::mongo) fn short_answer_fields(claim: &Claim) -> Document {
    let comes_back = doc! { "$eq": ["$aid", literal(claim.aid.as_str())] };
    let mut fields = exclusive_fields();
    fields.insert(MORE, doc! { "$or": [is_shared(), { "$and": [is_leaving(), comes_back] }] });
    fields
}

/// For the answer to the full form: the session's own lock, or the lock or place that is in its way.
pub(in crate::store::mongo) fn answer_fields(claim: &Claim, rules: &Rules) -> Document {
    let mut fields = match claim.mode {
        Mode::Shared => lock_fields(Some(&claim.aid)),
        Mode::Exclusive => {
            let others = doc! { "$ne": ["$$r.aid", literal(claim.aid.as_str())] };
            let others = doc! { "$and": [others, is_reader()] };
            reader_field(latest(readers_that(others)))
        }
    };
    if rules.fair {
        fields.insert("place", first_of(in_the_way_of(claim)));
    }
    if let Some(lost) = lost_upgrade(claim, rules) {
        fields.insert(LOST, lost);
    }
    fields
}
