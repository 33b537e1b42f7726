//! KV events: changes of an engine's cache, published over ZeroMQ as by SGLang and vLLM.
//!
//! The cache identifies pages by the simulator's own cheap ids. Protocol hashes (SHA-256 over tokens) are computed
//! here, only for new pages, and only by engines that publish events.

mod channel;
pub(crate) mod describe;
mod ports;
mod reporter;

use std::net::{Ipv4Addr, SocketAddr};

use mooncake_wire::events::EngineEventFormat;
use moongate_runtime::Supervisor;
use tokio::sync::watch;

use self::channel::{KvEventChannel, KvEventSource};
pub(crate) use self::ports::KvEventPorts;
use self::ports::KvEventSockets;
pub(crate) use self::reporter::{KvEventReporter, PromptPrefix};
use super::{SimEngineError, SimEngineOptions, SimProtocol};

/// Settings of an engine's KV event publisher.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvEventOptions {
    /// Address on which the first data-parallel rank publishes. The others use the next ports, followed by as many
    /// replay sockets. Port 0 selects free ones.
    pub listen: SocketAddr,
    /// First frame of every message.
    pub topic: String,
    /// Number of messages buffered for replays.
    pub buffer_steps: usize,
}

impl Default for KvEventOptions {
    /// Free loopback ports, with the engines' default topic and buffer size.
    fn default() -> Self {
        Self {
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            topic: String::new(),
            buffer_steps: 10_000,
        }
    }
}

/// Opens an engine's event sockets and returns a reporter per rank; none if the engine publishes no events. While
/// `refusing` is true, the sockets are closed.
pub(crate) async fn start(
    config: &SimEngineOptions,
    refusing: &watch::Sender<bool>,
    supervisor: &Supervisor,
) -> Result<(Option<KvEventPorts>, Vec<KvEventReporter>), SimEngineError> {
    let Some(settings) = &config.kv_events else { return Ok((None, Vec::new())) };
    let sender = match config.protocol {
        SimProtocol::Sglang => EngineEventFormat::Sglang,
        SimProtocol::Vllm => EngineEventFormat::Vllm,
    };
    // The settings were validated before.
    let page_tokens = u32::try_from(config.page_size).unwrap_or(u32::MAX);
    let (ports, sockets) = KvEventSockets::open_all(settings, config.dp_size).await?;
    let reporters = (0..).zip(sockets).map(|(rank, sockets)| {
        let source = KvEventSource { sender, rank, ports, sockets };
        let channel = KvEventChannel::start(source, settings, refusing.subscribe(), supervisor);
        KvEventReporter::new(config.protocol, page_tokens, channel)
    });
    Ok((Some(ports), reporters.collect()))
}
