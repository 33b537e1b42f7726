//! Regions, their ledger and catalog under faults, and the holder.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

mod holder;
mod ledger;
mod objects;
mod region;
