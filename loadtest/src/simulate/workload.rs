//! Workload: prompts with their blocks and arrival times.

use std::collections::HashMap;
use std::sync::Arc;

use super::indices::WorkloadIndex;
use super::multiturn::MultiTurnSender;
use super::request_class::RequestClass;
use super::sessions::predecessors;
use super::tide::ArrivalTide;
use crate::engine::tokens::mix;
use crate::generate::trace::TraceRow;

#[derive(Debug, Clone)]
pub struct WorkloadRequest {
    /// Recorded arrival time in seconds.
    recorded_s: f64,
    pub due_s: f64,
    pub input_tokens: u32,
    pub output_tokens: u32,
    /// Request that must have ended before this one arrives.
    pub predecessor: Option<WorkloadIndex>,
    /// Index of its conversation.
    pub session: u64,
    pub class: RequestClass,
    /// Whether later requests use more than half of its blocks again.
    pub returns: bool,
    /// Position of its blocks in [`SimulatedWorkload::blocks`].
    first_block: usize,
    blocks: usize,
}

#[derive(Debug, Clone)]
pub enum ArrivalMode {
    /// When they are due and their predecessor has ended.
    Open,
    /// From clients that wait for responses.
    Closed(MultiTurnSender),
}

#[derive(Debug, Clone)]
pub struct SimulatedWorkload {
    /// All requests that may arrive.
    pub requests: Vec<WorkloadRequest>,
    pub source: ArrivalMode,
    /// Number of tokens of a full block.
    pub block_tokens: u32,
    /// All prompts' blocks, concatenated.
    blocks: Arc<[u32]>,
    /// Number of tokens of each block.
    block_token_counts: Arc<[u32]>,
    /// For each request, the requests that wait for its end.
    successors: Arc<[Vec<WorkloadIndex>]>,
    /// For each request, the keys of its full blocks.
    keys: Arc<[Arc<[u64]>]>,
}

/// The rows of this many copies of a trace, in the order of their times. Only the first copy has the trace's block ids.
pub(crate) fn copies_of_rows(rows: Vec<TraceRow>, copies: usize) -> Vec<TraceRow> {
    if copies <= 1 {
        return rows;
    }
    let copy = |row: &TraceRow, number: u64| {
        let id = |&block: &u64| if number == 0 { block } else { mix(block, number) };
        TraceRow { blocks: row.blocks.iter().map(id).collect(), ..row.clone() }
    };
    let mut all: Vec<TraceRow> =
        (0..copies as u64).flat_map(|number| rows.iter().map(move |row| copy(row, number))).collect();
    all.sort_by_key(|row| row.at);
    all
}

/// How a trace is replayed.
#[derive(Debug, Clone, Copy)]
pub struct ReplayOptions {
    /// Speed relative to the recording.
    pub speed: f64,
    /// Maximum random jitter of every arrival, in recorded seconds.
    pub jitter_s: f64,
    /// Factor on the length of the responses.
    pub output_scale: f64,
    /// Changes of the rate at which conversations start.
    pub tide: ArrivalTide,
    pub seed: u64,
}

impl SimulatedWorkload {
    /// The rows of a trace at their recorded times. Rows without block ids share no prefix with others. With
    /// `sessions`, a turn waits for the end of the previous one.
    #[must_use]
    pub fn of_rows(rows: &[TraceRow], sessions: bool) -> Self {
        let mut prompts = WorkloadBuilder::new(rows.first().map_or(512, |row| row.block_tokens));
        let after = if sessions { predecessors(rows) } else { vec![None; rows.len()] };
        let mut session_of: Vec<u64> = Vec::with_capacity(rows.len());
        for (number, row) in (0_u64..).zip(rows) {
            let before = after[session_of.len()];
            let session = before.map_or(number, |before| session_of[before.get()]);
            session_of.push(session);
            prompts.push(NewRequest {
                recorded_s: row.at.as_secs_f64(),
                input_tokens: row.input_tokens,
                output_tokens: row.output_tokens,
                block_ids: &row.blocks,
                predecessor: before,
                session,
            });
        }
        prompts.finish(ArrivalMode::Open)
    }

    /// The same requests at other times.
    #[must_use]
    pub fn with_replay(&self, replay: ReplayOptions) -> Self {
        let mut random = fastrand::Rng::with_seed(replay.seed);
        let mut workload = self.clone();
        let mut delays_s = Vec::with_capacity(self.requests.len());
        for request in &mut workload.requests {
            let jitter = random.f64() * replay.jitter_s.max(0.0);
            request.due_s = (request.recorded_s + jitter) / replay.speed;
            // The turns of a conversation keep their distances.
            let delay_s = match request.predecessor {
                Some(before) => delays_s[before.get()],
                None => replay.tide.arrival_s(request.due_s) - request.due_s,
            };
            request.due_s += delay_s;
            delays_s.push(delay_s);
            request.output_tokens =
                (f64::from(request.output_tokens) * replay.output_scale).round().max(1.0) as u32;
        }
        workload
    }

