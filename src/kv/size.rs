//! Parses and formats human-readable sizes.

/// Parses `4096`, `64KiB`, `1MiB`, `2GiB`. The units `K`, `M` and `G` mean the same as `KiB`, `MiB` and `GiB`.
pub(super) fn parse(text: &str) -> Result<usize, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let shift = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => Some(0),
        "k" | "kib" => Some(10),
        "m" | "mib" => Some(20),
        "g" | "gib" => Some(30),
        _ => None,
    };
    let invalid = || format!("{text:?} is not a size; write for example 4096, 64KiB or 1MiB");
    let (number, shift) = number.parse::<usize>().ok().zip(shift).ok_or_else(invalid)?;
    number.checked_mul(1 << shift).filter(|bytes| *bytes > 0).ok_or_else(invalid)
}

/// Formats a size with a binary unit, as `1.5 MiB`.
pub(super) fn format_size(bytes: u64) -> String {
    for (unit, shift) in [("GiB", 30), ("MiB", 20), ("KiB", 10)] {
        if bytes >= 1 << shift {
            let whole = bytes.trailing_zeros() >= shift;
            let number = bytes as f64 / f64::from(1_u32 << shift);
            return if whole { format!("{number:.0} {unit}") } else { format!("{number:.1} {unit}") };
        }
    }
    format!("{bytes} B")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_parsed_and_formatted() {
        for (text, bytes, shown) in [
            ("1", 1, "1 B"),
            ("64KiB", 65_536, "64 KiB"),
            ("3m", 3 << 20, "3 MiB"),
            ("1536K", 1536 << 10, "1.5 MiB"),
            ("2GiB", 2 << 30, "2 GiB"),
        ] {
            assert_eq!(parse(text), Ok(bytes));
            assert_eq!(format_size(bytes as u64), shown);
        }
        for text in ["", "0", "MiB", "1.5MiB", "-1", "1kb2", "99999999999GiB"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
