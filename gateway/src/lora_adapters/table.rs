//! The file of LoRA adapters.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use moongate_discovery::{EngineFacts, EngineKind};
use serde::Deserialize;

use crate::reloadable_file::{BoundedReadError, read_limited};

/// Largest file in bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// Most adapters.
const MAX_ADAPTERS: usize = 1024;
/// Longest name, path or base in bytes.
const MAX_TEXT: usize = 1024;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AdapterFileContent {
    #[serde(default)]
    adapter: Vec<AdapterConfig>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AdapterConfig {
    name: String,
    path: String,
    base: Option<String>,
}

/// Why a file of adapters cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum AdapterFileError {
    #[error(transparent)]
    Read(#[from] BoundedReadError),
    /// The file is not TOML, or has an unknown or missing key.
    #[error("line {line}: {problem}")]
    Syntax { line: usize, problem: String },
    #[error("more than {MAX_ADAPTERS} adapters")]
    TooMany,
    /// `number` is the adapter's position in the file, counted from 1.
    #[error("[[adapter]] number {number} ({name:?}): {source}")]
    Adapter { number: usize, name: String, source: AdapterError },
}

/// Why one `[[adapter]]` is invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AdapterError {
    #[error("name, path and base have 1 to {MAX_TEXT} bytes and no control characters")]
    Text,
    #[error("two adapters have this name")]
    Duplicate,
    #[error("the adapter has the name of its base model")]
    OwnBase,
}

/// An adapter that engines can load at run time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LoadableAdapter {
    pub(crate) name: Arc<str>,
    /// What engines load: a folder on their machines, or a name on Hugging Face.
    pub(crate) path: Arc<str>,
    /// Model that engines must serve to load it; `None`: any.
    base: Option<Arc<str>>,
}

/// The adapters of a file, by name.
#[derive(Debug, Default)]
pub(crate) struct AdapterTable {
    adapters: BTreeMap<Arc<str>, LoadableAdapter>,
}

impl AdapterTable {
    /// Reads and checks the file.
    pub(super) fn read(path: &Path) -> Result<Self, AdapterFileError> {
        Self::parse(&read_limited(path, MAX_FILE_BYTES)?)
    }

    pub(crate) fn parse(text: &str) -> Result<Self, AdapterFileError> {
        let content: AdapterFileContent = toml::from_str(text).map_err(|error| {
            let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
            let line = before.matches('\n').count() + 1;
            AdapterFileError::Syntax { line, problem: error.message().to_owned() }
        })?;
        if content.adapter.len() > MAX_ADAPTERS {
            return Err(AdapterFileError::TooMany);
        }
        let mut table = Self::default();
        for (index, config) in content.adapter.into_iter().enumerate() {
            let name = config.name.clone();
            table.add(config).map_err(|source| AdapterFileError::Adapter {
                number: index + 1,
                name,
                source,
            })?;
        }
        Ok(table)
    }

    fn add(&mut self, config: AdapterConfig) -> Result<(), AdapterError> {
        let AdapterConfig { name, path, base } = config;
        if ![Some(&name), Some(&path), base.as_ref()].into_iter().flatten().all(|text| is_text(text)) {
            return Err(AdapterError::Text);
        }
        if base.as_ref() == Some(&name) {
            return Err(AdapterError::OwnBase);
        }
        let name: Arc<str> = name.into();
        let adapter =
            LoadableAdapter { name: name.clone(), path: path.into(), base: base.map(|base| base.into()) };
        match self.adapters.insert(name, adapter) {
            Some(_) => Err(AdapterError::Duplicate),
            None => Ok(()),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.adapters.len()
    }

    /// The adapters that an engine with these facts does not serve, but can load, each with the model name by which requests select
    /// it there.
    pub(crate) fn loadable_on<'a>(
        &'a self,
        facts: &'a EngineFacts,
    ) -> impl Iterator<Item = (String, &'a LoadableAdapter)> {
        let named = self.adapters.values().filter_map(|adapter| Some((adapter.model_on(facts)?, adapter)));
        named.filter(|(model, adapter)| {
            !facts.models.contains(model) && facts.adapters.iter().all(|listed| *listed.name != *adapter.name)
        })
    }

    /// The adapter that an engine with these facts serves as `model` once it has loaded it.
    pub(crate) fn find(&self, model: &str, facts: &EngineFacts) -> Option<&LoadableAdapter> {
        let is_named = |adapter: &&LoadableAdapter| adapter.model_on(facts).as_deref() == Some(model);
        let own = self.adapters.get(model).filter(is_named);
        let after_base = || self.adapters.get(model.rsplit_once(':')?.1).filter(is_named);
        own.or_else(after_base)
    }

