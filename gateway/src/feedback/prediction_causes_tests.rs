use moongate_scheduler::TierHits;

use super::*;

const BLOCK: u32 = 32;

fn engine() -> PredictedEngine {
    PredictedEngine {
        name: "e".into(),
        has_chunks: true,
        history: Arc::default(),
        rank: None,
        is_rule_confirmed: true,
        speculates: false,
        block_tokens: BLOCK,
        removed_blocks: 0,
    }
}

fn expected(engine: PredictedEngine, (l1_tokens, l2_tokens, l3_tokens): (u32, u32, u32)) -> ExpectedHits {
    let hits = TierHits { l1_tokens, l2_tokens, l3_tokens, ..TierHits::default() };
    ExpectedHits { hits, input_tokens: 1000, engine: Some(engine), ..ExpectedHits::default() }
}

fn cause(expected: &ExpectedHits, found: u64) -> &'static str {
    expected.engine.as_ref().unwrap().cause(expected, found)
}

#[test]
fn cause_of_a_false_hit_is_the_first_that_explains_it() {
    let own = expected(engine(), (320, 0, 0));
    assert_eq!(cause(&own, 0), "other");
    own.engine.as_ref().unwrap().history.record_removed(3);
    assert_eq!(cause(&own, 0), "evicted");
    let unconfirmed = expected(PredictedEngine { is_rule_confirmed: false, ..engine() }, (320, 0, 0));
    assert_eq!(cause(&unconfirmed, 0), "unverified_rule");
    let speculating = || PredictedEngine { speculates: true, ..engine() };
    assert_eq!(cause(&expected(speculating(), (320, 0, 0)), 288), "last_block");
    assert_eq!(cause(&expected(speculating(), (320, 0, 0)), 256), "other");
    let stored = expected(engine(), (64, 64, 320));
    assert_eq!((cause(&stored, 128), cause(&stored, 64)), ("store", "other"));
    let pending = ExpectedHits { pending_tokens: 256, ..expected(engine(), (320, 0, 0)) };
    assert_eq!((cause(&pending, 64), cause(&pending, 32)), ("pending", "other"));
    let chunks = ExpectedHits { in_chunks: true, ..expected(engine(), (64, 512, 0)) };
    assert_eq!(cause(&chunks, 64), "lmcache");
}

#[test]
fn found_tokens_that_were_dropped_name_the_last_block() {
    let dropped = ExpectedHits {
        dropped_tokens: BLOCK,
        ..expected(PredictedEngine { speculates: true, ..engine() }, (288, 0, 0))
    };
    assert_eq!((cause(&dropped, 320), cause(&dropped, 352)), ("last_block", "other"));
    assert_eq!(dropped.clone().with_pending(BLOCK).hits.l1_tokens, 288, "the dropped block is not pending");
    assert_eq!(dropped.clone().with_pending(3 * BLOCK).hits.l1_tokens, 352);
    for _ in 0..8 {
        dropped.engine.as_ref().unwrap().observe(&dropped, 288);
    }
    assert!(dropped.engine.as_ref().unwrap().history.drops_last_block());
}

#[test]
fn tokens_are_counted_by_cause_and_rank() {
    let mut registry = MetricsRegistry::default();
    let metrics = PredictionCauseMetrics::register(&mut registry);
    for rank in [None, Some(1), Some(MAX_RANKS + 9)] {
        let expected = expected(PredictedEngine { rank, ..engine() }, (320, 0, 0));
        metrics.compare(&expected, 320);
        metrics.compare(&expected, 300);
        metrics.compare(&expected, 384);
    }
    let text = registry.open_metrics();
    for line in [
        "moongate_prediction_error_tokens_total{error=\"false_positive\",cause=\"other\"} 60",
        "moongate_prediction_error_tokens_total{error=\"false_negative\",cause=\"other\"} 192",
        "moongate_prediction_rank_tokens_total{rank=\"1\",result=\"compared\"} 3000",
        "moongate_prediction_rank_tokens_total{rank=\"1\",result=\"false_positive\"} 20",
        "moongate_prediction_rank_tokens_total{rank=\"other\",result=\"false_negative\"} 64",
    ] {
        assert!(text.contains(line), "{line} is missing in\n{text}");
    }
}
