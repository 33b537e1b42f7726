//! The tokens of a chat with images.

use std::path::Path;

use moongate_tokenize::{ChatBody, PromptDialect, PromptError, PromptLimits, PromptTokenizer, TemplateTime};
use serde_json::{Value, json};

/// As the template of Qwen2.5-VL renders messages.
const QWEN: &str = "{% for message in messages %}<|im_start|>{{ message['role'] }}\n\
    {% if message['content'] is string %}{{ message['content'] }}{% else %}\
    {% for content in message['content'] %}{% if content['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>\
    {% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
/// Leaves out the system message of a chat with images, like that of Llama 3.2 Vision.
const WITHOUT_SYSTEM: &str = "{% set ns = namespace(images=false) %}{% for message in messages %}{% for part in message.content %}\
    {% if part.type == 'image' %}{% set ns.images = true %}{% endif %}{% endfor %}{% endfor %}\
    {% for message in messages %}{% if message.role != 'system' or not ns.images %}{{ message.role }}:\
    {% for part in message.content %}{{ part.text or '<image>' }}{% endfor %}{% endif %}{% endfor %}";
/// Renders images before all text.
const IMAGES_FIRST: &str = "{% for message in messages %}{% for part in message.content %}{% if part.type == 'image' %}<image>{% endif %}\
    {% endfor %}{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}";

fn load(engine: PromptDialect, template: &str) -> PromptTokenizer {
    let small = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/small");
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(small.join("tokenizer.json"), folder.path().join("tokenizer.json")).unwrap();
    let config = json!({ "bos_token": "<|bos|>", "chat_template": template }).to_string();
    std::fs::write(folder.path().join("tokenizer_config.json"), config).unwrap();
    PromptTokenizer::load(folder.path(), engine, PromptLimits::default()).unwrap()
}

fn chat(messages: &Value) -> ChatBody {
    ChatBody::parse(json!({ "messages": messages }).to_string().as_bytes()).unwrap()
}

fn image_chat() -> ChatBody {
    chat(&json!([
        { "role": "system", "content": [{ "type": "text", "text": "Be brief." }] },
        { "role": "user", "content": [
            { "type": "text", "text": "What is in " },
            { "type": "image_url", "image_url": { "url": "data:image/png;base64,AAAA" } },
            { "type": "text", "text": " and in this?" },
            { "type": "input_image", "image_url": "https://host/b.png" },
        ] },
        { "role": "user", "content": "Now!" },
    ]))
}

/// The tokens before the first image, compared with those of the expected text.
fn check(engine: PromptDialect, template: &str, expected: &str) {
    let model = load(engine, template);
    let chat = model.render_media_chat(&image_chat(), TemplateTime::utc(0)).unwrap();
    let ids = model.tokenize_before_media(&chat).unwrap().ids().to_vec();
    let text = moongate_tokenize::TextPrompt::Text(expected.to_owned());
    assert_eq!(ids, model.tokenize_text(&text, false).unwrap().ids().to_vec(), "{engine:?}: {expected}");
}

#[test]
fn text_before_the_first_image_is_tokenized() {
    for engine in [PromptDialect::Vllm, PromptDialect::Sglang] {
        check(engine, QWEN, "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is in ");
        check(engine, WITHOUT_SYSTEM, "");
        check(engine, IMAGES_FIRST, "Be brief.");
    }
}

#[test]
fn all_text_is_tokenized_with_a_placeholder_for_each_image() {
    let model = load(PromptDialect::Vllm, QWEN);
    let chat = model.render_media_chat(&image_chat(), TemplateTime::utc(0)).unwrap();
    let image = "<|vision_start|><|image_pad|><|vision_end|>";
    let expected = format!(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is in {image} and in this?{image}<|im_end|>\n\
        <|im_start|>user\nNow!<|im_end|>\n<|im_start|>assistant\n"
    );
    let text = moongate_tokenize::TextPrompt::Text(expected);
    let ids = model.tokenize_media_chat(&chat).unwrap().ids().to_vec();
    assert_eq!(ids, model.tokenize_text(&text, false).unwrap().ids().to_vec());
}

#[test]
fn other_templates_leave_media_to_the_engine() {
    let reject = |template: &str, body: &ChatBody| {
        load(PromptDialect::Vllm, template).render_media_chat(body, TemplateTime::utc(0)).err()
    };
    let text = "{% for message in messages %}{{ message.content }}{% endfor %}";
    assert!(matches!(reject(text, &image_chat()), Some(PromptError::Multimodal(_))));
    let tool =
        chat(&json!([{ "role": "tool", "content": [{ "type": "image_url", "image_url": { "url": "x" } }] }]));
    assert!(matches!(reject(QWEN, &tool), Some(PromptError::Multimodal(_))));
    let file = chat(&json!([{ "role": "user", "content": [{ "type": "file", "file": {} }] }]));
    assert!(matches!(reject(QWEN, &file), Some(PromptError::Multimodal(_))));
}
