//! Definition of a flag.

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

impl FlagDefinition {
    /// Checks a value. The error describes the expected values.
    pub(super) fn check(&self, value: &str) -> Result<(), String> {
        let (is_valid, expected) = match self.kind {
            FlagKind::Bool => (parse_bool(value).is_some(), "true or false".to_owned()),
            FlagKind::Number(min, max) => {
                let within = value.parse::<i64>().is_ok_and(|number| (min..=max).contains(&number));
                (within, format!("an integer from {min} to {max}"))
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
        if is_valid { Ok(()) } else { Err(expected) }
    }

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
            assert_eq!(flag.check(flag.default), Ok(()), "{}", flag.name);
        }
    }
}
