//! Lifecycle of one choice: wait, compute or receive the prompt, then generate token by token.

use std::collections::VecDeque;
use std::sync::Arc;

use tokio::sync::OwnedSemaphorePermit;
use tokio_util::sync::CancellationToken;

use super::SimEngineState;
use super::cache::CachedTokens;
use super::config::{SimRole, VllmConnector};
use super::events::PromptPrefix;
use super::kv_transfer::{
    compute_prompt, kv_offer, pull_from_prefill, running_gauge, serve_to_decode, used_tokens_gauge,
};
use super::namespace::PromptNamespace;
use super::stats::SimGaugeGuard;
use super::timing::{Pacer, ScaledTiming};
use super::tokens::{PageHashChain, TokenGenerator, token_of};

/// Number of tokens of a simulated model's reasoning.
pub(crate) const REASONING_TOKENS: u32 = 4;

/// Source and destination of one choice's KV cache.
#[derive(Debug, Clone)]
pub(crate) enum SimKvTransfer {
    Local,
    /// Computed once the decode engine has connected, then sent to it (SGLang prefill).
    Send {
        /// Bootstrap room of the pair.
        key: String,
    },
    /// Computed, then retained until a decode engine pulls it (vLLM prefill).
    Retain {
        /// Remote request or transfer id.
        key: String,
    },
    /// Pulled from a prefill engine.
    Pull(KvPull),
}

/// Source of a decode engine's KV cache.
#[derive(Debug, Clone)]
pub(crate) struct KvPull {
    /// `http://host:port` of the prefill's bootstrap server.
    pub(crate) server: String,
    /// Key of the rendezvous entry.
    pub(crate) key: String,
    /// Data-parallel rank of the prefill engine, if the request names it.
    pub(crate) rank: Option<u32>,
    /// Expected id of the prefill engine.
    pub(crate) engine_id: Option<String>,
    /// Whether the prefill leg may arrive later.
    pub(crate) wait: bool,
    /// Whether connecting to an unreachable server is retried for some time (SGLang).
    pub(crate) retries_connect: bool,
    /// Whether all transferred tokens are reported as cached (vLLM's Mooncake connector).
    pub(crate) counts_as_cached: bool,
}

#[derive(Debug, Clone)]
pub(crate) struct GenerationJob {
    pub(crate) tokens: Arc<Vec<u32>>,
    /// Number of the choice among the `n` of its prompt.
    pub(crate) choice: u32,
    /// Separates the cache by tenant.
    pub(crate) namespace: PromptNamespace,
    pub(crate) max_tokens: Option<u32>,
    pub(crate) stop: Vec<String>,
    /// A tool call to generate instead of text; its arguments come from the token generator.
    pub(crate) tool_call: Option<super::tools::SimToolCall>,
    /// Whether the first [`REASONING_TOKENS`] tokens are reasoning.
    pub(crate) thinks: bool,
    /// Whether the first token is the end of the sequence.
    pub(crate) ends_at_first_token: bool,
    pub(crate) transfer: SimKvTransfer,
    pub(crate) rank: u32,
    pub(crate) timing: ScaledTiming,
    pub(crate) cancel: CancellationToken,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum GenerationFinish {
    Length,
    Stop(Option<String>),
    ToolCalls,
    Abort,
}

/// An engine failure that is reported to the client.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub(crate) struct GenerationError {
    pub(crate) message: String,
}

impl GenerationError {
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self { message: message.into() }
    }
}

/// What a token of the output belongs to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum OutputPart {
    Reasoning,
    #[default]
    Content,
    /// The arguments of the tool call.
    ToolArguments,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OutputToken {
    pub(crate) part: OutputPart,
    pub(crate) text: String,
    pub(crate) id: u32,
}

/// A choice whose prompt is available and that generates.
pub(crate) struct ChoiceGeneration {
    engine: Arc<SimEngineState>,
    rank: u32,
    chain: PageHashChain,
    /// Tokens of `chain`, if the output is cached and published.
    tokens: Vec<u32>,
    namespace: PromptNamespace,
    timing: ScaledTiming,
    cancel: CancellationToken,
    generator: TokenGenerator,
    limit: u32,
    finish_at_limit: GenerationFinish,
    ends_at_first_token: bool,
    /// Number of tokens of reasoning before the rest of the output.
    reasoning_tokens: u32,
    scripted_tokens: Option<VecDeque<String>>,
    stop: Vec<String>,
    recent_text: String,
    generated: u32,
    pacer: Pacer,
    caches_output: bool,
    _batch_permit: Option<OwnedSemaphorePermit>,
    _gauges: [SimGaugeGuard; 2],
    pub(crate) prompt_tokens: usize,
    pub(crate) cached: CachedTokens,
    pub(crate) finish: Option<GenerationFinish>,
}

