//! From the stream of a chat completion to the stream of a response.

use crate::chat::{BlockEvent, BlockWriter, ChatStreamFacts, ChatStreamReader};
use crate::error::StreamFailure;

use super::context::{ResponseEnd, ResponseError, ResponseObject, ResponsesContext, derived_id};
use super::events::{ResponseEvent, write_event};
use super::items::{OutputItem, OutputPart};

/// Most bytes of output: the last event repeats all of it.
const MAX_OUTPUT_BYTES: usize = 16 << 20;

/// What an item takes besides its text.
const ITEM_BYTES: usize = 256;

/// Translates the events of a chat completion's stream, as they arrive, to events of a response.
///
/// It holds the whole output, up to 16 MiB, which the last event repeats. After a failure it emits nothing more.
#[derive(Debug)]
pub struct ChatStreamToResponses {
    reader: ChatStreamReader,
    writer: ResponseWriter,
}

impl ChatStreamToResponses {
    /// `context` is that of the request.
    #[must_use]
    pub fn new(context: ResponsesContext) -> Self {
        let writer = ResponseWriter { context, sequence: 0, output: Vec::new(), item: None, output_bytes: 0 };
        Self { reader: ChatStreamReader::default(), writer }
    }

    /// Takes one or more complete events, and returns the events that follow from them, possibly none.
    #[must_use]
    pub fn push(&mut self, events: &[u8]) -> Vec<u8> {
        self.reader.push(events, &mut self.writer)
    }

    /// Called at the end of the stream.
    ///
    /// # Errors
    ///
    /// The failure that the client was sent, or [`StreamFailure::Truncated`], which the caller sends ([`Self::failure_event`]).
    pub fn finish(&self) -> Result<(), StreamFailure> {
        self.reader.finish()
    }

    /// The event of a failure that the engine's stream does not contain: `response.failed`.
    #[must_use]
    pub fn failure_event(&mut self, failure: &StreamFailure) -> Vec<u8> {
        let mut out = Vec::new();
        self.writer.write_failure(self.reader.facts(), failure, &mut out);
        out
    }
}

#[derive(Debug)]
struct ResponseWriter {
    context: ResponsesContext,
    /// Number of the next event.
    sequence: u64,
    /// Items that are complete.
    output: Vec<OutputItem>,
    item: Option<OpenItem>,
    output_bytes: usize,
}

/// The item that deltas are added to.
#[derive(Debug)]
struct OpenItem {
    id: String,
    kind: ItemKind,
    /// Text or arguments so far.
    text: String,
}

#[derive(Debug)]
enum ItemKind {
    Message,
    Reasoning,
    FunctionCall { call_id: String, name: String },
}

impl OpenItem {
    fn output(&self, text: String, status: &'static str) -> OutputItem {
        let id = self.id.clone();
        match &self.kind {
            ItemKind::Message => OutputItem::message(id, text, status),
            ItemKind::Reasoning => OutputItem::reasoning(id, text, status),
            ItemKind::FunctionCall { call_id, name } => {
                let (call_id, name) = (call_id.clone(), name.clone());
                OutputItem::FunctionCall { id, call_id, name, arguments: text, status }
            }
        }
    }

    /// Before its first part.
    fn started(&self) -> OutputItem {
        let mut item = self.output(String::new(), "in_progress");
        if let OutputItem::Message { content, .. } | OutputItem::Reasoning { content, .. } = &mut item {
            content.clear();
        }
        item
    }

    /// The part that its text is, if it has parts.
    fn part(&self) -> Option<OutputPart> {
        match self.kind {
            ItemKind::Message => Some(OutputPart::output(self.text.clone())),
            ItemKind::Reasoning => Some(OutputPart::ReasoningText { text: self.text.clone() }),
            ItemKind::FunctionCall { .. } => None,
        }
    }
}

impl BlockWriter for ResponseWriter {
    fn write(
        &mut self,
        facts: &ChatStreamFacts,
        event: BlockEvent<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), StreamFailure> {
        match event {
            BlockEvent::Start => {
                self.write_response("response.created", "in_progress", facts, None, out)?;
                self.write_response("response.in_progress", "in_progress", facts, None, out)
            }
            BlockEvent::OpenText => self.open("msg", ItemKind::Message, facts, out),
            BlockEvent::OpenReasoning => self.open("rs", ItemKind::Reasoning, facts, out),
            BlockEvent::OpenCall { id, name } => {
                let kind = ItemKind::FunctionCall { call_id: id.to_owned(), name: name.to_owned() };
                self.open("fc", kind, facts, out)
            }
            BlockEvent::Delta(added) => self.add(added, out),
            BlockEvent::Close => self.close(facts, out),
            BlockEvent::End => {
                let finish_reason = facts.finish_reason.as_deref().unwrap_or_default();
                let Some(end) = ResponseEnd::of(finish_reason) else {
                    return Err(StreamFailure::Malformed(format!("its finish reason is {finish_reason:?}")));
                };
                let kind = match end {
                    ResponseEnd::Completed => "response.completed",
                    ResponseEnd::Incomplete(_) => "response.incomplete",
                };
                self.write_response(kind, end.status(), facts, None, out)
            }
        }
    }

    fn write_failure(&mut self, facts: &ChatStreamFacts, failure: &StreamFailure, out: &mut Vec<u8>) {
        let text = failure.to_string();
        let (code, message) = match failure {
            StreamFailure::Engine { status, message } => (error_code(*status), message.as_str()),
            StreamFailure::Malformed(_) | StreamFailure::Truncated => ("server_error", text.as_str()),
        };
        let error = Some(ResponseError { code, message });
        // Strings, numbers and JSON of the request are always JSON.
        let _ = self.write_response("response.failed", "failed", facts, error, out);
    }
}

