//! Settings of a simulated engine.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use clap::ValueEnum;
use moongate_store_client::KvClient;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::events::KvEventOptions;
use super::l3_store::{L3Backend, LockedPageStore, SimPageStore};
use super::object_store::MooncakePageStore;

/// Phases of a request that an engine executes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SimRole {
    /// Computes the prompt and transfers the KV cache.
    Prefill,
    /// Receives a KV cache and generates.
    Decode,
    /// Computes the prompt and generates.
    Plain,
}

/// Wire protocol of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SimProtocol {
    /// SGLang 0.5.23's HTTP API and pair protocol.
    Sglang,
    /// vLLM 0.32's HTTP API and connectors.
    Vllm,
}

/// How vLLM engines transfer KV caches. SGLang engines have only one way and ignore this.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum VllmConnector {
    /// `NixlConnector`: prefill first, its response names the blocks, decode pulls them.
    Nixl,
    /// `MooncakeConnector`: both legs share a transfer id; the decode finds the prefill by its bootstrap server.
    Mooncake,
    /// `MooncakeStoreConnector`: both sides use the shared store and do not communicate with each other.
    Store,
}

/// Time model. Durations are those of the imitated engine; the simulated engine divides them by
/// [`SimEngineOptions::time_scale`].
///
/// Prefill of `new` tokens after `cached` ones takes `base + linear*new + quadratic*new*(cached + new/2)`. The default
/// constants were fitted to a published HiCache benchmark of Qwen3-235B on four H20 cards.
#[derive(Debug, Clone, PartialEq)]
pub struct EngineTimeModel {
    /// Constant seconds per prefill.
    pub prefill_base_s: f64,
    /// Seconds per new token.
    pub prefill_linear_s: f64,
    /// Seconds per new token and token before it.
    pub prefill_quadratic_s: f64,
    /// Maximum number of tokens of one prefill pass; longer prompts take several, and short ones share a pass.
    pub chunk_tokens: usize,
    /// Seconds per decode step of an empty batch.
    pub decode_base_s: f64,
    /// Seconds that each sequence of the batch adds to a decode step.
    pub decode_per_sequence_s: f64,
    /// Bytes per second from the device's memory: a decode step reads the KV cache of its batch.
    pub device_read_bytes_per_s: f64,
    /// Bytes of KV cache per token.
    pub kv_bytes_per_token: u64,
    /// Bytes per second between prefill and decode.
    pub transfer_bytes_per_s: f64,
    /// Constant seconds per transfer between prefill and decode.
    pub transfer_latency_s: f64,
    /// Bytes per second from host memory to the device.
    pub host_load_bytes_per_s: f64,
    /// Bytes per second from the shared store.
    pub storage_bytes_per_s: f64,
    /// Constant seconds per read from the shared store.
    pub storage_latency_s: f64,
    /// Seconds to load a LoRA adapter.
    pub adapter_load_s: f64,
}

impl Default for EngineTimeModel {
    fn default() -> Self {
        Self {
            prefill_base_s: 0.048,
            prefill_linear_s: 1.027e-4,
            prefill_quadratic_s: 7.19e-9,
            chunk_tokens: 8_192,
            decode_base_s: 0.020,
            decode_per_sequence_s: 0.000_2,
            device_read_bytes_per_s: 12.8e12,
            kv_bytes_per_token: 192_512,
            transfer_bytes_per_s: 25e9,
            transfer_latency_s: 0.002,
            host_load_bytes_per_s: 50e9,
            storage_bytes_per_s: 6.65e9,
            storage_latency_s: 0.002,
            adapter_load_s: 0.0,
        }
    }
}

impl EngineTimeModel {
    /// Seconds to compute `new` tokens after `context` ones, without the constant part of a prefill.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "token counts are far below 2^52")]
    pub fn prefill_compute_s(&self, new: usize, context: usize) -> f64 {
        let (new, context) = (new as f64, context as f64);
        self.prefill_linear_s * new + self.prefill_quadratic_s * new * (context + new / 2.0)
    }

    /// Seconds to transfer the KV cache of this many tokens from prefill to decode.
    #[must_use]
    pub fn transfer_s(&self, tokens: usize) -> f64 {
        self.transfer_latency_s + self.bytes_s(tokens as u64, self.transfer_bytes_per_s)
    }

    /// Tokens that remain to be transferred when a prompt with `new` computed tokens is complete, if its chunks are
    /// transferred as they are computed. The reused part is transferred with the first chunk.
    #[must_use]
    pub fn last_transfer_tokens(&self, tokens: usize, new: usize) -> usize {
        let chunk = self.chunk_tokens.max(1);
        if new <= chunk { tokens } else { (new - 1) % chunk + 1 }
    }

    /// Seconds to read this many tokens from the shared store.
    #[must_use]
    pub fn storage_fetch_s(&self, tokens: usize) -> f64 {
        self.storage_latency_s + self.bytes_s(tokens as u64, self.storage_bytes_per_s)
    }

    /// Seconds to load this many tokens from host memory.
    #[must_use]
    pub fn host_load_s(&self, tokens: usize) -> f64 {
        self.bytes_s(tokens as u64, self.host_load_bytes_per_s)
    }

