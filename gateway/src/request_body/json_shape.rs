//! Walks one JSON value with serde_json's full strictness (UTF-8, escapes, number range, depth) and records only its shape and
//! size.

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};

use super::media_parts::{MediaKind, MediaParts, is_tool_input};
use super::transfer_members::is_transfer_member;

/// Shape and size of one JSON value.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct JsonShape {
    /// JSON type of the value itself.
    pub(crate) kind: JsonKind,
    /// Number of items, if the value is an array.
    pub(crate) items: u32,
    /// JSON type of the array's first item.
    pub(crate) first_item: JsonKind,
    /// An array item of another type than the first: its index and type.
    pub(crate) mismatched_item: Option<(u32, JsonKind)>,
    /// Bytes of all strings inside, without object keys and media.
    pub(crate) string_bytes: u64,
    /// Images and other media inside, if the value is the messages of a chat. Boxed, since few bodies have any.
    pub(crate) media: Option<Box<MediaParts>>,
    /// Count of all numbers inside.
    pub(crate) numbers: u64,
    /// `n` and `max_new_tokens`, if the value is an object (SGLang's `sampling_params`).
    pub(crate) sampling: Option<SamplingParams>,
    /// Whether an object inside has a member that steers KV transfer; not searched for in user data.
    pub(crate) has_transfer_members: bool,
    /// Whether an object inside marks the end of a prefix to cache; if the value is an array, inside its last item.
    pub(crate) has_cache_mark: bool,
}

/// Member of Anthropic's API, and of clients that send it in OpenAI's: at the top level it marks the whole prompt, in a part of it the
/// end of a prefix to cache. Its value is an object.
pub(super) const CACHE_CONTROL: &str = "cache_control";
/// The same in parts of OpenAI's prompts.
const CACHE_BREAKPOINT: &str = "prompt_cache_breakpoint";

/// Whether an object with this name marks the end of a prefix to cache.
pub(super) fn is_cache_mark(key: &str) -> bool {
    key == CACHE_CONTROL || key == CACHE_BREAKPOINT
}

impl JsonShape {
    pub(super) fn media(&mut self) -> &mut MediaParts {
        self.media.get_or_insert_default()
    }

    /// Prepares for the next item of the value itself, an array.
    pub(crate) fn start_item(&mut self) {
        self.has_cache_mark = false;
    }

    /// Records the next item of the value itself, an array.
    pub(crate) fn add_item(&mut self, kind: JsonKind) {
        if self.items == 0 {
            self.first_item = kind;
        } else if self.mismatched_item.is_none() && !kind.same_type(self.first_item) {
            self.mismatched_item = Some((self.items, kind));
        }
        self.items = self.items.saturating_add(1);
    }
}

/// Members of SGLang's `sampling_params` that routing needs.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct SamplingParams {
    pub(crate) n: Option<f64>,
    pub(crate) max_new_tokens: Option<f64>,
}

impl SamplingParams {
    /// Records a member; only numbers count.
    pub(crate) fn set(&mut self, key: SamplingKey, kind: JsonKind) {
        if let JsonKind::Number(value) = kind {
            match key {
                SamplingKey::N => self.n = Some(value),
                SamplingKey::MaxNewTokens => self.max_new_tokens = Some(value),
                SamplingKey::Other => {}
            }
        }
    }
}

/// JSON's types; `Null` also stands for absent.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) enum JsonKind {
    #[default]
    Null,
    Bool(bool),
    Number(f64),
    String,
    Array,
    Object,
}

impl JsonKind {
    /// Name of the type for error messages.
    pub(crate) fn name(self) -> &'static str {
        match self {
            JsonKind::Null => "null",
            JsonKind::Bool(_) => "a boolean",
            JsonKind::Number(_) => "a number",
            JsonKind::String => "a string",
            JsonKind::Array => "an array",
            JsonKind::Object => "an object",
        }
    }

    fn same_type(self, other: JsonKind) -> bool {
        std::mem::discriminant(&self) == std::mem::discriminant(&other)
    }
}

#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct JsonShapeSeed {
    /// Whether members that steer KV transfer are searched for.
    pub(crate) finds_transfer_members: bool,
    /// Whether media is searched for.
    pub(crate) finds_media: bool,
}

impl<'de> DeserializeSeed<'de> for JsonShapeSeed {
    type Value = JsonShape;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<JsonShape, D::Error> {
        let mut shape = JsonShape::default();
        shape.kind = JsonShapeVisitor { shape: &mut shape, depth: 0, seed: self, is_media: false }
            .deserialize(deserializer)?;
        Ok(shape)
    }
}

