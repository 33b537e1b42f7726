//! RPCs between nodes and masters of ours, beside Mooncake's, by which a master that has lost its log gets back what its nodes hold:
//! a node offers its inventory, and it polls which objects lie in its segments. A master that does not have the functions answers
//! with the fault `NOT_REGISTERED`, and the node continues without it.

use std::sync::LazyLock;

use bytes::BytesMut;

use crate::dialect::Dialect;
use crate::frame::{self, RequestHeader, ResponseHeader, RpcFault};
use crate::pack::{self, Pack, PackError, TypeSignature, UnpackError, WireString, arguments, layout};
use crate::rpc::MasterResult;
use crate::types::Uuid;

const DIALECT: Dialect = Dialect::NEWEST;

/// A flag of an object: it has a checksum.
pub const HAS_CHECKSUM: u64 = 1;
/// A flag of an object: it is never evicted.
pub const HARD_PIN: u64 = 2;

/// What an inventory request is about.
pub mod step {
    /// The node will mount the segment, and then offer what it holds.
    pub const ANNOUNCE: u64 = 0;
    /// A part of the inventory.
    pub const RECORDS: u64 = 1;
    /// All has been offered.
    pub const FINISH: u64 = 2;
}

/// What a change of a segment is.
pub mod change {
    /// A complete object lies there.
    pub const STORED: u64 = 0;
    /// The range belongs to it no more.
    pub const VACATED: u64 = 1;
}

/// A part of a segment's inventory. All lists have the same length.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InventoryArguments<S> {
    /// The segment's owner.
    pub client_id: Uuid,
    /// The segment.
    pub segment_id: Uuid,
    /// See [`step`].
    pub step: u64,
    /// The highest epoch of a master that the node has records of.
    pub epoch: u64,
    /// Tenants.
    pub tenants: Vec<S>,
    /// Keys.
    pub keys: Vec<S>,
    /// Groups; empty for none.
    pub groups: Vec<S>,
    /// Where objects begin in the segment.
    pub offsets: Vec<u64>,
    /// Their sizes.
    pub sizes: Vec<u64>,
    /// The epochs of their versions.
    pub epochs: Vec<u64>,
    /// The numbers of their versions within the epoch.
    pub sequences: Vec<u64>,
    /// The writers' checksums.
    pub checksums: Vec<u64>,
    /// CRC-32C of their bytes.
    pub crcs: Vec<u64>,
    /// [`HAS_CHECKSUM`] and [`HARD_PIN`].
    pub flags: Vec<u64>,
}

arguments! {
    InventoryArguments<S> {
        client_id, segment_id, step, epoch, tenants, keys, groups, offsets, sizes, epochs, sequences, checksums,
        crcs, flags
    }
}

/// The answer to a part of an inventory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InventoryReply {
    /// Whether the master accepts the inventory: 1 or 0.
    pub accepted: u64,
    /// The master's epoch.
    pub epoch: u64,
    /// What became of each object that was offered, as numbers of the master's outcomes.
    pub outcomes: Vec<u64>,
}

layout! { InventoryReply { accepted, epoch, outcomes } }

/// Polls what has changed in a segment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObjectChangesArguments {
    /// The segment's owner.
    pub client_id: Uuid,
    /// The segment.
    pub segment_id: Uuid,
    /// The token of the last reply. With any other the master begins with all objects of the segment.
    pub token: u64,
    /// The highest epoch of a master that the node has records of.
    pub epoch: u64,
}

arguments! { ObjectChangesArguments { client_id, segment_id, token, epoch } }

/// Changes in their order. All lists have the same length.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObjectChangesReply<S> {
    /// For the next poll.
    pub token: u64,
    /// The master's epoch.
    pub epoch: u64,
    /// 1 if this begins with all objects of the segment: what is not reported until `caught_up` is not there.
    pub is_full: u64,
    /// 1 if there were no more changes when this was written.
    pub caught_up: u64,
    /// See [`change`].
    pub kinds: Vec<u64>,
    /// Where objects begin in the segment.
    pub offsets: Vec<u64>,
    /// Numbers of the replicas.
    pub sequences: Vec<u64>,
    /// Sizes.
    pub sizes: Vec<u64>,
    /// The writers' checksums.
    pub checksums: Vec<u64>,
    /// [`HAS_CHECKSUM`] and [`HARD_PIN`].
    pub flags: Vec<u64>,
    /// Tenants.
    pub tenants: Vec<S>,
    /// Keys.
    pub keys: Vec<S>,
    /// Groups; empty for none.
    pub groups: Vec<S>,
}

layout! {
    ObjectChangesReply<S> {
        token, epoch, is_full, caught_up, kinds, offsets, sequences, sizes, checksums, flags, tenants, keys, groups
    }
}

struct InventorySignatures {
    inventory_id: u32,
    inventory: TypeSignature,
    inventory_reply: TypeSignature,
    changes_id: u32,
    changes: TypeSignature,
    changes_reply: TypeSignature,
}

static SIGNATURES: LazyLock<InventorySignatures> = LazyLock::new(|| InventorySignatures {
    inventory_id: pack::md5_prefix(b"moongate::Master::Inventory"),
    inventory: TypeSignature::of::<InventoryArguments<&str>>(DIALECT),
    inventory_reply: TypeSignature::of::<MasterResult<InventoryReply>>(DIALECT),
    changes_id: pack::md5_prefix(b"moongate::Master::ObjectChanges"),
    changes: TypeSignature::of::<ObjectChangesArguments>(DIALECT),
    changes_reply: TypeSignature::of::<MasterResult<ObjectChangesReply<&str>>>(DIALECT),
});

