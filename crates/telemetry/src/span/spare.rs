//! Spans that nobody will see are made of the memory of others before them: nine traces in ten, or more, are forgotten.

use std::cell::RefCell;

use super::{Record, Spans};

/// Spans that a thread keeps the memory of.
const MOST: usize = 128;
/// Attributes and events that a span may have room for and still be kept.
const MOST_NOTES: usize = 64;

thread_local! {
    static SPARE: RefCell<Spans> = const { RefCell::new(Vec::new()) };
}

/// One that is as good as new.
pub(super) fn take() -> Option<Box<Record>> {
    SPARE.try_with(|spare| spare.borrow_mut().pop()).ok().flatten()
}

/// Forgets spans.
pub(crate) fn give_back(spans: Spans) {
    for mut span in spans {
        // What is dropped here may be anything, and must not find the list in use.
        span.clear();
        let notes = span.notes.attributes.capacity().max(span.notes.events.capacity());
        if notes <= MOST_NOTES {
            // Without the list, at a thread's end, it is dropped.
            let _gone = SPARE.try_with(|spare| {
                let mut spare = spare.borrow_mut();
                if spare.len() < MOST {
                    spare.push(span);
                }
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;
    use std::time::SystemTime;

    use opentelemetry::trace::{SpanId, SpanKind, Status};

    use super::*;

    #[test]
    fn nothing_of_a_forgotten_span_is_left_in_the_next() {
        let new =
            |name| Record::new(SpanId::INVALID, Cow::Borrowed(name), SpanKind::Internal, SystemTime::now());
        let mut first = new("first");
        first.is_root = true;
        first.status = Status::error("failed");
        first.notes.set("a", 1);
        first.notes.event("b", SystemTime::now(), Vec::new());
        first.later = Some(Box::new(|notes| notes.set("c", 2)));
        let (id, room) = (first.id, first.notes.attributes.capacity());
        give_back(vec![first]);
        let next = new("next");
        assert!(next.notes.attributes.is_empty() && next.notes.events.is_empty() && next.later.is_none());
        assert!(!next.is_root && next.status == Status::Unset && next.name == "next" && next.id != id);
        assert_eq!(next.notes.attributes.capacity(), room, "its memory is used again");
        assert!(take().is_none());
    }
}
