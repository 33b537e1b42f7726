//! Predictions for chats with images.

use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use moongate_block_hash::{BlockHashChain, HashScheme, VllmExtraKeys, VllmMediaItem};
use moongate_discovery::EngineKind;
use moongate_scheduler::ModelIndex;
use moongate_scheduler::index::EngineCacheTier;
use moongate_tokenize::{ChatBody, TextPrompt};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::media::{MediaOptions, MediumTokens};
use super::predictor_tests::{OneEngine, PAGE};

/// Estimated tokens of an image whose size is unknown.
const ESTIMATED: u32 = 1000;

/// An engine with a tokenizer whose template renders `<image>` for an image.
pub(super) fn with_images(world: OneEngine) -> OneEngine {
    let folder = tempfile::tempdir().unwrap();
    let small = concat!(env!("CARGO_MANIFEST_DIR"), "/tokenize/tests/data/small/tokenizer.json");
    std::fs::copy(small, folder.path().join("tokenizer.json")).unwrap();
    let template = "{% for message in messages %}{{ message.role }}:{% for part in message.content %}\
        {{ part.text if part.type == 'text' else '<image>' }}{% endfor %}{% endfor %}";
    let config = json!({ "chat_template": template }).to_string();
    std::fs::write(folder.path().join("tokenizer_config.json"), config).unwrap();
    let mut facts = world.fleet.members[0].facts().unwrap().clone();
    facts.tokenizer = Some(folder.path().to_str().unwrap().to_owned());
    let task = world.models.claim("m", &facts).unwrap();
    world.models.load(&task);
    world
}

fn image_chat(system: &str, image: &str) -> Value {
    let image = json!({ "type": "image_url", "image_url": { "url": image } });
    json!({ "messages": [{ "role": "system", "content": [{ "type": "text", "text": system }] },
        { "role": "user", "content": [{ "type": "text", "text": "What?" }, image, { "type": "text", "text": "Now!" }] }] })
}

/// The gateway's tokens of a text.
pub(super) fn text_tokens(world: &OneEngine, engine: EngineKind, text: &str) -> Vec<u32> {
    let model = world.models.get("m", engine).unwrap();
    model.tokenize_text(&TextPrompt::Text(text.to_owned()), false).unwrap().ids().to_vec()
}

#[tokio::test]
async fn text_before_an_image_is_predicted() {
    let world = with_images(OneEngine::new(EngineKind::Vllm));
    let system = "Some words of a system message. ".repeat(20);
    let long = image_chat(&system, "https://host/a.png");
    let leading = world.predict(&long).await.unwrap();
    let text = text_tokens(&world, EngineKind::Vllm, &format!("system:{system}user:What?<image>Now!"));
    let estimated = u32::try_from(text.len()).unwrap() - 1 + ESTIMATED;
    assert_eq!((leading.input_tokens, leading.hits(&world.fleet.members[0]).total()), (estimated, 0));
    let pages = leading.for_fleet(&world.fleet).pages;
    let slot = world.fleet.groups(ModelIndex(0))[0].engines[0].slot;
    world.index.update(|blocks| blocks.add_engine_blocks(slot, EngineCacheTier::L1, &pages));
    let again = world.predict(&long).await.unwrap();
    assert_eq!(again.hits(&world.fleet.members[0]).total(), u32::try_from(pages.len()).unwrap() * PAGE);
    assert!(
        again.expected_hits(&world.fleet.members[0]).is_none(),
        "the engine may have cached the image too"
    );
    assert_eq!((again.media.exact, again.media.estimated), (0, 1));
    let short = world.predict(&image_chat("", "https://host/a.png")).await.unwrap();
    assert!(short.input_tokens > ESTIMATED && short.hits(&world.fleet.members[0]).total() == 0);
}

/// Records the tokens of a chat's image, as an engine returned them.
fn record_image(world: &OneEngine, chat: &Value, tokens: MediumTokens) {
    let media = ChatBody::parse(chat.to_string().as_bytes()).unwrap().media().unwrap();
    let key = world.media.key("m", &MediaOptions::default(), &media[0]);
    world.media.record(key, true, Some(tokens));
}

