//! Periodic work of the master.

use std::sync::atomic::Ordering::Relaxed;

use crate::change::{RemoveCause, StateChangeSink};
use crate::disk::DiskTask;
use crate::indices::{EntryIndex, ShardIndex};
use crate::locked_shard::LockedShard;
use crate::master::MasterCore;
use crate::object::EvictionQueue;
use crate::statistics::MasterCounters;
use crate::upsert::SpaceDisposition;

/// Number of ticks in which the soft pins of all shards are checked once.
const UNPIN_TICKS: usize = 32;

impl MasterCore {
    /// Runs all periodic work: expiry of clients, unmounts, puts, transfers, tasks and soft pins, drain jobs, and eviction above
    /// the watermark. Call it about every 10 ms; calling it less often only delays this work.
    pub fn tick(&self, now_ms: u64, fx: &mut dyn StateChangeSink) {
        self.expire_clients(now_ms, fx);
        self.expire_rebuild(now_ms);
        for shard in self.objects.shard_indices() {
            self.objects.lock(shard).expire(now_ms, fx);
        }
        self.expire_soft_pins_in_turn(now_ms);
        self.planner.lock().tasks.expire(now_ms, fx);
        self.run_drain_jobs(now_ms, fx);
        self.objects.retention.refresh(now_ms, || self.objects.key_count());
        self.objects.retention.emit_when_due(now_ms, fx);
        self.objects.evict_above_watermark(now_ms, fx);
        self.objects.refresh_filling_segments();
    }

    /// Checks 1/32 of the shards per call: with a tick every 10 ms, each shard about three times per second.
    fn expire_soft_pins_in_turn(&self, now_ms: u64) {
        let shards = self.objects.shards.len();
        for _ in 0..shards.div_ceil(UNPIN_TICKS) {
            self.objects
                .expire_soft_pins(now_ms, ShardIndex::new(self.next_unpin.fetch_add(1, Relaxed) % shards));
        }
    }
}

impl LockedShard<'_> {
    /// Ends puts, transfers and disk tasks that have timed out.
    fn expire(&mut self, now_ms: u64, fx: &mut dyn StateChangeSink) {
        self.release_quarantined(now_ms, fx);
        let release_ms = self.objects.settings.put_release_ms;
        while let Some(index) = self.head(EvictionQueue::Writing) {
            if self.entries[index].stamp.saturating_add(release_ms) > now_ms {
                break;
            }
            MasterCounters::add(&self.objects.counters.discarded_puts, 1);
            self.remove_and_free(index, RemoveCause::PutTimedOut, fx);
        }
        while let Some((since_ms, index)) = self.pending.first().copied() {
            if since_ms.saturating_add(release_ms) > now_ms {
                break;
            }
            MasterCounters::add(&self.objects.counters.discarded_puts, 1);
            self.abandon_pending(index, SpaceDisposition::Quarantine, now_ms, fx);
        }
        let is_late = |index: &EntryIndex| {
            let transfer = self.entries[*index].transfer();
            transfer.is_some_and(|transfer| transfer.since_ms.saturating_add(release_ms) <= now_ms)
        };
        let late: Vec<EntryIndex> = self.transfers.iter().copied().filter(is_late).collect();
        for index in late {
            self.end_transfer(index, now_ms, fx);
        }
        while let Some((since_ms, index)) = self.disk_tasks.first().copied() {
            if since_ms.saturating_add(release_ms) > now_ms {
                break;
            }
            if self.entries[index].work().is_some_and(|work| matches!(work.task, DiskTask::Promotion { .. }))
            {
                MasterCounters::add(&self.objects.counters.promotions_expired, 1);
            }
            self.end_work(index, now_ms, fx);
        }
    }
}
