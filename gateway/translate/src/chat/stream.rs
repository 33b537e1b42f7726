//! A chat completion's stream as a sequence of blocks: reasoning, texts and tool calls, one after another.

use serde_json::Value;

use crate::error::StreamFailure;
use crate::json::JsonBalance;

use super::completion::{ChatChunk, ChatOutput, ChatToolCall, ChatUsage};
use super::events::payloads;

/// Longest text that is held back because it arrived between the fragments of a tool call's arguments.
const MAX_HELD_TEXT: usize = 64 << 10;

/// What a chunk adds to the response.
#[derive(Debug)]
pub(crate) enum BlockEvent<'a> {
    /// Before everything else, once the first output or usage arrives.
    Start,
    OpenText,
    OpenReasoning,
    OpenCall {
        id: &'a str,
        name: &'a str,
    },
    /// Added to the open block.
    Delta(&'a str),
    Close,
    /// The stream is complete, and has a finish reason.
    End,
}

/// What is known of the response so far.
#[derive(Debug, Default)]
pub(crate) struct ChatStreamFacts {
    pub(crate) id: String,
    pub(crate) model: String,
    pub(crate) usage: Option<ChatUsage>,
    pub(crate) finish_reason: Option<String>,
    /// The stop string, or the id of the stop token, at which the engine stopped.
    pub(crate) matched_stop: Option<Value>,
    /// Whether tools are called, the last with complete arguments.
    pub(crate) calls_tools: bool,
}

/// Writes the events of another API.
pub(crate) trait BlockWriter {
    fn write(
        &mut self,
        facts: &ChatStreamFacts,
        event: BlockEvent<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), StreamFailure>;

    fn write_failure(&mut self, failure: &StreamFailure, out: &mut Vec<u8>);
}

/// Reads the stream and drives a [`BlockWriter`]. After a failure it emits nothing more, so that the stream does not look complete.
#[derive(Debug, Default)]
pub(crate) struct ChatStreamReader {
    facts: ChatStreamFacts,
    phase: StreamPhase,
    block: OpenBlock,
    /// A tool call of which only index and id are known.
    announced: Option<(u32, String)>,
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
    Reasoning,
    Call(OpenToolCall),
}

#[derive(Debug)]
struct OpenToolCall {
    /// Its index among the chat completion's tool calls.
    index: u32,
    id: String,
    arguments: JsonBalance,
    held_text: String,
}

impl ChatStreamReader {
    /// Takes complete events, and returns what the writer makes of them.
    pub(crate) fn push(&mut self, events: &[u8], writer: &mut impl BlockWriter) -> Vec<u8> {
        let mut out = Vec::new();
        if matches!(self.phase, StreamPhase::Done | StreamPhase::Failed(_)) {
            return out;
        }
        if let Err(failure) = self.push_events(events, &mut BlockOutput { writer, out: &mut out }) {
            writer.write_failure(&failure, &mut out);
            self.phase = StreamPhase::Failed(failure);
        }
        out
    }

    pub(crate) fn finish(&self) -> Result<(), StreamFailure> {
        match &self.phase {
            StreamPhase::Done => Ok(()),
            StreamPhase::Failed(failure) => Err(failure.clone()),
            StreamPhase::BeforeStart | StreamPhase::Started => Err(StreamFailure::Truncated),
        }
    }

    fn push_events<W: BlockWriter>(
        &mut self,
        events: &[u8],
        out: &mut BlockOutput<'_, W>,
    ) -> Result<(), StreamFailure> {
        let events =
            str::from_utf8(events).map_err(|error| malformed(format!("it is not UTF-8: {error}")))?;
        for payload in payloads(events) {
            if payload.trim() == "[DONE]" {
                return self.end(out);
            }
            self.push_chunk(ChatChunk::read(&payload)?, out)?;
        }
        Ok(())
    }

    fn push_chunk<W: BlockWriter>(
        &mut self,
        chunk: ChatChunk<'_>,
        out: &mut BlockOutput<'_, W>,
    ) -> Result<(), StreamFailure> {
        if self.facts.id.is_empty() {
            self.facts.id = chunk.id;
            self.facts.model = chunk.model;
        }
        self.facts.usage = chunk.usage.or(self.facts.usage);
        let mut delta = ChatOutput::default();
        if let Some(choice) = chunk.choices.into_iter().find(|choice| choice.index == 0) {
            if choice.finish_reason.is_some() {
                self.facts.finish_reason = choice.finish_reason;
                self.facts.matched_stop = choice.matched_stop.or(choice.stop_reason);
            }
            delta = choice.delta;
        }
        let reasoning = delta.take_reasoning();
        let text = delta.take_text();
        let calls = delta.tool_calls.unwrap_or_default();
        let has_output = reasoning.is_some() || text.is_some() || !calls.is_empty();
        // The first chunk may have neither output nor usage, and the start of a message has the number of input tokens.
        if has_output || self.facts.usage.is_some() || self.facts.finish_reason.is_some() {
            self.start(out)?;
        }
        if let Some(reasoning) = reasoning {
            self.push_reasoning(&reasoning, out)?;
        }
        if let Some(text) = text {
            self.push_text(&text, out)?;
        }
        for call in calls {
            self.push_call(call, out)?;
        }
        Ok(())
    }

