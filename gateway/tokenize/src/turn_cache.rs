//! What is kept of a conversation's turn, so that the next one needs only its new messages prepared and rendered.

use std::sync::{Arc, OnceLock};

use crate::chat::PreparedMessage;
use crate::segmented_text::TextSegment;
use crate::shared_parts::TextParts;
use crate::template::MessagePlaces;

/// A turn of a conversation, once it is read.
pub(crate) type TurnSlot = OnceLock<ReadTurn>;

/// The results of reading a turn.
#[derive(Debug)]
pub(crate) struct ReadTurn {
    pub(crate) template: TemplateKind,
    pub(crate) prepared: Vec<PreparedMessage>,
    /// The rendered text.
    pub(crate) text: TextParts,
    /// `None` if the template needs all messages.
    pub(crate) places: Option<MessagePlaces>,
    pub(crate) segments: Vec<TextSegment>,
}

/// Which of a model's templates rendered a chat.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TemplateKind {
    Default,
    Tools,
}

/// The turn before, and where this one is kept.
#[derive(Clone, Default)]
pub(crate) struct TurnHistory {
    earlier: Option<(Arc<TurnSlot>, usize)>,
    own: Option<Arc<TurnSlot>>,
}

impl TurnHistory {
    /// Of a turn to be kept in `own`, of whose messages the first are also those of an earlier turn: so many.
    pub(crate) fn new(earlier: Option<(Arc<TurnSlot>, usize)>, own: Option<Arc<TurnSlot>>) -> TurnHistory {
        TurnHistory { earlier, own }
    }

    /// The turn before, if it is known and was rendered by this template, and how many messages both begin with.
    pub(crate) fn earlier(&self, template: TemplateKind) -> Option<(&ReadTurn, usize)> {
        let (slot, messages) = self.earlier.as_ref()?;
        let turn = slot.get().filter(|turn| turn.template == template)?;
        Some((turn, (*messages).min(turn.prepared.len())))
    }

    /// Where this turn is kept, unless it is already.
    pub(crate) fn own(&self) -> Option<&Arc<TurnSlot>> {
        self.own.as_ref().filter(|slot| slot.get().is_none())
    }
}

impl std::fmt::Debug for TurnHistory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TurnHistory")
    }
}
