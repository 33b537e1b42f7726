//! Starts traces and makes the sampling decision.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http::HeaderMap;
use opentelemetry::trace::{SpanContext, SpanId, SpanKind, TraceId, TraceState};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::task::{JoinError, JoinHandle};
use tokio::time::Instant;

use crate::buffered_trace::BufferedTrace;
use crate::context::{self, TraceContext};
use crate::export::{ExportError, OtlpExporter, OtlpTarget, SpanQueue};
use crate::options::{TelemetryArgs, TelemetryError};
use crate::span::SpanHandle;
use crate::span_attributes::SpanAttributes;

/// How long spans are collected for one export.
const EXPORT_DELAY: Duration = Duration::from_secs(5);

/// Spans were lost during shutdown.
#[derive(Debug, thiserror::Error)]
#[error("not all spans were exported within {deadline:?}: {source}; check that the collector is reachable")]
pub struct SpanFlushError {
    /// Time limit of the shutdown.
    pub deadline: Duration,
    pub source: ExportTaskError,
}

/// Why the export of the remaining spans did not complete.
#[derive(Debug, thiserror::Error)]
pub enum ExportTaskError {
    #[error(transparent)]
    Export(#[from] ExportError),
    /// The task panicked or was cancelled.
    #[error(transparent)]
    Task(#[from] JoinError),
    /// The time limit has passed.
    #[error("the export timed out")]
    Timeout,
}

/// Starts spans. Cloning is cheap; with tracing off, each call is a comparison and a return.
#[derive(Clone, Default)]
pub struct Tracer {
    state: Option<Arc<TracerState>>,
}

struct TracerState {
    queue: Arc<SpanQueue>,
    sample_ratio: f64,
    slow: Duration,
    ended: AtomicBool,
    export_task: Mutex<Option<JoinHandle<Result<(), ExportError>>>>,
}

impl Tracer {
    /// A tracer with tracing off.
    #[must_use]
    pub const fn disabled() -> Self {
        Self { state: None }
    }

    /// Starts exporting, if the options or the standard variables set a collector. The collector may start later: failed exports are logged
    /// once and do not delay requests. `service` is the default service name in traces.
    ///
    /// Must be called inside a tokio runtime, which sends the exports. Await [`Tracer::shutdown`] before the runtime ends.
    ///
    /// # Errors
    /// [`TelemetryError`].
    pub fn start(options: &TelemetryArgs, service: &str) -> Result<Self, TelemetryError> {
        let variable = |name: &str| std::env::var(name).ok();
        match options.target(variable)? {
            Some(target) => {
                let service_name = options.service(variable);
                Self::start_export(options, target, service_name.as_deref().unwrap_or(service), EXPORT_DELAY)
            }
            None => Ok(Self::disabled()),
        }
    }

    fn start_export(
        options: &TelemetryArgs,
        target: OtlpTarget,
        service: &str,
        delay: Duration,
    ) -> Result<Self, TelemetryError> {
        let runtime = Handle::try_current()?;
        let sample_ratio = options.trace_sample_ratio;
        tracing::info!(endpoint = %target.uri, protocol = ?target.protocol, sample_ratio, "exporting traces");
        let (queue, exporter) = OtlpExporter::new(target, service, delay)?;
        // The exporter outlives the tasks whose spans it exports; `shutdown` waits for it.
        let export_task = runtime.spawn(exporter.run());
        let state = TracerState {
            queue,
            sample_ratio,
            slow: if options.trace_slow.is_zero() { Duration::MAX } else { options.trace_slow },
            ended: AtomicBool::new(false),
            export_task: Mutex::new(Some(export_task)),
        };
        Ok(Self { state: Some(Arc::new(state)) })
    }

    /// Requests that take longer are exported regardless of sampling.
    #[must_use]
    pub fn slow_threshold(&self) -> Duration {
        self.state.as_ref().map_or(Duration::MAX, |state| state.slow)
    }

    /// Starts the span of a request received at `start`, as a child of the caller's span if `headers` contain one (W3C `traceparent` and
    /// `tracestate`; a malformed one is ignored).
    pub fn server_span<T: SpanAttributes>(
        &self,
        name: impl Into<Cow<'static, str>>,
        headers: &HeaderMap,
        start: Instant,
        attributes: impl FnOnce() -> T,
    ) -> SpanHandle<T> {
        self.root_span((name.into(), SpanKind::Server, start), || context::caller(headers), attributes)
    }

    /// Starts a trace of work that this process started by itself at `start`.
    pub fn internal_span(&self, name: impl Into<Cow<'static, str>>, start: Instant) -> SpanHandle {
        self.root_span((name.into(), SpanKind::Internal, start), || None, || ())
    }

    fn root_span<T: SpanAttributes>(
        &self,
        header: (Cow<'static, str>, SpanKind, Instant),
        caller: impl FnOnce() -> Option<SpanContext>,
        attributes: impl FnOnce() -> T,
    ) -> SpanHandle<T> {
        let tracer = match &self.state {
            Some(tracer) if !tracer.ended.load(Ordering::Relaxed) => tracer,
            _ => return SpanHandle::disabled(),
        };
        let (context, parent) = match caller() {
            Some(caller) => {
                let (id, state) = (caller.trace_id(), caller.trace_state().clone());
                (TraceContext { id, state, sampled: caller.is_sampled() }, caller.span_id())
            }
            None => {
                let id = TraceId::from(fastrand::u128(1..));
                let sampled = is_sampled(id, tracer.sample_ratio);
                (TraceContext { id, state: TraceState::NONE, sampled }, SpanId::INVALID)
            }
        };
        let trace = BufferedTrace::new(context, tracer.queue.clone());
        SpanHandle::open(trace, (parent, true), header, attributes())
    }

    /// Exports the remaining spans and stops. Open spans are lost, and later spans are empty.
    ///
    /// # Errors
    /// When not everything was exported within `deadline`.
    pub async fn shutdown(&self, deadline: Duration) -> Result<(), SpanFlushError> {
        let Some(state) = &self.state else { return Ok(()) };
        state.ended.store(true, Ordering::Relaxed);
        state.queue.stop();
        let Some(export_task) = state.export_task.lock().take() else { return Ok(()) };
        let abort = export_task.abort_handle();
        let source = match tokio::time::timeout(deadline, export_task).await {
            Ok(Ok(Ok(()))) => return Ok(()),
            Ok(Ok(Err(error))) => error.into(),
            Ok(Err(error)) => error.into(),
            Err(_) => {
                abort.abort();
                ExportTaskError::Timeout
            }
        };
        Err(SpanFlushError { deadline, source })
    }
}

/// Whether a trace is sampled: all processes with the same ratio make the same decision (OpenTelemetry's `TraceIdRatioBased`).
fn is_sampled(id: TraceId, ratio: f64) -> bool {
    let [.., a, b, c, d, e, f, g, h] = id.to_bytes();
    let low = u64::from_be_bytes([a, b, c, d, e, f, g, h]) >> 1;
    (low as f64) < ratio * (1_u64 << 63) as f64
}

impl fmt::Debug for Tracer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tracer").field("enabled", &self.state.is_some()).finish()
    }
}

#[cfg(test)]
mod tests;
