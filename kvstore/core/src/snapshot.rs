//! The whole state as facts, in pieces.

use crate::fact::{Effects, Fact, StoreCause};
use crate::locked::Locked;
use crate::master::Master;
use crate::mount::told;
use crate::object::Queue;
use crate::query::Cursor;

/// Where a snapshot goes on. The default is its beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SnapshotCursor(Option<Cursor>);

impl Master {
    /// Tells a part of the state as facts and returns where to go on, nothing at the end. At most `limit` places of the
    /// table are looked at under one lock. All parts, and after them all facts that the master has told since the
    /// first part was begun, are its state.
    pub fn snapshot(&self, from: SnapshotCursor, limit: u32, fx: &mut dyn Effects) -> Option<SnapshotCursor> {
        let Some(cursor) = from.0 else {
            self.tell_tenants(fx);
            self.tell_nodes(fx);
            self.tell_noted(fx);
            let tasks = self.tasks.lock();
            tasks.tell(fx);
            tasks.jobs.tell(fx);
            return Some(SnapshotCursor(Some(Cursor::default())));
        };
        if cursor.place == 0 {
            self.lock(cursor.shard).tell_held(fx);
        }
        let next = self.walk(cursor, limit, |shard, at| shard.tell_object(at, fx));
        next.map(|cursor| SnapshotCursor(Some(cursor)))
    }

    fn tell_tenants(&self, fx: &mut dyn Effects) {
        for quota in self.tenants.quotas() {
            let requested = Some(quota.requested_quota_bytes);
            fx.fact(Fact::TenantQuota { tenant: quota.tenant_id.into(), requested });
        }
    }

    /// Clients with their segments: first what a silent client cannot be asked for, so that applying its silence meets
    /// just these segments.
    fn tell_nodes(&self, fx: &mut dyn Effects) {
        let registry = self.registry.lock();
        let segments = self.segments.load();
        let tell_segments = |readable: bool, fx: &mut dyn Effects| {
            for (_, mounted) in segments.iter().filter(|(_, it)| it.is_readable() == readable) {
                let (segment, client) = (told(&mounted.info), mounted.client);
                let id = segment.id;
                fx.fact(Fact::SegmentMounted { segment, client, at_ms: mounted.mounted_at_ms });
                let (status, until_ms) = (mounted.status(), mounted.unmount_at_ms());
                fx.fact(Fact::SegmentStatus { segment: id, status, until_ms });
            }
        };
        let disks = self.disks.load();
        let tell_disks = |heard: bool, fx: &mut dyn Effects| {
            for disk in disks.values().filter(|it| it.is_heard() == heard) {
                fx.fact(Fact::DiskMounted { client: disk.client });
            }
        };
        tell_segments(false, fx);
        tell_disks(false, fx);
        for (client, known) in &registry.clients {
            let (client, at_ms) = (*client, known.last_seen_ms);
            let silent_at_ms = at_ms.saturating_add(self.settings.client_ttl_ms);
            fx.fact(match known.silent {
                true => Fact::ClientSilent { client, at_ms: silent_at_ms },
                false => Fact::ClientBack { client, at_ms },
            });
        }
        tell_segments(true, fx);
        tell_disks(true, fx);
    }

    /// Puts the lists of eviction into the order of the facts' times, which the order of a snapshot is not.
    pub(crate) fn sort_lists(&self) {
        for shard in 0..self.shards.len() {
            let mut shard = self.lock(shard);
            let (places, _) = shard.occupied(0, u32::MAX);
            let in_list = |at: &u32| !matches!(shard.entries[*at].queue(), Queue::Apart | Queue::Vacant);
            let mut places: Vec<u32> = places.filter(in_list).collect();
            places.sort_by_key(|at| shard.entries[*at].stamp);
            for at in places {
                let queue = shard.entries[at].queue();
                shard.enqueue(at, queue);
            }
        }
    }
}

impl Locked<'_> {
    fn tell_object(&self, at: u32, fx: &mut dyn Effects) {
        self.tell_state(at, StoreCause::Snapshot, fx);
        self.tell_transfer(at, fx);
        let entry = &self.entries[at];
        let Some(since_ms) = entry.work().map(|it| it.since_ms) else { return };
        if entry.transfer().is_some() {
            return;
        }
        let until_ms = since_ms.saturating_add(self.master.settings.put_release_ms);
        for place in self.places(entry.replicas().copied().filter(|it| !it.ready)) {
            fx.fact(Fact::Held { segment: place.segment, offset: place.offset, size: entry.size, until_ms });
        }
    }

    fn tell_held(&self, fx: &mut dyn Effects) {
        for held in &self.held {
            if let Some(segment) = self.segments.get(held.segment).map(|it| it.info.id) {
                let (offset, size, until_ms) = (held.offset, held.size, held.until_ms);
                fx.fact(Fact::Held { segment, offset, size, until_ms });
            }
        }
    }
}
