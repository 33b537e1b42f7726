//! From the stream of a chat completion to a stream of messages.

use serde_json::Value;

use crate::chat::{ChatChunk, ChatOutput, ChatToolCall, payloads};
use crate::error::StreamFailure;
use crate::json::JsonBalance;

use super::events::{BlockDelta, EmptyInput, MessageEvent, StartedBlock, StartedMessage};
use super::stop::{ChatEnd, MessageUsage, message_id};

/// Longest text that is held back because it arrived between the fragments of a tool call's arguments.
const MAX_HELD_TEXT: usize = 64 << 10;

/// Translates the events of a chat completion's stream, as they arrive, to events of a message.
///
/// It holds one chunk, and text that arrived within a tool call up to 64 KiB. After an error event it emits nothing more, so that the
/// stream does not look complete.
#[derive(Debug, Default)]
pub struct ChatStreamToMessages {
    chat_id: String,
    model: String,
    phase: StreamPhase,
    /// Index of the block that is open, or of the next one.
    index: u32,
    block: OpenBlock,
    /// A tool call of which only index and id are known.
    announced: Option<(u32, String)>,
    calls_tools: bool,
    /// Whether the arguments of the last tool call are complete.
    last_call_is_complete: bool,
    finish_reason: Option<String>,
    matched_stop: Option<Value>,
    usage: Option<MessageUsage>,
}

#[derive(Debug, Default)]
enum StreamPhase {
    #[default]
    BeforeStart,
    Started,
    Done,
    Failed(StreamFailure),
}

#[derive(Debug, Default)]
enum OpenBlock {
    #[default]
    None,
    Text,
    Thinking,
    ToolUse(OpenToolCall),
}

#[derive(Debug)]
struct OpenToolCall {
    /// Its index among the chat completion's tool calls.
    index: u32,
    id: String,
    arguments: JsonBalance,
    held_text: String,
}

impl ChatStreamToMessages {
    /// Takes one or more complete events, and returns the events that follow from them, possibly none.
    #[must_use]
    pub fn push(&mut self, events: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        if matches!(self.phase, StreamPhase::Done | StreamPhase::Failed(_)) {
            return out;
        }
        if let Err(failure) = self.push_events(events, &mut out) {
            out.extend(failure.message_event());
            self.phase = StreamPhase::Failed(failure);
        }
        out
    }

    /// Called at the end of the stream.
    ///
    /// # Errors
    ///
    /// The failure that the client was sent as an error event, or [`StreamFailure::Truncated`], which the caller sends
    /// ([`StreamFailure::message_event`]).
    pub fn finish(&self) -> Result<(), StreamFailure> {
        match &self.phase {
            StreamPhase::Done => Ok(()),
            StreamPhase::Failed(failure) => Err(failure.clone()),
            StreamPhase::BeforeStart | StreamPhase::Started => Err(StreamFailure::Truncated),
        }
    }

    fn push_events(&mut self, events: &[u8], out: &mut Vec<u8>) -> Result<(), StreamFailure> {
        let events =
            str::from_utf8(events).map_err(|error| malformed(format!("it is not UTF-8: {error}")))?;
        for payload in payloads(events) {
            if payload.trim() == "[DONE]" {
                return self.end(out);
            }
            let chunk = ChatChunk::read(&payload)?;
            self.push_chunk(chunk, out)?;
        }
        Ok(())
    }

    fn push_chunk(&mut self, chunk: ChatChunk<'_>, out: &mut Vec<u8>) -> Result<(), StreamFailure> {
        if self.chat_id.is_empty() {
            self.chat_id = chunk.id;
            self.model = chunk.model;
        }
        if let Some(usage) = chunk.usage {
            self.usage = Some(usage.into());
        }
        let choice = chunk.choices.into_iter().find(|choice| choice.index == 0);
        let mut delta = ChatOutput::default();
        if let Some(choice) = choice {
            if choice.finish_reason.is_some() {
                self.finish_reason = choice.finish_reason;
                self.matched_stop = choice.matched_stop.or(choice.stop_reason);
            }
            delta = choice.delta;
        }
        let reasoning = delta.take_reasoning();
        let text = delta.take_text();
        let calls = delta.tool_calls.unwrap_or_default();
        let has_output = reasoning.is_some() || text.is_some() || !calls.is_empty();
        // The first chunk may have neither output nor usage, and the start of a message has the number of input tokens.
        if has_output || self.usage.is_some() || self.finish_reason.is_some() {
            self.start(out)?;
        }
        if let Some(reasoning) = reasoning {
            self.push_thinking(&reasoning, out)?;
        }
        if let Some(text) = text {
            self.push_text(&text, out)?;
        }
        for call in calls {
            self.push_call(call, out)?;
        }
        Ok(())
    }

    fn start(&mut self, out: &mut Vec<u8>) -> Result<(), StreamFailure> {
        if !matches!(self.phase, StreamPhase::BeforeStart) {
            return Ok(());
        }
        self.phase = StreamPhase::Started;
        let message = StartedMessage {
            id: message_id(&self.chat_id),
            role: "assistant",
            model: &self.model,
            content: [],
            stop_reason: None,
            stop_sequence: None,
            usage: self.usage.unwrap_or_default().without_output(),
        };
        MessageEvent::MessageStart { message }.write(out)
    }

