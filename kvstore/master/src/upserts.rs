//! Which upserts are in progress, so that a late call about an earlier write of a key does not end a later write.
//!
//! The end of a write names its client and its key, nothing else. A client whose call was not answered in time writes the key again on
//! another connection, and what it had sent before may still arrive after that. Two things distinguish such calls: puts are ended by
//! other calls than upserts; and when a client begins an upsert although its last one of the key has not been ended, the end must come
//! on the connection on which the new one was begun, for as long as a late call may be under way.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

use mooncake_wire::ErrorCode;
use mooncake_wire::types::Uuid;
use parking_lot::Mutex;

/// For how long a late call is expected: the longest that clients of Mooncake wait for an answer.
const LATE_CALL_WINDOW_MS: u64 = 30_000;
/// Upserts in progress that are remembered. Late calls about others are not recognised.
const MAX_UPSERTS: usize = 65_536;

/// A key that a client writes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WrittenKey<'a> {
    pub(crate) client: Uuid,
    pub(crate) tenant: &'a str,
    pub(crate) key: &'a str,
}

impl WrittenKey<'_> {
    fn name(&self) -> (Uuid, Box<str>) {
        // No tenant's name has a zero byte.
        (self.client, format!("{}\0{}", self.tenant, self.key).into())
    }
}

#[derive(Clone, Copy, Debug)]
struct UpsertAttempt {
    connection: u64,
    began_ms: u64,
    /// Until when calls about an earlier attempt may arrive.
    late_until_ms: u64,
}

/// Upserts in progress.
#[derive(Debug, Default)]
pub(crate) struct InFlightUpserts {
    attempts: Mutex<HashMap<(Uuid, Box<str>), UpsertAttempt>>,
    /// How many there are: nearly always none, and then no put needs the lock.
    count: AtomicUsize,
    connections: AtomicU64,
}

impl InFlightUpserts {
    /// A number for one more connection.
    pub(crate) fn new_connection(&self) -> u64 {
        self.connections.fetch_add(1, Relaxed)
    }

    /// An upsert has begun. After `release_ms` it is over, ended or not.
    pub(crate) fn begin(&self, now_ms: u64, connection: u64, write: WrittenKey<'_>, release_ms: u64) {
        let mut attempts = self.attempts.lock();
        let is_old = |it: &UpsertAttempt| it.began_ms.saturating_add(release_ms) <= now_ms;
        if attempts.len() >= MAX_UPSERTS {
            attempts.retain(|_, it| !is_old(it));
        }
        let name = write.name();
        let late_until_ms = match attempts.get(&name) {
            // Repeating it does not make it last longer.
            Some(before) if before.late_until_ms > now_ms => before.late_until_ms,
            Some(before) if !is_old(before) => now_ms.saturating_add(LATE_CALL_WINDOW_MS),
            _ => 0,
        };
        if attempts.len() < MAX_UPSERTS || attempts.contains_key(&name) {
            attempts.insert(name, UpsertAttempt { connection, began_ms: now_ms, late_until_ms });
        }
        self.count.store(attempts.len(), Relaxed);
    }

    /// A put has begun, so there is no upsert any more.
    pub(crate) fn put_begun(&self, write: WrittenKey<'_>) {
        if self.count.load(Relaxed) > 0 {
            self.finish(write);
        }
    }

    /// An upsert has been ended or revoked.
    pub(crate) fn finish(&self, write: WrittenKey<'_>) {
        let mut attempts = self.attempts.lock();
        attempts.remove(&write.name());
        self.count.store(attempts.len(), Relaxed);
    }

    /// Whether the end or the revocation of an upsert may be one of the upsert in progress.
    ///
    /// # Errors
    /// `INVALID_WRITE` if it may be a late one of an earlier upsert.
    pub(crate) fn check(&self, now_ms: u64, connection: u64, write: WrittenKey<'_>) -> Result<(), ErrorCode> {
        if self.count.load(Relaxed) == 0 {
            return Ok(());
        }
        match self.attempts.lock().get(&write.name()) {
            Some(it) if it.late_until_ms > now_ms && it.connection != connection => {
                Err(ErrorCode::INVALID_WRITE)
            }
            _ => Ok(()),
        }
    }

    /// Whether the end or the revocation of a put may be one of a put.
    ///
    /// # Errors
    /// `INVALID_WRITE` if what is in progress is an upsert, so that it is a late one.
    pub(crate) fn check_put(&self, write: WrittenKey<'_>) -> Result<(), ErrorCode> {
        let is_upsert = self.count.load(Relaxed) > 0 && self.attempts.lock().contains_key(&write.name());
        if is_upsert { Err(ErrorCode::INVALID_WRITE) } else { Ok(()) }
    }
}
