//! Reads the usual body in one pass without copying its strings: serde_json unescapes each of them into a buffer,
//! and a prompt has an escape on every line.
//!
//! Gives up (`None`) on everything it does not handle fully; then serde_json reads the body and has the last word.
//! So it must never accept what serde_json rejects, nor find anything else than serde_json does.

use std::borrow::Cow;

use memchr::memchr2;

use super::json_shape::{JsonKind, JsonShape, SamplingKey, SamplingParams};
use super::routing_fields::{BodyMember, BodyMembers};
use super::transfer_members::{is_transfer_member, is_user_data};

/// Arrays and objects inside one another; below serde_json's own limit of 127.
const MAX_DEPTH: u32 = 100;

/// Digits of a whole number that always fit 64 bits; serde_json has its own way to round longer ones.
const MAX_INTEGER_DIGITS: usize = 19;

/// Digits of a fraction; more than any program writes.
const MAX_FRACTION_DIGITS: usize = 64;

/// Stands for a number with a fraction, whose last bit only serde_json's own arithmetic gives. JSON has no NaN.
const INEXACT: f64 = f64::NAN;

/// The members of `body`, or `None` if serde_json must say what they are or what is wrong.
pub(super) fn members(body: &[u8]) -> Option<BodyMembers<'_>> {
    let mut reader = FastBodyReader {
        text: std::str::from_utf8(body).ok()?,
        bytes: body,
        at: 0,
        finds_transfer_members: false,
    };
    let mut members = BodyMembers::default();
    reader.skip_whitespace();
    reader.consume(b'{')?;
    let mut first = true;
    while reader.next_item(b'}', first)? {
        first = false;
        let name = reader.key()?;
        let key = BodyMember::from_key(name);
        let start = reader.at;
        reader.finds_transfer_members = matches!(reader.peek()?, b'{' | b'[') && !is_user_data(name);
        let mut tally = JsonShape::default();
        tally.kind = reader.value(&mut tally, 1)?;
        if key.is_some() && is_inexact(&tally) {
            return None;
        }
        if key == Some(BodyMember::Model) {
            members.model = match tally.kind {
                JsonKind::String => Some(Cow::Borrowed(reader.plain_string(start)?)),
                _ => None,
            };
            tally = JsonShape { kind: tally.kind, ..JsonShape::default() };
        }
        members.has_transfer_members |= tally.has_transfer_members || is_transfer_member(name);
        members.record(key, tally);
    }
    reader.skip_whitespace();
    (reader.at == body.len()).then_some(members)
}

/// Whether a number that the tally keeps is not known exactly.
fn is_inexact(tally: &JsonShape) -> bool {
    let kind = |kind: JsonKind| matches!(kind, JsonKind::Number(value) if value.is_nan());
    let number = |value: Option<f64>| value.is_some_and(f64::is_nan);
    kind(tally.kind)
        || kind(tally.first_item)
        || tally.mismatched_item.is_some_and(|(_, odd)| kind(odd))
        || tally.sampling.is_some_and(|sampling| number(sampling.n) || number(sampling.max_new_tokens))
}

/// A place in the body. Whatever its methods return as `None` is left to serde_json.
struct FastBodyReader<'a> {
    text: &'a str,
    bytes: &'a [u8],
    at: usize,
    /// Whether members that steer KV transfer are looked for in the value at hand.
    finds_transfer_members: bool,
}

impl<'a> FastBodyReader<'a> {
    fn peek(&self) -> Option<u8> {
        self.bytes.get(self.at).copied()
    }

    fn consume(&mut self, wanted: u8) -> Option<()> {
        (self.peek()? == wanted).then(|| self.at += 1)
    }

    fn skip_whitespace(&mut self) {
        while let Some(b' ' | b'\n' | b'\t' | b'\r') = self.peek() {
            self.at += 1;
        }
    }

    /// Goes to the next member of an array or object, or past its end; a comma before the end is found by the
    /// member's own reader.
    fn next_item(&mut self, close: u8, first: bool) -> Option<bool> {
        self.skip_whitespace();
        if self.peek()? == close {
            self.at += 1;
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
        let start = self.at;
        self.consume(b'"')?;
        self.string()?;
        let key = self.plain_string(start)?;
        self.skip_whitespace();
        self.consume(b':')?;
        self.skip_whitespace();
        Some(key)
    }

    /// The string that began at `start` and was just read, if it has no escapes.
    fn plain_string(&self, start: usize) -> Option<&'a str> {
        let text = self.text.get(start + 1..self.at.checked_sub(1)?)?;
        (!text.contains('\\')).then_some(text)
    }