/// Recursion over one value; depth 0 is the value itself.
struct JsonShapeVisitor<'t> {
    shape: &'t mut JsonShape,
    depth: u32,
    seed: JsonShapeSeed,
    /// Whether the value is inside a member with media.
    is_media: bool,
}

impl<'de> DeserializeSeed<'de> for JsonShapeVisitor<'_> {
    type Value = JsonKind;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<JsonKind, D::Error> {
        deserializer.deserialize_any(self)
    }
}

/// An item of an array. Only called if there is one, so that the end of the array does not count as an item.
struct JsonItemSeed<'t> {
    item: JsonShapeVisitor<'t>,
    /// Whether the array is the value itself.
    starts_item: bool,
}

impl<'de> DeserializeSeed<'de> for JsonItemSeed<'_> {
    type Value = JsonKind;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<JsonKind, D::Error> {
        if self.starts_item {
            self.item.shape.start_item();
        }
        self.item.deserialize(deserializer)
    }
}

impl JsonShapeVisitor<'_> {
    /// Visitor for a value inside this one.
    fn nested(&mut self) -> JsonShapeVisitor<'_> {
        JsonShapeVisitor {
            shape: &mut *self.shape,
            depth: self.depth + 1,
            seed: self.seed,
            is_media: self.is_media,
        }
    }

    fn number(self, value: f64) -> JsonKind {
        self.shape.numbers += 1;
        JsonKind::Number(value)
    }
}

impl<'de> Visitor<'de> for JsonShapeVisitor<'_> {
    type Value = JsonKind;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<JsonKind, E> {
        Ok(JsonKind::Bool(value))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<JsonKind, E> {
        Ok(self.number(value as f64))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<JsonKind, E> {
        Ok(self.number(value as f64))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<JsonKind, E> {
        Ok(self.number(value))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<JsonKind, E> {
        if self.is_media {
            self.shape.media().add_text(value);
        } else {
            self.shape.string_bytes += value.len() as u64;
        }
        Ok(JsonKind::String)
    }

    fn visit_unit<E: Error>(self) -> Result<JsonKind, E> {
        Ok(JsonKind::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut seq: A) -> Result<JsonKind, A::Error> {
        let top = self.depth == 0;
        while let Some(kind) =
            seq.next_element_seed(JsonItemSeed { item: self.nested(), starts_item: top })?
        {
            if top {
                self.shape.add_item(kind);
            }
        }
        Ok(JsonKind::Array)
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<JsonKind, A::Error> {
        let top = self.depth == 0;
        let mut sampling = SamplingParams::default();
        while let Some(key) = map.next_key_seed(NestedKeySeed)? {
            self.shape.has_transfer_members |= self.seed.finds_transfer_members && key.steers_transfer;
            let media = key.media.filter(|_| self.seed.finds_media && !self.is_media);
            if let Some(media) = media {
                self.shape.media().begin(media);
            }
            let is_media = self.is_media || media.is_some();
            let mut nested = JsonShapeVisitor { is_media, ..self.nested() };
            nested.seed.finds_media &= !key.is_tool_input || is_media;
            let kind = map.next_value_seed(nested)?;
            if media.is_some() && kind == JsonKind::Null {
                self.shape.media().cancel();
            }
            self.shape.has_cache_mark |= key.is_cache_mark && kind == JsonKind::Object;
            if top {
                sampling.set(key.sampling, kind);
            }
        }
        if top {
            self.shape.sampling = Some(sampling);
        }
        Ok(JsonKind::Object)
    }
}

/// Which member of [`SamplingParams`] a key names.
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

/// Meaning of a key in an inner object.
struct NestedKey {
    sampling: SamplingKey,
    steers_transfer: bool,
    media: Option<MediaKind>,
    is_tool_input: bool,
    is_cache_mark: bool,
}

struct NestedKeySeed;

impl<'de> DeserializeSeed<'de> for NestedKeySeed {
    type Value = NestedKey;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<NestedKey, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for NestedKeySeed {
    type Value = NestedKey;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("an object key")
    }

    fn visit_str<E: Error>(self, key: &str) -> Result<NestedKey, E> {
        Ok(NestedKey {
            sampling: SamplingKey::from_key(key),
            steers_transfer: is_transfer_member(key),
            media: MediaKind::of_key(key),
            is_tool_input: is_tool_input(key),
            is_cache_mark: is_cache_mark(key),
        })
    }
}
