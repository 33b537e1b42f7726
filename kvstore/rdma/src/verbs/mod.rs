//! The verbs of libibverbs. All that is unsafe about them is here, behind types that keep each thing as long as it is
//! used.

mod context;
mod queue_pair;
mod registered;

pub(crate) use context::VerbsContext;
pub(crate) use queue_pair::{QueuePair, WorkRequest};
pub use registered::RegisteredRegion;
