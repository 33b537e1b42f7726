//! Splits a text into words by the pattern of a tokenizer.json.
//!
//! A pattern is compiled to a table of states that all threads share: a text is read once, byte by byte, and nothing is searched again.
//! Such tables cannot look ahead, but the patterns do so in one place only, their end `\s+(?!\S)|\s+`: white space before a word, without
//! its last character. Its match is that of `\s+`, shortened afterwards.

use std::ops::Range;

use regex_automata::dfa::{Automaton, StartKind, dense};
use regex_automata::util::primitives::StateID;
use regex_automata::util::start;
use regex_automata::{Anchored, MatchKind};
use regex_syntax::hir::{Hir, HirKind, Repetition};

use super::UnsupportedTokenizer;
use super::byte_runs::ByteRuns;

/// The end of a pattern that looks ahead.
const SPACES_BEFORE_WORD: &str = r"|\s+(?!\S)|\s+";
/// What is compiled instead, as a pattern of its own.
const SPACES: &str = r"\s+";
/// Maximum size of a table in bytes. Those of known models have 1.3 to 2.8 MB.
const MAX_TABLE_BYTES: usize = 32 << 20;

/// A compiled pattern. Its matches, and the text between them, are words.
pub(super) struct WordPattern {
    states: dense::DFA<Vec<u32>>,
    start: StateID,
    /// Whether the second alternative is [`SPACES`], to be shortened before a word.
    shortens_spaces: bool,
    byte_runs: ByteRuns,
    between: Option<BetweenMatches>,
}

/// The text between the matches of a pattern that is a run of characters of one class.
struct BetweenMatches {
    /// ASCII bytes that are not of the class.
    bytes: [bool; 256],
    /// The state behind two of them, and behind more.
    state: StateID,
}

impl WordPattern {
    /// # Errors
    /// The pattern looks around elsewhere than at its end, or matches an empty text.
    pub(super) fn compile(pattern: &str) -> Result<Self, UnsupportedTokenizer> {
        let (words, shortens_spaces) = match pattern.strip_suffix(SPACES_BEFORE_WORD) {
            Some(words) => (words, true),
            None => (pattern, false),
        };
        let parsed = regex_syntax::parse(words).map_err(|_| UnsupportedTokenizer("its pattern"))?;
        if parsed.properties().minimum_len().unwrap_or(0) == 0 || !parsed.properties().look_set().is_empty() {
            return Err(UnsupportedTokenizer("its pattern"));
        }
        let others = text_between(&parsed).filter(|_| !shortens_spaces);
        let states = match &others {
            Some(others) => states(&[words, &others.to_string()]),
            None if shortens_spaces => states(&[words, SPACES]),
            None => states(&[words]),
        }?;
        let start = states
            .start_state(&start::Config::new().anchored(Anchored::Yes))
            .map_err(|_| UnsupportedTokenizer("its pattern"))?;
        let byte_runs = ByteRuns::of_pattern(&states, start);
        let between = others.and_then(|_| BetweenMatches::of_pattern(&states, start));
        Ok(Self { states, start, shortens_spaces, byte_runs, between })
    }

    /// Passes the words of a part of `text` to `word`, in order. They cover the part.
    pub(super) fn split(&self, text: &str, part: Range<usize>, mut word: impl FnMut(Range<usize>)) {
        let mut unmatched = part.start;
        let mut at = part.start;
        while at < part.end {
            let Some(end) = self.match_end(text, at, part.end) else {
                at += text[at..].chars().next().map_or(1, char::len_utf8);
                continue;
            };
            if unmatched < at {
                word(unmatched..at);
            }
            word(at..end);
            (at, unmatched) = (end, end);
        }
        if unmatched < at {
            word(unmatched..at);
        }
    }

    /// The end of the match at `from`.
    fn match_end(&self, text: &str, from: usize, limit: usize) -> Option<usize> {
        if let Some(bytes) = text.as_bytes()[from..limit].first_chunk::<16>()
            && let Some(length) = self.byte_runs.length(*bytes)
        {
            return Some(from + length);
        }
        if let Some(between) = &self.between {
            let bytes = text.as_bytes()[from..limit].iter();
            let length = bytes.take_while(|&&byte| between.bytes[usize::from(byte)]).count();
            if length >= 2 {
                return self.match_end_by_states(text, from..limit, from + length, between.state);
            }
        }
        self.match_end_by_states(text, from..limit, from, self.start)
    }

