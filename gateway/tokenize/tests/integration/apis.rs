//! Requests of Anthropic's Messages API and of OpenAI's Responses API have the prompts that engines make of them.
//!
//! `tests/exact/messages.json` and `responses.json` contain requests. `tests/exact/prepared` contains what the engines' own code passes
//! to transformers for each of them, recorded by `record_*.py`.

use std::fs;
use std::path::Path;

use moongate_tokenize::{
    ChatBody, ConversationApi, PromptDialect, PromptError, PromptLimits, PromptTokenizer, TemplateTime,
    TokenizedPrompt,
};
use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::exact::{ChatCase, ids, lines, load, model_folder, oracle, read, tests};

fn now() -> TemplateTime {
    TemplateTime::utc(0)
}

fn tokenize(
    model: &PromptTokenizer,
    api: ConversationApi,
    body: &[u8],
) -> Result<TokenizedPrompt, PromptError> {
    model.tokenize_chat(&model.read_conversation(api, body)?, now())
}

/// A request of one of the APIs, and what the engine hands to transformers for it.
struct ApiCase {
    api: ConversationApi,
    case: ChatCase,
    input: String,
}

impl ApiCase {
    fn all(engine: PromptDialect, template: &str) -> Vec<ApiCase> {
        let engine = if engine == PromptDialect::Vllm { "vllm" } else { "sglang" };
        let of_api = |(api, name): (ConversationApi, &str)| {
            let bodies = read::<ChatCase>(&format!("{name}.json"));
            let prepared = read::<Box<RawValue>>(&format!("prepared/{engine}-{name}-{template}.json"));
            assert_eq!(bodies.len(), prepared.len(), "run record_*.py again");
            let cases = bodies.into_iter().zip(lines(&prepared));
            cases.map(move |(case, input)| ApiCase { api, case, input }).collect::<Vec<_>>()
        };
        [(ConversationApi::Messages, "messages"), (ConversationApi::Responses, "responses")]
            .into_iter()
            .flat_map(of_api)
            .collect()
    }

    /// Whether the engine hands the request to transformers.
    fn is_rendered(&self) -> bool {
        serde_json::from_str::<Value>(&self.input).unwrap()["messages"].is_array()
    }

    /// Compares the prompt with `expected`, which transformers returned. Returns whether there is one.
    fn compare(&self, model: &PromptTokenizer, expected: &Value) -> bool {
        let name = format!("{:?}: {}: {}", self.api, self.case.name, self.input);
        let body = self.case.body.get().as_bytes();
        let prompt = tokenize(model, self.api, body);
        if expected["error"].is_string() {
            let is_expected = matches!(prompt, Err(PromptError::Template(_) | PromptError::Malformed(_)));
            assert!(is_expected, "{name}: {expected}, but {prompt:?}");
            return false;
        }
        let chat = model.read_conversation(self.api, body).unwrap_or_else(|error| panic!("{name}: {error}"));
        let text = model.render_chat(&chat, now()).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(text, expected["text"].as_str().unwrap(), "{name}");
        assert_eq!(prompt.unwrap().ids().to_vec(), ids(&expected["ids"]), "{name}");
        true
    }

    /// Checks that a request which the engine does not hand to transformers has no prompt, unless the engine rejects it.
    fn check_rejection(&self, model: &PromptTokenizer) {
        let input: Value = serde_json::from_str(&self.input).unwrap();
        let is_expected = match tokenize(model, self.api, self.case.body.get().as_bytes()) {
            Err(PromptError::Multimodal(_)) => input["media"].is_array(),
            Err(_) => !input["media"].is_array(),
            Ok(_) => input["refused"].is_string(),
        };
        assert!(is_expected, "{:?}: {}: {input}", self.api, self.case.name);
    }
}

/// Compares the prompts of all bodies of both APIs. Returns the number of compared prompts of each.
fn prompts_are_equal(folder: &Path, engine: PromptDialect, template: &str) -> [usize; 2] {
    let model = load(folder, engine);
    let (rendered, rejected): (Vec<_>, Vec<_>) =
        ApiCase::all(engine, template).into_iter().partition(ApiCase::is_rendered);
    rejected.iter().for_each(|case| case.check_rejection(&model));
    let inputs: Vec<&String> = rendered.iter().map(|case| &case.input).collect();
    let mut compared = [0; 2];
    for (case, expected) in rendered.iter().zip(oracle(folder, &inputs)) {
        let counter = usize::from(case.api == ConversationApi::Responses);
        compared[counter] += usize::from(case.compare(&model, &expected));
    }
    compared
}

/// The small tokenizer, which has a BOS token, with a template.
fn small_folder(template: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(tests().join("data/small").join(name), folder.path().join(name)).unwrap();
    }
    fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
    folder
}

fn small(engine: PromptDialect, template: &str) -> PromptTokenizer {
    PromptTokenizer::load(small_folder(template).path(), engine, PromptLimits::default()).unwrap()
}

