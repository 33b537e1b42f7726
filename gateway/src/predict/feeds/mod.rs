//! Feeds of the index: one for each event source of each engine, and one for the store's metadata.

mod apply;
mod engine;
mod starter;
mod store;

#[cfg(test)]
pub(crate) use apply::EngineEventApplier;
pub(crate) use starter::{FeedStarter, run_feeds};
pub(crate) use store::{StoreAdmins, StoreView, StoreViewStatus};
