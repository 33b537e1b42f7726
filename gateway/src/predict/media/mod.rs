//! Tokens of images, recordings and videos.
//!
//! Only an engine can convert them to tokens. vLLM returns these, and its hash of the content, at `…/render`: the gateway queries one engine
//! once per image, after the first request with it, and predicts later prompts with that image exactly. Until then, and with other engines,
//! the length of a prompt is estimated, and the prediction ends before the first image whose tokens are unknown.

mod cache;
mod estimate;
mod expand;
mod lookup;
mod prompt;
mod query;
mod query_runner;

pub(crate) use cache::MediaTokenCache;
pub(super) use estimate::estimate;
pub(super) use lookup::MediaLookup;
pub(crate) use prompt::MediaCounts;
pub(super) use prompt::MediaPrompt;
pub(crate) use query_runner::MediaQueryRunner;
#[cfg(test)]
pub(super) use {cache::MediaQueries, query::MediaOptions};

/// What an engine converts one image, recording or video to.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct MediumTokens {
    /// The tokens that the chat template renders in its place.
    pub(super) placeholder: Box<[u32]>,
    /// The tokens that the engine computes instead of them.
    pub(super) tokens: Box<[u32]>,
    /// The engine's name of the content in block hashes.
    pub(super) identifier: std::sync::Arc<str>,
}
