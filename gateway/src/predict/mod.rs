//! The gateway's knowledge of KV caches, and predictions of cache hits.
//!
//! Engines' events and the store's metadata fill one index ([`crate::kv_index`]); a request's tokens become block keys, and a lookup
//! returns how much of the prompt each engine has. All of it is a hint: a missing or wrong entry costs time on an engine and never
//! causes a wrong response.

mod engine_hits;
mod feeds;
mod gaps;
mod hashed_prefixes;
mod hybrid_hits;
#[cfg(test)]
mod long_text_tests;
mod media;
#[cfg(test)]
mod media_tests;
mod models;
mod prediction_query;
mod predictor;
#[cfg(test)]
mod predictor_tests;
mod prompt_threads;
mod prompt_tokens;
#[cfg(test)]
mod recordings;
mod reuse_limit;
mod seen_texts;
mod store_distance;
mod stored_blocks;
mod tokenize;

pub(crate) use feeds::{FeedStarter, StoreAdmins, StoreView, StoreViewStatus, run_feeds};
pub use gaps::{PredictionGap, prediction_gaps};
pub(crate) use gaps::{observed_gaps, rank_status};
pub(crate) use hashed_prefixes::HashedPrefixes;
pub(crate) use media::{MediaQueryRunner, MediaTokenCache};
pub(crate) use models::ModelTokenizers;
pub(crate) use predictor::{CacheHitPredictor, PromptLength, PromptPrediction, PromptResources};
pub(crate) use prompt_threads::PromptThreads;
pub(crate) use prompt_tokens::{PredictionError, RequestPrompt};
pub(crate) use seen_texts::SeenTexts;
pub(crate) use tokenize::EngineTokenizer;
