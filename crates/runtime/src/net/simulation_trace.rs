//! The trace of a simulation: what happens, in its order.

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
    /// Of the last event. Between two turns of hosts no time passes.
    time: Duration,
    /// Where lines go, if they are kept.
    line_sink: Option<fn(&str)>,
}

/// Gives every line of the trace to `write` from now on.
pub fn capture_trace(write: fn(&str)) {
    TRACE.with_borrow_mut(|trace| trace.line_sink = Some(write));
}

/// Adds an event to the trace.
pub fn record(event: fmt::Arguments<'_>) {
    append_event(event, &[]);
}

/// Adds bytes that are sent.
pub(super) fn record_bytes(from: SocketAddr, to: SocketAddr, bytes: &[u8]) {
    append_event(format_args!("{from} -> {to} {} bytes", bytes.len()), bytes);
}

/// The hash of all events so far, with the times at which they happened.
#[must_use]
pub fn trace_hash() -> u64 {
    TRACE.with_borrow(|trace| trace.hasher.finish())
}

fn append_event(event: fmt::Arguments<'_>, bytes: &[u8]) {
    // A connection may be closed while its thread ends.
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
