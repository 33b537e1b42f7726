//! Finds the addresses at which engines publish KV events.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::http::ProbeSession;
use super::responses::{SglangServerInfo, embedded};
use crate::kv_cache::{KvEventSource, MAX_RANKS};
use crate::listing::ListedInstance;
use crate::tcp_address::TcpAddress;

/// Longest accepted topic in bytes; real topics contain a host and a model.
const MAX_TOPIC: usize = 1024;
/// Default address of both engines if their configuration has none.
const DEFAULT_ENDPOINT: &str = "tcp://*:5557";

/// SGLang's `kv_events` of `/server_info`: intended for routers, with the effective ports.
#[derive(Deserialize)]
struct KvEventsDescriptor {
    publisher: String,
    endpoint_host: String,
    endpoint_port_base: u16,
    #[serde(default)]
    replay_endpoint_port_base: Option<u16>,
    #[serde(default)]
    topic: String,
    #[serde(default)]
    dp_size: Option<u32>,
}

/// `--kv-events-config` of SGLang, and one rank in vLLM's `/kv_event_sources`: the same members.
#[derive(Deserialize)]
struct KvEventsConfig {
    #[serde(default)]
    enable_kv_cache_events: Option<bool>,
    #[serde(default)]
    publisher: Option<String>,
    #[serde(default)]
    endpoint: Option<String>,
    #[serde(default)]
    replay_endpoint: Option<String>,
    #[serde(default)]
    topic: Option<String>,
    /// SGLang's format of events.
    #[serde(default)]
    format: Option<String>,
}

impl KvEventsConfig {
    fn replay(&self) -> Option<TcpAddress> {
        self.replay_endpoint.as_deref().and_then(TcpAddress::parse)
    }
}

fn source(
    dp_rank: u32,
    endpoint: &TcpAddress,
    replay: Option<&TcpAddress>,
    topic: &str,
    host: &str,
) -> Option<KvEventSource> {
    (topic.len() <= MAX_TOPIC).then(|| KvEventSource {
        dp_rank,
        endpoint: endpoint.reached_at(host),
        engine_binds: endpoint.is_bound_by_engine(),
        replay: replay.map(|address| address.reached_at(host)),
        topic: topic.to_owned(),
    })
}

/// SGLang: the descriptor, or the configuration of an older version without one. The replay address may be in the configuration alone.
pub(super) fn sglang(info: &SglangServerInfo, host: &str) -> Vec<KvEventSource> {
    let configured: Option<KvEventsConfig> = embedded(info.kv_events_config.as_ref());
    let descriptor: Option<KvEventsDescriptor> = embedded(info.kv_events.as_ref());
    let described = descriptor.as_ref().and_then(|reported| {
        TcpAddress::from_host_port(&reported.endpoint_host, reported.replay_endpoint_port_base?)
    });
    let replay = described.or_else(|| configured.as_ref().and_then(KvEventsConfig::replay));
    let reported = match (&descriptor, &configured) {
        (Some(reported), _) if reported.publisher == "zmq" => {
            TcpAddress::from_host_port(&reported.endpoint_host, reported.endpoint_port_base)
                .map(|first| (first, reported.topic.as_str(), reported.dp_size))
        }
        // Without a publisher, SGLang publishes nothing.
        (None, Some(given)) if given.publisher.as_deref() == Some("zmq") => {
            TcpAddress::parse(given.endpoint.as_deref().unwrap_or(DEFAULT_ENDPOINT))
                .map(|first| (first, given.topic.as_deref().unwrap_or_default(), None))
        }
        _ => None,
    };
    let Some((first, topic, ranks)) = reported else { return Vec::new() };
    (0..ranks.or(info.dp_size).unwrap_or(1).clamp(1, MAX_RANKS))
        .filter_map(|rank| {
            let replay = replay.as_ref().and_then(|first| first.of_rank(rank));
            source(rank, &first.of_rank(rank)?, replay.as_ref(), topic, host)
        })
        .collect()
}

/// SGLang's format of events, if one is configured.
pub(super) fn sglang_format(info: &SglangServerInfo) -> Option<String> {
    embedded::<KvEventsConfig>(info.kv_events_config.as_ref())?.format
}

/// vLLM's `/kv_event_sources`, requested only if the sources are not declared. Older versions do not have the path. `None` if there is no
/// usable response, which does not make the engine unusable.
pub(super) async fn vllm(
    session: &mut ProbeSession<'_>,
    listed: &ListedInstance,
) -> Option<Vec<KvEventSource>> {
    if listed.declared.kv.events.is_some() {
        return None;
    }
    let response = session.get(format!("{}/kv_event_sources", listed.url)).await.ok();
    let sources = response.and_then(|response| match response.status {
        200 => Some(sources(&response.body, &listed.host)),
        404 => Some(Vec::new()),
        _ => None,
    });
    session.set_conclusion(match sources.as_ref().map(Vec::len) {
        None => "does not report KV events".to_owned(),
        Some(0) => "no KV events".to_owned(),
        Some(ranks) => format!("KV events of {ranks} data-parallel rank(s)"),
    });
    sources
}

/// `{"<dp rank>": {"publisher": "zmq", "endpoint": "tcp://*:5557", …}}`, each rank with its own port.
pub(super) fn sources(body: &[u8], host: &str) -> Vec<KvEventSource> {
    let ranks: BTreeMap<u32, KvEventsConfig> = serde_json::from_slice(body).unwrap_or_default();
    ranks
        .iter()
        .take(MAX_RANKS as usize)
        .filter(|(_, reported)| {
            reported.enable_kv_cache_events != Some(false)
                && reported.publisher.as_deref().is_none_or(|name| name == "zmq")
        })
        .filter_map(|(rank, reported)| {
            let endpoint = TcpAddress::parse(reported.endpoint.as_deref()?)?;
            source(
                *rank,
                &endpoint,
                reported.replay().as_ref(),
                reported.topic.as_deref().unwrap_or_default(),
                host,
            )
        })
        .collect()
}

/// The declared sources, which override those that the engine reported.
pub(super) fn with_declared(
    listed: &ListedInstance,
    dp_size: u32,
    reported: Option<Vec<KvEventSource>>,
) -> Option<Vec<KvEventSource>> {
    let of_rank = |text: &Option<String>, rank: u32| {
        text.as_deref()
            .and_then(TcpAddress::parse)?
            .of_rank(rank)
            .map(|address| address.reached_at(&listed.host))
    };
    let declared = &listed.declared.kv;
    let mut sources = if declared.events.is_some() {
        let reached = |dp_rank| {
            let endpoint = of_rank(&declared.events, dp_rank)?;
            Some(KvEventSource { dp_rank, endpoint, engine_binds: true, replay: None, topic: String::new() })
        };
        (0..dp_size.min(MAX_RANKS)).filter_map(reached).collect()
    } else {
        reported?
    };
    for source in &mut sources {
        source.replay = of_rank(&declared.replay, source.dp_rank).or(source.replay.take());
    }
    Some(sources)
}

#[cfg(test)]
#[path = "events_tests.rs"]
mod tests;
