//! Prints the parts of concatenated texts one after the other: the template engine would copy a message for each part behind it.

use super::tags::{TagToken, tags};

/// Name of the filter that fails for anything but a text, as a concatenation does.
pub(super) const TEXT_FILTER: &str = "moongate_text";

/// Replaces `{{ 'a' + b + 'c' }}` by `{{ 'a' }}{{ b | moongate_text }}{{ 'c' }}`, with the same output.
pub(super) fn without_concatenations(source: &str) -> String {
    let Some(tags) = tags(source) else { return source.to_owned() };
    let mut out = String::with_capacity(2 * source.len());
    let mut copied = 0;
    for tag in tags.iter().filter(|tag| !tag.is_statement) {
        for (plus, is_text) in operands(&tag.tokens).into_iter().flatten() {
            // Up to the operator, or to the end of the tag behind the last operand.
            let end = plus.map_or_else(
                || tag.tokens.last().map_or(copied, |last| last.start + last.text.len()),
                |plus| plus.start,
            );
            out.push_str(&source[copied..end]);
            copied = end;
            if !is_text {
                out.push_str(&format!(" | {TEXT_FILTER}"));
            }
            if let Some(plus) = plus {
                out.push_str("}}{{");
                copied = plus.start + plus.text.len();
            }
        }
    }
    out + &source[copied..]
}

/// The operands of a concatenation: for each the operator behind it, and whether it is a literal text. `None` if the tokens are no
/// concatenation, or may be a sum of other values.
fn operands<'a>(tokens: &[TagToken<'a>]) -> Option<Vec<(Option<TagToken<'a>>, bool)>> {
    let is_literal = |part: &[TagToken<'_>]| part.len() == 1 && part[0].text.starts_with(['\'', '"']);
    let (mut operands, mut depth, mut start) = (Vec::new(), 0_u32, 0);
    for (at, token) in tokens.iter().enumerate() {
        match token.text {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth = depth.checked_sub(1)?,
            "+" if depth == 0 => {
                // A sign, if there is nothing before it.
                if at == start {
                    return None;
                }
                operands.push((Some(*token), is_literal(&tokens[start..at])));
                start = at + 1;
            }
            "-" | "*" | "/" | "//" | "%" | "**" | "~" | "==" | "!=" | "<" | ">" | "<=" | ">=" | "=" | ","
            | ":" | "and" | "or" | "not" | "in" | "is" | "if" | "else"
                if depth == 0 =>
            {
                return None;
            }
            _ => {}
        }
    }
    if start == tokens.len() {
        return None;
    }
    operands.push((None, is_literal(&tokens[start..])));
    let is_text = operands.len() > 1 && operands.iter().any(|(_, is_text)| *is_text);
    is_text.then_some(operands)
}

#[cfg(test)]
mod tests {
    use minijinja::Value;
    use proptest::prelude::*;

    use super::*;
    use crate::template::{ChatTemplate, TemplateTime};

    #[test]
    fn parts_of_texts_are_printed_one_by_one() {
        for (source, expected) in [
            ("{{- 'a' + b.c + \"d\" -}}", "{{- 'a' }}{{ b.c  | moongate_text}}{{ \"d\" -}}"),
            ("{{b[1 + 2]+'+'}}", "{{b[1 + 2] | moongate_text}}{{'+'}}"),
            ("{{ 'a' + b | trim }}", "{{ 'a' }}{{ b | trim | moongate_text }}"),
        ] {
            assert_eq!(without_concatenations(source), expected);
        }
        for source in [
            "{{ a + b }}",
            "{{ 'a' }}",
            "{{ 'a' + b if c else d }}",
            "{{ 'a' + b * 2 }}",
            "{{ 'a' ~ b + c }}",
            "{{ ('a' + b) | trim }}",
            "{% set a = 'b' + c %}",
            "{{ f('a' + b, x='a' + c) }}",
            "{{ +1 + 'a' }}",
            "{{ 'a' + }}",
        ] {
            assert_eq!(without_concatenations(source), source);
        }
    }

    fn render(source: &str, value: &Value) -> Option<String> {
        let mut env = minijinja::Environment::new();
        env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        env.render_str(source, minijinja::context! { x => value }).ok()
    }

    proptest! {
        #[test]
        fn outputs_are_those_of_concatenations(
            parts in prop::collection::vec(prop::sample::select(vec![
                "'a'", "\"b\"", "x", "x.y", "x | upper", "(x + x)", "x[0]", "x.strip()", "1", "[x]", "none", "'{{'",
            ]), 1..5),
            number in 0..4_usize,
        ) {
            let value = [Value::from("text"), Value::from(7), Value::from(()), Value::from_pairs([("y", "z")])][number].clone();
            let source = format!("{{{{ {} }}}}", parts.join(" + "));
            let rendered = ChatTemplate::compile(&source, 1_000_000).unwrap().render(
                vec![("x".to_owned(), value.clone())], TemplateTime::utc(0), 0, 1 << 10,
            );
            prop_assert_eq!(rendered.ok(), render(&source, &value), "{}", source);
        }
    }
}
