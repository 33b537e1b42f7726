//! Identity of requests on their way to engines.

/// The caller's identifier of one attempt of one request. Never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AttemptId(pub u64);
