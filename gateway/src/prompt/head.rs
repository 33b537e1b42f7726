//! The head of a request: the members that routing needs, checked.

use std::borrow::Cow;

use super::quick;
use super::strict::strict_members;
use super::tally::{Kind, Tally};
use crate::error::{ApiError, Code};

/// Most sequences of one request: vLLM's own default limit for `n`. Each costs a bootstrap room in SGLang's bodies, so a
/// request of a few bytes must not ask for a billion.
const MAX_SEQUENCES: u32 = 16_384;

/// Request families with their own body layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Api {
    /// Answers in a chat.
    Chat,
    /// A text goes on.
    Completions,
    /// SGLang's own.
    Generate,
    /// Any other path: only `model` and `stream` are read.
    Other,
}

impl Api {
    /// The path that the router has for it, if that is one only.
    pub(crate) const fn path(self) -> Option<&'static str> {
        match self {
            Self::Chat => Some("/v1/chat/completions"),
            Self::Completions => Some("/v1/completions"),
            Self::Generate => Some("/generate"),
            Self::Other => None,
        }
    }
}

/// Top-level members that the gateway reads or writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub(crate) enum Member {
    Model,
    Messages,
    Prompt,
    Text,
    InputIds,
    SamplingParams,
    Stream,
    StreamOptions,
    N,
    MaxTokens,
    MaxCompletionTokens,
    MinTokens,
    Rid,
    Seed,
    Priority,
}

impl Member {
    const ALL: [(Member, &'static str); 15] = [
        (Member::Model, "model"),
        (Member::Messages, "messages"),
        (Member::Prompt, "prompt"),
        (Member::Text, "text"),
        (Member::InputIds, "input_ids"),
        (Member::SamplingParams, "sampling_params"),
        (Member::Stream, "stream"),
        (Member::StreamOptions, "stream_options"),
        (Member::N, "n"),
        (Member::MaxTokens, "max_tokens"),
        (Member::MaxCompletionTokens, "max_completion_tokens"),
        (Member::MinTokens, "min_tokens"),
        (Member::Rid, "rid"),
        (Member::Seed, "seed"),
        (Member::Priority, "priority"),
    ];

    /// Finds a member by its JSON key.
    pub(crate) fn from_key(key: &str) -> Option<Member> {
        Self::ALL.iter().find(|(_, name)| *name == key).map(|(member, _)| *member)
    }

    /// Its JSON key.
    pub(crate) fn key(self) -> &'static str {
        Self::ALL[self as usize].1
    }

    fn bit(self) -> u32 {
        1 << self as u8
    }
}

/// What routing knows of a request after one pass over its body.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Head<'a> {
    /// Model asked for; `None` if the body names none.
    pub(crate) model: Option<Cow<'a, str>>,
    /// The client wants server-sent events.
    pub(crate) stream: bool,
    /// Prompts in the body: 1, or the length of a batch.
    pub(crate) batch: u32,
    /// Completions per prompt.
    pub(crate) n: u32,
    /// The client's limit on generated tokens.
    pub(crate) max_output_tokens: Option<u32>,
    /// The client's seed, if it is a whole number.
    pub(crate) seed: Option<i64>,
    /// Bytes of prompt text.
    pub(crate) prompt_bytes: u64,
    /// Prompt token ids given as numbers.
    pub(crate) prompt_ids: u64,
    /// Whether the object has no member at all (decides on the comma before an appended one).
    pub(crate) empty: bool,
    /// Whether it has members that steer KV transfer: they are to be taken out before anything is made of the body.
    pub(crate) has_transfer_members: bool,
    present: u32,
}

impl<'a> Head<'a> {
    /// Reads `body` once. Accepts exactly what `serde_json` accepts as an object (without repeated known members).
    ///
    /// # Errors
    /// [`Code::InvalidJson`] with the position, or [`Code::InvalidRequest`] with the member at fault.
    pub(crate) fn read(api: Api, body: &'a [u8]) -> Result<Head<'a>, ApiError> {
        members(body).map_err(|error| not_json(body, &error))?.check(api)
    }

    /// The same without the model's name, so that it no longer borrows from the body.
    pub(crate) fn without_model(self) -> Head<'static> {
        Head { model: None, ..self }
    }

    /// Whether the body has this member.
    pub(crate) fn has(&self, member: Member) -> bool {
        self.present & member.bit() != 0
    }

    /// Sequences that the engine will run.
    pub(crate) fn sequences(&self) -> u32 {
        self.batch.saturating_mul(self.n)
    }
}

