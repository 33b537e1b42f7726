//! Text that no log may show.

use std::fmt;
use std::str::FromStr;

/// A key or token. Its `Debug` form shows that there is one, never which; there is no `Display`.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// The text itself, for the one place that needs it.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

/// A setting cannot be an empty secret.
#[derive(Debug, thiserror::Error)]
#[error("it is empty; leave it out, or give the secret")]
pub struct EmptySecret;

// There is no `From<String>`: the command line's parser would prefer it, and take what is empty.
impl FromStr for Secret {
    type Err = EmptySecret;

    fn from_str(text: &str) -> Result<Self, EmptySecret> {
        if text.is_empty() { Err(EmptySecret) } else { Ok(Self(text.to_owned())) }
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(hidden)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_never_shown() {
        let secret: Secret = "k-123".parse().unwrap();
        assert_eq!(format!("{secret:?} {:?}", Some(&secret)), "Secret(hidden) Some(Secret(hidden))");
        assert_eq!(secret.expose(), "k-123");
        assert!("".parse::<Secret>().is_err());
    }
}
