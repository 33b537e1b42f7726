//! What a leader and a follower say to each other.
//!
//! A frame: u32 length of what follows the checksum, u32 CRC-32 of that, then a kind and the kind's members. Numbers are
//! little-endian; text and records have a u32 length before them. The first frame of either side has the protocol's version.

use super::member::{MAX_ADDRESS, Member};

/// The protocol's version.
pub const VERSION: u16 = 2;
/// Bytes before a frame's kind.
pub const HEADER: usize = 8;
/// The longest frame in bytes, without its header: a batch of records, and one record of the greatest length.
pub const MAX_FRAME: usize = (16 << 20) + (1 << 20);
/// Bytes of records after which a frame is sent.
pub const BATCH: usize = 256 << 10;

/// Bytes that are no frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// Its length is out of bounds.
    #[error("a frame of {0} bytes")]
    Length(usize),
    /// It is not what was sent.
    #[error("a frame has another checksum than it should have")]
    Checksum,
    /// Its members are not what its kind has.
    #[error("a frame with an impossible {0}")]
    Value(&'static str),
    /// The other side speaks another version.
    #[error(
        "version {0} of the replication protocol is not known; use the same release of moongate everywhere"
    )]
    Version(u16),
}

/// How a leader goes on with a follower.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// It sends the whole state, then the records after this one.
    Snapshot(u64),
    /// The follower has all up to this record.
    Resume(u64),
}

/// One frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame<'a> {
    /// A follower begins: who it is, the term of the leader that it expects, and what it has.
    Hello {
        /// The follower.
        member: Member,
        /// The leader's term, as the store told it.
        term: i64,
        /// The epoch and the number of the last record that it has; see [`Epochs`](crate::Epochs).
        has: Option<(u64, u64)>,
    },
    /// The leader's answer.
    Welcome {
        /// Its term.
        term: i64,
        /// How it goes on.
        start: Start,
    },
    /// A part of the state.
    State(Records<'a>),
    /// The state is whole once the record with this number is there too.
    Whole(u64),
    /// Records from this number on.
    Facts(u64, Records<'a>),
    /// Nothing is new: the last record is still this one.
    Idle(u64),
    /// The follower has all records up to this one.
    Acknowledged(u64),
}

/// Records, each with its length before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Records<'a>(&'a [u8]);

impl<'a> Iterator for Records<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<Self::Item> {
        let (length, rest) = self.0.split_first_chunk()?;
        let (record, rest) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
        self.0 = rest;
        Some(record)
    }
}

impl<'a> Records<'a> {
    /// Takes what [`push_record`] wrote. Nothing if it is something else.
    pub fn new(bytes: &'a [u8]) -> Option<Self> {
        let mut records = Self(bytes);
        records.by_ref().for_each(drop);
        records.0.is_empty().then_some(Self(bytes))
    }
}

/// Appends a record to a frame's records.
pub fn push_record(record: &[u8], out: &mut Vec<u8>) {
    out.extend_from_slice(&u32::try_from(record.len()).unwrap_or(u32::MAX).to_le_bytes());
    out.extend_from_slice(record);
}

mod kind {
    pub(super) const HELLO: u8 = 1;
    pub(super) const WELCOME: u8 = 2;
    pub(super) const STATE: u8 = 3;
    pub(super) const WHOLE: u8 = 4;
    pub(super) const FACTS: u8 = 5;
    pub(super) const IDLE: u8 = 6;
    pub(super) const ACKNOWLEDGED: u8 = 7;
}

/// Appends a frame.
pub fn write(frame: &Frame<'_>, out: &mut Vec<u8>) {
    let begin = out.len();
    out.extend_from_slice(&[0; HEADER]);
    match frame {
        Frame::Hello { member, term, has } => {
            out.push(kind::HELLO);
            out.extend_from_slice(&VERSION.to_le_bytes());
            out.extend_from_slice(&member.incarnation.to_le_bytes());
            push_record(member.address.as_bytes(), out);
            out.extend_from_slice(&term.to_le_bytes());
            out.push(u8::from(has.is_some()));
            let (epoch, number) = has.unwrap_or_default();
            out.extend_from_slice(&epoch.to_le_bytes());
            out.extend_from_slice(&number.to_le_bytes());
        }
        Frame::Welcome { term, start } => {
            out.push(kind::WELCOME);
            out.extend_from_slice(&VERSION.to_le_bytes());
            out.extend_from_slice(&term.to_le_bytes());
            let (resumes, number) = match start {
                Start::Snapshot(number) => (0, number),
                Start::Resume(number) => (1, number),
            };
            out.push(resumes);
            out.extend_from_slice(&number.to_le_bytes());
        }
        Frame::State(records) => {
            out.push(kind::STATE);
            out.extend_from_slice(records.0);
        }
        Frame::Facts(first, records) => {
            numbered(kind::FACTS, *first, out);
            out.extend_from_slice(records.0);
        }
        Frame::Whole(number) => numbered(kind::WHOLE, *number, out),
        Frame::Idle(number) => numbered(kind::IDLE, *number, out),
        Frame::Acknowledged(number) => numbered(kind::ACKNOWLEDGED, *number, out),
    }
    let body = out.get(begin + HEADER..).unwrap_or_default();
    let (length, sum) = (body.len() as u32, crc32fast::hash(body));
    if let Some(header) = out.get_mut(begin..begin + HEADER) {
        header[..4].copy_from_slice(&length.to_le_bytes());
        header[4..].copy_from_slice(&sum.to_le_bytes());
    }
}

fn numbered(kind: u8, number: u64, out: &mut Vec<u8>) {
    out.push(kind);
    out.extend_from_slice(&number.to_le_bytes());
}