/// Whether the gateway takes `body` as a JSON object: for fuzzing against `serde_json`.
#[must_use]
pub fn accepts(body: &[u8]) -> bool {
    members(body).is_ok()
}

fn members(body: &[u8]) -> Result<Members<'_>, serde_json::Error> {
    quick::members(body).map_or_else(|| strict_members(body), Ok)
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
    ApiError::new(Code::InvalidJson, message)
}

/// Known members as found, before any check.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Members<'a> {
    /// Value of the last `model`, if it is a string.
    pub(super) model: Option<Cow<'a, str>>,
    tallies: [Option<Tally>; Member::ALL.len()],
    present: u32,
    repeated: Option<Member>,
    count: u32,
    /// Whether a member that steers KV transfer is among them, or inside one that an engine may read parameters from.
    pub(super) has_transfer_members: bool,
}

impl<'a> Members<'a> {
    /// Counts a member of the body and keeps its tally if it is known.
    pub(super) fn record(&mut self, key: Option<Member>, tally: Tally) {
        self.count = self.count.saturating_add(1);
        if let Some(member) = key {
            if self.present & member.bit() != 0 {
                self.repeated = Some(member);
            }
            self.present |= member.bit();
            self.tallies[member as usize] = Some(tally);
        }
    }

    fn kind(&self, member: Member) -> Kind {
        self.tally(member).map_or(Kind::Null, |tally| tally.kind)
    }

    fn tally(&self, member: Member) -> Option<&Tally> {
        self.tallies[member as usize].as_ref()
    }

    fn check(self, api: Api) -> Result<Head<'a>, ApiError> {
        if let Some(member) = self.repeated {
            return Err(wrong(member.key(), format!("`{}` appears twice; send it once", member.key())));
        }
        match self.kind(Member::Model) {
            Kind::Null | Kind::String => {}
            other => return Err(expected(Member::Model, "a string", other)),
        }
        let stream = match self.kind(Member::Stream) {
            Kind::Null => false,
            Kind::Bool(stream) => stream,
            other => return Err(expected(Member::Stream, "a boolean", other)),
        };
        let mut head = Head {
            stream,
            batch: 1,
            n: 1,
            max_output_tokens: None,
            seed: None,
            prompt_bytes: 0,
            prompt_ids: 0,
            empty: self.count == 0,
            has_transfer_members: self.has_transfer_members,
            present: self.present,
            model: None,
        };
        match api {
            Api::Chat => self.check_chat(&mut head)?,
            Api::Completions => self.check_completions(&mut head)?,
            Api::Generate => self.check_generate(&mut head)?,
            Api::Other => {}
        }
        if head.sequences() > MAX_SEQUENCES {
            return Err(self.too_many(api, &head));
        }
        head.model = self.model;
        Ok(head)
    }

    fn too_many(&self, api: Api, head: &Head<'_>) -> ApiError {
        let prompts =
            [Member::Prompt, Member::Text, Member::InputIds].into_iter().find(|m| self.tally(*m).is_some());
        let param = match (api, prompts) {
            (_, Some(prompts)) if head.batch > MAX_SEQUENCES => prompts.key(),
            (Api::Generate, _) => "sampling_params.n",
            _ => Member::N.key(),
        };
        let text = format!(
            "`{param}` asks for {} prompts times {} answers; send at most {MAX_SEQUENCES} sequences in one request",
            head.batch, head.n
        );
        wrong(param, text)
    }

    fn check_chat(&self, head: &mut Head<'a>) -> Result<(), ApiError> {
        let messages = match self.tally(Member::Messages) {
            Some(tally) if tally.kind == Kind::Array => tally,
            Some(tally) if tally.kind != Kind::Null => {
                return Err(expected(Member::Messages, "an array of messages", tally.kind));
            }
            _ => return Err(wrong("messages", "`messages` is missing; send an array of messages")),
        };
        if messages.items == 0 {
            return Err(wrong("messages", "`messages` is empty; send at least one message"));
        }
        let stray = if messages.first_item == Kind::Object {
            messages.odd_item
        } else {
            Some((0, messages.first_item))
        };
        if let Some((at, kind)) = stray {
            let param = format!("messages[{at}]");
            return Err(wrong(&param, format!("`{param}` must be an object, not {}", kind.name())));
        }
        head.prompt_bytes = messages.string_bytes;
        self.output_limits(head)
    }

    fn check_completions(&self, head: &mut Head<'a>) -> Result<(), ApiError> {
        let Some(prompt) = self.tally(Member::Prompt).filter(|tally| tally.kind != Kind::Null) else {
            return Err(wrong("prompt", "`prompt` is missing; send a string or an array"));
        };
        read_prompt(Member::Prompt, prompt, head)?;
        self.output_limits(head)
    }

    fn check_generate(&self, head: &mut Head<'a>) -> Result<(), ApiError> {
        let given = [Member::Text, Member::InputIds]
            .into_iter()
            .find_map(|m| self.tally(m).filter(|tally| tally.kind != Kind::Null).map(|tally| (m, tally)));
        match given {
            Some((member, tally)) => read_prompt(member, tally, head)?,
            // Embeddings as input: the engine knows; length is unknown here.
            None if self.count > 0 => {}
            None => return Err(wrong("text", "`text` or `input_ids` is missing")),
        }
        if let Some(params) = self.tally(Member::SamplingParams) {
            match params.kind {
                Kind::Null | Kind::Array => {}
                Kind::Object => {
                    let sampling = params.sampling.unwrap_or_default();
                    head.n = positive("sampling_params.n", sampling.n)?.unwrap_or(1);
                    head.max_output_tokens =
                        count("sampling_params.max_new_tokens", sampling.max_new_tokens)?;
                }
                other => return Err(expected(Member::SamplingParams, "an object", other)),
            }
        }
        Ok(())
    }

    fn output_limits(&self, head: &mut Head<'a>) -> Result<(), ApiError> {
        let number = |member: Member| match self.kind(member) {
            Kind::Null => Ok(None),
            Kind::Number(value) => Ok(Some(value)),
            other => Err(expected(member, "an integer", other)),
        };
        head.n = positive("n", number(Member::N)?)?.unwrap_or(1);
        let old = count("max_tokens", number(Member::MaxTokens)?)?;
        let new = count("max_completion_tokens", number(Member::MaxCompletionTokens)?)?;
        head.max_output_tokens = new.or(old);
        head.seed = match self.kind(Member::Seed) {
            Kind::Number(seed) if seed.fract() == 0.0 => Some(whole(seed)),
            _ => None,
        };
        Ok(())
    }
}

