//! The models whose prompts can be tokenised here.

use std::collections::HashMap;
use std::sync::Arc;

use arc_swap::ArcSwap;
use moongate_discovery::Engine;
use moongate_prompt::{Limits, Model, Source};

use super::tokens::Kept;

/// A model whose conversations are kept with the hashes of their pages.
pub(super) type PromptModel = Model<Kept>;

type Key = (String, Engine);

/// Models by name and engine: SGLang and vLLM make different prompts of the same messages.
#[derive(Debug, Default)]
pub(crate) struct Models {
    sources: Vec<Source>,
    /// `None`: loading, or loading has failed.
    loaded: ArcSwap<HashMap<Key, Option<Arc<PromptModel>>>>,
}

impl Models {
    pub(crate) fn new(sources: Vec<Source>) -> Self {
        Self { sources, loaded: ArcSwap::default() }
    }

    /// The model, if it is loaded.
    pub(super) fn get(&self, model: &str, engine: Engine) -> Option<Arc<PromptModel>> {
        self.loaded.load().iter().find(|((name, of), _)| name == model && *of == engine)?.1.clone()
    }

    /// Takes note that a model is wanted. Returns where it is, if it has a folder and nobody has begun to load it.
    pub(super) fn claim(&self, model: &str, engine: Engine) -> Option<Source> {
        let source = self.sources.iter().find(|source| source.model == model)?;
        let key = (model.to_owned(), engine);
        if self.loaded.load().contains_key(&key) {
            return None;
        }
        self.put(key, None);
        Some(source.clone())
    }

    /// Loads a claimed model. Blocks for about a second.
    pub(super) fn load(&self, source: &Source, engine: Engine) {
        let whose = match engine {
            Engine::Sglang => moongate_prompt::Engine::Sglang,
            Engine::Vllm => moongate_prompt::Engine::Vllm,
        };
        match Model::load(&source.folder, whose, Limits::default()) {
            Ok(model) => {
                tracing::info!(model = source.model, ?engine, "prompts of this model are tokenised");
                self.put((source.model.clone(), engine), Some(Arc::new(model)));
            }
            Err(error) => {
                tracing::error!(model = source.model, %error, "prompts of this model are not predicted");
            }
        }
    }

    fn put(&self, key: Key, model: Option<Arc<PromptModel>>) {
        self.loaded.rcu(|loaded| {
            let mut loaded = HashMap::clone(loaded);
            loaded.insert(key.clone(), model.clone());
            loaded
        });
    }
}
