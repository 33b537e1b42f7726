//! Tokenizers of models whose prompts are tokenized in the gateway.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arc_swap::ArcSwap;
use moongate_discovery::{EngineFacts, EngineKind};
use moongate_tokenize::{
    ImageTokenRule, ModelFolder, PromptCaches, PromptDialect, PromptLimits, PromptTokenizer,
};

type ModelTokenizerKey = (String, EngineKind);

/// Tokenizers by model and engine: SGLang and vLLM render different prompts from the same messages.
#[derive(Debug)]
pub(crate) struct ModelTokenizers {
    configured: Vec<ModelFolder>,
    /// Cached texts and bodies of all models.
    caches: PromptCaches,
    states: ArcSwap<HashMap<ModelTokenizerKey, ModelTokenizerState>>,
    /// By model. Their folders may be usable although their tokenizers are not.
    image_rules: ArcSwap<HashMap<String, ImageTokenRule>>,
}

#[derive(Debug, Clone)]
enum ModelTokenizerState {
    Loading,
    Loaded(Arc<PromptTokenizer>),
    /// The folder that cannot be used.
    Failed(PathBuf),
}

/// A tokenizer that its owner must load.
#[derive(Debug)]
pub(super) struct TokenizerLoadTask {
    folder: ModelFolder,
    engine: EngineKind,
    /// Whether `--model` names the folder; otherwise the engine reported it.
    is_configured: bool,
}

impl ModelTokenizers {
    /// `configured` folders take precedence over those that engines report. `cache_bytes` limits the cached texts and bodies of
    /// all models.
    pub(crate) fn new(configured: Vec<ModelFolder>, cache_bytes: u64) -> Self {
        Self {
            configured,
            caches: PromptCaches::new(cache_bytes),
            states: ArcSwap::default(),
            image_rules: ArcSwap::default(),
        }
    }

    /// How many tokens an image has in a model.
    pub(super) fn image_rule(&self, model: &str) -> ImageTokenRule {
        self.image_rules.load().get(model).copied().unwrap_or(ImageTokenRule::Unknown)
    }

    /// The tokenizer, if it is loaded.
    pub(super) fn get(&self, model: &str, engine: EngineKind) -> Option<Arc<PromptTokenizer>> {
        match self.states.load().iter().find(|((name, of), _)| name == model && *of == engine)?.1 {
            ModelTokenizerState::Loaded(model) => Some(model.clone()),
            ModelTokenizerState::Loading | ModelTokenizerState::Failed(_) => None,
        }
    }

    /// Registers that an engine serves a model. Returns what to load, if there may be a folder and no other task loads it.
    pub(super) fn claim(&self, model: &str, facts: &EngineFacts) -> Option<TokenizerLoadTask> {
        let configured_folder = self.configured.iter().find(|source| source.model == model);
        let source = match configured_folder {
            Some(source) => source.clone(),
            None => ModelFolder { model: model.to_owned(), folder: reported_folder(facts)?.to_owned() },
        };
        let key = (model.to_owned(), facts.engine);
        match self.states.load().get(&key) {
            None => {}
            // Another engine may report another folder.
            Some(ModelTokenizerState::Failed(folder)) if *folder != source.folder => {}
            Some(_) => return None,
        }
        self.set_state(key, ModelTokenizerState::Loading);
        Some(TokenizerLoadTask {
            folder: source,
            engine: facts.engine,
            is_configured: configured_folder.is_some(),
        })
    }

    /// Loads a claimed tokenizer. Blocks for about a second.
    pub(super) fn load(&self, claim: &TokenizerLoadTask) {
        let TokenizerLoadTask { folder: ModelFolder { model, folder }, engine, is_configured } = claim;
        let key = (model.clone(), *engine);
        let folder_source = if *is_configured { "--model" } else { "the engine" };
        // An engine on another machine reports a folder of that machine; it is no error if it does not exist here.
        if !is_configured && !folder.join("tokenizer.json").is_file() {
            tracing::debug!(model, ?engine, folder = %folder.display(), "the engine's tokenizer folder does not exist on this machine");
            self.set_state(key, ModelTokenizerState::Failed(folder.clone()));
            return;
        }
        self.add_image_rule(model, ImageTokenRule::load(folder));
        match PromptTokenizer::load_with(folder, dialect(*engine), PromptLimits::default(), &self.caches) {
            Ok(loaded) => {
                tracing::info!(model, ?engine, folder = %folder.display(), source = folder_source, "local tokenizer loaded");
                self.set_state(key, ModelTokenizerState::Loaded(Arc::new(loaded)));
            }
            Err(error) => {
                tracing::error!(model, ?engine, source = folder_source, %error, "cannot load the local tokenizer");
                self.set_state(key, ModelTokenizerState::Failed(folder.clone()));
            }
        }
    }

    fn add_image_rule(&self, model: &str, rule: ImageTokenRule) {
        self.image_rules.rcu(|rules| {
            let mut rules = HashMap::clone(rules);
            rules.insert(model.to_owned(), rule);
            rules
        });
    }

    fn set_state(&self, key: ModelTokenizerKey, state: ModelTokenizerState) {
        self.states.rcu(|states| {
            let mut states = HashMap::clone(states);
            states.insert(key.clone(), state.clone());
            states
        });
    }
}

/// The folder that an engine reports; `None` for the name of a repository.
fn reported_folder(facts: &EngineFacts) -> Option<&Path> {
    facts.tokenizer.as_deref().map(Path::new).filter(|path| path.is_absolute())
}

/// How an engine of this kind builds prompts.
pub(super) fn dialect(engine: EngineKind) -> PromptDialect {
    match engine {
        EngineKind::Sglang => PromptDialect::Sglang,
        EngineKind::Vllm => PromptDialect::Vllm,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(tokenizer: Option<&str>) -> EngineFacts {
        EngineFacts {
            models: vec!["m".to_owned()],
            tokenizer: tokenizer.map(str::to_owned),
            ..EngineFacts::unreported(EngineKind::Vllm)
        }
    }

    #[test]
    fn a_folder_is_tried_once_and_configuration_wins() {
        let models = ModelTokenizers::new(Vec::new(), 1 << 20);
        assert!(models.claim("m", &facts(None)).is_none());
        assert!(models.claim("m", &facts(Some("org/model"))).is_none(), "a repository's name");
        let claim = models.claim("m", &facts(Some("/not/here"))).unwrap();
        assert!(models.claim("m", &facts(Some("/nor/here"))).is_none(), "another task loads it");
        models.load(&claim);
        assert!(models.claim("m", &facts(Some("/not/here"))).is_none(), "it has failed");
        assert!(models.claim("m", &facts(Some("/nor/here"))).is_some(), "another engine, another folder");

        let models = ModelTokenizers::new(
            vec![ModelFolder { model: "m".to_owned(), folder: "/given".into() }],
            1 << 20,
        );
        let claim = models.claim("m", &facts(Some("/reported"))).unwrap();
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
