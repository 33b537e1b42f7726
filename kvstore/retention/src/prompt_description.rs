//! What is known about the prompt that uses a block.

/// Length of a prompt.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum PromptLength {
    /// Below 2,048 tokens.
    #[default]
    Short,
    /// Below 8,192 tokens.
    Medium,
    /// Below 32,768 tokens.
    Long,
    /// At least 32,768 tokens.
    Huge,
}

impl PromptLength {
    /// The length of a prompt of this many tokens.
    #[must_use]
    pub fn of_tokens(tokens: u64) -> Self {
        match tokens {
            0..2_048 => Self::Short,
            2_048..8_192 => Self::Medium,
            8_192..32_768 => Self::Long,
            _ => Self::Huge,
        }
    }

    /// An estimate from the number of keys that a caller looks up or writes at once. How many tokens a key has depends
    /// on the engine: from 16 to several hundred.
    #[must_use]
    pub fn of_keys(keys: usize) -> Self {
        match keys {
            0..16 => Self::Short,
            16..64 => Self::Medium,
            64..256 => Self::Long,
            _ => Self::Huge,
        }
    }
}

/// What a client or a protocol says about the next request with the same prefix. A hint selects a class, so that it
/// counts as much as it has proved right.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ReturnHint {
    #[default]
    Unknown,
    /// There will be none: a finished agent, a one-shot job, a closed session.
    Never,
    /// There will be one.
    Expected,
}

/// Part of all tenants. Hints of each bucket count as much as they have proved right, so that wrong hints of one tenant do
/// not devalue those of the tenants in other buckets. A fixed number of buckets bounds memory whatever the number of
/// tenants.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TenantBucket(u8);

impl TenantBucket {
    /// Number of buckets: that of hints without a tenant, and those that tenants are divided into.
    pub const COUNT: usize = 8;

    /// The bucket with this number: 0 if the tenant is unknown. Larger numbers than there are buckets start again.
    #[must_use]
    pub fn new(number: u8) -> Self {
        Self(number % Self::COUNT as u8)
    }

    pub(crate) fn number(self) -> usize {
        self.0.into()
    }
}

/// What is known about the prompt that uses a block.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PromptDescription {
    pub length: PromptLength,
    pub hint: ReturnHint,
    /// Tenants whose hint it is.
    pub tenants: TenantBucket,
}
