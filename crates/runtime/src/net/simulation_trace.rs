//! The trace of a simulation: all events in order.

use std::cell::RefCell;
use std::fmt;
use std::hash::{DefaultHasher, Hasher as _};
use std::net::SocketAddr;
use std::time::Duration;

thread_local! {
    static TRACE: RefCell<SimulationTrace> = RefCell::new(SimulationTrace { hasher: DefaultHasher::new(), time: Duration::ZERO, line_sink: None });
}

struct SimulationTrace {
    hasher: DefaultHasher,
    /// Time of the last event; it stands still between two turns of hosts.
    time: Duration,
    /// Receiver of trace lines, if any.
    line_sink: Option<fn(&str)>,
}

/// Passes every following line of the trace to `write`.
pub fn capture_trace(write: fn(&str)) {
    TRACE.with_borrow_mut(|trace| trace.line_sink = Some(write));
}

/// Adds an event to the trace.
pub fn record(event: fmt::Arguments<'_>) {
    append_event(event, &[]);
}

/// Adds sent bytes to the trace.
pub(super) fn record_bytes(from: SocketAddr, to: SocketAddr, bytes: &[u8]) {
    append_event(format_args!("{from} -> {to} {} bytes", bytes.len()), bytes);
}

/// Hash of all events so far, including their times.
#[must_use]
pub fn trace_hash() -> u64 {
    TRACE.with_borrow(|trace| trace.hasher.finish())
}

fn append_event(event: fmt::Arguments<'_>, bytes: &[u8]) {
    // A connection may be closed while its thread exits and the trace is already destroyed.
    let _ = TRACE.try_with(|trace| {
        let mut trace = trace.borrow_mut();
        trace.time = turmoil::sim_elapsed().unwrap_or(trace.time);
        let line = format!("{:.6} {event}", trace.time.as_secs_f64());
        trace.hasher.write(line.as_bytes());
        trace.hasher.write(bytes);
        if let Some(write) = trace.line_sink {
            write(&format!("{line} #{:016x}", trace.hasher.finish()));
        }
    });
}
