//! Parses common bodies in one pass without copying their strings: serde_json unescapes each of them into a buffer, and a prompt
//! has an escape on every line.
//!
//! Returns `None` for everything it does not handle fully; then serde_json parses the body and decides. So it must never accept
//! what serde_json rejects, nor return other values than serde_json.

use std::borrow::Cow;

use super::body_member::{BodyMember, is_id_key};
use super::json_shape::{JsonKind, JsonShape, SamplingKey, SamplingParams, is_cache_mark};
use super::media_parts::{MediaKind, is_tool_input};
use super::routing_fields::{BodyMembers, may_change_hashes, may_limit_reuse};
use super::string_scan::{ScanStop, scan_string};
use super::transfer_members::{is_transfer_member, is_user_data};

/// Most nested arrays and objects; below serde_json's own limit of 127.
const MAX_DEPTH: u32 = 100;

/// Most digits of an integer that always fits 64 bits; serde_json rounds longer ones in its own way.
const MAX_INTEGER_DIGITS: usize = 19;

/// Most digits of a fraction; more than any client sends.
const MAX_FRACTION_DIGITS: usize = 64;

/// Placeholder for a number with a fraction, whose last bit depends on serde_json's arithmetic. JSON has no NaN.
const INEXACT: f64 = f64::NAN;

/// The members of `body`, or `None` if serde_json must parse it or report the error.
pub(super) fn members(body: &[u8]) -> Option<BodyMembers<'_>> {
    let mut reader = FastBodyReader {
        text: std::str::from_utf8(body).ok()?,
        bytes: body,
        position: 0,
        finds_transfer_members: false,
        finds_media: false,
        is_media: false,
    };
    let mut members = BodyMembers::default();
    reader.skip_whitespace();
    reader.consume(b'{')?;
    let mut first = true;
    while reader.next_item(b'}', first)? {
        first = false;
        let name = reader.key()?;
        let key = BodyMember::from_key(name);
        let start = reader.position;
        reader.finds_transfer_members = matches!(reader.peek()?, b'{' | b'[') && !is_user_data(name);
        reader.finds_media = key.is_some_and(BodyMember::has_media);
        let mut shape = JsonShape::default();
        shape.kind = reader.value(&mut shape, 1)?;
        if key.is_some() && is_inexact(&shape) {
            return None;
        }
        if let Some(member) = key.filter(|member| member.has_text()) {
            let text = match shape.kind {
                JsonKind::String => Some(Cow::Borrowed(reader.plain_string(start)?)),
                JsonKind::Object => reader.id_in_object(start)?.map(Cow::Borrowed),
                _ => None,
            };
            members.set_text(member, text);
            shape = JsonShape { kind: shape.kind, ..JsonShape::default() };
        }
        members.has_transfer_members |= shape.has_transfer_members || is_transfer_member(name);
        members.may_limit_reuse |= may_limit_reuse(name);
        members.may_change_hashes |= may_change_hashes(name);
        members.record(key, shape);
    }
    reader.skip_whitespace();
    (reader.position == body.len()).then_some(members)
}

/// Whether a number in the shape is not known exactly.
fn is_inexact(shape: &JsonShape) -> bool {
    let kind = |kind: JsonKind| matches!(kind, JsonKind::Number(value) if value.is_nan());
    let number = |value: Option<f64>| value.is_some_and(f64::is_nan);
    kind(shape.kind)
        || kind(shape.first_item)
        || shape.mismatched_item.is_some_and(|(_, mismatched)| kind(mismatched))
        || shape.sampling.is_some_and(|sampling| number(sampling.n) || number(sampling.max_new_tokens))
}

/// A position in the body. A method returns `None` for anything that is left to serde_json.
struct FastBodyReader<'a> {
    text: &'a str,
    bytes: &'a [u8],
    position: usize,
    /// Whether members that steer KV transfer are searched for in the current value.
    finds_transfer_members: bool,
    /// Whether media is searched for in the current value.
    finds_media: bool,
    /// Whether the position is inside a member with media.
    is_media: bool,
}

impl<'a> FastBodyReader<'a> {
    fn peek(&self) -> Option<u8> {
        self.bytes.get(self.position).copied()
    }

