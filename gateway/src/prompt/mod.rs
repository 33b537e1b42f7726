//! Reads from a request body only what routing needs, and splices into it only what the engines' protocols need.
//! Everything else stays byte for byte as the client wrote it.

mod head;
mod quick;
mod splice;
mod strict;
mod strip;
mod tally;
mod transfer_members;

#[doc(hidden)]
pub use head::accepts;
pub(crate) use head::{Api, Head, Member};
pub(crate) use splice::{Edit, Spliced};
pub(crate) use strip::{Unsearchable, without_transfer_members};
pub(crate) use transfer_members::is_transfer_member;
#[cfg(test)]
mod quick_tests;
#[cfg(test)]
mod tests;
