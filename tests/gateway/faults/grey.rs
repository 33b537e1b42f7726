//! Grey engines: they accept requests and pass health checks, and produce nothing. Their requests go elsewhere, new ones avoid them, and
//! a slow engine never becomes suspect.

use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use futures_util::future::join_all;
use moongate_loadtest::engine::{EngineFault, SimEngine, VllmConnector};
use serde_json::json;
use tokio::process::Command;

use super::FaultTestOutcome;
use crate::harness::client_api::ClientApi;
use crate::harness::fleet::{TestFleet, TestFleetBuilder};
use crate::harness::metrics::{metric, metric_at};
use crate::harness::process::{GatewayAddresses, MoongateProcess};
use crate::harness::{TEST_TIMEOUT, client, wait_until};

/// What a request may take that first went to a grey engine. It waits there for two seconds; the rest is for a busy machine. Without
/// redispatch it would take 300 s.
const RESPONSE_DEADLINE: Duration = Duration::from_secs(12);

fn fleets() -> [(&'static str, TestFleetBuilder); 4] {
    [
        ("sglang", TestFleetBuilder::sglang()),
        ("nixl", TestFleetBuilder::vllm(VllmConnector::Nixl)),
        ("mooncake", TestFleetBuilder::vllm(VllmConnector::Mooncake)),
        ("store", TestFleetBuilder::vllm(VllmConnector::Store)),
    ]
}

async fn send(client: &reqwest::Client, url: &str, stream: bool) -> FaultTestOutcome {
    let begun = Instant::now();
    let body = json!({"model": "sim", "prompt": "The quick brown fox", "max_tokens": 8, "stream": stream});
    let response = client.post(format!("{url}/v1/completions")).json(&body).timeout(TEST_TIMEOUT);
    let outcome = FaultTestOutcome::read(ClientApi::Chat, response.send().await.unwrap()).await;
    FaultTestOutcome { took: begun.elapsed(), ..outcome }
}

fn is_complete(outcome: &FaultTestOutcome, stream: bool) -> bool {
    outcome.status == 200 && outcome.clean_end && (!stream || outcome.text.contains("data: [DONE]"))
}

/// Sends `requests` requests, `at_once` at a time. All must succeed.
async fn all_answered(case: &str, world: &TestFleet, requests: usize, at_once: usize) {
    let url = world.gateway.url("");
    for round in 0..requests / at_once {
        let asked = (0..at_once).map(|number| {
            let stream = (round + number) % 2 == 0;
            let (client, url) = (&world.client, &url);
            async move { (stream, send(client, url, stream).await) }
        });
        for (stream, outcome) in join_all(asked).await {
            assert!(is_complete(&outcome, stream), "{case}: {outcome:?}");
            assert!(outcome.took < RESPONSE_DEADLINE, "{case}: took {:?}", outcome.took);
        }
    }
}

/// One of two engines hangs. All requests succeed; once the engine is suspect, it receives trial requests only.
async fn one_hangs(case: &str, world: &TestFleet, grey: &SimEngine) {
    all_answered(case, world, 8, 4).await;
    let before = grey.stats().started;
    grey.set_fault(EngineFault::Hang);
    all_answered(case, world, 24, 4).await;
    let hung = grey.stats().started - before;
    let suspicions = metric_sum(world, "moongate_engine_suspicions_total").await;
    let redispatches = metric_sum(world, "moongate_redispatches_total").await;
    assert!(hung > 0, "{case}: no request met the grey engine");
    assert!(hung <= 8, "{case}: {hung} of 24 requests went to the grey engine");
    assert!(suspicions > 0 && redispatches > 0, "{case}: {suspicions} {redispatches}");
    wait_until(&format!("{case}: the given up legs are stopped"), || {
        // A MooncakeConnector prefill is never cancelled.
        case.contains("mooncake prefill") || world.engines.all().all(|engine| engine.stats().active == 0)
    })
    .await;
    assert_eq!(world.gateway.running.in_flight(), 0, "{case}");
}

/// The sum of a metric over its labels.
async fn metric_sum(world: &TestFleet, name: &str) -> u64 {
    let url = world.gateway.admin_url("/metrics");
    let text = world.client.get(url).send().await.unwrap().text().await.unwrap();
    let lines = text.lines().filter(|line| line.starts_with(name));
    lines.map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()).sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_leave_a_grey_prefill() {
    let cases = fleets().into_iter().map(|(name, fleet)| async move {
        let world = fleet.pairs(2).flag("--policy=round_robin").start().await;
        one_hangs(&format!("{name} prefill"), &world, &world.engines.prefills[0]).await;
    });
    join_all(cases).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_leave_a_grey_decode() {
    let cases = fleets().into_iter().map(|(name, fleet)| async move {
        let world = fleet.pairs(2).flag("--policy=round_robin").start().await;
        one_hangs(&format!("{name} decode"), &world, &world.engines.decodes[0]).await;
    });
    join_all(cases).await;
}

/// With the default policy; and when the engine works again, a trial request finds out, though the policy may like the other one better.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_leave_a_grey_worker_and_come_back() {
    let world = TestFleetBuilder::sglang().plain(2).flag("--breaker-pause=500ms").start().await;
    let grey = &world.engines.workers[0];
    one_hangs("worker", &world, grey).await;
    grey.set_fault(EngineFault::None);
    let before = grey.stats().finished;
    let deadline = Instant::now() + TEST_TIMEOUT;
    while metric_sum(&world, "moongate_engine_suspect{").await > 0 {
        assert!(Instant::now() < deadline, "no trial request finds out that the engine works again");
        all_answered("worker works again", &world, 1, 1).await;
    }
    assert!(grey.stats().finished > before);
}

/// The only prefill is sound, one of two decodes is grey: the prefill must not be given up for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_twin_of_a_grey_engine_is_not_blamed_if_there_is_no_other() {
    let world = TestFleetBuilder::sglang().prefill(1).decode(2).start().await;
    one_hangs("one prefill", &world, &world.engines.decodes[0]).await;
    let before = world.engines.decodes[1].stats().finished;
    all_answered("afterwards", &world, 2, 1).await;
    assert!(world.engines.decodes[1].stats().finished > before);
}

