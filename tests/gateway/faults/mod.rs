//! The fault table: whatever an engine or a client does, the client receives a correct response or a typed error in time,
//! the twin leg is stopped at once, nothing leaks, and no stream ends as if it were complete.

mod grey;

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::harness::TEST_TIMEOUT;
use crate::harness::client_api::ClientApi;
use clap::Parser;
use futures_util::StreamExt as _;
use futures_util::future::join_all;
use moongate_gateway::{GatewayOptions, RunningGateway};
use moongate_loadtest::engine::{
    EngineFault, SharedL3Store, SimEngine, SimEngineOptions, SimProtocol, SimRole, VllmConnector,
};
use moongate_runtime::Supervisor;
use moongate_telemetry::Tracer;
use serde_json::Value;

/// Time limit of each leg where silence is tested. Healthy requests must fit too, on a busy machine.
const SILENT_LEG_TIMEOUT: Duration = Duration::from_secs(3);
/// Time limit of each leg elsewhere: so long that nothing which ends in time has been ended by it.
const LEG_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit of each leg where clients leave: it ends the prefill that must not be cancelled.
const ABANDONED_LEG_TIMEOUT: Duration = Duration::from_secs(6);
/// A fault must be answered within this, on a busy machine, silence within this after the leg's limit.
const RESPONSE_DEADLINE: Duration = Duration::from_secs(10);
/// The twin of a failed leg must be aborted within this time after the client's error, well before its own limit would end it.
const TWIN_ABORT_DEADLINE: Duration = Duration::from_secs(2);

#[derive(Debug, Parser)]
struct FaultTestArgs {
    #[command(flatten)]
    gateway: GatewayOptions,
}

/// Engines with a gateway in front of them.
struct FaultTestFleet {
    prefills: Vec<SimEngine>,
    decodes: Vec<SimEngine>,
    gateway: RunningGateway,
    supervisor: Supervisor,
    idle_tasks: usize,
    client: reqwest::Client,
    model: String,
    api: ClientApi,
}

#[derive(Debug, Clone, Copy)]
struct EngineProtocolCase {
    name: &'static str,
    face: SimProtocol,
    connector: VllmConnector,
    api: ClientApi,
}

impl EngineProtocolCase {
    const fn with_api(self, name: &'static str, api: ClientApi) -> Self {
        Self { name, api, ..self }
    }
}

const PROTOCOLS: [EngineProtocolCase; 4] = [
    EngineProtocolCase {
        name: "sglang",
        face: SimProtocol::Sglang,
        connector: VllmConnector::Nixl,
        api: ClientApi::Chat,
    },
    EngineProtocolCase {
        name: "vllm nixl",
        face: SimProtocol::Vllm,
        connector: VllmConnector::Nixl,
        api: ClientApi::Chat,
    },
    EngineProtocolCase {
        name: "vllm mooncake",
        face: SimProtocol::Vllm,
        connector: VllmConnector::Mooncake,
        api: ClientApi::Chat,
    },
    EngineProtocolCase {
        name: "vllm store",
        face: SimProtocol::Vllm,
        connector: VllmConnector::Store,
        api: ClientApi::Chat,
    },
];

const RESPONSES: [EngineProtocolCase; 4] = [
    PROTOCOLS[0].with_api("sglang, responses", ClientApi::Responses),
    PROTOCOLS[1].with_api("vllm nixl, responses", ClientApi::Responses),
    PROTOCOLS[2].with_api("vllm mooncake, responses", ClientApi::Responses),
    PROTOCOLS[3].with_api("vllm store, responses", ClientApi::Responses),
];

const MESSAGES: [EngineProtocolCase; 4] = [
    PROTOCOLS[0].with_api("sglang, messages", ClientApi::Messages),
    PROTOCOLS[1].with_api("vllm nixl, messages", ClientApi::Messages),
    PROTOCOLS[2].with_api("vllm mooncake, messages", ClientApi::Messages),
    PROTOCOLS[3].with_api("vllm store, messages", ClientApi::Messages),
];

impl FaultTestFleet {
    async fn start(protocol: EngineProtocolCase, pairs: usize, leg: Duration) -> Self {
        Self::start_with(protocol, pairs, leg, |config| config.fast()).await
    }

