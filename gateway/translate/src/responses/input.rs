//! Input items as messages.

use serde_json::value::RawValue;

use crate::chat::{
    AssistantMessage, ChatContent, ChatFunctionCall, ChatImageUrl, ChatMessage, ChatPart,
    ChatRequestToolCall, InlineSystem, ToolMessage,
};
use crate::error::Untranslatable;
use crate::json::{JsonObject, array, text};

/// Translates `instructions` and `input`.
pub(super) fn convert_input(
    request: &mut JsonObject<'_>,
    inline_system: InlineSystem,
) -> Result<Vec<ChatMessage>, Untranslatable> {
    let mut conversation = Conversation { inline_system, ..Conversation::default() };
    let instructions = request.text("instructions")?.filter(|text| !text.is_empty());
    conversation.leading.extend(instructions);
    let input = request.required("input")?;
    if let Some(text) = text(input, "input")? {
        conversation.messages.push(ChatMessage::User { content: ChatContent::Text(text) });
    } else {
        for (at, item) in array(input, "input")?.into_iter().enumerate() {
            conversation.push_item(JsonObject::read(item, format!("input[{at}]"))?)?;
        }
    }
    Ok(conversation.finish())
}

#[derive(Debug, Default)]
struct Conversation {
    inline_system: InlineSystem,
    /// Texts of the first system message.
    leading: Vec<String>,
    messages: Vec<ChatMessage>,
}

impl Conversation {
    fn finish(mut self) -> Vec<ChatMessage> {
        if !self.leading.is_empty() {
            let content = ChatContent::Text(self.leading.join("\n\n"));
            self.messages.insert(0, ChatMessage::System { content });
        }
        self.messages
    }

    fn push_item(&mut self, mut item: JsonObject<'_>) -> Result<(), Untranslatable> {
        let kind = item.text("type")?.unwrap_or_else(|| "message".to_owned());
        // What the item was called, and how far it was, in an earlier response.
        item.ignore(&["id", "status"]);
        match kind.as_str() {
            "message" => self.push_message(&mut item)?,
            "function_call" => {
                let call = function_call(&mut item)?;
                self.push_assistant(AssistantMessage {
                    tool_calls: vec![call],
                    ..AssistantMessage::default()
                });
            }
            "function_call_output" => {
                let tool_call_id = item.required_text("call_id")?;
                let (output, path) = (item.required("output")?, item.path_of("output"));
                let content = tool_output(content_parts(output, &path)?);
                self.messages.push(ChatMessage::Tool(ToolMessage { tool_call_id, content }));
            }
            "reasoning" => self.push_reasoning(&mut item)?,
            _ => {
                let reason = format!("an item of type `{kind}` has no equivalent in chat completions");
                return Err(Untranslatable::unsupported(item.path(), reason));
            }
        }
        item.reject_rest()
    }

    fn push_message(&mut self, item: &mut JsonObject<'_>) -> Result<(), Untranslatable> {
        item.ignore(&["phase"]);
        let role = item.required_text("role")?;
        let (content, path) = (item.required("content")?, item.path_of("content"));
        let parts = content_parts(content, &path)?;
        match role.as_str() {
            "user" => self.messages.push(ChatMessage::User { content: ChatContent::from_parts(parts) }),
            "assistant" => {
                let content = Some(ChatContent::from_parts(parts));
                self.push_assistant(AssistantMessage { content, ..AssistantMessage::default() });
            }
            "system" | "developer" if self.inline_system == InlineSystem::Merge => {
                for part in parts {
                    let ChatPart::Text { text } = part else {
                        return Err(Untranslatable::unsupported(path, "a system message can only have text"));
                    };
                    self.leading.push(text);
                }
            }
            "system" | "developer" => {
                self.messages.push(ChatMessage::System { content: ChatContent::from_parts(parts) });
            }
            _ => {
                let expected = "`user`, `assistant`, `system` or `developer`";
                return Err(Untranslatable::invalid(item.path_of("role"), expected));
            }
        }
        Ok(())
    }

