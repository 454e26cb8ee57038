//! The wording of the stories.

use std::fmt;

use crate::{
    protocol::Step,
    world::{Answer, Token, Verb, Who},
};

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Asks(token) => write!(f, "{} asks for the lock, as {token}", token.who),
            Self::Renews(who) => write!(f, "{who} asks to renew"),
            Self::Reenters(who) => write!(f, "{who} opens the document again"),
            Self::Saves(who) => write!(f, "{who} asks to save"),
            Self::Releases(token) => write!(f, "{} asks to release {token}", token.who),
            Self::Notices(who) => write!(f, "{who} notices that the lease is over"),
            Self::LogsOut => f.write_str("Alice logs out, in another tab, by another server"),
            Self::SendsAgain(Some(who)) => write!(f, "{who} has no reply, and sends that again"),
            Self::SendsAgain(None) => f.write_str("the logout has no reply, and is sent again"),
            Self::GivesUp(who) => {
                write!(f, "{who} waits no longer: the outcome is unknown")
            }
            Self::Hears(who, answer) => write!(f, "{who} hears: {answer}"),
            Self::LogoutHears => f.write_str("the logout hears: done"),
            Self::CarriedOut(verb, Some(answer)) => write!(f, "the database: {verb} -> {answer}"),
            Self::CarriedOut(verb, None) => {
                write!(f, "the database: {verb}, late: nobody waits for the reply any more")
            }
            Self::Replicated => f.write_str("a majority has it"),
            Self::FailsOver => f.write_str("the primary fails over, and nothing is rolled back"),
            Self::RollsBack => {
                f.write_str("the primary fails over: what no majority has is rolled back")
            }
            Self::Ticks => f.write_str("time passes: one tick"),
            Self::StepsBack => f.write_str("the clock of the server steps back by a tick"),
            Self::Breaks(token) => write!(f, "an administrator sees {token}, and asks to break it"),
            Self::ReadsToAsk(token) => write!(f, "a stranger, who wants to ask, reads {token}"),
            Self::Finds(who) => write!(f, "the reaper finds that {who} may be idle"),
            Self::LeavesAwake(who) => write!(
                f,
                "the reaper: {who} is not idle, or was told already; the traces are marked as seen"
            ),
            Self::Claims(who) => {
                write!(f, "the reaper claims the end of {who}'s session, and names its locks")
            }
            Self::SeesTraces(who) => {
                write!(f, "the reaper marks the traces of {who}'s locks as seen")
            }
            Self::Announces(who) => {
                write!(f, "the reaper removes what is left, and tells the listener of {who}'s end")
            }
            Self::Withdraws(who) => {
                write!(f, "the reaper withdraws the end of {who}'s session, which names no lock")
            }
            Self::ReaperDies => f.write_str("the reaper dies, and another one takes its place"),
        }
    }
}

impl fmt::Display for Verb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Acquire(token) => write!(f, "acquire {token}"),
            Self::Look(who) => write!(f, "has {who}'s session ended? and load"),
            Self::Renew(token) => write!(f, "renew what {} has", token.who),
            Self::Save(token, seen) => write!(f, "save over version {seen}, under {token}"),
            Self::Release(token) => write!(f, "release {token}"),
            Self::Retract(token) => {
                write!(f, "take {token} back, unless another request was told of it")
            }
            Self::Tombstone => f.write_str("write down that Alice's session has ended"),
            Self::RemoveAll => f.write_str("remove all locks of Alice's session"),
            Self::TakeOver(token, former) => {
                write!(f, "acquire {token}, also in place of the expired {}", former.token)
            }
            Self::Trace(former) => write!(f, "leave a trace of the expired {}", former.token),
            Self::Commit(token, seen, _) => {
                write!(f, "commit the save over version {seen}, under {token}")
            }
            Self::Break(token) => write!(f, "break {token}"),
            Self::Ask(lock) => write!(f, "a stranger asks for {}", lock.token),
            Self::Confirm(token) => write!(f, "is {token} live? and load"),
        }
    }
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Granted(token) => write!(f, "granted, {token}"),
            Self::AlreadyMine(token) => write!(f, "yours already, {token}"),
            Self::Expired(former) => {
                write!(f, "{} has expired, the reaper has to hear of it", former.token)
            }
            Self::Touched(true) => {
                f.write_str("written, not committed; the lock record is changed")
            }
            Self::Touched(false) => {
                f.write_str("written, not committed; in the lock record there is nothing to change")
            }
            Self::Held => f.write_str("held by the other"),
            Self::Goes(version) => write!(f, "not ended; version {version}"),
            Self::Ended => f.write_str("ended"),
            Self::Renewed => f.write_str("renewed"),
            Self::Confirmed(left, version) => {
                write!(f, "live for {left} ticks; version {version}")
            }
            Self::Saved(version) => write!(f, "saved as version {version}"),
            Self::Stale(version) => write!(f, "not saved: it is version {version}"),
            Self::Lost => f.write_str("lost"),
            Self::Done => f.write_str("done"),
        }
    }
}

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Self::Alice { "Alice" } else { "Bob" })
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", if self.who == Who::Alice { "A" } else { "B" }, self.nth)?;
        if self.send > 0 { write!(f, "′") } else { Ok(()) }
    }
}
