//! Parses the members of a request's body that determine its prompt. Other members are skipped.

use minijinja::Value;
use serde::Deserialize;

use crate::api::ConversationApi;
use crate::chat::{self, MediaReference, MessagesBody, ResponsesBody, TemplateRules};
use crate::dialect::PromptDialect;
use crate::error::PromptError;
use crate::truncation::PromptTruncation;
use crate::turn_cache::TurnHistory;

/// Members of a `/v1/chat/completions` body that determine the prompt, or what an engine converts a body of another API to. Objects keep
/// the order of their members: templates print them.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct ChatBody {
    pub(crate) messages: Vec<Value>,
    #[serde(default)]
    pub(crate) tools: Option<Vec<Value>>,
    #[serde(default)]
    pub(crate) tool_choice: Option<Value>,
    #[serde(default)]
    pub(crate) documents: Option<Value>,
    #[serde(default)]
    pub(crate) chat_template: Option<Value>,
    #[serde(default)]
    pub(crate) chat_template_kwargs: Option<Value>,
    #[serde(default)]
    pub(crate) reasoning_effort: Option<Value>,
    #[serde(default)]
    pub(crate) reasoning: Option<Value>,
    #[serde(default)]
    pub(crate) add_generation_prompt: Option<bool>,
    #[serde(default)]
    pub(crate) continue_final_message: Option<bool>,
    #[serde(default)]
    pub(crate) add_special_tokens: Option<bool>,
    #[serde(default)]
    pub(crate) truncate_prompt_tokens: Option<i64>,
    #[serde(default)]
    pub(crate) truncation_side: Option<String>,
    #[serde(default)]
    pub(crate) max_completion_tokens: Option<f64>,
    #[serde(default)]
    pub(crate) max_tokens: Option<f64>,
    #[serde(default)]
    pub(crate) input_ids: Option<Vec<u32>>,
    #[serde(default)]
    pub(crate) session_params: Option<serde::de::IgnoredAny>,
    /// The API that the body was converted from.
    #[serde(skip)]
    pub(crate) api: ConversationApi,
    /// Size of the body in bytes, an estimate of the prompt's size.
    #[serde(skip)]
    pub(crate) bytes: usize,
    #[serde(skip)]
    pub(crate) history: TurnHistory,
}

/// Member of requests of SGLang's sessions. The engine appends their prompts to the session's earlier ones, which only it has.
const SESSION_PARAMS: &str = "session_params";

impl ChatBody {
    /// Checks that the messages contain only text. Other parts are converted to tokens by the engine only.
    ///
    /// # Errors
    /// [`PromptError::Multimodal`] for the first other part, or [`PromptError::Malformed`] for a part that engines reject.
    pub fn check_text(&self) -> Result<(), PromptError> {
        chat::check_text(&self.messages)
    }

    /// The images, recordings and videos of the messages, in order.
    ///
    /// # Errors
    /// [`PromptError::Multimodal`] for one whose effect on the prompt is not known.
    pub fn media(&self) -> Result<Vec<MediaReference>, PromptError> {
        chat::media(&self.messages)
    }

    /// Whether the body contains token ids, which SGLang uses instead of the messages.
    #[must_use]
    pub fn has_input_ids(&self) -> bool {
        self.input_ids.is_some()
    }

    /// The client's limit on the prompt's tokens, which vLLM applies after tokenizing.
    ///
    /// # Errors
    /// [`PromptError::Malformed`] for a limit that vLLM rejects.
    pub fn truncation(&self) -> Result<Option<PromptTruncation>, PromptError> {
        let output = self.max_completion_tokens.or(self.max_tokens).unwrap_or(0.0);
        PromptTruncation::read(self.truncate_prompt_tokens, self.truncation_side.as_deref(), output > 0.0)
    }

    /// Parses a body of `api` as `engine` does for a model whose template renders system messages anywhere. That is enough for
    /// [`ChatBody::check_text`] and [`ChatBody::media`]; prompts need [`crate::PromptTokenizer::read_conversation`].
    ///
    /// # Errors
    /// See [`crate::PromptTokenizer::read_conversation`].
    pub fn parse_conversation(
        api: ConversationApi,
        engine: PromptDialect,
        body: &[u8],
    ) -> Result<ChatBody, PromptError> {
        let rules = TemplateRules { merges_systems: false, effort_without_thinking: &|| "none" };
        match api {
            ConversationApi::Chat => ChatBody::parse(body),
            ConversationApi::Messages => MessagesBody::parse(body)?.to_chat(engine, &rules),
            ConversationApi::Responses => ResponsesBody::parse(body)?.to_chat(engine, &rules),
        }
    }

