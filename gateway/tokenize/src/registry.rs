//! Registry of loaded models by their names in requests.

use std::collections::HashMap;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use arc_swap::ArcSwap;

use crate::error::ModelLoadError;
use crate::model::PromptTokenizer;

/// A model and the folder with its files: `MODEL=FOLDER`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelFolder {
    /// The model's name in requests. It may contain `=`; the folder must not.
    pub model: String,
    /// Folder with the model's tokenizer files.
    pub folder: PathBuf,
}

impl FromStr for ModelFolder {
    type Err = ModelLoadError;

    fn from_str(flag: &str) -> Result<ModelFolder, ModelLoadError> {
        match flag.rsplit_once('=') {
            Some((model, folder)) if !model.is_empty() && !folder.is_empty() => {
                Ok(ModelFolder { model: model.to_owned(), folder: PathBuf::from(folder) })
            }
            _ => Err(ModelLoadError::Flag(flag.to_owned())),
        }
    }
}

impl ModelFolder {
    /// Checks that each model is listed once.
    ///
    /// # Errors
    /// [`ModelLoadError::Duplicate`]
    pub fn check(sources: &[ModelFolder]) -> Result<(), ModelLoadError> {
        for (number, source) in sources.iter().enumerate() {
            if sources[..number].iter().any(|other| other.model == source.model) {
                return Err(ModelLoadError::Duplicate(source.model.clone()));
            }
        }
        Ok(())
    }
}

/// The loaded models. Readers never block; a model is added after it has been loaded.
pub struct TokenizerRegistry {
    models: ArcSwap<HashMap<String, Arc<PromptTokenizer>>>,
}

impl TokenizerRegistry {
    /// Creates a registry without models.
    #[must_use]
    pub fn new() -> TokenizerRegistry {
        TokenizerRegistry { models: ArcSwap::from_pointee(HashMap::new()) }
    }

    /// The model of this name; `None` if it is not loaded.
    #[must_use]
    pub fn get(&self, model: &str) -> Option<Arc<PromptTokenizer>> {
        self.models.load().get(model).cloned()
    }

    /// Adds a model, or replaces the one of that name.
    pub fn insert(&self, name: &str, model: PromptTokenizer) {
        let model = Arc::new(model);
        self.models.rcu(|models| {
            let mut models = HashMap::clone(models);
            models.insert(name.to_owned(), Arc::clone(&model));
            models
        });
    }
}

impl Default for TokenizerRegistry {
    fn default() -> TokenizerRegistry {
        TokenizerRegistry::new()
    }
}

impl std::fmt::Debug for TokenizerRegistry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.models.load().keys()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_name_a_model_and_a_folder() {
        let source: ModelFolder = "org/model=/models/it".parse().unwrap();
        assert_eq!((source.model.as_str(), source.folder.to_str()), ("org/model", Some("/models/it")));
        for wrong in ["", "model", "=folder", "model="] {
            assert!(wrong.parse::<ModelFolder>().is_err(), "{wrong}");
        }
        assert!(matches!(ModelFolder::check(&[source.clone(), source]), Err(ModelLoadError::Duplicate(_))));
    }
}
