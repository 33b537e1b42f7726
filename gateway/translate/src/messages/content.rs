//! Messages and their content blocks.

use serde_json::value::RawValue;

use crate::chat::{
    AssistantMessage, ChatContent, ChatFunctionCall, ChatMessage, ChatPart, ChatRequestToolCall,
    InlineSystem, ToolMessage,
};
use crate::error::Untranslatable;
use crate::json::{JsonObject, array, dumps, text};

use super::image::image_part;
use super::tool_result::{search_result_text, tool_result_contents};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MessageRole {
    User,
    Assistant,
    System,
}

/// Translates `system` and `messages`.
pub(super) fn convert_messages(
    request: &mut JsonObject<'_>,
    inline_system: InlineSystem,
) -> Result<Vec<ChatMessage>, Untranslatable> {
    let system = request.take("system");
    let conversation = array(request.required("messages")?, "messages")?;
    let mut system_texts = system.map(leading_system).transpose()?.unwrap_or_default();
    let mut converted = Vec::with_capacity(conversation.len() + 1);
    for (at, raw) in conversation.into_iter().enumerate() {
        let mut message = JsonObject::read(raw, format!("messages[{at}]"))?;
        let role = read_role(&mut message)?;
        let content = message.required("content")?;
        let path = message.path_of("content");
        message.reject_rest()?;
        if role == MessageRole::System && inline_system == InlineSystem::Merge {
            system_texts.extend(inline_system_text(content, &path)?);
        } else {
            convert_message(role, content, &path, &mut converted)?;
        }
    }
    if !system_texts.is_empty() {
        converted.insert(0, ChatMessage::System { content: ChatContent::Text(system_texts.join("\n")) });
    }
    Ok(converted)
}

fn read_role(message: &mut JsonObject<'_>) -> Result<MessageRole, Untranslatable> {
    match message.required_text("role")?.as_str() {
        "user" => Ok(MessageRole::User),
        "assistant" => Ok(MessageRole::Assistant),
        "system" => Ok(MessageRole::System),
        _ => Err(Untranslatable::invalid(message.path_of("role"), "`user`, `assistant` or `system`")),
    }
}

/// The texts of the `system` member.
fn leading_system(system: &RawValue) -> Result<Vec<String>, Untranslatable> {
    Ok(match text(system, "system")? {
        Some(text) if text.trim().is_empty() => Vec::new(),
        Some(text) => vec![text],
        None => text_blocks(system, "system")?.into_iter().filter(|text| !text.is_empty()).collect(),
    })
}

/// The text of a system message that is merged into the first one, without the space around it.
fn inline_system_text(content: &RawValue, path: &str) -> Result<Option<String>, Untranslatable> {
    let texts = match text(content, path)? {
        Some(text) => vec![text],
        None => text_blocks(content, path)?,
    };
    let texts: Vec<_> = texts.iter().map(|text| text.trim()).filter(|text| !text.is_empty()).collect();
    Ok((!texts.is_empty()).then(|| texts.join("\n")))
}

/// The texts of blocks that have to be texts.
fn text_blocks(content: &RawValue, path: &str) -> Result<Vec<String>, Untranslatable> {
    let mut texts = Vec::new();
    for (at, block) in array(content, path)?.into_iter().enumerate() {
        let mut block = JsonObject::read(block, format!("{path}[{at}]"))?;
        let kind = block.required_text("type")?;
        if kind != "text" {
            return Err(unsupported_block(&block, &kind));
        }
        texts.push(block_text(&mut block)?);
        block.ignore(&["cache_control"]);
        block.reject_rest()?;
    }
    Ok(texts)
}

fn convert_message(
    role: MessageRole,
    content: &RawValue,
    path: &str,
    converted: &mut Vec<ChatMessage>,
) -> Result<(), Untranslatable> {
    let mut draft = ChatDraft::default();
    if let Some(text) = text(content, path)? {
        draft.parts.push(ChatPart::Text { text });
    } else {
        for (at, block) in array(content, path)?.into_iter().enumerate() {
            let block = JsonObject::read(block, format!("{path}[{at}]"))?;
            convert_block(role, block, &mut draft, converted)?;
        }
    }
    converted.extend(draft.finish(role));
    Ok(())
}

/// Parts of the chat message that a message's blocks become.
#[derive(Debug, Default)]
struct ChatDraft {
    parts: Vec<ChatPart>,
    thoughts: Vec<String>,
    tool_calls: Vec<ChatRequestToolCall>,
}

