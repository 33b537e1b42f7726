//! The arguments of earlier tool calls. Clients send them as a JSON string; templates expect the object.

use minijinja::Value;
use minijinja::value::ValueKind;

/// The object in `arguments`, parsed if it is a string. `None` if it is neither.
pub(super) fn object(arguments: &Value) -> Option<Value> {
    let parsed = match arguments.as_str() {
        Some(text) => serde_json::from_str::<Value>(text).ok()?,
        None => arguments.clone(),
    };
    (parsed.kind() == ValueKind::Map).then_some(parsed)
}
