//! The life of one choice: wait, compute or take over the prompt, then speak token by token.

use std::collections::VecDeque;
use std::sync::Arc;

use tokio::sync::OwnedSemaphorePermit;
use tokio_util::sync::CancellationToken;

use super::Engine;
use super::cache::CachedTokens;
use super::config::Role;
use super::events::Prefix;
use super::handover::{compute, offer, running, send, take, used};
use super::namespace::Namespace;
use super::service::{Pacer, Timing};
use super::stats::Gauge;
use super::tokens::{PageChain, Voice, token_of};

/// How one choice's key-value cache comes and goes.
#[derive(Debug, Clone)]
pub(crate) enum Handover {
    /// Computed and used here.
    Local,
    /// Computed once the decode engine has come, then handed to it (SGLang prefill).
    Send {
        /// The room.
        key: String,
    },
    /// Computed, then kept for whoever asks for it (vLLM prefill).
    Keep {
        /// Remote request or transfer id.
        key: String,
    },
    /// Taken from a prefill engine.
    Take(Take),
}

/// Where a decode engine finds its key-value cache.
#[derive(Debug, Clone)]
pub(crate) struct Take {
    /// `http://host:port` of the prefill's bootstrap server.
    pub(crate) server: String,
    /// The place.
    pub(crate) key: String,
    /// Data-parallel rank of the prefill engine, if the request names it.
    pub(crate) rank: Option<u32>,
    /// Engine that must answer.
    pub(crate) engine_id: Option<String>,
    /// Whether the prefill leg may come later.
    pub(crate) wait: bool,
    /// Whether an unreachable server is tried again for a while (SGLang).
    pub(crate) patient: bool,
    /// Whether all transferred tokens are reported as cached (vLLM's Mooncake connector).
    pub(crate) counts_as_cached: bool,
}

/// One choice to produce.
#[derive(Debug, Clone)]
pub(crate) struct Job {
    pub(crate) tokens: Arc<Vec<u32>>,
    /// Which of `n` answers to the prompt.
    pub(crate) choice: u32,
    /// Separates the cache by tenant.
    pub(crate) namespace: Namespace,
    pub(crate) max_tokens: Option<u32>,
    pub(crate) stop: Vec<String>,
    /// A tool call to write instead of prose: called with the voice.
    pub(crate) tool: Option<super::tools::ToolPlan>,
    pub(crate) handover: Handover,
    pub(crate) rank: u32,
    pub(crate) timing: Timing,
    pub(crate) cancel: CancellationToken,
}

/// Why a choice ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Finish {
    Length,
    Stop(Option<String>),
    ToolCalls,
    Abort,
}

/// A failure of the engine, told to the client.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub(crate) struct EngineError {
    pub(crate) message: String,
}

impl EngineError {
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self { message: message.into() }
    }
}

/// One token's text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) text: String,
    pub(crate) id: u32,
}

/// A choice that has its prompt and speaks.
pub(crate) struct Speech {
    engine: Arc<Engine>,
    rank: u32,
    chain: PageChain,
    /// The tokens of `chain`, where the output is kept and told.
    tokens: Vec<u32>,
    namespace: Namespace,
    timing: Timing,
    cancel: CancellationToken,
    voice: Voice,
    limit: u32,
    at_limit: Finish,
    script: Option<VecDeque<String>>,
    stop: Vec<String>,
    tail: String,
    spoken: u32,
    pacer: Pacer,
    keeps_output: bool,
    _place_in_batch: Option<OwnedSemaphorePermit>,
    _gauges: [Gauge; 2],
    pub(crate) prompt_tokens: usize,
    pub(crate) cached: CachedTokens,
    pub(crate) finish: Option<Finish>,
}

impl Speech {
    /// Waits for the prompt. An abort by id gives a speech that has ended already.
    pub(crate) async fn begin(engine: &Arc<Engine>, job: Job) -> Result<Self, EngineError> {
        engine.stats.change(|stats| {
            if let Some(count) = stats.by_dp_rank.get_mut(job.rank as usize) {
                *count += 1;
            }
        });
        let chain =
            PageChain::of(&job.tokens, engine.config.page_size, engine.cache_salt(job.namespace.number()));
        let cancel = job.cancel.clone();
        tokio::select! {
            biased;
            () = cancel.cancelled() => {
                let voice = Voice::new(chain.fingerprint(), job.choice);
                let mut speech = Self::new(engine, &job, chain, voice, CachedTokens::default(), None);
                speech.finish = Some(Finish::Abort);
                Ok(speech)
            }
            begun = Self::begin_uncancelled(engine, &job, &chain) => {
                let (voice, cached, permit) = begun?;
                Ok(Self::new(engine, &job, chain, voice, cached, permit))
            }
        }
    }

