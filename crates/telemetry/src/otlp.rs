//! Spans to an OpenTelemetry collector, by OTLP over HTTP with protobuf bodies.
//!
//! Spans are made with the OpenTelemetry API itself, not through `tracing`: a layer there costs each span
//! even when it is not sampled, and would export the spans of our HTTP libraries too.

mod client;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use clap::Args;
use http::{HeaderMap, Uri};
use opentelemetry::KeyValue;
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_otlp::{
    ExporterBuildError, Protocol, SpanExporter, WithExportConfig as _, WithHttpConfig as _,
};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkError;
use opentelemetry_sdk::trace::{
    BatchConfigBuilder, BatchSpanProcessor, Sampler, SdkTracer, SdkTracerProvider,
};
use tokio::runtime::Handle;

use crate::SpanHandle;

/// Path of the traces below a collector's base address (OTLP specification, "OTLP/HTTP Request").
const TRACES_PATH: &str = "/v1/traces";
/// Standard variable with a collector's base address.
const STANDARD_ENDPOINT: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";
/// Standard variable with the whole address for traces.
const STANDARD_TRACES_ENDPOINT: &str = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT";
/// Spans that wait for export; when there are more, they are dropped and requests go on.
const MAX_WAITING_SPANS: usize = 8192;
/// Spans in one export.
const MAX_EXPORT_SPANS: usize = 1024;
/// Time between two exports.
const EXPORT_DELAY: Duration = Duration::from_secs(5);
/// Time for one export with its retries.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(5);

/// Flags of the traces.
#[derive(Debug, Clone, Args)]
pub struct TelemetryOptions {
    /// Base address of an OTLP/HTTP collector, `http://HOST:4318`; traces are off without one
    ///
    /// `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` and `OTEL_EXPORTER_OTLP_ENDPOINT` are read where this is not set,
    /// and `OTEL_EXPORTER_OTLP_HEADERS` adds headers to each export.
    #[arg(
        long,
        env = "MOONGATE_OTLP_ENDPOINT",
        value_parser = parse_endpoint,
        value_name = "URL",
        help_heading = "Traces"
    )]
    pub otlp_endpoint: Option<String>,
    /// Share of traces to record, 0 to 1; a caller that sends a traceparent decides for its own
    #[arg(
        long,
        env = "MOONGATE_TRACE_SAMPLE_RATIO",
        value_parser = parse_ratio,
        default_value = "1",
        value_name = "RATIO",
        help_heading = "Traces"
    )]
    pub trace_sample_ratio: f64,
    /// Name of this service in traces
    #[arg(
        long,
        env = "MOONGATE_SERVICE_NAME",
        default_value = "moongate",
        value_name = "NAME",
        help_heading = "Traces"
    )]
    pub service_name: String,
}

impl Default for TelemetryOptions {
    fn default() -> Self {
        Self { otlp_endpoint: None, trace_sample_ratio: 1.0, service_name: "moongate".to_owned() }
    }
}

