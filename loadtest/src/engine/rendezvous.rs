//! Where prefill and decode meet.
//!
//! The prefill engine keeps a place per bootstrap room, transfer id or remote request id. The decode engine asks
//! for it over HTTP at the prefill's bootstrap server (`POST /_sim/kv`) and waits there until the key-value cache
//! – here its fingerprint – is ready. Real engines do this over ZeroMQ and RDMA; the waiting is the same.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use super::cache::CachedTokens;

/// Most places that are kept at once.
const MAX_ENTRIES: usize = 65_536;

/// A prompt's key-value cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct KvOffer {
    /// Stands for its content.
    pub(crate) fingerprint: u64,
    /// Tokens it covers.
    pub(crate) prompt_tokens: usize,
    /// How the prefill engine came by them.
    pub(crate) cached: CachedTokens,
}

/// What a decode engine asks for.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct KvPullRequest {
    /// The place.
    pub(crate) key: String,
    /// Data-parallel rank that is expected to hold it.
    pub(crate) rank: Option<u32>,
    /// Engine that is expected to answer.
    pub(crate) engine_id: Option<String>,
    /// Whether to wait for a request that has not come yet.
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

/// The places of one prefill engine.
#[derive(Debug, Default)]
pub(crate) struct RendezvousTable {
    entries: Mutex<HashMap<String, RendezvousEntry>>,
}

/// Why a key-value cache could not be handed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RendezvousError {
    /// Nobody came within the time.
    TimedOut,
    /// The decode engine expects the cache at another data-parallel rank.
    Conflict,
    /// Nothing is kept under that name.
    Unknown,
    /// Too many places.
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
            places: Arc::clone(self),
            key: key.to_owned(),
            state: Arc::clone(&entry.state),
            is_prefill: false,
        })
    }

    /// The prefill side takes its place.
    pub(crate) fn register_prefill(
        self: &Arc<Self>,
        key: &str,
        rank: u32,
    ) -> Result<RendezvousGuard, RendezvousError> {
        let mut place = self.join(key).ok_or(RendezvousError::Full)?;
        place.is_prefill = true;
        place.state.send_modify(|state| state.rank = Some(rank));
        Ok(place)
    }

    /// The decode side waits for the cache. `transfer` says how long the bytes take.
    pub(crate) async fn pull(
        self: &Arc<Self>,
        ask: &KvPullRequest,
        transfer: impl Fn(&KvOffer) -> Duration,
    ) -> Result<KvOffer, RendezvousError> {
        if !ask.wait && !self.entries.lock().contains_key(&ask.key) {
            return Err(RendezvousError::Unknown);
        }
        let place = self.join(&ask.key).ok_or(RendezvousError::Full)?;
        let _waiting = PullWaiterGuard::new(&place.state);
        loop {
            let offer = place.wait_for(|state| state.offer).await;
            // Read first: the guard of a borrow must not live while the state is changed.
            let actual = place.state.borrow().rank;
            if let (Some(expected), Some(actual)) = (ask.rank, actual)
                && expected != actual
            {
                place.state.send_modify(|state| state.conflict = true);
                return Err(RendezvousError::Conflict);
            }
            super::timing::sleep_if_measurable(transfer(&offer)).await;
            let mut still_offered = false;
            place.state.send_modify(|state| {
                still_offered = state.offer == Some(offer);
                state.pulled |= still_offered;
            });
            // The prefill side may have gone in mid-transfer; then the wait begins again.
            if still_offered {
                return Ok(offer);
            }
        }
    }

    /// Number of places in use.
    #[cfg(test)]
    fn len(&self) -> usize {
        self.entries.lock().len()
    }
}

/// A held place; it goes when both sides have left it.
#[derive(Debug)]
pub(crate) struct RendezvousGuard {
    places: Arc<RendezvousTable>,
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
                // The sender lives in `self`; this does not happen.
                std::future::pending::<()>().await;
            }
        }
    }

    /// Waits until the decode engine has come.
    pub(crate) async fn decode_arrived(&self, timeout: Duration) -> Result<(), RendezvousError> {
        let came = self.wait_for(|state| (state.waiting_pulls > 0).then_some(()));
        tokio::time::timeout(timeout, came).await.map_err(|_| RendezvousError::TimedOut)
    }

    /// Puts the cache where the decode engine can take it.
    pub(crate) fn publish(&self, offer: KvOffer) {
        self.state.send_modify(|state| state.offer = Some(offer));
    }

    /// Waits until the decode engine has it.
    pub(crate) async fn pulled(&self, timeout: Duration) -> Result<(), RendezvousError> {
        let taken = self.wait_for(|state| {
            if state.conflict {
                return Some(Err(RendezvousError::Conflict));
            }
            state.pulled.then_some(Ok(()))
        });
        tokio::time::timeout(timeout, taken).await.unwrap_or(Err(RendezvousError::TimedOut))
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
        let mut entries = self.places.entries.lock();
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

    fn ask(key: &str, rank: Option<u32>, wait: bool) -> KvPullRequest {
        KvPullRequest { key: key.to_owned(), rank, engine_id: None, wait }
    }

    #[tokio::test]
    async fn both_orders_meet_and_nothing_is_left() {
        let places = Arc::new(RendezvousTable::default());
        for prefill_first in [true, false] {
            let prefill = async {
                let place = places.register_prefill("1", 0).expect("a place");
                place.decode_arrived(LONG).await.expect("came");
                place.publish(OFFER);
                place.pulled(LONG).await.expect("taken");
            };
            let ask = ask("1", None, true);
            let decode = places.pull(&ask, |_| Duration::ZERO);
            let taken =
                if prefill_first { tokio::join!(prefill, decode).1 } else { tokio::join!(decode, prefill).0 };
            assert_eq!(taken, Ok(OFFER));
            assert_eq!(places.len(), 0);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_lost_partner_leaves_the_other_waiting_until_its_timeout() {
        let places = Arc::new(RendezvousTable::default());
        let place = places.register_prefill("1", 0).expect("a place");
        assert_eq!(place.decode_arrived(Duration::from_secs(300)).await, Err(RendezvousError::TimedOut));
        drop(place);
        let ask = ask("1", None, true);
        let waited = tokio::time::timeout(LONG, places.pull(&ask, |_| Duration::ZERO)).await;
        assert!(waited.is_err());
        assert_eq!(places.len(), 0);
    }

    #[tokio::test]
    async fn an_unknown_name_and_a_wrong_rank_are_refused() {
        let places = Arc::new(RendezvousTable::default());
        assert_eq!(
            places.pull(&ask("x", None, false), |_| Duration::ZERO).await,
            Err(RendezvousError::Unknown)
        );
        let place = places.register_prefill("1", 3).expect("a place");
        place.publish(OFFER);
        assert_eq!(
            places.pull(&ask("1", Some(2), true), |_| Duration::ZERO).await,
            Err(RendezvousError::Conflict)
        );
        assert_eq!(place.pulled(LONG).await, Err(RendezvousError::Conflict));
    }
}
