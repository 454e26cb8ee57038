//! Asks for locks.

use super::*;
use doclock_core::{
    Answer, Ask, limits,
    store::{Answered, Asked, Change},
};

/// An ask of a person without an id.
fn ask(aid: &Aid, message: &str) -> Ask {
    Ask {
        id: Uuid::new_v4(),
        aid: aid.clone(),
        by: Holder::new("bob"),
        message: message.to_owned(),
        at: SystemTime::UNIX_EPOCH,
        answer: None,
    }
}

/// An ask of a person with this id.
fn of_user(user: &str, aid: &Aid, message: &str) -> Ask {
    Ask { by: Holder::new("bob").of_user(user), ..ask(aid, message) }
}

fn soon() -> Answer {
    Answer::Soon("in a minute".to_owned())
}

fn messages(lock: &Lock) -> Vec<&str> {
    lock.asks.iter().map(|ask| &*ask.message).collect()
}

impl<S: Subject> Steps<S> {
    async fn asks_for(&self, id: &str, ask: &Ask) -> Asked {
        self.ask(&key(id), ask, false, NONE).await.unwrap()
    }

    /// The ask is on record. Returns it, and how many have asked before.
    async fn stands(&self, id: &str, ask: &Ask) -> (Ask, usize) {
        match self.asks_for(id, ask).await {
            Asked::Stands { ask, before } => (ask, before.len()),
            other => panic!("not on record: {other:?}"),
        }
    }

    /// The ask is repeated.
    async fn repeats(&self, id: &str, ask: &Ask) -> Asked {
        self.ask(&key(id), ask, true, NONE).await.unwrap()
    }

    async fn answers(&self, held: &Lock, ask: Uuid) -> Answered {
        self.answer(&acquisition(held), ask, &soon(), NONE).await.unwrap()
    }

    /// The asks for the document at this moment.
    async fn asked_for(&self, id: &str) -> Vec<Ask> {
        self.lock_on(id).await.expect("a lock").asks
    }
}

