//! A text that is tokenized from its beginning as far as needed, segment by segment.

use std::borrow::Cow;
use std::ops::Range;

use crate::error::PromptError;
use crate::prompt::{SegmentedTokens, TokenSegment, TokenizedPrompt};
use crate::segment_cache::ModelSegmentCache;
use crate::shared_parts::TextParts;
use crate::tokenize::Tokenizer;
use crate::truncation::SpecialTokenCounts;

/// Of the segments that are not tokenized, one in so many is, to estimate the length of the others.
const SAMPLED_SEGMENTS: usize = 8;

/// How many bytes behind its end a segment's end depends on.
const LOOKAHEAD_BYTES: usize = 2;

/// A text that others may share.
pub(crate) enum SharedText<'a> {
    Borrowed(&'a str),
    Parts(TextParts),
}

impl SharedText<'_> {
    fn len(&self) -> usize {
        match self {
            SharedText::Borrowed(text) => text.len(),
            SharedText::Parts(text) => text.len(),
        }
    }

    fn slice(&self, range: Range<usize>) -> Cow<'_, str> {
        match self {
            SharedText::Borrowed(text) => Cow::Borrowed(text.get(range).unwrap_or_default()),
            SharedText::Parts(text) => text.slice(range),
        }
    }
}

/// How many of the segments of an earlier text are also those of another one, of which so many bytes are the same.
pub(crate) fn common_segments(earlier: &[TextSegment], shared: usize) -> &[TextSegment] {
    &earlier[..earlier.partition_point(|segment| segment.end + LOOKAHEAD_BYTES <= shared)]
}

/// A text in segments, the first of which are tokenized.
pub(crate) struct SegmentedText<'a> {
    text: SharedText<'a>,
    segments: Vec<TextSegment>,
    /// What identifies each beginning of the text that ends with a segment, with the special tokens before it; and then the whole text,
    /// unless that ends with a segment, too.
    prefixes: Vec<u64>,
    /// Number of tokenized segments.
    tokenized: usize,
    tokens: SegmentedTokens,
    special: bool,
    is_complete: bool,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct TextSegment {
    /// Where it ends, in bytes.
    pub(crate) end: usize,
    hash: u64,
}

