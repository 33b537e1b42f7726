//! HTTPS for the API server.

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwapOption;
use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use moongate_runtime::Supervisor;
use moongate_runtime::net::{TcpListener, TcpStream};
use rustls::ServerConfig;
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

/// Connections at a time. API servers keep a few and share them among requests.
const MAX_CONNECTIONS: usize = 64;
/// For a handshake, and for the head of a request. Longer than API servers let a connection idle.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(120);
/// After a failed accept, for instance for want of file descriptors.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_secs(1);

/// The certificate that is shown; nobody can connect before there is one.
#[derive(Debug, Default)]
pub(super) struct ServingCertificate(ArcSwapOption<CertifiedKey>);

impl ServingCertificate {
    /// From now on this one.
    pub(super) fn replace(&self, certificate: CertifiedKey) {
        self.0.store(Some(Arc::new(certificate)));
    }
}

impl ResolvesServerCert for ServingCertificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.0.load_full()
    }
}

/// Accepts until the supervisor stops; requests in progress are answered.
pub(super) fn serve(
    listener: TcpListener,
    shown: Arc<ServingCertificate>,
    answers: Router,
    supervisor: &Supervisor,
) -> Result<(), rustls::Error> {
    let tls = ServerConfig::builder_with_provider(Arc::new(default_provider()));
    let tls = tls.with_safe_default_protocol_versions()?.with_no_client_auth().with_cert_resolver(shown);
    let acceptor = TlsAcceptor::from(Arc::new(tls));
    let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let (stop, connections) = (supervisor.token(), supervisor.clone());
    let accept = async move {
        while let Ok(slot) = Arc::clone(&slots).acquire_owned().await {
            match listener.accept().await {
                Ok((stream, _)) => {
                    let (acceptor, answers, stop) = (acceptor.clone(), answers.clone(), stop.clone());
                    connections.spawn("webhook connection", async move {
                        serve_connection(acceptor, stream, answers, stop).await;
                        drop(slot);
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "the webhooks cannot accept a connection; trying again");
                    tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
                }
            }
        }
    };
    let stop = supervisor.token();
    supervisor.spawn_essential("webhook listener", async move {
        stop.run_until_cancelled(accept).await;
    });
    Ok(())
}

async fn serve_connection(
    acceptor: TlsAcceptor,
    stream: TcpStream,
    answers: Router,
    stop: CancellationToken,
) {
    let handshake = tokio::time::timeout(CONNECTION_TIMEOUT, acceptor.accept(stream));
    let stream = match stop.run_until_cancelled(handshake).await {
        Some(Ok(Ok(stream))) => stream,
        Some(Ok(Err(error))) => {
            return tracing::debug!(%error, "no handshake with a caller of the webhooks");
        }
        Some(Err(_)) | None => return,
    };
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(CONNECTION_TIMEOUT);
    let connection = http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(answers));
    let mut connection = std::pin::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection to the webhooks ended");
    }
}
