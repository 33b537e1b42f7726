//! Definition of a flag.

use std::fmt;

/// Type of a flag's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FlagKind {
    /// A switch; `--noNAME` turns it off.
    Bool,
    /// An integer within these bounds.
    Number(i64, i64),
    Float,
    Text,
    /// Milliseconds, or an integer with one of the units `ms`, `s`, `m`, `h`.
    Duration,
    Choice(&'static [&'static str]),
}

/// How this master treats a flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FlagSupport {
    /// A flag of Moongate that Mooncake's master does not have.
    Extension,
    /// Same effect as in Mooncake's master.
    Compatible,
    /// Accepted without effect.
    Ignored,
    /// Requests a feature that this master does not have.
    Unsupported,
}

/// A command-line flag, which is also an environment variable and a key of the config file.
#[derive(Clone, Copy, Debug)]
pub(super) struct FlagDefinition {
    /// Name without dashes, in snake case.
    pub name: &'static str,
    pub kind: FlagKind,
    /// Value if the flag is not set.
    pub default: &'static str,
    /// How this master treats it.
    pub support: FlagSupport,
    /// Description for `--help`.
    pub help: &'static str,
}

const TRUE: [&str; 5] = ["true", "t", "1", "yes", "y"];
const FALSE: [&str; 5] = ["false", "f", "0", "no", "n"];

/// Parses a value of [`FlagKind::Bool`].
pub(super) fn parse_bool(text: &str) -> Option<bool> {
    let is_in = |words: [&str; 5]| words.iter().any(|word| word.eq_ignore_ascii_case(text));
    if is_in(TRUE) { Some(true) } else { is_in(FALSE).then_some(false) }
}

/// Parses a value of [`FlagKind::Duration`] into milliseconds.
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

impl FlagKind {
    pub(super) fn accepts(self, value: &str) -> bool {
        match self {
            Self::Bool => parse_bool(value).is_some(),
            Self::Number(min, max) => value.parse().is_ok_and(|number: i64| (min..=max).contains(&number)),
            Self::Float => value.parse().is_ok_and(f64::is_finite),
            Self::Text => true,
            Self::Duration => parse_duration_ms(value).is_some(),
            Self::Choice(words) => words.contains(&value),
        }
    }
}

/// Describes the values that it accepts.
impl fmt::Display for FlagKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bool => f.write_str("true or false"),
            Self::Number(min, max) => write!(f, "an integer from {min} to {max}"),
            Self::Float => f.write_str("a number, such as 0.9"),
            Self::Text => f.write_str("any text"),
            Self::Duration => f.write_str("milliseconds, or a number with s, m or h, such as 10s"),
            Self::Choice(words) => write!(f, "one of {}", words.join(", ")),
        }
    }
}

impl FlagDefinition {
    /// Name of the environment variable for this flag.
    pub(super) fn variable(&self) -> String {
        format!("MOONGATE_{}", self.name.to_ascii_uppercase())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn booleans_and_durations_are_parsed() {
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
    fn every_default_is_valid() {
        for flag in crate::flags::table::FLAGS {
            assert!(flag.kind.accepts(flag.default), "{}", flag.name);
        }
    }
}
