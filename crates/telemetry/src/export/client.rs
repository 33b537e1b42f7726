//! How exports get to the collector: OpenTelemetry's exporter, over connections of ours.

use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use http::{HeaderMap, Request, Response, Uri};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use opentelemetry_http::{HttpClient, HttpError};
use opentelemetry_otlp::{
    Protocol, SpanExporter, WithExportConfig as _, WithHttpConfig as _, WithTonicConfig as _,
};
use tonic::metadata::MetadataMap;
use tonic::transport::Endpoint;

use super::tls::connector;
use crate::options::{OtlpProtocol, Target, TelemetryError};

/// A collector answers with a few bytes.
const MAX_RESPONSE_BYTES: usize = 64 * 1024;
/// Time for one export with its retries.
pub(super) const EXPORT_TIMEOUT: Duration = Duration::from_secs(5);

/// The exporter for a collector.
pub(super) fn exporter(target: Target) -> Result<SpanExporter, TelemetryError> {
    let Target { protocol, uri, headers, ca } = target;
    let connector = connector(protocol, uri.scheme_str() == Some("https"), ca.as_deref())?;
    let exporter = match protocol {
        OtlpProtocol::Http => SpanExporter::builder()
            .with_http()
            .with_protocol(Protocol::HttpBinary)
            .with_endpoint(uri.to_string())
            .with_timeout(EXPORT_TIMEOUT)
            .with_http_client(Http::new(connector, headers))
            .build(),
        OtlpProtocol::Grpc => SpanExporter::builder()
            .with_tonic()
            .with_channel(channel(uri, connector))
            .with_metadata(MetadataMap::from_headers(headers))
            .with_timeout(EXPORT_TIMEOUT)
            .build(),
    };
    Ok(exporter?)
}

fn channel(uri: Uri, connector: HttpsConnector<HttpConnector>) -> tonic::transport::Channel {
    Endpoint::from(uri).timeout(EXPORT_TIMEOUT).connect_with_connector_lazy(connector)
}

/// HTTP with headers of ours.
#[derive(Debug)]
struct Http {
    client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    headers: HeaderMap,
}

impl Http {
    fn new(connector: HttpsConnector<HttpConnector>, headers: HeaderMap) -> Self {
        Self { client: Client::builder(TokioExecutor::new()).build(connector), headers }
    }
}

#[async_trait]
impl HttpClient for Http {
    async fn send_bytes(&self, mut request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        request.headers_mut().extend(self.headers.clone());
        let answer = self.client.request(request.map(Full::new)).await.inspect_err(|error| {
            tracing::debug!(cause = ?error, "the trace collector cannot be reached");
        })?;
        let (head, body) = answer.into_parts();
        let body = Limited::new(body, MAX_RESPONSE_BYTES).collect().await?;
        Ok(Response::from_parts(head, body.to_bytes()))
    }
}
