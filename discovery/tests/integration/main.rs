//! Discovery from files and from Kubernetes, and its probes of engines.
#![expect(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

mod fake_engine;
mod fake_kubernetes;
mod files;
mod kubernetes;
mod probing;
