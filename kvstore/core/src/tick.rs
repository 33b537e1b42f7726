//! What happens because time passes.

use crate::count::Counters;
use crate::fact::{Effects, RemoveCause};
use crate::locked::Locked;
use crate::master::Master;
use crate::object::Queue;

impl Master {
    /// Does what is due: clients that are not heard of, segments to be unmounted, puts and copies that were not ended,
    /// tasks, drain jobs, soft pins, eviction above the watermark. To be called every 10 ms or so; when it is called
    /// less often, all of this is late and nothing else.
    pub fn tick(&self, now_ms: u64, fx: &mut dyn Effects) {
        self.expire_clients(now_ms, fx);
        for shard in 0..self.shards.len() {
            self.lock(shard).expire(now_ms, fx);
        }
        self.unpin_in_turn(now_ms);
        self.tasks.lock().expire(now_ms, self.settings.task_timeout_ms, self.settings.max_tasks);
        self.drain(now_ms, fx);
        self.evict_above_watermark(now_ms, fx);
    }

    /// One shard per 10 ms: every shard's turn comes about once in a second.
    fn unpin_in_turn(&self, now_ms: u64) {
        self.unpin(now_ms, (now_ms / 10) as usize % self.shards.len());
    }
}

impl Locked<'_> {
    /// Ends what has gone on for too long.
    fn expire(&mut self, now_ms: u64, fx: &mut dyn Effects) {
        self.release_held(now_ms, fx);
        let release_ms = self.master.settings.put_release_ms;
        while let Some(at) = self.head(Queue::Writing) {
            if self.entries[at].stamp.saturating_add(release_ms) > now_ms {
                break;
            }
            Counters::add(&self.master.counters.discarded_puts, 1);
            self.drop_object(at, RemoveCause::Unended, fx);
        }
        let is_late = |at: &u32| {
            let transfer = self.entries[*at].transfer();
            transfer.is_some_and(|it| it.since_ms.saturating_add(release_ms) <= now_ms)
        };
        let late: Vec<u32> = self.transfers.iter().copied().filter(is_late).collect();
        for at in late {
            self.end_transfer(at, now_ms, fx);
        }
    }
}
