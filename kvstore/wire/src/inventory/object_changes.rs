//! The RPC by which a node polls which objects its segments contain.

use std::sync::LazyLock;

use bytes::BytesMut;

use super::DIALECT;
use crate::frame::{self, RequestHeader, ResponseHeader};
use crate::pack::{self, Pack, PackError, TypeSignature, UnpackError, WireString, arguments, layout};
use crate::rpc::MasterResult;
use crate::types::Uuid;

/// Kinds of changes of a segment's contents.
pub mod change {
    /// A complete replica occupies the range.
    pub const STORED: u64 = 0;
    /// The replica has vacated the range.
    pub const VACATED: u64 = 1;
}

/// Polls changes of a segment's contents.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObjectChangesArguments {
    pub client_id: Uuid,
    pub segment_id: Uuid,
    /// Token of the last reply. With any other token the master starts with all objects of the segment.
    pub token: u64,
    /// Highest master epoch in the node's records.
    pub epoch: u64,
}

arguments! { ObjectChangesArguments { client_id, segment_id, token, epoch } }

/// Changes of a segment's contents, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObjectChangesReply<S> {
    /// Token for the next poll.
    pub token: u64,
    pub epoch: u64,
    /// Whether this starts with all objects of the segment: objects not listed until `caught_up` are absent.
    pub is_full: bool,
    /// Whether no further changes were pending when this was written.
    pub caught_up: bool,
    pub changes: Vec<ReportedObjectChange<S>>,
}

/// One change in an [`ObjectChangesReply`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReportedObjectChange<S> {
    /// Kind of the change, see [`change`].
    pub kind: u64,
    /// Offset of the object in the segment.
    pub offset: u64,
    /// Number of the replica within the epoch.
    pub sequence: u64,
    pub size: u64,
    /// Checksum that the writer supplied.
    pub checksum: u64,
    /// Object flags: [`HAS_CHECKSUM`](super::HAS_CHECKSUM) and [`HARD_PIN`](super::HARD_PIN).
    pub flags: u64,
    pub tenant: S,
    pub key: S,
    /// Group of the object; empty for none.
    pub group: S,
}

/// The reply as packed: one list per member of the changes.
struct PackedObjectChanges<S> {
    token: u64,
    epoch: u64,
    is_full: u64,
    caught_up: u64,
    kinds: Vec<u64>,
    offsets: Vec<u64>,
    sequences: Vec<u64>,
    sizes: Vec<u64>,
    checksums: Vec<u64>,
    flags: Vec<u64>,
    tenants: Vec<S>,
    keys: Vec<S>,
    groups: Vec<S>,
}

layout! {
    PackedObjectChanges<S> {
        token, epoch, is_full, caught_up, kinds, offsets, sequences, sizes, checksums, flags, tenants, keys, groups
    }
}

struct ObjectChangesSignatures {
    function_id: u32,
    arguments: TypeSignature,
    reply: TypeSignature,
}

static SIGNATURES: LazyLock<ObjectChangesSignatures> = LazyLock::new(|| ObjectChangesSignatures {
    function_id: pack::md5_prefix(b"moongate::Master::ObjectChanges"),
    arguments: TypeSignature::of::<ObjectChangesArguments>(DIALECT),
    reply: TypeSignature::of::<MasterResult<PackedObjectChanges<&str>>>(DIALECT),
});

impl ObjectChangesArguments {
    /// Decodes the arguments; `None` if the request is for another function.
    pub(super) fn decode(function_id: u32, body: &[u8]) -> Option<Result<Self, UnpackError>> {
        (function_id == SIGNATURES.function_id).then(|| pack::decode(body, &SIGNATURES.arguments, DIALECT))
    }

    /// Appends a frame with this request.
    ///
    /// # Errors
    /// When it exceeds the size of a frame. Then nothing is appended.
    pub fn encode(&self, sequence: u32, out: &mut BytesMut) -> Result<(), PackError> {
        let header = RequestHeader { sequence, function_id: SIGNATURES.function_id };
        frame::write_request(out, header, |out| pack::encode(self, &SIGNATURES.arguments, DIALECT, out))
    }
}

impl<S: Pack> ObjectChangesReply<S> {
    /// Appends the reply.
    ///
    /// # Errors
    /// When it exceeds the size of a frame. Then nothing is appended.
    pub fn encode(reply: MasterResult<Self>, sequence: u32, out: &mut BytesMut) -> Result<(), PackError> {
        let packed = reply.map(PackedObjectChanges::new);
        frame::write_response(out, ResponseHeader { sequence, error: 0 }, |out| {
            pack::encode(&packed, &SIGNATURES.reply, DIALECT, out)
        })
    }
}

