//! Offers what this node's memory holds to a master that has lost its log.

use mooncake_wire::inventory::{HARD_PIN, HAS_CHECKSUM, InventoryArguments, step};
use moongate_master_client::rpc::RpcError;
use moongate_memory::ObjectRecord;

use crate::membership::NodeMembership;
use crate::segment_pool::MountedSegment;

/// Records in one request.
const RECORDS: usize = 1024;
/// The master's outcomes up to this number mean that it serves the object.
const LAST_RESTORED: u64 = 2;

impl NodeMembership {
    /// Announces that a segment's inventory will be offered once it is mounted, so that nothing is written over it meanwhile. Whether the
    /// master accepts it: Mooncake's does not have this call.
    pub(crate) async fn announce_inventory(&self, lent: &MountedSegment) -> Result<bool, RpcError> {
        if lent.ledger().catalog_counts().is_none() {
            return Ok(false);
        }
        match self.master.inventory(&self.inventory(lent, step::ANNOUNCE)).await {
            Ok(reply) => Ok(reply.accepted > 0),
            Err(RpcError::Fault(fault)) => {
                tracing::debug!(%fault, "the master restores nothing from inventories");
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// Offers all objects of a mounted segment whose inventory was announced. Records of what the master refuses are dropped.
    pub(crate) async fn offer_inventory(&self, lent: &MountedSegment) -> Result<(), RpcError> {
        let (mut offered, mut kept, mut from) = (0_u64, 0_u64, 0);
        loop {
            let records = lent.ledger().objects(from, RECORDS);
            let Some(last) = records.last() else { break };
            from = last.offset + 1;
            let reply = self.master.inventory(&self.with_records(lent, &records)).await?;
            for (record, outcome) in records.iter().zip(&reply.outcomes) {
                offered += 1;
                if *outcome <= LAST_RESTORED {
                    kept += 1;
                } else {
                    tracing::debug!(key = record.key, outcome, "an object was not restored");
                    lent.ledger().drop_object(record.offset, record.version);
                }
            }
        }
        self.master.inventory(&self.inventory(lent, step::FINISH)).await?;
        if offered > kept {
            tracing::warn!(segment = %lent.id, offered, restored = kept, refused = offered - kept, "the master has restored only a part of this segment's objects; its metric moongate_master_restored_objects_total has the reasons");
        } else if offered > 0 {
            tracing::info!(segment = %lent.id, restored = kept, "the master had lost its log, and has restored this segment's objects");
        }
        Ok(())
    }

    fn inventory<'a>(&self, lent: &MountedSegment, step: u64) -> InventoryArguments<&'a str> {
        InventoryArguments {
            client_id: self.client_id,
            segment_id: lent.id,
            step,
            epoch: lent.ledger().newest_epoch(),
            ..InventoryArguments::default()
        }
    }

    fn with_records<'a>(
        &self,
        lent: &MountedSegment,
        records: &'a [ObjectRecord],
    ) -> InventoryArguments<&'a str> {
        let texts = |text: fn(&ObjectRecord) -> &str| records.iter().map(text).collect();
        let numbers = |number: fn(&ObjectRecord) -> u64| records.iter().map(number).collect();
        InventoryArguments {
            tenants: texts(|it| &it.tenant),
            keys: texts(|it| &it.key),
            groups: texts(|it| &it.group),
            offsets: numbers(|it| it.offset),
            sizes: numbers(|it| it.size),
            epochs: numbers(|it| it.version.epoch),
            sequences: numbers(|it| it.version.sequence),
            checksums: numbers(|it| it.checksum.unwrap_or(0)),
            crcs: numbers(|it| it.crc.into()),
            flags: numbers(|it| {
                let checked = if it.checksum.is_some() { HAS_CHECKSUM } else { 0 };
                checked | if it.hard_pin { HARD_PIN } else { 0 }
            }),
            ..self.inventory(lent, step::RECORDS)
        }
    }
}
