//! Cache of earlier bodies, so that only the new messages of a conversation's next turn are parsed.
//!
//! A client sends a conversation repeatedly, each time with additional messages, so a body begins with the bytes of an earlier one.
//! A cached body is indexed by the ends of its last messages. A new body is searched backwards for an indexed end; then the bytes
//! are compared, and only the messages behind that end are parsed.

use std::hash::BuildHasher;
use std::sync::Arc;

use foldhash::quality::RandomState;
use minijinja::Value;
use moka::policy::EvictionPolicy;
use moka::sync::Cache;
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::body::ChatBody;
use crate::chat::{MessagesBody, ResponsesBody, ResponsesInput};
use crate::error::PromptError;
use crate::shared_parts::BodyParts;
use crate::turn_cache::{TurnHistory, TurnSlot};

/// Smaller bodies are not cached: parsing them takes some microseconds.
const MIN_CACHED_BYTES: usize = 16 << 10;
/// Shorter lists of messages are not cached: most of them are of requests that no other one continues.
const MIN_CACHED_TURNS: usize = 3;
/// Number of bytes before the end of a message that are hashed for the index.
const WINDOW: usize = 256;
/// Maximum number of lookups per new body.
const MAX_LOOKUPS: usize = 256;
/// Number of newest messages whose ends are indexed: a client may drop its last message, or the response to it as well.
const INDEXED_ENDS: usize = 4;
/// Overhead of an entry in bytes, besides the body.
const ENTRY_OVERHEAD_BYTES: usize = 256;
/// Overhead of a message in bytes: its objects, in the body and in the template's input.
const MESSAGE_OVERHEAD_BYTES: usize = 512;

/// Earlier bodies of one model, with LRU eviction.
pub(crate) struct ModelBodyCache {
    cache: BodyCache,
    /// Number of the model in the keys of the shared cache.
    owner: u32,
    hasher: RandomState,
}

/// Cached bodies of all models; the number in the key is the model's.
pub(crate) type BodyCache = Cache<(u32, u64), BodyPrefixEntry, RandomState>;

/// A cache of at most `bytes`.
pub(crate) fn body_cache(bytes: u64) -> BodyCache {
    Cache::builder()
        .max_capacity(bytes)
        .weigher(|_, entry: &BodyPrefixEntry| entry.weight)
        .eviction_policy(EvictionPolicy::lru())
        .build_with_hasher(RandomState::default())
}

/// The end of a message in a cached body.
#[derive(Clone)]
pub(crate) struct BodyPrefixEntry {
    cached: Arc<CachedBody>,
    /// Messages up to this end.
    messages: usize,
    /// This entry's share of the body's size in bytes.
    weight: u32,
}

struct CachedBody {
    body: BodyParts,
    /// Offset of the first message in the body.
    start: usize,
    messages: Vec<CachedMessage>,
    /// What was read from the body.
    turn: Arc<TurnSlot>,
}

#[derive(Clone)]
struct CachedMessage {
    value: Value,
    /// Offset of the byte behind the message.
    end: usize,
}

/// A body with a list that grows with every turn of its conversation: its messages, or the items of its input.
pub(crate) trait GrowingBody: Sized {
    /// Name of the list. Bodies whose lists have other names never share an entry.
    const LIST: &'static str;

    fn parse(body: &[u8]) -> Result<Self, PromptError>;

    /// The elements of the list.
    fn turns(&self) -> &[Value];

    /// The body of `bytes` bytes with another list.
    fn with_turns(self, turns: Vec<Value>, bytes: usize) -> Self;

    /// The body with what is kept of its conversation.
    fn with_history(self, _history: TurnHistory) -> Self {
        self
    }

    /// The elements of the list as they are written.
    fn raw_turns(body: &[u8]) -> serde_json::Result<Vec<&RawValue>>;
}

/// The raw messages of a body.
#[derive(Deserialize)]
struct RawMessages<'a> {
    #[serde(borrow)]
    messages: Vec<&'a RawValue>,
}

/// The raw items of a body's input.
#[derive(Deserialize)]
struct RawInput<'a> {
    #[serde(borrow)]
    input: Vec<&'a RawValue>,
}

const MESSAGES: &str = "messages";

impl GrowingBody for ChatBody {
    const LIST: &'static str = MESSAGES;

    fn parse(body: &[u8]) -> Result<ChatBody, PromptError> {
        ChatBody::parse(body)
    }

    fn turns(&self) -> &[Value] {
        &self.messages
    }

    fn with_turns(self, messages: Vec<Value>, bytes: usize) -> ChatBody {
        ChatBody { messages, bytes, ..self }
    }

    fn with_history(self, history: TurnHistory) -> ChatBody {
        ChatBody { history, ..self }
    }

    fn raw_turns(body: &[u8]) -> serde_json::Result<Vec<&RawValue>> {
        Ok(serde_json::from_slice::<RawMessages<'_>>(body)?.messages)
    }
}

impl GrowingBody for MessagesBody {
    const LIST: &'static str = MESSAGES;