    fn start<W: BlockWriter>(&mut self, out: &mut BlockOutput<'_, W>) -> Result<(), StreamFailure> {
        if !matches!(self.phase, StreamPhase::BeforeStart) {
            return Ok(());
        }
        self.phase = StreamPhase::Started;
        out.write(&self.facts, BlockEvent::Start)
    }

    fn push_reasoning<W: BlockWriter>(
        &mut self,
        reasoning: &str,
        out: &mut BlockOutput<'_, W>,
    ) -> Result<(), StreamFailure> {
        if !matches!(self.block, OpenBlock::Reasoning) {
            self.close_block(out)?;
            self.block = OpenBlock::Reasoning;
            out.write(&self.facts, BlockEvent::OpenReasoning)?;
        }
        out.write(&self.facts, BlockEvent::Delta(reasoning))
    }

    fn push_text<W: BlockWriter>(
        &mut self,
        text: &str,
        out: &mut BlockOutput<'_, W>,
    ) -> Result<(), StreamFailure> {
        if let OpenBlock::Call(call) = &mut self.block {
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
            out.write(&self.facts, BlockEvent::OpenText)?;
        }
        out.write(&self.facts, BlockEvent::Delta(text))
    }

    fn push_call<W: BlockWriter>(
        &mut self,
        call: ChatToolCall<'_>,
        out: &mut BlockOutput<'_, W>,
    ) -> Result<(), StreamFailure> {
        let function = call.function.as_ref();
        let arguments = function.map(|function| function.arguments()).transpose();
        let arguments = arguments.map_err(|error| malformed(error.to_string()))?.unwrap_or_default();
        let name = function.and_then(|function| function.name.as_deref()).filter(|name| !name.is_empty());
        let id = call.id.filter(|id| !id.is_empty());
        let open = if let OpenBlock::Call(open) = &self.block { Some(open) } else { None };
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
        if let OpenBlock::Call(open) = &mut self.block {
            open.arguments.push(&arguments);
        }
        out.write(&self.facts, BlockEvent::Delta(&arguments))
    }

    fn open_call<W: BlockWriter>(
        &mut self,
        index: u32,
        id: Option<String>,
        name: &str,
        out: &mut BlockOutput<'_, W>,
    ) -> Result<(), StreamFailure> {
        self.close_block(out)?;
        let announced = self.announced.take().filter(|(announced, _)| *announced == index).map(|(_, id)| id);
        let id = id.or(announced).unwrap_or_else(|| format!("call_{}_{index}", self.facts.id));
        out.write(&self.facts, BlockEvent::OpenCall { id: &id, name })?;
        let (arguments, held_text) = (JsonBalance::default(), String::new());
        self.block = OpenBlock::Call(OpenToolCall { index, id, arguments, held_text });
        Ok(())
    }

    fn close_block<W: BlockWriter>(&mut self, out: &mut BlockOutput<'_, W>) -> Result<(), StreamFailure> {
        let block = std::mem::take(&mut self.block);
        if matches!(block, OpenBlock::None) {
            return Ok(());
        }
        out.write(&self.facts, BlockEvent::Close)?;
        if let OpenBlock::Call(call) = block {
            self.facts.calls_tools = call.arguments.is_complete();
            if !call.held_text.is_empty() {
                self.push_text(&call.held_text, out)?;
                return self.close_block(out);
            }
        }
        Ok(())
    }

    fn end<W: BlockWriter>(&mut self, out: &mut BlockOutput<'_, W>) -> Result<(), StreamFailure> {
        if self.facts.finish_reason.is_none() {
            return Err(malformed("it has no finish reason".to_owned()));
        }
        self.close_block(out)?;
        out.write(&self.facts, BlockEvent::End)?;
        self.phase = StreamPhase::Done;
        Ok(())
    }
}

/// Where a writer writes.
struct BlockOutput<'a, W> {
    writer: &'a mut W,
    out: &'a mut Vec<u8>,
}

impl<W: BlockWriter> BlockOutput<'_, W> {
    fn write(&mut self, facts: &ChatStreamFacts, event: BlockEvent<'_>) -> Result<(), StreamFailure> {
        self.writer.write(facts, event, self.out)
    }
}

fn malformed(problem: String) -> StreamFailure {
    StreamFailure::Malformed(problem)
}
