//! The node's HTTP servers, and the rules for who may connect.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use axum::middleware::from_fn;
use moongate_runtime::{ListenerLimits, ListenerSocket, PeerTls, Supervisor};
use moongate_transfer::AllowedPeers;

use crate::args::NodeArgs;
use crate::config::NodeConfig;
use crate::error::NodeStartError;
use crate::node::NodeContext;
use crate::rest::ApiAccess;
use crate::{drain_hooks, health, rdma, rest};

/// Address and access of the HTTP ports.
#[derive(Clone, Copy)]
pub(crate) struct HttpAccess<'a> {
    pub(crate) address: IpAddr,
    pub(crate) peers: &'a AllowedPeers,
    pub(crate) tls: Option<&'a PeerTls>,
}

impl NodeContext {
    /// Serves the REST API, hooks, health and metrics.
    pub(crate) fn serve_http(
        &self,
        flags: &NodeArgs,
        config: &NodeConfig,
        HttpAccess { address, peers, tls }: HttpAccess<'_>,
        supervisor: &Supervisor,
    ) -> Result<SocketAddr, NodeStartError> {
        let serve = |port, router: axum::Router| -> Result<_, NodeStartError> {
            let listener = moongate_runtime::bind((address, port).into())?;
            let local = listener.local_addr()?;
            let limits = ListenerLimits::default();
            let router = match tls {
                Some(_) => router.layer(from_fn(rest::require_certificate)),
                None => router,
            };
            let socket = ListenerSocket { listener, tls: tls.map(PeerTls::http_listener) };
            moongate_runtime::serve(socket, router, limits, supervisor.token(), supervisor);
            Ok(local)
        };
        if let Some(port) = config.client_http_port {
            serve(port, health::router().with_state(self.clone()))?;
        }
        let rest = rest::router(ApiAccess::new(
            peers.clone(),
            flags.api_token.as_ref(),
            Arc::clone(&self.refused_calls),
        ));
        let hooks = drain_hooks::router(peers.clone());
        serve(flags.port, rest.merge(hooks).merge(health::router()).with_state(self.clone()))
    }
}

/// Loads TLS for connections to the store's other programs. `None` if it is not configured.
pub(crate) fn open_tls(
    flags: &NodeArgs,
    config: &NodeConfig,
    supervisor: &Supervisor,
) -> Result<Option<PeerTls>, NodeStartError> {
    let tls = flags.tls.load()?;
    if let Some(tls) = &tls {
        if config.protocol == rdma::PROTOCOL {
            return Err(NodeStartError::AuthenticatedRdma);
        }
        tls.reload_on_change(supervisor);
    }
    Ok(tls)
}

/// Networks that may connect. `--allow-peers` is required beyond loopback, because the protocol has no authentication.
pub(crate) fn allowed_peers(flags: &NodeArgs, address: IpAddr) -> Result<AllowedPeers, NodeStartError> {
    match &flags.allow_peers {
        Some(peers) => Ok(peers.clone()),
        None if address.is_loopback() => Ok(AllowedPeers::loopback()),
        None => Err(NodeStartError::NoPeers { address }),
    }
}
