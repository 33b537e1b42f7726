//! The engine's registrations with gateways: what each gateway last replied, and how many it accepted. No I/O.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard};
use reqwest::StatusCode;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::http_client::HttpExchangeError;

/// A gateway's response to a registration: the engine's status there.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, Serialize)]
pub(crate) struct RegistrationResponse {
    pub(crate) id: String,
    /// Whether the gateway routes to the engine.
    pub(crate) usable: bool,
    /// Why it does not.
    #[serde(default)]
    pub(crate) reason: Option<String>,
    /// The gateway's requests in flight on the engine.
    pub(crate) load: u32,
}

/// Why a registration failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RegistrationError {
    #[error(transparent)]
    Exchange(#[from] HttpExchangeError),
    #[error("POST /workers: HTTP {status}: {body}")]
    Rejected { status: StatusCode, body: String },
    #[error("POST /workers: not a gateway's response: {0}")]
    Format(#[from] serde_json::Error),
}

/// The state of the link to one gateway.
#[derive(Debug, Default)]
pub(crate) struct GatewayLink {
    /// Time and response of the latest accepted registration.
    pub(crate) last_registration: Option<(Instant, RegistrationResponse)>,
    /// Why the latest registration failed; `None` if it was accepted.
    pub(crate) error: Option<Arc<RegistrationError>>,
    /// Time since which every response reports no routing to the engine and no requests in flight.
    pub(crate) quiet_since: Option<Instant>,
    pub(crate) cancel: CancellationToken,
}

/// The outcome of a registration, with the engine's id in the gateway.
pub(crate) enum RegistrationOutcome {
    /// The gateway's status of the engine matches the registration.
    InSync(String),
    /// The gateway's status does not match yet: it still has to probe the engine, or has requests on a draining engine.
    Pending(String),
    Rejected,
}

/// The state of all links, and counts of their registrations.
#[derive(Debug, Default)]
pub(crate) struct GatewayRegistrations {
    links: Mutex<BTreeMap<SocketAddr, GatewayLink>>,
    /// Number of registrations that gateways accepted.
    accepted: AtomicU64,
    /// Number of registrations that gateways rejected, or that failed.
    rejected: AtomicU64,
}

impl GatewayRegistrations {
    pub(crate) fn links(&self) -> MutexGuard<'_, BTreeMap<SocketAddr, GatewayLink>> {
        self.links.lock()
    }

    /// The numbers of accepted and of rejected registrations.
    pub(crate) fn counts(&self) -> [u64; 2] {
        [&self.accepted, &self.rejected].map(|count| count.load(Ordering::Relaxed))
    }

    /// Records the result of a registration that was sent at `sent_at`. `unavailable`: it asked the gateway not to route to the engine.
    pub(crate) fn record(
        &self,
        gateway: SocketAddr,
        sent_at: Instant,
        unavailable: bool,
        result: Result<RegistrationResponse, RegistrationError>,
    ) -> RegistrationOutcome {
        let mut links = self.links.lock();
        // The link was closed during the exchange.
        let Some(link) = links.get_mut(&gateway) else { return RegistrationOutcome::Rejected };
        match result {
            Ok(response) => {
                let is_quiet = !response.usable && response.load == 0;
                link.quiet_since = is_quiet.then(|| link.quiet_since.unwrap_or(sent_at));
                if link.last_registration.is_none() || link.error.is_some() {
                    tracing::info!(%gateway, id = response.id, "registered");
                }
                let is_in_sync = if unavailable { is_quiet } else { response.usable };
                let id = response.id.clone();
                link.error = None;
                link.last_registration = Some((sent_at, response));
                self.accepted.fetch_add(1, Ordering::Relaxed);
                if is_in_sync { RegistrationOutcome::InSync(id) } else { RegistrationOutcome::Pending(id) }
            }
            Err(error) => {
                let is_logged =
                    link.error.as_ref().is_some_and(|logged| logged.to_string() == error.to_string());
                if !is_logged {
                    tracing::warn!(%gateway, %error, "registration failed");
                }
                link.error = Some(Arc::new(error));
                self.rejected.fetch_add(1, Ordering::Relaxed);
                RegistrationOutcome::Rejected
            }
        }
    }
}