/// A request of either kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InventoryRequest<'a> {
    /// A part of an inventory.
    Inventory(Box<InventoryArguments<&'a str>>),
    /// A poll.
    Changes(ObjectChangesArguments),
}

impl<'a> InventoryRequest<'a> {
    /// Reads a request, if it is one of these; nothing if it is another.
    ///
    /// # Errors
    /// The fault to be answered.
    pub fn decode(function_id: u32, body: &'a [u8]) -> Result<Option<Self>, RpcFault> {
        let malformed = |_| RpcFault::invalid_argument();
        if function_id == SIGNATURES.changes_id {
            return pack::decode(body, &SIGNATURES.changes, DIALECT)
                .map(|it| Some(Self::Changes(it)))
                .map_err(malformed);
        }
        if function_id != SIGNATURES.inventory_id {
            return Ok(None);
        }
        let it: InventoryArguments<&str> =
            pack::decode(body, &SIGNATURES.inventory, DIALECT).map_err(malformed)?;
        let numbers = [&it.offsets, &it.sizes, &it.epochs, &it.sequences, &it.checksums, &it.crcs, &it.flags];
        let texts = [&it.tenants, &it.groups];
        let count = it.keys.len();
        let fits =
            numbers.iter().all(|list| list.len() == count) && texts.iter().all(|list| list.len() == count);
        if fits { Ok(Some(Self::Inventory(Box::new(it)))) } else { Err(RpcFault::invalid_argument()) }
    }
}

impl<S: Pack> InventoryArguments<S> {
    /// Appends a frame with this request.
    ///
    /// # Errors
    /// When it does not fit into a frame. Then nothing is appended.
    pub fn encode(&self, sequence: u32, out: &mut BytesMut) -> Result<(), PackError> {
        let header = RequestHeader { sequence, function_id: SIGNATURES.inventory_id };
        frame::write_request(out, header, |out| pack::encode(self, &SIGNATURES.inventory, DIALECT, out))
    }
}

impl ObjectChangesArguments {
    /// Appends a frame with this request.
    ///
    /// # Errors
    /// When it does not fit into a frame. Then nothing is appended.
    pub fn encode(&self, sequence: u32, out: &mut BytesMut) -> Result<(), PackError> {
        let header = RequestHeader { sequence, function_id: SIGNATURES.changes_id };
        frame::write_request(out, header, |out| pack::encode(self, &SIGNATURES.changes, DIALECT, out))
    }
}

impl InventoryReply {
    /// Appends the reply.
    ///
    /// # Errors
    /// When it does not fit into a frame. Then nothing is appended.
    pub fn encode(reply: &MasterResult<Self>, sequence: u32, out: &mut BytesMut) -> Result<(), PackError> {
        frame::write_response(out, ResponseHeader { sequence, error: 0 }, |out| {
            pack::encode(reply, &SIGNATURES.inventory_reply, DIALECT, out)
        })
    }

    /// Reads the reply.
    ///
    /// # Errors
    /// When it is none.
    pub fn decode(body: &[u8]) -> Result<MasterResult<Self>, UnpackError> {
        pack::decode(body, &SIGNATURES.inventory_reply, DIALECT)
    }
}

impl<S: Pack> ObjectChangesReply<S> {
    /// Appends the reply.
    ///
    /// # Errors
    /// When it does not fit into a frame. Then nothing is appended.
    pub fn encode(reply: &MasterResult<Self>, sequence: u32, out: &mut BytesMut) -> Result<(), PackError> {
        frame::write_response(out, ResponseHeader { sequence, error: 0 }, |out| {
            pack::encode(reply, &SIGNATURES.changes_reply, DIALECT, out)
        })
    }
}

impl<'a, S: WireString<'a>> ObjectChangesReply<S> {
    /// Reads the reply.
    ///
    /// # Errors
    /// When it is none, or its lists have different lengths.
    pub fn decode(body: &'a [u8]) -> Result<MasterResult<Self>, UnpackError> {
        pack::decode(body, &SIGNATURES.changes_reply, DIALECT)
    }

    /// Whether all lists have the same length.
    pub fn is_well_formed(&self) -> bool {
        let count = self.keys.len();
        let numbers =
            [&self.kinds, &self.offsets, &self.sequences, &self.sizes, &self.checksums, &self.flags];
        numbers.iter().all(|list| list.len() == count)
            && self.tenants.len() == count
            && self.groups.len() == count
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::FrameParseResult;

    #[test]
    fn requests_and_replies_come_through() {
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
        let mut odd = BytesMut::new();
        InventoryArguments { crcs: vec![], ..arguments }.encode(7, &mut odd).unwrap();
        let Ok(FrameParseResult::Frame(frame)) = frame::parse::<RequestHeader>(&odd, 1 << 20) else {
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

        let reply = ObjectChangesReply { token: 4, keys: vec!["k"], ..ObjectChangesReply::default() };
        let mut out = BytesMut::new();
        ObjectChangesReply::encode(&Ok(reply.clone()), 7, &mut out).unwrap();
        let Ok(FrameParseResult::Frame(frame)) = frame::parse::<ResponseHeader>(&out, 1 << 20) else {
            panic!()
        };
        let decoded = ObjectChangesReply::<&str>::decode(frame.body).unwrap().unwrap();
        assert!(decoded == reply && !decoded.is_well_formed());
        let reply = InventoryReply { accepted: 1, epoch: 2, outcomes: vec![0, 7] };
        let mut out = BytesMut::new();
        InventoryReply::encode(&Ok(reply.clone()), 7, &mut out).unwrap();
        let Ok(FrameParseResult::Frame(frame)) = frame::parse::<ResponseHeader>(&out, 1 << 20) else {
            panic!()
        };
        assert_eq!(InventoryReply::decode(frame.body), Ok(Ok(reply)));
    }
}
