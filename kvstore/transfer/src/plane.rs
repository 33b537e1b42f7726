//! The bytes of the data plane.
//!
//! A request is a header of 24 bytes (little-endian): size, address, operation, seven bytes that mean nothing.
//!
//! | protocol | WRITE | READ |
//! |---|---|---|
//! | v1 | header, body; no answer | header → body |
//! | v2 | header, body → status | header → status, body |
//! | checked | header, body, checksum → status | header → status, body, checksum |
//!
//! A status is eight bytes: a code, and four that say `VTCM`. Where v1 has nothing to say, a refusal is the end of
//! the connection. The checked protocol is this project's own, spoken between nodes and clients that have told each
//! other so in their descriptors. Its checksum is the body's CRC-32C in four bytes, and four bytes of zero.
//!
//! On a connection with TLS, which is this project's own too, only the checked protocol is spoken, and each header is followed by the
//! [capability](mooncake_wire::capability) of the transfer. Refusals have status codes of their own.

use mooncake_wire::capability::CapabilityError;

/// Bytes of a header.
pub const HEADER: usize = 24;
/// Bytes of a status, and of a checksum with what follows it.
pub const STATUS: usize = 8;
/// In the upper half of every status.
const MARK: u32 = 0x4d43_5456;
/// Set in the operations of v2, and in ours.
const V2: u8 = 0x80;
/// Set in ours too.
const CHECKED: u8 = 0x40;
/// The status of the first [`CapabilityError`]; the others follow.
const REFUSED: u32 = 16;
const READ: u8 = 0;
const WRITE: u8 = 1;

/// What two sides speak.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TransferProtocol {
    /// Mooncake's, before 0.3.13.
    V1,
    /// Mooncake's, with status frames.
    V2,
    /// The same with checksums.
    Checked,
}

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TransferOperation {
    /// The peer's bytes are wanted.
    Read,
    /// The peer gets bytes.
    Write,
}

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferHeader {
    /// Bytes of the body.
    pub size: u64,
    /// Address of the first byte in the memory of whoever is asked.
    pub address: u64,
    /// What is asked for.
    pub operation: TransferOperation,
    /// In which protocol.
    pub protocol: TransferProtocol,
}

/// A header whose operation there is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no operation {0:#04x}")]
pub struct UnknownOperationError(pub u8);

impl TransferHeader {
    /// The header's bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        let protocol = match self.protocol {
            TransferProtocol::V1 => 0,
            TransferProtocol::V2 => V2,
            TransferProtocol::Checked => V2 | CHECKED,
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
        bytes
    }

    /// Reads a header. Neither size nor address are checked.
    ///
    /// # Errors
    /// [`UnknownOperationError`].
    pub fn decode(bytes: &[u8; HEADER]) -> Result<Self, UnknownOperationError> {
        let number = |at: usize| {
            let mut number = [0; 8];
            number.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(number)
        };
        let code = bytes[16];
        let protocol = match code & (V2 | CHECKED) {
            0 => TransferProtocol::V1,
            V2 => TransferProtocol::V2,
            CHECKED => return Err(UnknownOperationError(code)),
            _ => TransferProtocol::Checked,
        };
        let operation = match code & !(V2 | CHECKED) {
            READ => TransferOperation::Read,
            WRITE => TransferOperation::Write,
            _ => return Err(UnknownOperationError(code)),
        };
        Ok(Self { size: number(0), address: number(8), operation, protocol })
    }
}

/// How a request ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransferStatus {
    /// Well.
    Ok,
    /// The range is not within memory that may be read and written. The connection ends.
    Rejected,
    /// Ours: the body is not what its checksum says.
    Damaged,
    /// Ours: the capability does not allow the transfer. The connection ends.
    Refused(CapabilityError),
    /// Another code, which no release known today sends.
    Other(u32),
}

/// Bytes that are no status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:#018x} is no status of a transfer")]
pub struct InvalidStatusError(pub u64);

impl TransferStatus {
    /// The status' bytes.
    #[must_use]
    pub fn encode(self) -> [u8; STATUS] {
        let code = match self {
            Self::Ok => 0,
            Self::Rejected => 1,
            Self::Damaged => 2,
            Self::Refused(refusal) => refusal_code(refusal),
            Self::Other(code) => code,
        };
        (u64::from(MARK) << 32 | u64::from(code)).to_le_bytes()
    }

    /// Reads a status.
    ///
    /// # Errors
    /// [`InvalidStatusError`].
    pub fn decode(bytes: [u8; STATUS]) -> Result<Self, InvalidStatusError> {
        let number = u64::from_le_bytes(bytes);
        if number >> 32 != u64::from(MARK) {
            return Err(InvalidStatusError(number));
        }
        // The lower half.
        Ok(match number as u32 {
            0 => Self::Ok,
            1 => Self::Rejected,
            2 => Self::Damaged,
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

/// What follows a checked body.
#[must_use]
pub fn trailer(crc: u32) -> [u8; STATUS] {
    u64::from(crc).to_le_bytes()
}

/// The checksum in what follows a checked body. Nothing if it is no such thing.
#[must_use]
pub fn checksum(trailer: [u8; STATUS]) -> Option<u32> {
    u32::try_from(u64::from_le_bytes(trailer)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn bytes_are_those_of_mooncakes_nodes() {
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
            Just(TransferProtocol::Checked)
        ];
        (any::<u64>(), any::<u64>(), operation, protocol).prop_map(|(size, address, operation, protocol)| {
            TransferHeader { size, address, operation, protocol }
        })
    }

    proptest! {
        #[test]
        fn headers_survive_the_round_trip(header in header(), padding: [u8; 7]) {
            let mut bytes = header.encode();
            bytes[17..].copy_from_slice(&padding);
            prop_assert_eq!(TransferHeader::decode(&bytes), Ok(header));
        }

        #[test]
        fn any_bytes_can_be_read(bytes: [u8; HEADER]) {
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
        }
    }
}
