//! Decoding of state changes.

use std::borrow::Cow;

use mooncake_wire::types::{Segment, SegmentLocality, SegmentStatus, Uuid};

use super::{
    MAX_HCA_NAMES, MAX_LOCATIONS, REMOVE_CAUSES, STORE_CAUSES, StateChangeDecodeError, UNMOUNT_CAUSES,
    VERSION, kind, tasks,
};
use crate::change::{DiskCopyState, ObjectState, ReplicaLocation, StateChange, StorageTiers};

/// Decodes the state change at the start of `bytes` and returns it with the remaining bytes.
///
/// # Errors
/// When the bytes do not start with a complete state change of this version.
pub fn decode(bytes: &[u8]) -> Result<(StateChange<'_>, &[u8]), StateChangeDecodeError> {
    let mut reader = StateChangeReader(bytes);
    let version = reader.byte()?;
    if version != VERSION {
        return Err(StateChangeDecodeError::Version(version));
    }
    let change = match reader.byte()? {
        kind::MOUNTED => reader.mounted(false)?,
        kind::MOUNTED_WITH_LOCALITY => reader.mounted(true)?,
        kind::SEGMENT_STATUS => {
            let (segment, status) = (reader.id()?, reader.number()?);
            let status = u32::try_from(status).map_err(|_| StateChangeDecodeError::Value("status"))?;
            let until_ms = reader.option()?;
            StateChange::SegmentStatus { segment, status: SegmentStatus(status.cast_signed()), until_ms }
        }
        kind::UNMOUNTED => {
            StateChange::SegmentUnmounted { segment: reader.id()?, cause: reader.cause(&UNMOUNT_CAUSES)? }
        }
        kind::CLIENT_SILENT => StateChange::ClientSilent { client: reader.id()?, at_ms: reader.number()? },
        kind::CLIENT_RECOVERED => {
            StateChange::ClientRecovered { client: reader.id()?, at_ms: reader.number()? }
        }
        kind::CLIENT_EXPIRED => StateChange::ClientExpired { client: reader.id()? },
        kind::STARTED => StateChange::ObjectStarted(reader.object()?),
        kind::STORED => {
            let cause = reader.cause(&STORE_CAUSES)?;
            StateChange::ObjectStored { object: reader.object()?, cause }
        }
        kind::REMOVED => StateChange::Removed {
            tenant: reader.text()?,
            key: reader.text()?,
            group: reader.optional_text()?,
            tiers: StorageTiers { memory: reader.flag()?, disk: reader.flag()? },
            cause: reader.cause(&REMOVE_CAUSES)?,
        },
        kind::QUARANTINED => StateChange::RangeQuarantined {
            segment: reader.id()?,
            offset: reader.number()?,
            size: reader.number()?,
            until_ms: reader.number()?,
        },
        kind::RELEASED => StateChange::RangeReleased { segment: reader.id()?, offset: reader.number()? },
        kind::QUOTA => StateChange::TenantQuota { tenant: reader.text()?, requested: reader.option()? },
        kind::RETURN_TIMES => StateChange::ReturnTimes { counts: reader.bytes()?.into() },
        kind::DISK_MOUNTED => StateChange::DiskMounted { client: reader.id()? },
        kind::DISK_UNMOUNTED => StateChange::DiskUnmounted { client: reader.id()? },
        other => tasks::read(&mut reader, other)?,
    };
    Ok((change, reader.0))
}

/// What an encoded state change is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RecordSubject<'a> {
    /// One object.
    Object { tenant: &'a str, key: &'a str },
    /// A quarantined range.
    Quarantine { segment: Uuid, offset: u64 },
    /// Tasks or drain jobs.
    Planner,
}

/// The subject of an encoded state change; `None` if it affects more than one object, or is invalid.
pub(crate) fn subject(bytes: &[u8]) -> Option<RecordSubject<'_>> {
    let [VERSION, kind, rest @ ..] = bytes else { return None };
    let mut reader = StateChangeReader(rest);
    Some(match *kind {
        kind::STARTED | kind::REMOVED | kind::TRANSFER_STARTED | kind::TRANSFER_ENDED => {
            RecordSubject::Object { tenant: reader.str().ok()?, key: reader.str().ok()? }
        }
        kind::STORED => {
            reader.number().ok()?;
            RecordSubject::Object { tenant: reader.str().ok()?, key: reader.str().ok()? }
        }
        kind::QUARANTINED | kind::RELEASED => {
            RecordSubject::Quarantine { segment: reader.id().ok()?, offset: reader.number().ok()? }
        }
        kind::TASK | kind::DRAIN_JOB | kind::DRAIN_MOVE_STARTED | kind::DRAIN_MOVE_ENDED => {
            RecordSubject::Planner
        }
        _ => return None,
    })
}

pub(super) struct StateChangeReader<'a>(&'a [u8]);

