//! Inventories of nodes, and the changes of objects in their segments.

use mooncake_wire::ErrorCode;
use mooncake_wire::frame::RpcFault;
use mooncake_wire::inventory::{
    HARD_PIN, HAS_CHECKSUM, InventoryArguments, InventoryReply, InventoryRequest, ObjectChangesArguments,
    ObjectChangesReply, step,
};
use moongate_master_core::{ClientSegment, InventoryRecord, ObjectVersion, RestoreOutcome};

use super::ExtensionCall;
use crate::recorder::FactRecorder;
use crate::server::MasterServer;

/// Handles an inventory request.
///
/// # Errors
/// The fault to reply with.
pub(super) fn handle(call: ExtensionCall<'_>, request: InventoryRequest<'_>) -> Result<(), RpcFault> {
    let ExtensionCall { server, now_ms, sequence, effects, out } = call;
    let written = match request {
        InventoryRequest::Inventory(arguments) => {
            let reply = inventory(server, now_ms, &arguments, effects);
            InventoryReply::encode(&reply, sequence, out)
        }
        InventoryRequest::Changes(arguments) => {
            ObjectChangesReply::encode(changes(server, now_ms, &arguments), sequence, out)
        }
    };
    written.map_err(|_| RpcFault::invalid_argument())
}

fn changes(
    server: &MasterServer,
    now_ms: u64,
    arguments: &ObjectChangesArguments,
) -> Result<ObjectChangesReply<String>, ErrorCode> {
    // Checked before and after the poll: an unmounted segment, or one without a complete inventory, must not be reported as empty.
    let segment = ClientSegment { segment: arguments.segment_id, client: arguments.client_id };
    server.master.check_inventory_complete(segment)?;
    let epoch = server.raise_epoch(arguments.epoch);
    let polled = server.feed.poll(&server.master, now_ms, arguments.segment_id, arguments.token);
    let reply = polled.ok_or(ErrorCode::NO_AVAILABLE_HANDLE)?;
    server.master.check_inventory_complete(segment)?;
    Ok(ObjectChangesReply { epoch, ..reply })
}

fn inventory(
    server: &MasterServer,
    now_ms: u64,
    arguments: &InventoryArguments<&str>,
    fx: &mut FactRecorder,
) -> Result<InventoryReply, ErrorCode> {
    let epoch = server.raise_epoch(arguments.epoch);
    let segment = ClientSegment { segment: arguments.segment_id, client: arguments.client_id };
    let mut reply = InventoryReply { accepted: 1, epoch, outcomes: Vec::new() };
    match arguments.step {
        step::ANNOUNCE => {
            reply.accepted = u64::from(server.master.announce_inventory(now_ms, arguments.segment_id));
        }
        step::RECORDS => {
            let records: Vec<InventoryRecord<'_>> =
                (0..arguments.keys.len()).filter_map(|index| record(arguments, index)).collect();
            let outcomes = server.master.restore_inventory(now_ms, segment, &records, fx)?;
            let number =
                |outcome| RestoreOutcome::ALL.iter().position(|candidate| *candidate == outcome).unwrap_or(0);
            reply.outcomes = outcomes.into_iter().map(|outcome| number(outcome) as u64).collect();
        }
        step::FINISH => {
            server.master.finish_inventory(segment)?;
            let counts = server.master.restore_counts();
            let refused: u64 =
                counts.iter().filter(|(outcome, _)| !outcome.is_accepted()).map(|(_, count)| count).sum();
            tracing::info!(
                segment = %arguments.segment_id,
                restored = counts[0].1,
                merged = counts[1].1,
                refused,
                "received a node's inventory; counts include all nodes"
            );
        }
        _ => return Err(ErrorCode::INVALID_PARAMS),
    }
    Ok(reply)
}

fn record<'a>(arguments: &InventoryArguments<&'a str>, index: usize) -> Option<InventoryRecord<'a>> {
    let flags = *arguments.flags.get(index)?;
    Some(InventoryRecord {
        tenant: arguments.tenants.get(index)?,
        key: arguments.keys.get(index)?,
        group: arguments.groups.get(index)?,
        offset: *arguments.offsets.get(index)?,
        size: *arguments.sizes.get(index)?,
        version: ObjectVersion {
            epoch: *arguments.epochs.get(index)?,
            sequence: *arguments.sequences.get(index)?,
        },
        checksum: arguments.checksums.get(index).copied().filter(|_| flags & HAS_CHECKSUM != 0),
        hard_pin: flags & HARD_PIN != 0,
        crc: u32::try_from(*arguments.crcs.get(index)?).ok()?,
    })
}
