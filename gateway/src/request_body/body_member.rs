//! Top-level members of request bodies.

use super::json_shape::CACHE_CONTROL;

/// Top-level members that the gateway reads or writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub(crate) enum BodyMember {
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
    PromptCacheRetention,
    CacheControl,
    Input,
    Instructions,
    System,
    Tools,
    MaxOutputTokens,
    IgnoreEos,
    Store,
    Background,
    PreviousResponseId,
    Conversation,
    PromptCacheKey,
    User,
    Metadata,
    RequestId,
}

impl BodyMember {
    pub(super) const ALL: [(BodyMember, &'static str); 31] = [
        (BodyMember::Model, "model"),
        (BodyMember::Messages, "messages"),
        (BodyMember::Prompt, "prompt"),
        (BodyMember::Text, "text"),
        (BodyMember::InputIds, "input_ids"),
        (BodyMember::SamplingParams, "sampling_params"),
        (BodyMember::Stream, "stream"),
        (BodyMember::StreamOptions, "stream_options"),
        (BodyMember::N, "n"),
        (BodyMember::MaxTokens, "max_tokens"),
        (BodyMember::MaxCompletionTokens, "max_completion_tokens"),
        (BodyMember::MinTokens, "min_tokens"),
        (BodyMember::Rid, "rid"),
        (BodyMember::Seed, "seed"),
        (BodyMember::Priority, "priority"),
        (BodyMember::PromptCacheRetention, "prompt_cache_retention"),
        (BodyMember::CacheControl, CACHE_CONTROL),
        (BodyMember::Input, "input"),
        (BodyMember::Instructions, "instructions"),
        (BodyMember::System, "system"),
        (BodyMember::Tools, "tools"),
        (BodyMember::MaxOutputTokens, "max_output_tokens"),
        (BodyMember::IgnoreEos, "ignore_eos"),
        (BodyMember::Store, "store"),
        (BodyMember::Background, "background"),
        (BodyMember::PreviousResponseId, "previous_response_id"),
        (BodyMember::Conversation, "conversation"),
        (BodyMember::PromptCacheKey, "prompt_cache_key"),
        (BodyMember::User, "user"),
        (BodyMember::Metadata, "metadata"),
        (BodyMember::RequestId, "request_id"),
    ];

    /// Finds a member by its JSON key.
    pub(crate) fn from_key(key: &str) -> Option<BodyMember> {
        Self::ALL.iter().find(|(_, name)| *name == key).map(|(member, _)| *member)
    }

    /// JSON key of the member.
    pub(crate) fn key(self) -> &'static str {
        Self::ALL[self as usize].1
    }

    /// Whether the gateway reads the text of the value: of a string, or of [`is_id_key`] in an object.
    pub(super) fn has_text(self) -> bool {
        matches!(
            self,
            Self::Model
                | Self::PromptCacheRetention
                | Self::PreviousResponseId
                | Self::Conversation
                | Self::PromptCacheKey
                | Self::User
                | Self::Metadata
        )
    }

    /// Whether prompts with images and other media are in the value.
    pub(super) fn has_media(self) -> bool {
        matches!(self, Self::Messages | Self::Input)
    }

    pub(super) fn bit(self) -> u32 {
        1 << self as u8
    }
}

/// Whether a member of this name inside `conversation` or `metadata` identifies the session.
pub(super) fn is_id_key(key: &str) -> bool {
    key == "id" || key == "user_id"
}
