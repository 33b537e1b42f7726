//! From bytes to facts.

use std::borrow::Cow;

use mooncake_wire::types::{Segment, SegmentStatus, Uuid};

use super::{DecodeError, MAX_PLACES, REMOVE_CAUSES, STORE_CAUSES, UNMOUNT_CAUSES, VERSION, kind, tasks};
use crate::fact::{Fact, Media, ObjectState, OnDisk, Place};

/// Takes a fact off the beginning of some bytes; what follows it is returned too.
///
/// # Errors
/// When the bytes do not begin with a fact.
pub fn decode(bytes: &[u8]) -> Result<(Fact<'_>, &[u8]), DecodeError> {
    let mut reader = Reader(bytes);
    let version = reader.byte()?;
    if version != VERSION {
        return Err(DecodeError::Version(version));
    }
    let fact = match reader.byte()? {
        kind::MOUNTED => reader.mounted()?,
        kind::STATUS => {
            let (segment, status) = (reader.id()?, reader.number()?);
            let status = u32::try_from(status).map_err(|_| DecodeError::Value("status"))?;
            let until_ms = reader.option()?;
            Fact::SegmentStatus { segment, status: SegmentStatus(status.cast_signed()), until_ms }
        }
        kind::UNMOUNTED => {
            Fact::SegmentUnmounted { segment: reader.id()?, cause: reader.cause(&UNMOUNT_CAUSES)? }
        }
        kind::SILENT => Fact::ClientSilent { client: reader.id()?, at_ms: reader.number()? },
        kind::BACK => Fact::ClientBack { client: reader.id()?, at_ms: reader.number()? },
        kind::GONE => Fact::ClientGone { client: reader.id()? },
        kind::STARTED => Fact::Started(reader.object()?),
        kind::STORED => {
            let cause = reader.cause(&STORE_CAUSES)?;
            Fact::Stored { object: reader.object()?, cause }
        }
        kind::REMOVED => Fact::Removed {
            tenant: reader.text()?,
            key: reader.text()?,
            group: reader.optional_text()?,
            was: Media { memory: reader.flag()?, disk: reader.flag()? },
            cause: reader.cause(&REMOVE_CAUSES)?,
        },
        kind::HELD => Fact::Held {
            segment: reader.id()?,
            offset: reader.number()?,
            size: reader.number()?,
            until_ms: reader.number()?,
        },
        kind::RELEASED => Fact::Released { segment: reader.id()?, offset: reader.number()? },
        kind::QUOTA => Fact::TenantQuota { tenant: reader.text()?, requested: reader.option()? },
        kind::DISK_MOUNTED => Fact::DiskMounted { client: reader.id()? },
        kind::DISK_UNMOUNTED => Fact::DiskUnmounted { client: reader.id()? },
        other => tasks::read(&mut reader, other)?,
    };
    Ok((fact, reader.0))
}

pub(super) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], DecodeError> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or(DecodeError::Short)?;
        self.0 = rest;
        Ok(taken)
    }

    fn byte(&mut self) -> Result<u8, DecodeError> {
        let (byte, rest) = self.0.split_first().ok_or(DecodeError::Short)?;
        self.0 = rest;
        Ok(*byte)
    }

    pub(super) fn number(&mut self) -> Result<u64, DecodeError> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7f);
            if bits << shift >> shift != bits {
                break;
            }
            number |= bits << shift;
            if byte < 0x80 {
                return Ok(number);
            }
        }
        Err(DecodeError::Value("number"))
    }

    pub(super) fn flag(&mut self) -> Result<bool, DecodeError> {
        match self.byte()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(DecodeError::Value("flag")),
        }
    }

    fn option(&mut self) -> Result<Option<u64>, DecodeError> {
        if self.flag()? { self.number().map(Some) } else { Ok(None) }
    }

    pub(super) fn id(&mut self) -> Result<Uuid, DecodeError> {
        let (halves, _) = self.take(16)?.as_chunks::<8>();
        match halves {
            [first, second] => {
                Ok(Uuid { first: u64::from_le_bytes(*first), second: u64::from_le_bytes(*second) })
            }
            _ => Err(DecodeError::Short),
        }
    }

    pub(super) fn text(&mut self) -> Result<Cow<'a, str>, DecodeError> {
        let length = usize::try_from(self.number()?).map_err(|_| DecodeError::Short)?;
        let bytes = self.take(length)?;
        std::str::from_utf8(bytes).map(Cow::Borrowed).map_err(|_| DecodeError::Value("text"))
    }

    fn optional_text(&mut self) -> Result<Option<Cow<'a, str>>, DecodeError> {
        if self.flag()? { self.text().map(Some) } else { Ok(None) }
    }

    fn on_disk(&mut self) -> Result<Option<OnDisk<'a>>, DecodeError> {
        if !self.flag()? {
            return Ok(None);
        }
        let (replica, client, size, endpoint) = (self.number()?, self.id()?, self.number()?, self.text()?);
        Ok(Some(OnDisk { replica, client, size, endpoint }))
    }

    fn cause<T: Copy>(&mut self, all: &[T]) -> Result<T, DecodeError> {
        let at = usize::try_from(self.number()?).unwrap_or(usize::MAX);
        all.get(at).copied().ok_or(DecodeError::Value("cause"))
    }

    pub(super) fn code(&mut self) -> Result<i32, DecodeError> {
        let code = u32::try_from(self.number()?).map_err(|_| DecodeError::Value("code"))?;
        Ok(code.cast_signed())
    }

    fn mounted(&mut self) -> Result<Fact<'a>, DecodeError> {
        let segment = Segment {
            id: self.id()?,
            name: self.text()?,
            base: self.number()?,
            size: self.number()?,
            te_endpoint: self.text()?,
            protocol: self.text()?,
            host_id: self.text()?,
        };
        Ok(Fact::SegmentMounted { segment, client: self.id()?, at_ms: self.number()? })
    }

    pub(super) fn places(&mut self) -> Result<Vec<Place>, DecodeError> {
        let count = self.number()?;
        if count > MAX_PLACES {
            return Err(DecodeError::Value("number of replicas"));
        }
        (0..count)
            .map(|_| Ok(Place { replica: self.number()?, segment: self.id()?, offset: self.number()? }))
            .collect()
    }

    fn object(&mut self) -> Result<ObjectState<'a>, DecodeError> {
        Ok(ObjectState {
            tenant: self.text()?,
            key: self.text()?,
            size: self.number()?,
            client: self.id()?,
            places: Cow::Owned(self.places()?),
            on_disk: self.on_disk()?,
            checksum: self.option()?,
            hard_pin: self.flag()?,
            soft_pin_until_ms: self.option()?,
            group: self.optional_text()?,
            since_ms: self.number()?,
        })
    }
}
