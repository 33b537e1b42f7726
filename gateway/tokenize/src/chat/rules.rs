//! What the conversion of requests of other APIs depends on besides the request.

/// Properties of a model's templates that the conversion to a chat depends on.
pub(crate) struct TemplateRules<'a> {
    /// Whether all system messages are merged into the first, because a template does not render others.
    pub(crate) merges_systems: bool,
    /// vLLM's `reasoning_effort` for requests that disable thinking.
    pub(crate) effort_without_thinking: &'a dyn Fn() -> &'static str,
}