/// String, array of strings, array of ids, or array of arrays of ids.
fn read_prompt(member: Member, tally: &Tally, head: &mut Head<'_>) -> Result<(), ApiError> {
    let key = member.key();
    match (tally.kind, tally.first_item) {
        (Kind::String, _) => {}
        (Kind::Array, Kind::Null) if tally.items == 0 => {
            return Err(wrong(key, format!("`{key}` is empty; send at least one prompt")));
        }
        (Kind::Array, Kind::Number(_)) => {}
        (Kind::Array, Kind::String | Kind::Array) => head.batch = tally.items,
        (Kind::Array, other) => {
            let param = format!("{key}[0]");
            let text = format!(
                "`{param}` must be a string, a token id or an array of token ids, not {}",
                other.name()
            );
            return Err(wrong(&param, text));
        }
        (other, _) => return Err(expected(member, "a string or an array", other)),
    }
    if let Some((at, kind)) = tally.odd_item {
        let param = format!("{key}[{at}]");
        let text = format!("`{param}` is {}, but `{key}[0]` is {}", kind.name(), tally.first_item.name());
        return Err(wrong(&param, text));
    }
    head.prompt_bytes = tally.string_bytes;
    head.prompt_ids = tally.numbers;
    Ok(())
}

fn wrong(param: &str, message: impl Into<String>) -> ApiError {
    ApiError::new(Code::InvalidRequest, message).param(param)
}

fn expected(member: Member, what: &str, found: Kind) -> ApiError {
    let key = member.key();
    wrong(key, format!("`{key}` must be {what}, not {}", found.name()))
}

/// A whole number from 1 on.
fn positive(param: &str, value: Option<f64>) -> Result<Option<u32>, ApiError> {
    match count(param, value)? {
        Some(0) => Err(wrong(param, format!("`{param}` must be at least 1"))),
        other => Ok(other),
    }
}

/// A whole number from 0 on; clamped to what an engine could ever run.
fn count(param: &str, value: Option<f64>) -> Result<Option<u32>, ApiError> {
    let Some(value) = value else { return Ok(None) };
    if value.fract() != 0.0 || value < 0.0 {
        return Err(wrong(
            param,
            format!("`{param}` must be a whole number that is not negative, not {value}"),
        ));
    }
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "clamped to the range just before"
    )]
    Ok(Some(value.min(f64::from(u32::MAX)) as u32))
}

/// Nearest 64-bit integer.
fn whole(value: f64) -> i64 {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a cast from float saturates, which is what is wanted"
    )]
    let whole = value as i64;
    whole
}
