//! How engines test a model's templates, to convert requests of other APIs to chats that the templates render.

use minijinja::Value;

use crate::dialect::PromptDialect;
use crate::template::ChatTemplate;

/// Text of the second system message of the test.
const SECOND_SYSTEM: &str = "__second_system_message__";
/// Text of its other messages.
const OTHER_TEXT: &str = "t";

/// Whether `engine` merges all system messages of a chat into the first for these templates.
pub(crate) fn merges_systems(
    engine: PromptDialect,
    template: Option<&ChatTemplate>,
    tool_template: Option<&ChatTemplate>,
) -> bool {
    let rendered = |template: &ChatTemplate| {
        let message = |role: &'static str, content: &'static str| {
            Value::from_pairs([("role", role), ("content", content)])
        };
        let messages = [
            message("system", OTHER_TEXT),
            message("user", OTHER_TEXT),
            message("system", SECOND_SYSTEM),
            message("user", OTHER_TEXT),
        ];
        template.probe(&messages)
    };
    match engine {
        PromptDialect::Vllm => {
            template.and_then(rendered).is_none()
                || tool_template.is_some_and(|template| rendered(template).is_none())
        }
        // SGLang does not test several templates.
        PromptDialect::Sglang => {
            let shows = |text: String| text.contains(SECOND_SYSTEM);
            tool_template.is_some() || !template.and_then(rendered).is_some_and(shows)
        }
    }
}

/// vLLM's `reasoning_effort` for requests that disable thinking: the lowest, if the template rejects or ignores `none`. `render` renders
/// a chat with an effort.
pub(crate) fn effort_without_thinking(render: impl Fn(&'static str) -> Option<String>) -> &'static str {
    const LOWEST: &str = "low";
    let Some(without) = render("none") else { return LOWEST };
    let is_ignored = [LOWEST, "medium", "high", "xhigh", "max"]
        .into_iter()
        .any(|effort| render(effort).as_ref() == Some(&without));
    if is_ignored { LOWEST } else { "none" }
}

/// Whether the template is that of gpt-oss, for which engines build prompts of the Harmony format without it.
pub(crate) fn is_harmony(template: &ChatTemplate) -> bool {
    ["<|start|>", "<|channel|>", "<|message|>"].iter().all(|token| template.source().contains(token))
}

/// The chat with which vLLM tests efforts.
pub(crate) fn effort_test() -> Vec<Value> {
    vec![Value::from_pairs([("role", "user"), ("content", "Hi")])]
}
