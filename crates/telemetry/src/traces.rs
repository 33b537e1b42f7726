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

use crate::context;
use crate::export::{Exporter, Queue};
use crate::options::{Target, TelemetryError, TelemetryOptions};
use crate::span::SpanHandle;
use crate::tell::Tell;
use crate::trace::Trace;

/// Time for which spans are gathered for one export.
const EXPORT_DELAY: Duration = Duration::from_secs(5);

/// Spans were lost at the end.
#[derive(Debug, thiserror::Error)]
#[error("not all spans were exported within {deadline:?}: {problem}; is the collector reachable?")]
pub struct FlushError {
    /// Time there was.
    pub deadline: Duration,
    /// What the collector said.
    pub problem: String,
}

/// Starts spans. Cloning is cheap; where traces are off, everything is a comparison and a return.
#[derive(Clone, Default)]
pub struct Traces {
    running: Option<Arc<Running>>,
}

struct Running {
    queue: Arc<Queue>,
    sample_ratio: f64,
    slow: Duration,
    ended: AtomicBool,
    exporting: Mutex<Option<JoinHandle<Result<(), String>>>>,
}

impl Traces {
    /// Traces that are off.
    #[must_use]
    pub const fn off() -> Self {
        Self { running: None }
    }

    /// Starts exporting, if the options or the standard variables name a collector. The collector need not be
    /// there yet: failed exports are logged once and cost requests nothing. `service` is the process's name in traces, unless it is given
    /// another.
    ///
    /// Must be called inside a tokio runtime, which sends the exports. [`Traces::shutdown`] is to be awaited
    /// before it ends.
    ///
    /// # Errors
    /// [`TelemetryError`].
    pub fn start(options: &TelemetryOptions, service: &str) -> Result<Self, TelemetryError> {
        let variable = |name: &str| std::env::var(name).ok();
        match options.target(variable)? {
            Some(target) => {
                let named = options.service(variable);
                Self::exporting(options, target, named.as_deref().unwrap_or(service), EXPORT_DELAY)
            }
            None => Ok(Self::off()),
        }
    }

    fn exporting(
        options: &TelemetryOptions,
        target: Target,
        service: &str,
        delay: Duration,
    ) -> Result<Self, TelemetryError> {
        let runtime = Handle::try_current()?;
        let sample_ratio = options.trace_sample_ratio;
        tracing::info!(endpoint = %target.uri, protocol = ?target.protocol, sample_ratio, "exporting traces");
        let (queue, exporter) = Exporter::new(target, service, delay)?;
        // It outlives the tasks whose spans it exports; `shutdown` waits for it.
        let exporting = runtime.spawn(exporter.run());
        let running = Running {
            queue,
            sample_ratio,
            slow: if options.trace_slow.is_zero() { Duration::MAX } else { options.trace_slow },
            ended: AtomicBool::new(false),
            exporting: Mutex::new(Some(exporting)),
        };
        Ok(Self { running: Some(Arc::new(running)) })
    }

    /// Traces of what takes longer are worth keeping in any case.
    #[must_use]
    pub fn slow(&self) -> Duration {
        self.running.as_ref().map_or(Duration::MAX, |running| running.slow)
    }

    /// Starts the span of a request that came at `start`, as a child of the caller's span if `headers` name one
    /// (W3C `traceparent` and `tracestate`; a malformed one is ignored).
    pub fn server_span<T: Tell>(
        &self,
        name: impl Into<Cow<'static, str>>,
        headers: &HeaderMap,
        start: Instant,
        facts: impl FnOnce() -> T,
    ) -> SpanHandle<T> {
        self.root((name.into(), SpanKind::Server, start), || context::caller(headers), facts)
    }

    /// Starts a trace of something that this process does by itself since `start`.
    pub fn work_span(&self, name: impl Into<Cow<'static, str>>, start: Instant) -> SpanHandle {
        self.root((name.into(), SpanKind::Internal, start), || None, || ())
    }

    fn root<T: Tell>(
        &self,
        what: (Cow<'static, str>, SpanKind, Instant),
        caller: impl FnOnce() -> Option<SpanContext>,
        facts: impl FnOnce() -> T,
    ) -> SpanHandle<T> {
        let running = match &self.running {
            Some(running) if !running.ended.load(Ordering::Relaxed) => running,
            _ => return SpanHandle::off(),
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
        let trace = Trace::new(id, state, sampled, running.queue.clone());
        SpanHandle::open(trace, (parent, true), what, facts())
    }

    /// Exports what is left and stops. Spans that have not ended are lost, and later ones are empty.
    ///
    /// # Errors
    /// When not everything was exported within `deadline`.
    pub async fn shutdown(&self, deadline: Duration) -> Result<(), FlushError> {
        let Some(running) = &self.running else { return Ok(()) };
        running.ended.store(true, Ordering::Relaxed);
        running.queue.stop();
        let Some(exporting) = running.exporting.lock().take() else { return Ok(()) };
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
        Err(FlushError { deadline, problem })
    }
}

/// Whether a trace is among the sampled: all processes with the same ratio choose the same (OpenTelemetry's `TraceIdRatioBased`).
fn is_sampled(id: TraceId, ratio: f64) -> bool {
    let [.., a, b, c, d, e, f, g, h] = id.to_bytes();
    let low = u64::from_be_bytes([a, b, c, d, e, f, g, h]) >> 1;
    (low as f64) < ratio * (1_u64 << 63) as f64
}

impl fmt::Debug for Traces {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Traces").field("on", &self.running.is_some()).finish()
    }
}

#[cfg(test)]
mod tests;
