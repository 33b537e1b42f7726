//! The file of model aliases.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use serde::Deserialize;

use super::choice::ChoiceKey;
use crate::reloadable_file::{BoundedReadError, read_limited};

/// Largest file in bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// Most aliases.
const MAX_ALIASES: usize = 1024;
/// Most models of one alias, and most fallbacks.
const MAX_MODELS: usize = 64;
/// Longest name of an alias or model in bytes.
const MAX_NAME_LEN: usize = 1024;
/// Most aliases between a name and a model.
const MAX_DEPTH: usize = 8;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AliasFileContent {
    #[serde(default)]
    alias: Vec<AliasConfig>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AliasConfig {
    name: String,
    models: Vec<WeightedModel>,
    #[serde(default)]
    fallback: Vec<Arc<str>>,
    tenants: Option<BTreeSet<String>>,
}

/// A model, or another alias, with its share of the requests.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct WeightedModel {
    model: Arc<str>,
    #[serde(default = "default_weight")]
    weight: u32,
}

fn default_weight() -> u32 {
    1
}

/// Why a file of model aliases cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum AliasFileError {
    #[error(transparent)]
    Read(#[from] BoundedReadError),
    /// The file is not TOML, or has an unknown or missing key.
    #[error("line {line}: {problem}")]
    Syntax { line: usize, problem: String },
    #[error("more than {MAX_ALIASES} aliases")]
    TooMany,
    /// `number` is the alias's position in the file, counted from 1.
    #[error("[[alias]] number {number} ({name:?}): {source}")]
    Alias { number: usize, name: String, source: AliasError },
}

/// Why one `[[alias]]` is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AliasError {
    #[error("a name of an alias or model has 1 to {MAX_NAME_LEN} bytes and no control characters")]
    Name,
    #[error("two aliases have this name")]
    Duplicate,
    #[error("models is empty; give at least one, such as models = [{{ model = \"NAME\" }}]")]
    NoModels,
    #[error("more than {MAX_MODELS} models or fallbacks")]
    TooManyModels,
    #[error("model {0:?} is listed twice; add up its weights")]
    RepeatedModel(Arc<str>),
    #[error("all weights are 0; give at least one model a weight of 1 or more")]
    NoWeight,
    #[error("tenants is empty, so no tenant may use the alias; omit it to permit all")]
    NoTenants,
    /// The names from the alias back to itself.
    #[error("it refers to itself: {0}; models and fallback must lead to models of engines")]
    Cycle(String),
    #[error("more than {MAX_DEPTH} aliases refer to each other in a row")]
    TooDeep,
}

/// One alias.
#[derive(Debug)]
pub(super) struct ModelAlias {
    models: Vec<WeightedModel>,
    fallback: Vec<Arc<str>>,
    /// Tenants that may use it; `None`: all.
    tenants: Option<BTreeSet<String>>,
}

/// The aliases of a file. No alias refers to itself, directly or through others.
#[derive(Debug, Default)]
pub(super) struct AliasTable {
    aliases: BTreeMap<Arc<str>, ModelAlias>,
}

impl ModelAlias {
    fn check(&self) -> Result<(), AliasError> {
        if self.models.is_empty() {
            return Err(AliasError::NoModels);
        }
        if self.models.len() > MAX_MODELS || self.fallback.len() > MAX_MODELS {
            return Err(AliasError::TooManyModels);
        }
        if !self.targets().all(|name| is_name(name)) {
            return Err(AliasError::Name);
        }
        let mut seen = BTreeSet::new();
        if let Some(repeated) = self.models.iter().find(|weighted| !seen.insert(&weighted.model)) {
            return Err(AliasError::RepeatedModel(repeated.model.clone()));
        }
        if self.total_weight() == 0 {
            return Err(AliasError::NoWeight);
        }
        if self.tenants.as_ref().is_some_and(BTreeSet::is_empty) {
            return Err(AliasError::NoTenants);
        }
        Ok(())
    }

    /// Whether requests of this tenant may use the alias. `None`: the client is not authenticated.
    pub(super) fn permits(&self, tenant: Option<&str>) -> bool {
        self.tenants.as_ref().is_none_or(|permitted| tenant.is_some_and(|tenant| permitted.contains(tenant)))
    }

    /// Names that it refers to.
    fn targets(&self) -> impl Iterator<Item = &Arc<str>> {
        self.models.iter().map(|weighted| &weighted.model).chain(&self.fallback)
    }

    fn total_weight(&self) -> u64 {
        self.models.iter().map(|weighted| u64::from(weighted.weight)).sum()
    }

    fn choose(&self, name: &str, key: &ChoiceKey) -> Option<&Arc<str>> {
        let mut point = key.point(name, self.total_weight());
        for WeightedModel { model, weight } in &self.models {
            match point.checked_sub(u64::from(*weight)) {
                Some(rest) => point = rest,
                None => return Some(model),
            }
        }
        None
    }
}

