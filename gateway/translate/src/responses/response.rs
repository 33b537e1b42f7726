//! From a chat completion's response to a response.

use crate::chat::ChatCompletion;
use crate::error::UntranslatableResponse;

use super::context::{ResponseEnd, ResponseObject, ResponsesContext, derived_id};
use super::items::OutputItem;

/// Translates the response of a chat completion to a response. Of several choices it is the first.
///
/// # Errors
///
/// [`UntranslatableResponse`] if the response is not a complete chat completion.
pub fn chat_to_responses(
    response: &[u8],
    context: &ResponsesContext,
) -> Result<Vec<u8>, UntranslatableResponse> {
    let completion: ChatCompletion<'_> = serde_json::from_slice(response)?;
    let mut choice = completion.choices.into_iter().next().ok_or(UntranslatableResponse::NoChoice)?;
    let end = choice.finish_reason.as_deref().and_then(ResponseEnd::of);
    let end = end.ok_or_else(|| UntranslatableResponse::NotFinished(choice.finish_reason.clone()))?;
    let calls = choice.message.tool_calls.take().unwrap_or_default();
    let (reasoning, text) = (choice.message.take_reasoning(), choice.message.take_text());
    let count = usize::from(reasoning.is_some()) + usize::from(text.is_some()) + calls.len();
    let mut output = Vec::with_capacity(count);
    // Only the last item can be incomplete.
    let status = |at: usize| if at + 1 == count { end.status() } else { "completed" };
    if let Some(reasoning) = reasoning {
        let id = derived_id("rs", &completion.id);
        output.push(OutputItem::reasoning(id, reasoning, status(0)));
    }
    if let Some(text) = text {
        let status = status(output.len());
        output.push(OutputItem::message(derived_id("msg", &completion.id), text, status));
    }
    for (at, call) in calls.into_iter().enumerate() {
        let arguments = call.function.as_ref().map(|function| function.arguments()).transpose()?;
        output.push(OutputItem::FunctionCall {
            id: format!("{}_{at}", derived_id("fc", &completion.id)),
            call_id: call.id.unwrap_or_else(|| format!("call_{}_{at}", completion.id)),
            name: call.function.and_then(|function| function.name).unwrap_or_default(),
            // Without arguments; clients parse them.
            arguments: arguments.filter(|text| !text.is_empty()).unwrap_or_else(|| "{}".to_owned()),
            status: status(output.len()),
        });
    }
    Ok(serde_json::to_vec(&ResponseObject {
        id: derived_id("resp", &completion.id),
        object: "response",
        created_at: completion.created,
        status: end.status(),
        error: None,
        incomplete_details: end.incomplete_details(),
        model: &completion.model,
        output: &output,
        previous_response_id: None,
        store: false,
        usage: completion.usage.map(Into::into),
        context,
    })?)
}
