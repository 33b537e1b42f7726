//! Runs beside an inference engine, in its pod.
//!
//! It finds the engine, registers it with every gateway for as long as both live, takes it out of use on request and says when nothing
//! runs there any more (`/drain`, `/settled`), loads and unloads LoRA adapters through the engine's own API, and passes the engine's
//! metrics on with its own.
//!
//! One [`state`] is watched by all tasks: `engine` looks at the engine, `link` tells one gateway, `adapters` follows the pod's files, `http` answers.

mod adapters;
mod engine;
mod gateway_link;
mod gateways;
mod hooks;
mod http;
mod http_client;
mod metrics;
mod options;
mod pod_metadata;
mod sidecar;
mod state;

pub use gateways::GatewayAddress;
pub use metrics::all_metrics;
pub use options::SidecarOptions;
pub use sidecar::{SidecarStartError, start};
