//! What others ask the holder of a lock.

use mongodb::bson::{Bson, DateTime, Document, doc};
use uuid::Uuid;

use crate::{
    ask::{Answer, Ask},
    key::LockKey,
    lock::{Aid, Holder},
    store::{
        Acquisition, Answered, Asked,
        lock_rules::{Moment, Record, Standing},
        mongo::{
            Call,
            admission::Purpose,
            codec::{aid_in, documents, presentable},
            error::Result,
            lock_record::{at, since_1970},
            step::Decided,
        },
    },
};

impl Call<'_> {
    // Each of these is a step, which may find what an earlier attempt has written: the same ask, the same answer, or
    // nothing to withdraw.

    pub(super) async fn ask(&self, key: &LockKey, ask: &Ask) -> Result<Asked> {
        let ask = ask.clone();
        let rule = move |record: &mut Record, moment: Moment| {
            let asked = record.ask(&ask, moment);
            let is_promise = matches!(asked, Asked::Stands { .. });
            Decided { answer: asked, is_promise }
        };
        self.step(key.id(), Purpose::Other, rule).await
    }

    pub(super) async fn answer(
        &self,
        held: &Acquisition,
        ask: Uuid,
        answer: &Answer,
    ) -> Result<Answered> {
        let (it, answer) = (held.clone(), answer.clone());
        let rule = move |record: &mut Record, moment: Moment| {
            Decided::promise(record.answer(&it, ask, &answer, moment.now))
        };
        self.step(held.key.id(), Purpose::Other, rule).await
    }

    pub(super) async fn withdraw(
        &self,
        key: &LockKey,
        aid: &Aid,
        user: Option<&str>,
    ) -> Result<()> {
        let (aid, user) = (aid.clone(), user.map(str::to_owned));
        let rule = move |record: &mut Record, _| {
            record.withdraw(&aid, user.as_deref());
            Decided { answer: (), is_promise: false }
        };
        self.step(key.id(), Purpose::Other, rule).await
    }
}

/// The asks in this record of an exclusive lock.
pub(super) fn asks_in(record: &Document) -> Vec<Standing> {
    documents(record, "asks").filter_map(standing).collect()
}

fn standing(stored: &Document) -> Option<Standing> {
    let text = |field| stored.get_str(field).ok();
    let by = Holder::new(text("label")?);
    let ask = Ask {
        id: text("id")?.parse().ok()?,
        aid: aid_in(stored, "aid"),
        by: match text("user") {
            Some(user) => by.of_user(user),
            None => by,
        },
        message: text("message")?.to_owned(),
        at: presentable(stored.get_datetime("at").ok().copied()),
        answer: text("answer")
            .and_then(|name| Answer::named(name, text("reply").unwrap_or_default())),
    };
    Some(Standing { ask, until: since_1970(*stored.get_datetime("until").ok()?) })
}

/// These asks as a record has them; `None` if there are none.
pub(super) fn asks_of(asks: &[Standing]) -> Option<Bson> {
    let asks: Vec<_> = asks.iter().map(fields).collect();
    (!asks.is_empty()).then(|| asks.into())
}

fn fields(Standing { ask, until }: &Standing) -> Document {
    let Ask { id, aid, by, message, at: asked, answer } = ask;
    let mut fields = doc! {
        "id": id.to_string(),
        "aid": aid.as_str(),
        "label": &by.label,
        "message": message,
        "at": DateTime::from_system_time(*asked),
        "until": at(*until),
    };
    fields.extend(by.user.iter().map(|user| ("user".to_owned(), user.into())));
    if let Some(answer) = answer {
        fields.extend(doc! { "answer": answer.name(), "reply": answer.message() });
    }
    fields
}
