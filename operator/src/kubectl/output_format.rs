//! Output as text tables, JSON or YAML.

use serde::Serialize;

use super::OutputError;

/// Format of a command's output.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OutputFormat {
    #[default]
    Text,
    Json,
    Yaml,
}

impl OutputFormat {
    /// Formats the value; `text` produces the text format.
    ///
    /// # Errors
    /// When the value cannot be serialized.
    pub fn print<T: Serialize>(
        self,
        value: &T,
        text: impl FnOnce() -> String,
    ) -> Result<String, OutputError> {
        match self {
            Self::Text => Ok(text()),
            Self::Json => Ok(serde_json::to_string_pretty(value)? + "\n"),
            Self::Yaml => Ok(serde_saphyr::to_string(value)?),
        }
    }
}

/// Formats a table with two spaces between columns. Empty cells are shown as `-`.
#[must_use]
pub fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let cell = |text: &str| if text.is_empty() { "-".to_owned() } else { text.to_owned() };
    let head: Vec<String> = head.iter().map(|text| (*text).to_owned()).collect();
    let rows: Vec<Vec<String>> = rows.iter().map(|row| row.iter().map(|text| cell(text)).collect()).collect();
    let width = |column: usize| {
        let cells = rows.iter().chain([&head]).filter_map(|row| row.get(column));
        cells.map(|text| text.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).map(|(text, width)| format!("{text:<width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
    };
    std::iter::once(&head).chain(&rows).map(line).collect()
}

/// Indents each line by two spaces.
#[must_use]
pub(super) fn indented(text: &str) -> String {
    text.lines().map(|line| format!("  {line}\n")).collect()
}

/// Number with a noun: `1 pod`, `2 pods`.
pub(super) fn count(number: usize, what: &str) -> String {
    if number == 1 { format!("1 {what}") } else { format!("{number} {what}s") }
}

/// Formats an age as kubectl does: the largest unit, and the next smaller one for small values.
#[must_use]
pub fn age(seconds: i64) -> String {
    let seconds = seconds.max(0);
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match (days, hours, minutes) {
        (0, 0, 0..2) => format!("{seconds}s"),
        (0, 0, _) => format!("{minutes}m"),
        (0, 1..3, _) => format!("{hours}h{}m", minutes % 60),
        (0, ..) => format!("{hours}h"),
        _ => format!("{days}d"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let text =
            table(&["A", "LONG"], &[vec!["wider".into(), String::new()], vec!["b".into(), "c".into()]]);
        assert_eq!(text, "A      LONG\nwider  -\nb      c\n");
    }

    #[test]
    fn ages_have_few_digits() {
        let shown = [-1, 59, 119, 120, 3600, 5 * 3600 + 59, 90_000].map(age);
        assert_eq!(shown, ["0s", "59s", "119s", "2m", "1h0m", "5h", "1d"]);
    }
}
