//! Converts a chat body to the engine's input of the chat template.

mod anthropic;
mod arguments;
mod continuation;
mod developer;
mod media;
mod messages;
mod responses;
mod rules;
mod sglang;
mod tools;
mod vllm;

use minijinja::Value;
use minijinja::value::ValueKind;

use crate::body::ChatBody;
use crate::dialect::{ContentFormat, PromptDialect};
use crate::error::PromptError;

pub(crate) use anthropic::MessagesBody;
pub(crate) use continuation::{ContinuedMessage, cut};
pub use media::{MediaModality, MediaReference};
pub(crate) use media::{common_text, media, with_media, with_placeholders};
pub(crate) use responses::{ResponsesBody, ResponsesInput};
pub(crate) use rules::{TemplateRules, TemplateTraits};

/// A line that one client puts before its system prompt; its value changes with every request, so vLLM drops it.
const BILLING_LINE: &str = "x-anthropic-billing-header";

/// The input of a template, and the processing of the rendered text.
#[derive(Debug)]
pub(crate) struct TemplateInput {
    pub(crate) messages: Vec<Value>,
    /// The body's messages, each prepared on its own. The template's may differ where the engine converts several together.
    pub(crate) prepared: Vec<PreparedMessage>,
    /// Whether the template's messages are the prepared ones, apart from the last.
    pub(crate) is_in_order: bool,
    pub(crate) tools: Option<Vec<Value>>,
    pub(crate) documents: Value,
    pub(crate) add_generation_prompt: bool,
    /// Further variables: the client's `chat_template_kwargs` and those that the engine derives.
    pub(crate) variables: Vec<(String, Value)>,
    /// The message that the rendered text must end with, if it is to be continued.
    pub(crate) continuation: Option<ContinuedMessage>,
    /// Text appended to the rendered text.
    pub(crate) suffix: Option<String>,
    /// Whether the tokenizer adds its special tokens around the rendered text.
    pub(crate) add_special_tokens: bool,
}

/// A message of the template's input.
#[derive(Debug, Clone)]
pub(crate) struct PreparedMessage {
    pub(crate) message: Value,
    pub(crate) role: MessageRole,
}

/// The roles whose messages engines convert by their neighbours or by the template.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MessageRole {
    Developer,
    Tool,
    Other,
}

impl MessageRole {
    fn of(role: &str) -> MessageRole {
        match role {
            "developer" => MessageRole::Developer,
            "tool" => MessageRole::Tool,
            _ => MessageRole::Other,
        }
    }
}

/// The prepared messages of a body, of which the first are `known`.
fn prepare_messages(
    body: &ChatBody,
    known: &[PreparedMessage],
    prepare: impl Fn(&Value) -> Result<PreparedMessage, PromptError>,
) -> Result<Vec<PreparedMessage>, PromptError> {
    let mut prepared = Vec::with_capacity(body.messages.len());
    prepared.extend_from_slice(&known[..known.len().min(body.messages.len())]);
    for message in &body.messages[prepared.len()..] {
        prepared.push(prepare(message)?);
    }
    Ok(prepared)
}

/// Variables that are set by the engine, or are arguments of its rendering call. For a client that sets them, the engine returns an error
/// or behaves in ways that are not reproduced here.
const RESERVED_VARIABLES: [&str; 19] = [
    "messages",
    "conversation",
    "tools",
    "documents",
    "chat_template",
    "tokenize",
    "add_generation_prompt",
    "continue_final_message",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
    "bos_token",
    "eos_token",
    "strftime_now",
    "raise_exception",
];

/// Rejects messages with parts other than text.
pub(crate) fn check_text(messages: &[Value]) -> Result<(), PromptError> {
    for content in messages.iter().filter_map(|message| messages::member(message, "content")) {
        if content.as_str().is_none() {
            messages::items(&content, "content")?
                .iter()
                .try_for_each(|part| messages::part(part).map(drop))?;
        }
    }
    Ok(())
}

/// Prepares `body` as `engine` does. `known` are the first of its messages, if they were prepared before for this template.
///
/// # Errors
/// [`PromptError`] if the engine rejects the body, or processes it in a way that is not reproduced here.
pub(crate) fn prepare(
    engine: PromptDialect,
    format: ContentFormat,
    template: TemplateTraits,
    body: &ChatBody,
    known: &[PreparedMessage],
) -> Result<TemplateInput, PromptError> {
    if body.chat_template.as_ref().is_some_and(|template| !template.is_none()) {
        return Err(PromptError::UnsupportedMember("chat_template"));
    }
    if body.messages.is_empty() {
        return Err(PromptError::Malformed("`messages` is empty".to_owned()));
    }
    match engine {
        PromptDialect::Vllm => vllm::prepare(format, template, body, known),
        PromptDialect::Sglang => sglang::prepare(format, template, body, known),
    }
}

/// The client's template variables.
fn client_variables(body: &ChatBody) -> Result<Vec<(String, Value)>, PromptError> {
    let Some(variables) = body.chat_template_kwargs.as_ref().filter(|variables| !variables.is_none()) else {
        return Ok(Vec::new());
    };
    if variables.kind() != ValueKind::Map {
        return Err(PromptError::Malformed("`chat_template_kwargs` is not an object".to_owned()));
    }
    let mut pairs = Vec::new();
    for key in variables.try_iter().map_err(failed)? {
        let name = key.to_string();
        if RESERVED_VARIABLES.contains(&name.as_str()) {
            return Err(PromptError::UnsupportedMember("chat_template_kwargs"));
        }
        pairs.push((name, variables.get_item(&key).map_err(failed)?));
    }
    Ok(pairs)
}

/// Sets a variable unless it is already set.
fn default_variable(variables: &mut Vec<(String, Value)>, name: &str, value: impl Into<Value>) {
    if !variables.iter().any(|(other, _)| other == name) {
        variables.push((name.to_owned(), value.into()));
    }
}

/// Sets a variable, overriding an existing value.
fn set_variable(variables: &mut Vec<(String, Value)>, name: &str, value: Value) {
    variables.retain(|(other, _)| other != name);
    variables.push((name.to_owned(), value));
}

fn failed(error: minijinja::Error) -> PromptError {
    PromptError::Malformed(error.to_string())
}
