//! The rules for who may connect to the node's ports.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;
use moongate_runtime::{ClientCertificate, PeerAddr, PeerTls, SecretString, Supervisor};
use moongate_transfer::AllowedPeers;
use subtle::ConstantTimeEq as _;

use crate::args::NodeArgs;
use crate::config::NodeConfig;
use crate::error::NodeStartError;
use crate::rest_response::error;

const NO_CERTIFICATE: &str = "a client certificate of the store's CA (--store-tls-ca) is required";
const NOT_A_PEER: &str = "your address is not in --allow-peers";

/// Loads TLS for connections to the store's other programs. `None` if it is not configured.
pub(crate) fn open_tls(
    flags: &NodeArgs,
    config: &NodeConfig,
    supervisor: &Supervisor,
) -> Result<Option<PeerTls>, NodeStartError> {
    let tls = flags.tls.load()?;
    if let Some(tls) = &tls {
        if config.protocol == moongate_rdma::PROTOCOL {
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

/// Access control of the API, which can remove all objects and mount memory. Without a token, only programs on this machine may use
/// it; with one, callers from allowed networks that send it.
#[derive(Debug)]
pub(crate) struct ApiAccess {
    peers: AllowedPeers,
    /// The expected `Authorization` header; `None` without `--api-token`.
    authorization: Option<SecretString>,
    refused: Arc<AtomicU64>,
}

impl ApiAccess {
    /// Counts rejected requests in `refused`.
    pub(crate) fn new(peers: AllowedPeers, token: Option<&SecretString>, refused: Arc<AtomicU64>) -> Self {
        let authorization = token.and_then(|token| format!("Bearer {}", token.expose()).parse().ok());
        Self { peers, authorization, refused }
    }

    /// Returns status and message of a rejection.
    fn check(&self, from: Option<IpAddr>, headers: &HeaderMap) -> Result<(), (StatusCode, &'static str)> {
        let Some(from) = from.map(|from| from.to_canonical()) else {
            return Err((StatusCode::FORBIDDEN, "the address of the caller cannot be determined"));
        };
        let Some(expected) = &self.authorization else {
            // An Origin header means a browser page, which must not use the API although it runs on this machine.
            return if from.is_loopback() && !headers.contains_key(header::ORIGIN) {
                Ok(())
            } else {
                Err((
                    StatusCode::FORBIDDEN,
                    "this API accepts only programs on the node's own machine; start the node with --api-token to use it from elsewhere",
                ))
            };
        };
        if !from.is_loopback() && !self.peers.allow(from) {
            return Err((StatusCode::FORBIDDEN, NOT_A_PEER));
        }
        let sent = headers.get(header::AUTHORIZATION).map_or(&[][..], |sent| sent.as_bytes());
        if sent.ct_eq(expected.expose().as_bytes()).into() {
            Ok(())
        } else {
            Err((StatusCode::UNAUTHORIZED, "send the token of --api-token as Authorization: Bearer TOKEN"))
        }
    }
}

pub(crate) async fn only_with_access(
    State(access): State<Arc<ApiAccess>>,
    request: Request,
    next: Next,
) -> Response {
    let from = request.extensions().get::<PeerAddr>().map(|from| from.0.ip());
    match access.check(from, request.headers()) {
        Ok(()) => next.run(request).await,
        Err((status, problem)) => {
            access.refused.fetch_add(1, Ordering::Relaxed);
            tracing::debug!(?from, %status, "rejected a REST API request");
            error(status, problem)
        }
    }
}

pub(crate) async fn only_peers(
    State(peers): State<Arc<AllowedPeers>>,
    request: Request,
    next: Next,
) -> Response {
    let from = request.extensions().get::<PeerAddr>();
    if from.is_some_and(|from| peers.allow(from.0.ip())) {
        return next.run(request).await;
    }
    error(StatusCode::FORBIDDEN, NOT_A_PEER)
}

/// With TLS, clients without a certificate may call only `/health`, which probes use.
pub(crate) async fn require_certificate(request: Request, next: Next) -> Response {
    let is_open = request.uri().path() == "/health";
    if is_open || request.extensions().get::<ClientCertificate>().is_some() {
        return next.run(request).await;
    }
    error(StatusCode::FORBIDDEN, NO_CERTIFICATE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn api_requires_loopback_or_the_token() {
        let headers = |pairs: &[(header::HeaderName, &'static str)]| -> HeaderMap {
            pairs.iter().map(|(name, value)| (name.clone(), value.parse().unwrap())).collect()
        };
        let (none, token) = (headers(&[]), headers(&[(header::AUTHORIZATION, "Bearer moon")]));
        let other = headers(&[(header::AUTHORIZATION, "Bearer sun!")]);
        let page = headers(&[(header::ORIGIN, "http://evil.example")]);
        let open = ApiAccess::new(AllowedPeers::all(), None, Arc::default());
        let secret = "moon".parse().unwrap();
        let guarded = ApiAccess::new("10.0.0.0/8".parse().unwrap(), Some(&secret), Arc::default());
        for (access, from, headers, refused) in [
            (&open, "127.0.0.1", &none, None),
            (&open, "::ffff:127.0.0.1", &none, None),
            (&open, "127.0.0.1", &page, Some(403)),
            (&open, "10.0.0.1", &none, Some(403)),
            (&open, "10.0.0.1", &token, Some(403)),
            (&guarded, "10.0.0.1", &token, None),
            (&guarded, "127.0.0.1", &token, None),
            (&guarded, "127.0.0.1", &none, Some(401)),
            (&guarded, "10.0.0.1", &other, Some(401)),
            (&guarded, "11.0.0.1", &token, Some(403)),
        ] {
            let checked = access.check(Some(from.parse().unwrap()), headers);
            assert_eq!(checked.err().map(|(status, _)| status.as_u16()), refused, "{from} {headers:?}");
        }
        assert!(open.check(None, &none).is_err());
    }
}
