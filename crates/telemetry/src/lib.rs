//! Logs, W3C trace context and OTLP span export.

pub mod logs;
pub mod names;
pub mod otlp;
pub mod span;

pub use logs::{LogError, LogFormat, LogOptions, init_logs};
pub use opentelemetry::Value;
pub use opentelemetry::trace::SpanKind;
pub use otlp::{FlushError, TelemetryError, TelemetryOptions, Traces};
pub use span::SpanHandle;
