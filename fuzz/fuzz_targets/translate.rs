//! Messages requests are translated to chat completions, and responses and streams back. Whatever is translated is JSON, a stream gives the
//! same events however its own are grouped, and after an error it has no last event.
//!
//! The first byte selects the direction; of a stream, also the number of events in a group.

#![no_main]

use libfuzzer_sys::fuzz_target;
use moongate_translate::{
    ChatStreamToMessages, InlineSystem, StreamFailure, chat_to_messages, messages_to_chat_with,
};
use serde_json::{Map, Value};

/// A translated stream, and how it ended.
type TranslatedStream = (Vec<u8>, Result<(), StreamFailure>);

fn object(json: &[u8]) -> Map<String, Value> {
    serde_json::from_slice(json).expect("a translated body is an object")
}

fn request(body: &[u8]) {
    for inline in [InlineSystem::Merge, InlineSystem::Keep] {
        match messages_to_chat_with(body, inline) {
            Ok(chat) => {
                let chat = object(&chat);
                let messages = chat["messages"].as_array();
                assert!(messages.is_some_and(|list| list.iter().all(|message| message["role"].is_string())));
            }
            Err(error) => assert!(error.to_string().contains('`')),
        }
    }
}

fn response(body: &[u8]) {
    if let Ok(message) = chat_to_messages(body) {
        let message = object(&message);
        assert!(message["content"].as_array().is_some_and(|blocks| !blocks.is_empty()));
        assert!(message["stop_reason"].is_string());
    }
}

fn messages(events: &[Vec<u8>], group: usize) -> TranslatedStream {
    let mut translator = ChatStreamToMessages::default();
    let out = events.chunks(group).flat_map(|events| translator.push(&events.concat())).collect();
    (out, translator.finish())
}

fn stream(text: &[u8], group: usize) {
    let events: Vec<Vec<u8>> =
        text.split(|byte| *byte == b'\n').map(|line| [b"data: ", line, b"\n\n"].concat()).collect();
    let (out, end) = messages(&events, 1);
    // An event that is not UTF-8 invalidates its group.
    if std::str::from_utf8(&events.concat()).is_ok() {
        assert_eq!(messages(&events, group), (out.clone(), end.clone()));
    }
    let out = String::from_utf8(out).expect("events are text");
    assert_eq!(out.contains("event: message_stop\n"), end.is_ok());
    for event in out.split_terminator("\n\n") {
        let (name, data) = event.split_once("\ndata: ").expect("an event has a name and data");
        assert_eq!(object(data.as_bytes())["type"].as_str(), name.strip_prefix("event: "));
    }
}

fuzz_target!(|input: &[u8]| {
    let Some((first, rest)) = input.split_first() else { return };
    match first % 3 {
        0 => request(rest),
        1 => response(rest),
        _ => stream(rest, usize::from(first / 3) + 1),
    }
});
