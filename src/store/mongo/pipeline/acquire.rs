//! The command that acquires a lock.

use mongodb::bson::{Bson, Document, doc};

use crate::{
    lock::Mode,
    store::{
        Acquisition, Claim, MAX_READERS, Rules,
        mongo::pipeline::{
            Target, by_id,
            grant::{
                Grant, is, is_leaving, is_live, is_live_reader, is_reader, is_shared, next_fence,
                readers, readers_that, some_reader,
            },
            literal, millis,
            queue::{after, in_the_way_of},
            settle::settle,
        },
    },
};

/// In the answer to a claim: the expired grants that are in its way and still lack a trace, so that the
/// claim was not granted. `[ { aid, lease } ]`, where `lease` names the token and its last
/// renewal.
pub(in crate::store::mongo) const FORMER: &str = "former";

/// Takes the lock if no other session is in the way, and renews it if it is the session's own. If the
/// lock is another session's, leaves the record as it is (no write, no change event). An expired lock of
/// another session is replaced only if it is among the `traced`.
///
/// Modelled on DistributedLock's `MongoDistributedLock`: one upsert by `_id`, on server time.
pub(in crate::store::mongo) fn acquire(
    claim: &Claim,
    traced: &[String],
    rules: &Rules,
) -> Vec<Document> {
    let it = Acquire { claim, traced, rules };
    let mut branches = if claim.mode == Mode::Shared { it.shared() } else { it.exclusive() };
    branches.push((doc! { "$ne": [it.former(), []] }, "$$ROOT".into()));
    let grant = it.grant();
    let granted = if claim.mode == Mode::Shared { it.joined(grant) } else { it.granted(grant) };
    let branches: Vec<_> =
        (branches.into_iter()).map(|(case, then)| doc! { "case": case, "then": then }).collect();
    let mut stages =
        vec![doc! { "$replaceWith": { "$switch": { "branches": branches, "default": granted } } }];
    if rules.fair || claim.mode == Mode::Shared {
        stages.extend(settle(rules));
    }
    stages
}

/// The shortest form, for a document that is expected to be free: does nothing to a record with a `ts`.
/// For an exclusive claim in a collection that is neither fair nor fenced.
pub(in crate::store::mongo) fn acquire_if_free(claim: &Claim, rules: &Rules) -> Vec<Document> {
    let it = Acquire { claim, traced: &[], rules };
    let granted = it.granted(it.grant());
    vec![doc! { "$replaceWith": { "$cond": ["$ts", "$$ROOT", granted] } }]
}

/// The short form, for an exclusive claim in a collection that is not fair: does nothing if there is
/// [more to it](more_to_it). It is half as long as the full form, and nearly always enough.
pub(in crate::store::mongo) fn acquire_shortly(
    claim: &Claim,
    traced: &[String],
    rules: &Rules,
) -> Vec<Document> {
    let it = Acquire { claim, traced, rules };
    let others_hold = doc! { "$and": [is_live(rules.ttl), { "$ne": ["$aid", it.aid()] }] };
    let mut left_alone = vec![
        is_shared().into(),
        Bson::from(others_hold),
        doc! { "$and": [is_leaving(), is_live(rules.ttl)] }.into(),
    ];
    left_alone.extend(it.is_of_another_tab().map(Bson::from));
    let branches = vec![
        doc! { "case": { "$or": left_alone }, "then": "$$ROOT" },
        doc! { "case": is_live(rules.ttl), "then": it.reentered() },
    ];
    let former = doc! { "$ne": [it.without_trace(it.former_exclusive()), []] };
    let branches =
        branches.into_iter().chain([doc! { "case": former, "then": "$$ROOT" }]).collect::<Vec<_>>();
    let switch = doc! { "$switch": { "branches": branches, "default": it.granted(it.grant()) } };
    vec![doc! { "$replaceWith": switch }]
}