    fn parse(body: &[u8]) -> Result<MessagesBody, PromptError> {
        MessagesBody::parse(body)
    }

    fn turns(&self) -> &[Value] {
        &self.messages
    }

    fn with_turns(mut self, messages: Vec<Value>, bytes: usize) -> MessagesBody {
        (self.messages, self.bytes) = (messages, bytes);
        self
    }

    fn raw_turns(body: &[u8]) -> serde_json::Result<Vec<&RawValue>> {
        Ok(serde_json::from_slice::<RawMessages<'_>>(body)?.messages)
    }
}

impl GrowingBody for ResponsesBody {
    const LIST: &'static str = "input";

    fn parse(body: &[u8]) -> Result<ResponsesBody, PromptError> {
        ResponsesBody::parse(body)
    }

    fn turns(&self) -> &[Value] {
        match &self.input {
            ResponsesInput::Items(items) => items,
            ResponsesInput::Text(_) => &[],
        }
    }

    fn with_turns(mut self, items: Vec<Value>, bytes: usize) -> ResponsesBody {
        (self.input, self.bytes) = (ResponsesInput::Items(items), bytes);
        self
    }

    fn raw_turns(body: &[u8]) -> serde_json::Result<Vec<&RawValue>> {
        Ok(serde_json::from_slice::<RawInput<'_>>(body)?.input)
    }
}

impl ModelBodyCache {
    /// A view of the shared cache for the bodies of one `owner`.
    pub(crate) fn new(cache: BodyCache, owner: u32) -> ModelBodyCache {
        ModelBodyCache { cache, owner, hasher: RandomState::default() }
    }

    /// Parses a body, with the same result as its type's `parse`.
    pub(crate) fn read<B: GrowingBody>(&self, body: &[u8]) -> Result<B, PromptError> {
        if body.len() < MIN_CACHED_BYTES {
            return B::parse(body);
        }
        if let Some(read) = self.find_continued(body) {
            return Ok(read);
        }
        let read = B::parse(body)?;
        if read.turns().len() >= MIN_CACHED_TURNS
            && let Some((start, messages)) = located::<B>(body, 0, read.turns())
        {
            let own = self.insert(B::LIST, body, BodyParts::new(body.to_vec()), start, messages);
            return Ok(read.with_history(TurnHistory::new(None, own)));
        }
        Ok(read)
    }

    /// Parses the new part of a body. `None` on any error: parsing the whole body gives the better message.
    fn find_continued<B: GrowingBody>(&self, body: &[u8]) -> Option<B> {
        let (kept, known_messages) = self.find(B::LIST, body)?;
        let start = kept.start;
        let mut messages = kept.messages[..known_messages].to_vec();
        let known = messages.last()?.end + 1;
        let rest = [&body[..start], &body[known..]].concat();
        let read = B::parse(&rest).ok()?;
        messages.extend(located::<B>(&rest, known - start, read.turns())?.1);
        let values = messages.iter().map(|message| message.value.clone()).collect();
        let parts = kept.body.with_rest(body, known - 1);
        let own = self.insert(B::LIST, body, parts, start, messages);
        let history = TurnHistory::new(Some((kept.turn.clone(), known_messages)), own);
        Some(read.with_turns(values, body.len()).with_history(history))
    }

    /// An earlier body, and how many of its messages this one has too.
    fn find(&self, list: &str, body: &[u8]) -> Option<(Arc<CachedBody>, usize)> {
        let braces = memchr::memrchr_iter(b'}', body).filter(|brace| body.get(brace + 1) == Some(&b','));
        for comma in braces.map(|brace| brace + 1).take(MAX_LOOKUPS) {
            let Some(BodyPrefixEntry { cached: kept, messages, .. }) =
                self.cache.get(&self.key(list, body, comma))
            else {
                continue;
            };
            let last = messages.checked_sub(1).and_then(|last| kept.messages.get(last));
            let same = last.is_some_and(|last| last.end == comma) && kept.body.begins_as(body, comma);
            // In valid JSON, a message follows the comma.
            if same && body[comma + 1..].trim_ascii_start().starts_with(b"{") {
                return Some((kept, messages));
            }
        }
        None
    }

    /// Keeps a body; returns where to keep what is read from it.
    fn insert(
        &self,
        list: &str,
        body: &[u8],
        parts: BodyParts,
        start: usize,
        messages: Vec<CachedMessage>,
    ) -> Option<Arc<TurnSlot>> {
        let newest = messages.len().saturating_sub(INDEXED_ENDS);
        let edges: Vec<(usize, usize)> =
            messages.iter().enumerate().skip(newest).map(|(at, message)| (at + 1, message.end)).collect();
        if edges.is_empty() {
            return None;
        }
        // The messages are stored three times: as bytes, as values and as rendered text.
        let bytes = 3 * body.len() + MESSAGE_OVERHEAD_BYTES * messages.len();
        let weight = u32::try_from(bytes / edges.len() + ENTRY_OVERHEAD_BYTES).unwrap_or(u32::MAX);
        let turn = Arc::<TurnSlot>::default();
        let kept = Arc::new(CachedBody { body: parts, start, messages, turn: turn.clone() });
        for (messages, end) in edges {
            self.cache.insert(
                self.key(list, body, end),
                BodyPrefixEntry { cached: Arc::clone(&kept), messages, weight },
            );
        }
        Some(turn)
    }

