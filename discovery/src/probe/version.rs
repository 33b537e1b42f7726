//! Parses version numbers of engines, for behaviour that differs between releases.

/// The first three numbers: `0.5.23.post1` is (0, 5, 23). `None` for a version that is no release, such as `0.0.0.dev1+g1234` or `main`.
pub(super) fn release(version: &str) -> Option<(u32, u32, u32)> {
    let mut numbers = version.trim().trim_start_matches('v').split('.').map(|part| {
        let digits = part.find(|c: char| !c.is_ascii_digit()).map_or(part, |end| &part[..end]);
        digits.parse::<u32>().ok()
    });
    let release = (numbers.next()??, numbers.next()??, numbers.next().flatten().unwrap_or(0));
    (release != (0, 0, 0)).then_some(release)
}

#[cfg(test)]
mod tests {
    use super::release;

    #[test]
    fn version_suffix_is_ignored_and_unnumbered_build_is_none() {
        assert_eq!(release("0.5.23"), Some((0, 5, 23)));
        assert_eq!(release("v0.5.6.post2"), Some((0, 5, 6)));
        assert_eq!(release("0.32.0rc1+cpu"), Some((0, 32, 0)));
        assert_eq!(release("0.33"), Some((0, 33, 0)));
        for other in ["", "main", "0", "0.0.0.dev1+g1234", "..", "é.é"] {
            assert_eq!(release(other), None, "{other}");
        }
    }
}
