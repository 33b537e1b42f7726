//! Starts the sidecar's tasks.

use std::net::SocketAddr;
use std::sync::Arc;

use moongate_runtime::{BindError, Supervisor, TlsConfigError, bind};
use tokio::sync::{Notify, watch};

use crate::context::SidecarContext;
use crate::options::SidecarOptions;
use crate::registrations::GatewayRegistrations;
use crate::removal_cost::{self, RecentCacheHits};
use crate::state::SidecarState;
use crate::{adapters, engine, gateways, http, http_client};

/// Why the sidecar did not start.
#[derive(Debug, thiserror::Error)]
pub enum SidecarStartError {
    /// The listener's address cannot be bound.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// The HTTP client cannot be created.
    #[error("HTTP client: {0}")]
    Client(#[from] reqwest::Error),
    /// TLS settings or files are invalid.
    #[error(transparent)]
    Tls(#[from] TlsConfigError),
    /// The bound address cannot be determined.
    #[error("listener: {0}")]
    Listener(#[from] std::io::Error),
}

/// Starts a sidecar with tasks under `supervisor`, and returns its address. When the supervisor shuts down, the sidecar deregisters the
/// engine.
///
/// # Errors
/// [`SidecarStartError`]. An unreachable engine or gateway is not an error: the sidecar waits for it.
pub fn start(options: SidecarOptions, supervisor: &Supervisor) -> Result<SocketAddr, SidecarStartError> {
    let listener = bind(options.listen)?;
    let address = listener.local_addr()?;
    let (engine_trust, gateway_trust) = (options.engine_tls.trust()?, options.gateway_trust()?);
    let client = http_client::new(&engine_trust)?;
    for trust in [&engine_trust, &gateway_trust] {
        let (trust, stop) = (trust.clone(), supervisor.token());
        supervisor
            .spawn_restarted("sidecar-certificates", move || trust.clone().reload_on_change(stop.clone()));
    }
    let state = SidecarState { location: options.location(), ..SidecarState::default() };
    let has_gateways = options.has_gateways();
    let sidecar = Arc::new(SidecarContext {
        options,
        client,
        engine_trust,
        gateway_trust,
        state: watch::Sender::new(state),
        drain_requested: Notify::new(),
        registrations: GatewayRegistrations::default(),
        recent_cache_hits: RecentCacheHits::default(),
        supervisor: supervisor.clone(),
    });
    http::serve(listener, Arc::clone(&sidecar));
    let (context, stop) = (Arc::clone(&sidecar), supervisor.token());
    supervisor.spawn_restarted("sidecar-adapters", move || adapters::run(Arc::clone(&context), stop.clone()));
    let (context, stop) = (Arc::clone(&sidecar), supervisor.token());
    supervisor.spawn_restarted("sidecar-engine", move || engine::watch(Arc::clone(&context), stop.clone()));
    let (context, stop) = (Arc::clone(&sidecar), supervisor.token());
    supervisor.spawn_restarted("sidecar-removal-cost", move || {
        removal_cost::run(Arc::clone(&context), stop.clone())
    });
    let (context, stop) = (sidecar, supervisor.token());
    supervisor.spawn_restarted("sidecar-gateways", move || gateways::run(Arc::clone(&context), stop.clone()));
    tracing::info!(%address, "sidecar listening");
    if !has_gateways {
        tracing::warn!(
            "no gateway is configured, so the sidecar does not register the engine; set --gateway HOST:PORT, the admin listener of a \
             gateway with --registration, or --gateway-role ROLE"
        );
    }
    Ok(address)
}