    fn key(&self, list: &str, body: &[u8], end: usize) -> (u32, u64) {
        (self.owner, self.hasher.hash_one((list, end, &body[end.saturating_sub(WINDOW)..end])))
    }
}

/// Offset of the messages in `text`, and each of `values` with its end; all offsets are increased by `skipped`.
fn located<B: GrowingBody>(
    text: &[u8],
    skipped: usize,
    values: &[Value],
) -> Option<(usize, Vec<CachedMessage>)> {
    let written = B::raw_turns(text).ok()?;
    let place = |part: &str| part.as_ptr().addr().checked_sub(text.as_ptr().addr());
    let start = place(written.first()?.get())?;
    let ends = written.iter().map(|raw| Some(place(raw.get())? + raw.get().len() + skipped));
    let messages =
        ends.zip(values).map(|(end, value)| Some(CachedMessage { value: value.clone(), end: end? }));
    let messages: Vec<CachedMessage> = messages.collect::<Option<_>>()?;
    (messages.len() == values.len()).then_some((start, messages))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn filler(seed: usize) -> String {
        format!("line {seed} with \"quotes\"}},{{\"role\"\n").repeat(700)
    }

    fn body(messages: &[serde_json::Value]) -> Vec<u8> {
        json!({ "model": "m", "messages": messages, "stream": true, "tools": [{ "type": "function" }] })
            .to_string()
            .into_bytes()
    }

    fn same(bodies: &ModelBodyCache, body: &[u8]) {
        let (fast, slow) = (bodies.read::<ChatBody>(body), ChatBody::parse(body));
        assert_eq!(format!("{fast:?}"), format!("{slow:?}"));
    }

    #[test]
    fn a_next_turn_is_found() {
        let bodies = ModelBodyCache::new(body_cache(1 << 24), 0);
        let mut messages: Vec<_> =
            (0..4).map(|at| json!({ "role": "user", "content": filler(at) })).collect();
        same(&bodies, &body(&messages));
        messages.push(json!({ "role": "assistant", "content": "new" }));
        messages.push(json!({ "role": "user", "content": "and more" }));
        let next = body(&messages);
        let (kept, known) = bodies.find(MESSAGES, &next).unwrap();
        assert_eq!((&next[..kept.start], known), (&br#"{"messages":["#[..], 4));
        same(&bodies, &next);
        assert!(
            bodies.find(MESSAGES, &next).is_some_and(|(_, known)| known == 5),
            "its last message ends without a comma"
        );
        // The client drops the last two messages.
        messages.truncate(4);
        messages.push(json!({ "role": "assistant", "content": "other" }));
        same(&bodies, &body(&messages));
    }

    #[test]
    fn errors_behind_cached_messages_are_reported() {
        let bodies = ModelBodyCache::new(body_cache(1 << 24), 0);
        let messages: Vec<_> = (0..4).map(|at| json!({ "content": filler(at) })).collect();
        let whole = body(&messages);
        same(&bodies, &whole);
        let end = bodies.cache.iter().map(|(_, entry)| entry.cached.messages[3].end).next().unwrap();
        for rest in [
            ",]}",
            ",",
            ",{]}",
            ",{}",
            ",{}],\"messages\":[]}",
            ",{}]}",
            ", 7]}",
            ",{\"a\":1},\"x\"],\"n\":1}",
        ] {
            same(&bodies, &[&whole[..end], rest.as_bytes()].concat());
        }
    }

    #[test]
    fn bodies_are_evicted() {
        let bodies = ModelBodyCache::new(body_cache(200_000), 0);
        for seed in 0..20 {
            same(&bodies, &body(&[json!({ "content": filler(seed) })]));
        }
        bodies.cache.run_pending_tasks();
        assert!(bodies.cache.weighted_size() <= 200_000);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn cached_parsing_equals_full_parsing(turns in prop::collection::vec((0..6_usize, 0..3_usize, any::<bool>()), 1..12)) {
            let bodies = ModelBodyCache::new(body_cache(1 << 24), 0);
            let mut messages: Vec<serde_json::Value> = Vec::new();
            for (seed, back, pretty) in turns {
                messages.truncate(messages.len().saturating_sub(back));
                messages.push(json!({ "role": "user", "content": filler(seed), "calls": [{ "a": [1, { "b": seed }] }, {}] }));
                messages.push(json!({ "role": "assistant", "content": [{ "type": "text", "text": "x" }] }));
                let mut body = body(&messages);
                if pretty {
                    body = serde_json::to_vec_pretty(&serde_json::from_slice::<serde_json::Value>(&body).unwrap()).unwrap();
                }
                same(&bodies, &body);
            }
        }
    }
}
