//! Sends queries for the tokens of media to engines, in the background.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use moongate_discovery::EngineKind;
use moongate_tokenize::{ChatBody, TemplateTime};
use tokio_util::sync::CancellationToken;

use super::MediumTokens;
use super::cache::{MediaQueries, MediaTokenCache};
use super::query::MediaQuery;
use crate::feedback::{MediaQueryResult, TokenizeMetrics};
use crate::fleet::{FleetReader, FleetSnapshot};
use crate::predict::models::ModelTokenizers;
use crate::predict::tokenize::{EngineTokenizeError, EngineTokenizer};

/// Concurrent queries of all engines. Each costs an engine the processing of one image.
const MAX_CONCURRENT_QUERIES: usize = 4;
/// Limit of one query: the engine may have to download the image, and to process it beside its requests.
const QUERY_TIMEOUT: Duration = Duration::from_secs(30);

/// Sends a cache's queries to engines, and records the responses in the cache.
#[derive(Debug)]
pub(crate) struct MediaQueryRunner {
    pub(crate) cache: Arc<MediaTokenCache>,
    pub(crate) models: Arc<ModelTokenizers>,
    pub(crate) engines: Arc<EngineTokenizer>,
    pub(crate) metrics: Arc<TokenizeMetrics>,
}

impl MediaQueryRunner {
    /// Runs until `stop`.
    pub(crate) async fn run(self, mut queries: MediaQueries, fleet: FleetReader, stop: CancellationToken) {
        let mut running = FuturesUnordered::new();
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                Some(()) = running.next(), if !running.is_empty() => {}
                query = queries.next(), if running.len() < MAX_CONCURRENT_QUERIES => match query {
                    Some(query) => running.push(self.learn(query, fleet.current())),
                    None => return,
                },
            }
        }
    }

    async fn learn(&self, query: MediaQuery, fleet: Arc<FleetSnapshot>) {
        let (key, is_inline) = (query.key, query.is_inline);
        let result = match self.query(query, &fleet).await {
            Ok(known) => {
                self.cache.record(key, is_inline, Some(known));
                MediaQueryResult::Learned
            }
            // A later request may find an engine that can.
            Err(EngineTokenizeError::NotOffered | EngineTokenizeError::Busy) => {
                self.cache.remove(key);
                MediaQueryResult::Dropped
            }
            Err(error) => {
                tracing::debug!(%error, "the tokens of an image are unknown");
                self.cache.record(key, is_inline, None);
                MediaQueryResult::Failed
            }
        };
        self.metrics.record_media_query(result);
    }

    async fn query(
        &self,
        query: MediaQuery,
        fleet: &FleetSnapshot,
    ) -> Result<MediumTokens, EngineTokenizeError> {
        let MediaQuery { model, body, .. } = query;
        let index = fleet.model(&model).map_err(|_| EngineTokenizeError::NotOffered)?;
        let engine = self.engines.render_medium(fleet, index, body.clone(), QUERY_TIMEOUT).await?;
        let rendered = self.rendered(&model, body).await.ok_or(EngineTokenizeError::Failed)?;
        MediumTokens::compare(&rendered, engine).ok_or(EngineTokenizeError::Failed)
    }

    /// The tokens that this gateway renders for the query's chat.
    async fn rendered(&self, model: &str, body: Bytes) -> Option<Vec<u32>> {
        let tokenizer = self.models.get(model, EngineKind::Vllm)?;
        let render = move || {
            let chat = ChatBody::parse(&body).ok()?;
            let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            let now = TemplateTime::utc(i64::try_from(since.as_secs()).unwrap_or(i64::MAX));
            let text = tokenizer.render_media_chat(&chat, now).ok()?;
            Some(tokenizer.tokenize_media_chat(&text).ok()?.ids().to_vec())
        };
        // Fails only at shutdown, when the result is no longer needed.
        tokio::task::spawn_blocking(render).await.ok()?
    }
}
