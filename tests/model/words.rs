//! The stories in words.

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
            Self::Saves(who) => write!(f, "{who} asks to save"),
            Self::Releases(token) => write!(f, "{} asks to release {token}", token.who),
            Self::Notices(who) => write!(f, "{who} notices that the lease is over"),
            Self::LogsOut => f.write_str("Alice logs out, in another tab, by another server"),
            Self::SendsAgain(Some(who)) => write!(f, "{who} has no reply, and sends that again"),
            Self::SendsAgain(None) => f.write_str("the logout has no reply, and is sent again"),
            Self::GivesUp(who) => {
                write!(
                    f,
                    "{who} waits no longer: the outcome is unknown, what there may be is given back"
                )
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
        }
    }
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Granted(token) => write!(f, "granted, {token}"),
            Self::AlreadyMine(token) => write!(f, "yours already, {token}"),
            Self::Held => f.write_str("held by the other"),
            Self::Goes(version) => write!(f, "not ended; version {version}"),
            Self::Ended => f.write_str("ended"),
            Self::Renewed => f.write_str("renewed"),
            Self::Saved(version) => write!(f, "saved as version {version}"),
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
