//! HTTP requests of `reqwest` over the simulated network.

use std::time::Duration;

use ::http::header::HOST;
use ::http::{Request, StatusCode};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use reqwest::{Body, Response, Result};

use super::TcpStream;

/// Timeout of a request without its own.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// Sends a request on a new connection. A failure is reported as the error of status 502, because reqwest does not let users construct
/// other errors.
///
/// # Errors
/// When there is no response within the request's timeout.
pub async fn send_request(request: reqwest::RequestBuilder) -> Result<Response> {
    let request = request.build()?;
    let limit = request.timeout().copied().unwrap_or(REQUEST_TIMEOUT);
    match tokio::time::timeout(limit, exchange(request)).await {
        Ok(Some(response)) => Ok(response),
        Ok(None) | Err(_) => Err(failure()),
    }
}

async fn exchange(request: reqwest::Request) -> Option<Response> {
    let authority = format!("{}:{}", request.url().host_str()?, request.url().port_or_known_default()?);
    let target = match request.url().query() {
        Some(query) => format!("{}?{query}", request.url().path()),
        None => request.url().path().to_owned(),
    };
    let body = request.body().and_then(Body::as_bytes).map(bytes::Bytes::copy_from_slice).unwrap_or_default();
    let mut outgoing = Request::new(http_body_util::Full::new(body));
    *outgoing.method_mut() = request.method().clone();
    *outgoing.uri_mut() = target.parse().ok()?;
    *outgoing.headers_mut() = request.headers().clone();
    outgoing.headers_mut().insert(HOST, authority.parse().ok()?);
    let stream = TcpStream::connect(authority.as_str()).await.ok()?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.ok()?;
    let received = async {
        let (parts, body) = sender.send_request(outgoing).await.ok()?.into_parts();
        let body = http_body_util::BodyExt::collect(body).await.ok()?.to_bytes();
        Some(Response::from(::http::Response::from_parts(parts, body)))
    };
    tokio::select! {
        biased;
        response = received => response,
        _ = connection => None,
    }
}

/// Creates an error of reqwest's type.
fn failure() -> reqwest::Error {
    let mut response = ::http::Response::new(Body::default());
    *response.status_mut() = StatusCode::BAD_GATEWAY;
    match Response::from(response).error_for_status() {
        Err(error) => error,
        Ok(_) => unreachable!("status 502 is an error"),
    }
}
