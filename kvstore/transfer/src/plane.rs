//! Wire format of the data plane.
//!
//! A request starts with a header of 24 bytes (little-endian): size, address, operation, and seven bytes that only the mapped protocol uses.
//!
//! | protocol | WRITE | READ |
//! |---|---|---|
//! | v1 | header, body; no response | header → body |
//! | v2 | header, body → status | header → status, body |
//! | checked | header, body, checksum → status | header → status, body, checksum |
//! | mapped | header → status; checksum → status | header → status, checksum |
//!
//! A status is eight bytes: a four-byte code and the four bytes `VTCM`. V1 has no status: it reports a rejection by closing the connection.
//! The checked protocol is Moongate's extension, used between nodes and clients that announce it in their descriptors. Its checksum is the
//! body's CRC-32C in four bytes, followed by four zero bytes.
//!
//! The mapped protocol is for a client on the same host that has mapped the node's memory ([`crate::shared`]): it copies the body itself,
//! after the first status. Its header ends with the id of the mapping. The checksum of a read is the one recorded at write time, that of a
//! write may be missing (then all of its bytes are set), and the second status follows only if the first is `Ok`, not `OkWithoutReceipt`.
//!
//! TLS is a Moongate extension too. Over TLS only the checked protocol is allowed, each header is followed by the transfer's
//! [capability](mooncake_wire::capability), and rejections have their own status codes.

use mooncake_wire::capability::CapabilityError;

/// Bytes of a request header.
pub const HEADER: usize = 24;
/// Bytes of a status, and of a padded checksum.
pub const STATUS: usize = 8;
/// Magic number in the upper half of every status.
const MARK: u32 = 0x4d43_5456;
/// Operation flag of v2 and of the checked protocol.
const V2: u8 = 0x80;
/// Operation flag of the checked and the mapped protocol.
const CHECKED: u8 = 0x40;
/// Operation flag of the mapped protocol.
const MAPPED: u8 = 0x20;
/// The place of a mapping's id in a header.
const MAPPING: std::ops::Range<usize> = 17..HEADER;
/// A missing checksum.
pub const NO_CHECKSUM: [u8; STATUS] = [0xff; STATUS];
/// Status code of the first [`CapabilityError`]; the others follow.
const REFUSED: u32 = 16;
const READ: u8 = 0;
const WRITE: u8 = 1;

/// Version of the data plane protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TransferProtocol {
    /// Mooncake's protocol before 0.3.13: no acknowledgements.
    V1,
    /// Mooncake's protocol with status frames.
    V2,
    /// V2 with checksums, between Moongate's own nodes and clients.
    Checked,
    /// Requests without bodies, from a client that has mapped the memory.
    Mapped(MappingId),
}

/// Id of a segment's memory in a node process, sent with each transfer through it, so that a mapping of other memory is never used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct MappingId(u64);

impl std::fmt::Display for MappingId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:014x}", self.0)
    }
}

impl MappingId {
    /// The id with the lower 56 bits of this number.
    #[must_use]
    pub fn new(number: u64) -> Self {
        Self(number & (u64::MAX >> 8))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TransferOperation {
    /// The client reads the node's memory.
    Read,
    /// The client writes the node's memory.
    Write,
}

/// The header of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferHeader {
    /// Length of the body in bytes.
    pub size: u64,
    /// Address of the first byte in the server's memory.
    pub address: u64,
    pub operation: TransferOperation,
    pub protocol: TransferProtocol,
}

/// The operation code of a header is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown operation {0:#04x}")]
pub struct UnknownOperationError(pub u8);

impl TransferHeader {
    /// Encodes the header for the wire.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        let protocol = match self.protocol {
            TransferProtocol::V1 => 0,
            TransferProtocol::V2 => V2,
            TransferProtocol::Checked => V2 | CHECKED,
            TransferProtocol::Mapped(_) => V2 | CHECKED | MAPPED,
        };
        let operation = match self.operation {
            TransferOperation::Read => READ,
            TransferOperation::Write => WRITE,
        };
        let (size, rest) = bytes.split_at_mut(8);
        size.copy_from_slice(&self.size.to_le_bytes());
        let (address, rest) = rest.split_at_mut(8);
        address.copy_from_slice(&self.address.to_le_bytes());
        if let [first, ..] = rest {
            *first = protocol | operation;
        }
        if let TransferProtocol::Mapped(MappingId(id)) = self.protocol {
            bytes[MAPPING].copy_from_slice(&id.to_le_bytes()[..MAPPING.len()]);
        }
        bytes
    }

    /// Parses a header. Size and address are not validated.
    ///
    /// # Errors
    /// [`UnknownOperationError`].
    pub fn decode(bytes: &[u8; HEADER]) -> Result<Self, UnknownOperationError> {
        let number = |offset: usize| {
            let mut number = [0; 8];
            number.copy_from_slice(&bytes[offset..offset + 8]);
            u64::from_le_bytes(number)
        };
        let code = bytes[16];
        const CHECKED_V2: u8 = V2 | CHECKED;
        const MAPPED_V2: u8 = V2 | CHECKED | MAPPED;
        let protocol = match code & MAPPED_V2 {
            0 => TransferProtocol::V1,
            V2 => TransferProtocol::V2,
            CHECKED_V2 => TransferProtocol::Checked,
            // The id, below the operation.
            MAPPED_V2 => TransferProtocol::Mapped(MappingId::new(number(16) >> 8)),
            _ => return Err(UnknownOperationError(code)),
        };
        let operation = match code & !MAPPED_V2 {
            READ => TransferOperation::Read,
            WRITE => TransferOperation::Write,
            _ => return Err(UnknownOperationError(code)),
        };
        Ok(Self { size: number(0), address: number(8), operation, protocol })
    }
}

