//! Logs, W3C trace context and OTLP span export.
