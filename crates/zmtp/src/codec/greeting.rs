//! The greeting of 64 bytes that each side sends first.

use super::ZmtpProtocolError;

/// Length of a greeting in bytes.
pub const GREETING_BYTES: usize = 64;
/// Offset of the major version.
pub(super) const MAJOR_AT: usize = 10;
const MECHANISM_AT: usize = 12;
const MECHANISM_BYTES: usize = 20;
const MECHANISM: &[u8] = b"NULL";
/// Version of this implementation; peers use the lower of both.
const VERSION: (u8, u8) = (3, 1);

/// A decoded greeting. Its mechanism is NULL, or decoding has failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ZmtpGreeting {
    /// Minor version under major version 3 (later major versions count as 3.1).
    pub minor: u8,
}

impl ZmtpGreeting {
    /// Encodes the greeting of this side.
    pub fn encode() -> [u8; GREETING_BYTES] {
        let mut bytes = [0; GREETING_BYTES];
        bytes[0] = 0xff;
        bytes[9] = 0x7f;
        (bytes[MAJOR_AT], bytes[MAJOR_AT + 1]) = VERSION;
        bytes[MECHANISM_AT..MECHANISM_AT + MECHANISM.len()].copy_from_slice(MECHANISM);
        bytes
    }

    /// Parses the peer's greeting.
    ///
    /// # Errors
    /// If it is not a greeting, older than version 3, or names another mechanism than NULL.
    pub fn decode(bytes: &[u8; GREETING_BYTES]) -> Result<Self, ZmtpProtocolError> {
        check_start(bytes)?;
        let field = &bytes[MECHANISM_AT..MECHANISM_AT + MECHANISM_BYTES];
        let name = field.split(|&byte| byte == 0).next().unwrap_or_default();
        if name != MECHANISM {
            return Err(ZmtpProtocolError::Mechanism(String::from_utf8_lossy(name).into_owned()));
        }
        // A later major version must fall back to version 3.1.
        let minor = if bytes[MAJOR_AT] == VERSION.0 { bytes[MAJOR_AT + 1] } else { VERSION.1 };
        Ok(Self { minor })
    }

    /// Whether subscriptions are sent as commands (3.1) instead of messages (3.0).
    pub fn subscribes_by_command(self) -> bool {
        self.minor >= 1
    }
}

/// Rejects an invalid greeting at its first bytes: an older peer sends no more until it has our greeting, and an HTTP client would wait for
/// a response.
pub(super) fn check_start(bytes: &[u8]) -> Result<(), ZmtpProtocolError> {
    if bytes.first().is_some_and(|&byte| byte != 0xff) || bytes.get(9).is_some_and(|byte| byte & 1 == 0) {
        return Err(ZmtpProtocolError::NotZmtp);
    }
    match bytes.get(MAJOR_AT) {
        Some(&major) if major < VERSION.0 => Err(ZmtpProtocolError::Version(major)),
        _ => Ok(()),
    }
}
