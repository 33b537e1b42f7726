//! Settings of the queue that several gateways share.

use std::path::PathBuf;

use clap::Args;
use moongate_runtime::{ClientTls, ClientTlsFiles, SecretString, TlsConfigError};
use moongate_scheduler::PolicyName;

use crate::decide::{QueuePeerAddress, QueuePeers, QueuePeersError};

/// The gateways that share a queue.
#[derive(Debug, Clone, Args)]
pub struct SharedQueueOptions {
    /// Admin listener of the gateways in front of the same engines, as host:port, or https://host:port with TLS; all addresses of a
    /// name are used, and this gateway may be among them. Repeatable. The gateway that has run longest then decides for all. Default:
    /// each gateway decides alone.
    #[arg(long, value_name = "ADDR", env = "MOONGATE_QUEUE_PEER", value_delimiter = ' ')]
    pub queue_peer: Vec<QueuePeerAddress>,

    /// Token of the other gateways' admin listeners: their --admin-token, or a key with the scope `admin`.
    #[arg(long, value_name = "TOKEN", env = "MOONGATE_QUEUE_PEER_TOKEN", hide_env_values = true)]
    pub queue_peer_token: Option<SecretString>,

    /// CA certificates (PEM) of the other gateways' admin listeners; reloaded on change. Default: the system store.
    #[arg(long, value_name = "FILE", env = "MOONGATE_QUEUE_PEER_CA")]
    pub queue_peer_ca: Option<PathBuf>,

    /// Client certificate (PEM) for gateways that require one (--admin-tls-client-ca); reloaded on change.
    #[arg(long, value_name = "FILE", env = "MOONGATE_QUEUE_PEER_TLS_CERT")]
    pub queue_peer_tls_cert: Option<PathBuf>,

    /// Private key (PEM) for --queue-peer-tls-cert.
    #[arg(long, value_name = "FILE", env = "MOONGATE_QUEUE_PEER_TLS_KEY")]
    pub queue_peer_tls_key: Option<PathBuf>,

    /// Expected name in the other gateways' certificates. Default: the host of the first --queue-peer.
    #[arg(long, value_name = "NAME", env = "MOONGATE_QUEUE_PEER_TLS_NAME")]
    pub queue_peer_tls_name: Option<String>,
}

/// Why a queue cannot be shared with these settings.
#[derive(Debug, thiserror::Error)]
pub enum SharedQueueError {
    /// The policy keeps state about prompts, which are not sent to other gateways.
    #[error("--queue-peer: policy {0} cannot be shared between gateways; use --policy predictive")]
    Policy(PolicyName),
    /// The CA file cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsConfigError),
    /// The HTTP client cannot be built.
    #[error(transparent)]
    Client(#[from] QueuePeersError),
}

impl SharedQueueOptions {
    /// The peers and their TLS settings; `None` without peers.
    ///
    /// # Errors
    /// [`SharedQueueError`] if a setting is invalid.
    pub(crate) fn peers(
        &self,
        policy: PolicyName,
    ) -> Result<Option<(QueuePeers, ClientTls)>, SharedQueueError> {
        if self.queue_peer.is_empty() {
            return Ok(None);
        }
        if policy != PolicyName::Predictive {
            return Err(SharedQueueError::Policy(policy));
        }
        let flags = ["--queue-peer-tls-cert", "--queue-peer-tls-key"];
        let identity = [self.queue_peer_tls_cert.as_ref(), self.queue_peer_tls_key.as_ref()];
        // Peers are contacted by the addresses of their name, which certificates rarely contain.
        let host = self.queue_peer.first().and_then(QueuePeerAddress::tls_host);
        let name = self.queue_peer_tls_name.clone().or(host);
        let named = [
            ("--queue-peer-ca", self.queue_peer_ca.as_ref()),
            (flags[0], identity[0]),
            (flags[1], identity[1]),
        ];
        let tls = ClientTlsFiles::from_options(self.queue_peer_ca.as_ref(), identity, name.as_ref(), flags)
            .and_then(ClientTls::load)
            .map_err(|error| error.with_flag(&named))?;
        let peers = QueuePeers::new(self.queue_peer.clone(), &tls, self.queue_peer_token.clone())?;
        Ok(Some((peers, tls)))
    }
}
