//! A request body with replaced and appended members, without copying or re-serializing the rest.

use bytes::Bytes;
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::body_member::BodyMember;
use super::routing_fields::RoutingFields;
use super::serde_reader::BodyKeySeed;

/// Replaces the value of one top-level member if it exists.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct MemberEdit {
    pub(crate) member: BodyMember,
    /// JSON text of the new value.
    pub(crate) value: Bytes,
}

impl MemberEdit {
    pub(crate) fn new(member: BodyMember, value: impl Into<Bytes>) -> Self {
        Self { member, value: value.into() }
    }
}

/// A body in chunks: slices of the client's bytes and inserted bytes. Cheap to clone.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct SplicedBody {
    chunks: Vec<Bytes>,
}

impl SplicedBody {
    pub(crate) fn verbatim(body: Bytes) -> Self {
        Self { chunks: vec![body] }
    }

    /// `body` with `edits` applied where their members exist, and `appended` (JSON members such as `"a":1,"b":2`) inserted before
    /// the closing brace. `fields` must have been read from this `body`.
    pub(crate) fn new(
        body: &Bytes,
        fields: &RoutingFields<'_>,
        edits: &[MemberEdit],
        appended: Bytes,
    ) -> Self {
        let mut chunks = Vec::with_capacity(4 + 2 * edits.len());
        let mut from = 0;
        for (start, end, value) in edit_positions(body, fields, edits) {
            chunks.push(body.slice(from..start));
            chunks.push(value);
            from = end;
        }
        let Some(brace) = memchr::memrchr(b'}', body).filter(|_| !appended.is_empty()) else {
            chunks.push(body.slice(from..));
            return Self { chunks };
        };
        chunks.push(body.slice(from..brace));
        if !fields.is_empty_object {
            chunks.push(Bytes::from_static(b","));
        }
        chunks.push(appended);
        chunks.push(Bytes::from_static(b"}"));
        Self { chunks }
    }

    pub(crate) fn len(&self) -> u64 {
        self.chunks.iter().map(|chunk| chunk.len() as u64).sum()
    }

    /// In order; some may be empty.
    pub(crate) fn chunks(&self) -> &[Bytes] {
        &self.chunks
    }

    #[cfg(test)]
    pub(crate) fn of_chunks(chunks: Vec<Bytes>) -> Self {
        Self { chunks }
    }

    /// All chunks in one buffer.
    pub(crate) fn to_vec(&self) -> Vec<u8> {
        self.chunks.concat()
    }
}

/// Byte ranges of the edited members' values, in order. A second pass over the body, only if there is something to edit.
fn edit_positions(
    body: &Bytes,
    fields: &RoutingFields<'_>,
    edits: &[MemberEdit],
) -> Vec<(usize, usize, Bytes)> {
    if !edits.iter().any(|edit| fields.has(edit.member)) {
        return Vec::new();
    }
    let mut deserializer = serde_json::Deserializer::from_slice(body);
    let found = MemberLocator { base: body.as_ptr() as usize, edits }.deserialize(&mut deserializer);
    // The head was read from the same bytes, so this pass cannot fail; if it did, nothing would be edited.
    found.unwrap_or_default()
}

struct MemberLocator<'e> {
    /// Address of the body's first byte; subtracted from a raw value's address to get its offset.
    base: usize,
    edits: &'e [MemberEdit],
}

impl<'de> DeserializeSeed<'de> for MemberLocator<'_> {
    type Value = Vec<(usize, usize, Bytes)>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for MemberLocator<'_> {
    type Value = Vec<(usize, usize, Bytes)>;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut found = Vec::with_capacity(self.edits.len());
        while let Some(key) = map.next_key_seed(BodyKeySeed)? {
            match self.edits.iter().find(|edit| Some(edit.member) == key.member) {
                Some(edit) => {
                    let raw: &'de RawValue = map.next_value()?;
                    let start = raw.get().as_ptr() as usize - self.base;
                    found.push((start, start + raw.get().len(), edit.value.clone()));
                }
                None => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(found)
    }
}
