//! The models whose prompts can be tokenised here.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arc_swap::ArcSwap;
use moongate_discovery::{Engine, EngineFacts};
use moongate_prompt::{Limits, Model, PromptCaches, Source};

use super::tokens::Kept;

/// A model whose conversations are kept with the hashes of their pages.
pub(super) type PromptModel = Model<Kept>;

type Key = (String, Engine);

/// Models by name and engine: SGLang and vLLM make different prompts of the same messages.
#[derive(Debug)]
pub(crate) struct Models {
    given: Vec<Source>,
    /// Earlier conversations of all models.
    caches: PromptCaches<Kept>,
    states: ArcSwap<HashMap<Key, State>>,
}

#[derive(Debug, Clone)]
enum State {
    Loading,
    Loaded(Arc<PromptModel>),
    /// This folder cannot be used.
    Failed(PathBuf),
}

/// A model that its holder is to load.
#[derive(Debug)]
pub(super) struct Claim {
    source: Source,
    engine: Engine,
    /// Whether a person named the folder; otherwise the engine did.
    given: bool,
}

impl Models {
    /// `given` are the configured folders. They take precedence over what engines report. `conversation_bytes` bounds what is cached of
    /// earlier conversations with all models.
    pub(crate) fn new(given: Vec<Source>, conversation_bytes: u64) -> Self {
        Self { given, caches: PromptCaches::new(conversation_bytes), states: ArcSwap::default() }
    }

    /// The model, if it is loaded.
    pub(super) fn get(&self, model: &str, engine: Engine) -> Option<Arc<PromptModel>> {
        match self.states.load().iter().find(|((name, of), _)| name == model && *of == engine)?.1 {
            State::Loaded(model) => Some(model.clone()),
            State::Loading | State::Failed(_) => None,
        }
    }

    /// Takes note that an engine serves a model. Returns what to load, if there may be a folder and nobody has begun with it.
    pub(super) fn claim(&self, model: &str, facts: &EngineFacts) -> Option<Claim> {
        let given = self.given.iter().find(|source| source.model == model);
        let source = match given {
            Some(source) => source.clone(),
            None => Source { model: model.to_owned(), folder: told_folder(facts)?.to_owned() },
        };
        let key = (model.to_owned(), facts.engine);
        match self.states.load().get(&key) {
            None => {}
            // Another engine may name another folder.
            Some(State::Failed(folder)) if *folder != source.folder => {}
            Some(_) => return None,
        }
        self.put(key, State::Loading);
        Some(Claim { source, engine: facts.engine, given: given.is_some() })
    }

    /// Loads a claimed model. Blocks for about a second.
    pub(super) fn load(&self, claim: &Claim) {
        let Claim { source: Source { model, folder }, engine, given } = claim;
        let key = (model.clone(), *engine);
        let by = if *given { "--model" } else { "the engine" };
        // An engine elsewhere names a folder of its own machine; that it is not here is no fault.
        if !given && !folder.join("tokenizer.json").is_file() {
            tracing::debug!(model, ?engine, folder = %folder.display(), "the engine's tokenizer is not on this machine");
            self.put(key, State::Failed(folder.clone()));
            return;
        }
        let whose = match engine {
            Engine::Sglang => moongate_prompt::Engine::Sglang,
            Engine::Vllm => moongate_prompt::Engine::Vllm,
        };
        match Model::load_with(folder, whose, Limits::default(), &self.caches) {
            Ok(loaded) => {
                tracing::info!(model, ?engine, folder = %folder.display(), by, "prompts of this model are tokenised here");
                self.put(key, State::Loaded(Arc::new(loaded)));
            }
            Err(error) => {
                tracing::error!(model, ?engine, by, %error, "prompts of this model are not tokenised here");
                self.put(key, State::Failed(folder.clone()));
            }
        }
    }

    fn put(&self, key: Key, state: State) {
        self.states.rcu(|states| {
            let mut states = HashMap::clone(states);
            states.insert(key.clone(), state.clone());
            states
        });
    }
}

/// The folder that an engine names; `None` for a repository's name.
fn told_folder(facts: &EngineFacts) -> Option<&Path> {
    facts.tokenizer.as_deref().map(Path::new).filter(|path| path.is_absolute())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(tokenizer: Option<&str>) -> EngineFacts {
        EngineFacts {
            engine: Engine::Vllm,
            version: String::new(),
            models: vec!["m".to_owned()],
            reported_role: None,
            dp_size: 1,
            page_size: None,
            context_length: None,
            tokenizer: tokenizer.map(str::to_owned),
            transfer: None,
            hashing: None,
            events: None,
            host_cache: None,
            store: None,
            priority_order: None,
        }
    }

    #[test]
    fn a_folder_is_tried_once_and_a_persons_word_wins() {
        let models = Models::new(Vec::new(), 1 << 20);
        assert!(models.claim("m", &facts(None)).is_none());
        assert!(models.claim("m", &facts(Some("org/model"))).is_none(), "a repository's name");
        let claim = models.claim("m", &facts(Some("/not/here"))).unwrap();
        assert!(models.claim("m", &facts(Some("/nor/here"))).is_none(), "one is being loaded");
        models.load(&claim);
        assert!(models.claim("m", &facts(Some("/not/here"))).is_none(), "it has failed");
        assert!(models.claim("m", &facts(Some("/nor/here"))).is_some(), "another engine, another folder");

        let models = Models::new(vec![Source { model: "m".to_owned(), folder: "/given".into() }], 1 << 20);
        let claim = models.claim("m", &facts(Some("/told"))).unwrap();
        assert_eq!((claim.source.folder.to_str(), claim.given), (Some("/given"), true));
    }

    #[test]
    fn a_folder_that_an_engine_names_is_loaded_if_it_is_here() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/prompt/tests/data/small");
        let models = Models::new(Vec::new(), 1 << 20);
        let claim = models.claim("m", &facts(Some(folder))).unwrap();
        models.load(&claim);
        assert!(models.get("m", Engine::Vllm).is_some());
        assert!(models.get("m", Engine::Sglang).is_none());
    }
}
