//! Global identifiers: what a port is called on the network.

use std::fmt;
use std::net::Ipv6Addr;
use std::str::FromStr;

/// A port's global identifier. On RoCE it is an IPv6 address, or an IPv4 address in the form of one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Gid(pub [u8; 16]);

/// Text that is no global identifier.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is no global identifier: 16 hexadecimal bytes with colons between them, or 8 groups of two bytes"
)]
pub struct GidError(String);

impl Gid {
    /// Whether it says nothing: the entry of a table that is not used.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == [0; 16]
    }

    /// Whether it is an IPv4 address, which is reachable wherever that address is.
    #[must_use]
    pub fn is_ipv4(self) -> bool {
        Ipv6Addr::from(self.0).to_ipv4_mapped().is_some()
    }

    /// Whether it is only good on its own link.
    #[must_use]
    pub fn is_link_local(self) -> bool {
        matches!(self.0, [0xfe, second, ..] if second & 0xc0 == 0x80)
    }
}

impl FromStr for Gid {
    type Err = GidError;

    /// Reads Mooncake's form (16 bytes) and the kernel's (8 groups of two bytes).
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
    /// Mooncake's form.
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
    fn both_forms_are_read() {
        let kernels: Gid = "0000:0000:0000:0000:0000:ffff:0a4d:0001".parse().unwrap();
        let mooncakes: Gid = "00:00:00:00:00:00:00:00:00:00:ff:ff:0a:4d:00:01".parse().unwrap();
        assert_eq!(kernels, mooncakes);
        assert!(kernels.is_ipv4() && !kernels.is_link_local() && !kernels.is_empty());
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
        fn any_text_can_be_read(text in "[0-9a-fx:]{0,64}") {
            let _ = text.parse::<Gid>();
        }
    }
}
