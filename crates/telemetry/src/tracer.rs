//! Starts spans, and says which are exported.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http::HeaderMap;
use opentelemetry::trace::{SpanContext, SpanId, SpanKind, TraceId, TraceState};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::buffered_trace::BufferedTrace;
use crate::context;
use crate::export::{OtlpExporter, SpanQueue};
use crate::options::{OtlpTarget, TelemetryArgs, TelemetryError};
use crate::span::SpanHandle;
use crate::span_attributes::SpanAttributes;

/// Time for which spans are gathered for one export.
const EXPORT_DELAY: Duration = Duration::from_secs(5);

/// Spans were lost at the end.
#[derive(Debug, thiserror::Error)]
#[error("not all spans were exported within {deadline:?}: {problem}; is the collector reachable?")]
pub struct SpanFlushError {
    /// Time there was.
    pub deadline: Duration,
    /// What the collector said.
    pub problem: String,
}

/// Starts spans. Cloning is cheap; where traces are off, everything is a comparison and a return.
#[derive(Clone, Default)]
pub struct Tracer {
    state: Option<Arc<TracerState>>,
}

struct TracerState {
    queue: Arc<SpanQueue>,
    sample_ratio: f64,
    slow: Duration,
    ended: AtomicBool,
    export_task: Mutex<Option<JoinHandle<Result<(), String>>>>,
}

impl Tracer {
    /// Traces that are off.
    #[must_use]
    pub const fn disabled() -> Self {
        Self { state: None }
    }

    /// Starts exporting, if the options or the standard variables name a collector. The collector need not be
    /// there yet: failed exports are logged once and cost requests nothing. `service` is the process's name in traces, unless it is given
    /// another.
    ///
    /// Must be called inside a tokio runtime, which sends the exports. [`Tracer::shutdown`] is to be awaited
    /// before it ends.
    ///
    /// # Errors
    /// [`TelemetryError`].
    pub fn start(options: &TelemetryArgs, service: &str) -> Result<Self, TelemetryError> {
        let variable = |name: &str| std::env::var(name).ok();
        match options.target(variable)? {
            Some(target) => {
                let named = options.service(variable);
                Self::start_export(options, target, named.as_deref().unwrap_or(service), EXPORT_DELAY)
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
        // It outlives the tasks whose spans it exports; `shutdown` waits for it.
        let exporting = runtime.spawn(exporter.run());
        let running = TracerState {
            queue,
            sample_ratio,
            slow: if options.trace_slow.is_zero() { Duration::MAX } else { options.trace_slow },
            ended: AtomicBool::new(false),
            export_task: Mutex::new(Some(exporting)),
        };
        Ok(Self { state: Some(Arc::new(running)) })
    }

    /// Traces of what takes longer are worth keeping in any case.
    #[must_use]
    pub fn slow_threshold(&self) -> Duration {
        self.state.as_ref().map_or(Duration::MAX, |running| running.slow)
    }

    /// Starts the span of a request that came at `start`, as a child of the caller's span if `headers` name one
    /// (W3C `traceparent` and `tracestate`; a malformed one is ignored).
    pub fn server_span<T: SpanAttributes>(
        &self,
        name: impl Into<Cow<'static, str>>,
        headers: &HeaderMap,
        start: Instant,
        facts: impl FnOnce() -> T,
    ) -> SpanHandle<T> {
        self.root_span((name.into(), SpanKind::Server, start), || context::caller(headers), facts)
    }

    /// Starts a trace of something that this process does by itself since `start`.
    pub fn internal_span(&self, name: impl Into<Cow<'static, str>>, start: Instant) -> SpanHandle {
        self.root_span((name.into(), SpanKind::Internal, start), || None, || ())
    }

    fn root_span<T: SpanAttributes>(
        &self,
        what: (Cow<'static, str>, SpanKind, Instant),
        caller: impl FnOnce() -> Option<SpanContext>,
        facts: impl FnOnce() -> T,
    ) -> SpanHandle<T> {
        let running = match &self.state {
            Some(running) if !running.ended.load(Ordering::Relaxed) => running,
            _ => return SpanHandle::disabled(),
        };
        let (id, parent, state, sampled) = match caller() {
            Some(caller) => {
                let state = caller.trace_state().clone();
                (caller.trace_id(), caller.span_id(), state, caller.is_sampled())
            }
            None => {
                let id = TraceId::from(fastrand::u128(1..));
                (id, SpanId::INVALID, TraceState::NONE, is_sampled(id, running.sample_ratio))
            }
        };
        let trace = BufferedTrace::new(id, state, sampled, running.queue.clone());
        SpanHandle::open(trace, (parent, true), what, facts())
    }

    /// Exports what is left and stops. Spans that have not ended are lost, and later ones are empty.
    ///
    /// # Errors
    /// When not everything was exported within `deadline`.
    pub async fn shutdown(&self, deadline: Duration) -> Result<(), SpanFlushError> {
        let Some(running) = &self.state else { return Ok(()) };
        running.ended.store(true, Ordering::Relaxed);
        running.queue.stop();
        let Some(exporting) = running.export_task.lock().take() else { return Ok(()) };
        let abort = exporting.abort_handle();
        let problem = match tokio::time::timeout(deadline, exporting).await {
            Ok(Ok(Ok(()))) => return Ok(()),
            Ok(Ok(Err(problem))) => problem,
            Ok(Err(error)) => error.to_string(),
            Err(_) => {
                abort.abort();
                "it takes too long".to_owned()
            }
        };
        Err(SpanFlushError { deadline, problem })
    }
}

/// Whether a trace is among the sampled: all processes with the same ratio choose the same (OpenTelemetry's `TraceIdRatioBased`).
fn is_sampled(id: TraceId, ratio: f64) -> bool {
    let [.., a, b, c, d, e, f, g, h] = id.to_bytes();
    let low = u64::from_be_bytes([a, b, c, d, e, f, g, h]) >> 1;
    (low as f64) < ratio * (1_u64 << 63) as f64
}

impl fmt::Debug for Tracer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Traces").field("on", &self.state.is_some()).finish()
    }
}

#[cfg(test)]
mod tests;