/// Clients that disconnect before the gateway's time limit also make the engine suspect.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_leave_make_an_engine_suspect() {
    let world = TestFleetBuilder::sglang().plain(2).flag("--policy=round_robin").start().await;
    let (grey, url) = (&world.engines.workers[0], world.gateway.url(""));
    all_answered("before", &world, 2, 1).await;
    grey.set_fault(EngineFault::Hang);
    let abandoned = "moongate_engine_suspicions_total{side=\"worker\",reason=\"abandoned\"}";
    let deadline = Instant::now() + TEST_TIMEOUT;
    while metric(&world, abandoned).await == 0 {
        assert!(Instant::now() < deadline, "clients that leave are not noticed");
        let body = json!({"model": "sim", "prompt": "quick", "max_tokens": 8, "stream": true});
        let request = world.client.post(format!("{url}/v1/completions")).json(&body);
        // The grey engine's clients run out of patience before the gateway's two seconds.
        drop(request.timeout(Duration::from_millis(900)).send().await);
    }
    let before = grey.stats().started;
    all_answered("afterwards", &world, 4, 1).await;
    assert!(grey.stats().started <= before + 1, "new requests avoid it, but for one trial");
    assert_eq!(
        metric(&world, "moongate_engine_suspicions_total{side=\"worker\",reason=\"silent\"}").await,
        0
    );
}

/// Long prompts keep both engines silent for longer than the floor, and short ones wait behind them. Nobody is suspected.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn overload_is_no_silence() {
    let cases = ["least_load", "predictive"].map(|policy| async move {
        let fleet = TestFleetBuilder::sglang().plain(2).tune(|config| config);
        let world = fleet.flag(&format!("--policy={policy}")).flag("--load-interval=0s").start().await;
        let url = world.gateway.url("/v1/completions");
        // 15,000 tokens take 2.4 s.
        let lengths = [15_000_u32, 15_000, 200, 200, 15_000, 15_000, 200, 200, 200, 200];
        let asked = lengths.iter().enumerate().map(|(number, length)| {
            let first = u32::try_from(number).unwrap() * 20_000;
            let prompt: Vec<u32> = (first..first + length).collect();
            let body = json!({"model": "sim", "prompt": prompt, "max_tokens": 4, "stream": number % 2 == 0});
            world.client.post(&url).json(&body).send()
        });
        for answer in join_all(asked).await {
            let answer = answer.unwrap();
            assert_eq!(answer.status(), 200, "{policy}");
            drop(answer.text().await.unwrap());
        }
        let noticed = [
            metric_sum(&world, "moongate_engine_suspicions_total").await,
            metric_sum(&world, "moongate_redispatches_total").await,
            metric_sum(&world, "moongate_retries_total").await,
        ];
        assert_eq!(noticed, [0, 0, 0], "{policy}: suspicions, redispatches, retries");
    });
    join_all(cases).await;
}

