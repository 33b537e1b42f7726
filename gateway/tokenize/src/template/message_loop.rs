//! Proves for a template that what it renders of a message depends on little else, so that a conversation's next turn needs only its new
//! messages rendered.
//!
//! The proof needs a template that ends with one loop over all messages, whose body changes nothing outside itself. Then a message's text
//! follows from the message, its position, and the variables that the body names. The template is rewritten so that this loop runs over a
//! window of the messages, with their positions among all; everything before and behind the loop is rendered for every turn as ever.

use std::collections::BTreeSet;

use super::tags::{TemplateTag, tags};

/// Name of the function that returns the messages of the loop, each with its position.
pub(super) const WINDOW: &str = "moongate_window";
/// Name of the position, which replaces the body's `loop`.
const POSITION: &str = "moongate_position";
const MESSAGES: &str = "messages";

/// The loop over a template's messages.
#[derive(Debug)]
pub(super) struct MessageLoop {
    /// The template with a loop over a window of the messages.
    pub(super) source: String,
    /// Names in the body, which may be variables from outside it.
    pub(super) variables: Vec<String>,
    /// Members of variables with which the body only compares a message's index.
    pub(super) limits: Vec<LimitMember>,
    /// Whether the body reads the message before each, which before the first is the last one.
    pub(super) reads_previous: bool,
}

/// A member of a variable, such as the index of the last question.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LimitMember {
    pub(super) variable: String,
    pub(super) member: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TemplateBlock {
    If,
    For,
    Set,
    With,
    Macro,
}

impl MessageLoop {
    /// The loop of `source`; `None` if a message's text might depend on more.
    pub(super) fn find(source: &str) -> Option<MessageLoop> {
        if source.contains(WINDOW) || source.contains(POSITION) {
            return None;
        }
        let tags = tags(source)?;
        let outline = TemplateOutline::of(&tags)?;
        let mut body = LoopBody::default();
        for (range, is_macro) in
            outline.macros.iter().map(|range| (range, true)).chain([(&outline.body, false)])
        {
            let mut nested = Vec::new();
            tags[range.clone()].iter().try_for_each(|tag| body.read(tag, is_macro, &mut nested))?;
        }
        // `for message in messages`
        let header = &tags[outline.body.start - 1].tokens;
        let target = header[1];
        let mut edits = body.positions;
        edits.push((target.start + target.text.len(), 0, format!(", {POSITION}")));
        edits.push((header[3].start, MESSAGES.len(), format!("{WINDOW}()")));
        Some(MessageLoop {
            source: edited(source, edits),
            variables: body.variables.into_iter().collect(),
            limits: body.limits,
            reads_previous: body.reads_previous,
        })
    }
}

/// Replaces, at each offset, so many bytes by a text.
fn edited(source: &str, mut edits: Vec<(usize, usize, String)>) -> String {
    edits.sort();
    let mut out = String::with_capacity(source.len() + 256);
    let mut copied = 0;
    for (start, length, text) in edits {
        out.push_str(&source[copied..start]);
        out.push_str(&text);
        copied = start + length;
    }
    out + &source[copied..]
}

/// Where a template's parts are, by the numbers of their tags.
struct TemplateOutline {
    /// The body of the last loop over the messages.
    body: std::ops::Range<usize>,
    macros: Vec<std::ops::Range<usize>>,
}