    pub(crate) fn request(&self, request: WorkloadIndex) -> &WorkloadRequest {
        &self.requests[request.get()]
    }

    pub(crate) fn blocks(&self, request: WorkloadIndex) -> &[u32] {
        self.blocks_of(self.request(request))
    }

    fn blocks_of(&self, request: &WorkloadRequest) -> &[u32] {
        &self.blocks[request.first_block..request.first_block + request.blocks]
    }

    /// For each block the requests that use it, the first one last.
    pub(crate) fn uses_of_blocks(&self) -> Vec<Vec<u32>> {
        let mut uses = vec![Vec::new(); self.block_token_counts.len()];
        let mut by_time: Vec<usize> = (0..self.requests.len()).collect();
        by_time.sort_by(|&left, &right| self.requests[right].due_s.total_cmp(&self.requests[left].due_s));
        for position in by_time {
            for &block in self.blocks_of(&self.requests[position]) {
                uses[block as usize].push(u32::try_from(position).unwrap_or(u32::MAX));
            }
        }
        uses
    }

    /// Number of tokens of each block.
    pub(crate) fn block_token_counts(&self) -> Arc<[u32]> {
        Arc::clone(&self.block_token_counts)
    }

    /// Keys of a request's full blocks, for policies with state of their own.
    pub(crate) fn keys(&self, request: WorkloadIndex) -> Arc<[u64]> {
        Arc::clone(&self.keys[request.get()])
    }

    /// Requests that wait for the end of `request`.
    pub(crate) fn successors(&self, request: WorkloadIndex) -> &[WorkloadIndex] {
        &self.successors[request.get()]
    }

    /// Share of all prompt tokens that an unbounded cache would have had.
    #[must_use]
    pub fn ideal_hit(&self) -> f64 {
        let mut visited = vec![false; self.block_token_counts.len()];
        let (mut hit, mut all) = (0_u64, 0_u64);
        for request in &self.requests {
            all += u64::from(request.input_tokens);
            let mut leading = true;
            for &block in self.blocks_of(request) {
                leading &= std::mem::replace(&mut visited[block as usize], true);
                if leading {
                    hit += u64::from(self.block_token_counts[block as usize]);
                }
            }
        }
        hit as f64 / (all as f64).max(1.0)
    }
}

/// A request to be added to a workload.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NewRequest<'a> {
    /// Arrival time in seconds.
    pub(crate) recorded_s: f64,
    pub(crate) input_tokens: usize,
    pub(crate) output_tokens: u32,
    /// Ids of its blocks; blocks without an id are unique.
    pub(crate) block_ids: &'a [u64],
    /// Request that must have ended before this one arrives.
    pub(crate) predecessor: Option<WorkloadIndex>,
    /// Index of its conversation.
    pub(crate) session: u64,
}

/// Collects requests and numbers their blocks.
#[derive(Debug)]
pub(crate) struct WorkloadBuilder {
    block_tokens: usize,
    requests: Vec<WorkloadRequest>,
    blocks: Vec<u32>,
    tokens_of: Vec<u32>,
    numbers: HashMap<u64, u32>,
}

impl WorkloadBuilder {
    pub(crate) fn new(block_tokens: usize) -> Self {
        let block_tokens = block_tokens.max(1);
        Self {
            block_tokens,
            requests: Vec::new(),
            blocks: Vec::new(),
            tokens_of: Vec::new(),
            numbers: HashMap::new(),
        }
    }

    pub(crate) fn push(&mut self, request: NewRequest<'_>) -> WorkloadIndex {
        let input_tokens = request.input_tokens.max(1);
        let first_block = self.blocks.len();
        let count = input_tokens.div_ceil(self.block_tokens);
        for index in 0..count {
            let tokens = (input_tokens - index * self.block_tokens).min(self.block_tokens);
            let fresh = u32::try_from(self.tokens_of.len()).unwrap_or(u32::MAX);
            let number = match request.block_ids.get(index) {
                Some(&id) => *self.numbers.entry(id).or_insert(fresh),
                None => fresh,
            };
            if number == fresh {
                self.tokens_of.push(u32::try_from(tokens).unwrap_or(u32::MAX));
            }
            self.blocks.push(number);
        }
        self.requests.push(WorkloadRequest {
            recorded_s: request.recorded_s,
            due_s: request.recorded_s,
            input_tokens: u32::try_from(input_tokens).unwrap_or(u32::MAX),
            output_tokens: request.output_tokens,
            predecessor: request.predecessor,
            session: request.session,
            class: RequestClass::default(),
            returns: false,
            first_block,
            blocks: count,
        });
        WorkloadIndex::new(self.requests.len() - 1)
    }