    async fn start_with(
        protocol: EngineProtocolCase,
        pairs: usize,
        leg: Duration,
        tune: impl Fn(SimEngineOptions) -> SimEngineOptions,
    ) -> Self {
        let fleet = SharedL3Store::new(1 << 20);
        let mut engines = [Vec::new(), Vec::new()];
        for (role, list) in [SimRole::Prefill, SimRole::Decode].into_iter().zip(&mut engines) {
            for _ in 0..pairs {
                let mut config = tune(SimEngineOptions::new(role, protocol.face));
                config.connector = protocol.connector;
                list.push(SimEngine::start_with_store(config, &fleet).await.unwrap());
            }
        }
        let [prefills, decodes] = engines;
        let connector = match protocol.connector {
            VllmConnector::Nixl => "nixl",
            VllmConnector::Mooncake => "mooncake",
            VllmConnector::Store => "store",
        };
        let mut args: Vec<String> =
            ["gateway", "--listen=127.0.0.1:0", "--admin-listen=127.0.0.1:0", "--health-interval=0s"]
                .map(str::to_owned)
                .to_vec();
        let limits = ["prefill", "first-byte", "response", "idle"];
        args.extend(limits.map(|name| format!("--{name}-timeout={}s", leg.as_secs())));
        if protocol.face == SimProtocol::Vllm {
            args.push(format!("--kv-connector={connector}"));
        }
        for engine in &prefills {
            let port =
                engine.bootstrap_addr().map(|address| format!(",{}", address.port())).unwrap_or_default();
            args.push(format!("--prefill={}{port}", engine.url()));
        }
        args.extend(decodes.iter().map(|engine| format!("--decode={}", engine.url())));
        let options = FaultTestArgs::parse_from(args).gateway;
        let supervisor = Supervisor::new();
        let gateway = moongate_gateway::start(&options, Tracer::disabled(), &supervisor).await.unwrap();
        let mut topology = gateway.topology.clone();
        let all_usable = topology.wait_for(|t| t.instances.iter().all(|i| i.usable_facts().is_some()));
        tokio::time::timeout(TEST_TIMEOUT, all_usable).await.expect("all engines become usable");
        wait_until("the gateway is ready", || gateway.is_ready()).await;
        let model = prefills[0].options().model.clone();
        let tasks_at_rest = supervisor.running_tasks();
        // A connection for each request, so that open connections can be counted.
        let client = reqwest::Client::builder().no_proxy().pool_max_idle_per_host(0).build().unwrap();
        let api = protocol.api;
        Self { prefills, decodes, gateway, supervisor, idle_tasks: tasks_at_rest, client, model, api }
    }

    fn engines(&self) -> impl Iterator<Item = &SimEngine> {
        self.prefills.iter().chain(&self.decodes)
    }

    async fn post(&self, stream: bool, max_tokens: u32) -> reqwest::Result<reqwest::Response> {
        let body = self.api.body(&self.model, stream, max_tokens);
        let url = format!("http://{}{}", self.gateway.address, self.api.path());
        self.client.post(url).json(&body).send().await
    }

    async fn send(&self, stream: bool) -> FaultTestOutcome {
        let started = Instant::now();
        let outcome = match self.post(stream, 8).await {
            Err(error) => panic!("the gateway itself must answer: {error}"),
            Ok(response) => FaultTestOutcome::read(self.api, response).await,
        };
        FaultTestOutcome { took: started.elapsed(), ended_unix_ms: unix_ms(), ..outcome }
    }

    async fn healthy_response(&self, case: &str, stream: bool) -> String {
        let outcome = self.send(stream).await;
        outcome.answer(stream).unwrap_or_else(|| panic!("{case}: healthy answer, got {outcome:?}"))
    }

    /// No task, connection, booking or engine request may be left.
    async fn assert_idle(&self, case: &str) {
        wait_until_in_case(case, "requests end on all engines", || {
            self.engines().all(|e| e.stats().active == 0)
        })
        .await;
        wait_until_in_case(case, "bookings are taken back", || self.gateway.in_flight() == 0).await;
        wait_until_in_case(case, "client connections close", || self.gateway.connections() == 0).await;
        wait_until_in_case(case, "no engine connection is in use", || {
            let (open, idle) = self.gateway.engine_connections();
            open == idle
        })
        .await;
        wait_until_in_case(case, "tasks end", || self.supervisor.running_tasks() <= self.idle_tasks).await;
        assert_eq!(self.supervisor.panics(), 0, "{case}: a task panicked");
    }