/// Whether there are readers, or the session comes back to a lock in its grace period.
pub(in crate::store::mongo) fn more_to_it(claim: &Claim) -> Document {
    let comes_back = doc! { "$eq": ["$aid", literal(claim.aid.as_str())] };
    doc! { "$or": [is_shared(), { "$and": [is_leaving(), comes_back] }] }
}

/// The expired grants that the answer to the claim reports.
pub(in crate::store::mongo) fn former(claim: &Claim, traced: &[String], rules: &Rules) -> Document {
    Acquire { claim, traced, rules }.former()
}

/// Matches the record of the lock `from`, before and after its handover.
pub(in crate::store::mongo) fn handed(from: &Acquisition, claim: &Claim) -> Document {
    let mut filter = by_id(from.key.id());
    let either = doc! { "$in": [from.token.to_string(), claim.token.to_string()] };
    if claim.mode == Mode::Exclusive {
        filter.insert("token", either);
    } else {
        let joined = doc! { "readers.token": claim.token.to_string() };
        filter.insert("$or", [doc! { "token": either }, joined].to_vec());
    }
    filter
}

/// Gives the exclusive lock `from` to the claim, or only releases it if the claim has a turn and comes
/// after others. A takeover requires that the lock is live. A repetition changes nothing.
pub(in crate::store::mongo) fn hand_over(
    from: &Acquisition,
    claim: &Claim,
    rules: &Rules,
) -> Vec<Document> {
    let it = Acquire { claim, traced: &[], rules };
    let is_shared = claim.mode == Mode::Shared;
    let goes_on = (from.aid == claim.aid).then(|| {
        let (ttl, until) = it.lease_that_goes_on();
        doc! { "since": { "$ifNull": ["$since", "$$NOW"] }, "ttl": ttl, "until": until }
    });
    let grant = it.grant().into_iter().chain(goes_on.clone().unwrap_or_default()).collect();
    let mut granted = if is_shared { it.joined(grant) } else { it.granted(grant) };
    if let (Some(goes_on), Some(_), false) = (&goes_on, claim.max_hold, is_shared) {
        granted.insert("due", doc! { "$add": ["$$NOW", goes_on.get("ttl").cloned()] });
    }
    if let Some(taken) = &claim.taken {
        granted.insert("taken", super::taken(from.token, taken));
    }
    let mut from = Target::exclusive(from).is(Grant::Exclusive);
    if claim.taken.is_some() {
        from = doc! { "$and": [from, is_live(rules.ttl)] };
    }
    let mut granted = Bson::from(granted);
    if claim.turn.is_some() {
        // The record of a lock that nobody holds any more, which the last stage tidies up.
        let released = doc! { "$mergeObjects": ["$$ROOT", { "readers": [] }] };
        let is_first = doc! { "$eq": [in_the_way_of(claim), []] };
        granted = doc! { "$cond": [is_first, granted, released] }.into();
    }
    let mut stages = vec![doc! { "$replaceWith": { "$cond": [from, granted, "$$ROOT"] } }];
    if is_shared || rules.fair {
        stages.extend(settle(rules));
    }
    stages
}

struct Acquire<'a> {
    claim: &'a Claim,
    /// The leases of expired grants that have a trace.
    traced: &'a [String],
    rules: &'a Rules,
}

type Branch = (Document, Bson);