    /// Parses a body of a chat completion.
    ///
    /// # Errors
    /// [`PromptError::Malformed`] if it is not JSON or a member has a type that the engines reject, or
    /// [`PromptError::UnsupportedMember`] for a request of one of SGLang's sessions.
    pub fn parse(body: &[u8]) -> Result<ChatBody, PromptError> {
        let read = serde_json::from_slice(body);
        let read: ChatBody = read.map_err(malformed)?;
        if read.session_params.is_some() {
            return Err(PromptError::UnsupportedMember(SESSION_PARAMS));
        }
        Ok(ChatBody { bytes: body.len(), ..read })
    }
}

pub(crate) fn malformed(error: serde_json::Error) -> PromptError {
    PromptError::Malformed(error.to_string())
}

/// One prompt of a completion.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub enum TextPrompt {
    /// Text to be tokenized.
    Text(String),
    /// Token ids, used unchanged.
    Ids(Vec<u32>),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(TextPrompt),
    Many(Vec<TextPrompt>),
}

/// The prompts of a `/v1/completions` or `/generate` body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextBody {
    /// One prompt, or all prompts of a batch.
    pub prompts: Vec<TextPrompt>,
    /// Whether to add the tokenizer's special tokens (BOS) to a text. Both engines do by default.
    pub add_special_tokens: bool,
    truncate_prompt_tokens: Option<i64>,
    truncation_side: Option<String>,
    has_output: bool,
}

/// vLLM's default for `max_tokens`.
#[expect(clippy::unnecessary_wraps, reason = "the member can also be null")]
fn default_max_tokens() -> Option<f64> {
    Some(16.0)
}

#[derive(Deserialize)]
struct RawTextBody {
    #[serde(default)]
    prompt: Option<OneOrMany>,
    #[serde(default)]
    text: Option<OneOrMany>,
    #[serde(default)]
    input_ids: Option<OneOrMany>,
    #[serde(default)]
    add_special_tokens: Option<bool>,
    #[serde(default)]
    truncate_prompt_tokens: Option<i64>,
    #[serde(default)]
    truncation_side: Option<String>,
    #[serde(default = "default_max_tokens")]
    max_tokens: Option<f64>,
    #[serde(default)]
    suffix: Option<serde::de::IgnoredAny>,
    #[serde(default)]
    session_params: Option<serde::de::IgnoredAny>,
    #[serde(default)]
    image_data: Option<serde::de::IgnoredAny>,
    #[serde(default)]
    prompt_embeds: Option<serde::de::IgnoredAny>,
    #[serde(default)]
    input_embeds: Option<serde::de::IgnoredAny>,
}

impl TextBody {
    /// Parses the body of a completion: `prompt`, or SGLang's `text` or `input_ids`.
    ///
    /// # Errors
    /// [`PromptError`] if there is not exactly one of them, or if another member changes the prompt.
    pub fn parse(body: &[u8]) -> Result<TextBody, PromptError> {
        let raw: RawTextBody = serde_json::from_slice(body).map_err(malformed)?;
        for (given, name) in [
            (raw.suffix.is_some(), "suffix"),
            (raw.session_params.is_some(), SESSION_PARAMS),
            (raw.prompt_embeds.is_some(), "prompt_embeds"),
            (raw.input_embeds.is_some(), "input_embeds"),
        ] {
            if given {
                return Err(PromptError::UnsupportedMember(name));
            }
        }
        if raw.image_data.is_some() {
            return Err(PromptError::Multimodal("image_data".to_owned()));
        }
        let mut given = [raw.prompt, raw.text, raw.input_ids].into_iter().flatten();
        let (Some(prompts), None) = (given.next(), given.next()) else {
            return Err(PromptError::Malformed("there must be exactly one prompt".to_owned()));
        };
        let prompts = match prompts {
            OneOrMany::One(one) => vec![one],
            OneOrMany::Many(many) => many,
        };
        Ok(TextBody {
            prompts,
            add_special_tokens: raw.add_special_tokens.unwrap_or(true),
            truncate_prompt_tokens: raw.truncate_prompt_tokens,
            truncation_side: raw.truncation_side,
            has_output: raw.max_tokens.is_some_and(|tokens| tokens > 0.0),
        })
    }

