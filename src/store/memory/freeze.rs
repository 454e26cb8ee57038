//! Freezes, on the clock of the embedded store.

use std::time::{Duration, SystemTime};

use crate::{
    freeze::{Freeze, Scope},
    store::memory::state::State,
};

impl State {
    pub(super) fn freezes(&mut self) -> Vec<Freeze> {
        let now = self.now();
        self.freezes.retain(|(_, end)| *end > now);
        let freezes = self.freezes.iter().map(|(Freeze { scope, reason, until, .. }, end)| {
            Freeze::new(scope.clone(), reason.clone(), *until, *end - now)
        });
        freezes.collect()
    }

    pub(super) fn set_freeze(&mut self, scope: &Scope, freeze: Option<(&str, SystemTime)>) {
        let Some((reason, until)) = freeze else {
            return self.freezes.retain(|(freeze, _)| freeze.scope != *scope);
        };
        let ends_in = until.duration_since(SystemTime::now()).unwrap_or(Duration::ZERO);
        if !ends_in.is_zero() {
            self.freezes.retain(|(freeze, _)| freeze.scope != *scope);
            let freeze = Freeze::new(scope.clone(), reason.to_owned(), until, ends_in);
            self.freezes.push((freeze, self.now().saturating_add(ends_in)));
        }
    }
}
