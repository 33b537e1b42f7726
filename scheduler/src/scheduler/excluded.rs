//! Exclusion of engines for one request.

use crate::fleet::{InstanceIndex, InstanceLoad};

/// Engines made unavailable for one request.
pub(super) struct ExcludedEngines<'a> {
    engines: &'a [InstanceIndex],
    /// Bitmap by position in `engines`; positions beyond it were looked up again.
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
