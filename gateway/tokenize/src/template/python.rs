//! Python's behaviour, where templates depend on it and the template engine differs.

use minijinja::value::{ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};

use crate::python_text::is_space;

/// Python's methods of strings and mappings.
pub(super) fn method(
    state: &mut State<'_, '_>,
    value: &Value,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    if let Some(text) = value.as_str()
        && let Some(result) = string_method(text, name, args)
    {
        return result;
    }
    if value.kind() == ValueKind::Map && name == "copy" {
        let () = from_args(args)?;
        return Ok(value.clone());
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args)
}

/// The methods that the crate for Python's methods lacks, or for which it defines white space differently.
fn string_method(text: &str, name: &str, args: &[Value]) -> Option<Result<Value, Error>> {
    Some(match name {
        "strip" => stripped(text, args, true, true),
        "lstrip" => stripped(text, args, true, false),
        "rstrip" => stripped(text, args, false, true),
        "split" if args.first().is_none_or(Value::is_none) => split_at_spaces(text, args),
        "split" | "rsplit" => split(text, args, name == "rsplit"),
        "title" => from_args::<()>(args).map(|()| Value::from(title(text))),
        "removeprefix" => {
            from_args(args).map(|(part,): (&str,)| Value::from(text.strip_prefix(part).unwrap_or(text)))
        }
        "removesuffix" => {
            from_args(args).map(|(part,): (&str,)| Value::from(text.strip_suffix(part).unwrap_or(text)))
        }
        "partition" => from_args(args).map(|(part,): (&str,)| match text.split_once(part) {
            Some((before, after)) => three([before, part, after]),
            None => three([text, "", ""]),
        }),
        "rpartition" => from_args(args).map(|(part,): (&str,)| match text.rsplit_once(part) {
            Some((before, after)) => three([before, part, after]),
            None => three(["", "", text]),
        }),
        _ => return None,
    })
}

fn three(parts: [&str; 3]) -> Value {
    parts.into_iter().map(Value::from).collect()
}

fn stripped(text: &str, args: &[Value], start: bool, end: bool) -> Result<Value, Error> {
    let (characters,): (Option<&str>,) = from_args(args)?;
    let goes =
        |character: char| characters.map_or_else(|| is_space(character), |set| set.contains(character));
    let text = if start { text.trim_start_matches(goes) } else { text };
    Ok(Value::from(if end { text.trim_end_matches(goes) } else { text }))
}

fn split_at_spaces(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (_, most): (Option<&str>, Option<i64>) = from_args(args)?;
    let Some(most) = most.and_then(|most| usize::try_from(most).ok()) else {
        return Ok(text.split(is_space).filter(|word| !word.is_empty()).map(Value::from).collect());
    };
    let mut words = Vec::new();
    let mut rest = text.trim_start_matches(is_space);
    while words.len() < most
        && let Some((word, after)) = rest.split_once(is_space)
    {
        words.push(Value::from(word));
        rest = after.trim_start_matches(is_space);
    }
    if !rest.is_empty() {
        words.push(Value::from(rest));
    }
    Ok(Value::from(words))
}

fn split(text: &str, args: &[Value], from_the_end: bool) -> Result<Value, Error> {
    let (separator, most): (&str, Option<i64>) = from_args(args)?;
    if separator.is_empty() {
        return Err(Error::new(ErrorKind::InvalidOperation, "empty separator"));
    }
    let most = most.and_then(|most| usize::try_from(most).ok()).unwrap_or(usize::MAX - 1) + 1;
    if !from_the_end {
        return Ok(text.splitn(most, separator).map(Value::from).collect());
    }
    let mut parts: Vec<Value> = text.rsplitn(most, separator).map(Value::from).collect();
    parts.reverse();
    Ok(Value::from(parts))
}

/// `str.title`: a letter is upper case after any character that is not a letter.
fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut inside = false;
    for character in text.chars() {
        if inside {
            out.extend(character.to_lowercase());
        } else {
            out.extend(character.to_uppercase());
        }
        inside = character.is_alphabetic();
    }
    out
}

/// Jinja's test `sequence`: values with a length and an index.
pub(super) fn is_sequence(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::String | ValueKind::Map | ValueKind::Undefined)
}

/// `repr(float)`; `special` are the names of NaN and the infinities.
pub(super) fn float_repr(number: f64, special: [&str; 3]) -> String {
    if number.is_nan() {
        return special[0].to_owned();
    }
    if number.is_infinite() {
        return special[if number > 0.0 { 1 } else { 2 }].to_owned();
    }
    let scientific = format!("{number:e}");
    let Some((digits, exponent)) = scientific.split_once('e') else { return scientific };
    let exponent: i32 = exponent.parse().unwrap_or_default();
    if !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.unsigned_abs());
    }
    let plain = number.to_string();
    if plain.contains('.') { plain } else { plain + ".0" }
}

#[cfg(test)]
mod tests {
    use minijinja::Environment;

    use super::*;

    fn eval(expression: &str) -> String {
        let mut env = Environment::new();
        env.set_unknown_method_callback(method);
        env.render_str(&format!("{{{{ {expression} }}}}"), ()).unwrap()
    }

    #[test]
    fn strings_have_pythons_methods() {
        for (expression, expected) in [
            (r"'\x1c a \n'.strip()", "a"),
            ("'xxaxx'.lstrip('x')", "axx"),
            ("'xyaxy'.rstrip('yx')", "xya"),
            ("'a</think>b</think>c'.split('</think>')[-1]", "c"),
            ("' a  b '.split()", r#"["a", "b"]"#),
            ("' a  b c '.split(none, 1)", r#"["a", "b c "]"#),
            ("'a,b,c'.split(',', 1)", r#"["a", "b,c"]"#),
            ("'a,b,c'.rsplit(',', 1)", r#"["a,b", "c"]"#),
            ("\"they're bill's\".title()", "They'Re Bill'S"),
            ("'abc'.removeprefix('a').removesuffix('c')", "b"),
            ("'a=b=c'.partition('=')[2]", "b=c"),
            ("'a=b=c'.rpartition('=')[0]", "a=b"),
            ("'abc'.startswith('ab') and 'abc'.endswith('bc')", "True"),
            ("'aXa'.replace('a', 'b').upper().lower()", "bxb"),
            ("{'a': 1}.get('b', 2)", "2"),
            ("{'a': 1}.copy().items() | list | length", "1"),
        ] {
            assert_eq!(eval(expression).replace('\'', "\""), expected.replace('\'', "\""), "{expression}");
        }
    }

    #[test]
    fn floats_print_as_in_python() {
        for (number, expected) in [
            (1.0, "1.0"),
            (-0.5, "-0.5"),
            (1e16, "1e+16"),
            (1e15, "1000000000000000.0"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (1.5e300, "1.5e+300"),
            (f64::NAN, "nan"),
        ] {
            assert_eq!(float_repr(number, ["nan", "inf", "-inf"]), expected);
        }
    }
}
