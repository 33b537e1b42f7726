//! What fills the index: one feed for each event source of each engine, and the store's metadata.

mod apply;
mod engine;
mod starter;
mod store;

pub(crate) use starter::{FeedStarter, run_feeds};
pub(crate) use store::{StoreView, StoreViewStatus};
