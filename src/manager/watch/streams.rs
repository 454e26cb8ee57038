//! The number of open event streams.

use std::{net::IpAddr, sync::Arc};

use crate::{actor::Person, manager::counts::Counts};
use parking_lot::Mutex;

/// The open streams of this server.
#[derive(Debug, Clone, Default)]
pub(crate) struct Streams(Arc<Mutex<Open>>);

#[derive(Debug, Default)]
struct Open {
    by_address: Counts<Option<IpAddr>>,
    by_person: Counts<Person>,
}

/// How many streams may be open.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub(crate) total: usize,
    pub(crate) per_address: usize,
    pub(crate) per_person: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            // An idle stream costs some kilobytes and a file descriptor. The limit for descriptors is often 1 024 or a
            // few thousand.
            total: 4096,
            per_address: 4096,
            // Enough for a few browsers, or for a few dozen tabs where each tab opens a stream.
            per_person: 64,
        }
    }
}

impl Streams {
    /// How many streams are open.
    pub(crate) fn count(&self) -> usize {
        self.0.lock().by_address.all()
    }

    /// Counts one more stream until it is dropped. `None` if there are too many.
    pub(crate) fn admit(
        &self,
        to: Option<IpAddr>,
        person: Person,
        limits: Limits,
    ) -> Option<Admitted> {
        let mut open = self.0.lock();
        if open.by_address.of(&to) >= limits.per_address
            || open.by_person.of(&person) >= limits.per_person
            || open.by_address.all() >= limits.total
        {
            return None;
        }
        open.by_address.add(to);
        open.by_person.add(person.clone());
        Some(Admitted { streams: self.clone(), to, person })
    }
}

/// A stream that counts as open.
#[derive(Debug)]
pub(crate) struct Admitted {
    streams: Streams,
    to: Option<IpAddr>,
    person: Person,
}

impl Drop for Admitted {
    fn drop(&mut self) {
        let mut open = self.streams.0.lock();
        open.by_address.remove(&self.to);
        open.by_person.remove(&self.person);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_are_open_than_may_be_and_who_goes_makes_room() {
        let streams = Streams::default();
        let limits = Limits { total: 4, per_address: 3, per_person: 2 };
        let [one, two] = [Some([10, 0, 0, 1].into()), Some([10, 0, 0, 2].into())];
        let open = |to, user: &str| streams.admit(to, Person::User(user.to_owned()), limits);
        let first = open(one, "alice");
        let second = open(two, "alice");
        assert!(first.is_some() && second.is_some());
        assert!(open(one, "alice").is_none(), "two of one person");
        let others = [open(one, "bob"), open(one, "carol")];
        assert!(others.iter().all(Option::is_some));
        assert!(open(two, "dave").is_none(), "four in all");
        drop(second);
        assert!(open(one, "dave").is_none(), "three to one address");
        assert!(open(two, "dave").is_some());
        drop((first, others));
        assert_eq!(streams.count(), 0);
        assert!(open(two, "alice").is_some());
    }
}
