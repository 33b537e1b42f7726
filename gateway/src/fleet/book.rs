//! Load that this gateway has put on an engine and that has not ended.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use moongate_scheduler::{Booking, Load};

use super::Endpoint;

/// Counters of one engine.
#[derive(Debug, Default)]
pub(crate) struct Book {
    in_flight: AtomicU32,
    pending_prefill_tokens: AtomicU64,
    active_decode_tokens: AtomicU64,
}

impl Book {
    /// The counters now, as the scheduler takes them.
    pub(crate) fn load(&self, available: bool) -> Load {
        Load {
            available,
            in_flight: self.in_flight.load(Ordering::Relaxed),
            pending_prefill_tokens: self.pending_prefill_tokens.load(Ordering::Relaxed),
            active_decode_tokens: self.active_decode_tokens.load(Ordering::Relaxed),
            ..Load::default()
        }
    }
}

/// One request's entries in the books of its engines; taken back when dropped.
#[derive(Debug)]
pub(crate) struct Booked {
    entry: Arc<Endpoint>,
    exit: Arc<Endpoint>,
    booking: Booking,
    prefill_pending: bool,
}

impl Booked {
    /// Books a request. For a plain worker, entry and exit are the same.
    pub(crate) fn new(entry: Arc<Endpoint>, exit: Arc<Endpoint>, booking: Booking) -> Self {
        entry.book.pending_prefill_tokens.fetch_add(booking.prefill_tokens, Ordering::Relaxed);
        exit.book.active_decode_tokens.fetch_add(booking.decode_tokens, Ordering::Relaxed);
        entry.book.in_flight.fetch_add(1, Ordering::Relaxed);
        if !Arc::ptr_eq(&entry, &exit) {
            exit.book.in_flight.fetch_add(1, Ordering::Relaxed);
        }
        Self { entry, exit, booking, prefill_pending: true }
    }

    /// The first token is here: the prompt is computed.
    pub(crate) fn first_token(&mut self) {
        if std::mem::take(&mut self.prefill_pending) {
            let pending = &self.entry.book.pending_prefill_tokens;
            pending.fetch_sub(self.booking.prefill_tokens, Ordering::Relaxed);
        }
    }
}

impl Drop for Booked {
    fn drop(&mut self) {
        self.first_token();
        self.exit.book.active_decode_tokens.fetch_sub(self.booking.decode_tokens, Ordering::Relaxed);
        self.entry.book.in_flight.fetch_sub(1, Ordering::Relaxed);
        if !Arc::ptr_eq(&self.entry, &self.exit) {
            self.exit.book.in_flight.fetch_sub(1, Ordering::Relaxed);
        }
    }
}
