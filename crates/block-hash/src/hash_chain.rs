//! The block hashes of one prompt.

use sha2::{Digest as _, Sha256};

use crate::block::{BlockDigest, HashedBlock, first_u64, last_u64};
use crate::hash_scheme::{HashAlgorithm, HashScheme};
use crate::{cbor, pickle, python};

/// State after some full blocks of a prompt, from which the next blocks can be hashed. Cheap to clone and to store.
#[derive(Debug, Clone)]
pub struct BlockHashChain {
    scheme: HashScheme,
    blocks: u32,
    /// Hash of the last block; `None` before the first one.
    last: Option<BlockDigest>,
}

impl BlockHashChain {
    /// A chain at the start of a prompt.
    #[must_use]
    pub fn new(scheme: HashScheme) -> Self {
        Self { scheme, blocks: 0, last: None }
    }

    /// The state after `blocks`, the first blocks of a prompt under the same scheme.
    #[must_use]
    pub fn resume(scheme: HashScheme, blocks: &[HashedBlock]) -> Self {
        let count = u32::try_from(blocks.len()).unwrap_or(u32::MAX);
        Self { scheme, blocks: count, last: blocks.last().map(|block| block.digest) }
    }

    /// Number of full blocks hashed so far.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Number of tokens in the blocks so far: the offset of the tokens passed to [`BlockHashChain::extend`].
    #[must_use]
    pub fn covered_tokens(&self) -> usize {
        self.blocks as usize * self.scheme.block_tokens as usize
    }

    /// Hashes the full blocks of `rest`, the prompt's tokens from [`BlockHashChain::covered_tokens`] on, and appends them to `out`.
    /// Remaining tokens are not stored: pass them again with the tokens that follow.
    pub fn extend(&mut self, rest: &[u32], out: &mut Vec<HashedBlock>) {
        let block_tokens = self.scheme.block_tokens as usize;
        let bigrams = matches!(self.scheme.algorithm, HashAlgorithm::Sglang { bigrams: true, .. });
        // The last pair of a block includes the first token of the next block.
        let width = block_tokens + usize::from(bigrams);
        out.reserve(rest.len() / block_tokens);
        // One hash input buffer for all blocks.
        let mut buffer = Vec::with_capacity(block_tokens * 8 + 64);
        for tokens in rest.windows(width).step_by(block_tokens) {
            let block = self.hash_block(tokens, &mut buffer);
            self.last = Some(block.digest);
            self.blocks = self.blocks.saturating_add(1);
            out.push(block);
        }
    }

    fn hash_block(&self, tokens: &[u32], buffer: &mut Vec<u8>) -> HashedBlock {
        let parent = match self.last {
            Some(BlockDigest::Sha256(digest)) => Some(digest),
            _ => None,
        };
        buffer.clear();
        match &self.scheme.algorithm {
            HashAlgorithm::Sglang { root, bigrams, event_seed } => {
                buffer.extend(parent.or(*root).iter().flatten());
                if *bigrams {
                    buffer.extend(tokens.windows(2).flatten().flat_map(|token| token.to_le_bytes()));
                } else {
                    buffer.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
                }
                let digest = Sha256::digest(&buffer).into();
                let hash = first_u64(&digest);
                let published = |seed: &[u8; 32]| {
                    Sha256::new_with_prefix(seed).chain_update(hash.to_be_bytes()).finalize().into()
                };
                let event_hash = event_seed.as_ref().map_or(hash, |seed| first_u64(&published(seed)));
                HashedBlock { digest: BlockDigest::Sha256(digest), event_hash }
            }
            HashAlgorithm::VllmPickle(vllm) => {
                pickle::begin(buffer);
                pickle::digest(buffer, &parent.unwrap_or(vllm.root));
                pickle::tokens(buffer, tokens);
                vllm.write_extra_keys(buffer, self.blocks, self.scheme.block_tokens);
                pickle::end_tuple(buffer, 3);
                pickle::finish(buffer);
                vllm_block(buffer)
            }
            HashAlgorithm::VllmCbor(vllm) => {
                cbor::array(buffer, 3);
                cbor::bytes(buffer, &parent.unwrap_or(vllm.root));
                cbor::tokens(buffer, tokens);
                vllm.write_extra_keys(buffer, self.blocks, self.scheme.block_tokens);
                vllm_block(buffer)
            }
            HashAlgorithm::LmcacheCbor { root } => {
                let parent = if let Some(BlockDigest::Unsigned(parent)) = self.last { parent } else { *root };
                cbor::array(buffer, 3);
                cbor::unsigned(buffer, parent);
                cbor::tokens(buffer, tokens);
                cbor::array(buffer, 0);
                let key = first_u64(&Sha256::digest(&buffer).into());
                HashedBlock { digest: BlockDigest::Unsigned(key), event_hash: key }
            }
            HashAlgorithm::LmcacheBuiltin { root } => {
                let parent = match self.last {
                    Some(BlockDigest::Signed(parent)) => python::signed(parent),
                    _ => *root,
                };
                let tokens = python::tuple(tokens.iter().map(|&token| i64::from(token)));
                let hash = python::tuple([parent, tokens, python::tuple([].into_iter())].into_iter());
                HashedBlock { digest: BlockDigest::Signed(hash), event_hash: hash as u64 }
            }
        }
    }
}

fn vllm_block(hashed: &[u8]) -> HashedBlock {
    let digest = Sha256::digest(hashed).into();
    HashedBlock { digest: BlockDigest::Sha256(digest), event_hash: last_u64(&digest) }
}
