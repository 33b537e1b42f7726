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
pub use strip::{Unsearchable, without_transfer_members};
pub use transfer_members::{is_transfer_member, is_user_data};
#[cfg(test)]
mod quick_tests;
#[cfg(test)]
mod tests;
