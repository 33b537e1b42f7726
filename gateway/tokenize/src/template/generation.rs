//! `{% generation %}` blocks, which mark an assistant's text for training; the text inside is rendered as usual.

/// Replaces `generation` blocks by `with` blocks: both only open a scope for variables.
pub(super) fn without_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        let Some(end) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let (tag, after) = tag.split_at(end + 2);
        out.push_str(&renamed(tag));
        rest = after;
    }
    out.push_str(rest);
    out
}

fn renamed(tag: &str) -> String {
    let inside = tag.trim_start_matches("{%").trim_end_matches("%}");
    match inside.trim_matches(['-', '+']).trim() {
        "generation" => tag.replace("generation", "with"),
        "endgeneration" => tag.replace("endgeneration", "endwith"),
        _ => tag.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_tags_change() {
        assert_eq!(
            without_tags("{%- generation -%}generation{% endgeneration %}{% if generation %}{% x"),
            "{%- with -%}generation{% endwith %}{% if generation %}{% x"
        );
    }
}
