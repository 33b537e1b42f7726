//! The `tojson` filter of chat templates: Python's `json.dumps(…, ensure_ascii=False)`, without reordering members.

use std::fmt::Write;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};

use super::python;

/// Maximum nesting depth; a request's JSON cannot be nested deeper than 128.
const MAX_DEPTH: usize = 256;

struct JsonStyle {
    ascii: bool,
    sorted: bool,
    indent: Option<usize>,
    item: String,
    key: String,
}

/// `value | tojson(ensure_ascii, indent, separators, sort_keys)`.
pub(super) fn tojson(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let (item, key) = match separators.as_deref() {
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => return Err(Error::new(ErrorKind::InvalidOperation, "separators are a pair")),
    };
    let style = JsonStyle {
        ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sorted: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        indent,
        item,
        key,
    };
    options.assert_all_used()?;
    let mut out = String::new();
    write_value(&mut out, value, &style, 0)?;
    Ok(out)
}

fn write_value(out: &mut String, value: &Value, style: &JsonStyle, depth: usize) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return Err(Error::new(ErrorKind::InvalidOperation, "tojson: nested too deeply"));
    }
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => write_number(out, value)?,
        ValueKind::String => write_string(out, value.as_str().unwrap_or_default(), style.ascii),
        ValueKind::Seq | ValueKind::Iterable => {
            let items = value.try_iter()?.map(|item| (None, item)).collect();
            write_items(out, ['[', ']'], items, style, depth)?;
        }
        ValueKind::Map => write_items(out, ['{', '}'], members(value, style)?, style, depth)?,
        other => {
            let problem = format!("tojson: a value of type {other} is not JSON");
            return Err(Error::new(ErrorKind::InvalidOperation, problem));
        }
    }
    Ok(())
}

fn members(value: &Value, style: &JsonStyle) -> Result<Vec<(Option<String>, Value)>, Error> {
    let mut members = Vec::new();
    for key in value.try_iter()? {
        let name = match key.kind() {
            ValueKind::Bool => if key.is_true() { "true" } else { "false" }.to_owned(),
            ValueKind::None => "null".to_owned(),
            _ => key.to_string(),
        };
        members.push((Some(name), value.get_item(&key)?));
    }
    if style.sorted {
        members.sort_by(|a, b| a.0.cmp(&b.0));
    }
    Ok(members)
}

fn write_items(
    out: &mut String,
    [open, close]: [char; 2],
    items: Vec<(Option<String>, Value)>,
    style: &JsonStyle,
    depth: usize,
) -> Result<(), Error> {
    out.push(open);
    let empty = items.is_empty();
    for (number, (key, item)) in items.into_iter().enumerate() {
        if number > 0 {
            out.push_str(&style.item);
        }
        new_line(out, style, depth + 1);
        if let Some(key) = key {
            write_string(out, &key, style.ascii);
            out.push_str(&style.key);
        }
        write_value(out, &item, style, depth + 1)?;
    }
    if !empty {
        new_line(out, style, depth);
    }
    out.push(close);
    Ok(())
}

fn new_line(out: &mut String, style: &JsonStyle, depth: usize) {
    if let Some(indent) = style.indent {
        out.push('\n');
        out.extend(std::iter::repeat_n(' ', indent.min(64) * depth));
    }
}

fn write_number(out: &mut String, value: &Value) -> Result<(), Error> {
    if value.is_integer() {
        out.push_str(&value.to_string());
        return Ok(());
    }
    let number = f64::try_from(value.clone())?;
    out.push_str(&python::float_repr(number, ["NaN", "Infinity", "-Infinity"]));
    Ok(())
}

fn write_string(out: &mut String, text: &str, ascii: bool) {
    out.push('"');
    let mut plain = 0;
    for (at, character) in text.char_indices() {
        let escape = match character {
            '"' => "\\\"",
            '\\' => "\\\\",
            '\n' => "\\n",
            '\r' => "\\r",
            '\t' => "\\t",
            '\u{8}' => "\\b",
            '\u{c}' => "\\f",
            character if character < ' ' || (ascii && !character.is_ascii()) => "",
            _ => continue,
        };
        out.push_str(&text[plain..at]);
        plain = at + character.len_utf8();
        if escape.is_empty() {
            for unit in character.encode_utf16(&mut [0; 2]) {
                let _ = write!(out, "\\u{unit:04x}");
            }
        } else {
            out.push_str(escape);
        }
    }
    out.push_str(&text[plain..]);
    out.push('"');
}

#[cfg(test)]
mod tests {
    use minijinja::Environment;

    use super::*;

    fn dumps(expression: &str, json: &str) -> String {
        let mut env = Environment::new();
        env.add_filter("tojson", tojson);
        let value: Value = serde_json::from_str(json).unwrap();
        env.render_str(expression, minijinja::context! { x => value }).unwrap()
    }

    #[test]
    fn output_equals_pythons() {
        let json = r#"{"b":[1,2.0,1e20,1e-7,true,null,{}],"a":"é\"\\\n\u0001<&>😀/"}"#;
        assert_eq!(
            dumps("{{ x | tojson }}", json),
            r#"{"b": [1, 2.0, 1e+20, 1e-07, true, null, {}], "a": "é\"\\\n\u0001<&>😀/"}"#
        );
        assert_eq!(
            dumps("{{ x | tojson(ensure_ascii=true, sort_keys=true, separators=(',', ':')) }}", json),
            r#"{"a":"\u00e9\"\\\n\u0001<&>\ud83d\ude00/","b":[1,2.0,1e+20,1e-07,true,null,{}]}"#
        );
        assert_eq!(
            dumps("{{ x | tojson(indent=2) }}", r#"[1,{"a":[]}]"#),
            "[\n  1,\n  {\n    \"a\": []\n  }\n]"
        );
    }
}
