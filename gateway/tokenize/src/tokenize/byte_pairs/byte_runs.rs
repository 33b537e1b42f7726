//! Finds the end of common words without the pattern's table, 16 bytes at a time.
//!
//! Most words are letters, or punctuation, often with a space before them. Which of them a pattern matches as a whole is proven with its
//! table when it is loaded.

use regex_automata::dfa::{Automaton, dense};
use regex_automata::util::primitives::StateID;
use wide::u8x16;

/// Words that a pattern matches as a whole: an optional first byte, and a run of bytes of one kind up to an ending byte.
#[derive(Debug)]
pub(super) struct ByteRuns {
    letters: RunsOfKind,
    punctuation: RunsOfKind,
}

/// The words of one kind.
#[derive(Debug)]
struct RunsOfKind {
    /// The bytes that may be before the run.
    first: [bool; 256],
    /// The bytes that end the match before them, whatever follows.
    ends: [bool; 256],
}

/// Bytes that begin a run, and those that continue it.
struct Kind {
    begins: fn(&u8) -> bool,
    continues: fn(&u8) -> bool,
}

/// Only small letters continue a run: some patterns begin a word at a capital letter.
const LETTERS: Kind = Kind { begins: u8::is_ascii_alphabetic, continues: u8::is_ascii_lowercase };
const PUNCTUATION: Kind = Kind { begins: u8::is_ascii_punctuation, continues: u8::is_ascii_punctuation };

impl ByteRuns {
    pub(super) fn of_pattern(states: &dense::DFA<Vec<u32>>, start: StateID) -> Self {
        Self {
            letters: RunsOfKind::of_pattern(states, start, &LETTERS),
            punctuation: RunsOfKind::of_pattern(states, start, &PUNCTUATION),
        }
    }

    /// The length of the word that starts with these bytes, if it is of a proven form and ends within them.
    #[inline]
    pub(super) fn length(&self, bytes: [u8; 16]) -> Option<usize> {
        let lanes = u8x16::from(bytes);
        let letters = below(26, (lanes | u8x16::splat(0x20)) - u8x16::splat(b'a'));
        let lead = usize::from(letters & 1 == 0);
        if letters >> lead & 1 == 1 {
            let small = below(26, lanes - u8x16::splat(b'a'));
            return self.letters.length(bytes, lead, small | letters & 1 << lead);
        }
        let digits = below(10, lanes - u8x16::splat(b'0'));
        let punctuation = below(94, lanes - u8x16::splat(b'!')) & !letters & !digits;
        let lead = usize::from(punctuation & 1 == 0);
        if punctuation >> lead & 1 == 1 { self.punctuation.length(bytes, lead, punctuation) } else { None }
    }
}

impl RunsOfKind {
    fn of_pattern(states: &dense::DFA<Vec<u32>>, start: StateID, kind: &Kind) -> Self {
        let ascii = || 0..0x80_u8;
        let runs = run_states(states, start, kind);
        let mut words = Self { first: [false; 256], ends: [false; 256] };
        for byte in ascii() {
            words.ends[usize::from(byte)] =
                !(kind.continues)(&byte) && runs.iter().all(|&run| ends_match(states, run, byte));
        }
        let ends: Vec<u8> = ascii().filter(|&byte| words.ends[usize::from(byte)]).collect();
        for byte in ascii() {
            let runs = run_states(states, states.next_state(start, byte), kind);
            words.first[usize::from(byte)] = !(kind.begins)(&byte)
                && runs.iter().all(|&run| ends.iter().all(|&end| ends_match(states, run, end)));
        }
        words
    }

    /// `run` has a bit for each byte that begins or continues one.
    #[inline]
    fn length(&self, bytes: [u8; 16], lead: usize, run: u32) -> Option<usize> {
        let end = lead + (run >> lead).trailing_ones() as usize;
        let is_first = lead == 0 || self.first[usize::from(bytes[0])];
        (is_first && self.ends[usize::from(*bytes.get(end)?)]).then_some(end)
    }
}

/// A bit for each lane below `limit`.
#[inline]
fn below(limit: u8, lanes: u8x16) -> u32 {
    lanes.simd_eq(lanes.min(u8x16::splat(limit - 1))).to_bitmask()
}

/// All states that runs after `from` lead to.
fn run_states(states: &dense::DFA<Vec<u32>>, from: StateID, kind: &Kind) -> Vec<StateID> {
    let after = |state: StateID, is_next: fn(&u8) -> bool| {
        (0..0x80).filter(is_next).map(move |byte| states.next_state(state, byte))
    };
    let mut found: Vec<StateID> = Vec::new();
    let mut open: Vec<StateID> = after(from, kind.begins).collect();
    while let Some(state) = open.pop() {
        if !found.contains(&state) {
            found.push(state);
            open.extend(after(state, kind.continues));
        }
    }
    found
}

/// Whether `end` shows that there is a match before it, and no longer one.
fn ends_match(states: &dense::DFA<Vec<u32>>, run: StateID, end: u8) -> bool {
    let state = states.next_state(run, end);
    let is_dead = |next: StateID| states.is_dead_state(next);
    states.is_match_state(state)
        && states.match_pattern(state, 0).as_usize() == 0
        && (0..=255).all(|byte| is_dead(states.next_state(state, byte)))
        && is_dead(states.next_eoi_state(state))
}
