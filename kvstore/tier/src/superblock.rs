//! The superblock: layout and instance of the file. Pages of an earlier instance are ignored.

use moongate_memory::Crc32c;

use crate::block::TierLayout;
use crate::buffer::ALIGN;

const MAGIC: &[u8; 8] = b"moonfile";
const VERSION: u32 = 1;
const SEAL: usize = ALIGN - 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Superblock {
    pub(crate) layout: TierLayout,
    /// Random number, chosen whenever the file is reset.
    pub(crate) instance: u64,
    /// Boot id of the machine when it was last opened.
    pub(crate) boot: u128,
    /// Whether all writes had reached the disk when it was closed.
    pub(crate) clean: bool,
}

impl Superblock {
    pub(crate) fn encode(&self, into: &mut [u8]) {
        let mut bytes = Vec::with_capacity(ALIGN);
        bytes.extend(MAGIC);
        for number in [VERSION, self.layout.block_size, self.layout.blocks, u32::from(self.clean)] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend(self.instance.to_le_bytes());
        bytes.extend(self.boot.to_le_bytes());
        bytes.resize(SEAL, 0);
        bytes.extend(Crc32c::of(&bytes).to_le_bytes());
        into.copy_from_slice(&bytes);
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let (body, seal) = bytes.split_at_checked(SEAL)?;
        if body.get(..8)? != MAGIC || Crc32c::of(body).to_le_bytes() != seal {
            return None;
        }
        let number = |offset: usize| Some(u32::from_le_bytes(body.get(offset..offset + 4)?.try_into().ok()?));
        if number(8)? != VERSION {
            return None;
        }
        Some(Self {
            layout: TierLayout { block_size: number(12)?, blocks: number(16)? },
            clean: number(20)? == 1,
            instance: u64::from_le_bytes(body.get(24..32)?.try_into().ok()?),
            boot: u128::from_le_bytes(body.get(32..48)?.try_into().ok()?),
        })
    }
}

/// Boot id of the machine; 0 if unavailable.
pub(crate) fn boot() -> u128 {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    u128::from_str_radix(&text.trim().replace('-', ""), 16).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_flipped_bit_is_detected() {
        let superblock = Superblock {
            layout: TierLayout { block_size: 4096, blocks: 77 },
            instance: 3,
            boot: boot(),
            clean: true,
        };
        let mut good = vec![0; ALIGN];
        superblock.encode(&mut good);
        assert_eq!(Superblock::decode(&good), Some(superblock));
        for bit in 0..ALIGN * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Superblock::decode(&bad), None, "bit {bit}");
        }
    }
}
