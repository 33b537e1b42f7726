//! The hashes of one prompt's pages.

use sha2::{Digest as _, Sha256};

use crate::block::{BlockDigest, HashedBlock, first_u64, last_u64};
use crate::hash_scheme::{HashAlgorithm, HashScheme, VllmHashInputs};
use crate::{cbor, pickle, python};

/// The state after some full pages of a prompt, from which its next pages can be hashed. Cheap to clone and to keep.
#[derive(Debug, Clone)]
pub struct BlockHashChain {
    scheme: HashScheme,
    blocks: u32,
    /// Hash of the last page; `None` before the first one.
    last: Option<BlockDigest>,
}

impl BlockHashChain {
    /// The beginning of a prompt.
    #[must_use]
    pub fn new(scheme: HashScheme) -> Self {
        Self { scheme, blocks: 0, last: None }
    }

    /// The state after `pages`, the first pages of a prompt under the same scheme.
    #[must_use]
    pub fn resume(scheme: HashScheme, pages: &[HashedBlock]) -> Self {
        let count = u32::try_from(pages.len()).unwrap_or(u32::MAX);
        Self { scheme, blocks: count, last: pages.last().map(|page| page.digest) }
    }

    /// Full pages hashed so far.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Tokens that the pages so far cover. The tokens given to [`BlockHashChain::extend`] begin here.
    #[must_use]
    pub fn covered_tokens(&self) -> usize {
        self.blocks as usize * self.scheme.block_tokens as usize
    }

    /// Hashes the full pages of `rest`, the prompt's tokens from [`BlockHashChain::covered_tokens`] on, and appends them to `out`. What
    /// is left over is not kept: give it again, with what follows it.
    pub fn extend(&mut self, rest: &[u32], out: &mut Vec<HashedBlock>) {
        let page_tokens = self.scheme.block_tokens as usize;
        let bigrams = matches!(self.scheme.algorithm, HashAlgorithm::Sglang { bigrams: true, .. });
        // The last pair of a page reaches one token into the next page.
        let width = page_tokens + usize::from(bigrams);
        out.reserve(rest.len() / page_tokens);
        // One buffer for the bytes hashed, for all pages.
        let mut buffer = Vec::with_capacity(page_tokens * 8 + 64);
        for page in rest.windows(width).step_by(page_tokens) {
            let page = self.hash_block(page, &mut buffer);
            self.last = Some(page.digest);
            self.blocks = self.blocks.saturating_add(1);
            out.push(page);
        }
    }

    fn hash_block(&self, tokens: &[u32], buffer: &mut Vec<u8>) -> HashedBlock {
        let parent = match self.last {
            Some(BlockDigest::Sha256(digest)) => Some(digest),
            _ => None,
        };
        buffer.clear();
        match &self.scheme.algorithm {
            HashAlgorithm::Sglang { root, bigrams } => {
                buffer.extend(parent.or(*root).iter().flatten());
                if *bigrams {
                    buffer.extend(tokens.windows(2).flatten().flat_map(|token| token.to_le_bytes()));
                } else {
                    buffer.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
                }
                let digest = Sha256::digest(&buffer).into();
                HashedBlock { digest: BlockDigest::Sha256(digest), event_hash: first_u64(&digest) }
            }
            HashAlgorithm::VllmPickle(vllm) => {
                pickle::begin(buffer);
                pickle::digest(buffer, &parent.unwrap_or(vllm.root));
                pickle::tokens(buffer, tokens);
                buffer.extend_from_slice(vllm.extra_keys(self.blocks));
                pickle::end_tuple(buffer, 3);
                pickle::finish(buffer);
                vllm_block(buffer)
            }
            HashAlgorithm::VllmCbor(vllm) => {
                cbor::array(buffer, 3);
                cbor::bytes(buffer, &parent.unwrap_or(vllm.root));
                cbor::tokens(buffer, tokens);
                buffer.extend_from_slice(vllm.extra_keys(self.blocks));
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
                    _ => python::unsigned(*root),
                };
                let tokens = python::tuple(tokens.iter().map(|&token| i64::from(token)));
                let hash = python::tuple([parent, tokens, python::tuple([].into_iter())].into_iter());
                HashedBlock { digest: BlockDigest::Signed(hash), event_hash: hash as u64 }
            }
        }
    }
}

impl VllmHashInputs {
    fn extra_keys(&self, page: u32) -> &[u8] {
        if page == 0 { &self.first_block_extra } else { &self.later_block_extra }
    }
}

fn vllm_block(hashed: &[u8]) -> HashedBlock {
    let digest = Sha256::digest(hashed).into();
    HashedBlock { digest: BlockDigest::Sha256(digest), event_hash: last_u64(&digest) }
}
