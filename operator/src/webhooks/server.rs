//! HTTPS server for requests of the API server.

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

/// Maximum number of connections. API servers keep a few and multiplex requests over them.
const MAX_CONNECTIONS: usize = 64;
/// Timeout for the TLS handshake and for request headers. Longer than the idle timeout of API servers.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(120);
/// Delay after a failed accept, for example when file descriptors are exhausted.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_secs(1);

/// The served certificate. TLS handshakes fail until it is set.
#[derive(Debug, Default)]
pub(super) struct ServingCertificate(ArcSwapOption<CertifiedKey>);

impl ServingCertificate {
    pub(super) fn replace(&self, certificate: CertifiedKey) {
        self.0.store(Some(Arc::new(certificate)));
    }
}

impl ResolvesServerCert for ServingCertificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.0.load_full()
    }
}

/// Accepts connections until the supervisor stops; requests in progress are finished.
pub(super) fn serve(
    listener: TcpListener,
    certificate: Arc<ServingCertificate>,
    routes: Router,
    supervisor: &Supervisor,
) -> Result<(), rustls::Error> {
    let tls = ServerConfig::builder_with_provider(Arc::new(default_provider()));
    let tls =
        tls.with_safe_default_protocol_versions()?.with_no_client_auth().with_cert_resolver(certificate);
    let acceptor = TlsAcceptor::from(Arc::new(tls));
    let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let (stop, connections) = (supervisor.token(), supervisor.clone());
    let accept = async move {
        while let Ok(permit) = Arc::clone(&permits).acquire_owned().await {
            match listener.accept().await {
                Ok((stream, _)) => {
                    let (acceptor, routes, stop) = (acceptor.clone(), routes.clone(), stop.clone());
                    connections.spawn("webhook connection", async move {
                        serve_connection(acceptor, stream, routes, stop).await;
                        drop(permit);
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a webhook connection; retrying");
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

async fn serve_connection(acceptor: TlsAcceptor, stream: TcpStream, routes: Router, stop: CancellationToken) {
    let handshake = tokio::time::timeout(CONNECTION_TIMEOUT, acceptor.accept(stream));
    let stream = match stop.run_until_cancelled(handshake).await {
        Some(Ok(Ok(stream))) => stream,
        Some(Ok(Err(error))) => {
            return tracing::debug!(%error, "TLS handshake with a webhook client failed");
        }
        Some(Err(_)) | None => return,
    };
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(CONNECTION_TIMEOUT);
    let connection = http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(routes));
    let mut connection = std::pin::pin!(connection);
    let result = tokio::select! {
        result = connection.as_mut() => result,
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = result {
        tracing::debug!(%error, "webhook connection failed");
    }
}