impl TemplateOutline {
    fn of(tags: &[TemplateTag<'_>]) -> Option<TemplateOutline> {
        let (mut body, mut macros) = (None, Vec::new());
        let mut open: Vec<(TemplateBlock, usize)> = Vec::new();
        for (number, tag) in tags.iter().enumerate().filter(|(_, tag)| tag.is_statement) {
            if assigns_messages(tag) {
                return None;
            }
            let (opens, closes) = match tag.keyword() {
                "if" => (Some(TemplateBlock::If), None),
                "for" => (Some(TemplateBlock::For), None),
                "with" => (Some(TemplateBlock::With), None),
                "macro" => (Some(TemplateBlock::Macro), None),
                "set" => ((!is_assignment(tag)).then_some(TemplateBlock::Set), None),
                "endif" => (None, Some(TemplateBlock::If)),
                "endfor" => (None, Some(TemplateBlock::For)),
                "endwith" => (None, Some(TemplateBlock::With)),
                "endmacro" => (None, Some(TemplateBlock::Macro)),
                "endset" => (None, Some(TemplateBlock::Set)),
                "elif" | "else" if open.last().is_some_and(|(block, _)| *block == TemplateBlock::If) => {
                    (None, None)
                }
                "continue" | "break" => (None, None),
                _ => return None,
            };
            open.extend(opens.map(|block| (block, number)));
            let Some(block) = closes else { continue };
            let (opened, start) = open.pop()?;
            if opened != block {
                return None;
            }
            let range = start + 1..number;
            let is_message_loop = || {
                let tag = &tags[start];
                tag.tokens.len() == 4
                    && tag.tokens[1].is_name()
                    && tag.text(2) == "in"
                    && tag.text(3) == MESSAGES
            };
            match block {
                TemplateBlock::Macro if open.is_empty() => macros.push(range),
                TemplateBlock::Macro => return None,
                TemplateBlock::For if open.is_empty() && is_message_loop() => body = Some(range),
                _ => {}
            }
        }
        if !open.is_empty() {
            return None;
        }
        Some(TemplateOutline { body: body?, macros })
    }
}

/// The tokens of `set`, `for`, `with` and `macro` that are assigned to.
fn assigns_messages(tag: &TemplateTag<'_>) -> bool {
    let behind = match tag.keyword() {
        "set" => "=",
        "for" => "in",
        "with" | "macro" => "",
        _ => return false,
    };
    let targets = tag.tokens.iter().take_while(|token| token.text != behind);
    targets.into_iter().any(|token| token.text == MESSAGES)
}

/// Whether a `set` statement has a value, and no block.
fn is_assignment(tag: &TemplateTag<'_>) -> bool {
    let mut depth = 0;
    tag.tokens.iter().any(|token| {
        match token.text {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth -= 1,
            _ => {}
        }
        depth == 0 && token.text == "="
    })
}

/// What the body of the loop reads.
#[derive(Default)]
struct LoopBody {
    variables: BTreeSet<String>,
    limits: Vec<LimitMember>,
    reads_previous: bool,
    /// Replacements of `loop`.
    positions: Vec<(usize, usize, String)>,
}

impl LoopBody {
    /// Reads a tag of the body, or of a macro. `nested` are the blocks inside that are open.
    fn read(&mut self, tag: &TemplateTag<'_>, is_macro: bool, nested: &mut Vec<TemplateBlock>) -> Option<()> {
        let in_loop = nested.contains(&TemplateBlock::For);
        match tag.keyword() {
            "for" => {
                if tag.tokens.iter().any(|token| matches!(token.text, "loop" | "recursive")) {
                    return None;
                }
                nested.push(TemplateBlock::For);
            }
            "endfor" => {
                nested.pop();
            }
            // A member of a namespace keeps its value beyond the iteration.
            "set"
                if tag.tokens.iter().take_while(|token| token.text != "=").any(|token| token.text == ".") =>
            {
                return None;
            }
            "break" if !in_loop => return None,
            _ => {}
        }
        let mut at = usize::from(tag.is_statement);
        while at < tag.tokens.len() {
            at += self.read_token(tag, at, is_macro, in_loop)?;
        }
        Some(())
    }

