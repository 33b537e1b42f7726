//! The checked members of a request's body that routing needs.

use std::borrow::Cow;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use super::body_member::BodyMember;
use super::fast_reader;
use super::inference_api::InferenceApi;
use super::json_shape::{JsonKind, JsonShape};
use super::media_parts::MediaParts;
use super::serde_reader::strict_members;
use crate::error::{ApiError, ApiErrorCode};

/// Most sequences of one request: vLLM's own default limit for `n`. Each needs a bootstrap room in SGLang's bodies, so a request of
/// a few bytes must not be able to ask for a billion.
const MAX_SEQUENCES: u32 = 16_384;

/// Fields of a request after one pass over its body.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct RoutingFields<'a> {
    /// Requested model; `None` if the body names none.
    pub(crate) model: Option<Cow<'a, str>>,
    /// Whether the client requests server-sent events.
    pub(crate) stream: bool,
    /// Prompts in the body: 1, or the length of a batch.
    pub(crate) batch: u32,
    pub(crate) n: u32,
    /// The client's limit on generated tokens.
    pub(crate) max_output_tokens: Option<u32>,
    /// The client's seed, if it is an integer.
    pub(crate) seed: Option<i64>,
    /// Bytes of the prompt's text.
    pub(crate) prompt_bytes: u64,
    /// Images and other media of a chat.
    pub(crate) media: Option<Box<MediaParts>>,
    /// Prompt token ids given as numbers.
    pub(crate) prompt_ids: u64,
    /// Whether the client asks to keep the whole prompt for further requests.
    pub(crate) wants_prompt_cached: bool,
    /// Whether the object has no member (an appended member then needs no comma).
    pub(crate) is_empty_object: bool,
    /// Whether it has members that steer KV transfer, which must be removed before the body is used.
    pub(crate) has_transfer_members: bool,
    /// Whether it has a member that may keep an engine from using its cache.
    pub(crate) may_limit_reuse: bool,
    /// Whether it has a member that changes the hashes of its blocks.
    pub(crate) may_change_hashes: bool,
    /// Hash of the conversation or cache key that the client names.
    pub(crate) session: Option<u64>,
    /// The response that this request continues, in OpenAI's Responses API.
    pub(crate) previous_response_id: Option<Box<str>>,
    /// Whether an engine is to generate the response after it has answered.
    pub(crate) is_background: bool,
    /// Whether the client forbids to store the response.
    pub(crate) forbids_store: bool,
    present: u32,
}

impl<'a> RoutingFields<'a> {
    /// Reads `body` once. Accepts exactly what `serde_json` accepts as an object (without repeated known members).
    ///
    /// # Errors
    ///
    /// [`ApiErrorCode::InvalidJson`] with the position, or [`ApiErrorCode::InvalidRequest`] with the invalid member.
    pub(crate) fn read(api: InferenceApi, body: &'a [u8]) -> Result<RoutingFields<'a>, ApiError> {
        members(body).map_err(|error| not_json(body, &error))?.check(api)
    }

    /// Drops the model's name, so that the result no longer borrows from the body.
    pub(crate) fn without_model(self) -> RoutingFields<'static> {
        RoutingFields { model: None, ..self }
    }

    /// Whether the body has this member.
    pub(crate) fn has(&self, member: BodyMember) -> bool {
        self.present & member.bit() != 0
    }

    /// Sequences that the engine will run.
    pub(crate) fn sequences(&self) -> u32 {
        self.batch.saturating_mul(self.n)
    }
}

/// Whether the gateway accepts `body` as a JSON object: for fuzzing against `serde_json`.
#[must_use]
pub fn accepts(body: &[u8]) -> bool {
    members(body).is_ok()
}

fn members(body: &[u8]) -> Result<BodyMembers<'_>, serde_json::Error> {
    fast_reader::members(body).map_or_else(|| strict_members(body), Ok)
}

fn not_json(body: &[u8], error: &serde_json::Error) -> ApiError {
    let text = error.to_string();
    let message = if body.iter().all(u8::is_ascii_whitespace) {
        "the request has no body; send a JSON object".to_owned()
    } else if std::str::from_utf8(body).is_err() {
        format!("the body is not valid UTF-8 ({text}); encode the JSON as UTF-8")
    } else if text.contains("recursion limit") {
        format!("the body nests deeper than 127 levels ({text}); flatten it")
    } else {
        format!("the body is not a valid JSON object: {text}")
    };
    ApiError::new(ApiErrorCode::InvalidJson, message)
}