impl AliasTable {
    /// Reads and checks the file.
    pub(super) fn read(path: &Path) -> Result<Self, AliasFileError> {
        Self::parse(&read_limited(path, MAX_FILE_BYTES)?)
    }

    fn parse(text: &str) -> Result<Self, AliasFileError> {
        let content: AliasFileContent = toml::from_str(text).map_err(|error| {
            let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
            let line = before.matches('\n').count() + 1;
            AliasFileError::Syntax { line, problem: error.message().to_owned() }
        })?;
        if content.alias.len() > MAX_ALIASES {
            return Err(AliasFileError::TooMany);
        }
        let mut table = Self::default();
        let names: Vec<Arc<str>> = content.alias.iter().map(|alias| alias.name.as_str().into()).collect();
        let invalid = |index: usize, source| {
            let name = names.get(index).map(ToString::to_string).unwrap_or_default();
            AliasFileError::Alias { number: index + 1, name, source }
        };
        for (index, (name, config)) in names.iter().zip(content.alias).enumerate() {
            let AliasConfig { models, fallback, tenants, .. } = config;
            let alias = ModelAlias { models, fallback, tenants };
            if !is_name(name) {
                return Err(invalid(index, AliasError::Name));
            }
            alias.check().map_err(|source| invalid(index, source))?;
            if table.aliases.insert(name.clone(), alias).is_some() {
                return Err(invalid(index, AliasError::Duplicate));
            }
        }
        let mut depths = BTreeMap::new();
        for (index, name) in names.iter().enumerate() {
            let checked = table.check_references(name, &mut Vec::new(), &mut depths);
            checked.map_err(|source| invalid(index, source))?;
        }
        drop(depths);
        Ok(table)
    }

    /// Checks that no path of references from `name` returns to an alias on it, or is too long. Returns the longest path's length.
    fn check_references<'a>(
        &'a self,
        name: &'a Arc<str>,
        path: &mut Vec<&'a str>,
        depths: &mut BTreeMap<&'a str, usize>,
    ) -> Result<usize, AliasError> {
        let Some((name, alias)) = self.get(name) else { return Ok(0) };
        if let Some(depth) = depths.get(&**name) {
            return Ok(*depth);
        }
        if let Some(first) = path.iter().position(|earlier| *earlier == &**name) {
            let cycle: Vec<&str> = path.iter().skip(first).copied().chain([&**name]).collect();
            return Err(AliasError::Cycle(cycle.join(" → ")));
        }
        if path.len() >= MAX_DEPTH {
            return Err(AliasError::TooDeep);
        }
        path.push(name);
        let mut depth = 0;
        for target in alias.targets() {
            depth = depth.max(self.check_references(target, path, depths)? + 1);
        }
        path.pop();
        depths.insert(name, depth);
        if depth > MAX_DEPTH { Err(AliasError::TooDeep) } else { Ok(depth) }
    }

    pub(super) fn len(&self) -> usize {
        self.aliases.len()
    }

    pub(super) fn get(&self, name: &str) -> Option<(&Arc<str>, &ModelAlias)> {
        self.aliases.get_key_value(name)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&Arc<str>, &ModelAlias)> {
        self.aliases.iter()
    }

    /// The chosen model, then the fallbacks, without repetition. In place of another alias is the model chosen for it.
    pub(super) fn candidates(&self, name: &str, alias: &ModelAlias, key: &ChoiceKey) -> Vec<Arc<str>> {
        let mut models: Vec<Arc<str>> = Vec::with_capacity(1 + alias.fallback.len());
        for target in alias.choose(name, key).into_iter().chain(&alias.fallback) {
            let model = self.resolve(target, key);
            if !models.contains(model) {
                models.push(model.clone());
            }
        }
        models
    }

    /// Every model to which the alias may lead, in the order of the file.
    pub(super) fn all_models(&self, alias: &ModelAlias) -> Vec<Arc<str>> {
        let mut models = Vec::new();
        let mut pending: Vec<&Arc<str>> = alias.targets().collect();
        pending.reverse();
        let mut seen = BTreeSet::new();
        while let Some(name) = pending.pop() {
            if !seen.insert(name) {
                continue;
            }
            match self.get(name) {
                None => models.push(name.clone()),
                Some((_, nested)) => {
                    let targets: Vec<&Arc<str>> =
                        nested.models.iter().map(|weighted| &weighted.model).collect();
                    pending.extend(targets.into_iter().rev());
                }
            }
        }
        models
    }

    fn resolve<'a>(&'a self, name: &'a Arc<str>, key: &ChoiceKey) -> &'a Arc<str> {
        let mut name = name;
        // Ends at a model: references have no cycles.
        while let Some(next) = self.get(name).and_then(|(name, alias)| alias.choose(name, key)) {
            name = next;
        }
        name
    }
}

