//! Reads the files of a model repository that determine the model's prompts.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

use crate::error::ModelLoadError;

/// Maximum size of a configuration or template file in bytes. Real ones have up to a few hundred kilobytes.
const MAX_TEXT_BYTES: u64 = 8 << 20;
/// Maximum size of a tokenizer.json in bytes. The largest known one has 34 MB.
const MAX_TOKENIZER_BYTES: u64 = 256 << 20;

/// Classes of tokenizers whose `add_bos_token` counted in transformers 4, as SGLang 0.5.23 lists them (`_fix_v5_add_bos_eos_token`).
const CLASSES_WITH_BOS: [&str; 7] = [
    "LlamaTokenizer",
    "LlamaTokenizerFast",
    "CodeLlamaTokenizer",
    "CodeLlamaTokenizerFast",
    "GemmaTokenizer",
    "GemmaTokenizerFast",
    "CohereTokenizerFast",
];
/// Names of special tokens in templates.
const SPECIAL_TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// A chat template and the file that contains it.
#[derive(Debug)]
pub(crate) struct TemplateFile {
    pub(crate) path: PathBuf,
    pub(crate) source: String,
}

/// The content of a model's folder, except the tokenizer's vocabulary.
#[derive(Debug)]
pub(crate) struct ModelFiles {
    pub(crate) tokenizer: PathBuf,
    pub(crate) pipeline: TokenizerPipeline,
    /// Special tokens by their names in templates.
    pub(crate) special_tokens: Vec<(String, String)>,
    /// Whether tokenizer_config.json puts the BOS token before a text. SGLang still uses this setting; transformers 5, and therefore vLLM,
    /// uses tokenizer.json alone.
    pub(crate) configured_bos: bool,
    pub(crate) default_template: Option<TemplateFile>,
    /// A second template, used for requests with tools.
    pub(crate) tool_template: Option<TemplateFile>,
}

/// The parts of tokenizer.json that determine where a text may be split.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct TokenizerPipeline {
    #[serde(default)]
    pub(crate) added_tokens: Vec<AddedToken>,
    #[serde(default)]
    pub(crate) normalizer: Option<Value>,
    #[serde(default)]
    pub(crate) pre_tokenizer: Option<Value>,
}

/// A token that is matched in the text before all other steps.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(crate) struct AddedToken {
    pub(crate) content: String,
    #[serde(default)]
    pub(crate) single_word: bool,
    #[serde(default)]
    pub(crate) lstrip: bool,
    #[serde(default)]
    pub(crate) rstrip: bool,
    #[serde(default)]
    pub(crate) normalized: bool,
}

impl ModelFiles {
    /// Reads the files in a model's folder.
    ///
    /// # Errors
    /// [`ModelLoadError`] with the invalid file.
    pub(crate) fn read(folder: &Path) -> Result<ModelFiles, ModelLoadError> {
        let tokenizer = folder.join("tokenizer.json");
        let mut shape: TokenizerPipeline = json(&tokenizer, MAX_TOKENIZER_BYTES)?;
        let config_path = folder.join("tokenizer_config.json");
        let config: Value = json(&config_path, MAX_TEXT_BYTES)?;
        add_declared_tokens(&mut shape, &config);
        let mut files = ModelFiles {
            tokenizer,
            pipeline: shape,
            special_tokens: special_tokens(&config),
            configured_bos: configured_bos(&config),
            default_template: None,
            tool_template: None,
        };
        files.find_templates(folder, &config_path, &config)?;
        Ok(files)
    }

    /// A template in a separate file has precedence over one in a configuration.
    fn find_templates(
        &mut self,
        folder: &Path,
        config_path: &Path,
        config: &Value,
    ) -> Result<(), ModelLoadError> {
        self.add_templates(config_path, config.get("chat_template"))?;
        let single = folder.join("chat_template.json");
        if self.default_template.is_none() && single.is_file() {
            let file: Value = json(&single, MAX_TEXT_BYTES)?;
            self.add_templates(&single, file.get("chat_template"))?;
        }
        for (path, tools) in [
            (folder.join("chat_template.jinja"), false),
            (folder.join("additional_chat_templates/tool_use.jinja"), true),
        ] {
            if path.is_file() {
                let source = text(&path, MAX_TEXT_BYTES)?;
                let place = if tools { &mut self.tool_template } else { &mut self.default_template };
                *place = Some(TemplateFile { path, source });
            }
        }
        Ok(())
    }

    /// A `chat_template` member: one template, or several with names.
    fn add_templates(&mut self, path: &Path, member: Option<&Value>) -> Result<(), ModelLoadError> {
        let file = |source: &str| Some(TemplateFile { path: path.to_owned(), source: source.to_owned() });
        match member {
            None | Some(Value::Null) => {}
            Some(Value::String(source)) => self.default_template = file(source),
            Some(Value::Array(named)) => {
                for template in named {
                    let (Some(name), Some(source)) =
                        (template["name"].as_str(), template["template"].as_str())
                    else {
                        return Err(format(path, "an element of `chat_template` lacks `name` or `template`"));
                    };
                    match name {
                        "default" => self.default_template = file(source),
                        "tool_use" => self.tool_template = file(source),
                        _ => {}
                    }
                }
            }
            Some(_) => return Err(format(path, "`chat_template` is neither a string nor a list")),
        }
        Ok(())
    }
}

