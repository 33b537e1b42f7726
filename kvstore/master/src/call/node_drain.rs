//! Moongate's RPC of a node that is about to be removed.

use mooncake_wire::frame::RpcFault;
use mooncake_wire::node_drain::{NodeDrainArguments, encode_reply};

use super::ExtensionCall;

/// Handles a node's request that its objects be moved to other nodes, or that they stay.
///
/// # Errors
/// The fault to reply with.
pub(super) fn handle(call: ExtensionCall<'_>, arguments: NodeDrainArguments) -> Result<(), RpcFault> {
    let NodeDrainArguments { client_id, is_cancelled } = arguments;
    let master = &call.server.master;
    let reply = match is_cancelled {
        true => master.cancel_node_drain(call.now_ms, client_id, call.effects).map(|()| 0),
        false => master.drain_node(call.now_ms, client_id, call.effects),
    };
    encode_reply(call.sequence, reply, call.out).map_err(|_| RpcFault::invalid_argument())
}
