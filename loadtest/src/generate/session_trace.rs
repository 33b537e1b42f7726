//! Reads the rows of a conversation: aiperf's multi-turn datasets, whose rows have a session, the new tokens of a turn,
//! and the delay since the response before.

use std::collections::HashMap;

use serde::Deserialize;

use super::trace::{TraceLineError, TraceRow, block_count, seconds, tokens};

/// Tokens per block id, aiperf's default.
const BLOCK_TOKENS: usize = 512;
/// Assumed rate of responses, because rows have only the pause after them: prompt tokens per second…
const PROMPT_TOKENS_PER_S: f64 = 20_000.0;
/// … and output tokens per second.
const OUTPUT_TOKENS_PER_S: f64 = 60.0;
/// Ids of blocks that no other request has count down from the largest one.
const LAST_UNIQUE_ID: u64 = u64::MAX;

#[derive(Deserialize)]
struct SessionTraceRow {
    session_id: String,
    /// Milliseconds at which the session starts; in its first row.
    #[serde(default)]
    timestamp: f64,
    /// Milliseconds between the end of the response before and this request; in its other rows.
    #[serde(default)]
    delay: f64,
    /// Tokens that this turn adds.
    input_length: u64,
    output_length: u64,
    /// Blocks of these tokens.
    #[serde(default)]
    hash_ids: Vec<i64>,
}

/// A conversation up to its latest row.
#[derive(Debug)]
struct TraceSession {
    /// When the next turn would be sent without a delay, in seconds.
    next_s: f64,
    /// Tokens of the latest prompt and its response.
    tokens: usize,
    /// Ids of its full blocks.
    blocks: Vec<u64>,
}

/// When the sessions of a trace start.
#[derive(Debug)]
pub(super) struct SessionStarts {
    per_second: f64,
    random: fastrand::Rng,
    last_s: f64,
}

impl SessionStarts {
    /// At random times with this mean rate. Equal rates give equal times.
    pub(super) fn with_rate(per_second: f64) -> Self {
        Self { per_second, random: fastrand::Rng::with_seed(0), last_s: 0.0 }
    }

    fn next_s(&mut self) -> f64 {
        self.last_s -= (1.0 - self.random.f64()).ln() / self.per_second;
        self.last_s
    }
}

/// Conversations of a trace.
#[derive(Debug)]
pub(super) struct SessionTraceReader {
    sessions: HashMap<String, TraceSession>,
    unique_ids: u64,
    /// `None` for the recorded times.
    starts: Option<SessionStarts>,
}

impl SessionTraceReader {
    pub(super) fn new(starts: Option<SessionStarts>) -> Self {
        Self { sessions: HashMap::new(), unique_ids: LAST_UNIQUE_ID, starts }
    }

    /// Whether a row has the format of a conversation's.
    pub(super) fn is_session_row(line: &str) -> bool {
        line.contains("\"session_id\"")
    }

    /// The request of a row, with its time in seconds: the whole prompt, which contains all earlier turns and responses.
    pub(super) fn row(&mut self, line: &str) -> Result<(f64, TraceRow), TraceLineError> {
        let row: SessionTraceRow = serde_json::from_str(line)?;
        let (new, output) = (tokens(row.input_length)?, tokens(row.output_length)?);
        let before = self.sessions.remove(&row.session_id);
        let is_first = before.is_none();
        let mut session = match before {
            Some(session) => session,
            None => {
                let start_s = match &mut self.starts {
                    Some(starts) => starts.next_s(),
                    None => seconds(row.timestamp / 1_000.0)?,
                };
                TraceSession { next_s: start_s, tokens: 0, blocks: Vec::new() }
            }
        };
        let input_tokens = tokens((session.tokens as u64).saturating_add(new as u64))?;
        if is_first {
            // Later rows' blocks start in the middle of the prompt's, so that only these can be shared.
            session.blocks = row.hash_ids.iter().map(|id| id.cast_unsigned()).collect();
            session.blocks.truncate(input_tokens / BLOCK_TOKENS);
        }
        while session.blocks.len() < input_tokens / BLOCK_TOKENS {
            let id = self.unique_id();
            session.blocks.push(id);
        }
        let mut blocks = session.blocks.clone();
        while blocks.len() < block_count(input_tokens, BLOCK_TOKENS) {
            blocks.push(self.unique_id());
        }
        let at_s = session.next_s + seconds(row.delay.max(0.0) / 1_000.0)?;
        session.next_s = at_s + new as f64 / PROMPT_TOKENS_PER_S + output as f64 / OUTPUT_TOKENS_PER_S;
        session.tokens = input_tokens.saturating_add(output);
        self.sessions.insert(row.session_id, session);
        let row = TraceRow {
            at: std::time::Duration::ZERO,
            input_tokens,
            output_tokens: u32::try_from(output).unwrap_or(u32::MAX),
            blocks,
            block_tokens: BLOCK_TOKENS,
        };
        Ok((seconds(at_s)?, row))
    }

    fn unique_id(&mut self) -> u64 {
        self.unique_ids -= 1;
        self.unique_ids
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROWS: [&str; 3] = [
        r#"{"session_id":"a","input_length":1100,"output_length":60,"hash_ids":[1,2,3],"timestamp":0.0,"group_id":0}"#,
        r#"{"session_id":"b","input_length":600,"output_length":60,"hash_ids":[1,9],"timestamp":500.0,"group_id":0}"#,
        r#"{"session_id":"a","input_length":400,"output_length":60,"hash_ids":[7],"delay":2000.0}"#,
    ];

    #[test]
    fn a_turn_contains_the_turns_before() {
        let mut reader = SessionTraceReader::new(None);
        let rows: Vec<_> = ROWS.iter().map(|line| reader.row(line).expect("a row")).collect();
        let [(first_s, first), (other_s, other), (second_s, second)] = rows.as_slice() else { panic!() };
        assert_eq!((*first_s, first.input_tokens, &first.blocks[..2]), (0.0, 1_100, &[1, 2][..]));
        assert_eq!((*other_s, other.input_tokens, other.blocks[0]), (0.5, 600, 1));
        // The turn before, its response, and the new tokens; three full blocks and a partial one.
        assert_eq!((second.input_tokens, second.blocks.len()), (1_560, 4));
        assert_eq!(second.blocks[..2], [1, 2]);
        assert!(second.blocks[2..].iter().all(|id| !first.blocks.contains(id)));
        assert!((second_s - (1_100.0 / 20_000.0 + 1.0 + 2.0)).abs() < 1e-9);
    }

    #[test]
    fn sessions_start_at_the_given_rate() {
        let mut reader = SessionTraceReader::new(Some(SessionStarts::with_rate(0.1)));
        let last = (0..2_000)
            .map(|number| {
                let line = format!(r#"{{"session_id":"{number}","input_length":10,"output_length":1}}"#);
                reader.row(&line).expect("a row").0
            })
            .last();
        assert!(last.is_some_and(|last_s| (18_000.0..22_000.0).contains(&last_s)), "{last:?}");
    }
}
