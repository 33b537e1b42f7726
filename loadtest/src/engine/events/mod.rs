//! KV events: what the engine tells about its cache over ZeroMQ, as SGLang and vLLM do.
//!
//! The cache itself knows pages by the simulator's own cheap ids. Real names (SHA-256 over tokens) are computed here,
//! only for pages that are new, and only by engines that publish.

mod channel;
pub(crate) mod describe;
mod ports;
mod reporter;

use std::net::{Ipv4Addr, SocketAddr};

use mooncake_wire::events::EngineEventFormat;
use moongate_runtime::Supervisor;
use tokio::sync::watch;

use self::channel::KvEventChannel;
pub(crate) use self::ports::KvEventPorts;
use self::ports::KvEventSockets;
pub(crate) use self::reporter::{KvEventReporter, PromptPrefix};
use super::{SimEngineError, SimEngineOptions, SimProtocol};

/// How an engine publishes KV events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvEventOptions {
    /// Where the first data-parallel rank publishes. The others follow on the next ports, and behind them come as many
    /// replay sockets. Port 0 takes free ones.
    pub listen: SocketAddr,
    /// First frame of every message.
    pub topic: String,
    /// Messages kept for a replay.
    pub buffer_steps: usize,
}

impl Default for KvEventOptions {
    /// On free loopback ports, with the engines' own topic and buffer.
    fn default() -> Self {
        Self {
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            topic: String::new(),
            buffer_steps: 10_000,
        }
    }
}

/// Opens an engine's event sockets and gives a reporter for each rank; none if it does not publish. While `refusing` is true, the
/// sockets are closed.
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
    // The settings were checked.
    let page_tokens = u32::try_from(config.page_size).unwrap_or(u32::MAX);
    let (ports, sockets) = KvEventSockets::open_all(settings, config.dp_size).await?;
    let reporters = (0..).zip(sockets).map(|(rank, sockets)| {
        let channel =
            KvEventChannel::start(sender, rank, settings, (ports, sockets), refusing.subscribe(), supervisor);
        KvEventReporter::new(config.protocol, page_tokens, channel)
    });
    Ok((Some(ports), reporters.collect()))
}
