//! RPCs of Moongate's nodes and masters, in addition to Mooncake's, by which a master that has lost its log restores objects: a node
//! sends its inventory, and polls which objects its segments contain. A master without these functions responds with the fault
//! `NOT_REGISTERED`, and the node continues without them.

mod object_changes;

use std::sync::LazyLock;

use bytes::BytesMut;

use crate::dialect::Dialect;
use crate::frame::{self, RequestHeader, ResponseHeader, RpcFault};
use crate::pack::{self, Pack, PackError, TypeSignature, UnpackError, arguments, layout};
use crate::rpc::MasterResult;
use crate::types::Uuid;

pub use object_changes::{ObjectChangesArguments, ObjectChangesReply, ReportedObjectChange, change};

const DIALECT: Dialect = Dialect::NEWEST;

/// Object flag: the object has a checksum.
pub const HAS_CHECKSUM: u64 = 1;
/// Object flag: the object is excluded from eviction.
pub const HARD_PIN: u64 = 2;

pub mod step {
    /// The node will mount the segment and then send its inventory.
    pub const ANNOUNCE: u64 = 0;
    /// One batch of the inventory.
    pub const RECORDS: u64 = 1;
    pub const FINISH: u64 = 2;
}

/// One batch of a segment's inventory. All lists have the same length.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InventoryArguments<S> {
    pub client_id: Uuid,
    pub segment_id: Uuid,
    /// Step of the inventory, see [`step`].
    pub step: u64,
    /// Highest master epoch in the node's records.
    pub epoch: u64,
    pub tenants: Vec<S>,
    pub keys: Vec<S>,
    /// Groups of objects; empty for none.
    pub groups: Vec<S>,
    /// Offsets of objects in the segment.
    pub offsets: Vec<u64>,
    /// Sizes of objects in bytes.
    pub sizes: Vec<u64>,
    /// Epochs of the objects' versions.
    pub epochs: Vec<u64>,
    /// Numbers of the objects' versions within the epoch.
    pub sequences: Vec<u64>,
    /// Checksums that the writers supplied.
    pub checksums: Vec<u64>,
    /// CRC-32C of the objects' bytes.
    pub crcs: Vec<u64>,
    /// Object flags: [`HAS_CHECKSUM`] and [`HARD_PIN`].
    pub flags: Vec<u64>,
}

arguments! {
    InventoryArguments<S> {
        client_id, segment_id, step, epoch, tenants, keys, groups, offsets, sizes, epochs, sequences, checksums,
        crcs, flags
    }
}

/// The response to one batch of an inventory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InventoryReply {
    /// Whether the master accepts the inventory: 1 or 0.
    pub accepted: u64,
    pub epoch: u64,
    /// Outcome per record, as the number of the master's `RestoreOutcome`.
    pub outcomes: Vec<u64>,
}

layout! { InventoryReply { accepted, epoch, outcomes } }

struct InventorySignatures {
    inventory_id: u32,
    inventory: TypeSignature,
    inventory_reply: TypeSignature,
}

static SIGNATURES: LazyLock<InventorySignatures> = LazyLock::new(|| InventorySignatures {
    inventory_id: pack::md5_prefix(b"moongate::Master::Inventory"),
    inventory: TypeSignature::of::<InventoryArguments<&str>>(DIALECT),
    inventory_reply: TypeSignature::of::<MasterResult<InventoryReply>>(DIALECT),
});

/// A request of either RPC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InventoryRequest<'a> {
    /// One batch of an inventory.
    Inventory(Box<InventoryArguments<&'a str>>),
    Changes(ObjectChangesArguments),
}

impl<'a> InventoryRequest<'a> {
    /// Decodes a request; `None` if it is for another function.
    ///
    /// # Errors
    /// The fault to respond with.
    pub fn decode(function_id: u32, body: &'a [u8]) -> Result<Option<Self>, RpcFault> {
        let malformed = |_| RpcFault::invalid_argument();
        if let Some(decoded) = ObjectChangesArguments::decode(function_id, body) {
            return decoded.map(|arguments| Some(Self::Changes(arguments))).map_err(malformed);
        }
        if function_id != SIGNATURES.inventory_id {
            return Ok(None);
        }
        let batch: InventoryArguments<&str> =
            pack::decode(body, &SIGNATURES.inventory, DIALECT).map_err(malformed)?;
        let InventoryArguments { offsets, sizes, epochs, sequences, checksums, crcs, flags, .. } = &batch;
        let numbers = [offsets, sizes, epochs, sequences, checksums, crcs, flags];
        let texts = [&batch.tenants, &batch.groups];
        let count = batch.keys.len();
        let fits =
            numbers.iter().all(|list| list.len() == count) && texts.iter().all(|list| list.len() == count);
        if fits { Ok(Some(Self::Inventory(Box::new(batch)))) } else { Err(RpcFault::invalid_argument()) }
    }
}