    /// The end of the match at the start of `part`, where the text before `at` leads to `state`.
    fn match_end_by_states(
        &self,
        text: &str,
        part: Range<usize>,
        mut at: usize,
        mut state: StateID,
    ) -> Option<usize> {
        let Range { start: from, end: limit } = part;
        let mut found = None;
        let bytes = &text.as_bytes()[..limit];
        loop {
            // The state after the byte behind a match says that there is one.
            let next = bytes.get(at);
            state = match next {
                Some(&byte) => self.states.next_state(state, byte),
                None => self.states.next_eoi_state(state),
            };
            if self.states.is_special_state(state) {
                if self.states.is_match_state(state) {
                    found = Some((at, self.states.match_pattern(state, 0)));
                } else if self.states.is_dead_state(state) {
                    break;
                }
            }
            if next.is_none() {
                break;
            }
            at += 1;
        }
        let (end, alternative) = found?;
        if self.shortens_spaces && alternative.as_usize() == 1 && end < limit {
            let last = text[from..end].char_indices().next_back().map_or(0, |(offset, _)| offset);
            return Some(if last > 0 { from + last } else { end });
        }
        Some(end)
    }
}

impl BetweenMatches {
    /// None if the table has more than one state for such text.
    fn of_pattern(states: &dense::DFA<Vec<u32>>, start: StateID) -> Option<Self> {
        let mut bytes = [false; 256];
        let mut common = None;
        for byte in 0..0x80_u8 {
            let first = states.next_state(start, byte);
            let state = states.next_state(first, byte);
            // Behind a run of other characters the match is that of the second alternative.
            let end = states.next_eoi_state(state);
            if states.is_match_state(end) && states.match_pattern(end, 0).as_usize() == 1 {
                bytes[usize::from(byte)] = true;
                common.get_or_insert(state);
            }
        }
        let state = common?;
        let continues = |from: StateID| {
            (0..0x80_u8)
                .filter(|&byte| bytes[usize::from(byte)])
                .all(|byte| states.next_state(from, byte) == state)
        };
        let firsts = (0..0x80_u8).filter(|&byte| bytes[usize::from(byte)]);
        let is_common = continues(state) && firsts.map(|byte| states.next_state(start, byte)).all(continues);
        is_common.then_some(Self { bytes, state })
    }
}

fn states(alternatives: &[&str]) -> Result<dense::DFA<Vec<u32>>, UnsupportedTokenizer> {
    let config = dense::Config::new()
        .match_kind(MatchKind::LeftmostFirst)
        .start_kind(StartKind::Anchored)
        .accelerate(false)
        .dfa_size_limit(Some(MAX_TABLE_BYTES))
        .determinize_size_limit(Some(MAX_TABLE_BYTES));
    dense::Builder::new()
        .configure(config)
        .build_many(alternatives)
        .map_err(|_| UnsupportedTokenizer("its pattern"))
}

