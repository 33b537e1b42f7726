//! The page of an object's first block: key, length, blocks and checksums. An object exists exactly when its page does.

use moongate_memory::Crc32c;

use crate::block::{BlockIndex, TierLayout};
use crate::buffer::ALIGN;

/// Maximum length of a key in bytes.
pub const MAX_KEY: usize = 1000;
/// Maximum number of blocks of an object.
pub const MAX_BLOCKS: usize = 380;

/// Maximum valid generation of a page, so that further increments cannot overflow.
const MAX_GENERATION: u64 = u64::MAX / 2;
const MAGIC: &[u8; 8] = b"moontier";
const KEY: usize = 40;
const BLOCKS: usize = KEY + MAX_KEY + 8;
const SEAL: usize = ALIGN - 4;

/// A block of an object, as its page lists it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PageBlock {
    pub(crate) index: BlockIndex,
    /// CRC-32C of the object's part in the block.
    pub(crate) crc: u32,
}

/// Content of an object's page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ObjectPage {
    /// Incremented with every object: of two with the same key, the higher is newer.
    pub(crate) generation: u64,
    pub(crate) key: Vec<u8>,
    pub(crate) len: u64,
    /// Blocks in order.
    pub(crate) blocks: Vec<PageBlock>,
}

/// Decoded page of a block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PageContent {
    /// An object starts in the block.
    Object(ObjectPage),
    /// No object: never written, wiped, or of an earlier instance of the file.
    Vacant,
    /// Corrupt, or written to the wrong place.
    Damaged,
}

/// Number of blocks for `len` bytes.
pub(crate) fn blocks_of(len: u64, block_size: u32) -> u64 {
    len.div_ceil(u64::from(block_size))
}

impl ObjectPage {
    /// The block whose page this is.
    pub(crate) fn first(&self) -> Option<BlockIndex> {
        self.blocks.first().map(|block| block.index)
    }

    /// Encodes the page for file instance `instance`.
    pub(crate) fn encode(&self, instance: u64, into: &mut [u8]) {
        let mut bytes = Vec::with_capacity(ALIGN);
        bytes.extend(MAGIC);
        bytes.extend(instance.to_le_bytes());
        bytes.extend(self.generation.to_le_bytes());
        bytes.extend(self.len.to_le_bytes());
        bytes.extend((self.key.len() as u32).to_le_bytes());
        bytes.extend((self.blocks.len() as u32).to_le_bytes());
        bytes.extend(&self.key);
        bytes.resize(BLOCKS, 0);
        for block in &self.blocks {
            bytes.extend(block.index.0.to_le_bytes());
            bytes.extend(block.crc.to_le_bytes());
        }
        bytes.resize(SEAL, 0);
        bytes.extend(Crc32c::of(&bytes).to_le_bytes());
        into.copy_from_slice(&bytes);
    }

    /// Decodes the page of block `first`.
    pub(crate) fn decode(bytes: &[u8], instance: u64, first: BlockIndex, layout: TierLayout) -> PageContent {
        if bytes.iter().all(|byte| *byte == 0) {
            return PageContent::Vacant;
        }
        let Some(body) = Self::sealed(bytes).filter(|body| body.starts_with(MAGIC)) else {
            return PageContent::Damaged;
        };
        if body.get(8..16) != Some(&instance.to_le_bytes()) {
            return PageContent::Vacant;
        }
        Self::parse(body, first, layout).map_or(PageContent::Damaged, PageContent::Object)
    }

    /// The part covered by the checksum, if that is correct.
    fn sealed(bytes: &[u8]) -> Option<&[u8]> {
        let (body, seal) = bytes.split_at_checked(SEAL)?;
        (Crc32c::of(body).to_le_bytes() == seal).then_some(body)
    }

