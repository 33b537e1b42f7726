//! Metrics of several masters, added up.

use std::collections::HashMap;
use std::fmt::Write as _;

/// Adds up metrics in Prometheus' text format: samples of the same series become one, with the sum of their values. Comments and the
/// order are those of the first text that has them. Values that are not numbers are omitted.
pub(crate) fn sum(texts: &[String]) -> String {
    enum Line<'t> {
        Comment(&'t str),
        Series(usize),
    }
    let (mut lines, mut series): (Vec<Line<'_>>, Vec<(&str, f64)>) = (Vec::new(), Vec::new());
    let (mut index_of, mut comments) = (HashMap::new(), std::collections::HashSet::new());
    for line in texts.iter().flat_map(|text| text.lines()) {
        if line.starts_with('#') {
            if comments.insert(line) {
                lines.push(Line::Comment(line));
            }
            continue;
        }
        // Label values may contain spaces; the value is what follows the last one.
        let Some((name, value)) = line.rsplit_once(' ') else { continue };
        let Ok(value) = value.parse::<f64>() else { continue };
        let index = *index_of.entry(name).or_insert_with(|| {
            lines.push(Line::Series(series.len()));
            series.push((name, 0.0));
            series.len() - 1
        });
        if let Some((_, sum)) = series.get_mut(index) {
            *sum += value;
        }
    }
    let mut text = String::new();
    for line in lines {
        // Writing to a string cannot fail.
        let _infallible = match line {
            Line::Comment(comment) => writeln!(text, "{comment}"),
            Line::Series(index) => match series.get(index) {
                Some((name, sum)) => writeln!(text, "{name} {sum}"),
                None => Ok(()),
            },
        };
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_are_added_up() {
        let first =
            "# HELP keys Number of keys\n# TYPE keys gauge\nkeys 3\nsize{segment=\"a b\"} 1.5\n".to_owned();
        let second = "# HELP keys Number of keys\n# TYPE keys gauge\nkeys 4\nsize{segment=\"c\"} 2\nbad x\n"
            .to_owned();
        let expected = "# HELP keys Number of keys\n# TYPE keys gauge\nkeys 7\nsize{segment=\"a b\"} 1.5\nsize{segment=\"c\"} 2\n";
        assert_eq!(sum(&[first, second]), expected);
        assert_eq!(sum(&[]), "");
    }

    #[test]
    fn large_counters_stay_integers() {
        let text = || "bytes_total 9007199254740000\n".to_owned();
        assert_eq!(sum(&[text()]), text());
    }
}