    /// Seconds of one decode step of this many sequences, which hold this many tokens.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a batch has at most thousands of sequences")]
    pub fn decode_step_s(&self, sequences: u64, tokens: u64) -> f64 {
        self.decode_base_s
            + self.decode_per_sequence_s * sequences as f64
            + self.bytes_s(tokens, self.device_read_bytes_per_s)
    }

    #[expect(clippy::cast_precision_loss, reason = "byte counts are far below 2^52")]
    fn bytes_s(&self, tokens: u64, bytes_per_s: f64) -> f64 {
        tokens.saturating_mul(self.kv_bytes_per_token) as f64 / bytes_per_s.max(1.0)
    }
}

#[derive(Debug, Clone)]
pub struct SimEngineOptions {
    pub role: SimRole,
    /// Wire protocol of the engine.
    pub protocol: SimProtocol,
    /// How a vLLM engine transfers KV caches.
    pub connector: VllmConnector,
    /// Listen address. Port 0 selects a free one.
    pub listen: SocketAddr,
    /// Listen address of its bootstrap server (SGLang, Mooncake) or side channel (NIXL); `None` selects a free port on
    /// the host of [`SimEngineOptions::listen`]. Only prefill engines have one.
    pub bootstrap_listen: Option<SocketAddr>,
    /// Host that other engines use to reach the bootstrap server; `None` is the listen address.
    pub advertise_host: Option<String>,
    /// Number of data-parallel ranks. Each has its own queue and cache.
    pub dp_size: u32,
    pub model: String,
    /// Model path that it reports for model and tokenizer; `None` is the served name.
    pub model_path: Option<String>,
    /// Whether a vLLM engine serves `…/render` (`--enable-scale-out`).
    pub scale_out: bool,
    /// Tokens per page (SGLang) or block (vLLM).
    pub page_size: usize,
    /// Whether a prefill pass takes tokens of several prompts, up to the chunk size.
    pub packed: bool,
    /// An SGLang engine sends its first token at once and then one event per this many tokens (`--stream-interval`).
    pub stream_interval: u32,
    /// Maximum prompt length in tokens.
    pub context_tokens: usize,
    /// Maximum number of running requests per rank; more wait.
    pub max_running: usize,
    /// Divides every duration of [`SimEngineOptions::service`].
    pub time_scale: f64,
    pub service: EngineTimeModel,
    /// Device cache per rank in tokens.
    pub device_tokens: usize,
    /// Host cache per rank in tokens; 0 disables it.
    pub host_tokens: usize,
    /// Whether an SGLang engine uses the fleet's shared store. vLLM engines use it with [`VllmConnector::Store`].
    pub use_storage: bool,
    /// How long one leg of a pair waits for the other. Like the next two, this is wall-clock time and not scaled.
    /// `None` is the engine's default: 300 s for SGLang, 480 s for vLLM.
    pub bootstrap_timeout: Option<Duration>,
    /// How long an SGLang decode engine tries to reach the bootstrap server before it returns 500.
    pub handshake_timeout: Duration,
    /// Time after start during which a prefill engine's bootstrap server returns 503.
    pub ready_after: Duration,
    /// How the engine publishes KV events; `None` disables them, and then no page is hashed.
    pub kv_events: Option<KvEventOptions>,
    /// Whether responses are stored for retrieval and continuation: vLLM's `VLLM_ENABLE_RESPONSES_API_STORE=1` and
    /// SGLang's `--enable-response-store`, which only plain engines have.
    pub response_store: bool,
    /// Whether the model generates its end-of-sequence token first, unless the request forbids it.
    pub ends_at_first_token: bool,
    /// Maximum number of loaded LoRA adapters of an SGLang engine (`--max-loaded-loras`): a further one evicts the least
    /// recently used. vLLM engines keep all in their list.
    pub max_loaded_adapters: Option<usize>,
    /// Version that the engine reports; `None`: that of the API.
    pub reported_version: Option<String>,
    /// Canned chat completions instead of generated ones.
    pub canned: Option<CannedCompletions>,
}

/// Responses that cost almost no CPU: nothing is tokenized, computed, transferred or recorded. For measuring a gateway
/// whose engines share the machine. A request with the member `"user":"itl-ms-N"` overrides the latency.
#[derive(Debug, Clone, Copy, Default)]
pub struct CannedCompletions {
    /// Time between two tokens of a stream; zero sends at full speed.
    pub inter_token_latency: Duration,
}

impl SimEngineOptions {
    /// An engine on a free loopback port with the calibrated time model.
    #[must_use]
    pub fn new(role: SimRole, protocol: SimProtocol) -> Self {
        Self {
            role,
            protocol,
            connector: VllmConnector::Nixl,
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            bootstrap_listen: None,
            advertise_host: None,
            dp_size: 1,
            model: "sim".to_owned(),
            model_path: None,
            scale_out: false,
            page_size: if protocol == SimProtocol::Vllm { 16 } else { 64 },
            packed: true,
            stream_interval: 1,
            context_tokens: 1_000_000,
            max_running: 256,
            time_scale: 1.0,
            service: EngineTimeModel::default(),
            device_tokens: 360_000,
            host_tokens: 0,
            use_storage: false,
            bootstrap_timeout: None,
            handshake_timeout: Duration::from_secs(14),
            ready_after: Duration::ZERO,
            kv_events: None,
            response_store: false,
            ends_at_first_token: false,
            max_loaded_adapters: None,
            reported_version: None,
            canned: None,
        }
    }

