//! Events of the Mooncake master, version 0.3.13 (`--enable_kv_events`).
//!
//! An event is a map. It contains engine-style fields (`type`, `block_hashes`, …) in addition to the master's own, for subscribers that
//! support only those. The master has neither tokens nor hashes: only a key that is a plain 64-bit number is also sent as a hash.

use super::batch::{RawEvents, split};
use super::engine::text;
use super::reader::{MsgpackReader, MsgpackValue};
use super::writer::MsgpackWriter;
use super::{EventDecodeError, StorageMedium};

/// The tenant of objects stored without a tenant.
pub const DEFAULT_TENANT: &str = "default";

/// A batch of events published by a master.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreEventBatch<'a> {
    /// The master's clock, in milliseconds since 1970.
    pub timestamp_ms: u64,
    events: RawEvents<'a>,
}

/// An event about a master's objects or segments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreEvent<'a> {
    /// Number of the event, from 1.
    pub id: u64,
    /// The master's clock, in milliseconds since 1970.
    pub timestamp_ms: u64,
    pub tenant: &'a str,
    /// Backend id configured in the master.
    pub backend: &'a str,
    /// Kind of the event with its data.
    pub change: StoreEventKind<'a>,
}

/// What a master states in all of its events, from its settings. Filled by masters since 0.3.14.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StoreEventLabels<'a> {
    pub model: Option<&'a str>,
    /// Tokens of a block.
    pub block_size: Option<u64>,
    /// Salt of the engine's block hashes.
    pub salt: Option<&'a str>,
    /// Name of the LoRA adapter.
    pub lora: Option<&'a str>,
    /// Data-parallel rank of the engine.
    pub dp_rank: Option<u64>,
}

/// Kinds of events of a master.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreEventKind<'a> {
    /// The first replica on this medium is complete.
    Stored(StoreEventObject<'a>),
    /// The last replica on this medium was removed.
    Removed(StoreEventObject<'a>),
    /// All objects of the tenant were removed. Sent by masters after 0.3.13.
    Cleared,
    /// A segment changed, which affects all of its replicas. No release of Mooncake sends this; subscribers skip unknown kinds.
    Segment {
        /// The segment's name: its node's `host:port`.
        name: &'a str,
        change: SegmentChange,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SegmentChange {
    /// The segment is readable and writable.
    Mounted,
    /// Its node sends no heartbeats. Its objects are not returned to readers, but may recover.
    Silent,
    /// Its node has recovered, so its objects are readable again.
    Recovered,
    /// The segment is lost. Each lost object has its own event.
    Lost,
}

impl SegmentChange {
    const ALL: [Self; 4] = [Self::Mounted, Self::Silent, Self::Recovered, Self::Lost];

    /// Names on the wire: the master's and the engine-style one.
    fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Mounted => ("segment_mounted", "SegmentMounted"),
            Self::Silent => ("segment_silent", "SegmentSilent"),
            Self::Recovered => ("segment_back", "SegmentBack"),
            Self::Lost => ("segment_lost", "SegmentLost"),
        }
    }

    fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|change| change.names().0 == name)
    }
}

/// An object on a medium.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreEventObject<'a> {
    pub key: &'a str,
    /// Group of the object. An empty name means none.
    pub group: Option<&'a str>,
    /// Storage medium: [`StorageMedium::StoreMemory`] or [`StorageMedium::StoreDisk`].
    pub medium: StorageMedium<'a>,
}

impl<'a> StoreEventBatch<'a> {
    /// Decodes the payload of a message. All of it is validated as MessagePack; [`events`](Self::events) decodes the events.
    ///
    /// # Errors
    /// [`EventDecodeError::Truncated`] or [`EventDecodeError::Malformed`].
    pub fn decode(payload: &'a [u8]) -> Result<Self, EventDecodeError> {
        match split(payload)? {
            (MsgpackValue::Uint(timestamp_ms), events, _) => Ok(Self { timestamp_ms, events }),
            _ => Err(EventDecodeError::Malformed),
        }
    }