    /// One value; `depth` counts the arrays and objects around it, and at 1 it is the tally's own.
    fn value(&mut self, tally: &mut JsonShape, depth: u32) -> Option<JsonKind> {
        match self.peek()? {
            b'"' => {
                self.at += 1;
                tally.string_bytes += self.string()?;
                Some(JsonKind::String)
            }
            b'-' | b'0'..=b'9' => {
                tally.numbers += 1;
                self.number().map(JsonKind::Number)
            }
            b'[' => self.array(tally, depth),
            b'{' => self.object(tally, depth),
            b't' => self.literal("true", JsonKind::Bool(true)),
            b'f' => self.literal("false", JsonKind::Bool(false)),
            b'n' => self.literal("null", JsonKind::Null),
            _ => None,
        }
    }

    fn array(&mut self, tally: &mut JsonShape, depth: u32) -> Option<JsonKind> {
        self.check_depth(depth)?;
        let mut first = true;
        while self.next_item(b']', first)? {
            first = false;
            let kind = self.value(tally, depth + 1)?;
            if depth == 1 {
                tally.add_item(kind);
            }
        }
        Some(JsonKind::Array)
    }

    fn object(&mut self, tally: &mut JsonShape, depth: u32) -> Option<JsonKind> {
        self.check_depth(depth)?;
        let mut sampling = SamplingParams::default();
        let mut first = true;
        while self.next_item(b'}', first)? {
            first = false;
            let key = self.key()?;
            tally.has_transfer_members |= self.finds_transfer_members && is_transfer_member(key);
            let kind = self.value(tally, depth + 1)?;
            if depth == 1 {
                sampling.set(SamplingKey::from_key(key), kind);
            }
        }
        if depth == 1 {
            tally.sampling = Some(sampling);
        }
        Some(JsonKind::Object)
    }

    /// Steps into an array or object.
    fn check_depth(&mut self, depth: u32) -> Option<()> {
        self.at += 1;
        (depth < MAX_DEPTH).then_some(())
    }

    fn literal(&mut self, word: &str, kind: JsonKind) -> Option<JsonKind> {
        self.bytes.get(self.at..)?.starts_with(word.as_bytes()).then(|| self.at += word.len())?;
        Some(kind)
    }

    /// A number without an exponent: its value if it is whole, otherwise [`INEXACT`].
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

    /// How many digits follow, and their value if they are at most [`MAX_INTEGER_DIGITS`].
    fn digits(&mut self) -> (usize, u64) {
        let start = self.at;
        let mut value = 0_u64;
        while let Some(digit @ b'0'..=b'9') = self.peek() {
            value = value.wrapping_mul(10).wrapping_add(u64::from(digit - b'0'));
            self.at += 1;
        }
        (self.at - start, value)
    }

    /// The rest of a string behind its opening quote: its length without the escapes.
    fn string(&mut self) -> Option<u64> {
        let mut length = 0;
        loop {
            let rest = self.bytes.get(self.at..)?;
            let end = memchr2(b'"', b'\\', rest)?;
            if has_control(rest.get(..end)?) {
                return None;
            }
            length += end as u64;
            self.at += end;
            if self.consume(b'"').is_some() {
                return Some(length);
            }
            self.at += 1;
            length += self.escape()?;
        }
    }

    /// The rest of an escape behind its backslash: how many bytes it stands for. Surrogates are left to serde_json.
    fn escape(&mut self) -> Option<u64> {
        let kind = self.peek()?;
        self.at += 1;
        match kind {
            b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't' => Some(1),
            b'u' => {
                let mut code = 0;
                for digit in self.bytes.get(self.at..self.at + 4)? {
                    code = code * 16 + char::from(*digit).to_digit(16)?;
                }
                self.at += 4;
                Some(char::from_u32(code)?.len_utf8() as u64)
            }
            _ => None,
        }
    }
}

/// Whether a byte is not allowed unescaped in a string. No early exit: so the compiler can take many bytes at once.
fn has_control(bytes: &[u8]) -> bool {
    bytes.iter().fold(false, |found, byte| found | (*byte < 0x20))
}
