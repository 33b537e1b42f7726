//! Events of a stream of a response.

use serde::Serialize;

use crate::error::StreamFailure;

use super::context::ResponseObject;
use super::items::{OutputItem, OutputPart};

/// The members of an event besides its type and number.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(super) enum ResponseEvent<'a> {
    Response { response: &'a ResponseObject<'a> },
    Item { output_index: u32, item: &'a OutputItem },
    Part { item_id: &'a str, output_index: u32, content_index: u32, part: OutputPart },
    TextDelta { item_id: &'a str, output_index: u32, content_index: u32, delta: &'a str, logprobs: [(); 0] },
    TextDone { item_id: &'a str, output_index: u32, content_index: u32, text: &'a str, logprobs: [(); 0] },
    ReasoningDelta { item_id: &'a str, output_index: u32, content_index: u32, delta: &'a str },
    ReasoningDone { item_id: &'a str, output_index: u32, content_index: u32, text: &'a str },
    ArgumentsDelta { item_id: &'a str, output_index: u32, delta: &'a str },
    ArgumentsDone { item_id: &'a str, output_index: u32, name: &'a str, arguments: &'a str },
}

#[derive(Debug, Serialize)]
struct NumberedEvent<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    sequence_number: u64,
    #[serde(flatten)]
    event: ResponseEvent<'a>,
}

/// Appends an event to `out`.
pub(super) fn write_event(
    kind: &'static str,
    sequence_number: u64,
    event: ResponseEvent<'_>,
    out: &mut Vec<u8>,
) -> Result<(), StreamFailure> {
    let json = serde_json::to_string(&NumberedEvent { kind, sequence_number, event });
    let json = json.map_err(|error| StreamFailure::Malformed(error.to_string()))?;
    for part in ["event: ", kind, "\ndata: ", &json, "\n\n"] {
        out.extend_from_slice(part.as_bytes());
    }
    Ok(())
}