    /// The client's limit on each prompt's tokens, which vLLM applies after tokenizing.
    ///
    /// # Errors
    /// [`PromptError::Malformed`] for a limit that vLLM rejects.
    pub fn truncation(&self) -> Result<Option<PromptTruncation>, PromptError> {
        PromptTruncation::read(self.truncate_prompt_tokens, self.truncation_side.as_deref(), self.has_output)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(body: &str) -> Result<TextBody, PromptError> {
        TextBody::parse(body.as_bytes())
    }

    #[test]
    fn every_form_of_a_prompt_is_read() {
        assert_eq!(text(r#"{"prompt":"a"}"#).unwrap().prompts, [TextPrompt::Text("a".to_owned())]);
        assert_eq!(text(r#"{"prompt":[1,2]}"#).unwrap().prompts, [TextPrompt::Ids(vec![1, 2])]);
        assert_eq!(text(r#"{"input_ids":[[1],[2]]}"#).unwrap().prompts.len(), 2);
        assert_eq!(text(r#"{"text":["a","b"]}"#).unwrap().prompts.len(), 2);
        assert!(!text(r#"{"text":"a","add_special_tokens":false}"#).unwrap().add_special_tokens);
    }

    #[test]
    fn unsupported_members_that_change_the_prompt_are_rejected() {
        assert_eq!(
            text(r#"{"prompt":"a","prompt_embeds":"x"}"#),
            Err(PromptError::UnsupportedMember("prompt_embeds"))
        );
        assert_eq!(text(r#"{"prompt":"a","suffix":"b"}"#), Err(PromptError::UnsupportedMember("suffix")));
        assert!(text(r#"{"prompt":"a","suffix":null}"#).is_ok());
        assert!(matches!(text(r#"{"prompt":"a","text":"b"}"#), Err(PromptError::Malformed(_))));
        assert!(matches!(text(r#"{"prompt":[-1]}"#), Err(PromptError::Malformed(_))));
        assert!(matches!(text(r#"{"text":"a","image_data":"x"}"#), Err(PromptError::Multimodal(_))));
    }

    #[test]
    fn prompts_of_sessions_are_unknown() {
        let session = PromptError::UnsupportedMember("session_params");
        for (params, expected) in [("null", None), ("{}", Some(&session)), (r#"{"id":"a"}"#, Some(&session))]
        {
            let generate = format!(r#"{{"text":"a","session_id":null,"session_params":{params}}}"#);
            assert_eq!(text(&generate).as_ref().err(), expected, "{generate}");
            let chat = format!(r#"{{"messages":[{{"content":"a"}}],"session_params":{params}}}"#);
            assert_eq!(ChatBody::parse(chat.as_bytes()).as_ref().err(), expected, "{chat}");
        }
        // A session's name alone changes nothing.
        assert!(text(r#"{"text":"a","session_id":"b"}"#).is_ok());
    }

    #[test]
    fn only_text_parts_pass_the_text_check() {
        let check = |messages: &str| {
            ChatBody::parse(format!(r#"{{"messages":{messages}}}"#).as_bytes()).unwrap().check_text()
        };
        assert_eq!(check(r#"[{"content":"a"},{"role":"assistant","content":null},{}]"#), Ok(()));
        assert_eq!(check(r#"[{"content":[{"type":"text","text":"a"},"b"]}]"#), Ok(()));
        let image = check(r#"[{"content":"a"},{"content":[{"type":"image_url","image_url":{}}]}]"#);
        assert_eq!(image, Err(PromptError::Multimodal("image_url".to_owned())));
    }

    #[test]
    fn members_of_objects_keep_their_order() {
        let body = ChatBody::parse(br#"{"messages":[{"z":1,"a":{"y":2,"b":3}}]}"#).unwrap();
        assert_eq!(body.messages[0].to_string(), "{'z': 1, 'a': {'y': 2, 'b': 3}}");
    }
}