    /// Whether requests for `model` are for an adapter of the file, on engines of either kind.
    pub(crate) fn contains(&self, model: &str) -> bool {
        let after_base = model.rsplit_once(':').map(|(_, name)| name);
        self.adapters.contains_key(model) || after_base.is_some_and(|name| self.adapters.contains_key(name))
    }
}

impl LoadableAdapter {
    /// The model name by which requests select it on an engine with these facts; `None` if the engine cannot load it.
    fn model_on(&self, facts: &EngineFacts) -> Option<String> {
        let base = match &self.base {
            Some(base) => facts.models.iter().find(|model| ***model == **base)?,
            None => facts.models.first()?,
        };
        match facts.engine {
            EngineKind::Vllm => Some(self.name.to_string()),
            // SGLang loads adapters at run time only without data parallelism (0.5.23).
            EngineKind::Sglang if facts.dp_size > 1 => None,
            EngineKind::Sglang => Some(format!("{base}:{}", self.name)),
        }
    }
}

fn is_text(text: &str) -> bool {
    (1..=MAX_TEXT).contains(&text.len()) && !text.chars().any(char::is_control)
}

#[cfg(test)]
mod tests {
    use moongate_discovery::LoraAdapterFacts;

    use super::*;

    const FILE: &str = "[[adapter]]\nname = \"poet\"\npath = \"/adapters/poet\"\n\
                        [[adapter]]\nname = \"sql\"\npath = \"org/sql\"\nbase = \"m\"\n";

    fn facts(engine: EngineKind, models: &[&str], adapters: &[&str]) -> EngineFacts {
        let adapter = |name: &&str| LoraAdapterFacts { name: (*name).to_owned(), path: None, id: None };
        EngineFacts {
            models: models.iter().map(|name| (*name).to_owned()).collect(),
            adapters: adapters.iter().map(adapter).collect(),
            ..EngineFacts::unreported(engine)
        }
    }

    fn loadable(table: &AdapterTable, facts: &EngineFacts) -> Vec<String> {
        table.loadable_on(facts).map(|(model, _)| model).collect()
    }

    #[test]
    fn engines_load_what_they_do_not_list() {
        let table = AdapterTable::parse(FILE).unwrap();
        let vllm = |models, adapters| loadable(&table, &facts(EngineKind::Vllm, models, adapters));
        assert_eq!(vllm(&["m"], &[]), ["poet", "sql"]);
        assert_eq!(vllm(&["m", "poet"], &["poet"]), ["sql"]);
        assert_eq!(vllm(&["other"], &[]), ["poet"], "another base");
        assert!(vllm(&[], &[]).is_empty());
    }

    #[test]
    fn sglang_adapters_are_named_with_their_base() {
        let table = AdapterTable::parse(FILE).unwrap();
        let engine = facts(EngineKind::Sglang, &["m"], &[]);
        assert_eq!(loadable(&table, &engine), ["m:poet", "m:sql"]);
        assert_eq!(&*table.find("m:sql", &engine).unwrap().path, "org/sql");
        assert_eq!(table.find("sql", &engine), None);
        let ranks = EngineFacts { dp_size: 2, ..engine };
        assert!(loadable(&table, &ranks).is_empty());
    }

    #[test]
    fn adapters_are_found_by_their_model_name() {
        let table = AdapterTable::parse(FILE).unwrap();
        let engine = facts(EngineKind::Vllm, &["m"], &[]);
        assert_eq!(&*table.find("poet", &engine).unwrap().path, "/adapters/poet");
        assert_eq!(table.find("m:poet", &engine), None);
        assert!(table.contains("poet") && table.contains("m:poet") && !table.contains("m"));
    }

    #[test]
    fn invalid_files_are_reported_with_their_place() {
        for (text, part) in [
            ("[[adapter]]\nname = \"a\"\n", "line 1"),
            ("[[adapter]]\nname = \"a\"\npath = \"/a\"\npaht = 1\n", "paht"),
            ("[[adapter]]\nname = \"\"\npath = \"/a\"\n", "number 1"),
            ("[[adapter]]\nname = \"a\"\npath = \"/a\"\nbase = \"a\"\n", "base model"),
            (
                "[[adapter]]\nname = \"a\"\npath = \"/a\"\n[[adapter]]\nname = \"a\"\npath = \"/b\"\n",
                "number 2 (\"a\"): two adapters",
            ),
        ] {
            let error = AdapterTable::parse(text).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
        assert_eq!(AdapterTable::parse("").unwrap().len(), 0);
    }
}
