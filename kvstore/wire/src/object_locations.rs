//! Batches of readable objects with their locations: the response of `GET /api/v1/object_locations`, an extension of Moongate's
//! master. A list of all objects takes one request per batch, and each request continues at the position that the batch before
//! ended with.
//!
//! A batch, with little-endian numbers:
//!
//! | bytes | content |
//! |---|---|
//! | 8 | [`MAGIC`] |
//! | 16 | position of the next batch |
//! | 4 | 1 if there is a next batch, else 0 |
//! | 4, 4, 4 | number of objects, bytes of all objects, number of endpoints |
//! | | objects: length of the key (2), number of locations (1), key, locations (4 each) |
//! | | endpoints: length (2), text |
//! | 4 | CRC-32 of everything before |
//!
//! A location is twice the index of its endpoint, plus 1 for a disk. A batch is accepted completely or not at all, so that a damaged one
//! never looks like one without some of its objects.

use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;

/// Start of each batch, with the version of the format.
const MAGIC: [u8; 8] = *b"MGOBJL\0\x01";
const HEADER: usize = MAGIC.len() + 16 + 4 * 4;
const CHECKSUM: usize = 4;
/// Bytes of an object without its key and locations.
const OBJECT_HEADER: usize = 3;
const LOCATION: usize = 4;

/// Largest batch in bytes that readers accept. Moongate's master sends up to about 2 MiB.
pub const MAX_BATCH: usize = 16 << 20;
/// Maximum length of a listed key in bytes. Engines' keys have fewer than 300.
pub const MAX_KEY: usize = 16 << 10;
/// Maximum number of listed locations of one object.
pub const MAX_LOCATIONS: usize = 255;

/// Position of a batch in a master's table. Only that master, before its next restart, accepts it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ListPosition {
    /// Identifies the table.
    pub table: u64,
    pub shard: u32,
    pub slot: u32,
}

/// As in a URL: 32 hexadecimal digits.
impl fmt::Display for ListPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { table, shard, slot } = self;
        write!(f, "{table:016x}{shard:08x}{slot:08x}")
    }
}

/// The text is not 32 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a position: 32 hexadecimal digits are expected")]
pub struct ListPositionError;

impl FromStr for ListPosition {
    type Err = ListPositionError;

    fn from_str(text: &str) -> Result<Self, ListPositionError> {
        let is_hexadecimal = text.len() == 32 && text.bytes().all(|digit| digit.is_ascii_hexdigit());
        let number = u128::from_str_radix(text, 16).ok().filter(|_| is_hexadecimal);
        let number = number.ok_or(ListPositionError)?;
        Ok(Self { table: (number >> 64) as u64, shard: (number >> 32) as u32, slot: number as u32 })
    }
}

/// One replica of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObjectLocation<'a> {
    /// Transfer endpoint of the node as `host:port`.
    pub endpoint: &'a str,
    /// Whether the replica is on the node's disk instead of in its memory.
    pub is_on_disk: bool,
}

/// Writes a batch.
#[derive(Debug)]
pub struct LocationBatchWriter {
    bytes: Vec<u8>,
    objects: u32,
    endpoint_indices: HashMap<Box<str>, u32>,
    /// Endpoints in the format of the batch.
    endpoints: Vec<u8>,
}

impl LocationBatchWriter {
    /// A batch without objects, with memory for `capacity` bytes.
    pub fn with_capacity(capacity: usize) -> Self {
        let mut bytes = Vec::with_capacity(capacity);
        bytes.resize(HEADER, 0);
        Self { bytes, objects: 0, endpoint_indices: HashMap::new(), endpoints: Vec::new() }
    }

    /// Number of objects.
    pub fn len(&self) -> usize {
        self.objects as usize
    }

    pub fn is_empty(&self) -> bool {
        self.objects == 0
    }

