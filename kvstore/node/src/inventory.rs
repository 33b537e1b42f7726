//! Offers the objects in this node's segments to a master that lost its log.

use mooncake_wire::inventory::{HARD_PIN, HAS_CHECKSUM, InventoryArguments, step};
use mooncake_wire::types::Uuid;
use moongate_master_client::rpc::{MasterClient, RpcError};
use moongate_memory::ObjectRecord;

use crate::segment_pool::MountedSegment;

/// Maximum number of records in one request.
const RECORDS: usize = 1024;
/// Outcomes up to this number mean that the master serves the object.
const LAST_RESTORED: u64 = 2;

/// The objects of one segment, offered to the master.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SegmentInventory<'a> {
    pub(crate) master: &'a MasterClient,
    pub(crate) client_id: Uuid,
    pub(crate) segment: &'a MountedSegment,
}

impl SegmentInventory<'_> {
    /// Announces that the segment's inventory follows after the mount, so that the master does not allocate over it meanwhile.
    /// Returns whether the master accepts it: Mooncake's lacks this call.
    pub(crate) async fn announce(&self) -> Result<bool, RpcError> {
        if self.segment.ledger().catalog_counts().is_none() {
            return Ok(false);
        }
        match self.master.inventory(&self.step(step::ANNOUNCE)).await {
            Ok(reply) => Ok(reply.accepted > 0),
            Err(RpcError::Fault(fault)) => {
                tracing::debug!(%fault, "the master does not support inventories");
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// Offers all objects of the segment, which is mounted and whose inventory was announced. Records that the master refuses are dropped.
    pub(crate) async fn offer(&self) -> Result<(), RpcError> {
        let segment = self.segment;
        let (mut offered, mut restored, mut from) = (0_u64, 0_u64, 0);
        loop {
            let records = segment.ledger().objects(from, RECORDS);
            let Some(last) = records.last() else { break };
            from = last.offset + 1;
            let reply = self.master.inventory(&self.with_records(&records)).await?;
            for (record, outcome) in records.iter().zip(&reply.outcomes) {
                offered += 1;
                if *outcome <= LAST_RESTORED {
                    restored += 1;
                } else {
                    tracing::debug!(key = record.key, outcome, "the master did not restore an object");
                    segment.ledger().drop_object(record.offset, record.version);
                }
            }
        }
        self.master.inventory(&self.step(step::FINISH)).await?;
        if offered > restored {
            tracing::warn!(segment = %segment.id, offered, restored, refused = offered - restored, "the master restored only some of this segment's objects; its metric moongate_master_restored_objects_total has the reasons");
        } else if offered > 0 {
            tracing::info!(segment = %segment.id, restored, "the master lost its log and restored this segment's objects");
        }
        Ok(())
    }

    fn step<'a>(&self, step: u64) -> InventoryArguments<&'a str> {
        InventoryArguments {
            client_id: self.client_id,
            segment_id: self.segment.id,
            step,
            epoch: self.segment.ledger().newest_epoch(),
            ..InventoryArguments::default()
        }
    }

    fn with_records<'a>(&self, records: &'a [ObjectRecord]) -> InventoryArguments<&'a str> {
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
            ..self.step(step::RECORDS)
        }
    }
}
