//! Inventories of nodes, and what changes in their segments.

use bytes::BytesMut;
use mooncake_wire::ErrorCode;
use mooncake_wire::frame::RpcFault;
use mooncake_wire::inventory::{
    HARD_PIN, HAS_CHECKSUM, InventoryArguments, InventoryReply, InventoryRequest, ObjectChangesArguments,
    ObjectChangesReply, step,
};
use moongate_master_core::{InventoryRecord, ObjectVersion, RestoreOutcome};

use crate::journal::FactRecorder;
use crate::server::MasterServer;

/// Answers a request.
///
/// # Errors
/// The fault to be answered.
pub(super) fn handle(
    server: &MasterServer,
    now_ms: u64,
    sequence: u32,
    request: InventoryRequest<'_>,
    fx: &mut FactRecorder,
    out: &mut BytesMut,
) -> Result<(), RpcFault> {
    let written = match request {
        InventoryRequest::Inventory(arguments) => {
            let reply = inventory(server, now_ms, &arguments, fx);
            InventoryReply::encode(&reply, sequence, out)
        }
        InventoryRequest::Changes(arguments) => {
            ObjectChangesReply::encode(&changes(server, now_ms, &arguments), sequence, out)
        }
    };
    written.map_err(|_| RpcFault::invalid_argument())
}

fn changes(
    server: &MasterServer,
    now_ms: u64,
    it: &ObjectChangesArguments,
) -> Result<ObjectChangesReply<String>, ErrorCode> {
    // An empty segment is reported as such, one that is not mounted, or whose inventory is awaited, never.
    server.master.check_inventory_complete(it.segment_id, it.client_id)?;
    let epoch = server.raise_epoch(it.epoch);
    let polled = server.feed.poll(&server.master, now_ms, it.segment_id, it.token);
    let reply = polled.ok_or(ErrorCode::NO_AVAILABLE_HANDLE)?;
    server.master.check_inventory_complete(it.segment_id, it.client_id)?;
    Ok(ObjectChangesReply { epoch, ..reply })
}

fn inventory(
    server: &MasterServer,
    now_ms: u64,
    it: &InventoryArguments<&str>,
    fx: &mut FactRecorder,
) -> Result<InventoryReply, ErrorCode> {
    let epoch = server.raise_epoch(it.epoch);
    let mut reply = InventoryReply { accepted: 1, epoch, outcomes: Vec::new() };
    match it.step {
        step::ANNOUNCE => reply.accepted = u64::from(server.master.announce_inventory(now_ms, it.segment_id)),
        step::RECORDS => {
            let records: Vec<InventoryRecord<'_>> =
                (0..it.keys.len()).filter_map(|at| record(it, at)).collect();
            let outcomes =
                server.master.restore_inventory(now_ms, it.segment_id, it.client_id, &records, fx)?;
            let number = |outcome| RestoreOutcome::ALL.iter().position(|it| *it == outcome).unwrap_or(0);
            reply.outcomes = outcomes.into_iter().map(|outcome| number(outcome) as u64).collect();
        }
        step::FINISH => {
            server.master.finish_inventory(it.segment_id, it.client_id)?;
            let counts = server.master.restore_counts();
            let refused: u64 =
                counts.iter().filter(|(it, _)| !it.is_accepted()).map(|(_, count)| count).sum();
            tracing::info!(
                segment = %it.segment_id,
                restored = counts[0].1,
                merged = counts[1].1,
                refused,
                "a node's inventory has been offered; figures are those of all nodes so far"
            );
        }
        _ => return Err(ErrorCode::INVALID_PARAMS),
    }
    Ok(reply)
}

fn record<'a>(it: &InventoryArguments<&'a str>, at: usize) -> Option<InventoryRecord<'a>> {
    let flags = *it.flags.get(at)?;
    Some(InventoryRecord {
        tenant: it.tenants.get(at)?,
        key: it.keys.get(at)?,
        group: it.groups.get(at)?,
        offset: *it.offsets.get(at)?,
        size: *it.sizes.get(at)?,
        version: ObjectVersion { epoch: *it.epochs.get(at)?, sequence: *it.sequences.get(at)? },
        checksum: it.checksums.get(at).copied().filter(|_| flags & HAS_CHECKSUM != 0),
        hard_pin: flags & HARD_PIN != 0,
        crc: u32::try_from(*it.crcs.get(at)?).ok()?,
    })
}