    /// Size of the objects in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Adds an object. Returns false, without adding it, if its key is longer than [`MAX_KEY`] or it has no location. Locations beyond
    /// [`MAX_LOCATIONS`] are omitted.
    pub fn add<'a>(&mut self, key: &str, locations: impl Iterator<Item = ObjectLocation<'a>>) -> bool {
        let start = self.bytes.len();
        let Some(key_length) = u16::try_from(key.len()).ok().filter(|_| key.len() <= MAX_KEY) else {
            return false;
        };
        self.bytes.extend_from_slice(&key_length.to_le_bytes());
        self.bytes.push(0);
        self.bytes.extend_from_slice(key.as_bytes());
        let mut count = 0;
        for location in locations.take(MAX_LOCATIONS) {
            let Some(endpoint) = self.endpoint(location.endpoint) else { continue };
            let location = endpoint << 1 | u32::from(location.is_on_disk);
            self.bytes.extend_from_slice(&location.to_le_bytes());
            count += 1;
        }
        if count == 0 {
            self.bytes.truncate(start);
            return false;
        }
        if let Some(target) = self.bytes.get_mut(start + 2) {
            *target = count;
        }
        self.objects += 1;
        true
    }

    /// Index of an endpoint; `None` if it is longer than any host name.
    fn endpoint(&mut self, endpoint: &str) -> Option<u32> {
        if let Some(index) = self.endpoint_indices.get(endpoint) {
            return Some(*index);
        }
        let length = u16::try_from(endpoint.len()).ok()?;
        let index = u32::try_from(self.endpoint_indices.len()).ok()?;
        self.endpoint_indices.insert(endpoint.into(), index);
        self.endpoints.extend_from_slice(&length.to_le_bytes());
        self.endpoints.extend_from_slice(endpoint.as_bytes());
        Some(index)
    }

    /// The complete batch. `next`: where the next one starts, `None` after the last object.
    pub fn finish(self, next: Option<ListPosition>) -> Vec<u8> {
        let Self { mut bytes, objects, endpoint_indices, endpoints } = self;
        let ListPosition { table, shard, slot } = next.unwrap_or_default();
        let (object_bytes, endpoint_count) = ((bytes.len() - HEADER) as u32, endpoint_indices.len() as u32);
        let mut header = Vec::with_capacity(HEADER);
        header.extend_from_slice(&MAGIC);
        header.extend_from_slice(&table.to_le_bytes());
        for number in [shard, slot, u32::from(next.is_some()), objects, object_bytes, endpoint_count] {
            header.extend_from_slice(&number.to_le_bytes());
        }
        if let Some(target) = bytes.get_mut(..HEADER) {
            target.copy_from_slice(&header);
        }
        bytes.extend_from_slice(&endpoints);
        let checksum = crc32fast::hash(&bytes);
        bytes.extend_from_slice(&checksum.to_le_bytes());
        bytes
    }
}

/// Why bytes are not a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LocationBatchError {
    /// Another format, or another version of it.
    #[error("not a batch of object locations in a known format")]
    Format,
    #[error("wrong checksum")]
    Checksum,
    /// The checksum is right, but the content contradicts itself.
    #[error("invalid batch of object locations")]
    Content,
}

/// One object of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListedObject<'b> {
    pub key: &'b str,
    locations: &'b [[u8; LOCATION]],
}

/// A parsed batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocationBatch<'b> {
    /// Where the next batch starts; `None` after the last one.
    pub next: Option<ListPosition>,
    pub objects: Vec<ListedObject<'b>>,
    endpoints: Vec<&'b str>,
}

impl<'b> LocationBatch<'b> {
    /// Parses a whole batch.
    ///
    /// # Errors
    /// If the bytes are not exactly one intact batch.
    pub fn parse(bytes: &'b [u8]) -> Result<Self, LocationBatchError> {
        if !bytes.starts_with(&MAGIC) {
            return Err(LocationBatchError::Format);
        }
        let (content, checksum) = bytes.split_last_chunk::<CHECKSUM>().ok_or(LocationBatchError::Content)?;
        if crc32fast::hash(content) != u32::from_le_bytes(*checksum) {
            return Err(LocationBatchError::Checksum);
        }
        Self::parse_content(content.get(MAGIC.len()..).unwrap_or_default()).ok_or(LocationBatchError::Content)
    }

