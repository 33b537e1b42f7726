//! What can go wrong: while loading a model, and while predicting one prompt.

use std::path::PathBuf;

/// A model's files cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ModelLoadError {
    /// The flag's value has no `=`, or an empty name or folder.
    #[error("`{0}` does not name a tokenizer; write it as MODEL=FOLDER")]
    Flag(String),
    /// Two folders for one model.
    #[error("model `{0}` has two tokenizer folders; keep one")]
    Duplicate(String),
    /// A file cannot be read.
    #[error("{path}: {source}; the folder needs tokenizer.json and tokenizer_config.json of the model")]
    Read {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file is larger than any real one.
    #[error("{path} has more than {limit} bytes; is it the right file?")]
    TooLarge {
        /// Which file.
        path: PathBuf,
        /// Most bytes of such a file.
        limit: u64,
    },
    /// A file is not what it should be.
    #[error("{path}: {problem}; take the file of the model's own repository")]
    Format {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// No library can use the tokenizer.
    #[error("{path}: {problem}; without it prompts of this model are not predicted")]
    Tokenizer {
        /// Which file.
        path: PathBuf,
        /// What the libraries said.
        problem: String,
    },
    /// The chat template has an error.
    #[error("the chat template in {path} cannot be used: {problem}")]
    Template {
        /// Where the template came from.
        path: PathBuf,
        /// What the template engine said.
        problem: String,
    },
}

/// Why the tokens of a request cannot be told in advance. The request itself may be fine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PromptError {
    /// The body is not what the engines take; they will refuse it.
    #[error("the engine will refuse this: {0}")]
    Malformed(String),
    /// The model has no chat template.
    #[error("the model has no chat template")]
    NoTemplate,
    /// The template failed on these messages. The engine refuses such a request.
    #[error("the chat template failed: {0}")]
    Template(String),
    /// The template ran longer, or wrote more, than it may.
    #[error("the chat template went over its limit of {0}")]
    TemplateLimit(&'static str),
    /// Images, audio or video: how many tokens they become only the engine knows.
    #[error("a part of type `{0}` becomes tokens in the engine only")]
    Multimodal(String),
    /// A feature of a request whose effect on the prompt is not known here.
    #[error("the effect of `{0}` on the prompt is not known here")]
    UnsupportedMember(&'static str),
    /// The tokenizer refused the text.
    #[error("the tokenizer failed: {0}")]
    Tokenizer(String),
}