/// A choice whose prompt has been computed or received.
struct StartedGeneration {
    token_generator: TokenGenerator,
    cached: CachedTokens,
    /// Its slot in the batch.
    permit: Option<OwnedSemaphorePermit>,
}

impl ChoiceGeneration {
    /// Waits for the prompt. Returns a generation that has already ended if the request was aborted by id.
    pub(crate) async fn start(
        engine: &Arc<SimEngineState>,
        job: GenerationJob,
    ) -> Result<Self, GenerationError> {
        engine.stats.update(|stats| {
            if let Some(count) = stats.by_dp_rank.get_mut(job.rank as usize) {
                *count += 1;
            }
        });
        let chain =
            PageHashChain::of(&job.tokens, engine.options.page_size, engine.cache_salt(job.namespace.hash()));
        let cancel = job.cancel.clone();
        tokio::select! {
            biased;
            () = cancel.cancelled() => {
                let token_generator = TokenGenerator::new(chain.fingerprint(), job.choice);
                let started = StartedGeneration {
                    token_generator,
                    cached: CachedTokens::default(),
                    permit: None,
                };
                let mut generation = Self::new(engine, &job, chain, started);
                generation.finish = Some(GenerationFinish::Abort);
                Ok(generation)
            }
            started = Self::start_uncancelled(engine, &job, &chain) => {
                Ok(Self::new(engine, &job, chain, started?))
            }
        }
    }

    async fn start_uncancelled(
        engine: &Arc<SimEngineState>,
        job: &GenerationJob,
        chain: &PageHashChain,
    ) -> Result<StartedGeneration, GenerationError> {
        let own = chain.fingerprint();
        let token_generator = TokenGenerator::new(own, job.choice);
        match &job.transfer {
            SimKvTransfer::Local => {
                let cached = compute_prompt(engine, job, chain).await?;
                let permit = engine.acquire_batch_slot(job.rank).await;
                Ok(StartedGeneration { token_generator, cached, permit })
            }
            SimKvTransfer::Retain { key } => {
                let cached = compute_prompt(engine, job, chain).await?;
                // vLLM's MooncakeConnector drops the blocks of a request that has not ended by length.
                if !(job.ends_at_first_token && engine.options.connector == VllmConnector::Mooncake) {
                    engine.retain_offer(key, job.rank, kv_offer(chain, cached));
                }
                let permit = engine.acquire_batch_slot(job.rank).await;
                Ok(StartedGeneration { token_generator, cached, permit })
            }
            SimKvTransfer::Send { key } => {
                let cached = serve_to_decode(engine, job, chain, key).await?;
                Ok(StartedGeneration { token_generator, cached, permit: None })
            }
            SimKvTransfer::Pull(from) => {
                let permit = engine.acquire_batch_slot(job.rank).await;
                let received = pull_from_prefill(engine, from).await?;
                engine.stats.update(|stats| {
                    stats.kv_received += 1;
                    stats.transferred_tokens += received.prompt_tokens as u64;
                });
                let token_generator = if received.fingerprint == own {
                    token_generator
                } else {
                    engine.stats.update(|stats| stats.prompt_mismatches += 1);
                    TokenGenerator::with_wrong_cache(own, received.fingerprint, job.choice)
                };
                let cached = if from.counts_as_cached {
                    CachedTokens { storage: chain.len(), ..CachedTokens::default() }
                } else {
                    received.cached
                };
                Ok(StartedGeneration { token_generator, cached, permit })
            }
        }
    }