/// Result of a request as sent by the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransferStatus {
    Ok,
    /// The range is not accessible memory. The server closes the connection.
    Rejected,
    /// Moongate: the body does not match its checksum.
    Damaged,
    /// Moongate: as `Ok`, for a write through mapped memory that gets no second status.
    OkWithoutReceipt,
    /// Moongate: the capability does not allow the transfer. The server closes the connection.
    Refused(CapabilityError),
    /// A code that no known release sends.
    Other(u32),
}

/// The eight bytes are not a status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:#018x} is not a transfer status")]
pub struct InvalidStatusError(pub u64);

impl TransferStatus {
    /// Encodes the status for the wire.
    #[must_use]
    pub fn encode(self) -> [u8; STATUS] {
        (u64::from(MARK) << 32 | u64::from(self.code())).to_le_bytes()
    }

    /// The code of the status on the wire.
    pub(crate) fn code(self) -> u32 {
        match self {
            Self::Ok => 0,
            Self::Rejected => 1,
            Self::Damaged => 2,
            Self::OkWithoutReceipt => 3,
            Self::Refused(refusal) => refusal_code(refusal),
            Self::Other(code) => code,
        }
    }

    /// Parses a status frame.
    ///
    /// # Errors
    /// [`InvalidStatusError`].
    pub fn decode(bytes: [u8; STATUS]) -> Result<Self, InvalidStatusError> {
        let number = u64::from_le_bytes(bytes);
        if number >> 32 != u64::from(MARK) {
            return Err(InvalidStatusError(number));
        }
        // The code is the lower half.
        Ok(match number as u32 {
            0 => Self::Ok,
            1 => Self::Rejected,
            2 => Self::Damaged,
            3 => Self::OkWithoutReceipt,
            code => match CapabilityError::ALL.into_iter().find(|refusal| refusal_code(*refusal) == code) {
                Some(refusal) => Self::Refused(refusal),
                None => Self::Other(code),
            },
        })
    }
}

fn refusal_code(refusal: CapabilityError) -> u32 {
    REFUSED
        + match refusal {
            CapabilityError::InvalidSignature => 0,
            CapabilityError::Expired => 1,
            CapabilityError::OutOfRange => 2,
            CapabilityError::WrongOperation => 3,
        }
}

/// Encodes the checksum that follows a body in the checked protocol.
#[must_use]
pub fn trailer(crc: u32) -> [u8; STATUS] {
    u64::from(crc).to_le_bytes()
}

/// Parses a trailer. `None` if its upper half is not zero.
#[must_use]
pub fn checksum(trailer: [u8; STATUS]) -> Option<u32> {
    u32::try_from(u64::from_le_bytes(trailer)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn encoding_matches_mooncake() {
        let header = TransferHeader {
            size: 4096,
            address: 0x7f81_c800_0000,
            operation: TransferOperation::Write,
            protocol: TransferProtocol::V2,
        };
        let bytes = header.encode();
        assert_eq!(bytes[..8], [0, 0x10, 0, 0, 0, 0, 0, 0]);
        assert_eq!(bytes[8..17], [0, 0, 0, 0xc8, 0x81, 0x7f, 0, 0, 0x81]);
        assert_eq!(TransferStatus::Ok.encode(), [0, 0, 0, 0, b'V', b'T', b'C', b'M']);
        assert_eq!(TransferStatus::Rejected.encode()[..4], [1, 0, 0, 0]);
        for refusal in CapabilityError::ALL {
            let status = TransferStatus::Refused(refusal);
            assert_eq!(TransferStatus::decode(status.encode()), Ok(status));
        }
        assert!(TransferStatus::decode(*b"\0\0\0\0MCTV").is_err());
    }

    fn header() -> impl Strategy<Value = TransferHeader> {
        let operation = prop_oneof![Just(TransferOperation::Read), Just(TransferOperation::Write)];
        let protocol = prop_oneof![
            Just(TransferProtocol::V1),
            Just(TransferProtocol::V2),
            Just(TransferProtocol::Checked),
            any::<u64>().prop_map(|id| TransferProtocol::Mapped(MappingId::new(id))),
        ];
        (any::<u64>(), any::<u64>(), operation, protocol).prop_map(|(size, address, operation, protocol)| {
            TransferHeader { size, address, operation, protocol }
        })
    }

    proptest! {
        #[test]
        fn headers_survive_the_round_trip(header in header(), padding: [u8; 7]) {
            let mut bytes = header.encode();
            if !matches!(header.protocol, TransferProtocol::Mapped(_)) {
                bytes[MAPPING].copy_from_slice(&padding);
            }
            prop_assert_eq!(TransferHeader::decode(&bytes), Ok(header));
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes: [u8; HEADER]) {
            match TransferHeader::decode(&bytes) {
                Ok(header) => prop_assert_eq!(header.encode()[..17].to_vec(), bytes[..17].to_vec()),
                Err(UnknownOperationError(code)) => prop_assert_eq!(code, bytes[16]),
            }
        }

        #[test]
        fn statuses_and_trailers_survive_the_round_trip(code: u32) {
            prop_assert_eq!(TransferStatus::decode(TransferStatus::decode(TransferStatus::Other(code).encode()).unwrap().encode()),
                TransferStatus::decode(TransferStatus::Other(code).encode()));
            prop_assert_eq!(checksum(trailer(code)), Some(code));
            prop_assert_eq!(checksum(NO_CHECKSUM), None);
        }
    }
}