/// Known members before any check.
#[derive(Debug, Default, PartialEq)]
pub(super) struct BodyMembers<'a> {
    texts: MemberTexts<'a>,
    shapes: [Option<JsonShape>; BodyMember::ALL.len()],
    present: u32,
    repeated: Option<BodyMember>,
    count: u32,
    /// Whether a member that steers KV transfer is among them, or inside one that an engine may parse for parameters.
    pub(super) has_transfer_members: bool,
    /// Whether a member of [`REUSE_MEMBERS`] is among them.
    pub(super) may_limit_reuse: bool,
    /// Whether a member of [`HASH_MEMBERS`] is among them.
    pub(super) may_change_hashes: bool,
}

/// Values of members whose text is needed, of the last one with each name: `None` if it is no string.
#[derive(Debug, Default, PartialEq)]
struct MemberTexts<'a> {
    model: Option<Cow<'a, str>>,
    prompt_cache_retention: Option<Cow<'a, str>>,
    previous_response_id: Option<Cow<'a, str>>,
    /// The value, or its `id`.
    conversation: Option<Cow<'a, str>>,
    prompt_cache_key: Option<Cow<'a, str>>,
    /// `user_id` in the value.
    metadata: Option<Cow<'a, str>>,
    user: Option<Cow<'a, str>>,
}

impl MemberTexts<'_> {
    /// Hash of what identifies the conversation best; the same in every gateway.
    fn session(&self) -> Option<u64> {
        [&self.conversation, &self.prompt_cache_key, &self.metadata, &self.user]
            .into_iter()
            .find_map(|text| text.as_deref().filter(|text| !text.is_empty()))
            .map(session_hash)
    }
}

/// Hash by which requests of one session are recognised.
pub(crate) fn session_hash(name: &str) -> u64 {
    // With fixed keys, so that all gateways compute the same.
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    hasher.finish()
}

/// Members with which an engine may have to compute prompt tokens that it has cached.
const REUSE_MEMBERS: [&str; 3] = ["echo", "logprob_start_len", "prompt_logprobs"];

/// Whether a member of this name may keep an engine from using its cache.
pub(super) fn may_limit_reuse(key: &str) -> bool {
    REUSE_MEMBERS.contains(&key)
}

/// Members that engines hash with the tokens of each block.
const HASH_MEMBERS: [&str; 3] = ["cache_salt", "extra_key", "lora_path"];

/// Whether a member of this name changes the hashes of a prompt's blocks.
pub(super) fn may_change_hashes(key: &str) -> bool {
    HASH_MEMBERS.contains(&key)
}

impl<'a> BodyMembers<'a> {
    /// Stores the value of a member whose text is needed: `None` if it is no string.
    pub(super) fn set_text(&mut self, member: BodyMember, text: Option<Cow<'a, str>>) {
        let texts = &mut self.texts;
        match member {
            BodyMember::Model => texts.model = text,
            BodyMember::PromptCacheRetention => texts.prompt_cache_retention = text,
            BodyMember::PreviousResponseId => texts.previous_response_id = text,
            BodyMember::Conversation => texts.conversation = text,
            BodyMember::PromptCacheKey => texts.prompt_cache_key = text,
            BodyMember::Metadata => texts.metadata = text,
            BodyMember::User => texts.user = text,
            _ => {}
        }
    }

    /// Counts a member of the body and stores its shape if it is known.
    pub(super) fn record(&mut self, key: Option<BodyMember>, shape: JsonShape) {
        self.count = self.count.saturating_add(1);
        if let Some(member) = key {
            if self.present & member.bit() != 0 {
                self.repeated = Some(member);
            }
            self.present |= member.bit();
            self.shapes[member as usize] = Some(shape);
        }
    }

    pub(super) fn kind(&self, member: BodyMember) -> JsonKind {
        self.shape(member).map_or(JsonKind::Null, |shape| shape.kind)
    }

    pub(super) fn shape(&self, member: BodyMember) -> Option<&JsonShape> {
        self.shapes[member as usize].as_ref()
    }

