//! Access to a node's ports, and its HTTP ports.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use axum::middleware::from_fn;
use moongate_runtime::{ListenerLimits, PeerTls, Socket, Supervisor};
use moongate_transfer::Peers;

use crate::config::Config;
use crate::error::StartError;
use crate::flags::Flags;
use crate::node::Shared;
use crate::rest::ApiAccess;
use crate::{health, hooks, rdma, rest};

/// Address and access of the HTTP ports.
#[derive(Clone, Copy)]
pub(crate) struct HttpFace<'a> {
    pub(crate) address: IpAddr,
    pub(crate) peers: &'a Peers,
    pub(crate) tls: Option<&'a PeerTls>,
}

impl Shared {
    /// Serves the REST API, hooks, health and metrics.
    pub(crate) fn serve_http(
        &self,
        flags: &Flags,
        config: &Config,
        HttpFace { address, peers, tls }: HttpFace<'_>,
        supervisor: &Supervisor,
    ) -> Result<SocketAddr, StartError> {
        let serve = |port, router: axum::Router| -> Result<_, StartError> {
            let listener = moongate_runtime::bind((address, port).into())?;
            let local = listener.local_addr()?;
            let limits = ListenerLimits::default();
            let router = match tls {
                Some(_) => router.layer(from_fn(rest::require_certificate)),
                None => router,
            };
            let socket = Socket { listener, tls: tls.map(PeerTls::http_listener) };
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
        let hooks = hooks::router(peers.clone());
        serve(flags.port, rest.merge(hooks).merge(health::router()).with_state(self.clone()))
    }
}

/// TLS with the store's other programs, if it is configured.
pub(crate) fn open_tls(
    flags: &Flags,
    config: &Config,
    supervisor: &Supervisor,
) -> Result<Option<PeerTls>, StartError> {
    let tls = flags.tls.load()?;
    if let Some(tls) = &tls {
        if config.protocol == rdma::PROTOCOL {
            return Err(StartError::AuthenticatedRdma);
        }
        tls.keep_current(supervisor);
    }
    Ok(tls)
}

/// Networks of clients. Required beyond loopback: the protocol has no authentication.
pub(crate) fn allowed_peers(flags: &Flags, address: IpAddr) -> Result<Peers, StartError> {
    match &flags.allow_peers {
        Some(peers) => Ok(peers.clone()),
        None if address.is_loopback() => Ok(Peers::loopback()),
        None => Err(StartError::NoPeers { address }),
    }
}
