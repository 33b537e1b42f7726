//! Text that no log may show.

use std::fmt;
use std::str::FromStr;

/// A key or token. Its `Debug` form shows that there is one, never which; there is no `Display`.
#[derive(Clone, PartialEq, Eq)]
pub struct SecretString(String);

impl SecretString {
    /// The text itself, for the one place that needs it.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

/// A setting cannot be an empty secret.
#[derive(Debug, thiserror::Error)]
#[error("it is empty; leave it out, or give the secret")]
pub struct EmptySecretError;

// There is no `From<String>`: the command line's parser would prefer it, and take what is empty.
impl FromStr for SecretString {
    type Err = EmptySecretError;

    fn from_str(text: &str) -> Result<Self, EmptySecretError> {
        if text.is_empty() { Err(EmptySecretError) } else { Ok(Self(text.to_owned())) }
    }
}

impl fmt::Debug for SecretString {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(hidden)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_never_shown() {
        let secret: SecretString = "k-123".parse().unwrap();
        assert_eq!(format!("{secret:?} {:?}", Some(&secret)), "Secret(hidden) Some(Secret(hidden))");
        assert_eq!(secret.expose(), "k-123");
        assert!("".parse::<SecretString>().is_err());
    }
}
