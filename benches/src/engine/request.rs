//! Reads four members of a completion's body without parsing it.

use std::time::Duration;

use memchr::memmem;

/// Gateways append their members, and the load generator puts its own after the messages: the relevant members are near
/// the end. Searching the whole body would cost more than everything else here.
const SEARCHED_TAIL_BYTES: usize = 1024;
/// Maximum number of tokens of a stream.
const MAX_TOKENS: u32 = 1 << 20;

/// Parameters of a completion request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CompletionParams {
    pub(super) stream: bool,
    pub(super) tokens: u32,
    pub(super) itl: Option<Duration>,
    pub(super) has_bootstrap_room: bool,
}

impl CompletionParams {
    pub(super) fn parse(body: &[u8]) -> Self {
        let tail = &body[body.len().saturating_sub(SEARCHED_TAIL_BYTES)..];
        Self {
            stream: value(tail, b"\"stream\":").is_some_and(|value| value.starts_with(b"true")),
            tokens: value(tail, b"\"max_tokens\":").and_then(number).unwrap_or(16).clamp(1, MAX_TOKENS),
            itl: value(tail, b"\"user\":")
                .and_then(|user| number(user.strip_prefix(b"\"itl-ms-")?))
                .map(|ms| Duration::from_millis(u64::from(ms))),
            has_bootstrap_room: value(tail, b"\"bootstrap_room\":")
                .is_some_and(|value| !value.starts_with(b"null")),
        }
    }
}

/// Text after the last occurrence of `member`.
fn value<'a>(body: &'a [u8], member: &[u8]) -> Option<&'a [u8]> {
    let offset = memmem::rfind(body, member)?;
    Some(body[offset + member.len()..].trim_ascii_start())
}

fn number(text: &[u8]) -> Option<u32> {
    let digits = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
    std::str::from_utf8(&text[..digits]).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_found_with_and_without_blanks() {
        let body =
            br#"{"messages":[],"max_tokens": 64,"stream": true,"user":"itl-ms-10","bootstrap_room":7}"#;
        let expected = CompletionParams {
            stream: true,
            tokens: 64,
            itl: Some(Duration::from_millis(10)),
            has_bootstrap_room: true,
        };
        assert_eq!(CompletionParams::parse(body), expected);
        let expected = CompletionParams { stream: false, tokens: 16, itl: None, has_bootstrap_room: false };
        assert_eq!(
            CompletionParams::parse(br#"{"messages":[],"user":"me","bootstrap_room":null}"#),
            expected
        );
    }
}
