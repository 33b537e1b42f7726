//! Reports the objects in a node's segments to the node's catalog.
//!
//! A node polls. Its first poll of a segment starts a walk over the table; changes from then on are queued and follow the walk. So at
//! the end the node has the state of that moment. After a lost reply, a full queue or a change of the leader, the node's token does not
//! match and it starts over.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use mooncake_wire::inventory::{HARD_PIN, HAS_CHECKSUM, ObjectChangesReply, ReportedObjectChange, change};
use mooncake_wire::types::Uuid;
use moongate_master_core::{MasterCore, ObjectCursor, ObjectState, ReplicaLocation, StateChange};
use parking_lot::Mutex;

/// Maximum number of queued changes of one segment.
const MAX_QUEUED: usize = 65_536;
/// Maximum number of queued changes of all segments.
const MAX_QUEUED_TOTAL: usize = 1 << 20;
/// Maximum number of polled segments.
const MAX_SUBSCRIPTIONS: usize = 4096;
/// Maximum number of changes in one reply.
const MAX_CHANGES: usize = 4096;
/// Bytes of keys in one reply after which it is sent.
const MAX_TEXT: usize = 1 << 20;
/// Maximum number of parts of the table that one reply walks over.
const MAX_STEPS: usize = 4096;
/// Table slots of such a part, which is read under one lock: some tens of microseconds.
const SLOTS_PER_STEP: u32 = 64;
/// A segment that is not polled for this long is dropped, in milliseconds.
const SUBSCRIPTION_TTL_MS: u64 = 60_000;

/// Queued changes of the segments that nodes poll.
#[derive(Debug)]
pub(crate) struct ObjectFeed {
    is_active: AtomicBool,
    next_token: AtomicU64,
    subscriptions: Mutex<SegmentSubscriptions>,
}

#[derive(Debug, Default)]
struct SegmentSubscriptions {
    by_segment: HashMap<Uuid, SegmentSubscription>,
    queued: usize,
}

#[derive(Debug)]
struct SegmentSubscription {
    token: u64,
    /// Next position of the walk; `None` after its end.
    walk: Option<ObjectCursor>,
    queue: VecDeque<ObjectChange>,
    /// Changes were dropped: the node has to start over.
    overflowed: bool,
    polled_at_ms: u64,
}

#[derive(Clone, Debug)]
struct ObjectChange {
    kind: u64,
    offset: u64,
    sequence: u64,
    size: u64,
    checksum: u64,
    flags: u64,
    texts: Option<Box<[String; 3]>>,
}

impl ObjectChange {
    fn stored(object: &ObjectState<'_>, location: ReplicaLocation) -> Self {
        let checked = if object.checksum.is_some() { HAS_CHECKSUM } else { 0 };
        let group = object.group.as_deref().unwrap_or_default();
        Self {
            kind: change::STORED,
            offset: location.offset,
            sequence: location.replica,
            size: object.size,
            checksum: object.checksum.unwrap_or(0),
            flags: checked | if object.hard_pin { HARD_PIN } else { 0 },
            texts: Some(Box::new([object.tenant.to_string(), object.key.to_string(), group.to_owned()])),
        }
    }

    fn vacated(location: ReplicaLocation) -> Self {
        let (offset, sequence) = (location.offset, location.replica);
        Self { kind: change::VACATED, offset, sequence, size: 0, checksum: 0, flags: 0, texts: None }
    }

    fn into_reported(self) -> ReportedObjectChange<String> {
        let Self { kind, offset, sequence, size, checksum, flags, texts } = self;
        let [tenant, key, group] = texts.map_or_else(Default::default, |texts| *texts);
        ReportedObjectChange { kind, offset, sequence, size, checksum, flags, tenant, key, group }
    }
}

impl SegmentSubscriptions {
    fn push(&mut self, segment: Uuid, change: impl FnOnce() -> ObjectChange) {
        let is_full = self.queued >= MAX_QUEUED_TOTAL;
        let Some(subscription) = self.by_segment.get_mut(&segment) else { return };
        if subscription.overflowed {
            return;
        }
        if is_full || subscription.queue.len() >= MAX_QUEUED {
            self.queued -= subscription.queue.len();
            subscription.queue = VecDeque::new();
            subscription.overflowed = true;
            return;
        }
        subscription.queue.push_back(change());
        self.queued += 1;
    }

