//! The transfer metadata server, where clients register their addresses and look up those of others.
//!
//! Requests and responses are Mooncake's, but entries can persist across restarts ([`MetadataStore::open`],
//! [`MetadataStore::in_journal`]). A client may replace its entry from before the restart, as it could without persistence: only keys
//! written since the start are protected.

mod record;
mod routes;
mod store;
#[cfg(test)]
mod tests;

pub use routes::metadata_router;
pub(crate) use store::MetadataTable;
pub use store::{MetadataPutOutcome, MetadataStore, MetadataStoreError};