fn assert_compared([messages, responses]: [usize; 2], expected: [usize; 2]) {
    assert!(
        messages >= expected[0] && responses >= expected[1],
        "{messages} messages, {responses} responses"
    );
}

#[test]
fn qwen3_prompts_equal_those_of_vllm() {
    let compared = prompts_are_equal(&model_folder("qwen3"), PromptDialect::Vllm, "qwen3");
    assert_compared(compared, [53, 54]);
}

#[test]
fn qwen3_prompts_equal_those_of_sglang() {
    let compared = prompts_are_equal(&model_folder("qwen3"), PromptDialect::Sglang, "qwen3");
    assert_compared(compared, [38, 58]);
}

#[test]
fn prompts_of_content_parts_equal_the_engines() {
    let folder = small_folder(&fs::read_to_string(tests().join("exact/parts.jinja")).unwrap());
    let compared = |engine| prompts_are_equal(folder.path(), engine, "parts");
    assert_compared(compared(PromptDialect::Vllm), [53, 53]);
    assert_compared(compared(PromptDialect::Sglang), [38, 57]);
}

/// The text of a request's prompt with the small tokenizer and its template.
fn rendered(engine: PromptDialect, template: &str, api: ConversationApi, body: &Value) -> String {
    let model = small(engine, template);
    let chat = model.read_conversation(api, body.to_string().as_bytes()).unwrap();
    model.render_chat(&chat, now()).unwrap()
}

/// Accepts a system message at the start only.
const SYSTEM_FIRST: &str = "{% for message in messages %}{% if message.role == 'system' and not loop.first %}\
    {{ raise_exception('System message must be at the beginning.') }}{% endif %}[{{ message.role }}]{{ message.content }}{% endfor %}";
/// Leaves out further system messages.
const SYSTEM_IGNORED: &str = "{% for message in messages %}{% if message.role != 'system' or loop.first %}\
    [{{ message.role }}]{{ message.content }}{% endif %}{% endfor %}";
/// Renders all messages.
const SYSTEM_ANYWHERE: &str =
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}";
/// Loops over the content of messages, which engines test with a text.
const PARTS: &str = "{% for message in messages %}[{{ message.role }}]{% for part in message.content %}{{ part.text }}{% endfor %}{% endfor %}";

#[test]
fn systems_are_merged_if_the_template_requires_it() {
    let messages = json!({ "system": "One.", "messages": [
        { "role": "user", "content": "a" },
        { "role": "system", "content": [{ "type": "text", "text": " Two." }] },
        { "role": "user", "content": "b" },
    ] });
    let apart = "[system]One.[user]a[system] Two.[user]b";
    let vllm = |template| rendered(PromptDialect::Vllm, template, ConversationApi::Messages, &messages);
    assert_eq!(vllm(SYSTEM_FIRST), "[system]One. Two.[user]a[user]b");
    assert_eq!(vllm(SYSTEM_IGNORED), "[system]One.[user]a[user]b", "vLLM does not look at the text");
    assert_eq!(vllm(SYSTEM_ANYWHERE), apart);
    assert_eq!(vllm(PARTS), apart);
    let sglang = |template| rendered(PromptDialect::Sglang, template, ConversationApi::Messages, &messages);
    assert_eq!(sglang(SYSTEM_FIRST), "[system]One.\nTwo.[user]a[user]b");
    assert_eq!(sglang(SYSTEM_IGNORED), "[system]One.\nTwo.[user]a[user]b");
    assert_eq!(sglang(SYSTEM_ANYWHERE), apart);
}

#[test]
fn disabled_thinking_is_the_lowest_effort_if_none_is_unknown() {
    let body =
        json!({ "messages": [{ "role": "user", "content": "a" }], "thinking": { "type": "disabled" } });
    let effort = |template| rendered(PromptDialect::Vllm, template, ConversationApi::Messages, &body);
    assert_eq!(effort("{{ reasoning_effort }} {{ enable_thinking }}"), "none False");
    assert_eq!(
        effort(
            "{% if reasoning_effort == 'none' %}{{ raise_exception('x') }}{% endif %}{{ reasoning_effort }}"
        ),
        "low"
    );
    assert_eq!(effort("{{ messages[0].content }}{% if reasoning_effort == 'low' %}!{% endif %}"), "a!");
}

