//! What the gateway knows of KV caches, and what that means for a request.
//!
//! Engines' events and the store's metadata fill one index ([`KvIndex`]); a request's tokens become page keys ([`PageKeys`]), and a lookup says how much of the
//! prompt each engine has. All of it is a hint: whatever is missing or wrong here costs time on an engine, never a wrong answer.

mod brief_lock;
#[cfg(test)]
mod brief_lock_tests;
mod feeds;
mod group;
mod index;
mod keyspace;
mod models;
mod predictor;
mod reach;
mod stored;
mod tokenize;
mod tokens;

pub(crate) use feeds::{Feeds, StoreSeen, StoreView, follow_feeds};
pub(crate) use group::Group;
pub(crate) use index::{EngineEntry, KvIndex};
pub(crate) use keyspace::Keyspace;
pub(crate) use models::Models;
pub(crate) use predictor::{Predicted, Predictor};
pub(crate) use stored::StoredAs;
pub(crate) use tokenize::{EngineTokenizer, TokenizeWays};
pub(crate) use tokens::Unknown;
