//! Quotas per tenant: requests and prompt tokens per second, and concurrent requests.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::Deserialize;

/// Burst size of the token buckets, in seconds of their rate.
const BURST_SECONDS: f64 = 1.0;
/// Idle tenants are swept only above this number.
const MIN_SWEEP_TENANTS: usize = 1024;
/// `Retry-After` at the concurrency limit; when a request ends is not predictable.
const CONCURRENCY_RETRY_AFTER: Duration = Duration::from_secs(1);

/// Limits of a tenant; `None` means unlimited.
#[derive(Debug, Clone, Copy, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TrafficQuota {
    pub(super) requests_per_second: Option<f64>,
    pub(super) input_tokens_per_second: Option<f64>,
    pub(super) concurrent_requests: Option<u32>,
}

/// Why a quota is invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum QuotaError {
    /// A rate is zero, negative or not a number.
    #[error("{0} must be a number above 0")]
    Rate(&'static str),
    #[error("concurrent_requests is 0, which would reject every request")]
    ZeroConcurrency,
}

impl TrafficQuota {
    pub(super) fn check(&self) -> Result<(), QuotaError> {
        let rates = [
            ("requests_per_second", self.requests_per_second),
            ("input_tokens_per_second", self.input_tokens_per_second),
        ];
        for (name, rate) in rates {
            if rate.is_some_and(|rate| !(rate.is_finite() && rate > 0.0)) {
                return Err(QuotaError::Rate(name));
            }
        }
        match self.concurrent_requests {
            Some(0) => Err(QuotaError::ZeroConcurrency),
            _ => Ok(()),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum QuotaKind {
    Requests,
    InputTokens,
    Concurrency,
}

/// A token bucket. Its level may fall below zero: a prompt larger than the burst is admitted and delays the requests after it.
#[derive(Debug, Clone, Copy)]
struct QuotaBucket {
    level: f64,
    filled_at: Instant,
}

impl QuotaBucket {
    /// Refills the bucket and returns its level, which may be negative.
    fn fill(&mut self, rate: f64, burst: f64, now: Instant) -> f64 {
        let passed = now.saturating_duration_since(self.filled_at).as_secs_f64();
        (self.level, self.filled_at) = ((self.level + passed * rate).min(burst), now);
        self.level
    }
}

/// Current traffic of one tenant.
#[derive(Debug)]
struct TenantTraffic {
    requests: Mutex<QuotaBucket>,
    tokens: Mutex<QuotaBucket>,
    running: AtomicU32,
}

fn burst(rate: f64) -> f64 {
    (rate * BURST_SECONDS).max(1.0)
}

impl TenantTraffic {
    fn new(now: Instant) -> Self {
        // Infinite, so that the first refill sets it to the burst of whatever quota applies.
        let full = QuotaBucket { level: f64::INFINITY, filled_at: now };
        Self { requests: Mutex::new(full), tokens: Mutex::new(full), running: AtomicU32::new(0) }
    }

    fn try_admit(&self, quota: TrafficQuota, now: Instant) -> Result<(), (QuotaKind, Duration)> {
        // The limits are checked one after the other; two concurrent requests may both pass where only one more is allowed.
        if let Some(rate) = quota.input_tokens_per_second {
            let level = self.tokens.lock().fill(rate, burst(rate), now);
            if level <= 0.0 {
                return Err((QuotaKind::InputTokens, seconds((1.0 - level) / rate)));
            }
        }
        let limit = quota.concurrent_requests.unwrap_or(u32::MAX);
        let increment = |running: u32| (running < limit).then_some(running.saturating_add(1));
        if self.running.fetch_update(Ordering::AcqRel, Ordering::Acquire, increment).is_err() {
            return Err((QuotaKind::Concurrency, CONCURRENCY_RETRY_AFTER));
        }
        if let Some(rate) = quota.requests_per_second {
            let mut bucket = self.requests.lock();
            let level = bucket.fill(rate, burst(rate), now);
            if level < 1.0 {
                self.running.fetch_sub(1, Ordering::AcqRel);
                return Err((QuotaKind::Requests, seconds((1.0 - level) / rate)));
            }
            bucket.level -= 1.0;
        }
        Ok(())
    }

    /// Whether evicting the tenant would not restore any quota.
    fn is_idle(&self, quota: TrafficQuota, now: Instant) -> bool {
        let full = |bucket: &Mutex<QuotaBucket>, rate: Option<f64>| {
            rate.is_none_or(|rate| bucket.lock().fill(rate, burst(rate), now) >= burst(rate))
        };
        self.running.load(Ordering::Acquire) == 0
            && full(&self.requests, quota.requests_per_second)
            && full(&self.tokens, quota.input_tokens_per_second)
    }
}

fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
}

/// Current traffic of all tenants.
#[derive(Debug, Default)]
pub(super) struct QuotaTracker {
    tenants: Mutex<TenantTrafficMap>,
}

#[derive(Debug, Default)]
struct TenantTrafficMap {
    by_name: HashMap<Arc<str>, Arc<TenantTraffic>>,
    /// Number of tenants after the last sweep.
    after_last_sweep: usize,
}

impl QuotaTracker {
    /// Counts a request of tenant `name`, or returns the exceeded limit and the retry delay. `quota` looks up the quota of a
    /// tenant.
    pub(super) fn try_admit(
        &self,
        name: &Arc<str>,
        quota: impl Fn(&str) -> TrafficQuota,
        now: Instant,
    ) -> Result<Option<QuotaPermit>, (QuotaKind, Duration)> {
        let tenant_quota = quota(name);
        if tenant_quota == TrafficQuota::default() {
            return Ok(None);
        }
        let tenant = self.tenant(name, quota, now);
        tenant.try_admit(tenant_quota, now)?;
        Ok(Some(QuotaPermit { tenant }))
    }

    fn tenant(
        &self,
        name: &Arc<str>,
        quota: impl Fn(&str) -> TrafficQuota,
        now: Instant,
    ) -> Arc<TenantTraffic> {
        let mut tenants = self.tenants.lock();
        if let Some(tenant) = tenants.by_name.get(name) {
            return tenant.clone();
        }
        // Sweeping at each doubling has a constant amortised cost per tenant; only tenants that are within their burst period
        // remain.
        if tenants.by_name.len() >= MIN_SWEEP_TENANTS.max(2 * tenants.after_last_sweep) {
            tenants.by_name.retain(|name, tenant| !tenant.is_idle(quota(name), now));
            tenants.after_last_sweep = tenants.by_name.len();
        }
        tenants.by_name.entry(name.clone()).or_insert_with(|| Arc::new(TenantTraffic::new(now))).clone()
    }
}

/// A request that counts as running until this is dropped.
#[derive(Debug)]
pub(crate) struct QuotaPermit {
    tenant: Arc<TenantTraffic>,
}

impl QuotaPermit {
    /// Charges the prompt's tokens to the tenant's quota.
    pub(crate) fn spend(&self, tokens: u32) {
        self.tenant.tokens.lock().level -= f64::from(tokens);
    }
}

impl Drop for QuotaPermit {
    fn drop(&mut self) {
        self.tenant.running.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> Arc<str> {
        Arc::from(text)
    }

    #[test]
    fn rate_limited_requests_succeed_after_retry_after() {
        let (quotas, start) = (QuotaTracker::default(), Instant::now());
        let two_per_second =
            |_: &str| TrafficQuota { requests_per_second: Some(2.0), ..TrafficQuota::default() };
        for _ in 0..2 {
            quotas.try_admit(&name("a"), two_per_second, start).unwrap();
        }
        let (kind, after) = quotas.try_admit(&name("a"), two_per_second, start).unwrap_err();
        assert_eq!((kind, after), (QuotaKind::Requests, Duration::from_millis(500)));
        quotas.try_admit(&name("b"), two_per_second, start).unwrap();
        assert!(quotas.try_admit(&name("a"), two_per_second, start + after / 2).is_err());
        quotas.try_admit(&name("a"), two_per_second, start + after).unwrap();
        assert!(quotas.try_admit(&name("a"), two_per_second, start + after).is_err());
    }

    #[test]
    fn a_long_prompt_delays_later_requests() {
        let (quotas, start) = (QuotaTracker::default(), Instant::now());
        let slow = |_: &str| TrafficQuota { input_tokens_per_second: Some(100.0), ..TrafficQuota::default() };
        quotas.try_admit(&name("a"), slow, start).unwrap().unwrap().spend(1100);
        let (kind, after) = quotas.try_admit(&name("a"), slow, start).unwrap_err();
        assert_eq!(kind, QuotaKind::InputTokens);
        assert!((after.as_secs_f64() - 10.01).abs() < 1e-6, "{after:?}");
        quotas.try_admit(&name("a"), slow, start + after).unwrap();
    }

    #[test]
    fn concurrent_requests_are_counted_until_they_end() {
        let (quotas, now) = (QuotaTracker::default(), Instant::now());
        let one_at_a_time = |_: &str| TrafficQuota {
            concurrent_requests: Some(1),
            requests_per_second: Some(1000.0),
            ..TrafficQuota::default()
        };
        let permit = quotas.try_admit(&name("a"), one_at_a_time, now).unwrap();
        assert_eq!(
            quotas.try_admit(&name("a"), one_at_a_time, now).unwrap_err(),
            (QuotaKind::Concurrency, CONCURRENCY_RETRY_AFTER)
        );
        drop(permit);
        drop(quotas.try_admit(&name("a"), one_at_a_time, now).unwrap());
        assert_eq!(quotas.tenant(&name("a"), one_at_a_time, now).running.load(Ordering::Acquire), 0);
    }

    #[test]
    fn idle_tenants_are_evicted() {
        let (quotas, start) = (QuotaTracker::default(), Instant::now());
        let quota = |_: &str| TrafficQuota { requests_per_second: Some(1.0), ..TrafficQuota::default() };
        let active = quotas.try_admit(&name("active"), quota, start).unwrap();
        for round in 0..10 {
            for client in 0..MIN_SWEEP_TENANTS {
                let now = start + Duration::from_secs(10 * round);
                drop(quotas.try_admit(&name(&format!("{round}.{client}")), quota, now).unwrap());
            }
        }
        let tenants = quotas.tenants.lock();
        assert!(tenants.by_name.len() <= 2 * MIN_SWEEP_TENANTS + 1, "{}", tenants.by_name.len());
        assert!(tenants.by_name.contains_key("active"));
        drop(active);
    }

    #[test]
    fn tenants_without_quota_are_not_tracked() {
        let quotas = QuotaTracker::default();
        assert!(quotas.try_admit(&name("a"), |_| TrafficQuota::default(), Instant::now()).unwrap().is_none());
        assert!(quotas.tenants.lock().by_name.is_empty());
    }
}