    fn parse(body: &[u8], first: BlockIndex, layout: TierLayout) -> Option<Self> {
        let number = |offset: usize| Some(u32::from_le_bytes(body.get(offset..offset + 4)?.try_into().ok()?));
        let word = |offset: usize| Some(u64::from_le_bytes(body.get(offset..offset + 8)?.try_into().ok()?));
        let count = usize::try_from(number(36)?).ok().filter(|count| *count <= MAX_BLOCKS)?;
        let blocks: Option<Vec<_>> = (0..count)
            .map(|position| {
                let offset = BLOCKS + position * 8;
                Some(PageBlock { index: BlockIndex(number(offset)?), crc: number(offset + 4)? })
            })
            .collect();
        let key_len = usize::try_from(number(32)?).ok().filter(|len| (1..=MAX_KEY).contains(len))?;
        let page = Self {
            generation: word(16)?,
            len: word(24)?,
            key: body.get(KEY..KEY + key_len)?.to_vec(),
            blocks: blocks?,
        };
        let is_valid = page.generation <= MAX_GENERATION
            && page.len > 0
            && page.blocks.len() as u64 == blocks_of(page.len, layout.block_size)
            && page.first()? == first
            && page.blocks.iter().all(|block| block.index.0 < layout.blocks);
        is_valid.then_some(page)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LAYOUT: TierLayout = TierLayout { block_size: 4096, blocks: 1000 };
    const FIRST: BlockIndex = BlockIndex(9);

    fn page(key: usize, blocks: u32) -> ObjectPage {
        ObjectPage {
            generation: 77,
            key: (0..key).map(|index| index as u8).collect(),
            len: u64::from(blocks) * 4096 - 5,
            blocks: (0..blocks)
                .map(|number| PageBlock { index: BlockIndex(number * 2 + 9), crc: number ^ 0xffff_0000 })
                .collect(),
        }
    }

    fn encoded(page: &ObjectPage) -> Vec<u8> {
        let mut bytes = vec![1; ALIGN];
        page.encode(5, &mut bytes);
        bytes
    }

    #[test]
    fn any_flipped_bit_is_damaged() {
        let good = encoded(&page(20, 3));
        assert_eq!(ObjectPage::decode(&good, 5, FIRST, LAYOUT), PageContent::Object(page(20, 3)));
        for bit in 0..ALIGN * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(ObjectPage::decode(&bad, 5, FIRST, LAYOUT), PageContent::Damaged, "bit {bit}");
        }
    }

    #[test]
    fn misplaced_page_is_damaged_and_other_instances_are_vacant() {
        let good = encoded(&page(20, 3));
        assert_eq!(ObjectPage::decode(&good, 6, FIRST, LAYOUT), PageContent::Vacant);
        assert_eq!(ObjectPage::decode(&[0; ALIGN], 5, BlockIndex(0), LAYOUT), PageContent::Vacant);
        assert_eq!(ObjectPage::decode(&good, 5, BlockIndex(11), LAYOUT), PageContent::Damaged);
        assert_eq!(
            ObjectPage::decode(&good, 5, FIRST, TierLayout { blocks: 13, ..LAYOUT }),
            PageContent::Damaged
        );
        assert_eq!(
            ObjectPage::decode(&good, 5, FIRST, TierLayout { block_size: 8192, ..LAYOUT }),
            PageContent::Damaged
        );
        assert_eq!(ObjectPage::decode(&good[..4000], 5, FIRST, LAYOUT), PageContent::Damaged);
    }

    #[test]
    fn a_generation_that_would_overflow_is_damaged() {
        let last = ObjectPage { generation: MAX_GENERATION, ..page(20, 3) };
        assert_eq!(ObjectPage::decode(&encoded(&last), 5, FIRST, LAYOUT), PageContent::Object(last));
        let beyond = ObjectPage { generation: u64::MAX, ..page(20, 3) };
        assert_eq!(ObjectPage::decode(&encoded(&beyond), 5, FIRST, LAYOUT), PageContent::Damaged);
    }

    proptest! {
        #[test]
        fn encoded_pages_are_decoded(key in 1..=MAX_KEY, blocks in 1..=MAX_BLOCKS as u32) {
            let page = page(key, blocks);
            prop_assert_eq!(ObjectPage::decode(&encoded(&page), 5, FIRST, LAYOUT), PageContent::Object(page));
        }
    }
}
