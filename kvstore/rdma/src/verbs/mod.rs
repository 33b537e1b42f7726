//! Safe wrappers of the libibverbs calls. All unsafe code is here; the types keep each object alive while it is used.

mod context;
mod queue_pair;
mod registered;

pub(crate) use context::VerbsContext;
pub use context::WorkCompletionError;
pub(crate) use queue_pair::{QueuePair, WorkRequest};
pub use registered::RegisteredRegion;