fn is_name(name: &str) -> bool {
    (1..=MAX_NAME_LEN).contains(&name.len()) && !name.chars().any(char::is_control)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn alias(name: &str, rest: &str) -> String {
        format!("[[alias]]\nname = \"{name}\"\n{rest}\n")
    }

    fn to(name: &str, target: &str) -> String {
        alias(name, &format!("models = [{{ model = \"{target}\" }}]"))
    }

    fn candidates(table: &AliasTable, name: &str, key: &ChoiceKey) -> Vec<String> {
        let (name, entry) = table.get(name).unwrap();
        table.candidates(name, entry, key).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn requests_are_divided_by_weight_and_fall_back_in_order() {
        let text = alias(
            "chat",
            "models = [{ model = \"a\", weight = 3 }, { model = \"off\", weight = 0 }, { model = \"b\" }]\nfallback = [\"b\", \"c\"]",
        );
        let table = AliasTable::parse(&text).unwrap();
        let mut counts = BTreeMap::new();
        for entropy in 0..4000 {
            let models = candidates(&table, "chat", &ChoiceKey::Random(entropy));
            *counts.entry(models).or_insert(0) += 1;
        }
        let [first, second]: [(Vec<String>, i32); 2] =
            counts.into_iter().collect::<Vec<_>>().try_into().unwrap();
        assert_eq!(first.0, ["a", "b", "c"]);
        assert_eq!(second.0, ["b", "c"], "the chosen model is not repeated as a fallback");
        assert!((2850..3150).contains(&first.1), "{} of 4000", first.1);
    }

    #[test]
    fn one_conversation_stays_on_one_model() {
        let table = AliasTable::parse(&alias(
            "chat",
            "models = [{ model = \"a\", weight = 50 }, { model = \"b\", weight = 50 }]",
        ))
        .unwrap();
        let of = |user: u32| candidates(&table, "chat", &ChoiceKey::Session(user.into()));
        assert!((0..50).all(|user| of(user) == of(user)));
        let distinct: BTreeSet<Vec<String>> = (0..50).map(of).collect();
        assert_eq!(distinct.len(), 2);
    }

    #[test]
    fn an_alias_may_refer_to_another() {
        let text = [
            alias("latest", "models = [{ model = \"chat\" }]\nfallback = [\"small\"]"),
            alias("chat", "models = [{ model = \"a\" }, { model = \"b\" }]\nfallback = [\"z\"]"),
            to("small", "s"),
        ]
        .concat();
        let table = AliasTable::parse(&text).unwrap();
        for entropy in 0..20 {
            let models = candidates(&table, "latest", &ChoiceKey::Random(entropy));
            assert!(
                matches!(&models[..], [first, second] if (first == "a" || first == "b") && second == "s")
            );
        }
        let (_, latest) = table.get("latest").unwrap();
        assert_eq!(table.all_models(latest), ["a".into(), "b".into(), "s".into()]);
    }

    #[test]
    fn invalid_files_are_rejected_with_the_position() {
        let chain: String = (0..12).map(|n| to(&format!("n{n}"), &format!("n{}", n + 1))).collect();
        for (text, part) in [
            ("[[alias]]\nname = \"a\"\nmodel = 1".to_owned(), "line 3: unknown field"),
            ("[[alias]]\nmodels = []".to_owned(), "missing field `name`"),
            (alias("a", "models = [\"b\"]"), "line 3"),
            (alias("a", "models = [{ model = \"b\", weight = -1 }]"), "line 3"),
            (alias("a", "models = []"), "[[alias]] number 1 (\"a\"): models is empty"),
            (alias("", "models = [{ model = \"b\" }]"), "1 to 1024 bytes"),
            (to("a", "b\\r\\nc"), "no control characters"),
            (alias("a", "models = [{ model = \"b\", weight = 0 }]"), "all weights are 0"),
            (alias("a", "models = [{ model = \"b\" }, { model = \"b\" }]"), "\"b\" is listed twice"),
            (alias("a", "models = [{ model = \"b\" }]\ntenants = []"), "tenants is empty"),
            (format!("{}{}", to("a", "b"), to("a", "c")), "number 2 (\"a\"): two aliases"),
            (to("a", "a"), "it refers to itself: a → a"),
            (format!("{}{}{}", to("x", "a"), to("a", "b"), to("b", "a")), "it refers to itself: a → b → a"),
            (
                format!("{}{}", to("a", "b"), alias("b", "models = [{ model = \"m\" }]\nfallback = [\"a\"]")),
                "a → b → a",
            ),
            (chain, "in a row"),
            ((0..1025).map(|n| to(&format!("n{n}"), "m")).collect(), "more than 1024 aliases"),
        ] {
            let error = AliasTable::parse(&text).unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
        assert_eq!(AliasTable::parse("").unwrap().len(), 0);
    }
}
