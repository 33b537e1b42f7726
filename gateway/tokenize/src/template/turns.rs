//! Renders the next turn of a conversation from what was rendered of the turn before.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use minijinja::value::Object;
use minijinja::{Error, State, Value};
use parking_lot::Mutex;

use super::message_loop::MessageLoop;
use crate::shared_parts::TextParts;

/// Longest description of the variables of a turn in bytes. With larger ones, such as long lists of tools in the text of every message,
/// turns are rendered completely.
const MAX_DESCRIPTION_BYTES: usize = 16 << 10;

/// Where the messages of a rendered chat are, and what their texts depend on.
#[derive(Debug)]
pub(crate) struct MessagePlaces {
    /// Where the text of each message begins, and where that of the last one ends.
    starts: Vec<usize>,
    context: LoopContext,
}

/// A rendered chat.
#[derive(Debug)]
pub(crate) struct RenderedTurn {
    /// Number of bytes that are those of the turn before.
    pub(crate) shared: usize,
    /// The text behind these.
    pub(crate) rest: String,
    pub(crate) places: MessagePlaces,
}

/// An earlier turn of a conversation.
#[derive(Debug, Clone)]
pub(super) struct EarlierTurn<'a> {
    pub(super) text: &'a TextParts,
    pub(super) places: &'a MessagePlaces,
    /// Number of its messages that are also the first ones of this turn.
    pub(super) known: usize,
}

/// Variables when the loop begins.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct LoopContext {
    /// All names that the body uses, with their values.
    variables: String,
    limits: Vec<Option<i64>>,
}

impl LoopContext {
    fn read(rule: &MessageLoop, state: &State<'_, '_>) -> LoopContext {
        let mut variables = String::new();
        for name in &rule.variables {
            if variables.len() > MAX_DESCRIPTION_BYTES {
                break;
            }
            if let Some(value) = state.lookup(name).filter(|value| !value.is_undefined()) {
                variables.push_str(&format!("{name}={value:?};"));
            }
        }
        let limit = |variable: &str, member: &str| state.lookup(variable)?.get_attr(member).ok()?.as_i64();
        let limits = rule.limits.iter().map(|limit_of| limit(&limit_of.variable, &limit_of.member)).collect();
        LoopContext { variables, limits }
    }

    /// How many of the first messages have the same text in both turns, as far as variables determine it.
    fn common_messages(&self, other: &LoopContext) -> usize {
        if self.variables != other.variables || self.variables.len() > MAX_DESCRIPTION_BYTES {
            return 0;
        }
        let mut common = usize::MAX;
        for (one, two) in self.limits.iter().zip(&other.limits) {
            common = match (one, two) {
                (Some(one), Some(two)) if one == two => common,
                // Messages before both limits are on the same side of each.
                (Some(one), Some(two)) => common.min(usize::try_from(*one.min(two)).unwrap_or(0)),
                (None, _) | (_, None) => 0,
            };
        }
        common
    }
}

/// The function that returns the messages to render, each with its position.
pub(super) struct MessageWindow {
    rule: Arc<MessageLoop>,
    messages: Arc<[Value]>,
    /// The context of the earlier turn, and how many messages of both are equal and not the last one.
    earlier: Option<(LoopContext, usize)>,
    /// Number of bytes rendered so far.
    written: Arc<AtomicUsize>,
    progress: Arc<Mutex<WindowProgress>>,
}

#[derive(Debug, Clone, Default)]
struct WindowProgress {
    context: LoopContext,
    /// The first message that is rendered, besides the very first.
    from: usize,
    /// Offset in the output at which each rendered message begins, and the last one ends.
    starts: Vec<usize>,
    /// How often the loop began.
    calls: usize,
}

