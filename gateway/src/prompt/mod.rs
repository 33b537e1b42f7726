//! Reads from a request body only what routing needs, and splices into it only what the engines' protocols need.
//! Everything else stays byte for byte as the client wrote it.

mod head;
mod quick;
mod splice;
mod strict;
mod tally;

#[doc(hidden)]
pub use head::accepts;
pub(crate) use head::{Api, Head, Member};
pub(crate) use splice::{Edit, Spliced};
#[cfg(test)]
mod quick_tests;
#[cfg(test)]
mod tests;
