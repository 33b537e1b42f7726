//! The sidecar of an inference engine, which runs in the engine's pod.
//!
//! It finds the engine, registers it with every gateway, drains it on request and reports when the drain is complete (`/drain`,
//! `/settled`), reports what its removal would cost (`/removal-cost`), loads and unloads LoRA adapters through the engine's own API, and exports the engine's metrics with its own.
//!
//! All tasks watch one [`state`]: `engine` polls the engine, `gateway_link` registers it with one gateway, `adapters` watches the pod's
//! files, `http` serves the endpoints. What they share is in `context`; `sidecar` starts them.

mod adapters;
mod context;
mod drain;
mod engine;
mod gateway_address;
mod gateway_link;
mod gateways;
mod hooks;
mod http;
mod http_client;
mod metrics;
mod options;
mod pod_metadata;
mod registrations;
mod removal_cost;
mod sidecar;
mod state;

pub use drain::{DrainError, DrainOptions, drain};
pub use gateway_address::{GatewayAddress, GatewayAddressError};
pub use metrics::all_metrics;
pub use options::SidecarOptions;
pub use sidecar::{SidecarStartError, start};
