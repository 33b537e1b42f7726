//! An endpoint picker of the Gateway API Inference Extension: another proxy, such as Envoy, sends the requests to engines, and for each of
//! them queries the picker for the engine, by its external processing protocol (ext_proc).
//!
//! The decisions and the feedback are the gateway's ([`moongate_gateway::EndpointPicker`]). Here is only the protocol: the order of the
//! messages (`exchange`), their contents (`messages`), and what happens with each (`session`).

mod exchange;
#[cfg(test)]
mod exchange_tests;
mod health;
mod messages;
mod options;
mod request_body;
mod service;
mod session;

use moongate_gateway::{GatewayStartError, RunningGateway};
use moongate_runtime::Supervisor;
use moongate_telemetry::Tracer;

pub use exchange::{AwaitedParts, Exchange, ExchangeStep, OutOfOrderError, ProxyMessage};
pub use options::EppOptions;

/// Starts an endpoint picker whose tasks run under `supervisor`.
///
/// # Errors
///
/// [`GatewayStartError`] if an address is in use, or a topology source cannot be read.
pub async fn start(
    options: &EppOptions,
    traces: Tracer,
    supervisor: &Supervisor,
) -> Result<RunningGateway, GatewayStartError> {
    let fallbacks = usize::from(options.fallback_endpoints);
    let service = |picker| service::PickerServices::new(picker, fallbacks);
    moongate_gateway::start_picker(&options.gateway, traces, supervisor, service).await
}
