//! Engines that one request may not use.

use crate::cluster::{InstanceIx, Load};

/// Engines whose availability was taken away for one request.
pub(super) struct Barred<'a> {
    engines: &'a [InstanceIx],
    /// Bit by position in `engines`; what is beyond was looked up again.
    were: Vec<bool>,
}

impl<'a> Barred<'a> {
    pub(super) fn bar(loads: &mut [Load], engines: &'a [InstanceIx]) -> Self {
        let bar =
            |ix: &InstanceIx| loads.get_mut(ix.at()).is_some_and(|load| std::mem::take(&mut load.available));
        Self { engines, were: engines.iter().map(bar).collect() }
    }

    pub(super) fn lift(self, loads: &mut [Load]) {
        for (ix, was) in self.engines.iter().zip(self.were) {
            if was && let Some(load) = loads.get_mut(ix.at()) {
                load.available = true;
            }
        }
    }
}