/// An engine in a process of its own.
async fn engine() -> (MoongateProcess, String) {
    let mut engine = MoongateProcess::start(&["loadtest", "engine", "--listen=127.0.0.1:0"]);
    let line = engine.wait_for_line("simulated engine ready").await;
    let address = line.split_whitespace().find_map(|word| word.strip_prefix("listen=")).unwrap();
    (engine, format!("http://{address}"))
}

async fn stream(client: &reqwest::Client, at: &GatewayAddresses) -> reqwest::Response {
    let body = json!({"model": "sim", "prompt": "go on", "max_tokens": 100_000, "stream": true});
    let url = format!("http://{}/v1/completions", at.public);
    client.post(url).json(&body).send().await.unwrap()
}

async fn signal(engine: &MoongateProcess, name: &str) {
    let sent = Command::new("kill").args([format!("-{name}"), engine.id().to_string()]).status().await;
    assert!(sent.unwrap().success());
}

/// A stopped process: the kernel accepts connections for it. Requests are answered elsewhere, and streams that hang there end with an
/// error instead of hanging for ever. When all engines are stopped, requests wait for them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_engine_loses_its_streams_only() {
    let engines = [engine().await, engine().await];
    let flags = ["--health-interval=1h", "--health-timeout=1s", "--stall-timeout=3s", "--policy=round_robin"];
    let mut all: Vec<String> = flags.map(str::to_owned).to_vec();
    all.extend(engines.iter().map(|(_, url)| format!("--worker={url}")));
    let (_gateway, at) = MoongateProcess::gateway(&all).await;
    let (client, admin) = (client(), format!("http://{}", at.admin));
    let (url, ready) = (format!("http://{}", at.public), format!("{admin}/ready"));
    let deadline = Instant::now() + TEST_TIMEOUT;
    loop {
        let answer = client.get(&ready).send().await.unwrap();
        let ready: serde_json::Value = answer.json().await.unwrap();
        if ready["waiting"].as_array().is_some_and(Vec::is_empty) {
            break;
        }
        assert!(Instant::now() < deadline, "{ready}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let mut streams = Vec::new();
    for _ in 0..6 {
        let mut pieces = stream(&client, &at).await.bytes_stream();
        pieces.next().await.unwrap().unwrap();
        streams.push(pieces);
    }
    signal(&engines[0].0, "STOP").await;
    let stopped = Instant::now();
    let asked = join_all((0..8).map(|number| {
        let (client, url) = (&client, &url);
        async move { (number % 2 == 0, send(client, url, number % 2 == 0).await) }
    }));
    // The other half continues for as long as it is read.
    let ended = join_all(streams.into_iter().map(|mut pieces| async move {
        let mut last = Vec::new();
        while stopped.elapsed() < RESPONSE_DEADLINE {
            match pieces.next().await {
                Some(Ok(piece)) => last = piece.to_vec(),
                Some(Err(_)) => return Some(String::from_utf8(last).unwrap()),
                None => panic!("a stream ended as if it were complete"),
            }
        }
        None
    }));
    let (asked, ended) = tokio::join!(asked, ended);
    for (stream, outcome) in &asked {
        assert!(is_complete(outcome, *stream) && outcome.took < RESPONSE_DEADLINE, "{outcome:?}");
    }
    let broken: Vec<_> = ended.iter().flatten().collect();
    assert_eq!(broken.len(), 3, "{ended:?}");
    assert!(broken.iter().all(|last| last.contains("engine_timeout")), "{broken:?}");

    signal(&engines[1].0, "STOP").await;
    let waiting = send(&client, &url, true);
    let woken = async {
        let suspects = || async {
            let text = client.get(format!("{admin}/metrics")).send().await.unwrap().text().await.unwrap();
            text.lines()
                .filter(|line| line.starts_with("moongate_engine_suspect{") && line.ends_with(" 1"))
                .count()
        };
        let deadline = Instant::now() + TEST_TIMEOUT;
        while suspects().await < 2 {
            assert!(Instant::now() < deadline, "both are silent");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        signal(&engines[0].0, "CONT").await;
        signal(&engines[1].0, "CONT").await;
    };
    let (waited, ()) = tokio::join!(waiting, woken);
    assert!(is_complete(&waited, true), "{waited:?}");
    assert!(metric_at(&client, &admin, "moongate_redispatch_budget_exhausted_total").await == 0);
}