/// For a run of characters of one class: a run of all others, so that the text between matches is found in one step.
fn text_between(pattern: &Hir) -> Option<Hir> {
    let run = match pattern.kind() {
        HirKind::Repetition(run) => run,
        _ => return None,
    };
    let HirKind::Class(class) = run.sub.kind() else { return None };
    let mut others = class.clone();
    match &mut others {
        regex_syntax::hir::Class::Unicode(class) => class.negate(),
        regex_syntax::hir::Class::Bytes(_) => return None,
    }
    Some(Hir::repetition(Repetition { min: 1, max: None, greedy: true, sub: Box::new(Hir::class(others)) }))
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use fastokens::tiktoken;
    use proptest::prelude::*;
    use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
    use tokenizers::{
        OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, SplitDelimiterBehavior,
    };

    use super::*;

    const PATTERNS: [&str; 10] = [
        tiktoken::CL100K_BASE_PATTERN,
        tiktoken::QWEN2_PATTERN,
        tiktoken::QWEN35_PATTERN,
        tiktoken::O200K_BASE_PATTERN,
        tiktoken::TEKKEN_PATTERN,
        tiktoken::KIMI_PATTERN,
        tiktoken::DEEPSEEK_SPLIT1_PATTERN,
        tiktoken::DEEPSEEK_SPLIT2_PATTERN,
        tiktoken::DEEPSEEK_SPLIT3_PATTERN,
        super::super::GPT2_PATTERN,
    ];

    /// The words according to the engines' library.
    fn expected(split: &Split, text: &str) -> Vec<String> {
        let mut words = PreTokenizedString::from(text);
        split.pre_tokenize(&mut words).unwrap();
        let words = words.get_splits(OffsetReferential::Original, OffsetType::Byte);
        words.into_iter().map(|(word, _, _)| word.to_owned()).collect()
    }

    fn words<'a>(pattern: &WordPattern, text: &'a str) -> Vec<&'a str> {
        let mut words = Vec::new();
        pattern.split(text, 0..text.len(), |word| words.push(&text[word]));
        words
    }

    proptest! {
        #[test]
        fn words_are_those_of_the_library(
            text in any::<String>(),
            words_in in "([ A-Za-z0-9'\n\r\t]{0,9}|[a-z]{1,20}|[!-/:-~]{1,9}| {1,9}|[éЖ世あ한\u{301}ſªİǅ]{1,3}|[\u{a0}\u{3000}\u{85}²٣½—🌍]){0,40}",
        ) {
            static COMPILED: LazyLock<Vec<(WordPattern, Split)>> = LazyLock::new(|| {
                let library = |pattern: &str| {
                    let pattern = SplitPattern::Regex(pattern.to_owned());
                    Split::new(pattern, SplitDelimiterBehavior::Isolated, false).unwrap()
                };
                PATTERNS.map(|pattern| (WordPattern::compile(pattern).unwrap(), library(pattern))).into()
            });
            for text in [text, words_in] {
                for ((own, library), pattern) in COMPILED.iter().zip(PATTERNS) {
                    prop_assert_eq!(words(own, &text), expected(library, &text), "{}", pattern);
                }
            }
        }
    }

    #[test]
    fn common_words_do_not_need_the_table() {
        for pattern in [tiktoken::QWEN2_PATTERN, tiktoken::O200K_BASE_PATTERN, tiktoken::TEKKEN_PATTERN] {
            let runs = WordPattern::compile(pattern).unwrap().byte_runs;
            assert_eq!(runs.length(*b" the answer is 4"), Some(4), "{pattern}");
            assert_eq!(runs.length(*b"The answer is 42"), Some(3), "{pattern}");
            assert_eq!(runs.length(*b" ... and so on, "), Some(4), "{pattern}");
            assert_eq!(runs.length(*b" aLongNameInCode"), None, "a capital letter may begin a word");
            assert_eq!(runs.length(*b"nineteen_letters"), Some(8), "{pattern}");
            assert_eq!(runs.length(*b"uncharacteristic"), None, "the end is not visible");
        }
        let gpt2 = WordPattern::compile(super::super::GPT2_PATTERN).unwrap().byte_runs;
        assert_eq!(gpt2.length(*b"(the answer is 4"), None, "only a space belongs to the word behind it");
    }

    #[test]
    fn texts_between_matches_are_read_in_one_step() {
        for pattern in [tiktoken::DEEPSEEK_SPLIT1_PATTERN, tiktoken::DEEPSEEK_SPLIT2_PATTERN] {
            assert!(WordPattern::compile(pattern).unwrap().between.is_some(), "{pattern}");
        }
        assert!(WordPattern::compile(tiktoken::QWEN2_PATTERN).unwrap().between.is_none());
    }

    #[test]
    fn other_patterns_are_not_supported() {
        for pattern in [r"\w+(?=x)", r"(?<!x)\w+", r"\bword", r"a*", r"(a)\1", r"["] {
            assert!(WordPattern::compile(pattern).is_err(), "{pattern}");
        }
    }
}
