//! The engines whose processing of requests is reproduced.

/// The engine whose preparation of messages is reproduced. Engines differ in defaults, in how parts of a message are joined, and in how
/// tools are passed to the template.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PromptDialect {
    /// vLLM, according to the sources of 0.32.
    Vllm,
    /// SGLang, according to the sources of 0.5.23.
    Sglang,
}

/// The form of a message's content that a template expects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ContentFormat {
    /// One string.
    Text,
    /// A list of parts, each with a `type`.
    Parts,
}
