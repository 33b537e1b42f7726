//! Walks one JSON value with serde_json's full strictness (UTF-8, escapes, number range, depth) and keeps only
//! its shape and size.

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};

use super::transfer_members::is_transfer_member;

/// Shape and size of one JSON value.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Tally {
    /// What the value itself is.
    pub(crate) kind: Kind,
    /// Members of the value itself, if it is an array.
    pub(crate) items: u32,
    /// What the first member of the array is.
    pub(crate) first_item: Kind,
    /// A member of the array that is not of the first one's kind: its position and kind.
    pub(crate) odd_item: Option<(u32, Kind)>,
    /// Bytes of all strings inside, object keys left out.
    pub(crate) string_bytes: u64,
    /// Count of all numbers inside.
    pub(crate) numbers: u64,
    /// `n` and `max_new_tokens`, if the value is an object (SGLang's `sampling_params`).
    pub(crate) sampling: Option<Sampling>,
    /// Whether an object inside has a member that steers KV transfer; not looked for in what a user wrote.
    pub(crate) has_transfer_members: bool,
}

impl Tally {
    /// Takes in the next member of the value itself, an array.
    pub(crate) fn add_item(&mut self, kind: Kind) {
        if self.items == 0 {
            self.first_item = kind;
        } else if self.odd_item.is_none() && !kind.same_type(self.first_item) {
            self.odd_item = Some((self.items, kind));
        }
        self.items = self.items.saturating_add(1);
    }
}

/// Members of SGLang's `sampling_params` that routing needs.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Sampling {
    pub(crate) n: Option<f64>,
    pub(crate) max_new_tokens: Option<f64>,
}

impl Sampling {
    /// Takes in a member; only numbers count.
    pub(crate) fn set(&mut self, key: SamplingKey, kind: Kind) {
        if let Kind::Number(value) = kind {
            match key {
                SamplingKey::N => self.n = Some(value),
                SamplingKey::MaxNewTokens => self.max_new_tokens = Some(value),
                SamplingKey::Other => {}
            }
        }
    }
}

/// JSON's types; `Null` stands for absent too.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) enum Kind {
    #[default]
    Null,
    Bool(bool),
    Number(f64),
    String,
    Array,
    Object,
}

impl Kind {
    /// Name of the type for error messages.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::Null => "null",
            Kind::Bool(_) => "a boolean",
            Kind::Number(_) => "a number",
            Kind::String => "a string",
            Kind::Array => "an array",
            Kind::Object => "an object",
        }
    }

    fn same_type(self, other: Kind) -> bool {
        std::mem::discriminant(&self) == std::mem::discriminant(&other)
    }
}

/// Deserialises into a [`Tally`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Measure {
    /// Whether members that steer KV transfer are looked for.
    pub(crate) watched: bool,
}

impl<'de> DeserializeSeed<'de> for Measure {
    type Value = Tally;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Tally, D::Error> {
        let mut tally = Tally::default();
        tally.kind = Walk { tally: &mut tally, depth: 0, watched: self.watched }.deserialize(deserializer)?;
        Ok(tally)
    }
}

/// Recursion over one value; depth 0 is the value itself.
struct Walk<'t> {
    tally: &'t mut Tally,
    depth: u32,
    watched: bool,
}

impl<'de> DeserializeSeed<'de> for Walk<'_> {
    type Value = Kind;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Kind, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl Walk<'_> {
    /// The walk over a value inside this one.
    fn within(&mut self) -> Walk<'_> {
        Walk { tally: &mut *self.tally, depth: self.depth + 1, watched: self.watched }
    }

    fn number(self, value: f64) -> Kind {
        self.tally.numbers += 1;
        Kind::Number(value)
    }
}

impl<'de> Visitor<'de> for Walk<'_> {
    type Value = Kind;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Kind, E> {
        Ok(Kind::Bool(value))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Kind, E> {
        Ok(self.number(value as f64))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Kind, E> {
        Ok(self.number(value as f64))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Kind, E> {
        Ok(self.number(value))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Kind, E> {
        self.tally.string_bytes += value.len() as u64;
        Ok(Kind::String)
    }

    fn visit_unit<E: Error>(self) -> Result<Kind, E> {
        Ok(Kind::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut seq: A) -> Result<Kind, A::Error> {
        let top = self.depth == 0;
        while let Some(kind) = seq.next_element_seed(self.within())? {
            if top {
                self.tally.add_item(kind);
            }
        }
        Ok(Kind::Array)
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<Kind, A::Error> {
        let top = self.depth == 0;
        let mut sampling = Sampling::default();
        while let Some(key) = map.next_key_seed(Key)? {
            self.tally.has_transfer_members |= self.watched && key.steers_transfer;
            let kind = map.next_value_seed(self.within())?;
            if top {
                sampling.set(key.sampling, kind);
            }
        }
        if top {
            self.tally.sampling = Some(sampling);
        }
        Ok(Kind::Object)
    }
}

/// Which member of [`Sampling`] a key names.
#[derive(Debug, Clone, Copy)]
pub(crate) enum SamplingKey {
    N,
    MaxNewTokens,
    Other,
}

impl SamplingKey {
    pub(crate) fn from_key(key: &str) -> SamplingKey {
        match key {
            "n" => SamplingKey::N,
            "max_new_tokens" => SamplingKey::MaxNewTokens,
            _ => SamplingKey::Other,
        }
    }
}

/// What the key of an inner object is.
struct InnerKey {
    sampling: SamplingKey,
    steers_transfer: bool,
}

struct Key;

impl<'de> DeserializeSeed<'de> for Key {
    type Value = InnerKey;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<InnerKey, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for Key {
    type Value = InnerKey;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("an object key")
    }

    fn visit_str<E: Error>(self, key: &str) -> Result<InnerKey, E> {
        Ok(InnerKey { sampling: SamplingKey::from_key(key), steers_transfer: is_transfer_member(key) })
    }
}
