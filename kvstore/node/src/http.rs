//! The node's HTTP servers.

use std::net::{IpAddr, SocketAddr};

use axum::Router;
use axum::middleware::from_fn;
use moongate_runtime::{ListenerLimits, ListenerSocket, PeerTls, Supervisor};

use crate::access::require_certificate;
use crate::error::NodeStartError;

/// Address and TLS of the node's HTTP servers.
#[derive(Clone, Copy)]
pub(crate) struct HttpPorts<'a> {
    pub(crate) address: IpAddr,
    pub(crate) tls: Option<&'a PeerTls>,
    pub(crate) supervisor: &'a Supervisor,
}

impl HttpPorts<'_> {
    /// Serves these routes until the supervisor shuts down. Returns the bound address.
    pub(crate) fn serve(&self, port: u16, router: Router) -> Result<SocketAddr, NodeStartError> {
        let listener = moongate_runtime::bind((self.address, port).into())?;
        let local = listener.local_addr()?;
        let limits = ListenerLimits::default();
        let router = match self.tls {
            Some(_) => router.layer(from_fn(require_certificate)),
            None => router,
        };
        let socket = ListenerSocket { listener, tls: self.tls.map(PeerTls::http_listener) };
        moongate_runtime::serve(socket, router, limits, self.supervisor.token(), self.supervisor);
        Ok(local)
    }
}
