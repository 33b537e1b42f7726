//! Limits of what is rendered and cached.

/// Limits of one model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PromptLimits {
    /// Maximum steps of the template engine per prompt. A conversation of a thousand messages takes some hundred thousand.
    pub template_steps: u64,
    /// Maximum size of a rendered prompt in bytes.
    pub prompt_bytes: usize,
    /// Size of the caches of texts and bodies in bytes.
    pub cache_bytes: u64,
}

impl Default for PromptLimits {
    fn default() -> PromptLimits {
        PromptLimits { template_steps: 10_000_000, prompt_bytes: 64 << 20, cache_bytes: 64 << 20 }
    }
}
