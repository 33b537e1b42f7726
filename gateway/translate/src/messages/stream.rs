//! From the stream of a chat completion to a stream of messages.

use crate::chat::{BlockEvent, BlockWriter, ChatStreamFacts, ChatStreamReader};
use crate::error::StreamFailure;

use super::events::{BlockDelta, EmptyInput, MessageEvent, StartedBlock, StartedMessage};
use super::stop::{ChatEnd, MessageUsage, message_id};

/// Translates the events of a chat completion's stream, as they arrive, to events of a message.
///
/// It holds one chunk, and text that arrived within a tool call up to 64 KiB. After an error event it emits nothing more, so that the
/// stream does not look complete.
#[derive(Debug, Default)]
pub struct ChatStreamToMessages {
    reader: ChatStreamReader,
    writer: MessageWriter,
}

impl ChatStreamToMessages {
    /// Takes one or more complete events, and returns the events that follow from them, possibly none.
    #[must_use]
    pub fn push(&mut self, events: &[u8]) -> Vec<u8> {
        self.reader.push(events, &mut self.writer)
    }

    /// Called at the end of the stream.
    ///
    /// # Errors
    ///
    /// The failure that the client was sent as an error event, or [`StreamFailure::Truncated`], which the caller sends
    /// ([`StreamFailure::message_event`]).
    pub fn finish(&self) -> Result<(), StreamFailure> {
        self.reader.finish()
    }
}

#[derive(Debug, Default)]
struct MessageWriter {
    /// Index of the block that is open, or of the next one.
    index: u32,
    kind: BlockKind,
}

#[derive(Debug, Default)]
enum BlockKind {
    #[default]
    Text,
    Thinking,
    ToolUse,
}

impl BlockWriter for MessageWriter {
    fn write(
        &mut self,
        facts: &ChatStreamFacts,
        event: BlockEvent<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), StreamFailure> {
        match event {
            BlockEvent::Start => start(facts).write(out),
            BlockEvent::OpenText => self.open(BlockKind::Text, StartedBlock::Text { text: "" }, out),
            BlockEvent::OpenReasoning => {
                self.open(BlockKind::Thinking, StartedBlock::Thinking { thinking: "", signature: "" }, out)
            }
            BlockEvent::OpenCall { id, name } => {
                self.open(BlockKind::ToolUse, StartedBlock::ToolUse { id, name, input: EmptyInput {} }, out)
            }
            BlockEvent::Delta(added) => {
                let delta = match self.kind {
                    BlockKind::Text => BlockDelta::Text { text: added },
                    BlockKind::Thinking => BlockDelta::Thinking { thinking: added },
                    BlockKind::ToolUse => BlockDelta::Input { partial_json: added },
                };
                MessageEvent::ContentBlockDelta { index: self.index, delta }.write(out)
            }
            BlockEvent::Close => {
                MessageEvent::ContentBlockStop { index: self.index }.write(out)?;
                self.index += 1;
                Ok(())
            }
            BlockEvent::End => end(facts, out),
        }
    }

    fn write_failure(&mut self, failure: &StreamFailure, out: &mut Vec<u8>) {
        out.extend(failure.message_event());
    }
}

impl MessageWriter {
    fn open(
        &mut self,
        kind: BlockKind,
        content_block: StartedBlock<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), StreamFailure> {
        self.kind = kind;
        MessageEvent::ContentBlockStart { index: self.index, content_block }.write(out)
    }
}

fn start(facts: &ChatStreamFacts) -> MessageEvent<'_> {
    MessageEvent::MessageStart {
        message: StartedMessage {
            id: message_id(&facts.id),
            role: "assistant",
            model: &facts.model,
            content: [],
            stop_reason: None,
            stop_sequence: None,
            usage: facts.usage.map(MessageUsage::from).unwrap_or_default().without_output(),
        },
    }
}

fn end(facts: &ChatStreamFacts, out: &mut Vec<u8>) -> Result<(), StreamFailure> {
    let finish_reason = facts.finish_reason.as_deref().unwrap_or_default();
    let end =
        ChatEnd { finish_reason, matched_stop: facts.matched_stop.as_ref(), calls_tools: facts.calls_tools };
    let Some(stop) = end.stop() else {
        return Err(StreamFailure::Malformed(format!("its finish reason is {finish_reason:?}")));
    };
    let usage = facts.usage.map(MessageUsage::from).unwrap_or_default();
    MessageEvent::MessageDelta { delta: &stop, usage }.write(out)?;
    MessageEvent::MessageStop.write(out)
}