impl<'a> StateChangeReader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], StateChangeDecodeError> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or(StateChangeDecodeError::Truncated)?;
        self.0 = rest;
        Ok(taken)
    }

    fn byte(&mut self) -> Result<u8, StateChangeDecodeError> {
        let (byte, rest) = self.0.split_first().ok_or(StateChangeDecodeError::Truncated)?;
        self.0 = rest;
        Ok(*byte)
    }

    pub(super) fn number(&mut self) -> Result<u64, StateChangeDecodeError> {
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
        Err(StateChangeDecodeError::Value("number"))
    }

    pub(super) fn flag(&mut self) -> Result<bool, StateChangeDecodeError> {
        match self.byte()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(StateChangeDecodeError::Value("flag")),
        }
    }

    fn option(&mut self) -> Result<Option<u64>, StateChangeDecodeError> {
        if self.flag()? { self.number().map(Some) } else { Ok(None) }
    }

    pub(super) fn id(&mut self) -> Result<Uuid, StateChangeDecodeError> {
        let (halves, _) = self.take(16)?.as_chunks::<8>();
        match halves {
            [first, second] => {
                Ok(Uuid { first: u64::from_le_bytes(*first), second: u64::from_le_bytes(*second) })
            }
            _ => Err(StateChangeDecodeError::Truncated),
        }
    }

    fn bytes(&mut self) -> Result<&'a [u8], StateChangeDecodeError> {
        let length = usize::try_from(self.number()?).map_err(|_| StateChangeDecodeError::Truncated)?;
        self.take(length)
    }

    pub(super) fn text(&mut self) -> Result<Cow<'a, str>, StateChangeDecodeError> {
        self.str().map(Cow::Borrowed)
    }

    fn str(&mut self) -> Result<&'a str, StateChangeDecodeError> {
        std::str::from_utf8(self.bytes()?).map_err(|_| StateChangeDecodeError::Value("text"))
    }

    fn optional_text(&mut self) -> Result<Option<Cow<'a, str>>, StateChangeDecodeError> {
        if self.flag()? { self.text().map(Some) } else { Ok(None) }
    }

    fn on_disk(&mut self) -> Result<Option<DiskCopyState<'a>>, StateChangeDecodeError> {
        if !self.flag()? {
            return Ok(None);
        }
        let (replica, client, size, endpoint) = (self.number()?, self.id()?, self.number()?, self.text()?);
        Ok(Some(DiskCopyState { replica, client, size, endpoint }))
    }

    fn cause<T: Copy>(&mut self, all: &[T]) -> Result<T, StateChangeDecodeError> {
        let index = usize::try_from(self.number()?).unwrap_or(usize::MAX);
        all.get(index).copied().ok_or(StateChangeDecodeError::Value("cause"))
    }

    pub(super) fn code(&mut self) -> Result<i32, StateChangeDecodeError> {
        let code = u32::try_from(self.number()?).map_err(|_| StateChangeDecodeError::Value("code"))?;
        Ok(code.cast_signed())
    }

    fn mounted(&mut self, has_locality: bool) -> Result<StateChange<'a>, StateChangeDecodeError> {
        let mut segment = Segment {
            id: self.id()?,
            name: self.text()?,
            base: self.number()?,
            size: self.number()?,
            te_endpoint: self.text()?,
            protocol: self.text()?,
            host_id: self.text()?,
            locality: None,
        };
        let (client, at_ms) = (self.id()?, self.number()?);
        if has_locality {
            segment.locality = Some(self.locality()?);
        }
        Ok(StateChange::SegmentMounted { segment, client, at_ms })
    }

    fn locality(&mut self) -> Result<SegmentLocality<Cow<'a, str>>, StateChangeDecodeError> {
        let (numa_node, count) = (self.code()?, self.number()?);
        if count > MAX_HCA_NAMES {
            return Err(StateChangeDecodeError::Value("number of network devices"));
        }
        Ok(SegmentLocality {
            numa_node,
            hca_names: (0..count).map(|_| self.text()).collect::<Result<_, _>>()?,
        })
    }

    pub(super) fn locations(&mut self) -> Result<Vec<ReplicaLocation>, StateChangeDecodeError> {
        let count = self.number()?;
        if count > MAX_LOCATIONS {
            return Err(StateChangeDecodeError::Value("number of replicas"));
        }
        (0..count)
            .map(|_| {
                Ok(ReplicaLocation { replica: self.number()?, segment: self.id()?, offset: self.number()? })
            })
            .collect()
    }

    fn object(&mut self) -> Result<ObjectState<'a>, StateChangeDecodeError> {
        Ok(ObjectState {
            tenant: self.text()?,
            key: self.text()?,
            size: self.number()?,
            client: self.id()?,
            locations: Cow::Owned(self.locations()?),
            disk_copy: self.on_disk()?,
            checksum: self.option()?,
            hard_pin: self.flag()?,
            soft_pin_until_ms: self.option()?,
            group: self.optional_text()?,
            since_ms: self.number()?,
        })
    }
}
