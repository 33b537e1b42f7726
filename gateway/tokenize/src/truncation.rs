//! vLLM's `truncate_prompt_tokens` and `truncation_side`: the engine computes only a part of the prompt's tokens
//! (`vllm/renderers/params.py`, version 0.32). SGLang ignores both.

use crate::error::PromptError;

/// Name of the member in bodies and errors.
const MEMBER: &str = "truncate_prompt_tokens";

/// A client's limit on the tokens of its prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PromptTruncation {
    limit: TruncationLimit,
    side: Option<TruncationSide>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TruncationLimit {
    Tokens(usize),
    /// The model's context, less the tokens that are reserved for output.
    Context {
        reserved: usize,
    },
}

/// The end of the prompt that is dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TruncationSide {
    Left,
    Right,
}

/// Numbers of special tokens that a tokenizer has added around a text.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct SpecialTokenCounts {
    pub(crate) before: usize,
    pub(crate) after: usize,
}

/// The tokens that remain: so many from the start and so many from the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct KeptTokens {
    pub(crate) head: usize,
    pub(crate) tail: usize,
}

impl PromptTruncation {
    /// Parses the members. `has_output` is whether the request asks for a number of output tokens: vLLM then reserves one token of the
    /// context for output.
    pub(crate) fn read(
        limit: Option<i64>,
        side: Option<&str>,
        has_output: bool,
    ) -> Result<Option<PromptTruncation>, PromptError> {
        let side = match side {
            None => None,
            Some("left") => Some(TruncationSide::Left),
            Some("right") => Some(TruncationSide::Right),
            Some(other) => {
                return Err(PromptError::Malformed(format!("no truncation_side is named `{other}`")));
            }
        };
        let limit = match limit {
            None => return Ok(None),
            Some(-1) => TruncationLimit::Context { reserved: usize::from(has_output) },
            Some(limit) => TruncationLimit::Tokens(
                usize::try_from(limit)
                    .map_err(|_| PromptError::Malformed(format!("`{MEMBER}` is less than -1")))?,
            ),
        };
        Ok(Some(PromptTruncation { limit, side }))
    }

    /// The ids that the engine computes of a prompt that was sent as ids. `context` is the engine's limit of tokens.
    ///
    /// # Errors
    /// [`PromptError`] if no tokens remain, or if `context` is required and unknown.
    pub fn truncate_ids(&self, mut ids: Vec<u32>, context: Option<u32>) -> Result<Vec<u32>, PromptError> {
        if let Some(KeptTokens { head, tail }) =
            self.kept(ids.len(), SpecialTokenCounts::default(), context)?
        {
            ids.drain(head..ids.len() - tail);
        }
        Ok(ids)
    }

    /// The part of a prompt of `len` tokens that remains; `None` if all of it does.
    pub(crate) fn kept(
        &self,
        len: usize,
        special: SpecialTokenCounts,
        context: Option<u32>,
    ) -> Result<Option<KeptTokens>, PromptError> {
        let limit = match (self.limit, context) {
            (TruncationLimit::Tokens(limit), _) => limit,
            (TruncationLimit::Context { reserved }, Some(context)) => {
                (context as usize).saturating_sub(reserved)
            }
            (TruncationLimit::Context { .. }, None) => return Err(PromptError::UnsupportedMember(MEMBER)),
        };
        if limit >= len {
            return Ok(None);
        }
        if limit == 0 {
            return Err(PromptError::Malformed(format!("`{MEMBER}` leaves no tokens")));
        }
        let head = match self.side {
            // Without a side, the tokenizer truncates the text before it adds its special tokens.
            None if limit < special.before + special.after => {
                return Err(PromptError::UnsupportedMember(MEMBER));
            }
            None => special.before,
            Some(TruncationSide::Left) => 0,
            Some(TruncationSide::Right) => limit,
        };
        Ok(Some(KeptTokens { head, tail: limit - head }))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn kept(limit: i64, side: Option<&str>, before: usize) -> Option<(usize, usize)> {
        let truncation = PromptTruncation::read(Some(limit), side, true).unwrap().unwrap();
        let special = SpecialTokenCounts { before, after: 0 };
        truncation.kept(24, special, Some(21)).unwrap().map(|kept| (kept.head, kept.tail))
    }

    #[test]
    fn the_end_of_a_prompt_is_kept_by_default() {
        assert_eq!(kept(5, None, 0), Some((0, 5)));
        assert_eq!(kept(5, None, 1), Some((1, 4)), "the tokenizer keeps its special token");
        assert_eq!(kept(5, Some("left"), 1), Some((0, 5)), "vLLM cuts the complete prompt");
        assert_eq!(kept(5, Some("right"), 1), Some((5, 0)));
        assert_eq!(kept(24, None, 1), None);
        assert_eq!(kept(-1, None, 0), Some((0, 20)), "the context, less one token for output");
    }

    #[test]
    fn a_limit_that_cannot_be_applied_is_an_error() {
        let read = |limit, side| PromptTruncation::read(Some(limit), side, false);
        assert!(matches!(read(-2, None), Err(PromptError::Malformed(_))));
        assert!(matches!(read(1, Some("middle")), Err(PromptError::Malformed(_))));
        let context = read(-1, None).unwrap().unwrap();
        assert_eq!(context.truncate_ids(vec![1], None), Err(PromptError::UnsupportedMember(MEMBER)));
        assert_eq!(context.truncate_ids(vec![1, 2, 3], Some(3)).unwrap(), [1, 2, 3]);
        assert!(matches!(
            read(0, None).unwrap().unwrap().truncate_ids(vec![1], None),
            Err(PromptError::Malformed(_))
        ));
        assert_eq!(PromptTruncation::read(None, Some("left"), true), Ok(None));
    }

    proptest! {
        #[test]
        fn no_limit_panics(limit in -1..20_i64, side in 0..3_usize, len in 0..16_u32, context in prop::option::of(0..12_u32)) {
            let side = [None, Some("left"), Some("right")][side];
            let truncation = PromptTruncation::read(Some(limit), side, true).unwrap().unwrap();
            if let Ok(ids) = truncation.truncate_ids((0..len).collect(), context) {
                let expected = usize::try_from(limit).unwrap_or_else(|_| (context.unwrap() as usize).saturating_sub(1));
                prop_assert_eq!(ids.len(), expected.min(len as usize));
            }
        }
    }
}
