//! What happens because time passes.

use std::sync::atomic::Ordering::Relaxed;

use crate::change::{RemoveCause, StateChangeSink};
use crate::disk::DiskTask;
use crate::locked_shard::LockedShard;
use crate::master::MasterCore;
use crate::object::EvictionQueue;
use crate::statistics::MasterCounters;
use crate::upsert::SpaceDisposition;

/// Ticks within which soft pins of all shards are looked at.
const UNPIN_TICKS: usize = 32;

impl MasterCore {
    /// Does what is due: clients that are not heard of, segments to be unmounted, puts and copies that were not ended,
    /// tasks, drain jobs, soft pins, eviction above the watermark. To be called every 10 ms or so; when it is called
    /// less often, all of this is late and nothing else.
    pub fn tick(&self, now_ms: u64, fx: &mut dyn StateChangeSink) {
        self.expire_clients(now_ms, fx);
        self.expire_rebuild(now_ms);
        for shard in 0..self.shards.len() {
            self.lock(shard).expire(now_ms, fx);
        }
        self.expire_soft_pins_in_turn(now_ms);
        self.tasks.lock().expire(now_ms, self.settings.task_timeout_ms, self.settings.max_tasks, fx);
        self.run_drain_jobs(now_ms, fx);
        self.evict_above_watermark(now_ms, fx);
    }

    /// A part of the shards at a time: at a tick per 10 ms every shard's turn comes several times in a second.
    fn expire_soft_pins_in_turn(&self, now_ms: u64) {
        let shards = self.shards.len();
        for _ in 0..shards.div_ceil(UNPIN_TICKS) {
            self.expire_soft_pins(now_ms, self.next_unpin.fetch_add(1, Relaxed) % shards);
        }
    }
}

impl LockedShard<'_> {
    /// Ends what has gone on for too long.
    fn expire(&mut self, now_ms: u64, fx: &mut dyn StateChangeSink) {
        self.release_quarantined(now_ms, fx);
        let release_ms = self.master.settings.put_release_ms;
        while let Some(at) = self.head(EvictionQueue::Writing) {
            if self.entries[at].stamp.saturating_add(release_ms) > now_ms {
                break;
            }
            MasterCounters::add(&self.master.counters.discarded_puts, 1);
            self.remove_and_free(at, RemoveCause::PutTimedOut, fx);
        }
        while let Some((since_ms, at)) = self.pending.first().copied() {
            if since_ms.saturating_add(release_ms) > now_ms {
                break;
            }
            MasterCounters::add(&self.master.counters.discarded_puts, 1);
            self.abandon_pending(at, SpaceDisposition::Quarantine, now_ms, fx);
        }
        let is_late = |at: &u32| {
            let transfer = self.entries[*at].transfer();
            transfer.is_some_and(|it| it.since_ms.saturating_add(release_ms) <= now_ms)
        };
        let late: Vec<u32> = self.transfers.iter().copied().filter(is_late).collect();
        for at in late {
            self.end_transfer(at, now_ms, fx);
        }
        while let Some((since_ms, at)) = self.disk_tasks.first().copied() {
            if since_ms.saturating_add(release_ms) > now_ms {
                break;
            }
            if self.entries[at].work().is_some_and(|it| matches!(it.task, DiskTask::Promotion { .. })) {
                MasterCounters::add(&self.master.counters.promotions_expired, 1);
            }
            self.end_work(at, now_ms, fx);
        }
    }
}
