//! Reports which objects lie in a node's segments, for the node's catalog.
//!
//! A node polls. Its first poll of a segment begins with a walk over the table; what changes from then on waits in a queue, and follows
//! the walk. So at the end the node has the state of that moment. When a reply is lost, the queue was full, or another master
//! leads now, the node's token does not match and it starts over.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use mooncake_wire::inventory::{HARD_PIN, HAS_CHECKSUM, ObjectChangesReply, change};
use mooncake_wire::types::Uuid;
use moongate_master_core::{MasterCore, ObjectCursor, ObjectState, ReplicaLocation, StateChange};
use parking_lot::Mutex;

use crate::state::SLOTS_PER_LOCK;

/// Changes of one segment that wait for its node's next poll.
const MAX_QUEUED: usize = 65_536;
/// Changes of all segments that wait.
const MAX_QUEUED_TOTAL: usize = 1 << 20;
/// Segments that are polled.
const MAX_SUBSCRIPTIONS: usize = 4096;
/// Changes in one reply.
const MAX_CHANGES: usize = 4096;
/// Bytes of texts in one reply after which it is sent.
const MAX_TEXT: usize = 1 << 20;
/// Parts of the table that one reply walks over at most.
const MAX_STEPS: usize = 4096;
/// After which silence a segment is not followed any more.
const SUBSCRIPTION_TTL_MS: u64 = 60_000;

/// Changes of segments, for those that poll them.
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
    /// Where the walk goes on; nothing when it is over.
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
    fn stored(object: &ObjectState<'_>, place: ReplicaLocation) -> Self {
        let checked = if object.checksum.is_some() { HAS_CHECKSUM } else { 0 };
        let group = object.group.as_deref().unwrap_or_default();
        Self {
            kind: change::STORED,
            offset: place.offset,
            sequence: place.replica,
            size: object.size,
            checksum: object.checksum.unwrap_or(0),
            flags: checked | if object.hard_pin { HARD_PIN } else { 0 },
            texts: Some(Box::new([object.tenant.to_string(), object.key.to_string(), group.to_owned()])),
        }
    }

    fn vacated(place: ReplicaLocation) -> Self {
        let (offset, sequence) = (place.offset, place.replica);
        Self { kind: change::VACATED, offset, sequence, size: 0, checksum: 0, flags: 0, texts: None }
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
        self.by_segment.retain(|_, it| {
            let is_polled = it.polled_at_ms.saturating_add(SUBSCRIPTION_TTL_MS) > now_ms;
            if !is_polled {
                *queued -= it.queue.len();
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
    /// A feed without subscriptions. Tokens begin at `first_token`, which no other master has issued.
    pub(crate) fn new(first_token: u64) -> Self {
        Self {
            is_active: AtomicBool::new(false),
            next_token: AtomicU64::new(first_token),
            subscriptions: Mutex::default(),
        }
    }

    /// Takes note of a fact. Quick: the part of the state that it is about is locked.
    pub(crate) fn observe(&self, fact: &StateChange<'_>) {
        if let StateChange::ObjectStored { object, .. } = fact
            && self.is_active.load(Relaxed)
            && !object.locations.is_empty()
        {
            let mut subscriptions = self.subscriptions.lock();
            for place in object.locations.iter() {
                subscriptions.push(place.segment, || ObjectChange::stored(object, *place));
            }
        }
    }

    /// A range belongs to its object no more.
    pub(crate) fn vacated(&self, place: ReplicaLocation) {
        if self.is_active.load(Relaxed) {
            self.subscriptions.lock().push(place.segment, || ObjectChange::vacated(place));
        }
    }

    /// Drops what is not polled any more.
    pub(crate) fn tick(&self, now_ms: u64) {
        if self.is_active.load(Relaxed) {
            let mut subscriptions = self.subscriptions.lock();
            subscriptions.drop_expired(now_ms);
            self.is_active.store(!subscriptions.by_segment.is_empty(), Relaxed);
        }
    }

    /// The next changes of a segment. Nothing when too many segments are polled.
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
            let known = subscriptions.by_segment.get_mut(&segment);
            let is_expected = known.is_some_and(|it| {
                it.polled_at_ms = now_ms;
                it.token == token && !it.overflowed
            });
            if !is_expected {
                if subscriptions.by_segment.len() >= MAX_SUBSCRIPTIONS {
                    return None;
                }
                subscriptions.restart(segment, reply.token, now_ms);
                self.is_active.store(true, Relaxed);
                reply.is_full = 1;
            }
            let subscription = subscriptions.by_segment.get_mut(&segment)?;
            subscription.token = reply.token;
            subscription.walk
        };
        // Changes are queued while a shard is locked, so the queues must not be locked here.
        let (mut texts, mut steps) = (0, 0);
        while let Some(cursor) = walk {
            if reply.keys.len() >= MAX_CHANGES || texts >= MAX_TEXT || steps >= MAX_STEPS {
                break;
            }
            walk = master.objects_in_segment(cursor, SLOTS_PER_LOCK, segment, |object, place| {
                texts += object.key.len();
                append(&mut reply, ObjectChange::stored(object, place));
            });
            steps += 1;
        }
        let mut subscriptions = self.subscriptions.lock();
        let subscription = subscriptions.by_segment.get_mut(&segment)?;
        if subscription.token != reply.token {
            // Another caller polls the same segment: one of both starts over.
            return Some(reply);
        }
        subscription.walk = walk;
        let mut drained = 0;
        while walk.is_none() && reply.keys.len() < MAX_CHANGES && texts < MAX_TEXT {
            let Some(change) = subscription.queue.pop_front() else { break };
            texts += change.texts.as_ref().map_or(0, |it| it[1].len());
            append(&mut reply, change);
            drained += 1;
        }
        let is_caught_up = walk.is_none() && subscription.queue.is_empty() && !subscription.overflowed;
        reply.caught_up = u64::from(is_caught_up);
        subscriptions.queued -= drained;
        Some(reply)
    }
}

fn append(reply: &mut ObjectChangesReply<String>, change: ObjectChange) {
    let [tenant, key, group] = change.texts.map_or_else(Default::default, |it| *it);
    reply.kinds.push(change.kind);
    reply.offsets.push(change.offset);
    reply.sequences.push(change.sequence);
    reply.sizes.push(change.size);
    reply.checksums.push(change.checksum);
    reply.flags.push(change.flags);
    reply.tenants.push(tenant);
    reply.keys.push(key);
    reply.groups.push(group);
}
