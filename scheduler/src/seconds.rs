//! The unit of time of decisions.

/// A point in time or a duration in seconds, by the caller's clock.
pub type Seconds = f64;