    async fn stop(self) {
        for engine in self.prefills.into_iter().chain(self.decodes) {
            engine.stop().await;
        }
        self.gateway.stop().await;
    }
}

/// The response to a client, as the client observed it.
#[derive(Debug)]
struct FaultTestOutcome {
    api: ClientApi,
    status: u16,
    text: String,
    /// Whether the body ended as HTTP requires.
    clean_end: bool,
    took: Duration,
    ended_unix_ms: u64,
}

impl FaultTestOutcome {
    async fn read(api: ClientApi, response: reqwest::Response) -> Self {
        let status = response.status().as_u16();
        let mut text = String::new();
        let mut clean_end = true;
        let mut body = response.bytes_stream();
        while let Some(piece) = body.next().await {
            match piece {
                Ok(piece) => text.push_str(std::str::from_utf8(&piece).unwrap()),
                Err(_) => clean_end = false,
            }
        }
        Self { api, status, text, clean_end, took: Duration::ZERO, ended_unix_ms: 0 }
    }

    /// The generated text, if the response is complete.
    fn answer(&self, stream: bool) -> Option<String> {
        if self.status != 200 || !self.clean_end {
            return None;
        }
        if !stream {
            return self.api.text(&serde_json::from_str(&self.text).ok()?);
        }
        self.api.is_complete(&self.text).then(|| {
            let payloads = self.text.lines().filter_map(|line| line.strip_prefix("data: "));
            let events = payloads.filter_map(|payload| serde_json::from_str::<Value>(payload).ok());
            events.filter_map(|event| self.api.text_of_event(&event)).collect()
        })
    }

    /// The JSON of an error response, or of the last event of a stream.
    fn error(&self) -> Option<Value> {
        let json = if self.status == 200 {
            self.text.lines().filter_map(|line| line.strip_prefix("data: ")).next_back()?
        } else {
            &self.text
        };
        serde_json::from_str(json).ok()
    }

    /// A correct response, or a typed error that no client can mistake for the end of a response.
    fn assert_right_or_typed(&self, case: &str, stream: bool, right: &str) {
        if let Some(answer) = self.answer(stream) {
            assert_eq!(answer, right, "{case}: a complete answer is the right one");
            return;
        }
        assert!(
            self.error().is_some_and(|error| self.api.knows(&error)),
            "{case}: typed error, got {self:?}"
        );
        if self.status == 200 {
            assert!(!self.clean_end, "{case}: a failed stream must not end like a complete one: {self:?}");
            assert!(!self.api.is_complete(&self.text), "{case}: no regular end after a failure");
        }
    }
}

fn unix_ms() -> u64 {
    u64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis()).unwrap()
}

async fn wait_until(what: &str, condition: impl FnMut() -> bool) {
    wait_until_in_case("", what, condition).await;
}

