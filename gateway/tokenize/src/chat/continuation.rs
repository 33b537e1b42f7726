//! `continue_final_message`: the rendered text ends inside the last message, as transformers ends it.

use minijinja::Value;

use super::messages::{items, member, pairs};
use crate::error::PromptError;

/// Appended to the last message before rendering, to find its end in the output. The final space shows whether the template trims.
const CONTINUE_TAG: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// The text of the last message, which the rendered prompt must contain.
#[derive(Debug)]
pub(crate) struct ContinuedMessage {
    text: String,
}

/// Marks the end of the last message.
pub(super) fn mark(messages: &mut [Value]) -> Result<ContinuedMessage, PromptError> {
    let no_text = || PromptError::Malformed("the last message has no text to continue".to_owned());
    let last = messages.last_mut().ok_or_else(no_text)?;
    let content = member(last, "content").ok_or_else(no_text)?;
    let (text, marked) = match content.as_str() {
        Some(text) => (text.to_owned(), Value::from(format!("{text}{CONTINUE_TAG}"))),
        None => {
            let mut parts = items(&content, "content")?;
            let found = parts.iter().rposition(|part| member(part, "text").is_some()).ok_or_else(no_text)?;
            let text = member(&parts[found], "text").unwrap_or_default().to_string();
            parts[found] = with_member(&parts[found], "text", Value::from(format!("{text}{CONTINUE_TAG}")))?;
            (text, Value::from(parts))
        }
    };
    *last = with_member(last, "content", marked)?;
    Ok(ContinuedMessage { text })
}

fn with_member(object: &Value, name: &str, value: Value) -> Result<Value, PromptError> {
    let mut members = pairs(object, name)?;
    for (other, old) in &mut members {
        if other == name {
            *old = value.clone();
        }
    }
    Ok(Value::from_pairs(members))
}

/// Cuts the rendered text at the mark.
pub(crate) fn cut(mut rendered: String, continuation: &ContinuedMessage) -> Result<String, PromptError> {
    let lost = || PromptError::Malformed("the template leaves out the message to continue".to_owned());
    if !rendered.contains(continuation.text.trim()) {
        return Err(lost());
    }
    let at = rendered.rfind(CONTINUE_TAG.trim_end()).ok_or_else(lost)?;
    let trimmed = !rendered[at..].starts_with(CONTINUE_TAG);
    rendered.truncate(at);
    if trimmed {
        rendered.truncate(rendered.trim_end().len());
    }
    Ok(rendered)
}
