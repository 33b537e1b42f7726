//! Model of an engine's computation time.

use crate::seconds::Seconds;

/// Time to compute a prompt: `speed * (c0 + a*new + b*new*(cached + new/2))` for `new` tokens after `cached` ones. The
/// last term is attention over all previous tokens.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct PrefillTimeModel {
    /// Constant seconds per prompt.
    pub c0: f64,
    /// Seconds per new token.
    pub a: f64,
    /// Seconds per new token and token before it.
    pub b: f64,
    /// Slowdown of one engine against its group: 2 is twice as slow.
    pub speed: f64,
}

impl Default for PrefillTimeModel {
    /// Fitted to a published HiCache benchmark of Qwen3-235B on four H20 cards. Only a start value: it is refitted to
    /// the first tokens observed.
    fn default() -> Self {
        Self { c0: 0.048, a: 1.027e-4, b: 7.19e-9, speed: 1.0 }
    }
}

impl PrefillTimeModel {
    /// Seconds to compute `new` tokens after `cached` ones.
    #[must_use]
    pub fn seconds(&self, new: u64, cached: u64) -> Seconds {
        let (new, cached) = (new as f64, cached as f64);
        self.speed * (self.c0 + new * (self.a + self.b * (cached + new / 2.0)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn service_time_grows_with_new_tokens_and_their_context() {
        let model = PrefillTimeModel { c0: 1.0, a: 0.5, b: 0.25, speed: 2.0 };
        assert_eq!(model.seconds(0, 100), 2.0);
        assert_eq!(model.seconds(4, 0), 2.0 * (1.0 + 2.0 + 0.25 * 4.0 * 2.0));
        assert_eq!(model.seconds(4, 10), 2.0 * (1.0 + 2.0 + 0.25 * 4.0 * 12.0));
    }
}