async fn wait_until_in_case(case: &str, what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + TEST_TIMEOUT;
    while !condition() {
        assert!(Instant::now() < deadline, "{case}: not in time: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

const FAULTS: [(&str, EngineFault); 8] = [
    ("refuses", EngineFault::Refuse),
    ("hangs", EngineFault::Hang),
    ("answers 500", EngineFault::Status500),
    ("dies before the first byte", EngineFault::CloseBeforeFirstByte),
    ("dies mid-stream", EngineFault::DisconnectMidStream { tokens: 3 }),
    ("hangs mid-stream", EngineFault::HangMidStream { tokens: 3 }),
    ("sends garbage", EngineFault::Garbage),
    ("sends a garbage body", EngineFault::GarbageBody),
];

fn is_silence(fault: EngineFault) -> bool {
    matches!(fault, EngineFault::Hang | EngineFault::HangMidStream { .. })
}

/// One pair, so there is nowhere to go: the failure itself is what the client sees. Silent engines are waited for together.
async fn single_pair(protocol: EngineProtocolCase) {
    let mut silent = Vec::new();
    for stream in [true, false] {
        for faulty_prefill in [true, false] {
            for (name, fault) in FAULTS {
                let side = if faulty_prefill { "prefill" } else { "decode" };
                let case = format!("{}, one pair, {side} {name}, stream {stream}", protocol.name);
                let case = single_fault(protocol, case, stream, faulty_prefill, fault);
                if is_silence(fault) {
                    silent.push(case);
                } else {
                    case.await;
                }
            }
        }
    }
    join_all(silent).await;
}

async fn single_fault(
    protocol: EngineProtocolCase,
    case: String,
    stream: bool,
    faulty_prefill: bool,
    fault: EngineFault,
) {
    let leg = if is_silence(fault) { SILENT_LEG_TIMEOUT } else { LEG_TIMEOUT };
    let world = FaultTestFleet::start(protocol, 1, leg).await;
    let right = world.healthy_response(&case, stream).await;
    let (faulty, twin) = if faulty_prefill {
        (&world.prefills[0], &world.decodes[0])
    } else {
        (&world.decodes[0], &world.prefills[0])
    };
    faulty.set_fault(fault);
    let outcome = world.send(stream).await;
    outcome.assert_right_or_typed(&case, stream, &right);
    let limit = if is_silence(fault) { leg + RESPONSE_DEADLINE } else { RESPONSE_DEADLINE };
    assert!(outcome.took < limit, "{case}: took {:?}", outcome.took);
    wait_until_in_case(&case, "the twin is stopped", || twin.stats().active == 0).await;
    if let Some(abort) = twin.stats().aborts.back() {
        let late = abort.at_unix_ms.saturating_sub(outcome.ended_unix_ms);
        assert!(
            Duration::from_millis(late) < TWIN_ABORT_DEADLINE,
            "{case}: twin was stopped {late} ms after the client knew"
        );
    }
    if fault != EngineFault::Refuse {
        world.assert_idle(&case).await;
    }
    assert!(world.engines().all(|e| e.stats().prompt_mismatches == 0), "{case}: both legs carry one prompt");
    faulty.set_fault(EngineFault::None);
    world.stop().await;
}

/// Two pairs: every fault before the first byte, silence apart, is healed by the other pair.
async fn second_pair_retries(protocol: EngineProtocolCase) {
    for stream in [true, false] {
        for faulty_prefill in [true, false] {
            for (name, fault) in FAULTS {
                let mid_stream =
                    stream && !faulty_prefill && matches!(fault, EngineFault::DisconnectMidStream { .. });
                if is_silence(fault) || mid_stream {
                    continue;
                }
                let world = FaultTestFleet::start(protocol, 2, LEG_TIMEOUT).await;
                let side = if faulty_prefill { "prefill" } else { "decode" };
                let case = format!("{}, two pairs, {side} {name}, stream {stream}", protocol.name);
                let right = world.healthy_response(&case, stream).await;
                let faulty = if faulty_prefill { &world.prefills[0] } else { &world.decodes[0] };
                faulty.set_fault(fault);
                for _ in 0..6 {
                    let outcome = world.send(stream).await;
                    assert_eq!(
                        outcome.answer(stream).as_deref(),
                        Some(right.as_str()),
                        "{case}: {outcome:?}"
                    );
                    assert!(outcome.took < RESPONSE_DEADLINE, "{case}: took {:?}", outcome.took);
                }
                if fault != EngineFault::Refuse {
                    world.assert_idle(&case).await;
                }
                world.stop().await;
            }
        }
    }
}

/// The client leaves before the first byte, in a silent stream, and in a flowing stream.
async fn client_disconnects(protocol: EngineProtocolCase) {
    // Slow enough that every moment can be met: about 50 ms to the first token, 20 ms from token to token.
    let world = FaultTestFleet::start_with(protocol, 1, ABANDONED_LEG_TIMEOUT, |config| config).await;
    for moment in ["before the first byte", "while the stream is silent", "while the stream flows"] {
        let case = format!("{}, client leaves {moment}", protocol.name);
        let silent = moment == "while the stream is silent";
        world.decodes[0].set_fault(if silent {
            EngineFault::HangMidStream { tokens: 2 }
        } else {
            EngineFault::None
        });
        if moment == "before the first byte" {
            world.prefills[0].set_fault(EngineFault::Hang);
        } else {
            world.prefills[0].set_fault(EngineFault::None);
        }
        let before: u64 = world.engines().map(|e| e.stats().started).sum();
        let request = world.post(true, 5000);
        if moment == "before the first byte" {
            let mut request = Box::pin(request);
            loop {
                let started = world.engines().map(|e| e.stats().started).sum::<u64>() > before;
                let waited = tokio::time::timeout(Duration::from_millis(20), &mut request).await;
                assert!(waited.is_err(), "{case}: it hangs");
                if started {
                    break;
                }
            }
        } else {
            let mut body = request.await.unwrap().bytes_stream();
            let first = body.next().await.unwrap().unwrap();
            assert!(first.starts_with(b"data: ") || first.starts_with(b"event: "), "{case}");
            if !silent {
                body.next().await.unwrap().unwrap();
            }
        }
        let left = Instant::now();
        // A MooncakeConnector prefill is never cancelled: an abort would block one of its senders for minutes.
        let stops = |engine: &SimEngine| {
            protocol.connector != VllmConnector::Mooncake || engine.options().role == SimRole::Decode
        };
        wait_until_in_case(&case, "the engines stop", || {
            world.engines().filter(|e| stops(e)).all(|e| e.stats().active == 0)
        })
        .await;
        assert!(left.elapsed() < TWIN_ABORT_DEADLINE, "{case}: engines stopped after {:?}", left.elapsed());
        world.assert_idle(&case).await;
    }
    world.stop().await;
}

/// A prefill that restarts has a new engine id at its bootstrap server; the decode returns 500 for the old one. The gateway detects this
/// by itself, and the client does not notice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn vllm_mooncake_prefill_restarts() {
    let mut world = FaultTestFleet::start(PROTOCOLS[2], 1, LEG_TIMEOUT).await;
    let right = world.send(true).await.answer(true).expect("a healthy answer");
    let old = world.prefills.remove(0);
    let mut config = old.options().clone();
    config.listen = old.addr();
    config.bootstrap_listen = old.bootstrap_addr();
    let old_id = old.engine_id().to_owned();
    old.stop().await;
    let new = SimEngine::start(config).await.unwrap();
    assert_ne!(new.engine_id(), old_id);
    world.prefills.push(new);
    let outcome = world.send(true).await;
    assert_eq!(outcome.answer(true).as_deref(), Some(right.as_str()), "{outcome:?}");
    assert!(world.decodes[0].stats().recomputed == 0, "the answer came through the pair");
    world.assert_idle("after a restart").await;
    world.stop().await;
}

macro_rules! for_each_protocol {
    ($($name:ident: $test:ident, $protocol:expr;)*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                $test($protocol).await;
            }
        )*
    };
}

