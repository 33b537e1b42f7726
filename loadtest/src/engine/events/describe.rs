//! The engines' HTTP description of their event endpoints.

use serde_json::{Value, json};

use crate::engine::SimEngineState;

/// High-water mark reported by vLLM.
const VLLM_QUEUE: u32 = 100_000;

/// `kv_events` of SGLang's `/server_info`: rank `r` publishes and replays on the first port plus `r`. Null without
/// events. The host is `*`, because SGLang connects instead of binding with any other host; subscribers substitute the
/// engine's host.
pub(crate) fn sglang(engine: &SimEngineState) -> Value {
    let (Some(ports), Some(settings)) = (engine.event_ports, &engine.options.kv_events) else {
        return Value::Null;
    };
    json!({
        "publisher": "zmq",
        "endpoint_host": "*",
        "endpoint_port_base": ports.live.port(), "replay_endpoint_port_base": ports.replay.port(),
        "topic": settings.topic, "block_size": engine.options.page_size, "dp_size": engine.options.dp_size,
    })
}

/// vLLM's `/kv_event_sources`, by rank. The host is `*`, because vLLM connects instead of binding with any other host;
/// subscribers substitute the engine's host.
pub(crate) fn vllm(engine: &SimEngineState) -> Value {
    let (Some(ports), Some(settings)) = (engine.event_ports, &engine.options.kv_events) else {
        return json!({});
    };
    let sources = (0..engine.options.dp_size).map(|rank| {
        let source = json!({
            "enable_kv_cache_events": true, "publisher": "zmq",
            "endpoint": format!("tcp://*:{}", ports.live(rank).port()),
            "replay_endpoint": format!("tcp://*:{}", ports.replay(rank).port()),
            "buffer_steps": settings.buffer_steps, "hwm": VLLM_QUEUE, "max_queue_size": VLLM_QUEUE,
            "topic": settings.topic,
        });
        (rank.to_string(), source)
    });
    Value::Object(sources.collect())
}
