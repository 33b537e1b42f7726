//! From the body of a Responses request to the body of a chat completion.

use serde::Serialize;
use serde_json::value::RawValue;

use crate::chat::{ChatMessage, InlineSystem, JsonSchema, ResponseFormat, StreamOptions, ToolSettings};
use crate::error::Untranslatable;
use crate::json::{JsonObject, Members};

use super::context::ResponsesContext;
use super::input::convert_input;
use super::tools::convert_tools;

/// Members that have no effect on an engine: hints about storage, price, safety and built-in tools.
const WITHOUT_EFFECT: [&str; 9] = [
    "max_tool_calls",
    "metadata",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "stream_options",
];

/// Members of Responses that a chat completion cannot express.
const UNSUPPORTED: [(&str, &str); 6] = [
    ("context_management", "it does not edit the conversation; send what the model is to read"),
    ("conversation", "responses are not stored; send the whole conversation as `input`"),
    ("moderation", "it does not moderate"),
    ("previous_response_id", "responses are not stored; send the whole conversation as `input`"),
    ("prompt", "prompts are not stored; send it as `instructions` and `input`"),
    ("multi_agent", "it runs one model"),
];

/// Members of a chat completion that this translation writes itself, or that would change the form of the response.
const CHAT_ONLY: [(&str, &str); 10] = [
    ("function_call", "use `tool_choice`"),
    ("functions", "use `tools`"),
    ("logprobs", "log probabilities are not translated"),
    ("max_completion_tokens", "use `max_output_tokens`"),
    ("max_tokens", "use `max_output_tokens`"),
    ("messages", "use `input`"),
    ("n", "a response has one choice"),
    ("reasoning_effort", "use `reasoning.effort`"),
    ("response_format", "use `text.format`"),
    ("verbosity", "use `text.verbosity`"),
];

/// A chat completion in place of a Responses request.
#[derive(Debug)]
pub struct ChatForResponses {
    /// Body of the chat completion.
    pub body: Vec<u8>,
    /// What the response repeats of the request.
    pub context: ResponsesContext,
}

#[derive(Debug, Serialize)]
struct ChatBody<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    model: Option<&'a RawValue>,
    messages: Vec<ChatMessage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_completion_tokens: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stream: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stream_options: Option<StreamOptions>,
    #[serde(flatten)]
    tools: ToolSettings<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    response_format: Option<ResponseFormat<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    verbosity: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_effort: Option<&'a RawValue>,
    /// Sampling parameters with the same name in both APIs, and the engines' own members.
    #[serde(flatten)]
    passed_through: Members<'a>,
}

/// Translates the body of a Responses request. Developer messages become system messages.
///
/// Nothing is stored: a request that refers to an earlier response is rejected, and the response has `"store": false`.
///
/// # Errors
///
/// [`Untranslatable`] names the member that has no equivalent.
pub fn responses_to_chat(
    body: &[u8],
    inline_system: InlineSystem,
) -> Result<ChatForResponses, Untranslatable> {
    let mut request = JsonObject::body(body)?;
    let context = ResponsesContext::read(&request);
    request.ignore(&WITHOUT_EFFECT);
    request.reject(&UNSUPPORTED)?;
    request.reject(&CHAT_ONLY)?;
    reject_settings(&mut request)?;
    let (response_format, verbosity) = text_settings(&mut request)?;
    let stream = request.parsed::<bool>("stream")?;
    let chat = ChatBody {
        model: request.take("model"),
        messages: convert_input(&mut request, inline_system)?,
        max_completion_tokens: request.take("max_output_tokens"),
        stream,
        stream_options: (stream == Some(true)).then_some(StreamOptions::WITH_USAGE),
        tools: convert_tools(&mut request)?,
        response_format,
        verbosity,
        reasoning_effort: reasoning_effort(&mut request)?,
        passed_through: request.into_rest(),
    };
    let body = serde_json::to_vec(&chat);
    let body = body.map_err(|problem| Untranslatable::Json { member: "body".to_owned(), problem })?;
    Ok(ChatForResponses { body, context })
}

/// Settings with one value that needs nothing.
fn reject_settings(request: &mut JsonObject<'_>) -> Result<(), Untranslatable> {
    if request.parsed::<bool>("background")? == Some(true) {
        return Err(Untranslatable::unsupported("background", "responses are not stored; wait for this one"));
    }
    if request.text("truncation")?.is_some_and(|truncation| truncation != "disabled") {
        return Err(Untranslatable::unsupported(
            "truncation",
            "the input is never truncated; use `disabled`",
        ));
    }
    if request.parsed::<u64>("top_logprobs")?.unwrap_or(0) > 0 {
        return Err(Untranslatable::unsupported("top_logprobs", "log probabilities are not translated"));
    }
    for (at, included) in
        request.parsed::<Vec<String>>("include")?.unwrap_or_default().into_iter().enumerate()
    {
        // Reasoning is not encrypted; clients send its text back.
        if included != "reasoning.encrypted_content" {
            return Err(Untranslatable::unsupported(format!("include[{at}]"), "it is not available"));
        }
    }
    Ok(())
}

type TextSettings<'a> = (Option<ResponseFormat<'a>>, Option<&'a RawValue>);

fn text_settings<'a>(request: &mut JsonObject<'a>) -> Result<TextSettings<'a>, Untranslatable> {
    let Some(mut text) = request.object("text")? else { return Ok((None, None)) };
    let verbosity = text.take("verbosity");
    let format = match text.object("format")? {
        None => None,
        Some(mut format) => {
            let converted = match format.required_text("type")?.as_str() {
                "text" => None,
                "json_object" => Some(ResponseFormat::JsonObject),
                "json_schema" => Some(ResponseFormat::JsonSchema {
                    json_schema: JsonSchema {
                        name: format.required_text("name")?,
                        description: format.text("description")?,
                        schema: format.required("schema")?,
                        strict: format.parsed("strict")?,
                    },
                }),
                _ => {
                    let expected = "`text`, `json_object` or `json_schema`";
                    return Err(Untranslatable::invalid(format.path_of("type"), expected));
                }
            };
            format.reject_rest()?;
            converted
        }
    };
    text.reject_rest()?;
    Ok((format, verbosity))
}

/// Reasoning is sent as it is, so there is no summary to choose.
fn reasoning_effort<'a>(request: &mut JsonObject<'a>) -> Result<Option<&'a RawValue>, Untranslatable> {
    let Some(mut reasoning) = request.object("reasoning")? else { return Ok(None) };
    reasoning.ignore(&["summary", "generate_summary"]);
    let effort = reasoning.take("effort");
    reasoning.reject_rest()?;
    Ok(effort)
}
