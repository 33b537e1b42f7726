//! Global identifiers (GIDs): the network address of a port.

use std::fmt;
use std::net::Ipv6Addr;
use std::str::FromStr;

/// The global identifier of a port. On RoCE it is an IPv6 or IPv4-mapped address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Gid(pub [u8; 16]);

/// The text is not a global identifier.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not a global identifier; write 16 hexadecimal bytes separated by colons, or 8 groups of two bytes"
)]
pub struct GidError(String);

impl Gid {
    /// Whether all bytes are zero, as in an unused table entry.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == [0; 16]
    }

    /// Whether it is an IPv4-mapped address, routable like the IPv4 address.
    #[must_use]
    pub fn is_ipv4(self) -> bool {
        Ipv6Addr::from(self.0).to_ipv4_mapped().is_some()
    }

    /// Whether it is link-local, so reachable on its own link only.
    #[must_use]
    pub fn is_link_local(self) -> bool {
        matches!(self.0, [0xfe, second, ..] if second & 0xc0 == 0x80)
    }
}

impl FromStr for Gid {
    type Err = GidError;

    /// Parses Mooncake's form (16 bytes) and the kernel's (8 groups of two bytes).
    fn from_str(text: &str) -> Result<Self, GidError> {
        let error = || GidError(text.chars().take(64).collect());
        let mut bytes = [0; 16];
        let groups: Vec<&str> = text.trim().split(':').collect();
        match groups.len() {
            16 => {
                for (byte, group) in bytes.iter_mut().zip(groups) {
                    *byte = u8::from_str_radix(group, 16).map_err(|_| error())?;
                }
            }
            8 => {
                for (pair, group) in bytes.chunks_exact_mut(2).zip(groups) {
                    let number = u16::from_str_radix(group, 16).map_err(|_| error())?;
                    pair.copy_from_slice(&number.to_be_bytes());
                }
            }
            _ => return Err(error()),
        }
        Ok(Self(bytes))
    }
}

impl fmt::Display for Gid {
    /// Formats the 16 bytes as Mooncake does.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (position, byte) in self.0.iter().enumerate() {
            write!(f, "{}{byte:02x}", if position == 0 { "" } else { ":" })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn both_text_forms_are_parsed() {
        let kernel_form: Gid = "0000:0000:0000:0000:0000:ffff:0a4d:0001".parse().unwrap();
        let mooncake_form: Gid = "00:00:00:00:00:00:00:00:00:00:ff:ff:0a:4d:00:01".parse().unwrap();
        assert_eq!(kernel_form, mooncake_form);
        assert!(kernel_form.is_ipv4() && !kernel_form.is_link_local() && !kernel_form.is_empty());
        let local: Gid = "fe80:0000:0000:0000:5054:00ff:fe77:0001".parse().unwrap();
        assert!(local.is_link_local() && !local.is_ipv4());
        for wrong in ["", "::1", "0:1", "g:0:0:0:0:0:0:0", "100:0:0:0:0:0:0:0:0:0:0:0:0:0:0:0"] {
            assert!(wrong.parse::<Gid>().is_err(), "{wrong}");
        }
    }

    proptest! {
        #[test]
        fn identifiers_survive_the_round_trip(bytes: [u8; 16]) {
            prop_assert_eq!(Gid(bytes).to_string().parse(), Ok(Gid(bytes)));
        }

        #[test]
        fn arbitrary_text_never_panics(text in "[0-9a-fx:]{0,64}") {
            let _ = text.parse::<Gid>();
        }
    }
}
