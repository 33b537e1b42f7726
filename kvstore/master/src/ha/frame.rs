//! Frames of the replication protocol between leader and follower.
//!
//! A frame: u32 length of what follows the checksum, u32 CRC-32 of that, a kind byte, then the kind's members. Numbers are
//! little-endian; strings and records have a u32 length prefix. The first frame of each side carries the protocol version.

use super::member::{HaMember, MAX_ADDRESS};
use crate::epochs::LogPosition;

/// Version of the replication protocol.
pub const VERSION: u16 = 2;
/// Length of the header (length and checksum) in bytes.
pub const HEADER: usize = 8;
/// Maximum frame size in bytes without the header: one batch plus one record of the maximum size.
pub const MAX_FRAME: usize = (16 << 20) + (1 << 20);
/// Bytes of records that fill one batch.
pub const BATCH: usize = 256 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplicationFrameError {
    /// Its length is 0 or above [`MAX_FRAME`].
    #[error("invalid frame length: {0} bytes")]
    Length(usize),
    /// The checksum does not match the body.
    #[error("frame checksum mismatch")]
    Checksum,
    /// A member of the frame is invalid.
    #[error("frame with an invalid {0}")]
    Value(&'static str),
    /// The peer uses another protocol version.
    #[error("unknown replication protocol version {0}; run the same Moongate release on all masters")]
    Version(u16),
}

/// Where a leader starts sending to a follower.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplicationStart {
    /// It sends the full state, then the records after this one.
    Snapshot(u64),
    /// The follower already has all records up to this one.
    Resume(u64),
}

/// One frame of the protocol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReplicationFrame<'a> {
    /// First frame of a follower: its identity, the expected term, and its last record.
    Hello {
        member: HaMember,
        /// The leader's term, as stored in the coordinator.
        term: i64,
        last_record: Option<LogPosition>,
    },
    /// First frame of the leader.
    Welcome { term: i64, start: ReplicationStart },
    /// Some records of the full state.
    State(ReplicationRecords<'a>),
    /// The full state is complete once the record with this number has arrived.
    StateComplete(u64),
    /// Log records, starting with this number.
    Records(u64, ReplicationRecords<'a>),
    /// Sent while idle: this is still the last record.
    Heartbeat(u64),
    /// The follower has all records up to this number.
    Acknowledged(u64),
}

/// A sequence of length-prefixed records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicationRecords<'a>(&'a [u8]);

impl<'a> Iterator for ReplicationRecords<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<Self::Item> {
        let (length, rest) = self.0.split_first_chunk()?;
        let (record, rest) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
        self.0 = rest;
        Some(record)
    }
}

impl<'a> ReplicationRecords<'a> {
    /// Checks that `bytes` is a sequence that [`push_record`] wrote. `None` if it is not.
    pub fn new(bytes: &'a [u8]) -> Option<Self> {
        let mut records = Self(bytes);
        records.by_ref().for_each(drop);
        records.0.is_empty().then_some(Self(bytes))
    }
}

pub fn push_record(record: &[u8], out: &mut Vec<u8>) {
    out.extend_from_slice(&u32::try_from(record.len()).unwrap_or(u32::MAX).to_le_bytes());
    out.extend_from_slice(record);
}

mod kind {
    pub(super) const HELLO: u8 = 1;
    pub(super) const WELCOME: u8 = 2;
    pub(super) const STATE: u8 = 3;
    pub(super) const STATE_COMPLETE: u8 = 4;
    pub(super) const RECORDS: u8 = 5;
    pub(super) const HEARTBEAT: u8 = 6;
    pub(super) const ACKNOWLEDGED: u8 = 7;
}

