//! Arithmetic of times that come from objects.

use std::time::Duration;

use k8s_openapi::jiff::Timestamp;

/// Adds a duration to a time; returns the time unchanged on overflow.
pub(crate) fn add_duration(time: Timestamp, wait: Duration) -> Timestamp {
    time.checked_add(wait).unwrap_or(time)
}
