//! Messages and Responses requests are translated to chat completions, and responses and streams back. Whatever is translated is JSON, a
//! stream gives the same events however its own are grouped, and after an error it has no last event.
//!
//! The first byte selects the direction; of a stream, also the number of events in a group.

#![no_main]

use libfuzzer_sys::fuzz_target;
use moongate_translate::{
    ChatStreamToMessages, ChatStreamToResponses, InlineSystem, StreamFailure, chat_to_messages,
    chat_to_responses, messages_to_chat_with, responses_to_chat,
};
use serde_json::{Map, Value};

/// A translated stream, and how it ended.
type TranslatedStream = (Vec<u8>, Result<(), StreamFailure>);

fn object(json: &[u8]) -> Map<String, Value> {
    serde_json::from_slice(json).expect("a translated body is an object")
}

fn check_chat(chat: &[u8]) {
    let chat = object(chat);
    assert!(
        chat["messages"]
            .as_array()
            .is_some_and(|list| list.iter().all(|message| message["role"].is_string()))
    );
}

fn request(body: &[u8]) {
    for inline in [InlineSystem::Merge, InlineSystem::Keep] {
        match messages_to_chat_with(body, inline) {
            Ok(chat) => check_chat(&chat),
            Err(error) => assert!(error.to_string().contains('`')),
        }
        match responses_to_chat(body, inline) {
            Ok(chat) => check_chat(&chat.body),
            Err(error) => assert!(error.to_string().contains('`')),
        }
    }
}

fn response(body: &[u8]) {
    if let Ok(message) = chat_to_messages(body) {
        let message = object(&message);
        assert!(message["content"].as_array().is_some_and(|blocks| !blocks.is_empty()));
        assert!(message["stop_reason"].is_string());
        let response = object(&chat_to_responses(body, &Default::default()).expect("both are translated"));
        assert!(response["output"].is_array());
    }
}

fn messages(events: &[Vec<u8>], group: usize) -> TranslatedStream {
    let mut translator = ChatStreamToMessages::default();
    let out = events.chunks(group).flat_map(|events| translator.push(&events.concat())).collect();
    (out, translator.finish())
}

fn responses(events: &[Vec<u8>], group: usize) -> TranslatedStream {
    let mut translator = ChatStreamToResponses::new(Default::default());
    let out = events.chunks(group).flat_map(|events| translator.push(&events.concat())).collect();
    (out, translator.finish())
}

fn stream(text: &[u8], group: usize) {
    let events: Vec<Vec<u8>> =
        text.split(|byte| *byte == b'\n').map(|line| [b"data: ", line, b"\n\n"].concat()).collect();
    check_stream(messages, &events, group, &["message_stop"]);
    check_stream(responses, &events, group, &["response.completed", "response.incomplete"]);
}

fn check_stream(
    translate: fn(&[Vec<u8>], usize) -> TranslatedStream,
    events: &[Vec<u8>],
    group: usize,
    last: &[&str],
) {
    let (out, end) = translate(events, 1);
    // An event that is not UTF-8 invalidates its group.
    if std::str::from_utf8(&events.concat()).is_ok() {
        assert_eq!(translate(events, group), (out.clone(), end.clone()));
    }
    let out = String::from_utf8(out).expect("events are text");
    assert_eq!(last.iter().any(|last| out.contains(&format!("event: {last}\n"))), end.is_ok());
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
