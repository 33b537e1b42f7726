//! Descriptions of prompts: what gateways know about the use of a prompt's objects, and engines do not send.

use crate::indices::EntryIndex;
use crate::locked_shard::LockedShard;
use crate::master::MasterCore;
use crate::object::EvictionQueue;
use crate::object_table::KeyLocation;
use crate::read::KEYS_PER_LOCK;
use crate::requests::PromptUse;
use crate::retention::KeyUse;
use crate::settings::RetentionPolicy;

/// Numbers of the keys that a description applied to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DescribedKeys {
    /// Objects that exist.
    pub existing: u64,
    /// Objects that will be described when they are written.
    pub announced: u64,
}

impl MasterCore {
    /// Records what is known about a prompt that has been used and whose objects are `keys`, in the prompt's order. Objects that
    /// were neither read nor written since the request arrived count as used now: engines had them in their own caches.
    /// Objects that do not exist are described when they are written.
    ///
    /// Without learned retention it has no effect; otherwise only on the order of eviction.
    pub fn describe_prompt<S: AsRef<str>>(
        &self,
        tenant: &str,
        keys: &[S],
        prompt: PromptUse,
    ) -> DescribedKeys {
        let mut described = DescribedKeys::default();
        if self.objects.settings.retention != RetentionPolicy::Learned {
            return described;
        }
        self.for_each_shard(tenant, keys, |shard, batch| {
            let mut indices = [EntryIndex::NONE; KEYS_PER_LOCK];
            let indices = &mut indices[..batch.len().min(KEYS_PER_LOCK)];
            shard.lookup_batch(batch, keys, indices);
            for (index, key) in indices.iter().zip(batch) {
                if *index == EntryIndex::NONE || !shard.is_readable(&shard.entries[*index]) {
                    self.objects.announced.announce(key.location, prompt.description);
                    described.announced += 1;
                    continue;
                }
                described.existing += 1;
                if shard.was_used_since(*index, prompt.arrived_ms) {
                    shard.describe_last_use(*index, key.location, prompt);
                } else {
                    let key_use = KeyUse::of_batch(prompt.now_ms, key.index, keys.len());
                    shard.lease(*index, key.location, key_use.described(prompt.description));
                }
            }
        });
        described
    }
}

impl LockedShard<'_> {
    fn was_used_since(&self, index: EntryIndex, time_ms: u64) -> bool {
        let entry = &self.entries[index];
        let last_use_ms = match entry.queue() {
            EvictionQueue::Leased(_) => entry.stamp.saturating_sub(self.objects.settings.lease_ttl_ms),
            _ => entry.stamp,
        };
        last_use_ms >= time_ms
    }

    fn describe_last_use(&mut self, index: EntryIndex, location: KeyLocation, prompt: PromptUse) {
        let queue = self.entries[index].queue();
        let class = queue.class().described(prompt.description);
        let queue = match queue {
            EvictionQueue::Unread(_) => EvictionQueue::Unread(class),
            EvictionQueue::Leased(_) => EvictionQueue::Leased(class),
            // These are not evicted by value.
            EvictionQueue::SoftPinned
            | EvictionQueue::Unlisted
            | EvictionQueue::Writing
            | EvictionQueue::Vacant => return,
        };
        self.objects.retention.record_description(prompt.now_ms, location, class);
        self.enqueue_by_stamp(index, queue);
    }
}
