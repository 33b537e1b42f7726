//! Events that wait to be published.

use std::collections::VecDeque;
use std::sync::Arc;

use mooncake_wire::events::StorageMedium;
use mooncake_wire::events::mooncake::{DEFAULT_TENANT, SegmentChange};
use parking_lot::Mutex;
use tokio::sync::Notify;

/// Something that has happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum QueuedKvEvent {
    /// An object can be read from a medium.
    Stored(QueuedEventObject),
    /// An object has left a medium.
    Removed(QueuedEventObject),
    /// A segment is there, or not.
    Segment(Arc<str>, SegmentChange),
}

/// A key, whose it is, its group, and on which medium.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct QueuedEventObject {
    /// None for the default tenant.
    tenant: Option<Box<str>>,
    pub(super) key: Box<str>,
    pub(super) group: Option<Box<str>>,
    pub(super) medium: StorageMedium<'static>,
}

impl QueuedEventObject {
    fn new(tenant: &str, key: &str, group: Option<&str>, medium: StorageMedium<'static>) -> Self {
        let tenant = (tenant != DEFAULT_TENANT).then(|| tenant.into());
        Self { tenant, key: key.into(), group: group.map(Into::into), medium }
    }

    pub(super) fn tenant(&self) -> &str {
        self.tenant.as_deref().unwrap_or(DEFAULT_TENANT)
    }
}

/// Events in the order in which they came, with their numbers.
#[derive(Debug)]
pub struct KvEventQueue {
    state: Mutex<KvEventQueueState>,
    available: Notify,
    capacity: usize,
}

#[derive(Debug)]
struct KvEventQueueState {
    pending: VecDeque<QueuedKvEvent>,
    /// The number of the last event that came.
    last: u64,
    dropped: u64,
    /// Whether events were dropped since the last were taken.
    gap: bool,
}

/// Events that were taken together.
#[derive(Debug, Default)]
pub(super) struct KvEventBatch {
    /// The number of the first.
    pub(super) first: u64,
    pub(super) events: Vec<QueuedKvEvent>,
    /// Whether some before them were dropped.
    pub(super) gap: bool,
}

impl KvEventQueue {
    /// A queue of at most `capacity` events; when there are more, the oldest are dropped.
    pub fn new(capacity: usize) -> Self {
        let state = KvEventQueueState { pending: VecDeque::new(), last: 0, dropped: 0, gap: false };
        Self { state: Mutex::new(state), available: Notify::new(), capacity: capacity.max(1) }
    }

    /// The first event has the number after this one. Only while there is none.
    pub(crate) fn begin_after(&self, number: u64) {
        let mut state = self.state.lock();
        if state.pending.is_empty() {
            state.last = state.last.max(number);
        }
    }

    pub(crate) fn stored(
        &self,
        tenant: &str,
        key: &str,
        group: Option<&str>,
        medium: StorageMedium<'static>,
    ) {
        self.add(QueuedKvEvent::Stored(QueuedEventObject::new(tenant, key, group, medium)));
    }

    pub(crate) fn removed(
        &self,
        tenant: &str,
        key: &str,
        group: Option<&str>,
        medium: StorageMedium<'static>,
    ) {
        self.add(QueuedKvEvent::Removed(QueuedEventObject::new(tenant, key, group, medium)));
    }

    pub(crate) fn segment(&self, name: Arc<str>, change: SegmentChange) {
        self.add(QueuedKvEvent::Segment(name, change));
    }

    fn add(&self, news: QueuedKvEvent) {
        let mut state = self.state.lock();
        state.last += 1;
        if state.pending.len() >= self.capacity {
            state.pending.pop_front();
            state.dropped += 1;
            state.gap = true;
        }
        state.pending.push_back(news);
        let is_first = state.pending.len() == 1;
        drop(state);
        if is_first {
            self.available.notify_one();
        }
    }

    /// The number of the last event that came.
    pub(crate) fn last(&self) -> u64 {
        self.state.lock().last
    }

    /// Events that were dropped.
    pub(crate) fn dropped(&self) -> u64 {
        self.state.lock().dropped
    }

    /// Tells of objects that have been stored, or removed, after an event.
    #[cfg(test)]
    pub(crate) fn replay_after(&self, event: u64, mut each: impl FnMut(bool, &str)) {
        let state = self.state.lock();
        let first = state.last + 1 - state.pending.len() as u64;
        for (_, news) in (first..).zip(&state.pending).filter(|(id, _)| *id > event) {
            match news {
                QueuedKvEvent::Stored(name) => each(true, &name.key),
                QueuedKvEvent::Removed(name) => each(false, &name.key),
                QueuedKvEvent::Segment(..) => {}
            }
        }
    }

    /// Takes the first events, at least one and at most `limit`: either of objects, or of segments.
    pub(super) async fn take(&self, limit: usize) -> KvEventBatch {
        loop {
            let taken = self.state.lock().take(limit);
            if !taken.events.is_empty() {
                return taken;
            }
            self.available.notified().await;
        }
    }
}

impl KvEventQueueState {
    fn take(&mut self, limit: usize) -> KvEventBatch {
        let is_segment = |it: &QueuedKvEvent| matches!(it, QueuedKvEvent::Segment(..));
        let kind = self.pending.front().is_some_and(is_segment);
        let same = self.pending.iter().take(limit).take_while(|it| is_segment(it) == kind).count();
        let first = self.last + 1 - self.pending.len() as u64;
        let news: Vec<QueuedKvEvent> = self.pending.drain(..same).collect();
        let gap = !news.is_empty() && std::mem::take(&mut self.gap);
        KvEventBatch { first, events: news, gap }
    }
}
