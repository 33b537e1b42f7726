//! Queue of events that wait to be published.

use std::collections::VecDeque;
use std::sync::Arc;

use mooncake_wire::events::StorageMedium;
use mooncake_wire::events::mooncake::{DEFAULT_TENANT, SegmentChange};
use parking_lot::Mutex;
use tokio::sync::Notify;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum QueuedKvEvent {
    /// An object is now readable from a medium.
    Stored(QueuedEventObject),
    /// An object was removed from a medium.
    Removed(QueuedEventObject),
    /// A segment has changed its state.
    Segment(Arc<str>, SegmentChange),
}

/// Tenant, key and group of an object, and its storage medium.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct QueuedEventObject {
    /// `None` for the default tenant, which saves memory.
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

/// Events in the order of their occurrence, with consecutive numbers.
#[derive(Debug)]
pub struct KvEventQueue {
    state: Mutex<KvEventQueueState>,
    available: Notify,
    capacity: usize,
}

#[derive(Debug)]
struct KvEventQueueState {
    pending: VecDeque<QueuedKvEvent>,
    /// Number of the last queued event.
    last: u64,
    dropped: u64,
    /// Whether events were dropped since the last batch.
    gap: bool,
}

/// A batch of events for one message.
#[derive(Debug, Default)]
pub(super) struct KvEventBatch {
    /// Number of the first event.
    pub(super) first: u64,
    pub(super) events: Vec<QueuedKvEvent>,
    /// Whether events before this batch were dropped.
    pub(super) gap: bool,
}

impl KvEventQueue {
    /// A queue of at most `capacity` events; beyond that, the oldest are dropped.
    pub fn new(capacity: usize) -> Self {
        let state = KvEventQueueState { pending: VecDeque::new(), last: 0, dropped: 0, gap: false };
        Self { state: Mutex::new(state), available: Notify::new(), capacity: capacity.max(1) }
    }

    /// Sets the number that the first event follows. Has no effect once there are events.
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

    fn add(&self, event: QueuedKvEvent) {
        let mut state = self.state.lock();
        state.last += 1;
        if state.pending.len() >= self.capacity {
            state.pending.pop_front();
            state.dropped += 1;
            state.gap = true;
        }
        state.pending.push_back(event);
        let is_first = state.pending.len() == 1;
        drop(state);
        if is_first {
            self.available.notify_one();
        }
    }

    /// Number of the last queued event.
    pub(crate) fn last(&self) -> u64 {
        self.state.lock().last
    }

    pub(crate) fn dropped(&self) -> u64 {
        self.state.lock().dropped
    }

    /// Calls `each` for every object stored or removed after an event.
    #[cfg(test)]
    pub(crate) fn replay_after(&self, after: u64, mut each: impl FnMut(bool, &str)) {
        let state = self.state.lock();
        let first = state.last + 1 - state.pending.len() as u64;
        for (_, event) in (first..).zip(&state.pending).filter(|(id, _)| *id > after) {
            match event {
                QueuedKvEvent::Stored(name) => each(true, &name.key),
                QueuedKvEvent::Removed(name) => each(false, &name.key),
                QueuedKvEvent::Segment(..) => {}
            }
        }
    }

    /// Takes the first events, at least one and at most `limit`: either all of objects, or all of segments.
    pub(super) async fn take(&self, limit: usize) -> KvEventBatch {
        loop {
            let batch = self.state.lock().take(limit);
            if !batch.events.is_empty() {
                return batch;
            }
            self.available.notified().await;
        }
    }
}

impl KvEventQueueState {
    fn take(&mut self, limit: usize) -> KvEventBatch {
        let is_segment = |event: &QueuedKvEvent| matches!(event, QueuedKvEvent::Segment(..));
        let kind = self.pending.front().is_some_and(is_segment);
        let count = self.pending.iter().take(limit).take_while(|event| is_segment(event) == kind).count();
        let first = self.last + 1 - self.pending.len() as u64;
        let event: Vec<QueuedKvEvent> = self.pending.drain(..count).collect();
        let gap = !event.is_empty() && std::mem::take(&mut self.gap);
        KvEventBatch { first, events: event, gap }
    }
}
