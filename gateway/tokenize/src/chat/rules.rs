//! What the conversion of requests of other APIs depends on besides the request.

/// Properties of a model's templates that the conversion to a chat depends on.
pub(crate) struct TemplateRules<'a> {
    /// Whether all system messages are merged into the first, because a template does not render others.
    pub(crate) merges_systems: bool,
    /// vLLM's `reasoning_effort` for requests that disable thinking.
    pub(crate) effort_without_thinking: &'a dyn Fn() -> &'static str,
}

/// Properties of a template that the preparation of its messages depends on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TemplateTraits {
    /// Whether it has the role `developer`, by vLLM's rule.
    pub(super) has_developers: bool,
    /// Whether it expects results of tools in the order of their calls, by SGLang's rule.
    pub(super) orders_results: bool,
}

impl TemplateTraits {
    pub(crate) fn of(template: &str) -> TemplateTraits {
        TemplateTraits {
            has_developers: template.contains("\"developer\"") || template.contains("'developer'"),
            orders_results: template.contains("tool_call_id"),
        }
    }
}
