//! From the body of a Messages request to the body of a chat completion.

use serde::Serialize;
use serde_json::value::RawValue;

use crate::chat::{ChatMessage, InlineSystem, JsonSchema, ResponseFormat, StreamOptions, ToolSettings};
use crate::error::Untranslatable;
use crate::json::{JsonObject, Members};

use super::content::convert_messages;
use super::tools::convert_tools;

/// Members of Messages that have no effect on an engine: hints about caching, price and previews.
const WITHOUT_EFFECT: [&str; 3] = ["betas", "cache_control", "service_tier"];

/// Members of Messages that a chat completion cannot express.
const UNSUPPORTED: [(&str, &str); 4] = [
    ("container", "it has no containers"),
    ("context_management", "it does not edit the conversation; send what the model is to read"),
    ("inference_geo", "it cannot choose a region"),
    ("mcp_servers", "it does not call MCP servers; call them in the client, as tools"),
];

/// Members of a chat completion that this translation writes itself, or that would change the form of the response.
const CHAT_ONLY: [(&str, &str); 11] = [
    ("function_call", "use `tool_choice`"),
    ("functions", "use `tools`"),
    ("logprobs", "a message has no log probabilities"),
    ("max_completion_tokens", "use `max_tokens`"),
    ("n", "a message has one choice"),
    ("parallel_tool_calls", "use `tool_choice.disable_parallel_tool_use`"),
    ("response_format", "use `output_config.format`"),
    ("stop", "use `stop_sequences`"),
    ("stream_options", "a stream of messages always has usage"),
    ("top_logprobs", "a message has no log probabilities"),
    ("user", "use `metadata.user_id`"),
];

#[derive(Debug, Serialize)]
struct ChatBody<'a> {
    model: &'a RawValue,
    messages: Vec<ChatMessage>,
    max_tokens: &'a RawValue,
    #[serde(skip_serializing_if = "Option::is_none")]
    stream: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stream_options: Option<StreamOptions>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    user: Option<String>,
    #[serde(flatten)]
    tools: ToolSettings<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    response_format: Option<ResponseFormat<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_effort: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    chat_template_kwargs: Option<Members<'a>>,
    /// Sampling parameters with the same name in both APIs, and the engines' own members.
    #[serde(flatten)]
    passed_through: Members<'a>,
}

/// Translates the body of a Messages request, merging inline system messages ([`InlineSystem::Merge`]).
///
/// # Errors
///
/// [`Untranslatable`] names the member that has no equivalent.
pub fn messages_to_chat(body: &[u8]) -> Result<Vec<u8>, Untranslatable> {
    messages_to_chat_with(body, InlineSystem::default())
}

/// Translates the body of a Messages request.
///
/// Sampling parameters and members that are not part of Messages are passed through. Dropped, as by SGLang, are hints that the engines
/// cannot follow: `cache_control`, `thinking.budget_tokens`, `thinking.display`, `output_config.task_budget`, `is_error` of a tool result,
/// the signature of a thinking block, `betas` and `service_tier`.
///
/// Thinking of earlier turns is sent as `reasoning_content`. SGLang's own conversion does the same where the chat template reads it, and
/// otherwise writes it into the text with the model's marks, which are not known here.
///
/// An effort (`output_config.effort`) without `thinking` also switches thinking on in SGLang's chat completions.
///
/// # Errors
///
/// [`Untranslatable`] names the member that has no equivalent.
pub fn messages_to_chat_with(body: &[u8], inline_system: InlineSystem) -> Result<Vec<u8>, Untranslatable> {
    let mut request = JsonObject::body(body)?;
    request.ignore(&WITHOUT_EFFECT);
    reject(&mut request)?;
    let model = request.required("model")?;
    let messages = convert_messages(&mut request, inline_system)?;
    let max_tokens = request.required("max_tokens")?;
    let stream = request.parsed::<bool>("stream")?;
    let user = user(&mut request)?;
    let tools = convert_tools(&mut request)?;
    let output = OutputConfig::read(&mut request)?;
    let chat_template_kwargs = chat_template_kwargs(&mut request)?;
    let chat = ChatBody {
        model,
        messages,
        max_tokens,
        stream,
        stream_options: (stream == Some(true)).then_some(StreamOptions::WITH_USAGE),
        stop: request.take("stop_sequences"),
        user,
        tools,
        response_format: output.format,
        reasoning_effort: output.effort,
        chat_template_kwargs,
        passed_through: request.into_rest(),
    };
    serde_json::to_vec(&chat).map_err(|problem| Untranslatable::Json { member: "body".to_owned(), problem })
}

