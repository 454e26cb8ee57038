//! The number of open event streams.

use std::{net::IpAddr, sync::Arc};

use parking_lot::Mutex;

use crate::{
    actor::Person,
    manager::{counts::Counts, limits::Limits},
};

/// The open streams of this server.
#[derive(Debug, Clone)]
pub(crate) struct Streams {
    limits: Limits,
    open: Arc<Mutex<Open>>,
}

#[derive(Debug, Default)]
struct Open {
    by_address: Counts<Option<IpAddr>>,
    by_person: Counts<Person>,
}

impl Streams {
    pub(in crate::manager) fn new(limits: Limits) -> Self {
        Self { limits, open: Arc::default() }
    }

    /// How many streams are open.
    pub(crate) fn count(&self) -> usize {
        self.open.lock().by_address.all()
    }

    /// Counts one more stream until it is dropped. `None` if there are too many.
    pub(crate) fn admit(&self, to: Option<IpAddr>, person: Person) -> Option<Admitted> {
        let mut open = self.open.lock();
        if open.by_address.of(&to) >= self.limits.event_streams_per_address
            || open.by_person.of(&person) >= self.limits.event_streams_per_person
            || open.by_address.all() >= self.limits.event_streams
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
        let mut open = self.streams.open.lock();
        open.by_address.remove(&self.to);
        open.by_person.remove(&self.person);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_are_open_than_may_be_and_who_goes_makes_room() {
        let streams = Streams::new(Limits {
            event_streams: 4,
            event_streams_per_address: 3,
            event_streams_per_person: 2,
            ..Limits::default()
        });
        let [one, two] = [Some([10, 0, 0, 1].into()), Some([10, 0, 0, 2].into())];
        let open = |to, user: &str| streams.admit(to, Person::User(user.to_owned()));
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