    async fn begin_uncancelled(
        engine: &Arc<Engine>,
        job: &Job,
        chain: &PageChain,
    ) -> Result<(Voice, CachedTokens, Option<OwnedSemaphorePermit>), EngineError> {
        let own = chain.fingerprint();
        let voice = Voice::new(own, job.choice);
        match &job.handover {
            Handover::Local => {
                let cached = compute(engine, job, chain).await?;
                Ok((voice, cached, engine.place_in_batch(job.rank).await))
            }
            Handover::Keep { key } => {
                let cached = compute(engine, job, chain).await?;
                engine.keep_offer(key, job.rank, offer(chain, cached));
                Ok((voice, cached, engine.place_in_batch(job.rank).await))
            }
            Handover::Send { key } => Ok((voice, send(engine, job, chain, key).await?, None)),
            Handover::Take(from) => {
                let permit = engine.place_in_batch(job.rank).await;
                let received = take(engine, from).await?;
                engine.stats.change(|stats| {
                    stats.kv_received += 1;
                    stats.transferred_tokens += received.prompt_tokens as u64;
                });
                let voice = if received.fingerprint == own {
                    voice
                } else {
                    engine.stats.change(|stats| stats.prompt_mismatches += 1);
                    Voice::confused(own, received.fingerprint, job.choice)
                };
                let cached = if from.counts_as_cached {
                    CachedTokens { storage: chain.len(), ..CachedTokens::default() }
                } else {
                    received.cached
                };
                Ok((voice, cached, permit))
            }
        }
    }

    fn new(
        engine: &Arc<Engine>,
        job: &Job,
        chain: PageChain,
        voice: Voice,
        cached: CachedTokens,
        permit: Option<OwnedSemaphorePermit>,
    ) -> Self {
        let only_first = matches!(job.handover, Handover::Send { .. });
        let script = job.tool.as_ref().filter(|_| !only_first).map(|tool| tool.pieces(voice));
        let (limit, at_limit) = match (&script, only_first) {
            (_, true) => (1, Finish::Length),
            (Some(script), false) => (u32::try_from(script.len()).unwrap_or(u32::MAX), Finish::ToolCalls),
            (None, false) => match job.max_tokens {
                Some(limit) => (limit.max(1), Finish::Length),
                None => (voice.natural_length(), Finish::Stop(None)),
            },
        };
        let used = used(engine, chain.len() + limit as usize);
        let keeps_output = engine.config.role == Role::Plain && matches!(job.handover, Handover::Local);
        let told = keeps_output && engine.names_pages();
        Self {
            engine: Arc::clone(engine),
            rank: job.rank,
            prompt_tokens: chain.len(),
            chain,
            tokens: if told { job.tokens.to_vec() } else { Vec::new() },
            namespace: job.namespace.clone(),
            timing: job.timing.clone(),
            cancel: job.cancel.clone(),
            voice,
            limit,
            at_limit,
            script,
            stop: job.stop.clone(),
            tail: String::new(),
            spoken: 0,
            pacer: Pacer::start(),
            keeps_output,
            _place_in_batch: permit,
            _gauges: [running(engine), used],
            cached,
            finish: None,
        }
    }

    /// Number of tokens spoken.
    pub(crate) fn spoken(&self) -> u32 {
        self.spoken
    }

    /// The next token, at the engine's pace. `None` when [`Speech::finish`] is set.
    pub(crate) async fn next(&mut self) -> Option<Piece> {
        if self.finish.is_some() {
            return None;
        }
        // The prefill made the first token.
        if self.spoken > 0 {
            let together = self.engine.stats.read(|stats| stats.running);
            let step = self.timing.decode_step(together);
            tokio::select! {
                biased;
                () = self.cancel.cancelled() => {}
                () = self.pacer.wait(step) => {}
            }
        }
        if self.cancel.is_cancelled() {
            self.end(Finish::Abort);
            return None;
        }
        let text = match &mut self.script {
            Some(script) => script.pop_front().unwrap_or_default(),
            None => self.voice.word(u64::from(self.spoken)),
        };
        let id = token_of(&text);
        self.spoken += 1;
        self.engine.stats.change(|stats| stats.completion_tokens += 1);
        if self.keeps_output {
            self.chain.push(id);
            self.tokens.push(id);
        }
        let text = self.cut_at_stop(text);
        if self.finish.is_none() && self.spoken >= self.limit {
            self.end(self.at_limit.clone());
        }
        Some(Piece { text, id })
    }

    fn cut_at_stop(&mut self, text: String) -> String {
        if self.stop.is_empty() || self.script.is_some() {
            return text;
        }
        let longest = self.stop.iter().map(String::len).max().unwrap_or_default();
        self.tail.push_str(&text);
        let hit =
            self.stop.iter().find_map(|stop| self.tail.find(stop.as_str()).map(|at| (at, stop.clone())));
        if let Some((at, stop)) = hit {
            let before = self.tail.len() - text.len();
            self.end(Finish::Stop(Some(stop)));
            // What was sent before cannot be taken back. The text is ASCII.
            return text.get(..at.saturating_sub(before)).unwrap_or_default().to_owned();
        }
        if self.tail.len() > 2 * longest + 64 {
            let cut = self.tail.len() - longest;
            self.tail.drain(..cut);
        }
        text
    }

    fn end(&mut self, finish: Finish) {
        self.finish = Some(finish);
        if self.keeps_output {
            let prefix = Prefix { chain: &self.chain, tokens: &self.tokens, namespace: &self.namespace };
            self.engine.remember(self.rank, &prefix);
        }
    }
}
