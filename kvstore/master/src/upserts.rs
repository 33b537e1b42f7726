//! Tracks upserts in progress, so that a delayed call for an earlier write of a key does not end a later write.
//!
//! The end of a write names its client and its key only. A client whose call timed out writes the key again on another connection, and
//! its earlier calls may arrive after that. Two rules detect such delayed calls: puts and upserts are ended by different RPCs; and when a
//! client starts an upsert while its last one of the key is unfinished, the end must come on the connection that started the new one, for
//! as long as a delayed call can arrive.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

use mooncake_wire::ErrorCode;
use mooncake_wire::types::Uuid;
use parking_lot::Mutex;

/// How long a delayed call can arrive: the longest timeout of Mooncake's clients.
const LATE_CALL_WINDOW_MS: u64 = 30_000;
/// Maximum number of tracked upserts. Delayed calls for others are not detected.
const MAX_UPSERTS: usize = 65_536;

/// Client, tenant and key of a write.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WrittenKey<'a> {
    pub(crate) client: Uuid,
    pub(crate) tenant: &'a str,
    pub(crate) key: &'a str,
}

impl WrittenKey<'_> {
    fn name(&self) -> (Uuid, Box<str>) {
        // Tenant names contain no zero byte.
        (self.client, format!("{}\0{}", self.tenant, self.key).into())
    }
}

#[derive(Clone, Copy, Debug)]
struct UpsertAttempt {
    connection: u64,
    started_ms: u64,
    /// Delayed calls for an earlier attempt can arrive until this time.
    late_until_ms: u64,
}

#[derive(Debug, Default)]
pub(crate) struct InFlightUpserts {
    attempts: Mutex<HashMap<(Uuid, Box<str>), UpsertAttempt>>,
    /// Their number: nearly always 0, which saves puts the lock.
    count: AtomicUsize,
    connections: AtomicU64,
}

impl InFlightUpserts {
    /// A unique number for a connection.
    pub(crate) fn new_connection(&self) -> u64 {
        self.connections.fetch_add(1, Relaxed)
    }

    /// Records the start of an upsert. It is dropped after `release_ms`, finished or not.
    pub(crate) fn begin(&self, now_ms: u64, connection: u64, write: WrittenKey<'_>, release_ms: u64) {
        let mut attempts = self.attempts.lock();
        let is_expired = |attempt: &UpsertAttempt| attempt.started_ms.saturating_add(release_ms) <= now_ms;
        if attempts.len() >= MAX_UPSERTS {
            attempts.retain(|_, attempt| !is_expired(attempt));
        }
        let name = write.name();
        let late_until_ms = match attempts.get(&name) {
            // A repeated start does not extend the window.
            Some(previous) if previous.late_until_ms > now_ms => previous.late_until_ms,
            Some(previous) if !is_expired(previous) => now_ms.saturating_add(LATE_CALL_WINDOW_MS),
            _ => 0,
        };
        if attempts.len() < MAX_UPSERTS || attempts.contains_key(&name) {
            attempts.insert(name, UpsertAttempt { connection, started_ms: now_ms, late_until_ms });
        }
        self.count.store(attempts.len(), Relaxed);
    }

    /// A put has started, which replaces an upsert of the same key.
    pub(crate) fn put_started(&self, write: WrittenKey<'_>) {
        if self.count.load(Relaxed) > 0 {
            self.finish(write);
        }
    }

    /// An upsert was finished or revoked.
    pub(crate) fn finish(&self, write: WrittenKey<'_>) {
        let mut attempts = self.attempts.lock();
        attempts.remove(&write.name());
        self.count.store(attempts.len(), Relaxed);
    }

    /// Checks that the end or revocation of an upsert belongs to the one in progress.
    ///
    /// # Errors
    /// `INVALID_WRITE` if it may be a delayed call for an earlier upsert.
    pub(crate) fn check(&self, now_ms: u64, connection: u64, write: WrittenKey<'_>) -> Result<(), ErrorCode> {
        if self.count.load(Relaxed) == 0 {
            return Ok(());
        }
        match self.attempts.lock().get(&write.name()) {
            Some(attempt) if attempt.late_until_ms > now_ms && attempt.connection != connection => {
                Err(ErrorCode::INVALID_WRITE)
            }
            _ => Ok(()),
        }
    }

    /// Checks that the end or revocation of a put belongs to a put.
    ///
    /// # Errors
    /// `INVALID_WRITE` if an upsert is in progress, so that the call is a delayed one.
    pub(crate) fn check_put(&self, write: WrittenKey<'_>) -> Result<(), ErrorCode> {
        let is_upsert = self.count.load(Relaxed) > 0 && self.attempts.lock().contains_key(&write.name());
        if is_upsert { Err(ErrorCode::INVALID_WRITE) } else { Ok(()) }
    }
}
