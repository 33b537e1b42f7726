//! Bodies that SGLang's own conversion was given (`tests/vectors.py`).

use std::collections::BTreeMap;

use moongate_translate::{InlineSystem, messages_to_chat_with};
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

#[derive(Deserialize)]
struct ConversionVector<'a> {
    name: String,
    keeps_inline_system: bool,
    #[serde(borrow)]
    messages: &'a RawValue,
    #[serde(borrow)]
    chat: BTreeMap<String, &'a RawValue>,
}

#[test]
fn requests_are_converted_as_by_sglang() {
    let vectors: Vec<ConversionVector<'_>> = serde_json::from_str(include_str!("../vectors.json")).unwrap();
    assert!(vectors.len() > 50);
    for vector in vectors {
        let inline = if vector.keeps_inline_system { InlineSystem::Keep } else { InlineSystem::Merge };
        let chat = messages_to_chat_with(vector.messages.get().as_bytes(), inline).unwrap();
        let mut chat: BTreeMap<String, &RawValue> = serde_json::from_slice(&chat).unwrap();
        let mut expected = vector.chat;
        // SGLang's defaults, which it also has for chat completions.
        for (name, default) in [("stream", "false"), ("tool_choice", r#""none""#)] {
            if expected.get(name).is_some_and(|value| value.get() == default) && !chat.contains_key(name) {
                expected.remove(name);
            }
        }
        // Prompts contain tools in the order of their members.
        let tools = [&mut chat, &mut expected].map(|body| body.remove("tools").map(RawValue::get));
        assert_eq!(tools[0], tools[1], "{}", vector.name);
        assert_eq!(values(&chat), values(&expected), "{}", vector.name);
    }
}

fn values(body: &BTreeMap<String, &RawValue>) -> Value {
    serde_json::to_value(body).unwrap()
}
