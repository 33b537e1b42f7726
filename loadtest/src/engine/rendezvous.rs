//! Rendezvous of prefill and decode engines.
//!
//! The prefill engine has an entry per bootstrap room, transfer id or remote request id. The decode engine requests it
//! over HTTP from the prefill's bootstrap server (`POST /_sim/kv`), which responds when the KV cache – here its
//! fingerprint – is ready. Real engines do this over ZeroMQ and RDMA, with the same waits.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use super::cache::CachedTokens;

/// Maximum number of concurrent entries.
const MAX_ENTRIES: usize = 65_536;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct KvOffer {
    pub(crate) fingerprint: u64,
    /// Number of tokens that it covers.
    pub(crate) prompt_tokens: usize,
    /// Where the prefill engine's tokens came from.
    pub(crate) cached: CachedTokens,
}

/// A decode engine's pull request.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct KvPullRequest {
    /// Key of the rendezvous entry.
    pub(crate) key: String,
    /// Data-parallel rank that is expected to have it.
    pub(crate) rank: Option<u32>,
    /// Engine that is expected to respond.
    pub(crate) engine_id: Option<String>,
    /// Whether to wait for a prefill that has not registered yet.
    pub(crate) wait: bool,
}

#[derive(Debug, Default)]
struct RendezvousState {
    waiting_pulls: u32,
    rank: Option<u32>,
    offer: Option<KvOffer>,
    pulled: bool,
    conflict: bool,
}

#[derive(Debug)]
struct RendezvousEntry {
    state: Arc<watch::Sender<RendezvousState>>,
    holders: usize,
}

/// All entries of one prefill engine.
#[derive(Debug, Default)]
pub(crate) struct RendezvousTable {
    entries: Mutex<HashMap<String, RendezvousEntry>>,
}

/// Why a KV cache could not be transferred.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RendezvousError {
    /// The other leg did not arrive in time.
    TimedOut,
    /// The decode engine expects the cache at another data-parallel rank.
    Conflict,
    /// No entry with that key.
    Unknown,
    Full,
}

impl RendezvousTable {
    fn join(self: &Arc<Self>, key: &str) -> Option<RendezvousGuard> {
        let mut entries = self.entries.lock();
        if entries.len() >= MAX_ENTRIES && !entries.contains_key(key) {
            return None;
        }
        let entry = entries.entry(key.to_owned()).or_insert_with(|| RendezvousEntry {
            state: Arc::new(watch::Sender::new(RendezvousState::default())),
            holders: 0,
        });
        entry.holders += 1;
        Some(RendezvousGuard {
            entries: Arc::clone(self),
            key: key.to_owned(),
            state: Arc::clone(&entry.state),
            is_prefill: false,
        })
    }

    /// Registers the prefill leg under its key.
    pub(crate) fn register_prefill(
        self: &Arc<Self>,
        key: &str,
        rank: u32,
    ) -> Result<RendezvousGuard, RendezvousError> {
        let mut entry = self.join(key).ok_or(RendezvousError::Full)?;
        entry.is_prefill = true;
        entry.state.send_modify(|state| state.rank = Some(rank));
        Ok(entry)
    }

    /// Waits for the cache on behalf of a decode engine. `transfer` returns the duration of the transfer.
    pub(crate) async fn pull(
        self: &Arc<Self>,
        pull_request: &KvPullRequest,
        transfer: impl Fn(&KvOffer) -> Duration,
    ) -> Result<KvOffer, RendezvousError> {
        if !pull_request.wait && !self.entries.lock().contains_key(&pull_request.key) {
            return Err(RendezvousError::Unknown);
        }
        let entry = self.join(&pull_request.key).ok_or(RendezvousError::Full)?;
        let _waiting = PullWaiterGuard::new(&entry.state);
        loop {
            let offer = entry.wait_for(|state| state.offer).await;
            // Read first: the borrow must end before the state is changed.
            let actual = entry.state.borrow().rank;
            if let (Some(expected), Some(actual)) = (pull_request.rank, actual)
                && expected != actual
            {
                entry.state.send_modify(|state| state.conflict = true);
                return Err(RendezvousError::Conflict);
            }
            super::timing::sleep_if_measurable(transfer(&offer)).await;
            let mut still_offered = false;
            entry.state.send_modify(|state| {
                still_offered = state.offer == Some(offer);
                state.pulled |= still_offered;
            });
            // The prefill leg may have ended during the transfer; then the wait starts again.
            if still_offered {
                return Ok(offer);
            }
        }
    }

    /// Number of entries in use.
    #[cfg(test)]
    fn len(&self) -> usize {
        self.entries.lock().len()
    }
}

/// A registered entry; it is removed when both legs have dropped it.
#[derive(Debug)]
pub(crate) struct RendezvousGuard {
    entries: Arc<RendezvousTable>,
    key: String,
    state: Arc<watch::Sender<RendezvousState>>,
    is_prefill: bool,
}

