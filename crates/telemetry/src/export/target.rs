//! The collector that spans are exported to.

use std::path::PathBuf;

use clap::ValueEnum;
use http::{HeaderMap, Uri};

/// Path of traces below a collector's base URL (OTLP specification, "OTLP/HTTP Request").
const HTTP_PATH: &str = "/v1/traces";
/// Path of the gRPC call.
const GRPC_PATH: &str = "opentelemetry.proto.collector.trace.v1.TraceService/Export";

/// Protocol of the trace export.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OtlpProtocol {
    /// HTTP/1.1 with protobuf bodies
    Http,
    /// gRPC over HTTP/2
    Grpc,
}

impl OtlpProtocol {
    /// URL of the export of traces to the collector at `base`.
    pub(crate) fn traces_url(self, base: &str) -> String {
        let base = base.trim_end_matches('/');
        match self {
            Self::Http => format!("{base}{HTTP_PATH}"),
            Self::Grpc => format!("{base}/{GRPC_PATH}"),
        }
    }
}

/// Endpoint, protocol and headers of exports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OtlpTarget {
    pub(crate) protocol: OtlpProtocol,
    pub(crate) uri: Uri,
    pub(crate) headers: HeaderMap,
    pub(crate) ca: Option<PathBuf>,
}