    /// Reads a token; returns how many are read.
    fn read_token(
        &mut self,
        tag: &TemplateTag<'_>,
        at: usize,
        is_macro: bool,
        in_loop: bool,
    ) -> Option<usize> {
        let token = tag.tokens[at];
        let is_member = at > 0 && tag.text(at - 1) == ".";
        if !token.is_name() || is_member {
            return Some(1);
        }
        let is_position = !is_macro && !in_loop;
        match token.text {
            "and" | "or" | "not" | "in" | "is" | "if" | "else" | "true" | "false" | "none" | "True"
            | "False" | "None" => {}
            "loop" if in_loop => {}
            "loop" if is_position => {
                let is_known = matches!(tag.text(at + 2), "index" | "index0" | "first" | "last");
                if tag.text(at + 1) != "." || !is_known {
                    return None;
                }
                self.positions.push((token.start, token.text.len(), POSITION.to_owned()));
                if let Some(limit) = limit_at(tag, at) {
                    self.limits.push(limit);
                    return Some(7);
                }
            }
            MESSAGES if is_position => {
                let behind: Vec<&str> = (at + 1..at + 8).map(|at| tag.text(at)).collect();
                match behind[..] {
                    ["[", "0", "]", ..] | ["[", "loop", ".", "index0", "+", "1", "]"] => {}
                    ["[", "loop", ".", "index0", "-", "1", "]"] => self.reads_previous = true,
                    _ => return None,
                }
            }
            // Names that are no variables of the template, or whose value is another one each time.
            "loop" | MESSAGES | "strftime_now" | "debug" | "caller" | "self" | "super" | "varargs"
            | "kwargs" => {
                return None;
            }
            name => {
                self.variables.insert(name.to_owned());
            }
        }
        Some(1)
    }
}

/// The limit in `loop.index0 > variable.member` at the token `loop`, if nothing else is done with it.
fn limit_at(tag: &TemplateTag<'_>, at: usize) -> Option<LimitMember> {
    let is_compared = tag.text(at + 2) == "index0" && matches!(tag.text(at + 3), ">" | ">=" | "<" | "<=");
    let (variable, member) = (tag.tokens.get(at + 4)?, tag.tokens.get(at + 6)?);
    let is_member = variable.is_name() && tag.text(at + 5) == "." && member.is_name();
    let before = at.checked_sub(1).map_or("", |before| tag.text(before));
    let is_alone = matches!(before, "if" | "elif" | "and" | "or" | "not" | "(")
        && matches!(tag.text(at + 7), "" | "and" | "or" | "else" | ")");
    let (variable, member) = (variable.text.to_owned(), member.text.to_owned());
    (is_compared && is_member && is_alone).then_some(LimitMember { variable, member })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENDS: &str = "{% endfor %}{{ ns.x }}";

    fn found(body: &str) -> Option<MessageLoop> {
        MessageLoop::find(&format!(
            "{{% set ns = namespace(x=1) %}}{{% for message in messages %}}{body}{ENDS}"
        ))
    }

    #[test]
    fn the_loop_runs_over_a_window() {
        let body = "{% if loop.index0 > ns.x and not loop.last %}{% for loop_item in message.calls %}{{ loop.first }}\
            {% endfor %}{% endif %}{{ 'loop' + message.loop }}";
        let found = found(body).unwrap();
        assert_eq!(
            found.source,
            "{% set ns = namespace(x=1) %}{% for message, moongate_position in moongate_window() %}\
            {% if moongate_position.index0 > ns.x and not moongate_position.last %}\
            {% for loop_item in message.calls %}{{ loop.first }}{% endfor %}{% endif %}{{ 'loop' + message.loop }}\
            {% endfor %}{{ ns.x }}"
        );
        assert_eq!(found.variables, ["loop_item", "message"]);
        let (variable, member) = ("ns".to_owned(), "x".to_owned());
        assert_eq!((found.limits, found.reads_previous), (vec![LimitMember { variable, member }], false));
    }

    #[test]
    fn variables_and_neighbours_are_found() {
        let body = "{% if messages[loop.index0 - 1].role == messages[loop.index0 + 1].role %}{{ messages[0] }}{% endif %}";
        assert!(found(body).unwrap().reads_previous);
        for limit in
            ["loop.index0 > ns.x + 1", "loop.index > ns.x", "1 + loop.index0 > ns.x", "ns.x < loop.index0"]
        {
            let found = found(&format!("{{% if {limit} %}}a{{% endif %}}")).unwrap();
            assert_eq!((found.variables, found.limits.len()), (vec!["ns".to_owned()], 0), "{limit}");
        }
        let source = format!(
            "{{% macro show(text) %}}{{{{ text + end }}}}{{% endmacro %}}{{% for m in messages %}}{{{{ show(m) }}}}{ENDS}"
        );
        assert_eq!(MessageLoop::find(&source).unwrap().variables, ["end", "m", "show", "text"]);
    }

    #[test]
    fn other_templates_need_all_messages() {
        for body in [
            "{% set ns.x = 2 %}",
            "{% break %}",
            "{{ loop.changed(1) }}",
            "{{ loop.nextitem }}",
            "{{ loop }}",
            "{{ messages | length }}",
            "{{ messages[-1] }}",
            "{{ messages[loop.index0 + 2] }}",
            "{% for call in message.calls %}{{ messages[loop.index0 - 1] }}{% endfor %}",
            "{% for call in loop %}{% endfor %}",
            "{{ strftime_now('%H') }}",
            "{{ debug() }}",
            "{% else %}",
            "{% include 'x' %}",
            "{% set messages = [] %}",
            "{{ moongate_window }}",
        ] {
            assert!(found(body).is_none(), "{body}");
        }
        for source in [
            "{% if x %}{% for message in messages %}{% endfor %}{% endif %}",
            "{% for message in messages[1:] %}{% endfor %}",
            "{% for message in messages if message.role %}{% endfor %}",
            "{% for a, b in messages %}{% endfor %}",
            "{% set messages = messages[1:] %}{% for message in messages %}{% endfor %}",
            "{% macro m() %}{% set ns.x = 1 %}{% endmacro %}{% for message in messages %}{{ m() }}{% endfor %}",
            "{{ messages }}",
        ] {
            assert!(MessageLoop::find(source).is_none(), "{source}");
        }
    }
}
