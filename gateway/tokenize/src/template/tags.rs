//! Divides a chat template into its tags, and these into tokens, as the template engine does.

/// A statement `{% … %}` or an expression `{{ … }}`.
#[derive(Debug)]
pub(super) struct TemplateTag<'a> {
    pub(super) is_statement: bool,
    pub(super) tokens: Vec<TagToken<'a>>,
}

/// A name, a number, a string with its quotes, or an operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TagToken<'a> {
    pub(super) text: &'a str,
    /// Offset in the template in bytes.
    pub(super) start: usize,
}

impl TagToken<'_> {
    /// Whether it is a name or a keyword.
    pub(super) fn is_name(&self) -> bool {
        self.text.starts_with(|first: char| first == '_' || first.is_ascii_alphabetic())
    }
}

impl TemplateTag<'_> {
    /// The text of a token; empty behind the last one.
    pub(super) fn text(&self, at: usize) -> &str {
        self.tokens.get(at).map_or("", |token| token.text)
    }

    /// The keyword of a statement.
    pub(super) fn keyword(&self) -> &str {
        if self.is_statement { self.text(0) } else { "" }
    }
}

/// The tags of a template in order; `None` for one with syntax that templates of models do not use, such as `raw` blocks.
pub(super) fn tags(source: &str) -> Option<Vec<TemplateTag<'_>>> {
    let mut tags = Vec::new();
    let mut at = 0;
    while let Some(brace) = source[at..].find('{').map(|found| at + found) {
        at = brace + 2;
        match source.as_bytes().get(brace + 1) {
            Some(b'#') => at += source.get(at..)?.find("#}")? + 2,
            Some(b'{') => at = push_tag(source, at, "}}", &mut tags)?,
            Some(b'%') => {
                at = push_tag(source, at, "%}", &mut tags)?;
                if tags.last().is_some_and(|tag| tag.keyword() == "raw") {
                    return None;
                }
            }
            _ => at = brace + 1,
        }
    }
    Some(tags)
}

/// Adds the tag whose tokens begin at `start`; returns where it ends.
fn push_tag<'a>(source: &'a str, start: usize, end: &str, tags: &mut Vec<TemplateTag<'a>>) -> Option<usize> {
    let mut tokens = Vec::new();
    let mut depth = 0_u32;
    // A sign behind the delimiter controls white space.
    let mut at = start + source.get(start..)?.strip_prefix(['-', '+']).map_or(0, |_| 1);
    loop {
        let rest = &source[at..];
        let trimmed = rest.trim_start_matches(|c: char| c.is_ascii_whitespace());
        at += rest.len() - trimmed.len();
        let closing = trimmed.strip_prefix(['-', '+']).unwrap_or(trimmed);
        if depth == 0 && (trimmed.starts_with(end) || closing.starts_with(end)) {
            let signs = if trimmed.starts_with(end) { 0 } else { 1 };
            tags.push(TemplateTag { is_statement: end == "%}", tokens });
            return Some(at + signs + end.len());
        }
        let length = token_length(trimmed)?;
        let text = &trimmed[..length];
        match text {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth = depth.checked_sub(1)?,
            _ => {}
        }
        tokens.push(TagToken { text, start: at });
        at += length;
    }
}

/// Length of the token with which `text` begins.
fn token_length(text: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    let first = *bytes.first()?;
    match first {
        b'"' | b'\'' => {
            let mut escaped = false;
            let close = bytes.iter().skip(1).position(|&byte| {
                let closes = byte == first && !escaped;
                escaped = byte == b'\\' && !escaped;
                closes
            })?;
            Some(close + 2)
        }
        b'_' | b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' => {
            let is_inside = |byte: &u8| *byte == b'_' || byte.is_ascii_alphanumeric();
            Some(bytes.iter().position(|byte| !is_inside(byte)).unwrap_or(bytes.len()))
        }
        _ if ["//", "**", "==", "!=", ">=", "<="].iter().any(|operator| text.starts_with(operator)) => {
            Some(2)
        }
        _ => first.is_ascii().then_some(1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_have_their_tags() {
        let source =
            "a { {%- set x = {'}}': [1.5, \"%}\\\"\"]} -%} {# {{ no }} #}{{+ x.y|f(a==b) -}}{{ -1 }}";
        let tags = tags(source).unwrap();
        let texts: Vec<Vec<&str>> =
            tags.iter().map(|tag| tag.tokens.iter().map(|token| token.text).collect()).collect();
        assert_eq!(
            texts,
            [
                vec!["set", "x", "=", "{", "'}}'", ":", "[", "1", ".", "5", ",", "\"%}\\\"\"", "]", "}"],
                vec!["x", ".", "y", "|", "f", "(", "a", "==", "b", ")"],
                vec!["-", "1"],
            ]
        );
        assert_eq!(tags.iter().map(TemplateTag::keyword).collect::<Vec<_>>(), ["set", "", ""]);
        for token in tags.iter().flat_map(|tag| &tag.tokens) {
            assert!(source[token.start..].starts_with(token.text));
        }
    }

    #[test]
    fn unclosed_and_raw_blocks_are_not_read() {
        for source in ["{{ x", "{% raw %}{{{% endraw %}", "{# x", "{{ 'x }}", "{{ ) }}", "{{ ä }}"] {
            assert!(tags(source).is_none(), "{source}");
        }
    }
}
