//! Requests to write objects, alone or in a batch.

use mooncake_wire::types::{ReplicateConfig, SoftPin, Uuid};

use crate::object_table::ObjectTable;
use crate::placement::PlacementRequest;

/// Maximum number of replicas of one object.
const MAX_REPLICAS: u64 = 64;

/// Request to write one object.
pub(crate) struct PutRequest<'a> {
    pub(crate) client: Uuid,
    pub(crate) tenant: &'a str,
    pub(crate) key: &'a str,
    pub(crate) size: u64,
    pub(crate) placement: PlacementRequest<'a>,
    pub(crate) pin: SoftPin,
    pub(crate) hard_pin: bool,
    pub(crate) group: Option<&'a str>,
    pub(crate) upsert: bool,
}

/// Parameters shared by all objects of a batch.
pub(crate) struct PutBatch<'a> {
    client: Uuid,
    tenant: &'a str,
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
        client: Uuid,
        tenant: &'a str,
        config: &'a ReplicateConfig<S>,
        upsert: bool,
    ) -> Self {
        let single = Some(config.preferred_segment.as_ref()).filter(|name| !name.is_empty());
        let preferred = config.preferred_segments.iter().map(AsRef::as_ref).chain(single).collect();
        Self {
            client,
            tenant,
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

    pub(crate) fn request(
        &'a self,
        objects: &ObjectTable,
        now_ms: u64,
        index: usize,
        key: &'a str,
        size: u64,
    ) -> PutRequest<'a> {
        let entropy = self.batch_entropy.unwrap_or_else(|| objects.hash(0, key)) ^ now_ms.rotate_left(32);
        let group = self.groups.as_ref().and_then(|groups| groups.get(index).copied());
        PutRequest {
            client: self.client,
            tenant: self.tenant,
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
