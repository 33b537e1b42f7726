//! What a flag is.

/// What values a flag takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FlagKind {
    /// On or off; `--noNAME` is off.
    Bool,
    /// A whole number within bounds.
    Number(i64, i64),
    /// A number.
    Float,
    /// Any text.
    Text,
    /// Milliseconds, or a whole number with one of the units `ms`, `s`, `m`, `h`.
    Duration,
    /// One of these words.
    Choice(&'static [&'static str]),
}

/// What becomes of a flag's value here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FlagSupport {
    /// A flag that Mooncake's master does not have.
    Extension,
    /// It does what it does for Mooncake's master.
    Compatible,
    /// It is accepted and has nothing to work on here.
    Ignored,
    /// It asks for something that this master does not do.
    Unsupported,
}

/// A flag of the command line, which is also an environment variable and a key of the config file.
#[derive(Clone, Copy, Debug)]
pub(super) struct FlagDefinition {
    /// Its name, without dashes.
    pub name: &'static str,
    /// What values it takes.
    pub kind: FlagKind,
    /// Its value if nobody sets it.
    pub default: &'static str,
    /// What becomes of it.
    pub support: FlagSupport,
    /// What it is for.
    pub help: &'static str,
}

const TRUE: [&str; 5] = ["true", "t", "1", "yes", "y"];
const FALSE: [&str; 5] = ["false", "f", "0", "no", "n"];

/// A value of [`FlagKind::Bool`].
pub(super) fn parse_bool(text: &str) -> Option<bool> {
    let is_in = |words: [&str; 5]| words.iter().any(|word| word.eq_ignore_ascii_case(text));
    if is_in(TRUE) { Some(true) } else { is_in(FALSE).then_some(false) }
}

/// A value of [`FlagKind::Duration`], in milliseconds.
pub(super) fn parse_duration_ms(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let unit = match text.get(digits.len()..)? {
        "" | "ms" => 1,
        "s" => 1000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(unit)
}

impl FlagDefinition {
    /// Whether a value can be used. If not: what would be.
    pub(super) fn check(&self, value: &str) -> Result<(), String> {
        let (is_fine, expected) = match self.kind {
            FlagKind::Bool => (parse_bool(value).is_some(), "true or false".to_owned()),
            FlagKind::Number(least, most) => {
                let within = value.parse::<i64>().is_ok_and(|number| (least..=most).contains(&number));
                (within, format!("a whole number from {least} to {most}"))
            }
            FlagKind::Float => {
                (value.parse::<f64>().is_ok_and(f64::is_finite), "a number, such as 0.9".to_owned())
            }
            FlagKind::Text => (true, String::new()),
            FlagKind::Duration => (
                parse_duration_ms(value).is_some(),
                "milliseconds, or a number with s, m or h, such as 10s".to_owned(),
            ),
            FlagKind::Choice(words) => (words.contains(&value), format!("one of {}", words.join(", "))),
        };
        if is_fine { Ok(()) } else { Err(expected) }
    }

    /// The environment variable that sets it.
    pub(super) fn variable(&self) -> String {
        format!("MOONGATE_{}", self.name.to_ascii_uppercase())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values() {
        assert_eq!(
            ["1", "T", "yes", "0", "False", "maybe", ""].map(parse_bool),
            [Some(true), Some(true), Some(true), Some(false), Some(false), None, None]
        );
        for (text, expected) in [
            ("10000", Some(10_000)),
            ("10s", Some(10_000)),
            ("30m", Some(1_800_000)),
            ("24h", Some(86_400_000)),
            ("5ms", Some(5)),
            ("", None),
            ("s", None),
            ("-1", None),
            ("1.5s", None),
            ("1d", None),
            ("18446744073709551615h", None),
        ] {
            assert_eq!(parse_duration_ms(text), expected, "{text}");
        }
    }

    #[test]
    fn every_default_is_a_value() {
        for flag in crate::flags::table::FLAGS {
            assert_eq!(flag.check(flag.default), Ok(()), "{}", flag.name);
        }
    }
}
