//! Model aliases: names for clients that stand for one or more models of the engines, with weights and fallbacks.
//!
//! An alias is resolved when a request has been read. Engines get the name of the chosen model; a conversation stays on one model
//! as long as the client names it (see [`ChoiceKey`]).

mod alias_table;
mod choice;
mod options;

use std::collections::VecDeque;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use moongate_runtime::FileChangeWatcher;
use tokio_util::sync::CancellationToken;

pub use alias_table::{AliasError, AliasFileError};
use alias_table::{AliasTable, ModelAlias};
pub(crate) use choice::ChoiceKey;
pub use options::{ModelAliasFileError, ModelAliasOptions};

use crate::feedback::ModelAliasMetrics;
use crate::reloadable_file::ReloadableFile;

const FLAG: &str = "--model-alias-file";

/// The aliases of the file, reloaded when it changes.
#[derive(Debug)]
pub(crate) struct ModelAliases {
    file: Option<ReloadableFile<AliasTable, AliasFileError>>,
}

/// Models that may serve a request for an alias.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AliasCandidates {
    pub(crate) alias: Arc<str>,
    /// The chosen model, then the fallbacks. At least one, without repetition.
    pub(crate) models: Vec<Arc<str>>,
}

/// A request for an alias, and the models that it has not been directed to yet.
#[derive(Debug, Clone)]
pub(crate) struct AliasedModel {
    pub(crate) name: Arc<str>,
    remaining: VecDeque<Arc<str>>,
    /// Byte range of the model's name in the body, if that is a form.
    pub(crate) form_value: Option<Range<usize>>,
}

impl AliasedModel {
    /// A request that was not directed to any of the models.
    pub(crate) fn new(AliasCandidates { alias, models }: AliasCandidates) -> Self {
        Self { name: alias, remaining: models.into(), form_value: None }
    }

    /// The next model to which the request is to be directed.
    pub(crate) fn next_model(&mut self) -> Option<Arc<str>> {
        self.remaining.pop_front()
    }
}

/// An alias as the list of models describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ListedAlias {
    pub(crate) name: Arc<str>,
    /// Its models and fallbacks, the first configured model first.
    pub(crate) models: Vec<Arc<str>>,
}

impl ModelAliases {
    /// Reads the file of `options`.
    pub(crate) fn load(options: &ModelAliasOptions) -> Result<Self, ModelAliasFileError> {
        let load = |path: &PathBuf| {
            ReloadableFile::load(FLAG, path, AliasTable::read)
                .map_err(|source| ModelAliasFileError { path: path.clone(), source })
        };
        Ok(Self { file: options.model_alias_file.as_ref().map(load).transpose()? })
    }

    /// Reloads the file when it changes. `changes` must have been created before the file was read.
    pub(crate) async fn watch_file(
        self: Arc<Self>,
        metrics: ModelAliasMetrics,
        changes: FileChangeWatcher,
        stop: CancellationToken,
    ) {
        let reload = || {
            if let Some(file) = &self.file {
                metrics.record_reload(file.reload(AliasTable::len));
            }
        };
        changes.watch(stop, reload).await;
    }

    /// The models for a request for `name`; `None` if that is no alias for this tenant. `key` is evaluated only for an alias.
    pub(crate) fn resolve(
        &self,
        name: &str,
        tenant: Option<&str>,
        key: impl FnOnce() -> ChoiceKey,
    ) -> Option<AliasCandidates> {
        let table = self.file.as_ref()?.current();
        let (alias, entry) = table.get(name)?;
        if !entry.permits(tenant) {
            return None;
        }
        Some(AliasCandidates { alias: alias.clone(), models: table.candidates(alias, entry, &key()) })
    }

    /// The aliases that exist for this tenant, by name.
    pub(crate) fn list(&self, tenant: Option<&str>) -> Vec<ListedAlias> {
        let Some(file) = &self.file else { return Vec::new() };
        let table = file.current();
        let permitted = table.iter().filter(|(_, entry)| entry.permits(tenant));
        let listed = |(name, entry): (&Arc<str>, &ModelAlias)| ListedAlias {
            name: name.clone(),
            models: table.all_models(entry),
        };
        permitted.map(listed).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn aliases(text: &str) -> (ModelAliases, tempfile::NamedTempFile) {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        let options = ModelAliasOptions { model_alias_file: Some(file.path().to_owned()) };
        (ModelAliases::load(&options).unwrap(), file)
    }

    #[test]
    fn an_alias_exists_only_for_its_tenants() {
        let (aliases, _file) = aliases(
            "[[alias]]\nname = \"chat\"\nmodels = [{ model = \"m\" }]\ntenants = [\"a\"]\n\
             [[alias]]\nname = \"open\"\nmodels = [{ model = \"m\" }]\nfallback = [\"n\"]\n",
        );
        let key = || ChoiceKey::Random(0);
        assert!(aliases.resolve("chat", Some("a"), key).is_some());
        assert!(aliases.resolve("chat", Some("b"), key).is_none());
        assert!(aliases.resolve("chat", None, key).is_none());
        assert!(aliases.resolve("m", None, || panic!("no alias")).is_none());
        let names = |tenant| -> Vec<Arc<str>> {
            aliases.list(tenant).into_iter().map(|listed| listed.name).collect()
        };
        assert_eq!(names(Some("a")), ["chat".into(), "open".into()]);
        assert_eq!(names(None), ["open".into()]);
        assert_eq!(aliases.list(None)[0].models, ["m".into(), "n".into()]);
    }

    #[test]
    fn an_invalid_file_keeps_the_previous_aliases() {
        let (aliases, file) = aliases("[[alias]]\nname = \"chat\"\nmodels = [{ model = \"m\" }]\n");
        let reload = || aliases.file.as_ref().unwrap().reload(AliasTable::len);
        std::fs::write(file.path(), "[[alias]]\nname = 1").unwrap();
        assert!(!reload());
        assert_eq!(aliases.list(None).len(), 1);
        std::fs::write(file.path(), "").unwrap();
        assert!(reload());
        assert_eq!(aliases.list(None), []);
    }

    #[test]
    fn the_setting_and_the_file_are_named_in_errors() {
        let options = ModelAliasOptions { model_alias_file: Some(PathBuf::from("/no/aliases")) };
        let error = ModelAliases::load(&options).unwrap_err().to_string();
        assert!(error.starts_with("--model-alias-file /no/aliases: "), "{error}");
        let none = ModelAliases::load(&ModelAliasOptions { model_alias_file: None }).unwrap();
        assert_eq!(none.resolve("m", None, || ChoiceKey::Random(0)), None);
    }
}