/// Encodes a frame and appends it.
pub fn write(frame: &ReplicationFrame<'_>, out: &mut Vec<u8>) {
    let frame_start = out.len();
    out.extend_from_slice(&[0; HEADER]);
    match frame {
        ReplicationFrame::Hello { member, term, last_record } => {
            out.push(kind::HELLO);
            out.extend_from_slice(&VERSION.to_le_bytes());
            out.extend_from_slice(&member.incarnation.to_le_bytes());
            push_record(member.address.as_bytes(), out);
            out.extend_from_slice(&term.to_le_bytes());
            out.push(u8::from(last_record.is_some()));
            let LogPosition { epoch, number } = last_record.unwrap_or_default();
            out.extend_from_slice(&epoch.to_le_bytes());
            out.extend_from_slice(&number.to_le_bytes());
        }
        ReplicationFrame::Welcome { term, start } => {
            out.push(kind::WELCOME);
            out.extend_from_slice(&VERSION.to_le_bytes());
            out.extend_from_slice(&term.to_le_bytes());
            let (resumes, number) = match start {
                ReplicationStart::Snapshot(number) => (0, number),
                ReplicationStart::Resume(number) => (1, number),
            };
            out.push(resumes);
            out.extend_from_slice(&number.to_le_bytes());
        }
        ReplicationFrame::State(records) => {
            out.push(kind::STATE);
            out.extend_from_slice(records.0);
        }
        ReplicationFrame::Records(first, records) => {
            numbered(kind::RECORDS, *first, out);
            out.extend_from_slice(records.0);
        }
        ReplicationFrame::StateComplete(number) => numbered(kind::STATE_COMPLETE, *number, out),
        ReplicationFrame::Heartbeat(number) => numbered(kind::HEARTBEAT, *number, out),
        ReplicationFrame::Acknowledged(number) => numbered(kind::ACKNOWLEDGED, *number, out),
    }
    let body = out.get(frame_start + HEADER..).unwrap_or_default();
    let (length, sum) = (body.len() as u32, crc32fast::hash(body));
    if let Some(header) = out.get_mut(frame_start..frame_start + HEADER) {
        header[..4].copy_from_slice(&length.to_le_bytes());
        header[4..].copy_from_slice(&sum.to_le_bytes());
    }
}

fn numbered(kind: u8, number: u64, out: &mut Vec<u8>) {
    out.push(kind);
    out.extend_from_slice(&number.to_le_bytes());
}

/// Decodes a header: the length of the body and its checksum.
///
/// # Errors
/// [`ReplicationFrameError::Length`].
pub fn header(bytes: [u8; HEADER]) -> Result<(usize, u32), ReplicationFrameError> {
    let [a, b, c, d, e, f, g, h] = bytes;
    let length = u32::from_le_bytes([a, b, c, d]) as usize;
    if length == 0 || length > MAX_FRAME {
        return Err(ReplicationFrameError::Length(length));
    }
    Ok((length, u32::from_le_bytes([e, f, g, h])))
}

/// Decodes the body of a frame.
///
/// # Errors
/// [`ReplicationFrameError`].
pub fn read(body: &[u8], checksum: u32) -> Result<ReplicationFrame<'_>, ReplicationFrameError> {
    if crc32fast::hash(body) != checksum {
        return Err(ReplicationFrameError::Checksum);
    }
    let mut rest = ReplicationFrameReader(body);
    let frame = match rest.byte()? {
        kind::HELLO => {
            rest.version()?;
            let incarnation = rest.number()?;
            let length = u32::from_le_bytes(rest.array()?) as usize;
            if length > MAX_ADDRESS {
                return Err(ReplicationFrameError::Value("address"));
            }
            let address =
                str::from_utf8(rest.take(length)?).map_err(|_| ReplicationFrameError::Value("address"))?;
            let member = HaMember { address: address.to_owned(), incarnation };
            let term = i64::from_le_bytes(rest.array()?);
            let has_record = rest.byte()? == 1;
            let position = LogPosition { epoch: rest.number()?, number: rest.number()? };
            ReplicationFrame::Hello { member, term, last_record: has_record.then_some(position) }
        }
        kind::WELCOME => {
            rest.version()?;
            let term = i64::from_le_bytes(rest.array()?);
            let start = match (rest.byte()?, rest.number()?) {
                (0, number) => ReplicationStart::Snapshot(number),
                (1, number) => ReplicationStart::Resume(number),
                _ => return Err(ReplicationFrameError::Value("start")),
            };
            ReplicationFrame::Welcome { term, start }
        }
        kind::STATE => ReplicationFrame::State(rest.records()?),
        kind::RECORDS => ReplicationFrame::Records(rest.number()?, rest.records()?),
        kind::STATE_COMPLETE => ReplicationFrame::StateComplete(rest.number()?),
        kind::HEARTBEAT => ReplicationFrame::Heartbeat(rest.number()?),
        kind::ACKNOWLEDGED => ReplicationFrame::Acknowledged(rest.number()?),
        _ => return Err(ReplicationFrameError::Value("kind")),
    };
    if rest.0.is_empty() { Ok(frame) } else { Err(ReplicationFrameError::Value("length")) }
}

