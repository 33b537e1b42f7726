//! Whether a JSON value that arrives in fragments is complete.

/// Counts what is open, without storing the text.
#[derive(Debug, Default)]
pub(crate) struct JsonBalance {
    depth: usize,
    in_string: bool,
    escaped: bool,
}

impl JsonBalance {
    pub(crate) fn push(&mut self, fragment: &str) {
        for byte in fragment.bytes() {
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' if self.in_string => self.escaped = true,
                b'"' => self.in_string = !self.in_string,
                _ if self.in_string => {}
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' => self.depth = self.depth.saturating_sub(1),
                _ => {}
            }
        }
    }

    /// No text at all is complete: a call without arguments.
    pub(crate) fn is_complete(&self) -> bool {
        self.depth == 0 && !self.in_string
    }
}

#[cfg(test)]
mod tests {
    use super::JsonBalance;

    #[test]
    fn fragments_are_complete_once_all_is_closed() {
        let mut balance = JsonBalance::default();
        assert!(balance.is_complete());
        for fragment in ["{\"a\": \"", "}\\", "\"", "\", \"b\": [1", "]"] {
            balance.push(fragment);
            assert!(!balance.is_complete(), "{fragment}");
        }
        balance.push("}");
        assert!(balance.is_complete());
    }
}
