//! The memory of traces that are done with is used for others after them.

use std::cell::RefCell;

use super::spans::Spans;

/// Traces that a thread keeps the memory of.
const MOST: usize = 64;
/// Spans that a trace may have room for and still be kept; and four times as many notes.
const MOST_SPANS: usize = 64;

thread_local! {
    static SPARE: RefCell<Vec<Spans>> = const { RefCell::new(Vec::new()) };
}

/// None, with room for some.
pub(super) fn take() -> Spans {
    SPARE.try_with(|spare| spare.borrow_mut().pop()).ok().flatten().unwrap_or_default()
}

/// Forgets spans.
pub(crate) fn give_back(mut spans: Spans) {
    // What is dropped here may be anything, and must not find the list in use.
    spans.clear();
    if spans.records.capacity() <= MOST_SPANS && spans.notes.capacity() <= 4 * MOST_SPANS {
        // Without the list, at a thread's end, they are dropped.
        let _gone = SPARE.try_with(|spare| {
            let mut spare = spare.borrow_mut();
            if spare.len() < MOST {
                spare.push(spans);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;
    use std::time::SystemTime;

    use opentelemetry::Value;
    use opentelemetry::trace::{SpanId, SpanKind};

    use super::*;
    use crate::notes::Note;
    use crate::trace::spans::Record;

    #[test]
    fn nothing_of_forgotten_spans_is_left_but_their_memory() {
        let mut first = take();
        first.records.push(Record {
            id: SpanId::from(1),
            parent: SpanId::INVALID,
            is_root: true,
            kind: SpanKind::Internal,
            name: Cow::Borrowed("first"),
            start: SystemTime::UNIX_EPOCH,
            end: SystemTime::UNIX_EPOCH,
        });
        first.notes.push((SpanId::from(1), Note::Attribute("a", Value::I64(1))));
        let room = first.records.capacity();
        give_back(first);
        let next = take();
        assert!(next.records.is_empty() && next.notes.is_empty());
        assert_eq!(next.records.capacity(), room, "its memory is used again");
        assert_eq!(take().records.capacity(), 0);
    }
}
