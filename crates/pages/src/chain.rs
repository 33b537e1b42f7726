//! The hashes of one prompt's pages.

use sha2::{Digest as _, Sha256};

use crate::page::{Digest, Page, first_u64, last_u64};
use crate::scheme::{Algorithm, Scheme, Vllm};
use crate::{cbor, pickle, python};

/// The state after some full pages of a prompt, from which its next pages can be hashed. Cheap to clone and to keep.
#[derive(Debug, Clone)]
pub struct Chain {
    scheme: Scheme,
    pages: u32,
    /// Hash of the last page; `None` before the first one.
    last: Option<Digest>,
}

impl Chain {
    /// The beginning of a prompt.
    #[must_use]
    pub fn new(scheme: Scheme) -> Self {
        Self { scheme, pages: 0, last: None }
    }

    /// The state after `pages`, the first pages of a prompt under the same scheme.
    #[must_use]
    pub fn after(scheme: Scheme, pages: &[Page]) -> Self {
        let count = u32::try_from(pages.len()).unwrap_or(u32::MAX);
        Self { scheme, pages: count, last: pages.last().map(|page| page.digest) }
    }

    /// Full pages hashed so far.
    #[must_use]
    pub fn pages(&self) -> u32 {
        self.pages
    }

    /// Tokens that the pages so far cover. The tokens given to [`Chain::extend`] begin here.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.pages as usize * self.scheme.page_tokens as usize
    }

    /// Hashes the full pages of `rest`, the prompt's tokens from [`Chain::tokens`] on, and appends them to `out`. What
    /// is left over is not kept: give it again, with what follows it.
    pub fn extend(&mut self, rest: &[u32], out: &mut Vec<Page>) {
        let page_tokens = self.scheme.page_tokens as usize;
        let bigrams = matches!(self.scheme.algorithm, Algorithm::Sglang { bigrams: true, .. });
        // The last pair of a page reaches one token into the next page.
        let width = page_tokens + usize::from(bigrams);
        out.reserve(rest.len() / page_tokens);
        // One buffer for the bytes hashed, for all pages.
        let mut buffer = Vec::with_capacity(page_tokens * 8 + 64);
        for page in rest.windows(width).step_by(page_tokens) {
            let page = self.page(page, &mut buffer);
            self.last = Some(page.digest);
            self.pages = self.pages.saturating_add(1);
            out.push(page);
        }
    }

    fn page(&self, tokens: &[u32], buffer: &mut Vec<u8>) -> Page {
        let parent = match self.last {
            Some(Digest::Sha256(digest)) => Some(digest),
            _ => None,
        };
        buffer.clear();
        match &self.scheme.algorithm {
            Algorithm::Sglang { root, bigrams } => {
                buffer.extend(parent.or(*root).iter().flatten());
                if *bigrams {
                    buffer.extend(tokens.windows(2).flatten().flat_map(|token| token.to_le_bytes()));
                } else {
                    buffer.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
                }
                let digest = Sha256::digest(&buffer).into();
                Page { digest: Digest::Sha256(digest), key: first_u64(&digest) }
            }
            Algorithm::VllmPickle(vllm) => {
                pickle::begin(buffer);
                pickle::digest(buffer, &parent.unwrap_or(vllm.root));
                pickle::tokens(buffer, tokens);
                buffer.extend_from_slice(vllm.extra(self.pages));
                pickle::after_items(buffer, 3);
                pickle::finish(buffer);
                vllm_page(buffer)
            }
            Algorithm::VllmCbor(vllm) => {
                cbor::array(buffer, 3);
                cbor::bytes(buffer, &parent.unwrap_or(vllm.root));
                cbor::tokens(buffer, tokens);
                buffer.extend_from_slice(vllm.extra(self.pages));
                vllm_page(buffer)
            }
            Algorithm::LmcacheCbor { root } => {
                let parent = if let Some(Digest::Unsigned(parent)) = self.last { parent } else { *root };
                cbor::array(buffer, 3);
                cbor::unsigned(buffer, parent);
                cbor::tokens(buffer, tokens);
                cbor::array(buffer, 0);
                let key = first_u64(&Sha256::digest(&buffer).into());
                Page { digest: Digest::Unsigned(key), key }
            }
            Algorithm::LmcacheBuiltin { root } => {
                let parent = match self.last {
                    Some(Digest::Signed(parent)) => python::signed(parent),
                    _ => python::unsigned(*root),
                };
                let tokens = python::tuple(tokens.iter().map(|&token| i64::from(token)));
                let hash = python::tuple([parent, tokens, python::tuple([].into_iter())].into_iter());
                Page { digest: Digest::Signed(hash), key: hash as u64 }
            }
        }
    }
}

impl Vllm {
    fn extra(&self, page: u32) -> &[u8] {
        if page == 0 { &self.first_extra } else { &self.later_extra }
    }
}

fn vllm_page(hashed: &[u8]) -> Page {
    let digest = Sha256::digest(hashed).into();
    Page { digest: Digest::Sha256(digest), key: last_u64(&digest) }
}