impl RendezvousGuard {
    async fn wait_for<T>(&self, mut found: impl FnMut(&RendezvousState) -> Option<T>) -> T {
        let mut receiver = self.state.subscribe();
        loop {
            if let Some(value) = found(&receiver.borrow_and_update()) {
                return value;
            }
            if receiver.changed().await.is_err() {
                // Unreachable: the sender is owned by `self`.
                std::future::pending::<()>().await;
            }
        }
    }

    /// Waits until the decode engine has connected.
    pub(crate) async fn decode_arrived(&self, timeout: Duration) -> Result<(), RendezvousError> {
        let came = self.wait_for(|state| (state.waiting_pulls > 0).then_some(()));
        tokio::time::timeout(timeout, came).await.map_err(|_| RendezvousError::TimedOut)
    }

    /// Offers the cache to the decode engine.
    pub(crate) fn publish(&self, offer: KvOffer) {
        self.state.send_modify(|state| state.offer = Some(offer));
    }

    /// Waits until the decode engine has received it.
    pub(crate) async fn pulled(&self, timeout: Duration) -> Result<(), RendezvousError> {
        let pulled = self.wait_for(|state| {
            if state.conflict {
                return Some(Err(RendezvousError::Conflict));
            }
            state.pulled.then_some(Ok(()))
        });
        tokio::time::timeout(timeout, pulled).await.unwrap_or(Err(RendezvousError::TimedOut))
    }
}

impl Drop for RendezvousGuard {
    fn drop(&mut self) {
        if self.is_prefill {
            self.state.send_modify(|state| {
                state.offer = None;
                state.rank = None;
            });
        }
        let mut entries = self.entries.entries.lock();
        if let Some(entry) = entries.get_mut(&self.key) {
            entry.holders -= 1;
            if entry.holders == 0 {
                entries.remove(&self.key);
            }
        }
    }
}

/// Counts a waiting decode engine.
struct PullWaiterGuard<'a>(&'a watch::Sender<RendezvousState>);

impl<'a> PullWaiterGuard<'a> {
    fn new(state: &'a watch::Sender<RendezvousState>) -> Self {
        state.send_modify(|state| state.waiting_pulls += 1);
        Self(state)
    }
}

impl Drop for PullWaiterGuard<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|state| state.waiting_pulls -= 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OFFER: KvOffer =
        KvOffer { fingerprint: 7, prompt_tokens: 3, cached: CachedTokens { device: 0, host: 0, storage: 0 } };
    const LONG: Duration = Duration::from_secs(60);

    fn pull_request(key: &str, rank: Option<u32>, wait: bool) -> KvPullRequest {
        KvPullRequest { key: key.to_owned(), rank, engine_id: None, wait }
    }

    #[tokio::test]
    async fn both_arrival_orders_succeed_and_leave_no_entry() {
        let entries = Arc::new(RendezvousTable::default());
        for prefill_first in [true, false] {
            let prefill = async {
                let entry = entries.register_prefill("1", 0).expect("a place");
                entry.decode_arrived(LONG).await.expect("came");
                entry.publish(OFFER);
                entry.pulled(LONG).await.expect("taken");
            };
            let pull_request = pull_request("1", None, true);
            let decode = entries.pull(&pull_request, |_| Duration::ZERO);
            let pulled =
                if prefill_first { tokio::join!(prefill, decode).1 } else { tokio::join!(decode, prefill).0 };
            assert_eq!(pulled, Ok(OFFER));
            assert_eq!(entries.len(), 0);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn missing_leg_times_out_the_other() {
        let entries = Arc::new(RendezvousTable::default());
        let entry = entries.register_prefill("1", 0).expect("a place");
        assert_eq!(entry.decode_arrived(Duration::from_secs(300)).await, Err(RendezvousError::TimedOut));
        drop(entry);
        let pull_request = pull_request("1", None, true);
        let waited = tokio::time::timeout(LONG, entries.pull(&pull_request, |_| Duration::ZERO)).await;
        assert!(waited.is_err());
        assert_eq!(entries.len(), 0);
    }

    #[tokio::test]
    async fn unknown_key_and_wrong_rank_are_rejected() {
        let entries = Arc::new(RendezvousTable::default());
        assert_eq!(
            entries.pull(&pull_request("x", None, false), |_| Duration::ZERO).await,
            Err(RendezvousError::Unknown)
        );
        let entry = entries.register_prefill("1", 3).expect("a place");
        entry.publish(OFFER);
        assert_eq!(
            entries.pull(&pull_request("1", Some(2), true), |_| Duration::ZERO).await,
            Err(RendezvousError::Conflict)
        );
        assert_eq!(entry.pulled(LONG).await, Err(RendezvousError::Conflict));
    }
}
