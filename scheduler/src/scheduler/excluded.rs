//! Engines that one request may not use.

use crate::fleet::{InstanceIndex, InstanceLoad};

/// Engines whose availability was taken away for one request.
pub(super) struct ExcludedEngines<'a> {
    engines: &'a [InstanceIndex],
    /// Bit by position in `engines`; what is beyond was looked up again.
    were_available: Vec<bool>,
}

impl<'a> ExcludedEngines<'a> {
    pub(super) fn apply(loads: &mut [InstanceLoad], engines: &'a [InstanceIndex]) -> Self {
        let bar = |ix: &InstanceIndex| {
            loads.get_mut(ix.as_usize()).is_some_and(|load| std::mem::take(&mut load.available))
        };
        Self { engines, were_available: engines.iter().map(bar).collect() }
    }

    pub(super) fn restore(self, loads: &mut [InstanceLoad]) {
        for (ix, was) in self.engines.iter().zip(self.were_available) {
            if was && let Some(load) = loads.get_mut(ix.as_usize()) {
                load.available = true;
            }
        }
    }
}