impl<'a, S: WireString<'a>> ObjectChangesReply<S> {
    /// Reads the reply.
    ///
    /// # Errors
    /// When the body is not such a reply, or its lists have different lengths.
    pub fn decode(body: &'a [u8]) -> Result<MasterResult<Self>, UnpackError> {
        let packed: MasterResult<PackedObjectChanges<S>> = pack::decode(body, &SIGNATURES.reply, DIALECT)?;
        match packed {
            Ok(packed) => packed.unpack().map(Ok),
            Err(code) => Ok(Err(code)),
        }
    }
}

impl<S> PackedObjectChanges<S> {
    fn new(reply: ObjectChangesReply<S>) -> Self {
        let ObjectChangesReply { token, epoch, is_full, caught_up, changes } = reply;
        let list = |member: fn(&ReportedObjectChange<S>) -> u64| changes.iter().map(member).collect();
        let mut packed = Self {
            token,
            epoch,
            is_full: u64::from(is_full),
            caught_up: u64::from(caught_up),
            kinds: list(|change| change.kind),
            offsets: list(|change| change.offset),
            sequences: list(|change| change.sequence),
            sizes: list(|change| change.size),
            checksums: list(|change| change.checksum),
            flags: list(|change| change.flags),
            tenants: Vec::with_capacity(changes.len()),
            keys: Vec::with_capacity(changes.len()),
            groups: Vec::with_capacity(changes.len()),
        };
        for change in changes {
            packed.tenants.push(change.tenant);
            packed.keys.push(change.key);
            packed.groups.push(change.group);
        }
        packed
    }

    fn unpack(self) -> Result<ObjectChangesReply<S>, UnpackError> {
        let count = self.keys.len();
        let numbers =
            [&self.kinds, &self.offsets, &self.sequences, &self.sizes, &self.checksums, &self.flags];
        let texts = [&self.tenants, &self.groups];
        if numbers.iter().any(|list| list.len() != count) || texts.iter().any(|list| list.len() != count) {
            return Err(UnpackError::UnequalLists);
        }
        let texts = self.tenants.into_iter().zip(self.keys).zip(self.groups);
        let places = self.offsets.into_iter().zip(self.sizes).zip(self.sequences);
        let marks = self.kinds.into_iter().zip(self.checksums).zip(self.flags);
        let changes = texts.zip(places).zip(marks).map(
            |((((tenant, key), group), ((offset, size), sequence)), ((kind, checksum), flags))| {
                ReportedObjectChange { kind, offset, sequence, size, checksum, flags, tenant, key, group }
            },
        );
        Ok(ObjectChangesReply {
            token: self.token,
            epoch: self.epoch,
            is_full: self.is_full > 0,
            caught_up: self.caught_up > 0,
            changes: changes.collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::FrameParseResult;
    use crate::inventory::HARD_PIN;

    /// Decodes a reply with these packed lists.
    fn decode_changes(
        packed: PackedObjectChanges<&str>,
    ) -> Result<MasterResult<ObjectChangesReply<String>>, UnpackError> {
        let mut body = BytesMut::new();
        let reply: MasterResult<_> = Ok(packed);
        pack::encode(&reply, &SIGNATURES.reply, DIALECT, &mut body).unwrap();
        ObjectChangesReply::decode(&body)
    }

    #[test]
    fn object_changes_round_trip_and_unequal_lists_are_rejected() {
        let change = |number: u64| ReportedObjectChange {
            kind: change::VACATED,
            offset: number,
            sequence: number + 1,
            size: number + 2,
            checksum: number + 3,
            flags: HARD_PIN,
            tenant: "t",
            key: "k",
            group: "g",
        };
        let changes = vec![change(10), change(20)];
        let reply = ObjectChangesReply { token: 4, epoch: 5, is_full: true, caught_up: false, changes };
        let mut out = BytesMut::new();
        ObjectChangesReply::encode(Ok(reply.clone()), 7, &mut out).unwrap();
        let Ok(FrameParseResult::Frame(frame)) = frame::parse::<ResponseHeader>(&out, 1 << 20) else {
            panic!()
        };
        assert_eq!(ObjectChangesReply::decode(frame.body), Ok(Ok(reply.clone())));

        let mut packed = PackedObjectChanges::new(reply.clone());
        packed.flags.pop();
        assert_eq!(decode_changes(packed), Err(UnpackError::UnequalLists));
        let mut packed = PackedObjectChanges::new(reply);
        packed.groups.pop();
        assert_eq!(decode_changes(packed), Err(UnpackError::UnequalLists));
    }
}