struct ReplicationFrameReader<'a>(&'a [u8]);

impl<'a> ReplicationFrameReader<'a> {
    fn take(&mut self, length: usize) -> Result<&'a [u8], ReplicationFrameError> {
        let (bytes, rest) = self.0.split_at_checked(length).ok_or(ReplicationFrameError::Value("length"))?;
        self.0 = rest;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], ReplicationFrameError> {
        let (bytes, rest) = self.0.split_first_chunk().ok_or(ReplicationFrameError::Value("length"))?;
        self.0 = rest;
        Ok(*bytes)
    }

    fn byte(&mut self) -> Result<u8, ReplicationFrameError> {
        self.array().map(|[byte]| byte)
    }

    fn number(&mut self) -> Result<u64, ReplicationFrameError> {
        self.array().map(u64::from_le_bytes)
    }

    fn version(&mut self) -> Result<(), ReplicationFrameError> {
        match u16::from_le_bytes(self.array()?) {
            VERSION => Ok(()),
            other => Err(ReplicationFrameError::Version(other)),
        }
    }

    fn records(&mut self) -> Result<ReplicationRecords<'a>, ReplicationFrameError> {
        ReplicationRecords::new(std::mem::take(&mut self.0)).ok_or(ReplicationFrameError::Value("record"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn frame(records: &[u8]) -> impl Strategy<Value = ReplicationFrame<'_>> {
        let numbers = any::<(u64, i64, u64)>();
        (0..8_u8, "[a-z.:0-9]{0,40}", numbers, any::<bool>()).prop_map(
            |(kind, address, (number, term, other), flag)| match kind {
                0 => {
                    let member = HaMember { address, incarnation: number };
                    let position = LogPosition { epoch: number ^ 1, number: other };
                    ReplicationFrame::Hello { member, term, last_record: flag.then_some(position) }
                }
                1 => ReplicationFrame::Welcome { term, start: ReplicationStart::Snapshot(number) },
                2 => ReplicationFrame::Welcome { term, start: ReplicationStart::Resume(number) },
                3 => ReplicationFrame::State(ReplicationRecords(records)),
                4 => ReplicationFrame::StateComplete(number),
                5 => ReplicationFrame::Records(number, ReplicationRecords(records)),
                6 => ReplicationFrame::Heartbeat(number),
                _ => ReplicationFrame::Acknowledged(number),
            },
        )
    }

    fn some_records() -> &'static [u8] {
        static RECORDS: std::sync::OnceLock<Vec<u8>> = std::sync::OnceLock::new();
        RECORDS.get_or_init(|| {
            let mut records = Vec::new();
            for record in [&b"one"[..], b"", b"three"] {
                push_record(record, &mut records);
            }
            records
        })
    }

    proptest! {
        #[test]
        fn frames_round_trip_and_a_flipped_bit_is_detected(frame in frame(some_records()), position: u32, bit in 0..8_u8) {
            let mut bytes = Vec::new();
            write(&frame, &mut bytes);
            let (length, sum) = header(*bytes.first_chunk().unwrap()).unwrap();
            prop_assert_eq!(length, bytes.len() - HEADER);
            prop_assert_eq!(read(&bytes[HEADER..], sum), Ok(frame));
            let position = HEADER + position as usize % length;
            bytes[position] ^= 1 << bit;
            prop_assert_eq!(read(&bytes[HEADER..], sum), Err(ReplicationFrameError::Checksum));
        }

        #[test]
        fn arbitrary_bodies_do_not_panic(kind in 0..9_u8, mut body: Vec<u8>) {
            body.insert(0, kind);
            if let Ok(ReplicationFrame::State(records) | ReplicationFrame::Records(_, records)) = read(&body, crc32fast::hash(&body)) {
                prop_assert!(records.map(|record| record.len() + 4).sum::<usize>() <= body.len());
            }
        }
    }

    #[test]
    fn lengths_are_bounded() {
        assert_eq!(header([0; 8]), Err(ReplicationFrameError::Length(0)));
        assert_eq!(header([0xff; 8]), Err(ReplicationFrameError::Length(u32::MAX as usize)));
        let records: Vec<_> = ReplicationRecords::new(some_records()).unwrap().collect();
        assert_eq!(records, [&b"one"[..], b"", b"three"]);
        assert_eq!(ReplicationRecords::new(&some_records()[..5]), None);
    }
}