impl Acquire<'_> {
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
        let mut branches = vec![(others_hold, "$$ROOT".into())];
        branches.extend(self.is_of_another_tab().map(|other| (other, self.left_alone())));
        branches.push((mine, self.reentered_or_back().into()));
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
            (exclusive, self.reentered_or_back().into()),
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

    /// Whether another tab of the session holds the exclusive lock. `None` if the claim names no tab.
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
        doc! { "$mergeObjects": ["$$ROOT", { "queue": after(self.claim) }] }.into()
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

    /// Whether other waiters are ahead of this claim in the queue.
    fn is_behind(&self) -> Document {
        doc! { "$ne": [in_the_way_of(self.claim), []] }
    }

    fn is_reader(&self) -> Document {
        some_reader(doc! { "$and": [{ "$eq": ["$$r.aid", self.aid()] }, is_live_reader()] })
    }

    /// A new document instead of a merge: nothing of an earlier holder stays.
    fn granted(&self, grant: Document) -> Document {
        let mut granted = doc! { "_id": "$_id" };
        granted.extend(grant);
        let ttl = self.first_ttl();
        if ttl < millis(self.rules.ttl) {
            granted.insert("due", doc! { "$add": ["$$NOW", ttl] });
        }
        if self.rules.fair {
            granted.insert("queue", after(self.claim));
        }
        granted
    }

    /// The expired grants that the claim would replace before a reaper could hear of them.
    fn former(&self) -> Document {
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

    /// Not of this session, which is active; and not a grant that ended with its `max_hold`.
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
        if self.rules.fair {
            joined.insert("queue", after(self.claim));
        }
        joined
    }

    fn grant(&self) -> Document {
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

    /// Re-entry: renews the exclusive lock that the session has.
    fn reentered(&self) -> Document {
        let mut reentered = self.renewed(Grant::Exclusive);
        let ttl = Grant::Exclusive.capped(millis(self.claim.ttl));
        reentered.insert("due", due_again(ttl, self.rules));
        if let Some(page) = self.claim.page {
            reentered.insert("page", page.to_string());
        }
        if self.rules.fair {
            reentered.insert("queue", after(self.claim));
        }
        doc! { "$mergeObjects": ["$$ROOT", reentered, self.again(Grant::Exclusive)] }
    }

    /// The same, if the lock may be in its grace period because its page has gone.
    fn reentered_or_back(&self) -> Document {
        let again = self.again(Grant::Exclusive);
        let back = doc! { "$mergeObjects": ["$$ROOT", self.back_in_time(), again] };
        doc! { "$cond": [is_leaving(), back, self.reentered()] }
    }

    /// Re-entry within the grace period: removes its limit.
    fn back_in_time(&self) -> Document {
        let mut back = self.renewed(Grant::Exclusive);
        let (ttl, until) = self.lease_that_goes_on();
        back.insert("due", due_again(ttl.clone(), self.rules));
        back.insert("ttl", ttl);
        // Null, because a merge cannot remove a field.
        back.insert("until", doc! { "$ifNull": [until, Bson::Null] });
        back.insert("leaving", Bson::Null);
        if let Some(page) = self.claim.page {
            back.insert("page", page.to_string());
        }
        if self.rules.fair {
            back.insert("queue", after(self.claim));
        }
        back
    }

    /// The ttl and the end of `max_hold` of an exclusive lock that continues, without the limit of a
    /// grace period.
    fn lease_that_goes_on(&self) -> (Document, Document) {
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
        let mut changed =
            doc! { "readers": { "$map": { "input": readers(), "as": "r", "in": each } } };
        if self.rules.fair {
            changed.insert("queue", after(self.claim));
        }
        doc! { "$mergeObjects": ["$$ROOT", changed] }
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
        let (token, claim) = (grant.field("token"), self.claim.token);
        let same = doc! { "$and": [
            { "$gte": [&token, claim.first_attempt().to_string()] },
            { "$lte": [&token, claim.last_attempt().to_string()] },
        ] };
        doc! { "$cond": [same, {}, { "again": true }] }
    }
}

/// When the sweep must look at an exclusive lock that is renewed for `ttl`. If `ts` tells that already,
/// the field is left out, unless the record had it before.
pub(super) fn due_again(ttl: impl Into<Bson>, rules: &Rules) -> Document {
    let ttl = ttl.into();
    let is_shorter = doc! { "$lt": [ttl.clone(), millis(rules.ttl)] };
    doc! { "$cond": [
        { "$or": [is("$due", "date"), is_shorter] },
        { "$add": [Grant::Exclusive.not_before(), { "$min": [ttl, millis(rules.ttl)] }] },
        "$$REMOVE",
    ] }
}
