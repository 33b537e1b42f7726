//! Turns that are rendered from earlier ones have the text of complete renderings.

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::template::{ChatTemplate, TemplateTime};

const SMALL: &str = include_str!("../../tests/data/small.jinja");

/// As of models that think: reasoning before the last question is left out, and results of tools are merged.
const THINKING: &str = r#"
{%- if messages[0].role == 'system' %}
    {{- messages[0].content + '\n' }}
{%- endif %}
{%- set ns = namespace(searches=true, last_question=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.searches and message.role == "user" and not message.content.startswith('<tool>') %}
        {%- set ns.searches = false %}
        {%- set ns.last_question = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '[' + message.role + ']' + message.content }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set reasoning = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0] %}
            {%- set content = content.split('</think>')[-1] %}
        {%- endif %}
        {%- if loop.index0 > ns.last_question %}
            {%- if loop.last or (not loop.last and reasoning) %}
                {{- '[assistant]<think>' + reasoning + '</think>' + content }}
            {%- else %}
                {{- '[assistant]' + content }}
            {%- endif %}
        {%- else %}
            {{- '[assistant]' + content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and content) or (not loop.first) %}
                {{- '\n' }}
            {%- endif %}
            {{- call | tojson }}
        {%- endfor %}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '[results]' }}
        {%- endif %}
        {{- '<tool>' + message.content }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '[end]' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '[assistant]' }}
{%- endif %}
"#;

/// Reads what may be the last message before the first, and variables in the text of every message.
const RELATED: &str = "{{ strftime_now('%S') }}{% set kind = messages | length > 4 %}{% for m in messages %}\
    {{ loop.index }}{{ messages[loop.index0 - 1].role }}{{ m.content }}{{ mode }}{{ kind }}{{ tools }}\
    {% if m.content == 'a' %}{% continue %}{% endif %}|{% endfor %}{{ messages[-1].role }}";

const TEMPLATES: [&str; 3] = [SMALL, THINKING, RELATED];

/// A conversation with its variables, as one turn is sent.
#[derive(Debug, Clone)]
struct Turn {
    /// Messages that the client dropped from the end of the turn before.
    dropped: usize,
    added: Vec<(usize, usize)>,
    mode: bool,
    tools: bool,
    seconds: i64,
}

fn turn() -> impl Strategy<Value = Turn> {
    let rare = |odds: u32| prop::bool::weighted(1.0 / f64::from(odds));
    let added = prop::collection::vec((0..5_usize, 0..5_usize), 0..4);
    (prop_oneof![4 => Just(0), 1 => 0..4_usize], added, rare(8), rare(8), 0..2_i64)
        .prop_map(|(dropped, added, mode, tools, seconds)| Turn { dropped, added, mode, tools, seconds })
}

fn value(json: serde_json::Value) -> Value {
    serde_json::from_value(json).unwrap()
}

fn message(role: usize, content: usize) -> Value {
    let role = ["user", "assistant", "tool", "system", "user"][role];
    let content = ["a", "b", "", "some reasoning</think>and text", "<tool>"][content];
    let calls = if role == "assistant" {
        json!([{ "function": { "name": "f", "arguments": { "x": 1 } } }])
    } else {
        json!(null)
    };
    value(json!({ "role": role, "content": content, "reasoning_content": content, "tool_calls": calls }))
}

/// Renders the turns of a conversation; returns how many bytes each shares with the one before.
fn check(template: &str, turns: &[Turn]) -> Vec<usize> {
    let template = ChatTemplate::compile(template, 1_000_000).unwrap();
    let mut messages: Vec<Value> = vec![message(0, 0)];
    let mut earlier: Option<(TextParts, MessagePlaces)> = None;
    let mut shared = Vec::new();
    for turn in turns {
        messages.truncate(messages.len().saturating_sub(turn.dropped).max(1));
        let known = messages.len();
        messages.extend(turn.added.iter().map(|(role, content)| message(*role, *content)));
        let mut variables = vec![
            ("add_generation_prompt".to_owned(), Value::from(true)),
            ("mode".to_owned(), Value::from(turn.mode)),
        ];
        if turn.tools {
            variables.push(("tools".to_owned(), value(json!([{ "function": { "name": "f" } }]))));
        }
        let now = TemplateTime::utc(turn.seconds);
        let before = earlier.as_ref().map(|(text, places)| (text, places, known));
        let rendered = template.render_turn(&variables, &messages, before, now, [0, 1 << 20]);
        variables.push(("messages".to_owned(), Value::from(messages.clone())));
        let whole = template.render(variables, now, 0, 1 << 20);
        let Ok(whole) = whole else {
            assert!(rendered.is_none());
            earlier = None;
            continue;
        };
        let rendered = rendered.unwrap();
        let text = match &earlier {
            Some((text, _)) => text.with_rest(rendered.shared, rendered.rest),
            None => TextParts::new(rendered.rest),
        };
        assert_eq!(text.slice(0..text.len()), whole, "{messages:?}");
        shared.push(rendered.shared);
        earlier = Some((text, rendered.places));
    }
    shared
}

fn plain(added: &[(usize, usize)]) -> Turn {
    Turn { dropped: 0, added: added.to_vec(), mode: false, tools: false, seconds: 0 }
}

#[test]
fn later_turns_share_the_text_before_the_last_message() {
    for template in [SMALL, THINKING] {
        let turns = [plain(&[(0, 0), (1, 1), (4, 0)]), plain(&[(1, 1), (0, 0)]), plain(&[(1, 3), (2, 0)])];
        let shared = check(template, &turns);
        assert_eq!(shared[0], 0);
        // The last message may have another text at another place.
        assert!(shared[1] > 0 && shared[2] > shared[1], "{shared:?} {template}");
    }
}

#[test]
fn turns_of_other_variables_are_rendered_completely() {
    let first = plain(&[(0, 0), (1, 1), (4, 0)]);
    let with_mode = Turn { mode: true, ..plain(&[(1, 1), (0, 0)]) };
    assert_eq!(check(RELATED, &[first.clone(), with_mode.clone()])[1], 0);
    assert!(check(THINKING, &[first.clone(), with_mode])[1] > 0, "it has no such variable");
    // The text before the messages differs.
    let later = Turn { seconds: 1, ..plain(&[(1, 1), (0, 0)]) };
    assert_eq!(check(RELATED, &[first, later])[1], 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn turns_equal_complete_renderings(
        template in prop::sample::select(TEMPLATES.to_vec()),
        turns in prop::collection::vec(turn(), 1..12),
    ) {
        check(template, &turns);
    }
}