    fn check(self, api: InferenceApi) -> Result<RoutingFields<'a>, ApiError> {
        if let Some(member) = self.repeated {
            return Err(invalid_member(
                member.key(),
                format!("`{}` appears twice; send it once", member.key()),
            ));
        }
        match self.kind(BodyMember::Model) {
            JsonKind::Null | JsonKind::String => {}
            other => return Err(expected(BodyMember::Model, "a string", other)),
        }
        let stream = match self.kind(BodyMember::Stream) {
            JsonKind::Null => false,
            JsonKind::Bool(stream) => stream,
            other => return Err(expected(BodyMember::Stream, "a boolean", other)),
        };
        let mut fields = RoutingFields {
            stream,
            batch: 1,
            n: 1,
            max_output_tokens: None,
            seed: None,
            prompt_bytes: 0,
            media: None,
            prompt_ids: 0,
            wants_prompt_cached: self.wants_prompt_cached(),
            is_empty_object: self.count == 0,
            has_transfer_members: self.has_transfer_members,
            may_limit_reuse: self.may_limit_reuse,
            may_change_hashes: self.may_change_hashes,
            session: self.texts.session(),
            previous_response_id: self.texts.previous_response_id.as_deref().map(Box::from),
            is_background: self.kind(BodyMember::Background) == JsonKind::Bool(true),
            forbids_store: self.kind(BodyMember::Store) == JsonKind::Bool(false),
            present: self.present,
            model: None,
        };
        match api {
            InferenceApi::Chat => self.check_chat(&mut fields)?,
            InferenceApi::Completions => self.check_completions(&mut fields)?,
            InferenceApi::Responses => self.check_responses(&mut fields)?,
            InferenceApi::Messages => self.check_messages(&mut fields)?,
            InferenceApi::Generate => self.check_generate(&mut fields)?,
            InferenceApi::Other => {}
        }
        if fields.sequences() > MAX_SEQUENCES {
            return Err(self.too_many(api, &fields));
        }
        fields.model = self.texts.model;
        Ok(fields)
    }

    /// Whether the client asks to keep the whole prompt: for OpenAI's longer retention (the other one is the default and says
    /// nothing about this prompt), or with Anthropic's or OpenAI's marks, which apply to the prefix that ends with them. A mark that
    /// is not in the last message says nothing about the rest of the prompt.
    fn wants_prompt_cached(&self) -> bool {
        self.texts.prompt_cache_retention.as_deref() == Some("24h")
            || self.kind(BodyMember::CacheControl) == JsonKind::Object
            || self
                .shape(BodyMember::Messages)
                .is_some_and(|shape| shape.kind == JsonKind::Array && shape.has_cache_mark)
    }

    fn too_many(&self, api: InferenceApi, fields: &RoutingFields<'_>) -> ApiError {
        let prompts = [BodyMember::Prompt, BodyMember::Text, BodyMember::InputIds]
            .into_iter()
            .find(|m| self.shape(*m).is_some());
        let param = match (api, prompts) {
            (_, Some(prompts)) if fields.batch > MAX_SEQUENCES => prompts.key(),
            (InferenceApi::Generate, _) => "sampling_params.n",
            _ => BodyMember::N.key(),
        };
        let text = format!(
            "`{param}` asks for {} prompts times {} completions; send at most {MAX_SEQUENCES} sequences in one request",
            fields.batch, fields.n
        );
        invalid_member(param, text)
    }

    fn check_chat(&self, fields: &mut RoutingFields<'a>) -> Result<(), ApiError> {
        self.check_message_list(fields)?;
        self.output_limits(fields)
    }

    /// `messages`: objects, at least one.
    pub(super) fn check_message_list(&self, fields: &mut RoutingFields<'a>) -> Result<(), ApiError> {
        let messages = match self.shape(BodyMember::Messages) {
            Some(shape) if shape.kind == JsonKind::Array => shape,
            Some(shape) if shape.kind != JsonKind::Null => {
                return Err(expected(BodyMember::Messages, "an array of messages", shape.kind));
            }
            _ => return Err(invalid_member("messages", "`messages` is missing; send an array of messages")),
        };
        if messages.items == 0 {
            return Err(invalid_member("messages", "`messages` is empty; send at least one message"));
        }
        check_objects(BodyMember::Messages, messages)?;
        fields.prompt_bytes = messages.string_bytes;
        fields.media = messages.media.clone();
        Ok(())
    }

    fn check_completions(&self, fields: &mut RoutingFields<'a>) -> Result<(), ApiError> {
        let Some(prompt) = self.shape(BodyMember::Prompt).filter(|shape| shape.kind != JsonKind::Null) else {
            return Err(invalid_member("prompt", "`prompt` is missing; send a string or an array"));
        };
        read_prompt(BodyMember::Prompt, prompt, fields)?;
        self.output_limits(fields)
    }

    fn check_generate(&self, fields: &mut RoutingFields<'a>) -> Result<(), ApiError> {
        let prompt = [BodyMember::Text, BodyMember::InputIds]
            .into_iter()
            .find_map(|m| self.shape(m).filter(|shape| shape.kind != JsonKind::Null).map(|shape| (m, shape)));
        match prompt {
            Some((member, shape)) => read_prompt(member, shape, fields)?,
            // Embeddings as input: the engine checks them; their length is unknown here.
            None if self.count > 0 => {}
            None => return Err(invalid_member("text", "`text` or `input_ids` is missing")),
        }
        if let Some(params) = self.shape(BodyMember::SamplingParams) {
            match params.kind {
                JsonKind::Null | JsonKind::Array => {}
                JsonKind::Object => {
                    let sampling = params.sampling.unwrap_or_default();
                    fields.n = positive("sampling_params.n", sampling.n)?.unwrap_or(1);
                    fields.max_output_tokens =
                        count("sampling_params.max_new_tokens", sampling.max_new_tokens)?;
                }
                other => return Err(expected(BodyMember::SamplingParams, "an object", other)),
            }
        }
        Ok(())
    }

    fn output_limits(&self, fields: &mut RoutingFields<'a>) -> Result<(), ApiError> {
        let number = |member: BodyMember| match self.kind(member) {
            JsonKind::Null => Ok(None),
            JsonKind::Number(value) => Ok(Some(value)),
            other => Err(expected(member, "an integer", other)),
        };
        fields.n = positive("n", number(BodyMember::N)?)?.unwrap_or(1);
        let max_tokens = count("max_tokens", number(BodyMember::MaxTokens)?)?;
        let max_completion_tokens = count("max_completion_tokens", number(BodyMember::MaxCompletionTokens)?)?;
        fields.max_output_tokens = max_completion_tokens.or(max_tokens);
        fields.seed = match self.kind(BodyMember::Seed) {
            JsonKind::Number(seed) if seed.fract() == 0.0 => Some(truncate_to_integer(seed)),
            _ => None,
        };
        Ok(())
    }
}