    fn parse_content(mut rest: &'b [u8]) -> Option<Self> {
        let table = u64::from_le_bytes(*take_array(&mut rest)?);
        let [shard, slot, has_next, count, object_bytes, endpoint_count] =
            take_array::<24>(&mut rest)?.as_chunks().0.first_chunk::<6>()?.map(u32::from_le_bytes);
        let next = match has_next {
            0 => None,
            1 => Some(ListPosition { table, shard, slot }),
            _ => return None,
        };
        let mut remaining = take(&mut rest, object_bytes as usize)?;
        // Counts are not trusted with memory: each item has a minimum size.
        let mut objects =
            Vec::with_capacity((count as usize).min(remaining.len() / (OBJECT_HEADER + LOCATION)));
        let mut highest = None;
        for _ in 0..count {
            let object = take_object(&mut remaining)?;
            highest = highest.max(object.locations.iter().map(|location| endpoint_index(*location)).max());
            objects.push(object);
        }
        let mut endpoints = Vec::with_capacity((endpoint_count as usize).min(rest.len() / 2));
        for _ in 0..endpoint_count {
            let length = u16::from_le_bytes(*take_array(&mut rest)?);
            endpoints.push(std::str::from_utf8(take(&mut rest, length.into())?).ok()?);
        }
        let is_whole = remaining.is_empty() && rest.is_empty();
        let are_known = highest.is_none_or(|highest| highest < endpoints.len());
        (is_whole && are_known).then_some(Self { next, objects, endpoints })
    }

    /// Locations of an object of this batch, at least one.
    pub fn locations(&self, object: &ListedObject<'b>) -> impl Iterator<Item = ObjectLocation<'b>> {
        object.locations.iter().filter_map(|location| {
            let endpoint = self.endpoints.get(endpoint_index(*location))?;
            Some(ObjectLocation { endpoint, is_on_disk: location[0] & 1 == 1 })
        })
    }
}

fn endpoint_index(location: [u8; LOCATION]) -> usize {
    (u32::from_le_bytes(location) >> 1) as usize
}

fn take<'b>(rest: &mut &'b [u8], size: usize) -> Option<&'b [u8]> {
    let (taken, after) = rest.split_at_checked(size)?;
    *rest = after;
    Some(taken)
}

fn take_array<'b, const N: usize>(rest: &mut &'b [u8]) -> Option<&'b [u8; N]> {
    let (taken, after) = rest.split_first_chunk()?;
    *rest = after;
    Some(taken)
}

