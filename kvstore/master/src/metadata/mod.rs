//! The metadata server: where clients tell how they can be reached, and ask how others can.
//!
//! The same requests and answers as Mooncake's, but entries can outlive the master ([`MetadataStore::open`],
//! [`MetadataStore::in_journal`]). An entry of a former master may
//! be replaced by its client, as it could be where nothing outlives: only a key that was written since the start is protected.

mod record;
mod routes;
mod store;
#[cfg(test)]
mod tests;

pub use routes::metadata_router;
pub(crate) use store::MetadataTable;
pub use store::{MetadataPutOutcome, MetadataStore, MetadataStoreError};
