//! A prefill engine: a queue of prompts, a link to the shared store, and one pass of computation at a time.

use std::collections::VecDeque;

use moongate_retention::ReturnHint;

use super::caches::{LocalPrefix, SimulatedCaches};
use super::fetch_queue::{BlockFetch, StartedFetch, StoreFetchQueue};
use super::indices::{AttemptIndex, PrefillIndex};
use super::settings::{EngineQueueOrder, SimPrefetchPolicy, SimulationOptions};

/// A prompt to be computed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PromptBlocks<'a> {
    pub(crate) blocks: &'a [u32],
    pub(crate) input_tokens: u32,
    /// Number of tokens of a full block.
    pub(crate) block_tokens: u32,
    /// Position of the request in the workload.
    pub(crate) request: u32,
    /// What the client says about the next request with this prefix.
    pub(crate) hint: ReturnHint,
}

impl PromptBlocks<'_> {
    /// Tokens of the first `blocks` that can be reused; one token is always computed.
    fn usable(&self, blocks: usize) -> u32 {
        let tokens = u32::try_from(blocks).unwrap_or(u32::MAX).saturating_mul(self.block_tokens);
        tokens.min(self.input_tokens.saturating_sub(1))
    }
}

/// State of a waiting prompt's fetch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PromptFetchState {
    No,
    /// Some blocks have not arrived.
    Pending,
    /// This many blocks have arrived.
    Done(u32),
}

#[derive(Debug, Clone, Copy)]
struct QueuedPrompt {
    attempt: AttemptIndex,
    priority: i64,
    queued_at: f64,
    /// Uncached tokens, as known to the engine.
    uncached: u32,
    /// Tokens reserved from the engine's prefetch capacity.
    reserved: u32,
    /// Blocks that the engine had when the prompt arrived.
    own_blocks: u32,
    fetching: PromptFetchState,
    input_tokens: u32,
}

#[derive(Debug, Clone, Copy)]
struct RunningPrompt {
    attempt: AttemptIndex,
    left: usize,
    context: usize,
    /// Seconds to load the host's part to the device, overlapped with the first pass.
    load_s: f64,
    noise: f64,
    started: bool,
    result: PrefillResult,
}

/// How a prompt was computed.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct PrefillResult {
    /// Tokens found on the device.
    pub(crate) l1_tokens: u32,
    /// … in host memory.
    pub(crate) l2_tokens: u32,
    /// … fetched from the shared store for this prompt.
    pub(crate) l3_tokens: u32,
    pub(crate) service_s: f64,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum DelayedWork {
    /// Call [`PrefillEngine::fetched`] at the end of this read.
    Fetched(StartedFetch),
    /// Call [`PrefillEngine::start_pass`] at this time.
    Begin(f64),
}

/// Number of prompts of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PromptCounts {
    /// Prompts being computed.
    pub(crate) running: usize,
    pub(crate) waiting: usize,
}

/// A prompt that was sent to an engine.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SentPrompt<'a> {
    pub(crate) attempt: AttemptIndex,
    /// Smaller goes first, if the engine orders by priority.
    pub(crate) priority: i64,
    pub(crate) blocks: PromptBlocks<'a>,
}

/// A prompt that an engine has computed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ComputedPrompt {
    pub(crate) attempt: AttemptIndex,
    pub(crate) result: PrefillResult,
}

/// What engines share.
#[derive(Debug)]
pub(crate) struct PrefillContext<'a> {
    pub(crate) caches: &'a mut SimulatedCaches,
    pub(crate) settings: &'a SimulationOptions,
}

#[derive(Debug)]
pub(crate) struct PrefillEngine {
    index: PrefillIndex,
    waiting: VecDeque<QueuedPrompt>,
    running: Vec<RunningPrompt>,
    fetch_queue: StoreFetchQueue,
    busy: bool,
    /// Tokens of all prompts whose fetch has not ended.
    reserved: u64,
    slowdown: f64,
    /// Seconds of computation so far.
    pub(crate) busy_s: f64,
    pub(crate) available: bool,
    /// Incremented when the engine fails, so that the end of the interrupted pass is ignored.
    pub(crate) epoch: u32,
}

impl PrefillResult {
    pub(crate) fn cached_tokens(&self) -> u32 {
        self.l1_tokens + self.l2_tokens + self.l3_tokens
    }
}

impl PrefillEngine {
    pub(crate) fn new(index: PrefillIndex, slowdown: f64) -> Self {
        Self {
            index,
            waiting: VecDeque::new(),
            running: Vec::new(),
            fetch_queue: StoreFetchQueue::default(),
            busy: false,
            reserved: 0,
            slowdown,
            busy_s: 0.0,
            available: true,
            epoch: 0,
        }
    }

    pub(crate) fn counts(&self) -> PromptCounts {
        PromptCounts { running: self.running.len(), waiting: self.waiting.len() }
    }

    /// Tokens of the prompts being computed.
    pub(crate) fn running_tokens(&self) -> u64 {
        self.running.iter().map(|running| (running.context + running.left) as u64).sum()
    }

