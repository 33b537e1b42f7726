//! What fills the index: one feed for each event source of each engine, and the store's metadata.

mod apply;
mod engine;
mod follow;
mod store;

pub(crate) use follow::{Feeds, follow_feeds};
pub(crate) use store::{StoreSeen, StoreView};
