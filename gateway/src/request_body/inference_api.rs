//! The APIs with which clients send prompts.

use moongate_tokenize::ConversationApi;

use crate::error::ErrorFormat;

/// Families of requests with their own body format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum InferenceApi {
    /// Chat completions of OpenAI's API.
    Chat,
    /// Text completions of OpenAI's API.
    Completions,
    /// Responses of OpenAI's API.
    Responses,
    /// Messages of Anthropic's API.
    Messages,
    /// SGLang's own generation API.
    Generate,
    /// Any other path: only `model`, `stream` and the session are read.
    Other,
}

/// How a client learns that a stream is complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamEnd {
    /// `data: [DONE]`.
    Done,
    /// An event whose `type` is one of these. The last is the one that a complete response has.
    EventType(&'static [&'static str]),
    /// The end of the body: the format of the stream is unknown.
    Body,
}

impl InferenceApi {
    pub(crate) const ALL: [Self; 6] =
        [Self::Chat, Self::Completions, Self::Responses, Self::Messages, Self::Generate, Self::Other];

    /// The path of the API, if it has exactly one.
    pub(crate) const fn path(self) -> Option<&'static str> {
        match self {
            Self::Chat => Some("/v1/chat/completions"),
            Self::Completions => Some("/v1/completions"),
            Self::Responses => Some("/v1/responses"),
            Self::Messages => Some("/v1/messages"),
            Self::Generate => Some("/generate"),
            Self::Other => None,
        }
    }

    /// The API as prompts are built from it; `None` if its prompts are no conversations.
    pub(crate) const fn conversation(self) -> Option<ConversationApi> {
        match self {
            Self::Chat => Some(ConversationApi::Chat),
            Self::Responses => Some(ConversationApi::Responses),
            Self::Messages => Some(ConversationApi::Messages),
            Self::Completions | Self::Generate | Self::Other => None,
        }
    }

    /// Name in metrics and explanations.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Completions => "completions",
            Self::Responses => "responses",
            Self::Messages => "messages",
            Self::Generate => "generate",
            Self::Other => "other",
        }
    }

    /// The format of errors in its streams.
    pub(crate) const fn error_format(self) -> ErrorFormat {
        match self {
            Self::Messages => ErrorFormat::Anthropic,
            Self::Responses => ErrorFormat::Responses,
            Self::Chat | Self::Completions | Self::Generate | Self::Other => ErrorFormat::OpenAi,
        }
    }

    /// How its streams end.
    pub(crate) const fn stream_end(self) -> StreamEnd {
        match self {
            Self::Chat | Self::Completions | Self::Generate => StreamEnd::Done,
            Self::Responses => {
                StreamEnd::EventType(&["response.failed", "response.incomplete", "response.completed"])
            }
            Self::Messages => StreamEnd::EventType(&["message_stop"]),
            Self::Other => StreamEnd::Body,
        }
    }
}