fn reject(request: &mut JsonObject<'_>) -> Result<(), Untranslatable> {
    if let Some(mut management) = request.object("context_management")? {
        // Without edits it says nothing.
        let edits = management.parsed::<Vec<&RawValue>>("edits")?.unwrap_or_default();
        if !edits.is_empty() {
            return Err(Untranslatable::unsupported("context_management.edits", UNSUPPORTED[1].1));
        }
        management.reject_rest()?;
    }
    request.reject(&UNSUPPORTED)?;
    request.reject(&CHAT_ONLY)
}

fn user(request: &mut JsonObject<'_>) -> Result<Option<String>, Untranslatable> {
    let Some(mut metadata) = request.object("metadata")? else { return Ok(None) };
    let user = metadata.text("user_id")?;
    metadata.reject_rest()?;
    Ok(user)
}

struct OutputConfig<'a> {
    format: Option<ResponseFormat<'a>>,
    effort: Option<String>,
}

impl<'a> OutputConfig<'a> {
    fn read(request: &mut JsonObject<'a>) -> Result<Self, Untranslatable> {
        let mut output = Self { format: None, effort: request.text("reasoning_effort")? };
        let Some(mut config) = request.object("output_config")? else { return Ok(output) };
        config.ignore(&["task_budget"]);
        if let Some(effort) = config.text("effort")? {
            if output.effort.is_some() {
                return Err(Untranslatable::Repeated { member: "output_config.effort".to_owned() });
            }
            // The engine's name of the highest effort.
            output.effort = Some(if effort == "xhigh" { "max".to_owned() } else { effort });
        }
        output.format = config.object("format")?.map(Self::format).transpose()?;
        config.reject_rest()?;
        Ok(output)
    }

    fn format(mut format: JsonObject<'a>) -> Result<ResponseFormat<'a>, Untranslatable> {
        if format.required_text("type")? != "json_schema" {
            return Err(Untranslatable::invalid(format.path_of("type"), "`json_schema`"));
        }
        let schema = format.required("schema")?;
        format.reject_rest()?;
        Ok(ResponseFormat::JsonSchema { json_schema: JsonSchema { name: "response", schema, strict: true } })
    }
}

/// The client's template arguments, and `thinking` under both names that chat templates have for it.
fn chat_template_kwargs<'a>(request: &mut JsonObject<'a>) -> Result<Option<Members<'a>>, Untranslatable> {
    let given = request.parsed::<Members<'a>>("chat_template_kwargs")?;
    let Some(mut thinking) = request.object("thinking")? else { return Ok(given) };
    let enabled = match thinking.required_text("type")?.as_str() {
        "enabled" | "adaptive" => RawValue::TRUE,
        "disabled" => RawValue::FALSE,
        _ => return Err(Untranslatable::invalid("thinking.type", "`enabled`, `adaptive` or `disabled`")),
    };
    thinking.ignore(&["budget_tokens", "display"]);
    thinking.reject_rest()?;
    let mut kwargs = given.unwrap_or_default();
    for name in ["thinking", "enable_thinking"] {
        if !kwargs.0.iter().any(|(given, _)| given == name) {
            kwargs.0.push((name.to_owned(), enabled));
        }
    }
    Ok(Some(kwargs))
}
