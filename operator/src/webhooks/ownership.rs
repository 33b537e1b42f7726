//! Which of several releases registers its webhooks: a cluster has one conversion per CRD, and one ValidatingWebhookConfiguration.
//!
//! The owner and the time of its last renewal are annotations of that configuration. The owner renews them. If they stay the same for
//! the expiry time, by the observer's own clock, another release takes over.

use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::jiff::Timestamp;
use tokio::time::Instant;

/// Annotation with the owner, as `NAMESPACE/SERVICE`.
const OWNER: &str = "moongate.io/webhooks-owner";
/// Annotation with the time of the owner's last renewal.
const RENEWED: &str = "moongate.io/webhooks-renewed";

/// The release that registers its webhooks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum WebhookOwner {
    /// Not known yet.
    #[default]
    Unknown,
    /// This release.
    Own,
    /// Another one, as `NAMESPACE/SERVICE`.
    Other(String),
}

/// Times of the ownership.
#[derive(Debug, Clone, Copy)]
pub struct OwnershipTiming {
    /// Interval between renewals.
    pub renewal: Duration,
    /// Time without a renewal after which another release takes over.
    pub expiry: Duration,
}

impl Default for OwnershipTiming {
    fn default() -> Self {
        Self { renewal: Duration::from_secs(60), expiry: Duration::from_secs(180) }
    }
}

/// Decides who owns the webhooks.
#[derive(Debug)]
pub(super) struct OwnershipTracker {
    own: String,
    timing: OwnershipTiming,
    /// The last annotations, and when they were first observed.
    last: Option<([Option<String>; 2], Instant)>,
}

/// State of the ownership.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Ownership {
    /// This release owns the webhooks, or may take them over.
    Own {
        /// Whether the annotations have to be written.
        is_due: bool,
    },
    Other {
        owner: String,
        /// Time until this release may take over.
        expires_in: Duration,
    },
}

impl OwnershipTracker {
    pub(super) fn new(own: String, timing: OwnershipTiming) -> Self {
        Self { own, timing, last: None }
    }

    /// The state at present, from the configuration's metadata.
    pub(super) fn observe(&mut self, live: Option<&ObjectMeta>, now: Instant) -> Ownership {
        let annotations = live.and_then(|metadata| metadata.annotations.as_ref());
        let text = |key| annotations.and_then(|all| all.get(key)).cloned();
        let found = [text(OWNER), text(RENEWED)];
        let since = match &self.last {
            Some((last, since)) if *last == found => *since,
            _ => {
                self.last = Some((found.clone(), now));
                now
            }
        };
        let unchanged = now.saturating_duration_since(since);
        match found {
            [Some(owner), _] if owner == self.own => {
                Ownership::Own { is_due: unchanged >= self.timing.renewal }
            }
            [Some(owner), _] if unchanged < self.timing.expiry => {
                Ownership::Other { owner, expires_in: self.timing.expiry - unchanged }
            }
            _ => Ownership::Own { is_due: true },
        }
    }

    /// Whether this release is the owner in the annotations.
    pub(super) fn is_own(&self, live: &ObjectMeta) -> bool {
        let annotations = live.annotations.as_ref();
        annotations.and_then(|all| all.get(OWNER)).is_some_and(|owner| *owner == self.own)
    }

    /// Writes the annotations of the owner, renewed now.
    pub(super) fn write(&self, metadata: &mut ObjectMeta) {
        let annotations = metadata.annotations.get_or_insert_default();
        annotations.insert(OWNER.to_owned(), self.own.clone());
        annotations.insert(RENEWED.to_owned(), Timestamp::now().to_string());
    }

    pub(super) fn renewal(&self) -> Duration {
        self.timing.renewal
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_release_takes_over_only_without_renewals() {
        let timing = OwnershipTiming::default();
        let mut own = OwnershipTracker::new("a/a".to_owned(), timing);
        let mut other = OwnershipTracker::new("b/b".to_owned(), timing);
        assert_eq!(own.observe(None, Instant::now()), Ownership::Own { is_due: true });
        let mut live = ObjectMeta::default();
        assert_eq!(own.observe(Some(&live), Instant::now()), Ownership::Own { is_due: true });
        for _ in 0..10 {
            own.write(&mut live);
            assert_eq!(own.observe(Some(&live), Instant::now()), Ownership::Own { is_due: false });
            let expected = Ownership::Other { owner: "a/a".to_owned(), expires_in: timing.expiry };
            assert_eq!(other.observe(Some(&live), Instant::now()), expected);
            tokio::time::advance(timing.renewal).await;
            assert_eq!(own.observe(Some(&live), Instant::now()), Ownership::Own { is_due: true });
        }
        tokio::time::advance(timing.expiry - timing.renewal).await;
        assert_eq!(other.observe(Some(&live), Instant::now()), Ownership::Own { is_due: true });
        other.write(&mut live);
        assert!(matches!(own.observe(Some(&live), Instant::now()), Ownership::Other { .. }));
    }
}