    fn drop_expired(&mut self, now_ms: u64) {
        let queued = &mut self.queued;
        self.by_segment.retain(|_, subscription| {
            let is_polled = subscription.polled_at_ms.saturating_add(SUBSCRIPTION_TTL_MS) > now_ms;
            if !is_polled {
                *queued -= subscription.queue.len();
            }
            is_polled
        });
    }

    fn restart(&mut self, segment: Uuid, token: u64, now_ms: u64) {
        let new = SegmentSubscription {
            token,
            walk: Some(ObjectCursor::default()),
            queue: VecDeque::new(),
            overflowed: false,
            polled_at_ms: now_ms,
        };
        if let Some(old) = self.by_segment.insert(segment, new) {
            self.queued -= old.queue.len();
        }
    }
}

impl ObjectFeed {
    /// A feed without subscriptions. Tokens start at `first_token`, which no earlier master has used.
    pub(crate) fn new(first_token: u64) -> Self {
        Self {
            is_active: AtomicBool::new(false),
            next_token: AtomicU64::new(first_token),
            subscriptions: Mutex::default(),
        }
    }

    /// Queues a change of an object. Fast, because it is called under the lock of the changed entry.
    pub(crate) fn observe(&self, fact: &StateChange<'_>) {
        if let StateChange::ObjectStored { object, .. } = fact
            && self.is_active.load(Relaxed)
            && !object.locations.is_empty()
        {
            let mut subscriptions = self.subscriptions.lock();
            for location in object.locations.iter() {
                subscriptions.push(location.segment, || ObjectChange::stored(object, *location));
            }
        }
    }

    /// Queues the release of a range by its object.
    pub(crate) fn vacated(&self, location: ReplicaLocation) {
        if self.is_active.load(Relaxed) {
            self.subscriptions.lock().push(location.segment, || ObjectChange::vacated(location));
        }
    }

    /// Drops segments that are not polled any more.
    pub(crate) fn tick(&self, now_ms: u64) {
        if self.is_active.load(Relaxed) {
            let mut subscriptions = self.subscriptions.lock();
            subscriptions.drop_expired(now_ms);
            self.is_active.store(!subscriptions.by_segment.is_empty(), Relaxed);
        }
    }

    /// The next changes of a segment. `None` if too many segments are polled.
    pub(crate) fn poll(
        &self,
        master: &MasterCore,
        now_ms: u64,
        segment: Uuid,
        token: u64,
    ) -> Option<ObjectChangesReply<String>> {
        let mut reply =
            ObjectChangesReply { token: self.next_token.fetch_add(1, Relaxed), ..Default::default() };
        let mut walk = {
            let mut subscriptions = self.subscriptions.lock();
            let subscription = subscriptions.by_segment.get_mut(&segment);
            let is_expected = subscription.is_some_and(|subscription| {
                subscription.polled_at_ms = now_ms;
                subscription.token == token && !subscription.overflowed
            });
            if !is_expected {
                if subscriptions.by_segment.len() >= MAX_SUBSCRIPTIONS {
                    return None;
                }
                subscriptions.restart(segment, reply.token, now_ms);
                self.is_active.store(true, Relaxed);
                reply.is_full = true;
            }
            let subscription = subscriptions.by_segment.get_mut(&segment)?;
            subscription.token = reply.token;
            subscription.walk
        };
        // Changes are queued under a shard's lock, so the queues must not be locked during the walk.
        let (mut texts, mut steps) = (0, 0);
        while let Some(cursor) = walk {
            if reply.changes.len() >= MAX_CHANGES || texts >= MAX_TEXT || steps >= MAX_STEPS {
                break;
            }
            walk = master.objects_in_segment(cursor, SLOTS_PER_STEP, segment, |object, location| {
                texts += object.key.len();
                reply.changes.push(ObjectChange::stored(object, location).into_reported());
            });
            steps += 1;
        }
        let mut subscriptions = self.subscriptions.lock();
        let subscription = subscriptions.by_segment.get_mut(&segment)?;
        if subscription.token != reply.token {
            // Another caller polls the same segment: one of the two starts over.
            return Some(reply);
        }
        subscription.walk = walk;
        let mut drained = 0;
        while walk.is_none() && reply.changes.len() < MAX_CHANGES && texts < MAX_TEXT {
            let Some(change) = subscription.queue.pop_front() else { break };
            texts += change.texts.as_ref().map_or(0, |texts| texts[1].len());
            reply.changes.push(change.into_reported());
            drained += 1;
        }
        reply.caught_up = walk.is_none() && subscription.queue.is_empty() && !subscription.overflowed;
        subscriptions.queued -= drained;
        Some(reply)
    }
}
