//! A prompt that is tokenized as far as needed.

use std::sync::Arc;

use crate::body::ChatBody;
use crate::error::PromptError;
use crate::model::PromptTokenizer;
use crate::prompt::SegmentedTokens;
use crate::segmented_text::{SegmentedText, SharedText};
use crate::shared_parts::TextParts;
use crate::template::TemplateTime;

/// A prompt whose text is tokenized from its beginning on, in segments of some kilobytes.
pub struct PromptText {
    model: Arc<PromptTokenizer>,
    text: SegmentedText<'static>,
}

/// A beginning of a prompt's text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PromptTextPrefix {
    /// Identifies the text, with a seed of this process.
    pub key: u64,
    /// Its length: an estimate where the text is not tokenized.
    pub tokens: usize,
}

impl PromptText {
    /// The prompt of a chat completion; `None` if it consists of token ids.
    ///
    /// # Errors
    /// [`PromptError`] if it cannot be determined.
    pub fn of_chat(
        model: Arc<PromptTokenizer>,
        body: &ChatBody,
        now: TemplateTime,
    ) -> Result<Option<PromptText>, PromptError> {
        let Some(chat) = model.chat_text(body, now)? else { return Ok(None) };
        let text = model.segmented(chat, body);
        Ok(Some(PromptText { model, text }))
    }

    /// The prompt of a completion. `special` as in [`crate::TextBody::add_special_tokens`].
    #[must_use]
    pub fn new(model: Arc<PromptTokenizer>, text: String, special: bool) -> PromptText {
        let text = SharedText::Parts(TextParts::new(text));
        let text = SegmentedText::new(text, special, model.tokenizer(), model.segments());
        PromptText { model, text }
    }

    /// Keys of the beginnings that end with a segment, and of the whole text.
    #[must_use]
    pub fn prefix_keys(&self) -> &[u64] {
        self.text.prefixes()
    }

    /// The beginnings that end with a segment, and the whole text.
    ///
    /// # Errors
    /// [`PromptError::Tokenizer`] if a sample of the text cannot be tokenized.
    pub fn prefixes(&self) -> Result<Vec<PromptTextPrefix>, PromptError> {
        let lengths = self.text.prefix_lengths(self.model.tokenizer(), self.model.segments())?;
        let keyed = self.text.prefixes().iter().zip(lengths);
        Ok(keyed.map(|(&key, tokens)| PromptTextPrefix { key, tokens }).collect())
    }

    /// Tokenizes until `segments` are tokenized, or everything.
    ///
    /// # Errors
    /// [`PromptError::Tokenizer`] if the text cannot be tokenized.
    pub fn tokenize(&mut self, segments: usize) -> Result<(), PromptError> {
        self.text.tokenize(segments, self.model.tokenizer(), self.model.segments())
    }

    /// Number of segments that are tokenized.
    #[must_use]
    pub fn tokenized_segments(&self) -> usize {
        self.text.tokenized()
    }

    /// Whether the whole prompt is tokenized.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.text.is_complete()
    }

    /// The tokens of the tokenized segments.
    #[must_use]
    pub fn tokens(&self) -> &SegmentedTokens {
        self.text.tokens()
    }
}

impl std::fmt::Debug for PromptText {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PromptText").field("tokens", &self.tokens().len()).finish_non_exhaustive()
    }
}