impl MessageWindow {
    pub(super) fn new(
        rule: &Arc<MessageLoop>,
        messages: &[Value],
        earlier: Option<&EarlierTurn<'_>>,
        written: Arc<AtomicUsize>,
    ) -> MessageWindow {
        let earlier = earlier.map(|turn| {
            let rendered = turn.places.starts.len().saturating_sub(1);
            let known = turn.known.min(rendered).min(messages.len()).saturating_sub(1);
            (turn.places.context.clone(), known)
        });
        MessageWindow {
            rule: rule.clone(),
            messages: messages.into(),
            earlier,
            written,
            progress: Arc::default(),
        }
    }

    /// The numbers of the messages to render.
    fn numbers(&self, from: usize) -> impl Iterator<Item = usize> + Send + Sync + use<> {
        let renders_first = from > 0 && self.rule.reads_previous;
        renders_first.then_some(0).into_iter().chain(from..self.messages.len())
    }

    /// Combines what was rendered with the earlier turn; `None` if they do not fit.
    pub(super) fn finish(
        &self,
        mut rendered: String,
        earlier: Option<&EarlierTurn<'_>>,
    ) -> Option<RenderedTurn> {
        let WindowProgress { context, from, starts, calls } = self.progress.lock().clone();
        if calls != 1 || starts.len() != self.numbers(from).count() + 1 {
            return None;
        }
        if from == 0 {
            return Some(RenderedTurn {
                shared: 0,
                rest: rendered,
                places: MessagePlaces { starts, context },
            });
        }
        let EarlierTurn { text, places, .. } = earlier?;
        // What is rendered up to the first new message repeats the earlier turn, without the messages that were left out.
        let left_out = if self.rule.reads_previous { 1 } else { 0 };
        let new = starts[left_out];
        let before = places.starts[left_out];
        let is_repeated =
            new == before && starts[0] == places.starts[0] && text.begins_as(rendered.as_bytes(), before);
        if !is_repeated || !rendered.is_char_boundary(new) {
            return None;
        }
        rendered.drain(..new);
        let shared = places.starts[from];
        let mut all = Vec::with_capacity(self.messages.len() + 1);
        all.extend_from_slice(&places.starts[..from]);
        all.extend(starts[left_out..].iter().map(|start| start - new + shared));
        Some(RenderedTurn { shared, rest: rendered, places: MessagePlaces { starts: all, context } })
    }
}

impl fmt::Debug for MessageWindow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MessageWindow")
    }
}

impl Object for MessageWindow {
    fn call(self: &Arc<Self>, state: &mut State<'_, '_>, _args: &[Value]) -> Result<Value, Error> {
        let context = LoopContext::read(&self.rule, state);
        let from =
            self.earlier.as_ref().map_or(0, |(earlier, known)| earlier.common_messages(&context).min(*known));
        {
            let mut progress = self.progress.lock();
            (progress.context, progress.from) = (context, from);
            progress.calls += 1;
        }
        let window = self.clone();
        Ok(Value::make_iterable(move || {
            let (window, numbers) = (window.clone(), window.numbers(from));
            let mut numbers = numbers.fuse();
            std::iter::from_fn(move || {
                let start = window.written.load(Ordering::Relaxed);
                window.progress.lock().starts.push(start);
                let number = numbers.next()?;
                let position = LoopPosition { index: number, count: window.messages.len() };
                Some(Value::from(vec![window.messages[number].clone(), Value::from_object(position)]))
            })
        }))
    }
}

/// Jinja's `loop` for a message.
#[derive(Debug)]
struct LoopPosition {
    index: usize,
    count: usize,
}

impl Object for LoopPosition {
    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        match key {
            "index0" => Some(Value::from(self.index)),
            "index" => Some(Value::from(self.index + 1)),
            "first" => Some(Value::from(self.index == 0)),
            "last" => Some(Value::from(self.index + 1 == self.count)),
            _ => None,
        }
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.get_value_by_str(key.as_str()?)
    }
}

#[cfg(test)]
#[path = "turns_tests.rs"]
mod tests;
