//! Secrets that must not be logged.

use std::fmt;
use std::str::FromStr;

/// A key or token. `Debug` hides the text; there is no `Display`.
#[derive(Clone, PartialEq, Eq)]
pub struct SecretString(String);

impl SecretString {
    /// The secret text. Do not log it.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

/// A secret setting is empty.
#[derive(Debug, thiserror::Error)]
#[error("it is empty; unset it, or set the secret")]
pub struct EmptySecretError;

// There is no `From<String>`: clap would prefer it over `FromStr` and accept an empty secret.
impl FromStr for SecretString {
    type Err = EmptySecretError;

    fn from_str(text: &str) -> Result<Self, EmptySecretError> {
        if text.is_empty() { Err(EmptySecretError) } else { Ok(Self(text.to_owned())) }
    }
}

impl fmt::Debug for SecretString {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretString(hidden)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_debug_form_hides_the_secret() {
        let secret: SecretString = "k-123".parse().unwrap();
        assert_eq!(
            format!("{secret:?} {:?}", Some(&secret)),
            "SecretString(hidden) Some(SecretString(hidden))"
        );
        assert_eq!(secret.expose(), "k-123");
        assert!("".parse::<SecretString>().is_err());
    }
}
