//! Python's rules for texts.

/// Python's white space: Unicode's, and the four information separators.
pub(crate) fn is_space(character: char) -> bool {
    character.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&character)
}

/// The text without the white space around it.
pub(crate) fn strip(text: &str) -> &str {
    text.trim_matches(is_space)
}
