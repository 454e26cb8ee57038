//! The number of open event streams.

use std::{
    collections::HashMap,
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// The open streams of this server, by the client's address.
#[derive(Debug, Clone, Default)]
pub(crate) struct Streams(Arc<Mutex<HashMap<Option<IpAddr>, usize>>>);

/// How many streams may be open.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub(crate) total: usize,
    pub(crate) per_address: usize,
}

impl Streams {
    fn open(&self) -> MutexGuard<'_, HashMap<Option<IpAddr>, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many streams are open.
    pub(crate) fn count(&self) -> usize {
        self.open().values().sum()
    }

    /// Counts one more stream until it is dropped. `None` if there are too many.
    pub(crate) fn admit(&self, to: Option<IpAddr>, limits: Limits) -> Option<Admitted> {
        let mut open = self.open();
        let here = open.get(&to).copied().unwrap_or(0);
        if here >= limits.per_address || open.values().sum::<usize>() >= limits.total {
            return None;
        }
        open.insert(to, here + 1);
        Some(Admitted { streams: self.clone(), to })
    }
}

/// A stream that counts as open.
#[derive(Debug)]
pub(crate) struct Admitted {
    streams: Streams,
    to: Option<IpAddr>,
}

impl Drop for Admitted {
    fn drop(&mut self) {
        let mut open = self.streams.open();
        if let Some(here) = open.get_mut(&self.to) {
            *here -= 1;
            if *here == 0 {
                open.remove(&self.to);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_are_open_than_may_be_and_who_goes_makes_room() {
        let (streams, limits) = (Streams::default(), Limits { total: 3, per_address: 2 });
        let [one, two] = [Some([10, 0, 0, 1].into()), Some([10, 0, 0, 2].into())];
        let first = streams.admit(one, limits);
        let second = streams.admit(one, limits);
        assert!(first.is_some() && second.is_some());
        assert!(streams.admit(one, limits).is_none(), "two to one address");
        let third = streams.admit(two, limits);
        assert!(third.is_some());
        assert!(streams.admit(two, limits).is_none(), "three in all");
        drop(first);
        assert!(streams.admit(two, limits).is_some());
        drop((second, third));
        assert!(streams.open().is_empty());
    }
}
