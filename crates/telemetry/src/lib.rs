//! Logs, W3C trace context, spans and their export by OTLP.
//!
//! Spans are made here and not through `tracing`: a layer there costs each span even when it is not sampled, and would export the
//! spans of our HTTP libraries too. Nor by OpenTelemetry's SDK: a trace that is not sampled is kept in memory until its end, in case it ends
//! badly, and what is not exported must cost next to nothing.

mod annotations;
pub mod attribute_names;
mod buffered_trace;
mod context;
mod export;
pub mod logs;
mod options;
pub mod span;
mod span_attributes;
mod tracer;

pub use annotations::AttributeValue;
#[doc(hidden)]
pub use context::{caller, inject};
pub use export::CollectorTlsError;
pub use logs::{LogFormat, LoggingArgs, LoggingError, init_logs};
pub use opentelemetry::trace::{SpanContext, SpanKind, TraceId};
pub use options::{OtlpProtocol, TelemetryArgs, TelemetryError};
pub use span::SpanHandle;
pub use span_attributes::{AttributeWriter, ChildSpans, SpanAttributes};
pub use tracer::{SpanFlushError, Tracer};