/// OpenAI's code of a response's error with this HTTP status.
fn error_code(status: Option<u64>) -> &'static str {
    match status {
        Some(400 | 422) => "invalid_prompt",
        Some(429) => "rate_limit_exceeded",
        _ => "server_error",
    }
}

impl ResponseWriter {
    fn emit(
        &mut self,
        kind: &'static str,
        event: ResponseEvent<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), StreamFailure> {
        write_event(kind, self.sequence, event, out)?;
        self.sequence += 1;
        Ok(())
    }

    fn write_response(
        &mut self,
        kind: &'static str,
        status: &'static str,
        facts: &ChatStreamFacts,
        error: Option<ResponseError<'_>>,
        out: &mut Vec<u8>,
    ) -> Result<(), StreamFailure> {
        let has_ended = status == "completed" || status == "incomplete";
        let end = facts.finish_reason.as_deref().and_then(ResponseEnd::of).filter(|_| has_ended);
        let response = ResponseObject {
            id: derived_id("resp", &facts.id),
            object: "response",
            created_at: facts.created,
            status,
            error,
            incomplete_details: end.and_then(ResponseEnd::incomplete_details),
            model: &facts.model,
            output: &self.output,
            previous_response_id: None,
            store: false,
            usage: facts.usage.filter(|_| has_ended).map(Into::into),
            context: &self.context,
        };
        write_event(kind, self.sequence, ResponseEvent::Response { response: &response }, out)?;
        self.sequence += 1;
        Ok(())
    }

    /// Index of the open item, or of the next one.
    fn output_index(&self) -> u32 {
        u32::try_from(self.output.len()).unwrap_or(u32::MAX)
    }

    fn open(
        &mut self,
        prefix: &str,
        kind: ItemKind,
        facts: &ChatStreamFacts,
        out: &mut Vec<u8>,
    ) -> Result<(), StreamFailure> {
        let names =
            if let ItemKind::FunctionCall { call_id, name } = &kind { call_id.len() + name.len() } else { 0 };
        self.count(ITEM_BYTES + names)?;
        let output_index = self.output_index();
        let id = format!("{}_{output_index}", derived_id(prefix, &facts.id));
        let item = OpenItem { id, kind, text: String::new() };
        let event = ResponseEvent::Item { output_index, item: &item.started() };
        self.emit("response.output_item.added", event, out)?;
        if let Some(part) = item.part() {
            let event = ResponseEvent::Part { item_id: &item.id, output_index, content_index: 0, part };
            self.emit("response.content_part.added", event, out)?;
        }
        self.item = Some(item);
        Ok(())
    }

    fn count(&mut self, bytes: usize) -> Result<(), StreamFailure> {
        self.output_bytes += bytes;
        if self.output_bytes > MAX_OUTPUT_BYTES {
            let problem = format!("its output has more than {MAX_OUTPUT_BYTES} bytes");
            return Err(StreamFailure::Malformed(problem));
        }
        Ok(())
    }

    fn add(&mut self, delta: &str, out: &mut Vec<u8>) -> Result<(), StreamFailure> {
        self.count(delta.len())?;
        let (output_index, sequence) = (self.output_index(), self.sequence);
        let Some(item) = &mut self.item else { return Ok(()) };
        item.text.push_str(delta);
        let (item_id, content_index) = (item.id.as_str(), 0);
        let (kind, event) = match item.kind {
            ItemKind::Message => (
                "response.output_text.delta",
                ResponseEvent::TextDelta { item_id, output_index, content_index, delta, logprobs: [] },
            ),
            ItemKind::Reasoning => (
                "response.reasoning_text.delta",
                ResponseEvent::ReasoningDelta { item_id, output_index, content_index, delta },
            ),
            ItemKind::FunctionCall { .. } => (
                "response.function_call_arguments.delta",
                ResponseEvent::ArgumentsDelta { item_id, output_index, delta },
            ),
        };
        write_event(kind, sequence, event, out)?;
        self.sequence += 1;
        Ok(())
    }

    fn close(&mut self, facts: &ChatStreamFacts, out: &mut Vec<u8>) -> Result<(), StreamFailure> {
        if let Some(OpenItem { kind: ItemKind::FunctionCall { .. }, text, .. }) = &self.item
            && text.is_empty()
        {
            // A call without arguments; clients parse them.
            self.add("{}", out)?;
        }
        let output_index = self.output_index();
        let Some(mut item) = self.item.take() else { return Ok(()) };
        let (item_id, content_index) = (item.id.as_str(), 0);
        let (kind, event) = match &item.kind {
            ItemKind::Message => (
                "response.output_text.done",
                ResponseEvent::TextDone {
                    item_id,
                    output_index,
                    content_index,
                    text: &item.text,
                    logprobs: [],
                },
            ),
            ItemKind::Reasoning => (
                "response.reasoning_text.done",
                ResponseEvent::ReasoningDone { item_id, output_index, content_index, text: &item.text },
            ),
            ItemKind::FunctionCall { name, .. } => (
                "response.function_call_arguments.done",
                ResponseEvent::ArgumentsDone { item_id, output_index, name, arguments: &item.text },
            ),
        };
        self.emit(kind, event, out)?;
        if let Some(part) = item.part() {
            let event = ResponseEvent::Part { item_id, output_index, content_index, part };
            self.emit("response.content_part.done", event, out)?;
        }
        // The reason is known only when the last item closes.
        let end = facts.finish_reason.as_deref().and_then(ResponseEnd::of);
        let text = std::mem::take(&mut item.text);
        let done = item.output(text, end.map_or("completed", ResponseEnd::status));
        self.emit("response.output_item.done", ResponseEvent::Item { output_index, item: &done }, out)?;
        self.output.push(done);
        Ok(())
    }
}