#[test]
fn prompts_that_the_body_does_not_determine_are_errors() {
    let reason = |engine, template: &str, api, body: &str| {
        small(engine, template).read_conversation(api, body.as_bytes()).err()
    };
    for engine in [PromptDialect::Vllm, PromptDialect::Sglang] {
        let responses = |members: &str| {
            let body = format!(r#"{{"input":"a",{members}}}"#);
            reason(engine, SYSTEM_ANYWHERE, ConversationApi::Responses, &body)
        };
        for name in ["previous_response_id", "conversation", "prompt"] {
            let error = responses(&format!(r#""{name}":"x""#));
            assert_eq!(error, Some(PromptError::EngineState(name)), "{engine:?}");
            assert_eq!(responses(&format!(r#""{name}":null"#)), None, "{engine:?}");
        }
        let item = reason(
            engine,
            SYSTEM_ANYWHERE,
            ConversationApi::Responses,
            r#"{"input":[{"type":"item_reference","id":"x"}]}"#,
        );
        assert_eq!(item, Some(PromptError::UnsupportedContent("item_reference".to_owned())));
        let block = r#"{"messages":[{"role":"user","content":[{"type":"document","source":{}}]}]}"#;
        let document = reason(engine, SYSTEM_ANYWHERE, ConversationApi::Messages, block);
        assert_eq!(document, Some(PromptError::UnsupportedContent("document".to_owned())));
        let harmony = reason(
            engine,
            "<|start|><|channel|><|message|>",
            ConversationApi::Messages,
            r#"{"messages":[]}"#,
        );
        assert_eq!(harmony, Some(PromptError::UnsupportedModel("gpt-oss")));
    }
    let thinking = r#"{"messages":[{"role":"user","content":"a"}],"thinking":{"type":"adaptive"}}"#;
    let sglang = reason(PromptDialect::Sglang, SYSTEM_ANYWHERE, ConversationApi::Messages, thinking);
    assert_eq!(sglang, Some(PromptError::UnsupportedMember("thinking")));
}

#[test]
fn responses_are_truncated_unless_that_is_disabled() {
    for (truncation, expected) in [
        ("", false),
        (r#","truncation":"disabled""#, false),
        (r#","truncation":"auto""#, true),
        (r#","truncation":null"#, true),
    ] {
        let body = format!(r#"{{"input":"a b c d e f g h i j"{truncation}}}"#);
        let model = small(PromptDialect::Vllm, SYSTEM_ANYWHERE);
        let chat = model.read_conversation(ConversationApi::Responses, body.as_bytes()).unwrap();
        assert_eq!(chat.truncation().unwrap().is_some(), expected, "{body}");
    }
}

#[test]
fn images_of_other_apis_are_media() {
    let image = json!({ "type": "base64", "media_type": "image/png", "data": "AAAA" });
    let messages = json!({ "messages": [{ "role": "user", "content": [
        { "type": "text", "text": "a" }, { "type": "image", "source": image },
        { "type": "tool_result", "tool_use_id": "t", "content": [{ "type": "image", "source": { "type": "url", "url": "https://h/b.png" } }] },
    ] }] });
    let responses = json!({ "input": [{ "role": "user", "content": [
        { "type": "input_text", "text": "a" }, { "type": "input_image", "image_url": "data:image/png;base64,AAAA" },
        { "type": "input_image", "image_url": "https://h/b.png" },
    ] }] });
    for engine in [PromptDialect::Vllm, PromptDialect::Sglang] {
        for (api, body) in [(ConversationApi::Messages, &messages), (ConversationApi::Responses, &responses)]
        {
            let chat = ChatBody::parse_conversation(api, engine, body.to_string().as_bytes()).unwrap();
            assert!(matches!(chat.check_text(), Err(PromptError::Multimodal(_))), "{engine:?} {api:?}");
            let mut inline: Vec<bool> =
                chat.media().unwrap().iter().map(|medium| medium.is_inline()).collect();
            inline.sort_unstable();
            assert_eq!(inline, [false, true], "{engine:?} {api:?}");
        }
    }
}

/// A body that is valid for all APIs, with a list of each.
#[test]
fn cached_turns_of_one_list_are_not_those_of_another() {
    let turn = |text: &str| json!({ "role": "user", "content": text.repeat(2000) });
    let body = |lists: [&str; 2]| {
        let list = |at: usize| {
            format!(r#""{}":{}"#, lists[at], json!([turn("question "), turn("more "), turn("end ")]))
        };
        format!("{{{},{}}}", list(0), list(1)).into_bytes()
    };
    for engine in [PromptDialect::Vllm, PromptDialect::Sglang] {
        let (cached, fresh) = (small(engine, SYSTEM_ANYWHERE), small(engine, SYSTEM_ANYWHERE));
        let body = body(["input", "messages"]);
        for api in [
            ConversationApi::Responses,
            ConversationApi::Chat,
            ConversationApi::Messages,
            ConversationApi::Responses,
        ] {
            let expected = ChatBody::parse_conversation(api, engine, &body).unwrap();
            let chat = cached.read_conversation(api, &body).unwrap();
            assert_eq!(format!("{chat:?}"), format!("{expected:?}"), "{engine:?} {api:?}");
            let ids = fresh.tokenize_chat(&expected, now()).unwrap().ids().to_vec();
            let prompt = cached.tokenize_chat(&chat, now()).unwrap();
            assert_eq!(prompt.ids().to_vec(), ids);
        }
    }
}