impl ChatDraft {
    /// A user's message without content is none: its tool results have messages of their own.
    fn finish(self, role: MessageRole) -> Option<ChatMessage> {
        let is_empty = self.parts.is_empty();
        let content = match role {
            _ if !is_empty => ChatContent::from_parts(self.parts),
            MessageRole::User => return None,
            _ => ChatContent::Text(String::new()),
        };
        Some(match role {
            MessageRole::User => ChatMessage::User { content },
            MessageRole::System => ChatMessage::System { content },
            MessageRole::Assistant => ChatMessage::Assistant(AssistantMessage {
                content: (!is_empty || self.tool_calls.is_empty()).then_some(content),
                reasoning_content: (!self.thoughts.is_empty()).then(|| self.thoughts.join("\n")),
                tool_calls: self.tool_calls,
            }),
        })
    }
}

fn convert_block(
    role: MessageRole,
    mut block: JsonObject<'_>,
    draft: &mut ChatDraft,
    converted: &mut Vec<ChatMessage>,
) -> Result<(), Untranslatable> {
    let kind = block.required_text("type")?;
    // Engines cache prefixes without marks.
    block.ignore(&["cache_control"]);
    match (kind.as_str(), role) {
        ("text", _) => draft.parts.push(ChatPart::Text { text: block_text(&mut block)? }),
        ("image", _) => draft.parts.push(image_part(&mut block)?),
        ("search_result", _) => {
            let text = search_result_text(&mut block)?;
            draft.parts.extend((!text.is_empty()).then_some(ChatPart::Text { text }));
        }
        ("thinking", MessageRole::Assistant) => {
            block.ignore(&["signature"]);
            let thought = block.required_text("thinking")?;
            draft.thoughts.extend(Some(thought).filter(|thought| !thought.is_empty()));
        }
        ("tool_use", MessageRole::Assistant) => draft.tool_calls.push(tool_call(&mut block)?),
        ("tool_result", MessageRole::User) => {
            // The result follows the blocks before it.
            let before = ChatDraft { parts: std::mem::take(&mut draft.parts), ..ChatDraft::default() };
            converted.extend(before.finish(role));
            convert_tool_result(&mut block, converted)?;
        }
        _ => return Err(unsupported_block(&block, &kind)),
    }
    block.reject_rest()
}

pub(super) fn block_text(block: &mut JsonObject<'_>) -> Result<String, Untranslatable> {
    let citations = block.parsed::<Vec<&RawValue>>("citations")?.unwrap_or_default();
    if !citations.is_empty() {
        return Err(Untranslatable::unsupported(
            block.path_of("citations"),
            "chat completions have no citations",
        ));
    }
    block.required_text("text")
}

fn tool_call(block: &mut JsonObject<'_>) -> Result<ChatRequestToolCall, Untranslatable> {
    if let Some(mut caller) = block.object("caller")? {
        if caller.required_text("type")? != "direct" {
            return Err(Untranslatable::unsupported(
                block.path_of("caller"),
                "only `direct` calls are possible",
            ));
        }
        caller.reject_rest()?;
    }
    let id = block.required_text("id")?;
    let name = block.required_text("name")?;
    let input = block.take("input").map_or("{}", RawValue::get);
    if !input.starts_with('{') {
        return Err(Untranslatable::invalid(block.path_of("input"), "an object"));
    }
    Ok(ChatRequestToolCall { id, function: ChatFunctionCall { name, arguments: dumps(input) } })
}

/// One message per tool result, or several if it refers to tools.
fn convert_tool_result(
    block: &mut JsonObject<'_>,
    converted: &mut Vec<ChatMessage>,
) -> Result<(), Untranslatable> {
    // Chat templates have no place for it; the content says what failed.
    block.ignore(&["is_error"]);
    let tool_call_id = block.required_text("tool_use_id")?;
    for content in tool_result_contents(block)? {
        converted.push(ChatMessage::Tool(ToolMessage { tool_call_id: tool_call_id.clone(), content }));
    }
    Ok(())
}

pub(super) fn unsupported_block(block: &JsonObject<'_>, kind: &str) -> Untranslatable {
    Untranslatable::unsupported(
        block.path(),
        format!("a block of type `{kind}` has no equivalent in chat completions"),
    )
}
