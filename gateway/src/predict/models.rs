//! The models whose prompts can be tokenised here.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arc_swap::ArcSwap;
use moongate_discovery::{EngineFacts, EngineKind};
use moongate_tokenize::{ModelFolder, PromptCaches, PromptLimits, PromptTokenizer};

use super::prompt_tokens::SharedPromptBlocks;

/// A model whose conversations are kept with the hashes of their pages.
pub(super) type BlockTokenizer = PromptTokenizer<SharedPromptBlocks>;

type ModelTokenizerKey = (String, EngineKind);

/// Models by name and engine: SGLang and vLLM make different prompts of the same messages.
#[derive(Debug)]
pub(crate) struct ModelTokenizers {
    configured: Vec<ModelFolder>,
    /// Earlier conversations of all models.
    caches: PromptCaches<SharedPromptBlocks>,
    states: ArcSwap<HashMap<ModelTokenizerKey, ModelTokenizerState>>,
}

#[derive(Debug, Clone)]
enum ModelTokenizerState {
    Loading,
    Loaded(Arc<BlockTokenizer>),
    /// This folder cannot be used.
    Failed(PathBuf),
}

/// A model that its holder is to load.
#[derive(Debug)]
pub(super) struct TokenizerLoadTask {
    folder: ModelFolder,
    engine: EngineKind,
    /// Whether a person named the folder; otherwise the engine did.
    is_configured: bool,
}

impl ModelTokenizers {
    /// `given` are the configured folders. They take precedence over what engines report. `conversation_bytes` bounds what is cached of
    /// earlier conversations with all models.
    pub(crate) fn new(configured: Vec<ModelFolder>, conversation_bytes: u64) -> Self {
        Self { configured, caches: PromptCaches::new(conversation_bytes), states: ArcSwap::default() }
    }

    /// The model, if it is loaded.
    pub(super) fn get(&self, model: &str, engine: EngineKind) -> Option<Arc<BlockTokenizer>> {
        match self.states.load().iter().find(|((name, of), _)| name == model && *of == engine)?.1 {
            ModelTokenizerState::Loaded(model) => Some(model.clone()),
            ModelTokenizerState::Loading | ModelTokenizerState::Failed(_) => None,
        }
    }

    /// Takes note that an engine serves a model. Returns what to load, if there may be a folder and nobody has begun with it.
    pub(super) fn claim(&self, model: &str, facts: &EngineFacts) -> Option<TokenizerLoadTask> {
        let given = self.configured.iter().find(|source| source.model == model);
        let source = match given {
            Some(source) => source.clone(),
            None => ModelFolder { model: model.to_owned(), folder: reported_folder(facts)?.to_owned() },
        };
        let key = (model.to_owned(), facts.engine);
        match self.states.load().get(&key) {
            None => {}
            // Another engine may name another folder.
            Some(ModelTokenizerState::Failed(folder)) if *folder != source.folder => {}
            Some(_) => return None,
        }
        self.set_state(key, ModelTokenizerState::Loading);
        Some(TokenizerLoadTask { folder: source, engine: facts.engine, is_configured: given.is_some() })
    }

    /// Loads a claimed model. Blocks for about a second.
    pub(super) fn load(&self, claim: &TokenizerLoadTask) {
        let TokenizerLoadTask { folder: ModelFolder { model, folder }, engine, is_configured: given } = claim;
        let key = (model.clone(), *engine);
        let by = if *given { "--model" } else { "the engine" };
        // An engine elsewhere names a folder of its own machine; that it is not here is no fault.
        if !given && !folder.join("tokenizer.json").is_file() {
            tracing::debug!(model, ?engine, folder = %folder.display(), "the engine's tokenizer is not on this machine");
            self.set_state(key, ModelTokenizerState::Failed(folder.clone()));
            return;
        }
        let whose = match engine {
            EngineKind::Sglang => moongate_tokenize::PromptDialect::Sglang,
            EngineKind::Vllm => moongate_tokenize::PromptDialect::Vllm,
        };
        match PromptTokenizer::load_with(folder, whose, PromptLimits::default(), &self.caches) {
            Ok(loaded) => {
                tracing::info!(model, ?engine, folder = %folder.display(), by, "prompts of this model are tokenised here");
                self.set_state(key, ModelTokenizerState::Loaded(Arc::new(loaded)));
            }
            Err(error) => {
                tracing::error!(model, ?engine, by, %error, "prompts of this model are not tokenised here");
                self.set_state(key, ModelTokenizerState::Failed(folder.clone()));
            }
        }
    }

    fn set_state(&self, key: ModelTokenizerKey, state: ModelTokenizerState) {
        self.states.rcu(|states| {
            let mut states = HashMap::clone(states);
            states.insert(key.clone(), state.clone());
            states
        });
    }
}

/// The folder that an engine names; `None` for a repository's name.
fn reported_folder(facts: &EngineFacts) -> Option<&Path> {
    facts.tokenizer.as_deref().map(Path::new).filter(|path| path.is_absolute())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(tokenizer: Option<&str>) -> EngineFacts {
        EngineFacts {
            engine: EngineKind::Vllm,
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
    fn a_folder_is_tried_once_and_configuration_wins() {
        let models = ModelTokenizers::new(Vec::new(), 1 << 20);
        assert!(models.claim("m", &facts(None)).is_none());
        assert!(models.claim("m", &facts(Some("org/model"))).is_none(), "a repository's name");
        let claim = models.claim("m", &facts(Some("/not/here"))).unwrap();
        assert!(models.claim("m", &facts(Some("/nor/here"))).is_none(), "one is being loaded");
        models.load(&claim);
        assert!(models.claim("m", &facts(Some("/not/here"))).is_none(), "it has failed");
        assert!(models.claim("m", &facts(Some("/nor/here"))).is_some(), "another engine, another folder");

        let models = ModelTokenizers::new(
            vec![ModelFolder { model: "m".to_owned(), folder: "/given".into() }],
            1 << 20,
        );
        let claim = models.claim("m", &facts(Some("/told"))).unwrap();
        assert_eq!((claim.folder.folder.to_str(), claim.is_configured), (Some("/given"), true));
    }

    #[test]
    fn a_folder_that_an_engine_names_is_loaded_if_it_is_here() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tokenize/tests/data/small");
        let models = ModelTokenizers::new(Vec::new(), 1 << 20);
        let claim = models.claim("m", &facts(Some(folder))).unwrap();
        models.load(&claim);
        assert!(models.get("m", EngineKind::Vllm).is_some());
        assert!(models.get("m", EngineKind::Sglang).is_none());
    }
}