    /// The same engine a thousand times faster, for tests.
    #[must_use]
    pub fn fast(mut self) -> Self {
        self.time_scale = 1_000.0;
        self
    }

    /// Reported path of the model.
    pub(crate) fn model_path(&self) -> &str {
        self.model_path.as_deref().unwrap_or(&self.model)
    }

    /// How long one leg waits for the other.
    pub(crate) fn pair_timeout(&self) -> Duration {
        let engines_own = match self.protocol {
            SimProtocol::Sglang => Duration::from_secs(300),
            SimProtocol::Vllm => Duration::from_secs(480),
        };
        self.bootstrap_timeout.unwrap_or(engines_own)
    }

    pub(crate) fn uses_l3_store(&self) -> bool {
        match self.protocol {
            SimProtocol::Sglang => self.use_storage,
            SimProtocol::Vllm => self.connector == VllmConnector::Store,
        }
    }

    pub(crate) fn validate(&self) -> Result<(), SimEngineError> {
        let invalid = |what| Err(SimEngineError::Config(what));
        if self.dp_size == 0 || self.dp_size > 1_024 {
            return invalid("dp-size must be between 1 and 1024");
        }
        if self.page_size == 0 {
            return invalid("page-size must be at least 1");
        }
        if self.max_running == 0 {
            return invalid("max-running must be at least 1");
        }
        if !(self.time_scale.is_finite() && self.time_scale > 0.0) {
            return invalid("time-scale must be a number above 0; 10 means ten times faster");
        }
        if self.kv_events.is_some() && self.page_size > moongate_block_hash::MAX_BLOCK_TOKENS as usize {
            return invalid("page-size must be at most 8192 with KV events");
        }
        if self.canned.is_some() && self.protocol != SimProtocol::Sglang {
            return invalid("canned completions are available with SGLang's protocol only");
        }
        if self.response_store && self.protocol == SimProtocol::Sglang && self.role != SimRole::Plain {
            return invalid("SGLang's prefill and decode engines have no response store");
        }
        if self.stream_interval == 0 {
            return invalid("stream-interval must be at least 1");
        }
        if self.service.chunk_tokens == 0 {
            return invalid("chunk-tokens must be at least 1");
        }
        Ok(())
    }
}

/// Why a simulated engine could not start.
#[derive(Debug, thiserror::Error)]
pub enum SimEngineError {
    /// A setting is out of range.
    #[error("cannot start the engine: {0}")]
    Config(&'static str),
    /// An address could not be bound.
    #[error("cannot listen on {address}: {source}; is another process using it?")]
    Listen { address: SocketAddr, source: std::io::Error },
    /// An event socket could not be opened.
    #[error("cannot publish KV events on {address}: {source}; is another process using it?")]
    Events {
        /// The first rank's address, as configured.
        address: SocketAddr,
        source: moongate_zmtp::ZmtpError,
    },
    /// The HTTP client for KV transfers could not be created.
    #[error("cannot create the transfer client: {0}")]
    Client(#[from] reqwest::Error),
}

/// State shared by engines of one process: the L3 store. Prefill and decode communicate over HTTP, so pairs also work
/// across processes; a simulated store does not.
#[derive(Debug, Clone)]
pub struct SharedL3Store {
    pages: Arc<LockedPageStore>,
    mooncake: Option<MooncakePageStore>,
}

impl SharedL3Store {
    /// A fleet whose shared store holds this many tokens; 0 disables it.
    #[must_use]
    pub fn new(storage_tokens: usize) -> Self {
        Self { pages: Arc::new(Mutex::new(SimPageStore::new(storage_tokens as u64))), mooncake: None }
    }

    /// A fleet that stores its pages in a real Mooncake store, which engines of other processes can share.
    #[must_use]
    pub fn with_mooncake(client: KvClient) -> Self {
        Self { mooncake: Some(MooncakePageStore::new(client)), ..Self::new(0) }
    }

    /// Number of tokens in the simulated store.
    #[must_use]
    pub fn storage_used_tokens(&self) -> u64 {
        self.pages.lock().used()
    }

    pub fn clear_storage(&self) {
        self.pages.lock().clear();
    }

    /// The simulated store, which may have no capacity.
    pub(crate) fn page_store(&self) -> Arc<LockedPageStore> {
        Arc::clone(&self.pages)
    }

    pub(crate) fn backend(&self) -> Option<L3Backend<'_>> {
        if let Some(objects) = &self.mooncake {
            return Some(L3Backend::Objects(objects));
        }
        (self.pages.lock().capacity() > 0).then_some(L3Backend::Simulated(&self.pages))
    }
}

impl Default for SharedL3Store {
    fn default() -> Self {
        Self::new(0)
    }
}
