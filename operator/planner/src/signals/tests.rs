//! Tests of the conversion from metrics to signals.

use crate::gateway_metrics::NotGatewayMetrics;
use crate::scrape::ScrapeError;

use super::*;

const SETTINGS: SignalSettings = SignalSettings {
    roles: (ScaledRole::Prefill, ScaledRole::Decode),
    ttft_target_s: 1.0,
    tpot_target_s: 0.05,
    share: 0.9,
    first_prefill_tokens_per_s: Some(10_000.0),
    decode_kv_tokens: None,
};

/// What a gateway has counted, and its load.
#[derive(Clone, Copy, Default)]
struct Gateway {
    prompt: u32,
    cached: u32,
    generated: u32,
    completed: u32,
    overloaded: u32,
    in_flight: u32,
    queued: u32,
    /// Prompt tokens without a first token, per prefill engine.
    pending: [u32; 2],
    decoding: u32,
    fast_tokens: u32,
    slow_tokens: u32,
    late_chunks: u32,
    chunks: u32,
}

impl Gateway {
    fn text(&self) -> String {
        let Self { prompt, cached, generated, completed, overloaded, in_flight, queued, pending, .. } = self;
        let Self { decoding, fast_tokens, slow_tokens, late_chunks, chunks, .. } = self;
        let (first_tokens, gaps) = (fast_tokens + slow_tokens, chunks + late_chunks);
        format!(
            "moongate_prompt_tokens_total {prompt}
moongate_cached_tokens_total {cached}
moongate_completion_tokens_total {generated}
moongate_requests_total{{api=\"chat\",code=\"ok\"}} {completed}
moongate_requests_total{{api=\"chat\",code=\"overloaded\"}} {overloaded}
moongate_requests_in_flight {in_flight}
moongate_requests_queued {queued}
moongate_ttft_seconds_bucket{{le=\"1.0\",api=\"chat\"}} {fast_tokens}
moongate_ttft_seconds_bucket{{le=\"2.0\",api=\"chat\"}} {first_tokens}
moongate_ttft_seconds_bucket{{le=\"+Inf\",api=\"chat\"}} {first_tokens}
moongate_itl_seconds_bucket{{le=\"0.05\"}} {chunks}
moongate_itl_seconds_bucket{{le=\"0.1\"}} {gaps}
moongate_itl_seconds_bucket{{le=\"+Inf\"}} {gaps}
moongate_engine_up{{instance=\"a\",role=\"prefill\"}} 1
moongate_engine_up{{instance=\"b\",role=\"prefill\"}} 1
moongate_engine_up{{instance=\"c\",role=\"decode\"}} 1
moongate_engine_pending_prefill_tokens{{instance=\"a\",role=\"prefill\"}} {}
moongate_engine_pending_prefill_tokens{{instance=\"b\",role=\"prefill\"}} {}
moongate_engine_requests_in_flight{{instance=\"c\",role=\"decode\"}} {decoding}
moongate_engine_active_decode_tokens{{instance=\"c\",role=\"decode\"}} 3000
",
            pending[0], pending[1]
        )
    }
}

fn address(index: u16) -> GatewayAddress {
    ("http://gateways:9000/metrics".to_owned(), Some(([10, 0, 0, 1], index).into()))
}

fn round(texts: &[&str]) -> ScrapeRound {
    let samples = texts.iter().map(|text| GatewaySample::parse(text.as_bytes()).map_err(ScrapeError::from));
    (0..).map(address).zip(samples).collect()
}

/// Signals of the second of two rounds of one gateway, ten seconds apart.
fn between(before: Gateway, after: Gateway) -> PlannerInput {
    let mut converter = SignalConverter::default();
    assert_eq!(converter.convert(0.0, round(&[&before.text()]), &SETTINGS), PlannerInput::at(0.0));
    converter.convert(10.0, round(&[&after.text()]), &SETTINGS)
}

fn near(value: Option<f64>, expected: f64) {
    let value = value.unwrap();
    assert!((value - expected).abs() < 1e-6 * expected.abs().max(1.0), "{value}, not {expected}");
}

/// Ten completed requests of 1,000 computed prompt tokens and 20 generated ones.
const BEFORE: Gateway = Gateway {
    prompt: 20_000,
    cached: 10_000,
    generated: 200,
    completed: 10,
    overloaded: 0,
    in_flight: 4,
    queued: 0,
    pending: [0, 0],
    decoding: 4,
    fast_tokens: 10,
    slow_tokens: 0,
    late_chunks: 0,
    chunks: 190,
};

/// Ten more of them in ten seconds.
fn after() -> Gateway {
    Gateway {
        prompt: 40_000,
        cached: 20_000,
        generated: 400,
        completed: 20,
        fast_tokens: 19,
        slow_tokens: 1,
        late_chunks: 19,
        chunks: 361,
        ..BEFORE
    }
}

#[test]
fn steady_counters_become_rates() {
    let input = between(BEFORE, after());
    near(input.requests_per_s, 1.0);
    near(input.prefill.arriving_tokens_per_s, 1_000.0);
    near(input.prefill.computed_tokens_per_s, 1_000.0);
    near(input.prefill.cache_hit_share, 0.5);
    near(input.prefill.queued_work_s, 0.0);
    near(input.prefill.busy_share, 0.0);
    // Nine of ten first tokens took up to 1 s.
    near(input.prefill.within_target_share, 0.9);
    near(input.prefill.ttft_s, 1.0);
    near(input.decode.generated_tokens_per_s, 20.0);
    near(input.decode.running, 4.0);
    near(input.decode.waiting, 0.0);
    near(input.decode.within_target_share, 0.9);
    near(input.decode.tpot_s, 0.05);
    assert_eq!(input.decode.kv_occupancy, Some(0.0), "by configuration it does not limit");
}

#[test]
fn demand_rises_before_requests_end() {
    let more = Gateway { in_flight: 24, pending: [12_000, 0], overloaded: 5, ..after() };
    let input = between(BEFORE, more);
    // 10 ended, 20 more are in flight, 5 were rejected.
    near(input.requests_per_s, 3.5);
    near(input.prefill.arriving_tokens_per_s, 3_500.0);
    // 30 were accepted, and 12,000 tokens of them wait.
    near(input.prefill.computed_tokens_per_s, 1_800.0);
    near(input.prefill.busy_share, 0.25);
    // 18,000 tokens in 10 s, half an engine busy.
    near(input.prefill.queued_work_s, 12_000.0 / 3_600.0);
}

#[test]
fn queued_requests_wait_for_decode_while_a_prefill_is_idle() {
    let input = between(BEFORE, Gateway { queued: 6, in_flight: 10, pending: [5_000, 0], ..after() });
    near(input.decode.waiting, 6.0);
    let input = between(BEFORE, Gateway { queued: 6, in_flight: 10, pending: [5_000, 5_000], ..after() });
    near(input.decode.waiting, 0.0);
    // 16 were accepted; 6 of them and 10,000 tokens wait.
    near(input.prefill.computed_tokens_per_s, 0.0);
    near(input.prefill.queued_work_s, 16_000.0 / 10_000.0);
}

#[test]
fn no_request_is_no_demand_and_no_latency() {
    let input = between(BEFORE, BEFORE);
    assert_eq!((input.requests_per_s, input.prefill.arriving_tokens_per_s), (Some(0.0), Some(0.0)));
    assert_eq!(input.decode.generated_tokens_per_s, Some(0.0));
    assert_eq!(
        (input.prefill.ttft_s, input.decode.tpot_s, input.prefill.cache_hit_share),
        (None, None, None)
    );
}

#[test]
fn a_changed_or_unreachable_gateway_makes_signals_missing() {
    let (first, second) = (BEFORE.text(), after().text());
    let restarted = Gateway { prompt: 10, ..Gateway::default() }.text();
    let failed = |round: &mut ScrapeRound| {
        round.insert(address(1), Err(ScrapeError::Content(NotGatewayMetrics)));
    };
    let mut converter = SignalConverter::default();
    let mut step = |time_s: f64, texts: &[&str], is_failing: bool| {
        let mut round = round(texts);
        if is_failing {
            failed(&mut round);
        }
        converter.convert(time_s, round, &SETTINGS)
    };
    let nothing = |time_s: f64| PlannerInput::at(time_s);
    assert_eq!(step(0.0, &[&first, &first], false), nothing(0.0), "the first round");
    assert_eq!(step(10.0, &[&second], true), nothing(10.0), "unreachable");
    near(step(20.0, &[&second, &second], false).requests_per_s, 1.0);
    assert_eq!(step(30.0, &[&second], false), nothing(30.0), "removed");
    assert_eq!(step(40.0, &[&second, &second], false), nothing(40.0), "added");
    assert_eq!(step(50.0, &[&second, &restarted], false), nothing(50.0), "restarted");
    assert_eq!(step(60.0, &[&second, &restarted], false).requests_per_s, Some(0.0));
    assert_eq!(step(160.0, &[&second, &restarted], false), nothing(160.0), "a long pause");
}

#[test]
fn metrics_that_a_gateway_lacks_are_missing_alone() {
    let without = |gateway: Gateway| {
        let lines: Vec<String> = gateway.text().lines().map(str::to_owned).collect();
        let kept = |line: &&String| !line.contains("cached_tokens") && !line.contains("queued");
        lines.iter().filter(kept).fold(String::new(), |text, line| text + line + "\n")
    };
    let mut converter = SignalConverter::default();
    converter.convert(0.0, round(&[&without(BEFORE)]), &SETTINGS);
    let input = converter.convert(10.0, round(&[&without(after())]), &SETTINGS);
    let prefill = input.prefill;
    assert_eq!(
        [prefill.arriving_tokens_per_s, prefill.computed_tokens_per_s, prefill.queued_work_s],
        [None; 3]
    );
    assert_eq!(input.decode.waiting, None);
    near(input.requests_per_s, 1.0);
    near(input.decode.generated_tokens_per_s, 20.0);
}

#[test]
fn chunks_with_several_tokens_count_as_such() {
    let speculative = |gateway: Gateway| Gateway { generated: gateway.generated * 3, ..gateway };
    let input = between(speculative(BEFORE), speculative(after()));
    near(input.decode.generated_tokens_per_s, 60.0);
    // 90 % of the gaps of 3 tokens took up to 0.05 s.
    near(input.decode.tpot_s, 0.05 / 3.0);
    near(input.decode.within_target_share, 1.0);
}

#[test]
fn plain_engines_have_the_signals_of_both_roles() {
    let text = |gateway: Gateway| {
        gateway.text().replace("\"prefill\"", "\"plain\"").replace("\"decode\"", "\"plain\"")
    };
    let settings = SignalSettings {
        roles: (ScaledRole::Plain, ScaledRole::Plain),
        decode_kv_tokens: Some(2_000.0),
        ..SETTINGS
    };
    let mut converter = SignalConverter::default();
    converter.convert(0.0, round(&[&text(BEFORE)]), &settings);
    let more = Gateway { queued: 3, pending: [600, 0], ..after() };
    let input = converter.convert(10.0, round(&[&text(more)]), &settings);
    // One of three engines is busy at the second round.
    near(input.prefill.busy_share, 1.0 / 6.0);
    near(input.decode.running, 4.0);
    near(input.decode.waiting, 0.0);
    near(input.decode.kv_occupancy, 0.5);
}
