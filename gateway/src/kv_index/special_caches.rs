//! Whether any engine caches more than prefixes of a prompt's full blocks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Set by the first engine that reports cache groups of a hybrid model, or chunks of LMCache, and never reset. Until then a prediction need
/// not check every engine for them.
#[derive(Debug, Clone, Default)]
pub(crate) struct SpecialCaches(Arc<AtomicBool>);

impl SpecialCaches {
    pub(super) fn found(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub(super) fn exist(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
