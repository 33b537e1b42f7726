//! Python's `json.dumps` of a JSON text: the engines write a tool call's arguments with it, and some prompts contain them as written.

use std::fmt::Write;

/// `json.dumps(json.loads(text))` for a valid JSON text, except that repeated names stay.
pub(crate) fn dumps(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + text.len() / 8);
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let len = match first {
            '"' => write_string(&mut out, rest),
            '-' | '0'..='9' => write_number(&mut out, rest),
            ',' => separator(&mut out, ", "),
            ':' => separator(&mut out, ": "),
            ' ' | '\t' | '\n' | '\r' => 1,
            other => {
                out.push(other);
                other.len_utf8()
            }
        };
        rest = &rest[len..];
    }
    out
}

fn separator(out: &mut String, text: &str) -> usize {
    out.push_str(text);
    1
}

/// Writes the string at the start of `rest` with ASCII only, and returns how long it is in `rest`.
fn write_string(out: &mut String, rest: &str) -> usize {
    out.push('"');
    let mut chars = rest.char_indices().skip(1);
    while let Some((at, next)) = chars.next() {
        match next {
            '"' => {
                out.push('"');
                return at + 1;
            }
            '\\' => write_escape(out, &mut chars),
            ' '..='~' => out.push(next),
            next => {
                for unit in next.encode_utf16(&mut [0; 2]) {
                    write_unit(out, *unit);
                }
            }
        }
    }
    rest.len()
}

fn write_unit(out: &mut String, unit: u16) {
    let _ = write!(out, "\\u{unit:04x}");
}

fn write_escape(out: &mut String, chars: &mut impl Iterator<Item = (usize, char)>) {
    match chars.next().map(|(_, escaped)| escaped) {
        Some('u') => {
            let unit = chars
                .by_ref()
                .take(4)
                .fold(0, |unit, (_, digit)| unit << 4 | digit.to_digit(16).unwrap_or(0));
            match char::from_u32(unit) {
                Some('"') => out.push_str("\\\""),
                Some('\\') => out.push_str("\\\\"),
                Some('\n') => out.push_str("\\n"),
                Some('\r') => out.push_str("\\r"),
                Some('\t') => out.push_str("\\t"),
                Some('\u{8}') => out.push_str("\\b"),
                Some('\u{c}') => out.push_str("\\f"),
                Some(plain @ ' '..='~') => out.push(plain),
                _ => {
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
        }
        Some('/') => out.push('/'),
        Some(escaped) => out.extend(['\\', escaped]),
        None => {}
    }
}

/// Writes the number at the start of `rest`, and returns how long it is in `rest`.
fn write_number(out: &mut String, rest: &str) -> usize {
    let len =
        rest.find(|c: char| !matches!(c, '0'..='9' | '-' | '+' | '.' | 'e' | 'E')).unwrap_or(rest.len());
    let number = &rest[..len];
    match number.parse::<f64>() {
        _ if number == "-0" => out.push('0'),
        Ok(float) if number.contains(['.', 'e', 'E']) && float.is_finite() => write_float(out, float),
        // Python's integers have no limit, and a float that overflows has no JSON.
        _ => out.push_str(number),
    }
    len
}

/// Python's `repr` of a float: the shortest digits, with an exponent below -4 and from 16.
fn write_float(out: &mut String, float: f64) {
    let text = format!("{float:e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let _ = write!(out, "{float:?}");
    } else {
        let sign = if exponent < 0 { '-' } else { '+' };
        let _ = write!(out, "{digits}e{sign}{:02}", exponent.abs());
    }
}

#[cfg(test)]
mod tests {
    use super::dumps;

    #[test]
    fn texts_are_written_as_by_python() {
        for (text, expected) in [
            (r#"{"a":1,"b":[true,null,"x"]}"#, r#"{"a": 1, "b": [true, null, "x"]}"#),
            ("{ \"a\" :\n[ ] }", r#"{"a": []}"#),
            (
                r#"{"b":"é😀","a":"a,b:c\/\u0041\u00e9\ud83d"}"#,
                r#"{"b": "\u00e9\ud83d\ude00", "a": "a,b:c/A\u00e9\ud83d"}"#,
            ),
            (r#"["\u0022\u005c\u000a\b\u0000\u007f"]"#, r#"["\"\\\n\b\u0000\u007f"]"#),
            (
                "[1.0,-0,-0.0,1e3,1E16,1.5e-5,0.0001,123456789012345678901234567890,1e999]",
                "[1.0, 0, -0.0, 1000.0, 1e+16, 1.5e-05, 0.0001, 123456789012345678901234567890, 1e999]",
            ),
        ] {
            assert_eq!(dumps(text), expected, "{text}");
        }
    }
}
