//! The engines whose treatment of a request is followed.

/// Whose way of preparing messages is followed. They differ in defaults, in how parts of a message are joined, and in what a tool
/// looks like to the template.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PromptDialect {
    /// vLLM (read in 0.32).
    Vllm,
    /// SGLang (read in 0.5.23).
    Sglang,
}

/// What a template takes as a message's content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ContentFormat {
    /// One string.
    Text,
    /// A list of parts, each with a `type`.
    Parts,
}
