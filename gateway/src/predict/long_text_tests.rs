//! Predictions of long texts, of which only a beginning is tokenized.

use moongate_discovery::EngineKind;
use moongate_scheduler::TextPrefix;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::media_tests::{text_tokens, with_images};
use super::predictor_tests::OneEngine;

/// Words that differ by `seed`, of about this many bytes.
fn words(seed: u64, bytes: usize) -> String {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut text = String::with_capacity(bytes + 16);
    while text.len() < bytes {
        let word: String = (0..random.usize(1..9)).map(|_| random.lowercase()).collect();
        text.push_str(&word);
        text.push(' ');
    }
    text
}

fn completion(text: &str) -> Value {
    json!({ "prompt": text })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn hits_equal_those_of_the_whole_prompt(
        same in 0..90_000_usize,
        cached in 0..40_000_usize,
        seen in prop::option::of(0..90_000_usize),
        engine in prop::sample::select(vec![EngineKind::Vllm, EngineKind::Sglang]),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let world = runtime.block_on(async { with_images(OneEngine::with_index(engine, 100_000)) });
        let (earlier, end) = (words(1, 90_000), words(2, 30_000));
        let prompt = completion(&format!("{}{end}", &earlier[..same]));
        let tokens = text_tokens(&world, engine, &earlier);
        world.compute(&tokens[..cached.min(tokens.len())]);
        runtime.block_on(async {
            if let Some(seen) = seen {
                world.predict_estimated(&completion(&earlier[..seen])).await.unwrap();
            }
            let estimated = world.predict_estimated(&prompt).await.unwrap();
            let exact = world.predict(&prompt).await.unwrap();
            let engine = &world.fleet.members[0];
            prop_assert_eq!(estimated.hits(engine), exact.hits(engine));
            let difference = f64::from(estimated.input_tokens) / f64::from(exact.input_tokens) - 1.0;
            prop_assert!(difference.abs() < 0.05, "{} {}", estimated.input_tokens, exact.input_tokens);
            Ok(())
        })?;
    }
}

#[tokio::test]
async fn new_texts_are_tokenized_when_they_are_sent_again() {
    let world = with_images(OneEngine::with_index(EngineKind::Vllm, 100_000));
    let begin = words(1, 100_000);
    let [first, second, third] =
        ["", &words(2, 50_000), &words(3, 50_000)].map(|end| completion(&format!("{begin}{end}")));
    let mut blocks = Vec::new();
    for body in [&first, &second, &third] {
        blocks.push(world.predict_estimated(body).await.unwrap().for_fleet(&world.fleet));
    }
    let [first, second, third] = &blocks[..] else { panic!("three predictions") };
    assert!(first.pages.len() < second.pages.len() / 8, "{} {}", first.pages.len(), second.pages.len());
    assert_eq!(first.pages[..], second.pages[..first.pages.len()]);
    let common = second.pages.iter().zip(&*third.pages).take_while(|(second, third)| second == third).count();
    let len = text_tokens(&world, EngineKind::Vllm, &begin).len() / 16;
    assert!((len * 9 / 10..=len).contains(&common), "{common} of {len}");
    let equal = |one: &[TextPrefix], other: &[TextPrefix]| {
        one.iter().zip(other).take_while(|(one, other)| one.key == other.key).count()
    };
    assert!(equal(&first.text_prefixes, &second.text_prefixes) >= 24);
    assert_eq!(
        equal(&second.text_prefixes, &third.text_prefixes),
        equal(&first.text_prefixes, &second.text_prefixes)
    );
}
