//! What is known about prompts whose objects have not been written yet.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use hashlink::LinkedHashMap;
use moongate_retention::PromptDescription;
use parking_lot::Mutex;

use crate::object_table::KeyLocation;

/// Maximum number of announced objects. When more are announced, the oldest ones are dropped.
const MAX_ANNOUNCED: usize = 65_536;

/// Descriptions by the hash of the object's key, until the object is written.
#[derive(Debug, Default)]
pub(crate) struct AnnouncedObjects {
    descriptions: Mutex<LinkedHashMap<u64, PromptDescription>>,
    /// Their number, readable without the lock: most stores have none.
    count: AtomicUsize,
}

impl AnnouncedObjects {
    pub(crate) fn announce(&self, location: KeyLocation, description: PromptDescription) {
        let mut descriptions = self.descriptions.lock();
        descriptions.insert(location.hash(), description);
        if descriptions.len() > MAX_ANNOUNCED {
            descriptions.pop_front();
        }
        self.count.store(descriptions.len(), Relaxed);
    }

    /// Removes and returns the description of an object that is written now.
    pub(crate) fn take(&self, location: KeyLocation) -> Option<PromptDescription> {
        if self.count.load(Relaxed) == 0 {
            return None;
        }
        let mut descriptions = self.descriptions.lock();
        let description = descriptions.remove(&location.hash());
        self.count.store(descriptions.len(), Relaxed);
        description
    }
}

#[cfg(test)]
mod tests {
    use moongate_retention::{PromptLength, ReturnHint, TenantBucket};

    use super::*;
    use crate::indices::{ShardIndex, TenantIndex};

    #[test]
    fn announcements_are_bounded_and_taken_once() {
        let announced = AnnouncedObjects::default();
        let location = |tag| KeyLocation { shard: ShardIndex::new(3), tag, tenant: TenantIndex::default() };
        let tenants = TenantBucket::new(3);
        let description = PromptDescription { length: PromptLength::Long, hint: ReturnHint::Never, tenants };
        assert_eq!(announced.take(location(0)), None);
        for tag in 0..=MAX_ANNOUNCED as u32 {
            announced.announce(location(tag), description);
        }
        assert_eq!(announced.take(location(0)), None, "the oldest one is dropped");
        assert_eq!(announced.take(location(1)), Some(description));
        assert_eq!(announced.take(location(1)), None);
        assert_eq!(announced.count.load(Relaxed), MAX_ANNOUNCED - 1);
    }
}