    /// The events in order. An unsupported event yields an error; the others are still decoded.
    pub fn events(
        &self,
    ) -> impl ExactSizeIterator<Item = Result<StoreEvent<'a>, EventDecodeError>> + use<'a> {
        self.events.iter(StoreEvent::read)
    }
}

/// Appends a payload with these events, identical to the bytes of a master without labels.
pub fn encode_batch(timestamp_ms: u64, events: &[StoreEvent<'_>], out: &mut Vec<u8>) {
    encode_labelled_batch(timestamp_ms, events, &StoreEventLabels::default(), out);
}

/// Appends a payload with these events, which all have the same labels.
pub fn encode_labelled_batch(
    timestamp_ms: u64,
    events: &[StoreEvent<'_>],
    labels: &StoreEventLabels<'_>,
    out: &mut Vec<u8>,
) {
    let mut writer = MsgpackWriter::new(out);
    writer.array(3);
    writer.uint(timestamp_ms);
    writer.array(events.len());
    for event in events {
        event.write(labels, &mut writer);
    }
    writer.uint(labels.dp_rank.unwrap_or(0));
}

impl<'a> StoreEvent<'a> {
    fn read(reader: &mut MsgpackReader<'a>) -> Result<Self, EventDecodeError> {
        let MsgpackValue::Map(pairs) = reader.value()? else { return Err(EventDecodeError::UnknownKind) };
        let (mut id, mut timestamp_ms, mut kind) = (None, None, None);
        let (mut tenant, mut backend, mut group, mut medium, mut key) = (None, None, None, None, None);
        let mut segment = None;
        for _ in 0..pairs {
            let MsgpackValue::Text(name) = reader.value()? else {
                return Err(EventDecodeError::Unexpected("a field name"));
            };
            match name {
                b"event_id" => id = uint(reader, "event_id")?,
                b"timestamp" => timestamp_ms = uint(reader, "timestamp")?,
                b"event_type" => kind = optional(reader, "event_type")?,
                b"tenant_id" => tenant = optional(reader, "tenant_id")?,
                b"backend_id" => backend = optional(reader, "backend_id")?,
                b"group_id" => group = optional(reader, "group_id")?.filter(|group| !group.is_empty()),
                b"medium" => medium = optional(reader, "medium")?,
                b"object_key" => key = optional(reader, "object_key")?,
                b"segment" => segment = optional(reader, "segment")?,
                _ => {
                    reader.skip()?;
                }
            }
        }
        let object = || {
            let key = key.ok_or(EventDecodeError::Missing("object_key"))?;
            let medium = medium.ok_or(EventDecodeError::Missing("medium"))?;
            Ok(StoreEventObject { key, group, medium: StorageMedium::from_name(medium) })
        };
        let change = match kind {
            Some("stored") => StoreEventKind::Stored(object()?),
            Some("removed") => StoreEventKind::Removed(object()?),
            Some("cleared") => StoreEventKind::Cleared,
            Some(other) => StoreEventKind::Segment {
                change: SegmentChange::from_name(other).ok_or(EventDecodeError::UnknownKind)?,
                name: segment.ok_or(EventDecodeError::Missing("segment"))?,
            },
            None => return Err(EventDecodeError::UnknownKind),
        };
        Ok(Self {
            id: id.ok_or(EventDecodeError::Missing("event_id"))?,
            timestamp_ms: timestamp_ms.ok_or(EventDecodeError::Missing("timestamp"))?,
            tenant: tenant.unwrap_or(DEFAULT_TENANT),
            backend: backend.ok_or(EventDecodeError::Missing("backend_id"))?,
            change,
        })
    }

    fn write(&self, labels: &StoreEventLabels<'_>, writer: &mut MsgpackWriter<'_>) {
        let (pairs, kind, engine_kind) = match self.change {
            StoreEventKind::Stored(_) => (20, "stored", "BlockStored"),
            StoreEventKind::Removed(_) => (17, "removed", "BlockRemoved"),
            StoreEventKind::Cleared => (12, "cleared", "AllBlocksCleared"),
            StoreEventKind::Segment { change, .. } => {
                let (kind, engine_kind) = change.names();
                (11, kind, engine_kind)
            }
        };
        writer.map(pairs);
        writer.text("event_id");
        writer.uint(self.id);
        writer.text("timestamp");
        writer.uint(self.timestamp_ms);
        member(writer, "event_type", Some(kind));
        member(writer, "type", Some(engine_kind));
        member(writer, "model_name", labels.model);
        number_member(writer, "block_size", labels.block_size);
        member(writer, "additional_salt", labels.salt);
        member(writer, "lora_name", labels.lora);
        member(writer, "tenant_id", Some(self.tenant));
        member(writer, "backend_id", Some(self.backend));
        match self.change {
            StoreEventKind::Stored(object) => {
                object.write(labels, writer);
                writer.text("base_block_idx");
                writer.uint(0);
                for name in ["parent_hash", "token_ids", "parent_block_hash"] {
                    member(writer, name, None);
                }
            }
            StoreEventKind::Removed(object) => {
                object.write(labels, writer);
                member(writer, "base_block_idx", None);
            }
            StoreEventKind::Cleared => {
                member(writer, "medium", None);
                number_member(writer, "dp_rank", labels.dp_rank);
            }
            StoreEventKind::Segment { name, .. } => member(writer, "segment", Some(name)),
        }
    }
}

impl StoreEventObject<'_> {
    /// The key as a hash, if it is a 64-bit number in decimal or hexadecimal with `0x`.
    pub fn hash(&self) -> Option<u64> {
        let hex = self.key.strip_prefix("0x").or_else(|| self.key.strip_prefix("0X"));
        let (digits, radix) = hex.map_or((self.key, 10), |hex| (hex, 16));
        // Rejects a sign, which `from_str_radix` accepts.
        let digits = Some(digits).filter(|digits| digits.chars().all(|digit| digit.is_digit(radix)))?;
        u64::from_str_radix(digits, radix).ok()
    }

    fn write(&self, labels: &StoreEventLabels<'_>, writer: &mut MsgpackWriter<'_>) {
        member(writer, "group_id", self.group.filter(|group| !group.is_empty()));
        member(writer, "medium", Some(self.medium.name()));
        number_member(writer, "dp_rank", labels.dp_rank);
        member(writer, "object_key", Some(self.key));
        let hash = self.hash();
        writer.text("seq_hashes");
        writer.array(hash.iter().len());
        hash.into_iter().for_each(|hash| writer.uint(hash));
        writer.text("block_hashes");
        writer.array(hash.iter().len());
        hash.into_iter().for_each(|hash| writer.int(hash.cast_signed()));
    }
}

/// Writes a field that is a text or nil.
fn member(writer: &mut MsgpackWriter<'_>, name: &str, value: Option<&str>) {
    writer.text(name);
    match value {
        Some(value) => writer.text(value),
        None => writer.nil(),
    }
}

/// Writes a field that is a number or nil.
fn number_member(writer: &mut MsgpackWriter<'_>, name: &str, value: Option<u64>) {
    writer.text(name);
    match value {
        Some(value) => writer.uint(value),
        None => writer.nil(),
    }
}

fn uint(reader: &mut MsgpackReader<'_>, name: &'static str) -> Result<Option<u64>, EventDecodeError> {
    match reader.value()? {
        MsgpackValue::Uint(number) => Ok(Some(number)),
        _ => Err(EventDecodeError::Unexpected(name)),
    }
}

fn optional<'a>(
    reader: &mut MsgpackReader<'a>,
    name: &'static str,
) -> Result<Option<&'a str>, EventDecodeError> {
    let mut ahead = *reader;
    if ahead.value()? == MsgpackValue::Nil {
        *reader = ahead;
        return Ok(None);
    }
    text(reader, name).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn object(key: &str) -> StoreEventObject<'_> {
        StoreEventObject { key, group: None, medium: StorageMedium::StoreMemory }
    }

    #[test]
    fn only_plain_64_bit_numbers_are_hashes() {
        assert_eq!(object("12345678901234567890").hash(), Some(12_345_678_901_234_567_890));
        assert_eq!(object("0xdeadbeef").hash(), Some(0xdead_beef));
        assert_eq!(object("0XFF").hash(), Some(0xff));
        for key in ["", "0x", "+1", "-1", "0x+1", "18446744073709551616", "ff", "1 ", "e3b0_0_k"] {
            assert_eq!(object(key).hash(), None, "{key:?}");
        }
    }

    #[test]
    fn labels_are_in_every_event_and_in_the_batch() {
        let labels = StoreEventLabels {
            model: Some("llama"),
            block_size: Some(64),
            salt: Some("salt"),
            lora: Some("adapter"),
            dp_rank: Some(3),
        };
        let kinds = [
            StoreEventKind::Stored(object("a")),
            StoreEventKind::Removed(object("a")),
            StoreEventKind::Cleared,
        ];
        for change in kinds {
            let event =
                StoreEvent { id: 1, timestamp_ms: 2, tenant: DEFAULT_TENANT, backend: "pool", change };
            let mut payload = Vec::new();
            encode_labelled_batch(2, &[event], &labels, &mut payload);
            // As in the events of Mooncake 0.3.14 with these settings.
            for member in [
                &b"\xaamodel_name\xa5llama\xaablock_size\x40\xafadditional_salt\xa4salt\xa9lora_name\xa7adapter"[..],
                b"\xa7dp_rank\x03",
            ] {
                assert!(payload.windows(member.len()).any(|window| window == member), "{change:?}: {payload:?}");
            }
            assert_eq!(payload.last(), Some(&3), "the rank follows the events");
            let batch = StoreEventBatch::decode(&payload).unwrap();
            assert_eq!(batch.events().collect::<Result<Vec<_>, _>>().unwrap(), [event]);
        }
    }

    fn name() -> impl Strategy<Value = String> {
        "[a-z0-9@_é]{1,40}"
    }

    fn change() -> impl Strategy<Value = (u8, String, Option<String>, String)> {
        let key = prop_oneof![any::<u64>().prop_map(|number| number.to_string()), name()];
        (
            0_u8..7,
            key,
            proptest::option::of(name()),
            prop_oneof![Just("cpu".to_owned()), Just("disk".to_owned()), name()],
        )
    }

    proptest! {
        #[test]
        #[cfg_attr(miri, ignore = "generating strings from a regular expression takes minutes")]
        fn events_round_trip(
            timestamp_ms: u64,
            changes in prop::collection::vec((any::<u64>(), any::<u64>(), name(), name(), change()), 0..8),
        ) {
            let events: Vec<StoreEvent<'_>> = changes.iter().map(|(id, timestamp_ms, tenant, backend, change)| {
                let (kind, key, group, medium) = change;
                let object = StoreEventObject { key, group: group.as_deref(), medium: StorageMedium::from_name(medium) };
                let change = match kind {
                    0 => StoreEventKind::Stored(object),
                    1 => StoreEventKind::Removed(object),
                    2 => StoreEventKind::Cleared,
                    other => StoreEventKind::Segment { name: key, change: SegmentChange::ALL[usize::from(other - 3)] },
                };
                StoreEvent { id: *id, timestamp_ms: *timestamp_ms, tenant, backend, change }
            }).collect();
            let mut payload = Vec::new();
            encode_batch(timestamp_ms, &events, &mut payload);
            let batch = StoreEventBatch::decode(&payload).unwrap();
            prop_assert_eq!(batch.timestamp_ms, timestamp_ms);
            prop_assert_eq!(batch.events().collect::<Result<Vec<_>, _>>(), Ok(events));
        }
    }
}
