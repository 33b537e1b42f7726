//! What an answer says of itself at its end: its id, and why each choice ended.

use bytes::Bytes;
use serde::Deserialize;

/// Longest id that is told.
const LONGEST_ID: usize = 128;
/// Longest answer that is looked at: the last event of a stream is short, a whole answer may be long.
const LONGEST_ANSWER: usize = 16 << 10;

/// Who an answer is and why it ended, as far as it says so.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Ending {
    pub(crate) id: Option<String>,
    /// One for each choice that has ended.
    pub(crate) finish_reasons: Vec<String>,
}

#[derive(Deserialize)]
struct Answer {
    id: Option<String>,
    #[serde(default)]
    choices: Vec<Choice>,
    meta_info: Option<MetaInfo>,
}

#[derive(Deserialize)]
struct Choice {
    finish_reason: Option<String>,
}

/// SGLang's `/generate`.
#[derive(Deserialize)]
struct MetaInfo {
    id: Option<String>,
    finish_reason: Option<Finish>,
}

#[derive(Deserialize)]
struct Finish {
    r#type: String,
}

impl Ending {
    /// Adds what a JSON answer, or event of one, says. What is of another shape says nothing.
    pub(crate) fn read(&mut self, json: &Bytes) {
        if json.len() > LONGEST_ANSWER {
            return;
        }
        let Ok(answer) = serde_json::from_slice::<Answer>(json) else { return };
        let (meta_id, meta_finish) =
            answer.meta_info.map_or((None, None), |meta| (meta.id, meta.finish_reason));
        let id = answer.id.or(meta_id).filter(|id| id.len() <= LONGEST_ID);
        self.id = id.or(self.id.take());
        let reasons = answer.choices.into_iter().filter_map(|choice| choice.finish_reason);
        self.finish_reasons.extend(reasons.chain(meta_finish.map(|finish| finish.r#type)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(events: &[&str]) -> (Option<String>, Vec<String>) {
        let mut ending = Ending::default();
        events.iter().for_each(|event| ending.read(&Bytes::from((*event).to_owned())));
        (ending.id, ending.finish_reasons)
    }

    #[test]
    fn the_last_events_of_every_shape_tell_id_and_reasons() {
        let last = r#"{"id":"c-1","choices":[{"index":0,"delta":{},"finish_reason":"length"}]}"#;
        let usage = r#"{"id":"c-1","choices":[],"usage":{"prompt_tokens":1}}"#;
        let expected = (Some("c-1".to_owned()), vec!["length".to_owned()]);
        assert_eq!(of(&[last, usage]), expected);
        let piece = r#"{"id":"c-1","choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}"#;
        assert_eq!(of(&[piece, last]), expected);
        let two = r#"{"id":"c-2","choices":[{"finish_reason":"stop"},{"finish_reason":"length"}]}"#;
        assert_eq!(of(&[two]), (Some("c-2".to_owned()), vec!["stop".to_owned(), "length".to_owned()]));
        let generate = r#"{"text":"","meta_info":{"id":"g","finish_reason":{"type":"stop","matched":2}}}"#;
        assert_eq!(of(&["", generate]), (Some("g".to_owned()), vec!["stop".to_owned()]));
    }

    #[test]
    fn another_shape_says_nothing() {
        let long = format!(r#"{{"id":"{}"}}"#, "x".repeat(LONGEST_ID + 1));
        let large = format!(r#"{{"id":"a","choices":[],"text":"{}"}}"#, "x".repeat(LONGEST_ANSWER));
        for text in ["", "[]", "{}", r#"{"id":1}"#, r#"{"choices":[{"finish_reason":1}]}"#, &long, &large] {
            assert_eq!(of(&[text]), (None, Vec::new()), "{text:.40}");
        }
    }
}
