//! Errors in the fault recovery of a CoordinatedPolicy.

/// Error in a rule; its text is shown to the user who wrote the policy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FaultPolicyError {
    #[error("policy `{policy}`: faultRecovery has neither links nor a replacementDomain; set one of them")]
    Empty { policy: String },
    #[error(
        "policy `{policy}`: faultRecovery uses role `{role}`, which is not in the rule's roles; add it there"
    )]
    NotListed { policy: String, role: String },
    #[error("policy `{policy}`: role `{role}` is no role of the group")]
    NoSuchRole { policy: String, role: String },
    #[error(
        "policy `{policy}`: role `{role}` runs as {kind}, whose pods this operator does not manage; fault recovery needs a \
         RoleInstanceSet"
    )]
    ForeignRole { policy: String, role: String, kind: &'static str },
    #[error(
        "policy `{policy}`: a fault of role `{role}` cannot act on the same role; its own recovery is the restartPolicyConfig of its \
         pattern"
    )]
    SelfLink { policy: String, role: String },
    #[error("policy `{policy}`: `{value}` is no {field}; use one of {allowed}")]
    UnknownValue { policy: String, field: &'static str, value: String, allowed: &'static str },
    #[error("policy `{policy}`: faultRecovery.{field} must be from {min} to {max}, not {value}")]
    OutOfRange { policy: String, field: &'static str, min: i32, max: i32, value: i32 },
    #[error("policy `{policy}`: the link of role `{role}` has no actions; list them in `then`")]
    NoActions { policy: String, role: String },
    #[error(
        "policy `{policy}`: the same fault of role `{trigger}` both {first} and {second} role `{target}`; keep one of the actions"
    )]
    Contradiction {
        policy: String,
        trigger: String,
        target: String,
        first: &'static str,
        second: &'static str,
    },
    #[error(
        "policy `{policy}`: the link of role `{role}` has the scope Domain; set its `domain`, or `replacementDomain` of the rule"
    )]
    NoDomain { policy: String, role: String },
    #[error(
        "policy `{policy}`: the level `{domain}` has no node label; name it in the group's annotation {}, or use the label itself",
        rbg_api::keys::TOPOLOGY_LADDER
    )]
    UnlabelledDomain { policy: String, domain: String },
    #[error(
        "policy `{policy}`: instances of role `{role}` have no ordinals, since its pattern is Stateless; use the scope Domain or Group"
    )]
    Unordered { policy: String, role: String },
}
