//! Small GET requests that the gateway itself sends to an engine: its load, its health.

use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method, StatusCode, Uri};
use tokio::time::timeout;

use super::leg::LegError;
use super::pool::{ConnectionPool, PreparedRequest};
use crate::request_body::SplicedBody;

/// A GET request to an engine.
#[derive(Debug, Clone)]
pub(crate) struct EngineQuery {
    /// Path and query.
    pub(crate) uri: Uri,
    pub(crate) headers: Arc<HeaderMap>,
    /// Time limit, connecting and the body included.
    pub(crate) limit: Duration,
    /// Longest accepted body.
    pub(crate) max_bytes: usize,
}

/// Why a query got no complete response.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EngineQueryError {
    #[error("GET {uri}: no response in {limit:?}")]
    TimedOut { uri: Uri, limit: Duration },
    #[error("GET {uri}: {error}")]
    Exchange { uri: Uri, error: Box<LegError> },
    #[error("GET {uri}: the response is larger than {max_bytes} bytes")]
    TooLarge { uri: Uri, max_bytes: usize },
}

impl ConnectionPool {
    /// Sends a query on a connection of the pool, which requests of clients use, too. Any status is a success.
    pub(crate) async fn query(&self, query: &EngineQuery) -> Result<(StatusCode, Vec<u8>), EngineQueryError> {
        match timeout(query.limit, self.query_unlimited(query)).await {
            Ok(result) => result,
            Err(_) => Err(EngineQueryError::TimedOut { uri: query.uri.clone(), limit: query.limit }),
        }
    }

    async fn query_unlimited(&self, query: &EngineQuery) -> Result<(StatusCode, Vec<u8>), EngineQueryError> {
        let failed = |error| EngineQueryError::Exchange { uri: query.uri.clone(), error: Box::new(error) };
        let request = PreparedRequest {
            method: Method::GET,
            uri: query.uri.clone(),
            headers: query.headers.clone(),
            extra_headers: Vec::new(),
            body: SplicedBody::verbatim(Bytes::new()),
        };
        let (head, mut response) = self.exchange(request).await.map_err(failed)?;
        let mut body = Vec::new();
        while let Some(data) = poll_fn(|cx| response.poll_data(cx)).await {
            let data = data.map_err(|error| failed(error.into()))?;
            if body.len() + data.len() > query.max_bytes {
                return Err(EngineQueryError::TooLarge {
                    uri: query.uri.clone(),
                    max_bytes: query.max_bytes,
                });
            }
            body.extend_from_slice(&data);
        }
        if let Some(connection) = response.into_connection() {
            self.checkin(connection);
        }
        Ok((head.status(), body))
    }
}

#[cfg(test)]
mod tests {
    use moongate_runtime::{ClientTls, ClientTlsFiles};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;
    use tokio::sync::Semaphore;

    use super::*;
    use crate::upstream::ConnectionPoolLimits;

    fn pool(address: &str, connections: usize) -> ConnectionPool {
        let files = ClientTlsFiles::from_options(None, [None, None], None, ["", ""]).unwrap();
        let limits = ConnectionPoolLimits {
            connect_timeout: Duration::from_millis(if connections == 0 { 1 } else { 5_000 }),
            max_idle: 4,
            idle_timeout: Duration::from_secs(60),
            connections: Arc::new(Semaphore::new(connections)),
            trust: ClientTls::load(files).unwrap(),
        };
        ConnectionPool::new(&format!("http://{address}"), limits)
    }

    fn query() -> EngineQuery {
        let limit = Duration::from_secs(5);
        EngineQuery { uri: Uri::from_static("/load?all"), headers: Arc::default(), limit, max_bytes: 100 }
    }

    /// A server that closes each connection after these responses to it. Returns its address.
    async fn engine(responses: &'static [&'static str]) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        #[expect(clippy::disallowed_methods, reason = "the test's runtime ends the server")]
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                for response in responses {
                    let mut request = [0; 1024];
                    let read = stream.read(&mut request).await.unwrap();
                    assert!(request[..read].starts_with(b"GET /load?all HTTP/1.1\r\n"));
                    stream.write_all(response.as_bytes()).await.unwrap();
                }
            }
        });
        address
    }

    #[tokio::test]
    async fn queries_reuse_a_connection_and_replace_a_closed_one() {
        let address = engine(&[
            "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok",
            "HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n",
        ]);
        let pool = pool(&address.await, 2);
        for _ in 0..3 {
            let (status, body) = pool.query(&query()).await.unwrap();
            assert_eq!((status, &*body), (StatusCode::OK, &b"ok"[..]));
            assert_eq!((pool.open(), pool.idle()), (1, 1));
            let (status, body) = pool.query(&query()).await.unwrap();
            assert_eq!((status.as_u16(), &*body), (503, &b""[..]));
        }
    }

    #[tokio::test]
    async fn failed_queries_return_the_reason() {
        let address = engine(&["HTTP/1.1 200 OK\r\ncontent-length: 101\r\n\r\n", ""]).await;
        let error =
            pool(&address, 1).query(&EngineQuery { limit: Duration::from_millis(50), ..query() }).await;
        assert_eq!(error.unwrap_err().to_string(), "GET /load?all: no response in 50ms");

        let body: &str =
            Box::leak(format!("HTTP/1.1 200 OK\r\ncontent-length: 101\r\n\r\n{:101}", "").into());
        let address = engine(Box::leak(Box::new([body]))).await;
        let error = pool(&address, 1).query(&query()).await.unwrap_err();
        assert_eq!(error.to_string(), "GET /load?all: the response is larger than 100 bytes");

        let error = pool(&address, 0).query(&EngineQuery { limit: Duration::from_secs(9), ..query() }).await;
        let Err(EngineQueryError::Exchange { error, .. }) = error else { panic!("{error:?}") };
        assert!(matches!(*error, LegError::NoConnectionLeft), "{error}");
    }
}