impl<S: Pack> InventoryArguments<S> {
    /// Appends a frame with this request.
    ///
    /// # Errors
    /// When it exceeds the size of a frame. Then nothing is appended.
    pub fn encode(&self, sequence: u32, out: &mut BytesMut) -> Result<(), PackError> {
        let header = RequestHeader { sequence, function_id: SIGNATURES.inventory_id };
        frame::write_request(out, header, |out| pack::encode(self, &SIGNATURES.inventory, DIALECT, out))
    }
}

impl InventoryReply {
    /// Appends the reply.
    ///
    /// # Errors
    /// When it exceeds the size of a frame. Then nothing is appended.
    pub fn encode(reply: &MasterResult<Self>, sequence: u32, out: &mut BytesMut) -> Result<(), PackError> {
        frame::write_response(out, ResponseHeader { sequence, error: 0 }, |out| {
            pack::encode(reply, &SIGNATURES.inventory_reply, DIALECT, out)
        })
    }

    /// Reads the reply.
    ///
    /// # Errors
    /// When the body is not such a reply.
    pub fn decode(body: &[u8]) -> Result<MasterResult<Self>, UnpackError> {
        pack::decode(body, &SIGNATURES.inventory_reply, DIALECT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::FrameParseResult;

    #[test]
    fn requests_and_replies_round_trip() {
        let arguments = InventoryArguments {
            client_id: Uuid { first: 1, second: 2 },
            step: step::RECORDS,
            epoch: 9,
            tenants: vec!["t"],
            keys: vec!["k"],
            groups: vec![""],
            offsets: vec![1],
            sizes: vec![2],
            epochs: vec![3],
            sequences: vec![4],
            checksums: vec![5],
            crcs: vec![6],
            flags: vec![HARD_PIN],
            ..InventoryArguments::default()
        };
        let mut out = BytesMut::new();
        arguments.encode(7, &mut out).unwrap();
        let Ok(FrameParseResult::Frame(frame)) = frame::parse::<RequestHeader>(&out, 1 << 20) else {
            panic!()
        };
        let function = frame.header.function_id;
        let decoded = InventoryRequest::decode(function, frame.body);
        assert_eq!(decoded, Ok(Some(InventoryRequest::Inventory(Box::new(arguments.clone())))));
        assert_eq!(InventoryRequest::decode(1, frame.body), Ok(None));
        assert_eq!(InventoryRequest::decode(function, &frame.body[1..]), Err(RpcFault::invalid_argument()));
        let mut uneven = BytesMut::new();
        InventoryArguments { crcs: vec![], ..arguments }.encode(7, &mut uneven).unwrap();
        let Ok(FrameParseResult::Frame(frame)) = frame::parse::<RequestHeader>(&uneven, 1 << 20) else {
            panic!()
        };
        assert_eq!(InventoryRequest::decode(function, frame.body), Err(RpcFault::invalid_argument()));

        let poll = ObjectChangesArguments { token: 3, ..ObjectChangesArguments::default() };
        let mut out = BytesMut::new();
        poll.encode(7, &mut out).unwrap();
        let Ok(FrameParseResult::Frame(frame)) = frame::parse::<RequestHeader>(&out, 1 << 20) else {
            panic!()
        };
        let decoded = InventoryRequest::decode(frame.header.function_id, frame.body);
        assert_eq!(decoded, Ok(Some(InventoryRequest::Changes(poll))));

        let reply = InventoryReply { accepted: 1, epoch: 2, outcomes: vec![0, 7] };
        let mut out = BytesMut::new();
        InventoryReply::encode(&Ok(reply.clone()), 7, &mut out).unwrap();
        let Ok(FrameParseResult::Frame(frame)) = frame::parse::<ResponseHeader>(&out, 1 << 20) else {
            panic!()
        };
        assert_eq!(InventoryReply::decode(frame.body), Ok(Ok(reply)));
    }
}
