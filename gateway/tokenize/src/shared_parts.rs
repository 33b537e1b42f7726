//! Bytes in parts that a conversation's turns share, so that a turn copies and reads nothing of the turn before.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

/// Maximum number of parts. More are copied into one.
const MAX_PARTS: usize = 16;

/// Texts or bytes, one behind the other.
#[derive(Debug)]
pub(crate) struct SharedParts<T> {
    /// Each with the offset in the whole at which it ends; only its first bytes up to that belong to the whole.
    parts: Vec<(Arc<T>, usize)>,
}

/// The parts of a text.
pub(crate) type TextParts = SharedParts<String>;
/// The parts of a body.
pub(crate) type BodyParts = SharedParts<Vec<u8>>;

impl<T> Clone for SharedParts<T> {
    fn clone(&self) -> Self {
        SharedParts { parts: self.parts.clone() }
    }
}

impl<T: AsRef<[u8]>> SharedParts<T> {
    pub(crate) fn new(whole: T) -> Self {
        let end = whole.as_ref().len();
        SharedParts { parts: vec![(Arc::new(whole), end)] }
    }

    pub(crate) fn len(&self) -> usize {
        self.parts.last().map_or(0, |(_, end)| *end)
    }

    /// Up to where to keep the parts of what is to be kept up to `end`: a part of which less than half is kept would hold more memory than
    /// it saves.
    fn kept_end(&self, end: usize) -> usize {
        let Some((part, range)) = self.iter().find(|(_, range)| range.end >= end) else { return self.len() };
        if 2 * (end - range.start) < part.as_ref().len() { range.start } else { end }
    }

    /// The first bytes up to `end`, and `rest` behind them.
    fn extended(&self, end: usize, rest: T) -> Self {
        let kept = self.parts.partition_point(|(_, to)| *to < end);
        let mut parts = self.parts[..self.parts.len().min(kept + 1)].to_vec();
        if let Some((_, to)) = parts.last_mut() {
            *to = end.min(*to);
        }
        parts.retain(|(_, to)| *to > 0);
        let whole = parts.last().map_or(0, |(_, to)| *to) + rest.as_ref().len();
        parts.push((Arc::new(rest), whole));
        SharedParts { parts }
    }

    /// Each part, with its offset in the whole.
    fn iter(&self) -> impl Iterator<Item = (&T, Range<usize>)> {
        let mut start = 0;
        self.parts.iter().map(move |(part, end)| {
            let range = start..*end;
            start = *end;
            (&**part, range)
        })
    }

    /// Whether the first bytes up to `end` are those of `bytes`, which has at least as many.
    pub(crate) fn begins_as(&self, bytes: &[u8], end: usize) -> bool {
        end <= self.len()
            && self.iter().take_while(|(_, range)| range.start < end).all(|(part, range)| {
                let range = range.start..range.end.min(end);
                bytes.get(range.clone()) == part.as_ref().get(..range.len())
            })
    }
}

impl BodyParts {
    /// A body of which the first bytes up to `end` are those of this one.
    pub(crate) fn with_rest(&self, body: &[u8], end: usize) -> BodyParts {
        if self.parts.len() >= MAX_PARTS {
            return SharedParts::new(body.to_vec());
        }
        let end = self.kept_end(end);
        self.extended(end, body[end..].to_vec())
    }
}

impl TextParts {
    /// A text of which the first bytes up to `end` are those of this one.
    pub(crate) fn with_rest(&self, end: usize, rest: String) -> TextParts {
        if self.parts.len() >= MAX_PARTS {
            return SharedParts::new(self.slice(0..end).into_owned() + &rest);
        }
        let kept = self.kept_end(end);
        let rest = if kept < end { self.slice(kept..end).into_owned() + &rest } else { rest };
        self.extended(kept, rest)
    }

    /// The text in a range of bytes: it is copied where it crosses parts, and empty outside the text.
    pub(crate) fn slice(&self, range: Range<usize>) -> Cow<'_, str> {
        let mut found = Cow::Borrowed("");
        for (part, at) in self.iter().filter(|(_, at)| at.start < range.end && range.start < at.end) {
            let (from, to) = (range.start.max(at.start) - at.start, range.end.min(at.end) - at.start);
            let text = part.get(from..to).unwrap_or_default();
            if found.is_empty() {
                found = Cow::Borrowed(text);
            } else {
                found.to_mut().push_str(text);
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn parts_have_the_text_of_the_whole(
            begin in "[a-z]{0,20}",
            turns in prop::collection::vec((any::<prop::sample::Index>(), "[a-z]{0,9}"), 0..40),
            range in (any::<prop::sample::Index>(), any::<prop::sample::Index>()),
        ) {
            let (mut whole, mut text) = (begin.clone(), TextParts::new(begin.clone()));
            let mut body = BodyParts::new(begin.into_bytes());
            for (end, rest) in turns {
                let end = end.index(whole.len() + 1);
                whole.truncate(end);
                whole.push_str(&rest);
                text = text.with_rest(end, rest);
                body = body.with_rest(whole.as_bytes(), end);
                prop_assert_eq!((text.len(), body.len()), (whole.len(), whole.len()));
                let (one, other) = (range.0.index(whole.len() + 1), range.1.index(whole.len() + 1));
                let range = one.min(other)..one.max(other);
                prop_assert_eq!(text.slice(range.clone()), &whole[range.clone()]);
                prop_assert!(body.begins_as(whole.as_bytes(), range.end) && text.begins_as(whole.as_bytes(), whole.len()));
                let mut changed = whole.clone().into_bytes();
                if let Some(byte) = changed.get_mut(one) {
                    *byte = b'!';
                    prop_assert!(!body.begins_as(&changed, whole.len()));
                    prop_assert!(body.begins_as(&changed, one));
                }
            }
            for parts in [text.parts.len(), body.parts.len()] {
                prop_assert!(parts <= MAX_PARTS + 1, "{}", parts);
            }
            let held: usize = text.parts.iter().map(|(part, _)| part.len()).sum();
            prop_assert!(held <= 2 * text.len(), "{} bytes for {}", held, text.len());
        }
    }
}