    /// The reasoning of an assistant's turn: the summary, or else the text.
    fn push_reasoning(&mut self, item: &mut JsonObject<'_>) -> Result<(), Untranslatable> {
        let mut texts = Vec::new();
        for member in ["summary", "content"] {
            let path = item.path_of(member);
            let Some(parts) = item.take(member) else { continue };
            if texts.is_empty() {
                texts = reasoning_texts(parts, &path)?;
            }
        }
        let encrypted = item.take("encrypted_content");
        if !texts.is_empty() {
            let reasoning_content = Some(texts.join("\n"));
            self.push_assistant(AssistantMessage { reasoning_content, ..AssistantMessage::default() });
        } else if encrypted.is_some() {
            let reason = "the engine cannot read encrypted reasoning; leave the item out";
            return Err(Untranslatable::unsupported(item.path_of("encrypted_content"), reason));
        }
        Ok(())
    }

    /// One turn of an assistant is several items, and one message.
    fn push_assistant(&mut self, added: AssistantMessage) {
        let Some(ChatMessage::Assistant(turn)) = self.messages.last_mut() else {
            self.messages.push(ChatMessage::Assistant(added));
            return;
        };
        turn.content = match (turn.content.take(), added.content) {
            (Some(before), Some(after)) => Some(before.join(after)),
            (before, after) => before.or(after),
        };
        turn.reasoning_content = match (turn.reasoning_content.take(), added.reasoning_content) {
            (Some(before), Some(after)) => Some(format!("{before}\n{after}")),
            (before, after) => before.or(after),
        };
        turn.tool_calls.extend(added.tool_calls);
    }
}

fn function_call(item: &mut JsonObject<'_>) -> Result<ChatRequestToolCall, Untranslatable> {
    let id = item.required_text("call_id")?;
    let name = item.required_text("name")?;
    let arguments =
        item.text("arguments")?.filter(|text| !text.is_empty()).unwrap_or_else(|| "{}".to_owned());
    if !serde_json::from_str::<&RawValue>(&arguments).is_ok_and(|json| json.get().starts_with('{')) {
        return Err(Untranslatable::invalid(item.path_of("arguments"), "a JSON object, as a string"));
    }
    Ok(ChatRequestToolCall { id, function: ChatFunctionCall { name, arguments } })
}

/// Texts alone are one text: few chat templates accept parts here.
fn tool_output(parts: Vec<ChatPart>) -> ChatContent {
    if parts.iter().all(|part| matches!(part, ChatPart::Text { .. })) {
        let texts = parts.into_iter().filter_map(|part| match part {
            ChatPart::Text { text } => Some(text),
            _ => None,
        });
        return ChatContent::Text(texts.collect());
    }
    ChatContent::Parts(parts)
}

/// The parts of a content, which may be a string.
fn content_parts(content: &RawValue, path: &str) -> Result<Vec<ChatPart>, Untranslatable> {
    if let Some(text) = text(content, path)? {
        return Ok(vec![ChatPart::Text { text }]);
    }
    let parts = array(content, path)?.into_iter().enumerate();
    parts.map(|(at, part)| content_part(JsonObject::read(part, format!("{path}[{at}]"))?)).collect()
}

fn content_part(mut part: JsonObject<'_>) -> Result<ChatPart, Untranslatable> {
    let kind = part.required_text("type")?;
    let converted = match kind.as_str() {
        "input_text" | "output_text" | "text" => {
            // What an earlier response said about its text.
            part.ignore(&["annotations", "logprobs"]);
            ChatPart::Text { text: part.required_text("text")? }
        }
        "refusal" => ChatPart::Text { text: part.required_text("refusal")? },
        "input_image" => {
            if part.take("file_id").is_some() {
                let reason = "files are not available to the engine; send an `image_url`";
                return Err(Untranslatable::unsupported(part.path_of("file_id"), reason));
            }
            let url = part.required_text("image_url")?;
            let detail = part.text("detail")?;
            ChatPart::ImageUrl { image_url: ChatImageUrl { url, detail } }
        }
        _ => {
            let reason = format!("content of type `{kind}` has no equivalent in chat completions");
            return Err(Untranslatable::unsupported(part.path(), reason));
        }
    };
    part.reject_rest()?;
    Ok(converted)
}

fn reasoning_texts(parts: &RawValue, path: &str) -> Result<Vec<String>, Untranslatable> {
    let mut texts = Vec::new();
    for (at, part) in array(parts, path)?.into_iter().enumerate() {
        let mut part = JsonObject::read(part, format!("{path}[{at}]"))?;
        part.ignore(&["type"]);
        texts.extend(Some(part.required_text("text")?).filter(|text| !text.is_empty()));
        part.reject_rest()?;
    }
    Ok(texts)
}
