//! Puts the sidecar together.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use moongate_runtime::{BindError, ClientTls, Supervisor, TlsConfigError, bind};
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};

use crate::gateway_link::GatewayLink;
use crate::options::SidecarOptions;
use crate::state::SidecarState;
use crate::{adapters, engine, gateways, http};

/// Why the sidecar did not start.
#[derive(Debug, thiserror::Error)]
pub enum SidecarStartError {
    /// An address cannot be listened on.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// The client for engine and gateways cannot be made.
    #[error("HTTP client: {0}")]
    Client(#[from] reqwest::Error),
    /// Settings or files for TLS that cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsConfigError),
    /// An address is unknown after binding.
    #[error("listener: {0}")]
    Listener(#[from] std::io::Error),
}

/// What all tasks share.
pub(crate) struct SidecarContext {
    pub(crate) options: SidecarOptions,
    /// Asks the engine.
    pub(crate) client: reqwest::Client,
    pub(crate) engine_trust: ClientTls,
    pub(crate) gateway_trust: ClientTls,
    pub(crate) state: watch::Sender<SidecarState>,
    /// Told when the engine is to be looked at now.
    pub(crate) drain_requested: Notify,
    pub(crate) links: Mutex<BTreeMap<SocketAddr, GatewayLink>>,
    /// Registrations that gateways took.
    pub(crate) registrations_accepted: AtomicU64,
    /// Those that they did not take, or did not answer.
    pub(crate) registrations_rejected: AtomicU64,
    pub(crate) supervisor: Supervisor,
}

/// Starts a sidecar with tasks under `supervisor`, and answers where it listens. When the supervisor shuts down, it deregisters the
/// engine.
///
/// # Errors
/// [`SidecarStartError`]. That no engine or no gateway answers is none: they are awaited.
pub fn start(options: SidecarOptions, supervisor: &Supervisor) -> Result<SocketAddr, SidecarStartError> {
    let listener = bind(options.listen)?;
    let address = listener.local_addr()?;
    let (engine_trust, gateway_trust) = (options.engine_tls.trust()?, options.gateway_trust()?);
    let client = client(&engine_trust)?;
    for trust in [&engine_trust, &gateway_trust] {
        let (trust, stop) = (trust.clone(), supervisor.token());
        supervisor
            .spawn_restarted("renew certificates", move || trust.clone().reload_on_change(stop.clone()));
    }
    let state = SidecarState { location: options.location(), ..SidecarState::default() };
    let names_none = !options.has_gateways();
    let sidecar = Arc::new(SidecarContext {
        options,
        client,
        engine_trust,
        gateway_trust,
        state: watch::Sender::new(state),
        drain_requested: Notify::new(),
        links: Mutex::default(),
        registrations_accepted: AtomicU64::new(0),
        registrations_rejected: AtomicU64::new(0),
        supervisor: supervisor.clone(),
    });
    http::serve(listener, Arc::clone(&sidecar));
    let (of, stop) = (Arc::clone(&sidecar), supervisor.token());
    supervisor
        .spawn_restarted("follow the pod's files", move || adapters::run(Arc::clone(&of), stop.clone()));
    let (of, stop) = (Arc::clone(&sidecar), supervisor.token());
    supervisor.spawn_restarted("watch the engine", move || engine::watch(Arc::clone(&of), stop.clone()));
    let (of, stop) = (sidecar, supervisor.token());
    supervisor.spawn_restarted("find gateways", move || gateways::run(Arc::clone(&of), stop.clone()));
    tracing::info!(%address, "sidecar listens");
    if names_none {
        tracing::warn!(
            "no gateway is named, so the engine is registered nowhere and gets no requests because of this sidecar; give --gateway \
             HOST:PORT, the admin listener of a gateway with --registration, or --gateway-role ROLE"
        );
    }
    Ok(address)
}

/// Engines close idle connections after seconds, and a question that meets the closing would look like a dead engine.
pub(crate) fn client(trust: &ClientTls) -> reqwest::Result<reqwest::Client> {
    trust.http_client().redirect(reqwest::redirect::Policy::none()).pool_max_idle_per_host(0).build()
}
