//! Asking the holder of a lock for it, and the holder's answer.

use actix_web::{HttpRequest, HttpResponse, Responder, http::StatusCode};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::{
    error::LockError,
    lock::{Answer, Ask, MAX_ASK_BYTES, Mode},
    store::Acquisition,
    web::{
        Problem,
        access::Access,
        api::{Body, allowed, bad_request, form, key},
        format::{AskBody, Current},
        request::Locks,
        same_site::SameSite,
    },
};

#[derive(Serialize)]
struct AskedBody {
    #[serde(flatten)]
    ask: AskBody,
    /// How many others are known to wait or to have asked before.
    ahead: usize,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct AskForm {
    message: String,
    /// The ask that is repeated.
    ask: Option<Uuid>,
    /// Where the browser goes after a form.
    to: Option<String>,
}

pub(super) async fn ask(
    _: SameSite,
    Locks(locks): Locks,
    req: HttpRequest,
    body: Body,
) -> Result<HttpResponse, Problem> {
    let key = allowed(&locks, &req, Access::Lock).await?;
    let call = form::read::<AskForm>(&req, body)?;
    let done = call.done(&req, call.said.to.as_deref())?;
    check_length(&call.said.message)?;
    let aid = locks.aid_for_ask(locks.begin()).await?;
    let ask = Ask::new(aid, locks.actor().holder(), &call.said.message);
    let (again, person, until) = (call.said.ask.is_some(), locks.counts_as(), locks.begin());
    let (ask, ahead) = locks.manager.core.ask(&key, ask, again, person, until).await?;
    locks.has_asked.set(true);
    if done.status() == StatusCode::SEE_OTHER {
        return Ok(done);
    }
    let body = Current(AskedBody { ask: AskBody::from(&ask), ahead });
    Ok((body, StatusCode::ACCEPTED).respond_to(&req).map_into_boxed_body())
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct AnswerForm {
    ask: Option<Uuid>,
    answer: String,
    message: String,
    to: Option<String>,
}

pub(super) async fn answer(
    _: SameSite,
    Locks(locks): Locks,
    req: HttpRequest,
    body: Body,
) -> Result<HttpResponse, Problem> {
    let key = allowed(&locks, &req, Access::Lock).await?;
    let call = form::read::<AnswerForm>(&req, body)?;
    let done = call.done(&req, call.said.to.as_deref())?;
    let AnswerForm { ask, answer, message, .. } = call.said;
    check_length(&message)?;
    let answer = Answer::named(&answer, &message).ok_or_else(|| {
        bad_request("an `answer` is `soon` or `no`; to give the document away, release its lock")
    })?;
    let ask = ask.ok_or_else(|| bad_request("name the `ask` that is answered"))?;
    let [token] = locks.headers.tokens()? else {
        return Err(bad_request("name the lock by its token: one `Lock-Token`, or `?lock_token=`"));
    };
    let stale = || LockError::StaleToken { key: key.clone() };
    let aid = locks.aid().ok_or_else(stale)?;
    let held = Acquisition { key: key.clone(), aid, token: *token, mode: Mode::Exclusive };
    match locks.manager.core.answer(&held, ask, answer, locks.begin()).await {
        Ok(()) => Ok(done),
        Err(LockError::Lost { .. }) => Err(stale().into()),
        Err(error) => Err(error.into()),
    }
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct WithdrawForm {
    to: Option<String>,
}

pub(super) async fn withdraw(
    _: SameSite,
    Locks(locks): Locks,
    req: HttpRequest,
    body: Body,
) -> Result<HttpResponse, Problem> {
    // A person without the permission to lock may still withdraw.
    let key = key(&locks.permissions(), &req)?;
    locks.check_client()?;
    let call = form::read::<WithdrawForm>(&req, body)?;
    let done = call.done(&req, call.said.to.as_deref())?;
    if let Some(aid) = locks.aid() {
        let user = locks.actor().id().map(str::to_owned);
        locks.manager.core.withdraw(&key, aid, user, locks.begin()).await?;
    }
    Ok(done)
}

fn check_length(message: &str) -> Result<(), Problem> {
    if message.len() <= MAX_ASK_BYTES {
        return Ok(());
    }
    Err(bad_request(format_args!("a message has at most {MAX_ASK_BYTES} bytes")))
}
