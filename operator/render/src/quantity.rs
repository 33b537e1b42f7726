//! Quantities in the canonical form of the API server.

/// Suffixes, largest first. They multiply by a power of 1024 or 1000.
const BINARY: [&str; 6] = ["Ei", "Pi", "Ti", "Gi", "Mi", "Ki"];
const DECIMAL: [&str; 6] = ["E", "P", "T", "G", "M", "k"];

/// The canonical form of a `core/v1` Quantity: no fraction, and the largest suffix that allows that. `None` for text that
/// is no quantity, is finer than a thousandth or too large to compute; such text stays as it is.
pub(crate) fn canonical(text: &str) -> Option<String> {
    let digits =
        text.find(|c: char| !c.is_ascii_digit() && c != '.' && c != '-' && c != '+').unwrap_or(text.len());
    let (number, suffix) = text.split_at(digits);
    let (negative, number) = match number.strip_prefix('-') {
        Some(number) => (true, number),
        None => (false, number.strip_prefix('+').unwrap_or(number)),
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if (whole.is_empty() && fraction.is_empty()) || fraction.len() > 9 {
        return None;
    }
    let mut mantissa: i128 = format!("{whole}{fraction}").parse().ok()?;
    if negative {
        mantissa = -mantissa;
    }
    let scale = 10_i128.pow(u32::try_from(fraction.len()).ok()?);
    let power = |list: &[&str; 6]| list.iter().position(|unit| *unit == suffix).map(|index| 6 - index as u32);
    if let Some(power) = power(&BINARY) {
        let units = mantissa.checked_mul(1024_i128.pow(power))?;
        return if units % scale == 0 { Some(binary(units / scale)) } else { None };
    }
    let thousandths = match suffix {
        "m" => mantissa,
        "" => mantissa.checked_mul(1000)?,
        _ => mantissa.checked_mul(1000_i128.pow(power(&DECIMAL)? + 1))?,
    };
    if thousandths % scale == 0 { Some(decimal(thousandths / scale)) } else { None }
}

fn binary(units: i128) -> String {
    if units == 0 {
        return "0".to_owned();
    }
    for (index, suffix) in BINARY.iter().enumerate() {
        let size = 1024_i128.pow(6 - index as u32);
        if units % size == 0 {
            return format!("{}{suffix}", units / size);
        }
    }
    units.to_string()
}

fn decimal(thousandths: i128) -> String {
    if thousandths == 0 {
        return "0".to_owned();
    }
    if thousandths % 1000 != 0 {
        return format!("{thousandths}m");
    }
    let units = thousandths / 1000;
    for (index, suffix) in DECIMAL.iter().enumerate() {
        let size = 1000_i128.pow(6 - index as u32);
        if units % size == 0 {
            return format!("{}{suffix}", units / size);
        }
    }
    units.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_match_those_of_kubernetes() {
        for (written, canonical_form) in [
            ("1", "1"),
            ("0.5", "500m"),
            ("1000m", "1"),
            ("1500m", "1500m"),
            ("1000", "1k"),
            ("1024Mi", "1Gi"),
            ("1.5Gi", "1536Mi"),
            ("50Gi", "50Gi"),
            ("0", "0"),
            ("0Gi", "0"),
            ("-2", "-2"),
            ("+4", "4"),
            ("100M", "100M"),
        ] {
            assert_eq!(canonical(written).as_deref(), Some(canonical_form), "{written}");
        }
        for odd in ["", "Gi", "x", "1e3", "0.0001", "1.1Ki", ".", "99999999999999999999999999999999999999999"]
        {
            assert_eq!(canonical(odd), None, "{odd}");
        }
    }
}
