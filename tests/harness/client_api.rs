//! Requests and responses of the APIs with which clients hold conversations.

use serde_json::{Value, json};

/// The API of the clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ClientApi {
    Chat,
    Responses,
    Messages,
}

impl ClientApi {
    pub(crate) fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Responses => "/v1/responses",
            Self::Messages => "/v1/messages",
        }
    }

    pub(crate) fn body(self, model: &str, stream: bool, max_tokens: u32) -> Value {
        const TEXT: &str = "The quick brown fox jumps over the lazy dog, again and again.";
        let messages = [json!({"role": "user", "content": TEXT})];
        match self {
            Self::Responses => {
                json!({"model": model, "input": TEXT, "max_output_tokens": max_tokens, "stream": stream})
            }
            Self::Chat | Self::Messages => {
                json!({"model": model, "messages": messages, "max_tokens": max_tokens, "stream": stream})
            }
        }
    }

    /// The text of a response that is not streamed.
    pub(crate) fn text(self, response: &Value) -> Option<String> {
        let blocks = match self {
            Self::Chat => return response["choices"][0]["message"]["content"].as_str().map(str::to_owned),
            Self::Responses => {
                let items = response["output"].as_array()?.iter().filter(|item| item["type"] == "message");
                items.flat_map(|item| item["content"].as_array().into_iter().flatten()).collect::<Vec<_>>()
            }
            Self::Messages => response["content"].as_array()?.iter().collect(),
        };
        blocks.iter().map(|block| block["text"].as_str().map(str::to_owned)).collect()
    }

    /// The text in an event of a stream.
    pub(crate) fn text_of_event(self, event: &Value) -> Option<String> {
        let text = match self {
            Self::Chat => &event["choices"][0]["delta"]["content"],
            Self::Responses if event["type"] == "response.output_text.delta" => &event["delta"],
            Self::Responses => return None,
            Self::Messages => &event["delta"]["text"],
        };
        text.as_str().map(str::to_owned)
    }

    /// Whether a stream has its regular end.
    pub(crate) fn is_complete(self, stream: &str) -> bool {
        let ends: &[&str] = match self {
            Self::Chat => &["data: [DONE]"],
            // Both were cut off by their limit of tokens; only SGLang says so.
            Self::Responses => &["event: response.completed", "event: response.incomplete"],
            Self::Messages => &["event: message_stop"],
        };
        ends.iter().any(|end| stream.contains(end))
    }

    /// The type of an error that a client of this API may get for an engine's failure.
    pub(crate) fn knows(self, error: &Value) -> bool {
        const CODES: [&str; 5] =
            ["prefill_failed", "decode_failed", "engine_timeout", "worker_failed", "no_engine_available"];
        const TYPES: [&str; 3] = ["api_error", "timeout_error", "overloaded_error"];
        assert!(error["error"]["message"].is_string(), "an error has a message: {error}");
        match self {
            Self::Chat | Self::Responses => {
                error["error"]["code"].as_str().is_some_and(|code| CODES.contains(&code))
            }
            Self::Messages => {
                error["type"] == "error"
                    && error["error"]["type"].as_str().is_some_and(|kind| TYPES.contains(&kind))
            }
        }
    }
}
