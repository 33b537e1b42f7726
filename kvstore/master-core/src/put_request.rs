//! Requests to write objects, alone or in a batch.

use mooncake_wire::types::{ReplicateConfig, SoftPin};

use crate::group::GroupId;
use crate::indices::TenantIndex;
use crate::locked_shard::NewObject;
use crate::object::{EvictionQueue, MemoryReplica};
use crate::object_table::ObjectTable;
use crate::placement::PlacementRequest;
use crate::requests::CallContext;

/// Maximum number of replicas of one object.
const MAX_REPLICAS: u64 = 64;

/// A put or an upsert of one object, with its placement.
pub(crate) struct PreparedPut<'a> {
    pub(crate) context: CallContext<'a>,
    pub(crate) key: &'a str,
    pub(crate) size: u64,
    pub(crate) placement: PlacementRequest<'a>,
    pub(crate) pin: SoftPin,
    pub(crate) hard_pin: bool,
    pub(crate) group: Option<&'a str>,
    pub(crate) upsert: bool,
}

impl<'a> PreparedPut<'a> {
    /// The object to be added, whose space is allocated already.
    pub(crate) fn new_object(
        &'a self,
        replicas: &'a [MemoryReplica],
        soft_pin_until_ms: Option<u64>,
        group: Option<(GroupId, &'a str)>,
    ) -> NewObject<'a> {
        NewObject {
            key: self.key,
            client: self.context.client,
            size: self.size,
            stamp: self.context.now_ms,
            replicas,
            queue: EvictionQueue::Writing,
            hard_pin: self.hard_pin,
            soft_pin_until_ms,
            checksum: None,
            group,
        }
    }
}

/// Parameters shared by all objects of a batch.
pub(crate) struct PutBatch<'a> {
    context: CallContext<'a>,
    preferred: Vec<&'a str>,
    host: &'a str,
    replicas: u64,
    pin: SoftPin,
    hard_pin: bool,
    pub(crate) groups: Option<Vec<&'a str>>,
    /// Makes the placement of all objects of the batch start at the same segment.
    pub(crate) batch_entropy: Option<u64>,
    upsert: bool,
}

impl<'a> PutBatch<'a> {
    pub(crate) fn new<S: AsRef<str>>(
        context: CallContext<'a>,
        config: &'a ReplicateConfig<S>,
        upsert: bool,
    ) -> Self {
        let single = Some(config.preferred_segment.as_ref()).filter(|name| !name.is_empty());
        let preferred = config.preferred_segments.iter().map(AsRef::as_ref).chain(single).collect();
        Self {
            context,
            preferred,
            host: config.host_id.as_ref(),
            replicas: config.replica_num,
            pin: config.soft_pin,
            hard_pin: config.with_hard_pin,
            groups: config.group_ids.as_ref().map(|groups| groups.iter().map(AsRef::as_ref).collect()),
            batch_entropy: None,
            upsert,
        }
    }

    /// `position` is that of the key in the batch.
    pub(crate) fn prepare(
        &'a self,
        objects: &ObjectTable,
        position: usize,
        key: &'a str,
        size: u64,
    ) -> PreparedPut<'a> {
        let seed = self.batch_entropy.unwrap_or_else(|| objects.hash(TenantIndex::DEFAULT, key));
        let entropy = seed ^ self.context.now_ms.rotate_left(32);
        let group = self.groups.as_ref().and_then(|groups| groups.get(position).copied());
        PreparedPut {
            context: self.context,
            key,
            size,
            placement: PlacementRequest {
                size,
                replicas: self.replicas.min(MAX_REPLICAS) as usize,
                preferred: &self.preferred,
                host: self.host,
                entropy,
            },
            pin: self.pin,
            hard_pin: self.hard_pin,
            group: group.filter(|name| !name.is_empty()),
            upsert: self.upsert,
        }
    }
}
