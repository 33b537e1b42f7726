//! Errors of loading a model, and of tokenizing one prompt.

use std::path::PathBuf;

/// Why a model cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum ModelLoadError {
    /// The flag's value has no `=`, or an empty name or folder.
    #[error("`{0}` is not a tokenizer; write MODEL=FOLDER")]
    Flag(String),
    /// A model is listed twice.
    #[error("model `{0}` has two tokenizer folders; keep one")]
    Duplicate(String),
    /// A file is missing or cannot be read.
    #[error("{path}: {source}; the folder needs tokenizer.json and tokenizer_config.json of the model")]
    Read {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file exceeds its size limit.
    #[error("{path} has more than {limit} bytes; is it the right file?")]
    TooLarge {
        /// Which file.
        path: PathBuf,
        /// Size limit of such a file in bytes.
        limit: u64,
    },
    /// A file is not JSON of the expected shape.
    #[error("{path}: not as expected: {source}; use the file of the model's own repository")]
    Json {
        /// Which file.
        path: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
    /// A file has an unexpected content.
    #[error("{path}: {problem}; use the file of the model's own repository")]
    Format {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// No library can load the tokenizer.
    #[error("{path}: {reference} (and {fast}); cache hits of this model cannot be predicted without it")]
    Tokenizer {
        /// Which file.
        path: PathBuf,
        /// Error of the reference library.
        #[source]
        reference: TokenizerLibraryError,
        /// Error of the fast library.
        fast: TokenizerLibraryError,
    },
    /// The tokenizer can be loaded, but fails.
    #[error("{path}: {source}; cache hits of this model cannot be predicted without it")]
    Tokenize {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: PromptError,
    },
    /// The chat template cannot be compiled.
    #[error("the chat template in {path} cannot be used: {source}")]
    Template {
        /// File that contains the template.
        path: PathBuf,
        /// Error of the template engine.
        source: minijinja::Error,
    },
}

/// Why a tokenizer library cannot load a file or tokenize a text.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerLibraryError {
    /// Error of the fast library.
    #[error(transparent)]
    Fast(#[from] fastokens::Error),
    /// Error of the reference library.
    #[error(transparent)]
    Reference(#[from] tokenizers::Error),
    /// The library does not know a token that the model's configuration adds.
    #[error("tokenizer_config.json adds {0:?}, which tokenizer.json lacks")]
    MissingToken(String),
    /// The library panicked.
    #[error("a panic inside the library")]
    Panic,
}

/// Why the tokens of a request cannot be determined. The request itself may be valid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PromptError {
    /// The body is invalid; engines reject it.
    #[error("the engine will reject this: {0}")]
    Malformed(String),
    /// The model has no chat template.
    #[error("the model has no chat template")]
    NoTemplate,
    /// The template failed on these messages. The engine rejects such a request.
    #[error("the chat template failed: {0}")]
    Template(String),
    /// The template exceeded its limit of steps or output.
    #[error("the chat template exceeded its limit of {0}")]
    TemplateLimit(&'static str),
    /// Images, audio or video, which only the engine can convert to tokens.
    #[error("only the engine can convert a part of type `{0}` to tokens")]
    Multimodal(String),
    /// A feature whose effect on the prompt is not implemented.
    #[error("the effect of `{0}` on the prompt is not implemented")]
    UnsupportedMember(&'static str),
    /// A block or item whose effect on the prompt is not implemented, or that engines reject.
    #[error("the effect of a block of type `{0}` on the prompt is not implemented")]
    UnsupportedContent(String),
    /// The prompt begins with turns that are stored in the engine, not in the request.
    #[error("`{0}` refers to turns that only the engine has; send them in the request")]
    EngineState(&'static str),
    /// The engine does not build the prompts of this model with its chat template.
    #[error("prompts of {0} models are not built with a chat template")]
    UnsupportedModel(&'static str),
    /// The tokenizer rejected the text.
    #[error("the tokenizer failed: {0}")]
    Tokenizer(String),
}