/// Traces could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// The collector's address is wrong.
    #[error("`{endpoint}` is no address of a collector: {problem}")]
    Endpoint {
        /// As given.
        endpoint: String,
        /// What is wrong and how to mend it.
        problem: &'static str,
    },
    /// Called outside of a tokio runtime.
    #[error("traces need a running tokio runtime: {0}; start them inside of it")]
    NoRuntime(#[from] tokio::runtime::TryCurrentError),
    /// The HTTP client could not be built.
    #[error("cannot build the HTTP client for traces: {0}")]
    Client(#[from] reqwest::Error),
    /// The exporter refused its settings.
    #[error("cannot export traces: {0}; check the OTEL_EXPORTER_OTLP_* variables")]
    Exporter(#[from] ExporterBuildError),
}

/// Spans were lost at the end.
#[derive(Debug, thiserror::Error)]
#[error("not all spans were exported within {deadline:?}: {problem}; is the collector reachable?")]
pub struct FlushError {
    /// Time there was.
    pub deadline: Duration,
    /// What the exporter said.
    pub problem: String,
}

/// Starts spans. Cloning is cheap; where traces are off, everything is a comparison and a return.
#[derive(Clone, Default)]
pub struct Traces {
    running: Option<Arc<Running>>,
}

struct Running {
    provider: SdkTracerProvider,
    tracer: Arc<SdkTracer>,
}

impl Traces {
    /// Traces that are off.
    #[must_use]
    pub const fn off() -> Self {
        Self { running: None }
    }

    /// Starts exporting, if the options or the standard variables name a collector. The collector need not be
    /// there yet: failed exports are logged once and cost requests nothing.
    ///
    /// Must be called inside a tokio runtime, which sends the exports. [`Traces::shutdown`] is to be awaited
    /// before it ends.
    ///
    /// # Errors
    /// [`TelemetryError`].
    pub fn start(options: &TelemetryOptions) -> Result<Self, TelemetryError> {
        let variable = |name: &str| std::env::var(name).ok();
        match traces_endpoint(options, variable)? {
            Some(endpoint) => Self::exporting(options, &endpoint, EXPORT_DELAY),
            None => Ok(Self::off()),
        }
    }

    fn exporting(
        options: &TelemetryOptions,
        endpoint: &str,
        delay: Duration,
    ) -> Result<Self, TelemetryError> {
        let client = client::CollectorClient::new(Handle::try_current()?, EXPORT_TIMEOUT)?;
        let exporter = SpanExporter::builder()
            .with_http()
            .with_protocol(Protocol::HttpBinary)
            .with_endpoint(endpoint)
            .with_timeout(EXPORT_TIMEOUT)
            .with_http_client(client)
            .build()?;
        let batches = BatchSpanProcessor::builder(exporter)
            .with_batch_config(
                BatchConfigBuilder::default()
                    .with_max_queue_size(MAX_WAITING_SPANS)
                    .with_max_export_batch_size(MAX_EXPORT_SPANS)
                    .with_scheduled_delay(delay)
                    .build(),
            )
            .build();
        let resource = Resource::builder()
            .with_service_name(options.service_name.clone())
            .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
            .build();
        let provider = SdkTracerProvider::builder()
            .with_span_processor(batches)
            .with_sampler(Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(
                options.trace_sample_ratio,
            ))))
            .with_resource(resource)
            .build();
        let tracer = Arc::new(provider.tracer("moongate"));
        tracing::info!(endpoint, sample_ratio = options.trace_sample_ratio, "exporting traces");
        Ok(Self { running: Some(Arc::new(Running { provider, tracer })) })
    }

    /// Whether spans are made at all.
    #[must_use]
    pub const fn is_on(&self) -> bool {
        self.running.is_some()
    }

    /// Starts the span of an incoming request, as a child of the caller's span if `headers` name one
    /// (W3C `traceparent` and `tracestate`; a malformed one is ignored).
    pub fn server_span(&self, name: impl Into<Cow<'static, str>>, headers: &HeaderMap) -> SpanHandle {
        match &self.running {
            None => SpanHandle::off(),
            Some(running) => SpanHandle::server(&running.tracer, name.into(), headers, None),
        }
    }

    /// [`Traces::server_span`] for a request that came at `start`.
    pub fn server_span_at(
        &self,
        name: impl Into<Cow<'static, str>>,
        headers: &HeaderMap,
        start: SystemTime,
    ) -> SpanHandle {
        match &self.running {
            None => SpanHandle::off(),
            Some(running) => SpanHandle::server(&running.tracer, name.into(), headers, Some(start)),
        }
    }

    /// Exports what is left and stops. Spans that have not ended are lost, and later ones are empty.
    ///
    /// # Errors
    /// When exporting has not come to its end within `deadline`. Exports that the collector refused are in the
    /// logs.
    pub async fn shutdown(&self, deadline: Duration) -> Result<(), FlushError> {
        let Some(running) = self.running.clone() else { return Ok(()) };
        // It blocks its thread for up to the deadline, and needs this runtime to send meanwhile.
        let stopped = tokio::task::spawn_blocking(move || running.provider.shutdown_with_timeout(deadline));
        let problem = match stopped.await {
            Ok(Ok(()) | Err(OTelSdkError::AlreadyShutdown)) => return Ok(()),
            Ok(Err(error)) => error.to_string(),
            Err(error) => error.to_string(),
        };
        Err(FlushError { deadline, problem })
    }
}

impl fmt::Debug for Traces {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Traces").field("on", &self.is_on()).finish()
    }
}

/// The whole address for traces: our flag, else the standard variables.
fn traces_endpoint(
    options: &TelemetryOptions,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<Option<String>, TelemetryError> {
    let standard = |name| variable(name).filter(|value| !value.is_empty());
    let below = |base: String| format!("{}{TRACES_PATH}", base.trim_end_matches('/'));
    let endpoint = match options.otlp_endpoint.clone().filter(|endpoint| !endpoint.is_empty()) {
        Some(base) => Some(below(base)),
        None => standard(STANDARD_TRACES_ENDPOINT).or_else(|| standard(STANDARD_ENDPOINT).map(below)),
    };
    endpoint.map(|endpoint| parse_endpoint(&endpoint)).transpose()
}

fn parse_endpoint(endpoint: &str) -> Result<String, TelemetryError> {
    let wrong = |problem| TelemetryError::Endpoint { endpoint: endpoint.to_owned(), problem };
    let uri: Uri = endpoint.parse().map_err(|_| wrong("it is not a URL; write http://HOST:4318"))?;
    match (uri.scheme_str(), uri.host()) {
        (Some("http"), Some(_)) => Ok(endpoint.to_owned()),
        (Some("https"), _) => Err(wrong(
            "TLS is not built in; run a collector nearby, send to it by http, and let it speak TLS",
        )),
        _ => Err(wrong("it needs a scheme and a host; write http://HOST:4318")),
    }
}

fn parse_ratio(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(ratio) if (0.0..=1.0).contains(&ratio) => Ok(ratio),
        _ => Err("write a number from 0 (nothing) to 1 (everything)".to_owned()),
    }
}