impl<'a> SegmentedText<'a> {
    /// Divides a text, of which nothing is tokenized yet. `special` adds the tokenizer's special tokens around it.
    pub(crate) fn new(
        text: SharedText<'a>,
        special: bool,
        tokenizer: &Tokenizer,
        cache: &ModelSegmentCache,
    ) -> SegmentedText<'a> {
        SegmentedText::continued(text, special, &[], tokenizer, cache)
    }

    /// As [`SegmentedText::new`], for a text that begins with these segments of an earlier one; see [`common_segments`].
    pub(crate) fn continued(
        text: SharedText<'a>,
        special: bool,
        common: &[TextSegment],
        tokenizer: &Tokenizer,
        cache: &ModelSegmentCache,
    ) -> SegmentedText<'a> {
        let before = if special { tokenizer.surrounding_special_tokens().0 } else { &[] };
        let mut prefix = cache.first_prefix(before);
        let mut tokens = SegmentedTokens::default();
        if !before.is_empty() {
            prefix = cache.next_prefix(prefix, 0);
            tokens.push(TokenSegment { ids: before.into(), prefix: Some(prefix) });
        }
        let mut segments = common.to_vec();
        let begin = segments.last().map_or(0, |last| last.end);
        let new = text.slice(begin..text.len());
        let mut start = 0;
        segments.extend(cache.ends(tokenizer, &new).into_iter().map(|end| {
            let hash = cache.hash(&new[start..end]);
            start = end;
            TextSegment { end: begin + end, hash }
        }));
        let mut prefixes = Vec::with_capacity(segments.len() + 1);
        for segment in &segments {
            prefix = cache.next_prefix(prefix, segment.hash);
            prefixes.push(prefix);
        }
        let rest = &new[start..];
        if !rest.is_empty() {
            prefixes.push(cache.next_prefix(prefix, cache.hash(rest)));
        }
        drop(new);
        SegmentedText { text, segments, prefixes, tokenized: 0, tokens, special, is_complete: false }
    }

    /// All segments of the text.
    pub(crate) fn segments(&self) -> &[TextSegment] {
        &self.segments
    }

    /// What identifies each beginning of the text that ends with a segment, and then the whole text.
    pub(crate) fn prefixes(&self) -> &[u64] {
        &self.prefixes
    }

    /// Tokenizes the text until `segments` of it are tokenized, and the rest behind the last one, too, if that is all.
    pub(crate) fn tokenize(
        &mut self,
        segments: usize,
        tokenizer: &Tokenizer,
        cache: &ModelSegmentCache,
    ) -> Result<(), PromptError> {
        while self.tokenized < segments.min(self.segments.len()) {
            let (text, segment) = self.segment(self.tokenized);
            let ids = cache.segment(tokenizer, &text, segment.hash)?;
            let prefix = Some(self.prefixes[self.tokenized]);
            self.tokens.push(TokenSegment { ids, prefix });
            self.tokenized += 1;
        }
        if self.is_complete || segments < self.segments.len() {
            return Ok(());
        }
        // The next turn of a conversation may continue the last word.
        let rest = self.rest();
        if !rest.is_empty() {
            let ids = tokenizer.encode(&rest)?.into();
            self.tokens.push(TokenSegment { ids, prefix: None });
        }
        let (_, after) = self.special_tokens(tokenizer);
        if !after.is_empty() {
            self.tokens.push(TokenSegment { ids: after.into(), prefix: None });
        }
        self.is_complete = true;
        Ok(())
    }

    /// Number of segments that are tokenized.
    pub(crate) fn tokenized(&self) -> usize {
        self.tokenized
    }

    /// Whether the whole text is tokenized.
    pub(crate) fn is_complete(&self) -> bool {
        self.is_complete
    }

    /// The tokens of the tokenized segments.
    pub(crate) fn tokens(&self) -> &SegmentedTokens {
        &self.tokens
    }

    /// For each of [`SegmentedText::prefixes`], how many tokens it has: an estimate beyond the tokenized segments.
    pub(crate) fn prefix_lengths(
        &self,
        tokenizer: &Tokenizer,
        cache: &ModelSegmentCache,
    ) -> Result<Vec<usize>, PromptError> {
        let mut lengths = Vec::with_capacity(self.segments.len() + 1);
        lengths.extend(self.tokens.prefixes().map(|(tokens, _)| tokens));
        // The special tokens at the beginning are no segment of the text.
        lengths.drain(..lengths.len().saturating_sub(self.tokenized));
        if self.is_complete {
            lengths.resize(self.prefixes.len(), self.tokens.len());
            return Ok(lengths);
        }
        let sample = self.sample(tokenizer, cache)?;
        let mut tokens = self.tokens.len() as f64;
        let mut start = self.tokenized_bytes();
        let ends = self.segments[self.tokenized..].iter().map(|segment| segment.end);
        let whole = (self.prefixes.len() > self.segments.len()).then_some(self.text.len());
        for end in ends.chain(whole) {
            tokens += (end - start) as f64 * sample;
            start = end;
            lengths.push(tokens as usize);
        }
        Ok(lengths)
    }

    /// Tokens per byte of the text that is not tokenized, by a sample of its segments.
    fn sample(&self, tokenizer: &Tokenizer, cache: &ModelSegmentCache) -> Result<f64, PromptError> {
        let (mut bytes, mut tokens) = (0, 0);
        for number in
            (self.tokenized..self.segments.len()).skip(SAMPLED_SEGMENTS / 2).step_by(SAMPLED_SEGMENTS)
        {
            let (text, segment) = self.segment(number);
            bytes += text.len();
            tokens += cache.segment(tokenizer, &text, segment.hash)?.len();
        }
        if bytes == 0 {
            (bytes, tokens) = (self.tokenized_bytes(), self.tokens.len());
        }
        Ok(tokens as f64 / bytes.max(1) as f64)
    }

    fn segment(&self, number: usize) -> (Cow<'_, str>, &TextSegment) {
        let start = number.checked_sub(1).map_or(0, |before| self.segments[before].end);
        let segment = &self.segments[number];
        (self.text.slice(start..segment.end), segment)
    }

    /// The text behind the last segment.
    fn rest(&self) -> Cow<'_, str> {
        self.text.slice(self.segments.last().map_or(0, |last| last.end)..self.text.len())
    }

    fn tokenized_bytes(&self) -> usize {
        self.tokenized.checked_sub(1).map_or(0, |last| self.segments[last].end)
    }

    fn special_tokens<'t>(&self, tokenizer: &'t Tokenizer) -> (&'t [u32], &'t [u32]) {
        if self.special { tokenizer.surrounding_special_tokens() } else { (&[], &[]) }
    }

    /// The complete prompt.
    pub(crate) fn into_prompt(
        mut self,
        tokenizer: &Tokenizer,
        cache: &ModelSegmentCache,
    ) -> Result<TokenizedPrompt, PromptError> {
        self.tokenize(usize::MAX, tokenizer, cache)?;
        let (before, after) = self.special_tokens(tokenizer);
        let special = SpecialTokenCounts { before: before.len(), after: after.len() };
        Ok(TokenizedPrompt { ids: self.tokens, special })
    }
}