    fn push_thinking(&mut self, thinking: &str, out: &mut Vec<u8>) -> Result<(), StreamFailure> {
        if !matches!(self.block, OpenBlock::Thinking) {
            self.close_block(out)?;
            self.block = OpenBlock::Thinking;
            self.open_block(StartedBlock::Thinking { thinking: "", signature: "" }, out)?;
        }
        self.delta(BlockDelta::Thinking { thinking }, out)
    }

    fn push_text(&mut self, text: &str, out: &mut Vec<u8>) -> Result<(), StreamFailure> {
        if let OpenBlock::ToolUse(call) = &mut self.block {
            // Its arguments may go on, and a block that was closed cannot.
            if call.held_text.len() + text.len() > MAX_HELD_TEXT {
                return Err(malformed(format!("more than {MAX_HELD_TEXT} bytes of text within a tool call")));
            }
            call.held_text.push_str(text);
            return Ok(());
        }
        if !matches!(self.block, OpenBlock::Text) {
            self.close_block(out)?;
            self.block = OpenBlock::Text;
            self.open_block(StartedBlock::Text { text: "" }, out)?;
        }
        self.delta(BlockDelta::Text { text }, out)
    }

    fn push_call(&mut self, call: ChatToolCall<'_>, out: &mut Vec<u8>) -> Result<(), StreamFailure> {
        let function = call.function.as_ref();
        let arguments = function.map(|function| function.arguments()).transpose();
        let arguments = arguments.map_err(|error| malformed(error.to_string()))?.unwrap_or_default();
        let name = function.and_then(|function| function.name.as_deref()).filter(|name| !name.is_empty());
        let id = call.id.filter(|id| !id.is_empty());
        let open = if let OpenBlock::ToolUse(open) = &self.block { Some(open) } else { None };
        let index = call.index.or(open.map(|open| open.index)).unwrap_or(0);
        let goes_on = open.is_some_and(|open| {
            open.index == index && (name.is_none() || id.as_ref().is_none_or(|id| *id == open.id))
        });
        if let Some(name) = name.filter(|_| !goes_on) {
            self.open_call(index, id, name, out)?;
        } else if !goes_on {
            if arguments.is_empty() {
                self.announced = id.map(|id| (index, id));
                return Ok(());
            }
            return Err(malformed(format!("arguments for tool call {index}, which is not open")));
        }
        if arguments.is_empty() {
            return Ok(());
        }
        if let OpenBlock::ToolUse(open) = &mut self.block {
            open.arguments.push(&arguments);
        }
        self.delta(BlockDelta::Input { partial_json: &arguments }, out)
    }

    fn open_call(
        &mut self,
        index: u32,
        id: Option<String>,
        name: &str,
        out: &mut Vec<u8>,
    ) -> Result<(), StreamFailure> {
        self.close_block(out)?;
        let announced = self.announced.take().filter(|(announced, _)| *announced == index).map(|(_, id)| id);
        let id = id.or(announced).unwrap_or_else(|| format!("toolu_{}_{index}", self.chat_id));
        self.open_block(StartedBlock::ToolUse { id: &id, name, input: EmptyInput {} }, out)?;
        self.calls_tools = true;
        let (arguments, held_text) = (JsonBalance::default(), String::new());
        self.block = OpenBlock::ToolUse(OpenToolCall { index, id, arguments, held_text });
        Ok(())
    }

    fn open_block(&self, content_block: StartedBlock<'_>, out: &mut Vec<u8>) -> Result<(), StreamFailure> {
        MessageEvent::ContentBlockStart { index: self.index, content_block }.write(out)
    }

    fn delta(&self, delta: BlockDelta<'_>, out: &mut Vec<u8>) -> Result<(), StreamFailure> {
        MessageEvent::ContentBlockDelta { index: self.index, delta }.write(out)
    }

    fn close_block(&mut self, out: &mut Vec<u8>) -> Result<(), StreamFailure> {
        let block = std::mem::take(&mut self.block);
        if matches!(block, OpenBlock::None) {
            return Ok(());
        }
        MessageEvent::ContentBlockStop { index: self.index }.write(out)?;
        self.index += 1;
        if let OpenBlock::ToolUse(call) = block {
            self.last_call_is_complete = call.arguments.is_complete();
            if !call.held_text.is_empty() {
                self.push_text(&call.held_text, out)?;
                return self.close_block(out);
            }
        }
        Ok(())
    }

    fn end(&mut self, out: &mut Vec<u8>) -> Result<(), StreamFailure> {
        let Some(finish_reason) = self.finish_reason.take() else {
            return Err(malformed("it has no finish reason".to_owned()));
        };
        self.close_block(out)?;
        let end = ChatEnd {
            finish_reason: &finish_reason,
            matched_stop: self.matched_stop.as_ref(),
            calls_tools: self.calls_tools && self.last_call_is_complete,
        };
        let Some(stop) = end.stop() else {
            return Err(malformed(format!("its finish reason is {finish_reason:?}")));
        };
        MessageEvent::MessageDelta { delta: &stop, usage: self.usage.unwrap_or_default() }.write(out)?;
        self.phase = StreamPhase::Done;
        MessageEvent::MessageStop.write(out)
    }
}

fn malformed(problem: String) -> StreamFailure {
    StreamFailure::Malformed(problem)
}
