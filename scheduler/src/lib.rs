//! The routing decision: pure, deterministic, no I/O.