for_each_protocol! {
    sglang_single_pair: single_pair, PROTOCOLS[0];
    sglang_second_pair_heals: second_pair_retries, PROTOCOLS[0];
    sglang_client_leaves: client_disconnects, PROTOCOLS[0];
    vllm_nixl_single_pair: single_pair, PROTOCOLS[1];
    vllm_nixl_second_pair_heals: second_pair_retries, PROTOCOLS[1];
    vllm_nixl_client_leaves: client_disconnects, PROTOCOLS[1];
    vllm_mooncake_single_pair: single_pair, PROTOCOLS[2];
    vllm_mooncake_second_pair_heals: second_pair_retries, PROTOCOLS[2];
    vllm_mooncake_client_leaves: client_disconnects, PROTOCOLS[2];
    vllm_store_single_pair: single_pair, PROTOCOLS[3];
    vllm_store_second_pair_heals: second_pair_retries, PROTOCOLS[3];
    vllm_store_client_leaves: client_disconnects, PROTOCOLS[3];
    sglang_responses_single_pair: single_pair, RESPONSES[0];
    sglang_responses_second_pair_heals: second_pair_retries, RESPONSES[0];
    sglang_responses_client_leaves: client_disconnects, RESPONSES[0];
    sglang_messages_single_pair: single_pair, MESSAGES[0];
    sglang_messages_second_pair_heals: second_pair_retries, MESSAGES[0];
    sglang_messages_client_leaves: client_disconnects, MESSAGES[0];
    vllm_nixl_responses_single_pair: single_pair, RESPONSES[1];
    vllm_nixl_responses_second_pair_heals: second_pair_retries, RESPONSES[1];
    vllm_nixl_responses_client_leaves: client_disconnects, RESPONSES[1];
    vllm_nixl_messages_single_pair: single_pair, MESSAGES[1];
    vllm_nixl_messages_second_pair_heals: second_pair_retries, MESSAGES[1];
    vllm_nixl_messages_client_leaves: client_disconnects, MESSAGES[1];
    vllm_mooncake_responses_single_pair: single_pair, RESPONSES[2];
    vllm_mooncake_messages_single_pair: single_pair, MESSAGES[2];
    vllm_store_responses_single_pair: single_pair, RESPONSES[3];
    vllm_store_messages_single_pair: single_pair, MESSAGES[3];
}