    fn consume(&mut self, expected: u8) -> Option<()> {
        (self.peek()? == expected).then(|| self.position += 1)
    }

    fn skip_whitespace(&mut self) {
        while let Some(b' ' | b'\n' | b'\t' | b'\r') = self.peek() {
            self.position += 1;
        }
    }

    /// Advances to the next item of an array or object, or past its end; the item's own parser rejects a trailing comma.
    fn next_item(&mut self, close: u8, first: bool) -> Option<bool> {
        self.skip_whitespace();
        if self.peek()? == close {
            self.position += 1;
            return Some(false);
        }
        if !first {
            self.consume(b',')?;
            self.skip_whitespace();
        }
        Some(true)
    }

    /// A key without escapes, up to its value.
    fn key(&mut self) -> Option<&'a str> {
        let start = self.position;
        self.consume(b'"')?;
        self.string()?;
        let key = self.plain_string(start)?;
        self.skip_whitespace();
        self.consume(b':')?;
        self.skip_whitespace();
        Some(key)
    }

    /// The string that starts at `start` and was just read, if it has no escapes.
    fn plain_string(&self, start: usize) -> Option<&'a str> {
        let text = self.text.get(start + 1..self.position.checked_sub(1)?)?;
        (!text.contains('\\')).then_some(text)
    }

    /// The id in an object that starts at `start` and was just read.
    fn id_in_object(&self, start: usize) -> Option<Option<&'a str>> {
        let end = self.position;
        let mut reader = FastBodyReader { position: start, finds_media: false, ..*self };
        reader.consume(b'{')?;
        let (mut id, mut first) = (None, true);
        while reader.next_item(b'}', first)? {
            first = false;
            let is_id = is_id_key(reader.key()?);
            let start = reader.position;
            let kind = reader.value(&mut JsonShape::default(), 2)?;
            if is_id {
                id = if kind == JsonKind::String { Some(reader.plain_string(start)?) } else { None };
            }
        }
        (reader.position == end).then_some(id)
    }

    /// Reads one value; `depth` counts the arrays and objects around it, and 1 is the depth of the member's own value.
    fn value(&mut self, shape: &mut JsonShape, depth: u32) -> Option<JsonKind> {
        match self.peek()? {
            b'"' => {
                self.position += 1;
                let start = self.position;
                let length = self.string()?;
                if self.is_media {
                    shape.media().add_text(&self.unescaped(start, length)?);
                } else {
                    shape.string_bytes += length;
                }
                Some(JsonKind::String)
            }
            b'-' | b'0'..=b'9' => {
                shape.numbers += 1;
                self.number().map(JsonKind::Number)
            }
            b'[' => self.array(shape, depth),
            b'{' => self.object(shape, depth),
            b't' => self.literal("true", JsonKind::Bool(true)),
            b'f' => self.literal("false", JsonKind::Bool(false)),
            b'n' => self.literal("null", JsonKind::Null),
            _ => None,
        }
    }

    fn array(&mut self, shape: &mut JsonShape, depth: u32) -> Option<JsonKind> {
        self.check_depth(depth)?;
        let mut first = true;
        while self.next_item(b']', first)? {
            first = false;
            if depth == 1 {
                shape.start_item();
            }
            let kind = self.value(shape, depth + 1)?;
            if depth == 1 {
                shape.add_item(kind);
            }
        }
        Some(JsonKind::Array)
    }

    fn object(&mut self, shape: &mut JsonShape, depth: u32) -> Option<JsonKind> {
        self.check_depth(depth)?;
        let mut sampling = SamplingParams::default();
        let mut first = true;
        while self.next_item(b'}', first)? {
            first = false;
            let key = self.key()?;
            shape.has_transfer_members |= self.finds_transfer_members && is_transfer_member(key);
            let media = MediaKind::of_key(key).filter(|_| self.finds_media && !self.is_media);
            let kind = match media {
                Some(media) => self.media(media, shape, depth + 1)?,
                None if is_tool_input(key) => self.tool_input(shape, depth + 1)?,
                None => self.value(shape, depth + 1)?,
            };
            shape.has_cache_mark |= kind == JsonKind::Object && is_cache_mark(key);
            if depth == 1 {
                sampling.set(SamplingKey::from_key(key), kind);
            }
        }
        if depth == 1 {
            shape.sampling = Some(sampling);
        }
        Some(JsonKind::Object)
    }

    /// Reads the value of a member with media.
    fn media(&mut self, kind: MediaKind, shape: &mut JsonShape, depth: u32) -> Option<JsonKind> {
        shape.media().begin(kind);
        self.is_media = true;
        let kind = self.value(shape, depth)?;
        self.is_media = false;
        if kind == JsonKind::Null {
            shape.media().cancel();
        }
        Some(kind)
    }

    /// Reads the arguments of a tool, which may have members of any name.
    fn tool_input(&mut self, shape: &mut JsonShape, depth: u32) -> Option<JsonKind> {
        let finds_media = std::mem::replace(&mut self.finds_media, false);
        let kind = self.value(shape, depth);
        self.finds_media = finds_media;
        kind
    }

    /// The string that starts at `start`, was just read and has `length` bytes without its escapes.
    fn unescaped(&self, start: usize, length: u64) -> Option<Cow<'a, str>> {
        let text = self.text.get(start..self.position.checked_sub(1)?)?;
        if text.len() as u64 == length {
            return Some(Cow::Borrowed(text));
        }
        serde_json::from_str(self.text.get(start.checked_sub(1)?..self.position)?).map(Cow::Owned).ok()
    }

    /// Enters an array or object, if the depth permits it.
    fn check_depth(&mut self, depth: u32) -> Option<()> {
        self.position += 1;
        (depth < MAX_DEPTH).then_some(())
    }

    fn literal(&mut self, word: &str, kind: JsonKind) -> Option<JsonKind> {
        self.bytes.get(self.position..)?.starts_with(word.as_bytes()).then(|| self.position += word.len())?;
        Some(kind)
    }

    /// A number without an exponent: its value if it is an integer, otherwise [`INEXACT`].
    fn number(&mut self) -> Option<f64> {
        let negative = self.consume(b'-').is_some();
        let leading_zero = self.peek()? == b'0';
        let (digits, whole) = self.digits();
        if digits == 0 || digits > MAX_INTEGER_DIGITS || (leading_zero && digits > 1) {
            return None;
        }
        if self.consume(b'.').is_some() {
            let (digits, _) = self.digits();
            return (1..=MAX_FRACTION_DIGITS).contains(&digits).then_some(INEXACT);
        }
        let whole = whole as f64;
        Some(if negative { -whole } else { whole })
    }

    /// Number of digits that follow, and their value if they are at most [`MAX_INTEGER_DIGITS`].
    fn digits(&mut self) -> (usize, u64) {
        let start = self.position;
        let mut value = 0_u64;
        while let Some(digit @ b'0'..=b'9') = self.peek() {
            value = value.wrapping_mul(10).wrapping_add(u64::from(digit - b'0'));
            self.position += 1;
        }
        (self.position - start, value)
    }

    /// The rest of a string after its opening quote: its unescaped length.
    fn string(&mut self) -> Option<u64> {
        let mut length = 0;
        loop {
            let scanned = scan_string(self.bytes.get(self.position..)?);
            length += scanned.length;
            self.position += scanned.end;
            match scanned.stop {
                ScanStop::Quote => {
                    self.position += 1;
                    return Some(length);
                }
                ScanStop::OtherEscape => length += self.escape()?,
                ScanStop::Invalid => return None,
            }
        }
    }

    /// The rest of an escape after its backslash: the number of bytes it stands for. Surrogates are left to serde_json.
    fn escape(&mut self) -> Option<u64> {
        let kind = self.peek()?;
        self.position += 1;
        match kind {
            b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't' => Some(1),
            b'u' => {
                let mut code = 0;
                for digit in self.bytes.get(self.position..self.position + 4)? {
                    code = code * 16 + char::from(*digit).to_digit(16)?;
                }
                self.position += 4;
                Some(char::from_u32(code)?.len_utf8() as u64)
            }
            _ => None,
        }
    }
}
