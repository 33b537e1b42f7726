//! A prompt's blocks as objects of the store.

use std::sync::Arc;

use mooncake_wire::admin::DescribedPrompt;
use mooncake_wire::key::BlockKeyHash;
use moongate_block_hash::{BlockDigest, HashedBlock};

use super::prompt_tokens::HashedTokens;
use crate::feedback::StoredPrompt;
use crate::kv_index::StoreKeyNaming;

/// The blocks of one prompt, shared with the prompt's conversation.
#[derive(Debug, Clone)]
pub(super) struct StoredBlocks {
    pub(super) naming: Arc<StoreKeyNaming>,
    pub(super) blocks: HashedTokens,
    /// Length of the prompt.
    pub(super) tokens: u32,
}

impl StoredPrompt for StoredBlocks {
    fn describe(&self) -> DescribedPrompt<'static> {
        let hashes: Vec<BlockKeyHash> = self.blocks.blocks().iter().filter_map(store_hash).collect();
        let parts = hashes.first().map(|first| self.naming.key_affixes(*first)).unwrap_or_default();
        DescribedPrompt {
            tokens: self.tokens.into(),
            parts: parts.into_iter().map(|affixes| affixes.map(Into::into)).collect(),
            hashes: hashes.iter().map(|hash| hash.to_string().into()).collect(),
            ..DescribedPrompt::default()
        }
    }
}

/// A block's hash in the keys of its objects; `None` if keys do not contain it.
pub(super) fn store_hash(block: &HashedBlock) -> Option<BlockKeyHash> {
    match &block.digest {
        BlockDigest::Sha256(digest) => BlockKeyHash::new(digest),
        BlockDigest::Unsigned(_) | BlockDigest::Signed(_) => None,
    }
}
