//! Determines whether a template expects a message's content as one string or as a list of parts. Both engines search for a loop over
//! the content in the parsed template; this module finds the same loops in the template's text.

use crate::dialect::{ContentFormat, PromptDialect};

/// The content format that `engine` selects for this template.
pub(crate) fn content_format(engine: PromptDialect, source: &str) -> ContentFormat {
    let parts = match engine {
        PromptDialect::Vllm => loops_over_content(source),
        PromptDialect::Sglang => {
            ["image", "audio", "video", "vision"].iter().any(|word| source.contains(word))
                || statements(source).any(|statement| match statement {
                    TemplateStatement::For(_, over) => {
                        ["message", "msg", "m"].iter().any(|name| reaches(over, name, Some("content")))
                    }
                    TemplateStatement::Set(..) => false,
                })
        }
    };
    if parts { ContentFormat::Parts } else { ContentFormat::Text }
}

/// vLLM follows the names: those that `messages` is assigned to, the loops over these, and loops over their variables' content.
fn loops_over_content(source: &str) -> bool {
    let mut lists = vec!["messages"];
    let mut next = 0;
    while let Some(list) = lists.get(next).copied() {
        next += 1;
        for statement in statements(source) {
            if let TemplateStatement::Set(name, value) = statement
                && reaches(value, list, None)
                && !lists.contains(&name)
            {
                lists.push(name);
            }
        }
    }
    let messages: Vec<&str> = statements(source)
        .filter_map(|statement| match statement {
            TemplateStatement::For(name, over) if lists.iter().any(|list| reaches(over, list, None)) => {
                Some(name)
            }
            _ => None,
        })
        .collect();
    statements(source).any(|statement| match statement {
        TemplateStatement::For(_, over) => {
            messages.iter().any(|message| reaches(over, message, Some("content")))
        }
        TemplateStatement::Set(..) => false,
    })
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TemplateStatement<'a> {
    /// `for NAME in EXPRESSION`
    For(&'a str, &'a str),
    /// `set NAME = EXPRESSION`
    Set(&'a str, &'a str),
}

fn statements(source: &str) -> impl Iterator<Item = TemplateStatement<'_>> {
    source.split("{%").skip(1).filter_map(|tag| {
        let (inside, _) = tag.split_once("%}")?;
        let inside = inside.trim_matches(['-', '+']).trim();
        if let Some(rest) = inside.strip_prefix("for ") {
            let (name, over) = rest.split_once(" in ")?;
            return Some(TemplateStatement::For(name.trim(), over.trim()));
        }
        let (name, value) = inside.strip_prefix("set ")?.split_once('=')?;
        Some(TemplateStatement::Set(name.trim(), value.trim()))
    })
}

/// Whether the expression is `name` (or its member `key`), possibly sliced, filtered or tested.
fn reaches(expression: &str, name: &str, key: Option<&str>) -> bool {
    let Some(rest) = expression.strip_prefix(name) else { return false };
    let rest = match key {
        None => Some(rest),
        Some(key) => member(rest, key),
    };
    rest.is_some_and(only_filters)
}

/// The text behind `.key` or `['key']`; `None` if `rest` does not start with it.
fn member<'a>(rest: &'a str, key: &str) -> Option<&'a str> {
    let rest = rest.trim_start();
    if let Some(rest) = rest.strip_prefix('.') {
        return rest.strip_prefix(key);
    }
    let inside = rest.strip_prefix('[')?.trim_start();
    let quote = inside.chars().next().filter(|quote| matches!(quote, '"' | '\''))?;
    inside[1..].strip_prefix(key)?.strip_prefix(quote)?.trim_start().strip_prefix(']')
}

/// Whether `rest` has only slices, filters, tests, or a loop's condition.
fn only_filters(rest: &str) -> bool {
    let trimmed = rest.trim_start();
    if let Some(inside) = trimmed.strip_prefix('[') {
        return inside
            .split_once(']')
            .is_some_and(|(slice, after)| slice.contains(':') && only_filters(after));
    }
    let spaced = trimmed.len() < rest.len();
    trimmed.is_empty()
        || trimmed.starts_with('|')
        || (spaced && ["is ", "if ", "recursive"].iter().any(|word| trimmed.starts_with(word)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loop_over_the_content_selects_parts() {
        for (source, vllm, sglang) in [
            ("{% for message in messages %}{{ message.content }}{% endfor %}", false, false),
            ("{%- for message in messages -%}{%- for part in message['content'] -%}", true, true),
            ("{% for m in messages[1:] %}{% for part in m.content | list %}", true, true),
            (
                "{% set loop_messages = messages %}{% for x in loop_messages %}{% for part in x[\"content\"] %}",
                true,
                false,
            ),
            ("{% for message in other %}{% for part in message.content %}", false, true),
            ("{% for message in messages %}{% for part in message.contents %}", false, false),
            (
                "{% for message in messages if message.role %}{% for part in message.content if part %}",
                true,
                true,
            ),
            ("{% for message in messages %}{{ '<image>' }}", false, true),
        ] {
            let parts = |engine| content_format(engine, source) == ContentFormat::Parts;
            assert_eq!(
                (parts(PromptDialect::Vllm), parts(PromptDialect::Sglang)),
                (vllm, sglang),
                "{source}"
            );
        }
    }
}