/// How many bytes follow this header, and their checksum.
///
/// # Errors
/// [`FrameError::Length`].
pub fn header(bytes: [u8; HEADER]) -> Result<(usize, u32), FrameError> {
    let [a, b, c, d, e, f, g, h] = bytes;
    let length = u32::from_le_bytes([a, b, c, d]) as usize;
    if length == 0 || length > MAX_FRAME {
        return Err(FrameError::Length(length));
    }
    Ok((length, u32::from_le_bytes([e, f, g, h])))
}

/// Reads what follows a header.
///
/// # Errors
/// [`FrameError`].
pub fn read(body: &[u8], checksum: u32) -> Result<Frame<'_>, FrameError> {
    if crc32fast::hash(body) != checksum {
        return Err(FrameError::Checksum);
    }
    let mut rest = Rest(body);
    let frame = match rest.byte()? {
        kind::HELLO => {
            rest.version()?;
            let incarnation = rest.number()?;
            let length = u32::from_le_bytes(rest.array()?) as usize;
            if length > MAX_ADDRESS {
                return Err(FrameError::Value("address"));
            }
            let address = str::from_utf8(rest.take(length)?).map_err(|_| FrameError::Value("address"))?;
            let member = Member { address: address.to_owned(), incarnation };
            let term = i64::from_le_bytes(rest.array()?);
            let has = rest.byte()? == 1;
            let position = (rest.number()?, rest.number()?);
            Frame::Hello { member, term, has: has.then_some(position) }
        }
        kind::WELCOME => {
            rest.version()?;
            let term = i64::from_le_bytes(rest.array()?);
            let start = match (rest.byte()?, rest.number()?) {
                (0, number) => Start::Snapshot(number),
                (1, number) => Start::Resume(number),
                _ => return Err(FrameError::Value("start")),
            };
            Frame::Welcome { term, start }
        }
        kind::STATE => Frame::State(rest.records()?),
        kind::FACTS => Frame::Facts(rest.number()?, rest.records()?),
        kind::WHOLE => Frame::Whole(rest.number()?),
        kind::IDLE => Frame::Idle(rest.number()?),
        kind::ACKNOWLEDGED => Frame::Acknowledged(rest.number()?),
        _ => return Err(FrameError::Value("kind")),
    };
    if rest.0.is_empty() { Ok(frame) } else { Err(FrameError::Value("length")) }
}

struct Rest<'a>(&'a [u8]);

impl<'a> Rest<'a> {
    fn take(&mut self, length: usize) -> Result<&'a [u8], FrameError> {
        let (taken, rest) = self.0.split_at_checked(length).ok_or(FrameError::Value("length"))?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], FrameError> {
        let (taken, rest) = self.0.split_first_chunk().ok_or(FrameError::Value("length"))?;
        self.0 = rest;
        Ok(*taken)
    }

    fn byte(&mut self) -> Result<u8, FrameError> {
        self.array().map(|[byte]| byte)
    }

    fn number(&mut self) -> Result<u64, FrameError> {
        self.array().map(u64::from_le_bytes)
    }

    fn version(&mut self) -> Result<(), FrameError> {
        match u16::from_le_bytes(self.array()?) {
            VERSION => Ok(()),
            other => Err(FrameError::Version(other)),
        }
    }

    fn records(&mut self) -> Result<Records<'a>, FrameError> {
        Records::new(std::mem::take(&mut self.0)).ok_or(FrameError::Value("record"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn frame(records: &[u8]) -> impl Strategy<Value = Frame<'_>> {
        let numbers = any::<(u64, i64, u64)>();
        (0..8_u8, "[a-z.:0-9]{0,40}", numbers, any::<bool>()).prop_map(
            |(kind, address, (number, term, other), flag)| match kind {
                0 => {
                    let member = Member { address, incarnation: number };
                    Frame::Hello { member, term, has: flag.then_some((number ^ 1, other)) }
                }
                1 => Frame::Welcome { term, start: Start::Snapshot(number) },
                2 => Frame::Welcome { term, start: Start::Resume(number) },
                3 => Frame::State(Records(records)),
                4 => Frame::Whole(number),
                5 => Frame::Facts(number, Records(records)),
                6 => Frame::Idle(number),
                _ => Frame::Acknowledged(number),
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
        fn what_was_written_is_read_and_a_changed_byte_is_seen(frame in frame(some_records()), at: u32, bit in 0..8_u8) {
            let mut bytes = Vec::new();
            write(&frame, &mut bytes);
            let (length, sum) = header(*bytes.first_chunk().unwrap()).unwrap();
            prop_assert_eq!(length, bytes.len() - HEADER);
            prop_assert_eq!(read(&bytes[HEADER..], sum), Ok(frame));
            let at = HEADER + at as usize % length;
            bytes[at] ^= 1 << bit;
            prop_assert_eq!(read(&bytes[HEADER..], sum), Err(FrameError::Checksum));
        }

        #[test]
        fn anything_is_refused_or_read(kind in 0..9_u8, mut body: Vec<u8>) {
            body.insert(0, kind);
            if let Ok(Frame::State(records) | Frame::Facts(_, records)) = read(&body, crc32fast::hash(&body)) {
                prop_assert!(records.map(|it| it.len() + 4).sum::<usize>() <= body.len());
            }
        }
    }

    #[test]
    fn lengths_are_bounded() {
        assert_eq!(header([0; 8]), Err(FrameError::Length(0)));
        assert_eq!(header([0xff; 8]), Err(FrameError::Length(u32::MAX as usize)));
        let records: Vec<_> = Records::new(some_records()).unwrap().collect();
        assert_eq!(records, [&b"one"[..], b"", b"three"]);
        assert_eq!(Records::new(&some_records()[..5]), None);
    }
}