    /// Tokens of waiting prompts that are not in the engine's own caches.
    pub(crate) fn waiting_uncached(&self) -> u64 {
        self.waiting.iter().map(|job| u64::from(job.uncached)).sum()
    }

    /// Queues a prompt and starts fetching its blocks from the shared store.
    pub(crate) fn enqueue(
        &mut self,
        now: f64,
        sent: SentPrompt<'_>,
        context: PrefillContext<'_>,
        later: &mut Vec<DelayedWork>,
    ) {
        let SentPrompt { attempt, priority, blocks: prompt } = sent;
        let PrefillContext { caches, settings } = context;
        let own = caches.local_prefix(self.index, prompt.blocks).all;
        caches.touch_local(self.index, &prompt.blocks[..own]);
        let missing = prompt.input_tokens - prompt.usable(own);
        let mut job = QueuedPrompt {
            attempt,
            priority,
            queued_at: now,
            uncached: missing,
            reserved: 0,
            own_blocks: u32::try_from(own).unwrap_or(u32::MAX),
            fetching: PromptFetchState::No,
            input_tokens: prompt.input_tokens,
        };
        let is_lookup = settings.computing_decode(self.index).is_none()
            && missing >= settings.prefetch_threshold
            && self.reserved < settings.prefetch_capacity();
        caches.pass_request(&prompt);
        if is_lookup {
            caches.record_lookup(now, &prompt, own);
            let stored = caches.stored_prefix(&prompt.blocks[own..]);
            let tokens = prompt.usable(own + stored) - prompt.usable(own);
            if tokens >= settings.prefetch_threshold {
                job.fetching = PromptFetchState::Pending;
                job.reserved = missing;
                self.reserved += u64::from(missing);
                let fetch = BlockFetch {
                    attempt,
                    blocks: u32::try_from(stored).unwrap_or(u32::MAX),
                    tokens,
                    network_distance: caches.network_distance(
                        &prompt.blocks[own..own + stored],
                        settings,
                        self.index,
                    ),
                };
                later.extend(self.fetch_queue.add(now, fetch, &settings.service).map(DelayedWork::Fetched));
                if settings.prefetch == SimPrefetchPolicy::Timeout {
                    later.push(DelayedWork::Begin(now + timeout_s(&job, settings)));
                }
            }
        }
        self.waiting.push_back(job);
    }

    /// Ends a read from the shared store. Returns the arrived blocks, unless the read was abandoned.
    pub(crate) fn fetched(
        &mut self,
        now: f64,
        epoch: u32,
        settings: &SimulationOptions,
        later: &mut Vec<DelayedWork>,
    ) -> Option<FetchedBlocks> {
        let fetch = self.fetch_queue.complete(epoch)?;
        later.extend(self.fetch_queue.start_next(now, &settings.service).map(DelayedWork::Fetched));
        let job = self.waiting.iter_mut().find(|job| job.attempt == fetch.attempt)?;
        job.fetching = PromptFetchState::Done(fetch.blocks);
        job.uncached = job.uncached.saturating_sub(fetch.tokens);
        self.reserved -= u64::from(job.reserved);
        Some(FetchedBlocks { attempt: fetch.attempt, preceding_blocks: job.own_blocks, blocks: fetch.blocks })
    }

    /// Whether a pass can start, if a prompt is ready.
    pub(crate) fn idle(&self) -> bool {
        self.available && !self.busy
    }

    /// The next prompt to compute. Its fetch ends; the arrived blocks are returned.
    pub(crate) fn dequeue(
        &mut self,
        now: f64,
        settings: &SimulationOptions,
        later: &mut Vec<DelayedWork>,
    ) -> Option<DequeuedPrompt> {
        let ready = |job: &QueuedPrompt| match (job.fetching, settings.prefetch) {
            (PromptFetchState::Pending, SimPrefetchPolicy::WaitComplete) => false,
            (PromptFetchState::Pending, SimPrefetchPolicy::Timeout) => {
                now >= job.queued_at + timeout_s(job, settings)
            }
            _ => true,
        };
        let time = match settings.order {
            EngineQueueOrder::Fcfs => self.waiting.iter().position(ready)?,
            EngineQueueOrder::Priority => {
                let jobs = self.waiting.iter().enumerate().filter(|(_, job)| ready(job));
                jobs.min_by_key(|(_, job)| job.priority)?.0
            }
        };
        let job = self.waiting.remove(time)?;
        let blocks = match job.fetching {
            PromptFetchState::No => 0,
            PromptFetchState::Done(blocks) => return Some(DequeuedPrompt { job, fetched: blocks, new: 0 }),
            PromptFetchState::Pending => {
                self.reserved -= u64::from(job.reserved);
                let blocks = self.fetch_queue.abandon(now, job.attempt, &settings.service);
                later.extend(self.fetch_queue.start_next(now, &settings.service).map(DelayedWork::Fetched));
                blocks
            }
        };
        Some(DequeuedPrompt { job, fetched: blocks, new: blocks })
    }

