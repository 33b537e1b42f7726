//! The events of an engine's stream as the client gets them: checked, and translated if the engine lacks the client's API.

use bytes::Bytes;
use moongate_translate::{ChatStreamToMessages, StreamFailure};

use super::sse::{SseError, SseFramer};
use crate::request_body::StreamEnd;

/// The events of one stream, from an engine to a client.
#[derive(Debug)]
pub(crate) struct ResponseEvents {
    framer: SseFramer,
    translation: Option<Box<ChatStreamToMessages>>,
}

impl ResponseEvents {
    /// Events of a stream that ends in this way, for the client as they are.
    pub(crate) fn new(end: StreamEnd) -> Self {
        Self { framer: SseFramer::new(end), translation: None }
    }

    /// Events of a chat completion, for a client of Anthropic's API.
    pub(crate) fn of_translated_chat() -> Self {
        Self { framer: SseFramer::new(StreamEnd::Done), translation: Some(Box::default()) }
    }

    /// Takes a chunk of the engine's stream and returns what the client gets now, possibly nothing.
    pub(crate) fn push(&mut self, chunk: Bytes) -> Result<Bytes, SseError> {
        let events = self.framer.push(chunk)?;
        match &mut self.translation {
            None => Ok(events),
            Some(translation) => {
                let translated = Bytes::from(translation.push(&events));
                match translation.finish() {
                    // It is not yet at its end.
                    Ok(()) | Err(StreamFailure::Truncated) => Ok(translated),
                    Err(StreamFailure::Malformed(_) | StreamFailure::Engine { .. }) => Err(NOT_A_CHAT),
                }
            }
        }
    }

    /// Called at the end of the engine's stream. Returns the remaining bytes for the client.
    pub(crate) fn finish(&mut self) -> Result<Bytes, SseError> {
        let rest = self.framer.finish()?;
        let Some(translation) = &mut self.translation else { return Ok(rest) };
        let translated = Bytes::from(translation.push(&rest));
        translation.finish().map(|()| translated).map_err(|_| NOT_A_CHAT)
    }

    /// Whether the engine has sent nothing that depends on the model's output.
    pub(crate) fn is_in_preamble(&self) -> bool {
        self.framer.is_in_preamble()
    }

    /// JSON of the engine's first event, if its API has typed events.
    pub(crate) fn first_payload(&self) -> &[u8] {
        self.framer.first_payload()
    }

    /// JSON of the engine's last event.
    pub(crate) fn last_payload(&self) -> &[u8] {
        self.framer.last_payload()
    }

    /// JSON of the engine's event before the last.
    pub(crate) fn previous_payload(&self) -> &[u8] {
        self.framer.previous_payload()
    }

    /// Number of the engine's events.
    pub(crate) fn events(&self) -> u64 {
        self.framer.events()
    }
}

const NOT_A_CHAT: SseError = SseError::Malformed("sent a stream that is not a chat completion's");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chat_becomes_a_message() {
        let mut events = ResponseEvents::of_translated_chat();
        let chunk = br#"data: {"id":"c","object":"chat.completion.chunk","model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":"hi"},"finish_reason":null}]}"#;
        let first = events.push(Bytes::from([&chunk[..], b"\n\n"].concat())).unwrap();
        assert!(first.starts_with(b"event: message_start\n"), "{}", String::from_utf8_lossy(&first));
        let last = br#"data: {"id":"c","object":"chat.completion.chunk","model":"m","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}"#;
        events.push(Bytes::from([&last[..], b"\n\n"].concat())).unwrap();
        assert!(ResponseEvents::finish(&mut events).is_err(), "truncated");
        let end = events.push(Bytes::from_static(b"data: [DONE]\n\n")).unwrap();
        assert!(end.ends_with(b"\n\n") && String::from_utf8_lossy(&end).contains("message_stop"));
        assert_eq!(events.finish(), Ok(Bytes::new()));
    }
}