#[tokio::test]
async fn an_image_with_cached_tokens_is_predicted_exactly() {
    let world = with_images(OneEngine::new(EngineKind::Vllm));
    let chat = image_chat("Some words.", "data:image/png;base64,AAAA");
    let texts = ["system:Some words.user:What?", "<image>", "Now!"];
    let [before, image, after] = texts.map(|text| text_tokens(&world, EngineKind::Vllm, text));
    let tokens = vec![7; 60].into();
    let placeholder = image.as_slice().into();
    record_image(&world, &chat, MediumTokens { placeholder, tokens, identifier: "a1b2".into() });

    let ids = [before.as_slice(), &[7; 60], &after].concat();
    let scheme = HashScheme::vllm_sha256_cbor(PAGE, "0", VllmExtraKeys::default()).unwrap();
    let offset = u32::try_from(before.len()).unwrap();
    let item = VllmMediaItem { identifier: "a1b2".into(), offset, length: 60 };
    let mut blocks = Vec::new();
    BlockHashChain::new(scheme.with_media(vec![item]).unwrap()).extend(&ids, &mut blocks);
    let group = &world.fleet.groups(ModelIndex(0))[0];
    let keys: Vec<u64> =
        blocks.iter().map(|block| group.keyspace.namespace().key(block.event_hash)).collect();
    world.index.update(|index| index.add_engine_blocks(group.engines[0].slot, EngineCacheTier::L1, &keys));

    let length = u32::try_from(ids.len()).unwrap();
    assert_eq!(world.hits(&chat).await, (length, (length - 1) / PAGE * PAGE));
    let predicted = world.predict(&chat).await.unwrap();
    assert!(predicted.expected_hits(&world.fleet.members[0]).is_some());
    assert_eq!((predicted.media.exact, predicted.media.estimated), (1, 0));
    let (other, hits) = world.hits(&image_chat("Some words.", "data:image/png;base64,BBBB")).await;
    assert!(other > ESTIMATED && hits <= offset / PAGE * PAGE, "another image: {other}, {hits}");
}

#[tokio::test]
async fn images_of_sglang_are_estimated() {
    let world = with_images(OneEngine::new(EngineKind::Sglang));
    let chat = image_chat("Some words.", "data:image/png;base64,AAAA");
    let placeholder = [1].into();
    record_image(&world, &chat, MediumTokens { placeholder, tokens: [7].into(), identifier: "x".into() });
    let predicted = world.predict(&chat).await.unwrap();
    assert!(predicted.input_tokens > ESTIMATED);
    assert_eq!((predicted.media.exact, predicted.media.estimated), (0, 1));
}

/// An engine that answers all requests alike, and counts them.
struct FixedServer {
    url: String,
    requests: Arc<AtomicUsize>,
}

impl FixedServer {
    fn start(status: u16, body: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let response = format!(
            "HTTP/1.1 {status} x\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
            body.len()
        );
        let requests = Arc::new(AtomicUsize::new(0));
        let count = requests.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let (mut received, mut buffer) = (Vec::new(), [0; 4096]);
                // The body of a query for an image ends like this.
                while !received.ends_with(b"]}]}") {
                    match stream.read(&mut buffer).unwrap_or(0) {
                        0 => break,
                        read => received.extend_from_slice(&buffer[..read]),
                    }
                }
                count.fetch_add(1, Ordering::Relaxed);
                let _ = stream.write_all(response.as_bytes());
            }
        });
        Self { url, requests }
    }
}

/// Predicts a chat with an image until its tokens are known, or for as long as a query takes.
async fn predict_often(server: &FixedServer) -> (bool, usize) {
    let mut world = with_images(OneEngine::at(EngineKind::Vllm, Some(server.url.clone())));
    let (runner, queries) = world.runner.take().unwrap();
    let stop = CancellationToken::new();
    let running = runner.run(queries, world.reader.clone(), stop.clone());
    let predicting = async {
        let chat = image_chat("Some words.", "data:image/png;base64,AAAA");
        let mut is_exact = false;
        for _ in 0..50 {
            is_exact = world.predict(&chat).await.unwrap().media.exact == 1;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        stop.cancel();
        is_exact
    };
    let ((), is_exact) = tokio::join!(running, predicting);
    (is_exact, server.requests.load(Ordering::Relaxed))
}

#[tokio::test]
async fn an_engine_is_queried_once_for_an_image() {
    let [mut ids, image] = ["user:", "<image>"]
        .map(|text| text_tokens(&with_images(OneEngine::new(EngineKind::Vllm)), EngineKind::Vllm, text));
    let (offset, other) = (ids.len(), [ids.as_slice(), &[5], &image].concat());
    ids.extend([7; 60]);
    let rendered = |ids: &[u32]| {
        json!({ "token_ids": ids, "features": { "mm_hashes": { "image": ["a1b2"] },
            "mm_placeholders": { "image": [{ "offset": offset, "length": 60 }] } } })
        .to_string()
    };
    assert_eq!(predict_often(&FixedServer::start(200, &rendered(&ids))).await, (true, 1));
    // Tokens that are not those of the gateway's template, an engine without the endpoint, and an image that it rejects.
    assert_eq!(predict_often(&FixedServer::start(200, &rendered(&other))).await, (false, 1));
    assert_eq!(predict_often(&FixedServer::start(403, "{}")).await, (false, 1));
    assert_eq!(predict_often(&FixedServer::start(400, "{}")).await, (false, 1));
}