/// Every item of the array must be an object.
pub(super) fn check_objects(member: BodyMember, array: &JsonShape) -> Result<(), ApiError> {
    let invalid_item = match array.first_item {
        JsonKind::Object => array.mismatched_item,
        _ if array.items == 0 => None,
        other => Some((0, other)),
    };
    let Some((index, kind)) = invalid_item else { return Ok(()) };
    let param = format!("{}[{index}]", member.key());
    Err(invalid_member(&param, format!("`{param}` must be an object, not {}", kind.name())))
}

/// String, array of strings, array of ids, or array of arrays of ids.
fn read_prompt(
    member: BodyMember,
    shape: &JsonShape,
    fields: &mut RoutingFields<'_>,
) -> Result<(), ApiError> {
    let key = member.key();
    match (shape.kind, shape.first_item) {
        (JsonKind::String, _) => {}
        (JsonKind::Array, JsonKind::Null) if shape.items == 0 => {
            return Err(invalid_member(key, format!("`{key}` is empty; send at least one prompt")));
        }
        (JsonKind::Array, JsonKind::Number(_)) => {}
        (JsonKind::Array, JsonKind::String | JsonKind::Array) => fields.batch = shape.items,
        (JsonKind::Array, other) => {
            let param = format!("{key}[0]");
            let text = format!(
                "`{param}` must be a string, a token id or an array of token ids, not {}",
                other.name()
            );
            return Err(invalid_member(&param, text));
        }
        (other, _) => return Err(expected(member, "a string or an array", other)),
    }
    if let Some((index, kind)) = shape.mismatched_item {
        let param = format!("{key}[{index}]");
        let text = format!("`{param}` is {}, but `{key}[0]` is {}", kind.name(), shape.first_item.name());
        return Err(invalid_member(&param, text));
    }
    fields.prompt_bytes = shape.string_bytes;
    fields.prompt_ids = shape.numbers;
    Ok(())
}

pub(super) fn invalid_member(param: &str, message: impl Into<String>) -> ApiError {
    ApiError::new(ApiErrorCode::InvalidRequest, message).param(param)
}

pub(super) fn expected(member: BodyMember, what: &str, found: JsonKind) -> ApiError {
    let key = member.key();
    invalid_member(key, format!("`{key}` must be {what}, not {}", found.name()))
}

/// An integer of at least 1.
fn positive(param: &str, value: Option<f64>) -> Result<Option<u32>, ApiError> {
    match count(param, value)? {
        Some(0) => Err(invalid_member(param, format!("`{param}` must be at least 1"))),
        other => Ok(other),
    }
}

/// An integer of at least 0, clamped to `u32::MAX`.
pub(super) fn count(param: &str, value: Option<f64>) -> Result<Option<u32>, ApiError> {
    let Some(value) = value else { return Ok(None) };
    if value.fract() != 0.0 || value < 0.0 {
        return Err(invalid_member(param, format!("`{param}` must be a non-negative integer, not {value}")));
    }
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "clamped to the range just before"
    )]
    Ok(Some(value.min(f64::from(u32::MAX)) as u32))
}

/// Truncates to a 64-bit integer.
fn truncate_to_integer(value: f64) -> i64 {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a cast from float saturates, which is what is wanted"
    )]
    let whole = value as i64;
    whole
}
