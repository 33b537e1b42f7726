//! The verbs of libibverbs. All that is unsafe about them is here, behind types that keep each thing as long as it is
//! used.

mod context;
mod queue_pair;
mod registered;

pub(crate) use context::Context;
pub(crate) use queue_pair::{QueuePair, Work};
pub use registered::Registered;