cases! {
    tests asks($);
    needs [Asks];

    async fn an_ask_stands_with_the_lock_and_changes_nothing_else(store, alice, bob, carol) {
        let mine = store.granted("a", alice).await;
        store.age("a", 20 * TICK).await;
        let before = store.lock_on("a").await.unwrap();
        let (of_bob, ahead) = store.stands("a", &ask(bob, "for the meeting")).await;
        assert_eq!((&of_bob.aid, &*of_bob.message, ahead), (bob, "for the meeting", 0));
        assert!(of_bob.at > SystemTime::UNIX_EPOCH, "the store says when: {of_bob:?}");
        let (of_carol, ahead) = store.stands("a", &ask(carol, "")).await;
        assert_eq!(ahead, 1);
        let after = store.lock_on("a").await.unwrap();
        assert_eq!(after.asks, [of_bob, of_carol]);
        assert_eq!((after.token, after.since, &after.aid), (mine.token, before.since, alice));
        assert!(after.expires_in() < TTL - 15 * TICK, "an ask renews nothing: {after:?}");
        assert_eq!(store.held("a", &Aid::new()).await.asks.len(), 2, "a refusal knows them");
        assert_eq!(store.releases(&mine).await, Released::Released);
    }

    async fn a_repetition_keeps_its_name_and_answer_and_another_text_does_not(store, alice, bob) {
        let mine = store.granted("a", alice).await;
        let (first, _) = store.stands("a", &ask(bob, "please")).await;
        assert_eq!(store.answers(&mine, first.id).await, Answered::Told);
        let (again, _) = store.stands("a", &ask(bob, "please")).await;
        assert_eq!(again, Ask { answer: Some(soon()), ..first.clone() });
        let again = store.repeats("a", &ask(bob, "whatever")).await;
        assert_eq!(again, Asked::Stands { ask: Ask { answer: Some(soon()), ..first.clone() }, before: Vec::new() });
        let (other, _) = store.stands("a", &ask(bob, "please, now")).await;
        assert!(other.id != first.id && other.answer.is_none(), "{other:?}");
        assert_eq!(store.asked_for("a").await, [other]);
        assert_eq!(store.answers(&mine, first.id).await, Answered::NoSuchAsk);
    }

    async fn a_repetition_asks_nothing_new(store, alice, bob, carol) {
        assert_eq!(store.repeats("a", &ask(bob, "x")).await, Asked::Gone, "free");
        let mine = store.granted("a", alice).await;
        assert_eq!(store.repeats("a", &ask(bob, "x")).await, Asked::Gone, "never asked");
        store.stands("a", &ask(bob, "x")).await;
        store.withdraw(&key("a"), bob, None, NONE).await.unwrap();
        assert_eq!(store.repeats("a", &ask(bob, "x")).await, Asked::Gone, "withdrawn");
        store.stands("a", &ask(bob, "x")).await;
        store.releases(&mine).await;
        store.granted("a", carol).await;
        assert_eq!(store.repeats("a", &ask(bob, "x")).await, Asked::Gone, "of another holder");
        assert_eq!(store.asked_for("a").await, []);
    }

    async fn a_person_has_one_ask_in_all_sessions(store, alice, bob, carol) {
        store.granted("a", alice).await;
        let (first, _) = store.stands("a", &of_user("7", bob, "x")).await;
        let (second, ahead) = store.stands("a", &of_user("7", carol, "x")).await;
        assert_eq!((second.id, &second.aid, ahead), (first.id, carol, 0));
        assert_eq!(store.asked_for("a").await.len(), 1);
        store.stands("a", &of_user("8", bob, "x")).await;
        store.withdraw(&key("a"), &Aid::new(), Some("7"), NONE).await.unwrap();
        let left = store.asked_for("a").await;
        assert_eq!(left.iter().map(|it| it.by.user.as_deref()).collect::<Vec<_>>(), [Some("8")]);
    }

    async fn a_lock_has_at_most_eight_asks(store, alice, bob) {
        store.granted("a", alice).await;
        let others: Vec<_> = (0..limits::MAX_ASKS).map(|_| Aid::new()).collect();
        for (n, aid) in others.iter().enumerate() {
            assert_eq!(store.stands("a", &ask(aid, "x")).await.1, n);
        }
        assert_eq!(store.asks_for("a", &ask(bob, "x")).await, Asked::TooMany);
        store.stands("a", &ask(&others[3], "something else")).await;
        store.withdraw(&key("a"), &others[0], None, NONE).await.unwrap();
        assert_eq!(store.stands("a", &ask(bob, "x")).await.1, limits::MAX_ASKS - 1);
    }

    async fn of_many_simultaneous_asks_eight_stand(store, alice) {
        store.granted("a", alice).await;
        let asked = at_once(12, async |_| store.asks_for("a", &ask(&Aid::new(), "x")).await);
        let stand = asked.iter().filter(|it| matches!(it, Asked::Stands { .. })).count();
        assert_eq!((stand, store.asked_for("a").await.len()), (limits::MAX_ASKS, limits::MAX_ASKS));
    }

    async fn only_the_exclusive_lock_of_somebody_else_can_be_asked_for(store, alice, bob) {
        assert_eq!(store.asks_for("free", &ask(bob, "x")).await, Asked::Free);
        assert!(store.lock_on("free").await.is_none() && store.all().await.is_empty());
        store.expired("expired", alice).await;
        assert_eq!(store.asks_for("expired", &ask(bob, "x")).await, Asked::Free);
        store.read("read", &[alice]).await;
        assert_eq!(store.asks_for("read", &ask(bob, "x")).await, Asked::NobodyHears);
        store.granted("mine", bob).await;
        assert_eq!(store.asks_for("mine", &ask(bob, "x")).await, Asked::NobodyHears);
    }

    #[needs(Sessions)]
    async fn asks_go_with_the_lock(store) {
        for how in WAYS {
            let mine = store.granted(how, &Aid::new()).await;
            store.stands(how, &ask(&Aid::new(), how)).await;
            store.loses(&mine, how, how).await;
            let next = store.granted(how, &Aid::new()).await;
            assert_eq!(messages(&next), [""; 0], "{how}");
            assert_eq!(messages(&store.lock_on(how).await.unwrap()), [""; 0], "{how}");
        }
    }

    #[needs(HandOver)]
    async fn asks_stay_behind_when_the_lock_goes_to_somebody_else(store, alice, bob, carol) {
        for taken in [None, Some(taken())] {
            let mine = store.granted("a", alice).await;
            store.stands("a", &ask(carol, "x")).await;
            let to = Claim { taken, ..claim(bob) };
            let theirs = store.hands_over(&mine, &to).await.lock().expect("a handover");
            assert_eq!(theirs.asks, []);
            assert_eq!(store.asked_for("a").await, []);
            store.releases(&theirs).await;
        }
    }

    async fn asks_stay_with_the_lock_whatever_its_holder_does(store, alice, bob) {
        let mine = store.granted("a", &Claim { tab: Some(TabId::new()), ..claim(alice) }).await;
        let (asked, _) = store.stands("a", &ask(bob, "x")).await;
        store.renews(&[alice]).await;
        store.reenters("a", alice).await;
        assert_eq!(store.asked_for("a").await, vec![asked.clone()]);
        if store.can(Ability::Documents) {
            store.put("a", "old").await;
            assert_eq!(store.saves(&mine, "new").await, Saved::Saved);
            assert_eq!(store.asked_for("a").await, vec![asked.clone()]);
        }
        if store.can(Ability::HandOver) {
            let to = Claim { tab: Some(TabId::new()), ..claim(alice) };
            let moved = store.hands_over(&mine, &to).await.lock().expect("another tab");
            assert_eq!(moved.asks, vec![asked.clone()], "the same person goes on");
            assert_eq!(store.answers(&mine, asked.id).await, Answered::Lost);
            assert_eq!(store.answers(&moved, asked.id).await, Answered::Told);
        }
    }

    async fn an_ask_that_nobody_repeats_is_forgotten_after_90_seconds(store, alice, bob, carol) {
        let mine = store.granted("a", alice).await;
        let (of_bob, _) = store.stands("a", &ask(bob, "x")).await;
        store.stands("a", &ask(carol, "x")).await;
        for _ in 0..3 {
            store.age("a", Duration::from_secs(35)).await;
            store.renews(&[alice]).await;
            store.repeats("a", &ask(carol, "x")).await;
        }
        assert_eq!(store.asked_for("a").await.iter().map(|it| &it.aid).collect::<Vec<_>>(), [carol]);
        assert_eq!(store.answers(&mine, of_bob.id).await, Answered::NoSuchAsk);
    }

    async fn only_the_holder_answers(store, alice, bob) {
        let mine = store.granted("a", alice).await;
        let (asked, _) = store.stands("a", &ask(bob, "x")).await;
        let wrong = [
            Lock { token: Some(LockToken::new()), ..mine.clone() },
            Lock { aid: bob.clone(), ..mine.clone() },
        ];
        for wrong in &wrong {
            assert_eq!(store.answers(wrong, asked.id).await, Answered::Lost);
        }
        assert_eq!(store.answers(&mine, Uuid::new_v4()).await, Answered::NoSuchAsk);
        assert_eq!(store.asked_for("a").await[0].answer, None);
        assert_eq!(store.answers(&mine, asked.id).await, Answered::Told);
        assert_eq!(store.answers(&mine, asked.id).await, Answered::Told, "repeated");
        let no = Answer::No("not today".to_owned());
        store.answer(&acquisition(&mine), asked.id, &no, NONE).await.unwrap();
        assert_eq!(store.asked_for("a").await[0].answer, Some(no), "the latest counts");
        store.age("a", TTL).await;
        assert_eq!(store.answers(&mine, asked.id).await, Answered::Lost, "expired");
    }

    async fn only_the_ask_of_this_person_is_withdrawn(store, alice, bob, carol) {
        store.granted("a", alice).await;
        for (aid, message) in [(bob, "of bob"), (carol, "of carol")] {
            store.stands("a", &ask(aid, message)).await;
        }
        for _ in 0..2 {
            store.withdraw(&key("a"), bob, None, NONE).await.unwrap();
            assert_eq!(messages(&store.lock_on("a").await.unwrap()), ["of carol"]);
        }
        store.withdraw(&key("free"), bob, None, NONE).await.unwrap();
        assert!(store.lock_on("free").await.is_none());
    }

    #[needs(Documents)]
    async fn no_save_fails_because_of_asks_at_the_same_moment(store, alice) {
        store.put("a", "old").await;
        let mine = store.granted("a", alice).await;
        at_once(8, async |n| match n {
            0 => for n in 0..10 {
                // A conflict is no outcome: the manager repeats the save.
                let saved = known(async || {
                    let document = store.encoded("a", &n.to_string());
                    store.edits(&mine, document.into()).await
                });
                assert_eq!(saved.await, Saved::Saved);
            },
            _ => for _ in 0..5 {
                let (aid, asked) = (Aid::new(), ask(&Aid::new(), "x"));
                known(async || store.ask(&key("a"), &Ask { aid: aid.clone(), ..asked.clone() }, false, NONE).await).await;
                known(async || store.withdraw(&key("a"), &aid, None, NONE).await).await;
            },
        });
        assert_eq!(store.text_of("a").await.as_deref(), Some("9"));
        assert_eq!(store.asked_for("a").await, []);
    }

    #[needs(Watch)]
    async fn a_watch_reports_asks_and_answers(store, alice, bob) {
        let Some(mut watch) = store.watch(COLLECTION, NONE).await.unwrap() else { return };
        let mine = store.granted("a", alice).await;
        let mut tells = async |what: &str| {
            let asked = Change::Asked(key("a"));
            watch::told(&mut watch, what, |it| *it == asked || *it == Change::Missed).await;
        };
        let (asked, _) = store.stands("a", &ask(bob, "x")).await;
        tells("asked").await;
        store.answers(&mine, asked.id).await;
        tells("answered").await;
        store.stands("a", &ask(bob, "y")).await;
        tells("asked for something else").await;
        store.withdraw(&key("a"), bob, None, NONE).await.unwrap();
        tells("withdrawn").await;
    }
}
