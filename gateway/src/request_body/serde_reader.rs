//! A request body's members as serde_json parses them.

use std::borrow::Cow;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, Visitor};

use super::body_member::{BodyMember, is_id_key};
use super::json_shape::{JsonKind, JsonShape, JsonShapeSeed};
use super::routing_fields::{BodyMembers, may_change_hashes, may_limit_reuse};
use super::transfer_members::{is_transfer_member, is_user_data};

/// The members as serde_json parses them: the reference for [`super::fast_reader::members`].
pub(super) fn strict_members(body: &[u8]) -> Result<BodyMembers<'_>, serde_json::Error> {
    let mut deserializer = serde_json::Deserializer::from_slice(body);
    let members = BodyMembersSeed.deserialize(&mut deserializer)?;
    deserializer.end()?;
    Ok(members)
}

struct BodyMembersSeed;

impl<'de> DeserializeSeed<'de> for BodyMembersSeed {
    type Value = BodyMembers<'de>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<BodyMembers<'de>, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for BodyMembersSeed {
    type Value = BodyMembers<'de>;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<BodyMembers<'de>, A::Error> {
        let mut members = BodyMembers::default();
        while let Some(key) = map.next_key_seed(BodyKeySeed)? {
            let BodyKey { member, steers_transfer, is_user_data, .. } = key;
            let shape = match member {
                Some(member) if member.has_text() => {
                    let (shape, text) = map.next_value_seed(TextMemberSeed { may_be_object: true })?;
                    members.set_text(member, text);
                    shape
                }
                _ => map.next_value_seed(JsonShapeSeed {
                    finds_transfer_members: !is_user_data,
                    finds_media: member.is_some_and(BodyMember::has_media),
                })?,
            };
            members.has_transfer_members |= steers_transfer || shape.has_transfer_members;
            members.may_limit_reuse |= key.may_limit_reuse;
            members.may_change_hashes |= key.may_change_hashes;
            members.record(member, shape);
        }
        Ok(members)
    }
}

/// Meaning of a key in the body.
pub(super) struct BodyKey {
    /// The member, if it is a known one.
    pub(super) member: Option<BodyMember>,
    steers_transfer: bool,
    is_user_data: bool,
    may_limit_reuse: bool,
    may_change_hashes: bool,
}

/// Deserializes a key of the body.
pub(super) struct BodyKeySeed;

impl<'de> DeserializeSeed<'de> for BodyKeySeed {
    type Value = BodyKey;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for BodyKeySeed {
    type Value = BodyKey;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("an object key")
    }

    fn visit_str<E: Error>(self, key: &str) -> Result<Self::Value, E> {
        Ok(BodyKey {
            member: BodyMember::from_key(key),
            steers_transfer: is_transfer_member(key),
            is_user_data: is_user_data(key),
            may_limit_reuse: may_limit_reuse(key),
            may_change_hashes: may_change_hashes(key),
        })
    }
}

/// Whether a key of an inner object is that of an id.
struct IdKeySeed;

impl<'de> DeserializeSeed<'de> for IdKeySeed {
    type Value = bool;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<bool, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for IdKeySeed {
    type Value = bool;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("an object key")
    }

    fn visit_str<E: Error>(self, key: &str) -> Result<bool, E> {
        Ok(is_id_key(key))
    }
}

/// Stores the text if the value is a string, or that of its id if it is an object; otherwise only its shape.
struct TextMemberSeed {
    may_be_object: bool,
}

impl<'de> DeserializeSeed<'de> for TextMemberSeed {
    type Value = (JsonShape, Option<Cow<'de, str>>);

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for TextMemberSeed {
    type Value = (JsonShape, Option<Cow<'de, str>>);

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_borrowed_str<E: Error>(self, value: &'de str) -> Result<Self::Value, E> {
        Ok((JsonShape { kind: JsonKind::String, ..JsonShape::default() }, Some(Cow::Borrowed(value))))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Self::Value, E> {
        Ok((JsonShape { kind: JsonKind::String, ..JsonShape::default() }, Some(Cow::Owned(value.to_owned()))))
    }

    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        Ok((JsonShape::default(), None))
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Self::Value, E> {
        Ok((JsonShape { kind: JsonKind::Bool(value), ..JsonShape::default() }, None))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Self::Value, E> {
        self.visit_f64(value as f64)
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Self::Value, E> {
        self.visit_f64(value as f64)
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Self::Value, E> {
        Ok((JsonShape { kind: JsonKind::Number(value), ..JsonShape::default() }, None))
    }

    fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        while seq.next_element_seed(JsonShapeSeed::default())?.is_some() {}
        Ok((JsonShape { kind: JsonKind::Array, ..JsonShape::default() }, None))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut id = None;
        while let Some(is_id) = map.next_key_seed(IdKeySeed)? {
            if is_id {
                (_, id) = map.next_value_seed(TextMemberSeed { may_be_object: false })?;
            } else {
                map.next_value_seed(JsonShapeSeed::default())?;
            }
        }
        let shape = JsonShape { kind: JsonKind::Object, ..JsonShape::default() };
        Ok((shape, id.filter(|_| self.may_be_object)))
    }
}