    /// Adds a prompt to the batch, with its current cache hits.
    pub(crate) fn admit(
        &mut self,
        next: &DequeuedPrompt,
        prompt: PromptBlocks<'_>,
        noise: f64,
        context: PrefillContext<'_>,
    ) {
        let PrefillContext { caches, settings } = context;
        let LocalPrefix { device, all: own } = caches.local_prefix(self.index, prompt.blocks);
        caches.touch_local(self.index, &prompt.blocks[..own]);
        let (l1_tokens, cached) = (prompt.usable(device), prompt.usable(own));
        let host = cached - l1_tokens;
        let arrived = prompt.usable((next.job.own_blocks + next.fetched) as usize)
            - prompt.usable(next.job.own_blocks as usize);
        let l3_tokens = arrived.min(host);
        let result =
            PrefillResult { l1_tokens, l2_tokens: host - l3_tokens, l3_tokens, ..PrefillResult::default() };
        self.running.push(RunningPrompt {
            attempt: next.job.attempt,
            left: (prompt.input_tokens - cached) as usize,
            context: cached as usize,
            load_s: settings.service.host_load_s(host as usize),
            noise,
            started: false,
            result,
        });
    }

    /// Tokens left in a pass's budget after the batch; 0 if no further prompt may join.
    pub(crate) fn remaining_budget(&self, settings: &SimulationOptions) -> usize {
        if !settings.packed {
            return usize::from(self.running.is_empty());
        }
        let used_tokens: usize = self.running.iter().map(|running| running.left).sum();
        settings.service.chunk_tokens.saturating_sub(used_tokens)
    }

    /// Starts a pass over the batch, or returns `None` if there is nothing to compute.
    pub(crate) fn start_pass(&mut self, settings: &SimulationOptions) -> Option<StartedPass> {
        let service = &settings.service;
        let mut budget = if settings.packed { service.chunk_tokens } else { usize::MAX };
        let mut total = 0.0;
        let mut base = 0.0_f64;
        let mut tokens = 0;
        for running in &mut self.running {
            let part = running.left.min(budget);
            if part == 0 {
                break;
            }
            budget -= part;
            tokens += part;
            let mut seconds = service.prefill_compute_s(part, running.context);
            if !running.started {
                running.started = true;
                // Layers are loaded while earlier ones are computed.
                seconds = seconds.max(running.load_s);
                base = base.max(service.prefill_base_s * running.noise * self.slowdown);
                running.result.service_s += service.prefill_base_s * running.noise * self.slowdown;
            }
            seconds *= running.noise * self.slowdown;
            running.result.service_s += seconds;
            running.left -= part;
            running.context += part;
            total += seconds;
        }
        if self.running.is_empty() {
            return None;
        }
        self.busy = true;
        self.busy_s += total + base;
        let chunks = tokens.div_ceil(service.chunk_tokens.max(1)).max(1) as f64;
        Some(StartedPass { seconds: total + base, chunks })
    }

    /// Ends the pass; appends the finished prompts to `done`.
    pub(crate) fn finish_pass(&mut self, done: &mut Vec<ComputedPrompt>) {
        self.busy = false;
        self.running.retain(|running| {
            if running.left == 0 {
                done.push(ComputedPrompt { attempt: running.attempt, result: running.result });
            }
            running.left > 0
        });
    }

    /// Fails the engine. Returns the attempts whose prompts are lost.
    pub(crate) fn fail(&mut self) -> Vec<AttemptIndex> {
        self.available = false;
        self.busy = false;
        self.epoch += 1;
        self.reserved = 0;
        self.fetch_queue.clear();
        let running = self.running.drain(..).map(|running| running.attempt);
        running.chain(self.waiting.drain(..).map(|job| job.attempt)).collect()
    }
}

/// A pass over a batch of prompts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct StartedPass {
    /// Its duration, if the engine does nothing else.
    pub(crate) seconds: f64,
    /// Number of the engine's own passes, which take a limited number of tokens each.
    pub(crate) chunks: f64,
}

/// A prompt that is ready to be computed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DequeuedPrompt {
    job: QueuedPrompt,
    /// Number of blocks fetched for it.
    fetched: u32,
    /// Number of fetched blocks that are not in the host cache yet.
    pub(crate) new: u32,
}

impl DequeuedPrompt {
    pub(crate) fn attempt(&self) -> AttemptIndex {
        self.job.attempt
    }

    /// Blocks before the fetched ones.
    pub(crate) fn preceding_blocks(&self) -> u32 {
        self.job.own_blocks
    }
}

/// Blocks that have arrived from the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FetchedBlocks {
    /// Attempt that needs the blocks.
    pub(crate) attempt: AttemptIndex,
    /// Blocks of the prompt before them.
    pub(crate) preceding_blocks: u32,
    pub(crate) blocks: u32,
}

fn timeout_s(job: &QueuedPrompt, settings: &SimulationOptions) -> f64 {
    settings.prefetch_timeout_base_s
        + settings.prefetch_timeout_per_ki_s * f64::from(job.input_tokens) / 1_024.0
}