    /// Marks the requests whose prompts return.
    fn mark_returning(&mut self) {
        let mut used_later = vec![false; self.tokens_of.len()];
        let mut by_arrival: Vec<usize> = (0..self.requests.len()).collect();
        by_arrival.sort_by(|&left, &right| self.requests[left].due_s.total_cmp(&self.requests[right].due_s));
        for position in by_arrival.into_iter().rev() {
            let request = &mut self.requests[position];
            let blocks = &self.blocks[request.first_block..request.first_block + request.blocks];
            let returning = blocks.iter().filter(|block| used_later[**block as usize]).count();
            request.returns = 2 * returning > blocks.len();
            blocks.iter().for_each(|block| used_later[*block as usize] = true);
        }
    }

    pub(crate) fn finish(mut self, source: ArrivalMode) -> SimulatedWorkload {
        let mut successors = vec![Vec::new(); self.requests.len()];
        for (position, request) in self.requests.iter().enumerate() {
            if let Some(before) = request.predecessor {
                successors[before.get()].push(WorkloadIndex::new(position));
            }
        }
        self.mark_returning();
        let key = |&block: &u32| mix(u64::from(block), 1);
        let keys_of = |request: &WorkloadRequest| {
            let full = request.input_tokens as usize / self.block_tokens;
            let blocks = &self.blocks[request.first_block..request.first_block + full];
            blocks.iter().map(key).collect::<Arc<[u64]>>()
        };
        SimulatedWorkload {
            keys: self.requests.iter().map(keys_of).collect(),
            source,
            block_tokens: u32::try_from(self.block_tokens).unwrap_or(u32::MAX),
            blocks: self.blocks.into(),
            block_token_counts: self.tokens_of.into(),
            successors: successors.into(),
            requests: self.requests,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn row((second, blocks): (u64, &[u64])) -> TraceRow {
        TraceRow {
            at: Duration::from_secs(second),
            input_tokens: blocks.len() * 512,
            output_tokens: 1,
            blocks: blocks.to_vec(),
            block_tokens: 512,
        }
    }

    #[test]
    fn copies_of_a_trace_share_no_blocks() {
        let rows: Vec<TraceRow> = [(0, &[1, 2][..]), (5, &[1, 2, 3])].map(row).into();
        let load = SimulatedWorkload::of_rows(&copies_of_rows(rows, 3), true);
        let seconds: Vec<f64> = load.requests.iter().map(|request| request.due_s).collect();
        assert_eq!(seconds, [0.0, 0.0, 0.0, 5.0, 5.0, 5.0]);
        assert_eq!(load.block_token_counts().len(), 9);
        assert_eq!(load.requests[3].predecessor, Some(WorkloadIndex::new(0)));
        assert_eq!(load.requests[5].predecessor, Some(WorkloadIndex::new(2)));
    }

    #[test]
    fn turns_keep_their_distance_in_a_tide() {
        let rows: Vec<TraceRow> = [(30, &[1, 2][..]), (35, &[1, 2, 3]), (40, &[7, 8])].map(row).into();
        let tide = ArrivalTide { ratio: 10.0, period_s: 100.0 };
        let replay = ReplayOptions { speed: 1.0, jitter_s: 0.0, output_scale: 1.0, tide, seed: 1 };
        let load = SimulatedWorkload::of_rows(&rows, true).with_replay(replay);
        let due = |request: usize| load.requests[request].due_s;
        assert!((due(0) - tide.arrival_s(30.0)).abs() < 1e-9 && due(0) > 31.0, "{}", due(0));
        assert!((due(1) - due(0) - 5.0).abs() < 1e-9);
        assert!((due(2) - tide.arrival_s(40.0)).abs() < 1e-9);
    }

    #[test]
    fn prompts_return_if_most_of_their_blocks_are_used_later() {
        let rows: Vec<TraceRow> =
            (0..).zip([&[0, 1, 2][..], &[0, 1, 3], &[9], &[0, 4, 5]]).map(row).collect();
        let load = SimulatedWorkload::of_rows(&rows, false);
        let returns: Vec<bool> = load.requests.iter().map(|request| request.returns).collect();
        assert_eq!(returns, [true, false, false, false]);
    }
}
