//! Logs, W3C trace context, spans and their export by OTLP.
//!
//! Spans are made here and not through `tracing`: a layer there costs each span even when it is not sampled, and would export the
//! spans of our HTTP libraries too. Nor by OpenTelemetry's SDK: a trace that is not sampled is kept in memory until its end, in case it ends
//! badly, and what is not exported must cost next to nothing.

mod context;
mod export;
pub mod logs;
pub mod names;
mod notes;
mod options;
pub mod span;
mod tell;
mod trace;
mod traces;

#[doc(hidden)]
pub use context::{caller, inject};
pub use export::TlsError;
pub use logs::{LogError, LogFormat, LogOptions, init_logs};
pub use notes::Value;
pub use opentelemetry::trace::{SpanContext, SpanKind, TraceId};
pub use options::{OtlpProtocol, TelemetryError, TelemetryOptions};
pub use span::SpanHandle;
pub use tell::{Notes, Steps, Tell};
pub use traces::{FlushError, Traces};
