//! With real tokenizers and templates, prompts have the same text and ids as with transformers.
//!
//! `tests/exact/bodies.json` contains requests. `tests/exact/prepared` contains what the engines' own code passes to transformers for
//! each of them, recorded by `record_*.py`. `oracle.py` renders and tokenizes it.

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

pub(super) fn tests() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests")
}

/// Installs tokenizers and transformers on first use; returns their folder.
fn installed() -> &'static Path {
    static INSTALLED: OnceLock<PathBuf> = OnceLock::new();
    INSTALLED.get_or_init(|| {
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).parent().unwrap().join("exact");
        let output = Command::new(tests().join("exact/setup")).arg(&folder).output().unwrap();
        let log =
            format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "tests/exact/setup failed; it requires python3 and npm:\n{log}");
        folder
    })
}

pub(super) fn model_folder(name: &str) -> PathBuf {
    installed().join("node_modules/@lenml").join(format!("tokenizer-{name}")).join("models")
}

/// Text and ids of each case according to transformers.
pub(super) fn oracle<T: Display>(folder: &Path, cases: &[T]) -> Vec<Value> {
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
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    assert!(output.status.success(), "oracle.py failed");
    let expected: Vec<Value> = String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(expected.len(), cases.len());
    expected
}

pub(super) fn load(folder: &Path, engine: PromptDialect) -> PromptTokenizer {
    PromptTokenizer::load(folder, engine, PromptLimits::default()).unwrap()
}

/// A request. Its body is raw JSON, because templates print objects, whose member order must be preserved.
#[derive(Deserialize)]
pub(super) struct ChatCase {
    pub(super) name: String,
    pub(super) body: Box<RawValue>,
}

pub(super) fn read<T: serde::de::DeserializeOwned>(path: &str) -> Vec<T> {
    serde_json::from_str(&fs::read_to_string(tests().join("exact").join(path)).unwrap()).unwrap()
}

/// Converts each value to one line of JSON.
pub(super) fn lines(values: &[Box<RawValue>]) -> Vec<String> {
    // Line breaks inside strings are escaped, so all others are white space.
    values.iter().map(|value| value.get().replace('\n', " ")).collect()
}

pub(super) fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect()
}

/// Compares the prompts of all bodies for one model and engine. Returns the number of compared prompts.
fn chats_are_equal(folder: &Path, engine: PromptDialect, prepared: &str) -> usize {
    let (bodies, prepared) = (read::<ChatCase>("bodies.json"), lines(&read::<Box<RawValue>>(prepared)));
    assert_eq!(bodies.len(), prepared.len(), "run record_*.py again");
    let model = load(folder, engine);
    let mut compared = 0;
    for ((case, expected), input) in bodies.iter().zip(oracle(folder, &prepared)).zip(&prepared) {
        let name = format!("{} ({engine:?}): {input}", case.name);
        let body = ChatBody::parse(case.body.get().as_bytes()).unwrap();
        let text = model.render_chat(&body, TemplateTime::utc(0));
        if expected["error"].is_string() {
            assert!(
                matches!(text, Err(PromptError::Template(_) | PromptError::Malformed(_))),
                "{name}: {expected}, but {text:?}"
            );
            continue;
        }
        assert_eq!(
            text.as_deref().unwrap_or_else(|error| panic!("{name}: {error}")),
            expected["text"],
            "{name}"
        );
        // The second time, segments are cached.
        for _ in 0..2 {
            let prompt = model.tokenize_chat(&body, TemplateTime::utc(0)).unwrap();
            assert_eq!(prompt.ids().to_vec(), ids(&expected["ids"]), "{name}");
        }
        compared += 1;
    }
    compared
}

#[test]
fn qwen3_chats_equal_those_of_transformers() {
    let folder = model_folder("qwen3");
    assert!(chats_are_equal(&folder, PromptDialect::Vllm, "prepared/vllm-qwen3.json") >= 30);
    assert!(chats_are_equal(&folder, PromptDialect::Sglang, "prepared/sglang-qwen3.json") >= 30);
}

#[test]
fn deepseek_v3_chats_equal_those_of_transformers() {
    let folder = model_folder("deepseek_v3");
    // The template concatenates a tool call's arguments to a string, which fails for objects: engines reject those requests.
    assert!(chats_are_equal(&folder, PromptDialect::Vllm, "prepared/vllm-qwen3.json") >= 25);
    assert!(chats_are_equal(&folder, PromptDialect::Sglang, "prepared/sglang-qwen3.json") >= 25);
}

#[test]
fn chats_with_content_parts_equal_those_of_transformers() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(tests().join("data/small").join(name), folder.path().join(name)).unwrap();
    }
    fs::copy(tests().join("exact/parts.jinja"), folder.path().join("chat_template.jinja")).unwrap();
    assert!(chats_are_equal(folder.path(), PromptDialect::Vllm, "prepared/vllm-parts.json") >= 30);
    assert!(chats_are_equal(folder.path(), PromptDialect::Sglang, "prepared/sglang-parts.json") >= 30);
}

/// Long texts: documents, code, several scripts, numbers, white space and special tokens; and an empty text.
fn texts() -> Vec<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut texts: Vec<String> =
        ["ARCHITECTURE.md", "Cargo.lock", "gateway/src/app.rs", "gateway/tokenize/src/segment_cache.rs"]
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
    for (case, expected) in cases.iter().zip(oracle(folder, &cases)) {
        let text = TextPrompt::Text(case["text"].as_str().unwrap().to_owned());
        let prompt = model.tokenize_text(&text, case["special"].as_bool().unwrap()).unwrap();
        let start: String = case["text"].as_str().unwrap().chars().take(40).collect();
        assert_eq!(prompt.ids().to_vec(), ids(&expected["ids"]), "{start:?}");
    }
}

#[test]
fn texts_equal_those_of_transformers() {
    texts_are_equal(&model_folder("qwen3"));
    texts_are_equal(&model_folder("deepseek_v3"));
    texts_are_equal(&tests().join("data/small"));
}

/// As in the real engines: SGLang's `/tokenize` returns token 0 before every text, vLLM's does not.
#[test]
fn sglang_prepends_the_bos_of_deepseek_v3_and_vllm_does_not() {
    let folder = model_folder("deepseek_v3");
    let ids = |engine, special| {
        let text = TextPrompt::Text(" ".to_owned());
        load(&folder, engine).tokenize_text(&text, special).unwrap().ids().to_vec()
    };
    assert_eq!(ids(PromptDialect::Sglang, true), [0, 223]);
    assert_eq!(ids(PromptDialect::Sglang, false), [223]);
    assert_eq!(ids(PromptDialect::Vllm, true), [223]);
}