fn take_object<'b>(rest: &mut &'b [u8]) -> Option<ListedObject<'b>> {
    let [low, high, count] = *take_array::<OBJECT_HEADER>(rest)?;
    let key = std::str::from_utf8(take(rest, u16::from_le_bytes([low, high]).into())?).ok()?;
    let (locations, _) = take(rest, LOCATION * usize::from(count))?.as_chunks();
    (count > 0).then_some(ListedObject { key, locations })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    type Object = (String, Vec<(usize, bool)>);

    fn location((node, is_on_disk): &(usize, bool)) -> ObjectLocation<'static> {
        ObjectLocation { endpoint: ["a:1", "b:2", "10.0.0.3:13102"][*node], is_on_disk: *is_on_disk }
    }

    fn write(objects: &[Object], next: Option<ListPosition>) -> Vec<u8> {
        let mut writer = LocationBatchWriter::with_capacity(0);
        for (key, locations) in objects {
            assert!(writer.add(key, locations.iter().map(location)));
        }
        assert_eq!(writer.len(), objects.len());
        writer.finish(next)
    }

    fn objects() -> impl Strategy<Value = Vec<Object>> {
        let locations = prop::collection::vec((0_usize..3, any::<bool>()), 1..4);
        prop::collection::vec(("[a-z_@é]{0,90}", locations), 0..40)
    }

    fn next() -> impl Strategy<Value = Option<ListPosition>> {
        let position = any::<(u64, u32, u32)>();
        prop::option::of(position.prop_map(|(table, shard, slot)| ListPosition { table, shard, slot }))
    }

    #[test]
    fn objects_that_cannot_be_listed_are_omitted() {
        let mut writer = LocationBatchWriter::with_capacity(0);
        let location = ObjectLocation { endpoint: "a:1", is_on_disk: false };
        assert!(!writer.add("nowhere", std::iter::empty()));
        assert!(!writer.add(&"x".repeat(MAX_KEY + 1), std::iter::once(location)));
        assert!(writer.is_empty());
        assert!(writer.add(&"x".repeat(MAX_KEY), std::iter::repeat_n(location, MAX_LOCATIONS + 1)));
        let bytes = writer.finish(None);
        let batch = LocationBatch::parse(&bytes).unwrap();
        assert_eq!(batch.locations(&batch.objects[0]).count(), MAX_LOCATIONS);
    }

    /// Masters and gateways are upgraded separately.
    #[test]
    fn the_format_is_unchanged() {
        let mut writer = LocationBatchWriter::with_capacity(0);
        writer.add("k", std::iter::once(ObjectLocation { endpoint: "a:1", is_on_disk: true }));
        let expected = [
            b"MGOBJL\x00\x01" as &[u8],
            &1_u64.to_le_bytes(),
            &[2_u32, 3, 1].map(u32::to_le_bytes).concat(),
            &[1_u32, 8, 1].map(u32::to_le_bytes).concat(),
            b"\x01\x00\x01k\x01\x00\x00\x00\x03\x00a:1",
            b"\x80\x03\x5e\x62",
        ];
        assert_eq!(writer.finish(Some(ListPosition { table: 1, shard: 2, slot: 3 })), expected.concat());
    }

    #[test]
    fn positions_are_32_digits() {
        let position = ListPosition { table: 1 << 63, shard: 7, slot: u32::MAX };
        assert_eq!(position.to_string(), "800000000000000000000007ffffffff");
        assert_eq!(position.to_string().parse(), Ok(position));
        for invalid in ["", "7", "+0000000000000000000000000000007", "8000000000000000000000007fffffffff"] {
            assert_eq!(invalid.parse::<ListPosition>(), Err(ListPositionError), "{invalid}");
        }
    }

    proptest! {
        #[test]
        fn a_batch_is_unchanged_after_a_round_trip(objects in objects(), next in next()) {
            let bytes = write(&objects, next);
            let batch = LocationBatch::parse(&bytes).unwrap();
            prop_assert_eq!(batch.next, next);
            prop_assert_eq!(batch.objects.len(), objects.len());
            for (parsed, (key, locations)) in batch.objects.iter().zip(&objects) {
                prop_assert_eq!(parsed.key, key);
                let expected: Vec<ObjectLocation<'_>> = locations.iter().map(location).collect();
                prop_assert_eq!(batch.locations(parsed).collect::<Vec<_>>(), expected);
            }
        }

        /// Otherwise the missing objects would be taken as removed.
        #[test]
        fn a_damaged_batch_is_rejected(objects in objects(), next in next(), at in any::<prop::sample::Index>(), bit in 0..8_u32) {
            let bytes = write(&objects, next);
            let mut flipped = bytes.clone();
            flipped[at.index(bytes.len())] ^= 1_u8 << bit;
            prop_assert!(LocationBatch::parse(&flipped).is_err());
            prop_assert!(LocationBatch::parse(&bytes[..at.index(bytes.len())]).is_err());
            prop_assert!(LocationBatch::parse(&[&bytes[..], b"\0"].concat()).is_err());
        }

        /// A right checksum does not make the content valid.
        #[test]
        fn any_content_is_parsed_or_rejected(content in prop::collection::vec(0_u8..4, 0..120)) {
            let mut bytes = [&MAGIC[..], &content].concat();
            bytes.extend_from_slice(&crc32fast::hash(&bytes).to_le_bytes());
            if let Ok(batch) = LocationBatch::parse(&bytes) {
                prop_assert!(batch.objects.iter().all(|object| batch.locations(object).count() == object.locations.len()));
            }
        }
    }
}