    fn new(
        engine: &Arc<SimEngineState>,
        job: &GenerationJob,
        chain: PageHashChain,
        started: StartedGeneration,
    ) -> Self {
        let StartedGeneration { token_generator: generator, cached, permit } = started;
        let only_first = matches!(job.transfer, SimKvTransfer::Send { .. });
        let scripted_tokens =
            job.tool_call.as_ref().filter(|_| !only_first).map(|tool| tool.argument_tokens(generator));
        let reasoning_tokens = if job.thinks { REASONING_TOKENS } else { 0 };
        let allowed = if only_first { 1 } else { job.max_tokens.unwrap_or(u32::MAX).max(1) };
        let call_tokens = scripted_tokens
            .as_ref()
            .map(|script| u32::try_from(script.len()).unwrap_or(u32::MAX).saturating_add(reasoning_tokens));
        let (limit, finish_at_limit) = match call_tokens {
            _ if job.ends_at_first_token => (1, GenerationFinish::Stop(None)),
            Some(tokens) if tokens <= allowed => (tokens, GenerationFinish::ToolCalls),
            None if allowed == u32::MAX => (generator.natural_length(), GenerationFinish::Stop(None)),
            _ => (allowed, GenerationFinish::Length),
        };
        let used = used_tokens_gauge(engine, chain.len() + limit as usize);
        let caches_output =
            engine.options.role == SimRole::Plain && matches!(job.transfer, SimKvTransfer::Local);
        let publishes = caches_output && engine.needs_page_hashes();
        Self {
            engine: Arc::clone(engine),
            rank: job.rank,
            prompt_tokens: chain.len(),
            chain,
            tokens: if publishes { job.tokens.to_vec() } else { Vec::new() },
            namespace: job.namespace.clone(),
            timing: job.timing.clone(),
            cancel: job.cancel.clone(),
            generator,
            limit,
            finish_at_limit,
            ends_at_first_token: job.ends_at_first_token,
            reasoning_tokens,
            scripted_tokens,
            stop: job.stop.clone(),
            recent_text: String::new(),
            generated: 0,
            pacer: Pacer::start(),
            caches_output,
            _batch_permit: permit,
            _gauges: [running_gauge(engine), used],
            cached,
            finish: None,
        }
    }

    pub(crate) fn generated(&self) -> u32 {
        self.generated
    }

    /// Generates the next token at the engine's pace. `None` when [`ChoiceGeneration::finish`] is set.
    pub(crate) async fn next(&mut self) -> Option<OutputToken> {
        if self.finish.is_some() {
            return None;
        }
        // The prefill produced the first token.
        if self.generated > 0 {
            let (sequences, tokens) = self.engine.stats.read(|stats| (stats.running, stats.used_tokens));
            let step = self.timing.decode_step(sequences, tokens);
            tokio::select! {
                biased;
                () = self.cancel.cancelled() => {}
                () = self.pacer.wait(step) => {}
            }
        }
        if self.cancel.is_cancelled() {
            self.finish_with(GenerationFinish::Abort);
            return None;
        }
        let (part, text) = match &mut self.scripted_tokens {
            _ if self.ends_at_first_token => (OutputPart::Content, String::new()),
            _ if self.generated < self.reasoning_tokens => {
                (OutputPart::Reasoning, self.generator.token_text(u64::from(self.generated)))
            }
            Some(script) => (OutputPart::ToolArguments, script.pop_front().unwrap_or_default()),
            None => (OutputPart::Content, self.generator.token_text(u64::from(self.generated))),
        };
        let id = token_of(&text);
        self.generated += 1;
        self.engine.stats.update(|stats| stats.completion_tokens += 1);
        if self.caches_output {
            self.chain.push(id);
            self.tokens.push(id);
        }
        let text = self.cut_at_stop(text);
        if self.finish.is_none() && self.generated >= self.limit {
            self.finish_with(self.finish_at_limit.clone());
        }
        Some(OutputToken { part, text, id })
    }

    fn cut_at_stop(&mut self, text: String) -> String {
        if self.stop.is_empty() || self.scripted_tokens.is_some() {
            return text;
        }
        let longest = self.stop.iter().map(String::len).max().unwrap_or_default();
        self.recent_text.push_str(&text);
        let hit = self
            .stop
            .iter()
            .find_map(|stop| self.recent_text.find(stop.as_str()).map(|offset| (offset, stop.clone())));
        if let Some((offset, stop)) = hit {
            let before = self.recent_text.len() - text.len();
            self.finish_with(GenerationFinish::Stop(Some(stop)));
            // Text that was sent cannot be retracted. It is ASCII, so byte offsets are character offsets.
            return text.get(..offset.saturating_sub(before)).unwrap_or_default().to_owned();
        }
        if self.recent_text.len() > 2 * longest + 64 {
            let excess = self.recent_text.len() - longest;
            self.recent_text.drain(..excess);
        }
        text
    }

    fn finish_with(&mut self, finish: GenerationFinish) {
        self.finish = Some(finish);
        if self.caches_output {
            let prefix =
                PromptPrefix { chain: &self.chain, tokens: &self.tokens, namespace: &self.namespace };
            self.engine.insert_prefix(self.rank, &prefix);
        }
    }
}
