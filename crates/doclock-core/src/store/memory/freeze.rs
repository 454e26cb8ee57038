//! Freezes, on the clock of the embedded store.

use std::{
    collections::BTreeSet,
    time::{Duration, SystemTime},
};

use uuid::Uuid;

use crate::{
    freeze::{End, Freeze, MAX_NOTED, NewFreeze, Scope},
    store::memory::state::State,
};

impl State {
    pub(super) fn freezes(&mut self) -> Vec<Freeze> {
        let now = self.now();
        self.freezes.retain(|(_, end, _)| *end > now);
        let freezes = self.freezes.iter().map(|(it, end, servers)| {
            let (scope, reason) = (it.scope.clone(), it.reason.clone());
            let mut freeze = Freeze::new(scope, reason, it.until, *end - now);
            (freeze.by, freeze.id) = (it.by.clone(), it.id);
            freeze.obeyed_by = servers.len();
            freeze
        });
        freezes.collect()
    }

    /// Freezes the scope instead of an earlier freeze of it; `None` lifts the freeze. A freeze that would have ended
    /// already changes nothing: its id is not among the freezes.
    pub(super) fn set_freeze(&mut self, scope: &Scope, freeze: Option<&NewFreeze>) {
        let Some(new) = freeze else {
            return self.freezes.retain(|(freeze, ..)| freeze.scope != *scope);
        };
        let now = SystemTime::now();
        let (until, ends_in) = match new.end {
            End::At(until) => (until, until.duration_since(now).unwrap_or(Duration::ZERO)),
            End::In(lasts) => (now + lasts, lasts),
        };
        if !ends_in.is_zero() {
            self.freezes.retain(|(freeze, ..)| freeze.scope != *scope);
            let mut freeze = Freeze::new(scope.clone(), new.reason.clone(), until, ends_in);
            (freeze.by, freeze.id) = (Some(new.by.clone()), Some(new.id));
            let end = self.now().saturating_add(ends_in);
            let obeyed_by = BTreeSet::new();
            self.freezes.push((freeze, end, obeyed_by));
        }
    }

    pub(super) fn obey_freeze(&mut self, id: Uuid, server: Uuid) {
        let this = self.freezes.iter_mut().find(|(freeze, ..)| freeze.id == Some(id));
        if let Some((_, _, servers)) = this
            && servers.len() < MAX_NOTED
        {
            servers.insert(server);
        }
    }
}