/// Tokens that only tokenizer_config.json declares are matched as well.
fn add_declared_tokens(shape: &mut TokenizerPipeline, config: &Value) {
    let Some(declared) = config.get("added_tokens_decoder").and_then(Value::as_object) else { return };
    for token in declared.values() {
        if let Ok(token) = AddedToken::deserialize(token)
            && !shape.added_tokens.contains(&token)
        {
            shape.added_tokens.push(token);
        }
    }
}

fn configured_bos(config: &Value) -> bool {
    let class = config.get("tokenizer_class").and_then(Value::as_str);
    let flag = config.get("add_bos_token").and_then(Value::as_bool).unwrap_or(true);
    flag && class.is_some_and(|class| CLASSES_WITH_BOS.contains(&class))
}

fn special_tokens(config: &Value) -> Vec<(String, String)> {
    let content = |token: &Value| match token {
        Value::String(token) => Some(token.clone()),
        token => token.get("content").and_then(Value::as_str).map(str::to_owned),
    };
    let named =
        SPECIAL_TOKENS.iter().filter_map(|name| Some(((*name).to_owned(), content(config.get(*name)?)?)));
    let own = config.get("extra_special_tokens").and_then(Value::as_object);
    let own = own.into_iter().flatten().filter_map(|(name, token)| Some((name.clone(), content(token)?)));
    named.chain(own).collect()
}

fn json<T: serde::de::DeserializeOwned>(path: &Path, limit: u64) -> Result<T, ModelLoadError> {
    serde_json::from_str(&text(path, limit)?)
        .map_err(|source| ModelLoadError::Json { path: path.to_owned(), source })
}

fn format(path: &Path, problem: &'static str) -> ModelLoadError {
    ModelLoadError::Format { path: path.to_owned(), problem }
}

fn text(path: &Path, limit: u64) -> Result<String, ModelLoadError> {
    let unread = |source| ModelLoadError::Read { path: path.to_owned(), source };
    let file = File::open(path).map_err(unread)?;
    let mut text = String::new();
    file.take(limit + 1).read_to_string(&mut text).map_err(unread)?;
    if text.len() as u64 > limit {
        return Err(ModelLoadError::TooLarge { path: path.to_owned(), limit });
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        folder
    }

    #[test]
    fn templates_are_found_in_all_places_that_models_use() {
        let named = r#"{"chat_template":[{"name":"default","template":"d"},{"name":"tool_use","template":"t"},
            {"name":"rag","template":"r"}],"bos_token":{"content":"<s>"},"eos_token":null}"#;
        let files = folder(&[("tokenizer.json", "{}"), ("tokenizer_config.json", named)]);
        let read = ModelFiles::read(files.path()).unwrap();
        assert_eq!(read.default_template.unwrap().source, "d");
        assert_eq!(read.tool_template.unwrap().source, "t");
        assert_eq!(read.special_tokens, [("bos_token".to_owned(), "<s>".to_owned())]);

        let files = folder(&[
            ("tokenizer.json", "{}"),
            ("tokenizer_config.json", r#"{"chat_template":"config"}"#),
            ("chat_template.json", r#"{"chat_template":"json"}"#),
            ("chat_template.jinja", "jinja"),
            ("additional_chat_templates/tool_use.jinja", "tools"),
        ]);
        let read = ModelFiles::read(files.path()).unwrap();
        assert_eq!(read.default_template.unwrap().source, "jinja");
        assert_eq!(read.tool_template.unwrap().source, "tools");
    }

    #[test]
    fn tokenizer_class_with_bos_flag_adds_bos_unless_disabled() {
        let configured = |config: &str| configured_bos(&serde_json::from_str(config).unwrap());
        assert!(configured(r#"{"tokenizer_class":"LlamaTokenizerFast","add_bos_token":true}"#));
        assert!(configured(r#"{"tokenizer_class":"LlamaTokenizerFast","add_bos_token":null}"#));
        assert!(!configured(r#"{"tokenizer_class":"LlamaTokenizerFast","add_bos_token":false}"#));
        assert!(!configured(r#"{"tokenizer_class":"Qwen2Tokenizer","add_bos_token":true}"#));
        assert!(!configured("{}"));
    }

    #[test]
    fn errors_name_the_file() {
        let missing = ModelFiles::read(folder(&[]).path()).unwrap_err().to_string();
        assert!(missing.contains("tokenizer.json") && missing.contains("needs"), "{missing}");
        let broken = folder(&[("tokenizer.json", "{}"), ("tokenizer_config.json", r#"{"chat_template":3}"#)]);
        let broken = ModelFiles::read(broken.path()).unwrap_err().to_string();
        assert!(broken.contains("tokenizer_config.json") && broken.contains("neither"), "{broken}");
    }
}
