//! Parses sizes in the format of Mooncake's configuration.

/// Suffixes and their factors; longer suffixes first.
const SUFFIXES: [(&str, u64); 9] = [
    ("kb", 1 << 10),
    ("mb", 1 << 20),
    ("gb", 1 << 30),
    ("tb", 1 << 40),
    ("k", 1 << 10),
    ("m", 1 << 20),
    ("g", 1 << 30),
    ("t", 1 << 40),
    ("b", 1),
];

/// The text is not a valid size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a size; write bytes, or 512mb, 4gb, 1.5tb")]
pub struct SizeError(String);

/// Parses a size in bytes: `4gb`, `1.5 GB`, `16777216`. Units are powers of 1024.
///
/// # Errors
/// [`SizeError`] for unknown units, negative numbers and overflow.
pub fn parse(text: &str) -> Result<u64, SizeError> {
    let lower = text.trim().to_ascii_lowercase();
    let (number, unit) = SUFFIXES
        .iter()
        .find_map(|(suffix, unit)| lower.strip_suffix(suffix).map(|number| (number.trim(), *unit)))
        .unwrap_or((&lower, 1));
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(unit).ok_or_else(|| SizeError(text.to_owned()));
    }
    let bytes = number.parse::<f64>().map_err(|_| SizeError(text.to_owned()))? * unit as f64;
    // Above 2^53, f64 does not represent every integer; no machine has that much memory.
    if (0.0..9e15).contains(&bytes) { Ok(bytes as u64) } else { Err(SizeError(text.to_owned())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_parsed_as_by_mooncake() {
        for (text, bytes) in [
            ("4gb", 4 << 30),
            ("1.5 GB", 3 << 29),
            ("16777216", 16 << 20),
            ("512mb", 512 << 20),
            ("2T", 2 << 40),
            ("7b", 7),
            ("0", 0),
            (" 1k ", 1024),
            ("1e3", 1000),
        ] {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
        for wrong in ["", "gb", "-1", "4xb", "1e300", "nan", "99999999999tb"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
