//! Calls that ask the application about many documents at once. All callers that ask about the same document within ten
//! seconds share one call and its answer.

use std::{
    future::Future,
    hash::Hash,
    time::{Duration, Instant},
};

use futures_util::{FutureExt, future::Shared};
use parking_lot::Mutex;

use crate::{clock, key::LockKey, random::HashMap};

/// How long after the start of its call an answer is remembered.
const REMEMBER: Duration = Duration::from_secs(10);
/// For how many documents of one person answers are remembered.
const REMEMBERED: usize = 1_000;

/// The calls under way, and the latest answers, for each person `P`. A call that fails returns `None`.
pub(crate) struct Batches<P, F: Future> {
    of: Mutex<HashMap<P, HashMap<LockKey, Begun<F>>>>,
    /// How many documents one call asks about.
    most: usize,
}

struct Begun<F: Future> {
    call: Shared<F>,
    at: Instant,
}

impl<T: Clone, F: Future<Output = Option<T>>> Begun<F> {
    /// The outcome, also if nobody has waited for it. `None` while the call is under way.
    fn outcome(&self) -> Option<Option<T>> {
        self.call.clone().now_or_never()
    }

    /// True if the call is under way, or if its answer is not old.
    fn is_fresh(&self) -> bool {
        match self.outcome() {
            None => true,
            Some(answer) => answer.is_some() && clock::since(self.at) < REMEMBER,
        }
    }
}

impl<P: Clone + Eq + Hash, T: Clone, F: Future<Output = Option<T>>> Batches<P, F> {
    pub(crate) fn of_at_most(most: usize) -> Self {
        Self { of: Mutex::default(), most }
    }

    /// The call that answers for each of these documents: a known one, or one of those that `begin` begins for the other
    /// documents. If `begin` returns `None`, its documents are left out.
    pub(crate) fn share(
        &self,
        person: &P,
        keys: Vec<LockKey>,
        begin: impl Fn(Vec<LockKey>) -> Option<Shared<F>>,
    ) -> Vec<(LockKey, Shared<F>)> {
        let mut all = self.of.lock();
        if !all.contains_key(person) {
            all.retain(|_, known| known.values().any(Begun::is_fresh));
        }
        let known = all.entry(person.clone()).or_default();
        let new = keys.iter().filter(|key| !known.contains_key(key)).count();
        if known.len() + new > REMEMBERED {
            known.retain(|_, it| it.is_fresh());
        }
        if known.len() + new > REMEMBERED {
            // The answers go, and no call that is under way: no document is in two calls.
            known.retain(|_, it| it.outcome().is_none());
        }
        let (mut calls, mut unknown) = (Vec::new(), Vec::new());
        for key in keys {
            match known.get(&key).filter(|it| it.is_fresh()) {
                Some(begun) => calls.push((key, begun.call.clone())),
                None => unknown.push(key),
            }
        }
        for keys in unknown.chunks(self.most) {
            let Some(call) = begin(keys.to_vec()) else { continue };
            for key in keys {
                known.insert(key.clone(), Begun { call: call.clone(), at: clock::now() });
                calls.push((key.clone(), call.clone()));
            }
        }
        calls
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use futures_util::{FutureExt, future::LocalBoxFuture};
    use tokio::{sync::watch, time::advance};

    use super::*;

    fn keys(of: impl IntoIterator<Item = usize>) -> Vec<LockKey> {
        of.into_iter().map(|n| LockKey::new("note", n.to_string()).unwrap()).collect()
    }

    /// Answers as the channel says.
    fn answer(mut says: watch::Receiver<Option<bool>>) -> LocalBoxFuture<'static, Option<()>> {
        let said = async move { says.wait_for(Option::is_some).await.unwrap().unwrap_or_default() };
        said.map(|is_ok| is_ok.then_some(())).boxed_local()
    }

    #[tokio::test(start_paused = true)]
    async fn a_document_is_asked_about_once_until_its_answer_is_old_or_was_a_failure() {
        let batches = Batches::of_at_most(2);
        let (say, says) = watch::channel(None);
        let asked = RefCell::new(Vec::new());
        let ask = |person: &str, of: &[usize]| {
            let begin = |keys: Vec<LockKey>| {
                asked.borrow_mut().push(keys.len());
                Some(answer(says.clone()).shared())
            };
            let calls = batches.share(&person.to_owned(), keys(of.iter().copied()), begin);
            assert_eq!(calls.len(), of.len());
            calls
        };
        let first = ask("alice", &[1, 2, 3]);
        ask("alice", &[3, 1, 4]);
        ask("bob", &[1]);
        assert_eq!(asked.take(), [2, 1, 1, 1], "by twos, and for each person");

        say.send_replace(Some(false));
        for (_, call) in first {
            assert_eq!(call.await, None);
        }
        say.send_replace(Some(true));
        for (_, call) in ask("alice", &[1, 2]) {
            assert_eq!(call.await, Some(()), "a failure is asked about again");
        }
        ask("alice", &[1, 2]);
        assert_eq!(asked.take(), [2]);
        advance(REMEMBER).await;
        say.send_replace(Some(false));
        ask("alice", &[1, 2]);
        ask("alice", &[1, 2]);
        assert_eq!(
            asked.take(),
            [2, 2],
            "the answer is old; and nobody has waited for the failure"
        );
        assert!(batches.share(&"carol".to_owned(), keys([1]), |_| None).is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn answers_are_bounded_and_a_call_under_way_is_never_begun_twice() {
        let batches = Batches::of_at_most(usize::MAX);
        let (say, says) = watch::channel(None);
        let begun = RefCell::new(0);
        let ask = |person: &str, of: Vec<LockKey>| {
            let begin = |_| {
                *begun.borrow_mut() += 1;
                Some(answer(says.clone()).shared())
            };
            batches.share(&person.to_owned(), of, begin)
        };
        ask("alice", keys(0..REMEMBERED));
        ask("alice", keys(REMEMBERED..REMEMBERED + 10));
        advance(2 * REMEMBER).await;
        ask("alice", keys([0]));
        assert_eq!(begun.take(), 2, "all of them are under way");
        say.send_replace(Some(true));
        advance(REMEMBER).await;
        ask("alice", keys(0..REMEMBERED));
        ask("alice", keys(0..REMEMBERED));
        assert_eq!(begun.take(), 1, "the answers to as many as this are remembered");
        ask("alice", keys([0, REMEMBERED]));
        assert_eq!(begun.take(), 1);
        assert_eq!(batches.of.lock()["alice"].len(), 2, "the answers were forgotten");
        advance(REMEMBER).await;
        ask("bob", keys([0]));
        assert_eq!(batches.of.lock().len(), 1, "alice has gone");
    }
}
