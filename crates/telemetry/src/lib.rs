//! Logs, W3C trace context, spans and their export by OTLP.
//!
//! Spans do not use `tracing`: a layer there has a cost per span even without sampling, and would export the spans of HTTP libraries too.
//! They do not use OpenTelemetry's SDK either: an unsampled trace is buffered until its end, in case of an error, and must cost next to
//! nothing if it is not exported.

mod annotations;
pub mod attribute_names;
mod buffered_trace;
mod context;
mod export;
pub mod logs;
mod options;
mod otlp;
pub mod span;
mod span_attributes;
mod span_record;
mod tracer;

pub use annotations::AttributeValue;
#[doc(hidden)]
pub use context::{caller, inject};
pub use export::{CollectorTlsError, ExportError, OtlpProtocol};
pub use logs::{LogFormat, LoggingArgs, LoggingError, init_logs};
pub use opentelemetry::trace::{SpanContext, SpanKind, TraceId};
pub use options::{TelemetryArgs, TelemetryError};
pub use span::SpanHandle;
pub use span_attributes::{AttributeWriter, ChildSpans, SpanAttributes};
pub use tracer::{ExportTaskError, SpanFlushError, Tracer};
