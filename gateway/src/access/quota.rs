//! What each tenant may use: requests and prompt tokens per second, and requests at once.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::Deserialize;

/// Seconds of a rate that may be used at once after a pause.
const BURST_SECONDS: f64 = 1.0;
/// Tenants are only swept beyond this number.
const MIN_SWEEP_TENANTS: usize = 1024;
/// When to ask again if too many requests run; when one of them ends is not known.
const CONCURRENCY_RETRY_AFTER: Duration = Duration::from_secs(1);

/// What a tenant may use; what is not set has no bound.
#[derive(Debug, Clone, Copy, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TrafficQuota {
    pub(super) requests_per_second: Option<f64>,
    pub(super) input_tokens_per_second: Option<f64>,
    pub(super) concurrent_requests: Option<u32>,
}

impl TrafficQuota {
    pub(super) fn check(&self) -> Result<(), String> {
        let rates = [
            ("requests_per_second", self.requests_per_second),
            ("input_tokens_per_second", self.input_tokens_per_second),
        ];
        for (name, rate) in rates {
            if rate.is_some_and(|rate| !(rate.is_finite() && rate > 0.0)) {
                return Err(format!("{name} is not a number above 0"));
            }
        }
        match self.concurrent_requests {
            Some(0) => Err("concurrent_requests is 0, so that nothing could be asked".to_owned()),
            _ => Ok(()),
        }
    }
}

/// Which bound was met.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum QuotaKind {
    Requests,
    InputTokens,
    Concurrency,
}

/// A bucket that fills at a rate up to a burst. It may go below zero, so that what is larger than the burst waits longer after it,
/// and is not impossible.
#[derive(Debug, Clone, Copy)]
struct QuotaBucket {
    level: f64,
    filled_at: Instant,
}

impl QuotaBucket {
    /// How much is there now, with no bound below.
    fn fill(&mut self, rate: f64, burst: f64, now: Instant) -> f64 {
        let passed = now.saturating_duration_since(self.filled_at).as_secs_f64();
        (self.level, self.filled_at) = ((self.level + passed * rate).min(burst), now);
        self.level
    }
}

/// One tenant's use.
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
        // As after a long pause, whatever the quota is: filling cuts it to the burst.
        let full = QuotaBucket { level: f64::INFINITY, filled_at: now };
        Self { requests: Mutex::new(full), tokens: Mutex::new(full), running: AtomicU32::new(0) }
    }

    fn try_admit(&self, quota: TrafficQuota, now: Instant) -> Result<(), (QuotaKind, Duration)> {
        // The three are looked at one after the other; two requests that race may both pass where one more was allowed.
        if let Some(rate) = quota.input_tokens_per_second {
            let level = self.tokens.lock().fill(rate, burst(rate), now);
            if level <= 0.0 {
                return Err((QuotaKind::InputTokens, seconds((1.0 - level) / rate)));
            }
        }
        let most = quota.concurrent_requests.unwrap_or(u32::MAX);
        let one_more = |running: u32| (running < most).then_some(running.saturating_add(1));
        if self.running.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more).is_err() {
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

    /// Whether forgetting it would give it nothing.
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

/// The use of all tenants.
#[derive(Debug, Default)]
pub(super) struct QuotaTracker {
    tenants: Mutex<TenantTrafficMap>,
}

#[derive(Debug, Default)]
struct TenantTrafficMap {
    by_name: HashMap<Arc<str>, Arc<TenantTraffic>>,
    /// How many were left by the last sweep.
    after_last_sweep: usize,
}

impl QuotaTracker {
    /// Counts a request of `tenant`, or says which bound forbids it and when to ask again. `quota` tells what a tenant may use.
    pub(super) fn try_admit(
        &self,
        name: &Arc<str>,
        quota: impl Fn(&str) -> TrafficQuota,
        now: Instant,
    ) -> Result<Option<QuotaPermit>, (QuotaKind, Duration)> {
        let own = quota(name);
        if own == TrafficQuota::default() {
            return Ok(None);
        }
        let tenant = self.tenant(name, quota, now);
        tenant.try_admit(own, now)?;
        Ok(Some(QuotaPermit { tenant }))
    }

    fn tenant(
        &self,
        name: &Arc<str>,
        quota: impl Fn(&str) -> TrafficQuota,
        now: Instant,
    ) -> Arc<TenantTraffic> {
        let mut known = self.tenants.lock();
        if let Some(tenant) = known.by_name.get(name) {
            return tenant.clone();
        }
        // Sweeping at each doubling costs little per tenant, and keeps only those that were there within their burst.
        if known.by_name.len() >= MIN_SWEEP_TENANTS.max(2 * known.after_last_sweep) {
            known.by_name.retain(|name, tenant| !tenant.is_idle(quota(name), now));
            known.after_last_sweep = known.by_name.len();
        }
        known.by_name.entry(name.clone()).or_insert_with(|| Arc::new(TenantTraffic::new(now))).clone()
    }
}

/// A request that is counted as running until this is dropped.
#[derive(Debug)]
pub(crate) struct QuotaPermit {
    tenant: Arc<TenantTraffic>,
}

impl QuotaPermit {
    /// Takes the prompt's tokens from what the tenant may use.
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
        let two = |_: &str| TrafficQuota { requests_per_second: Some(2.0), ..TrafficQuota::default() };
        for _ in 0..2 {
            quotas.try_admit(&name("a"), two, start).unwrap();
        }
        let (bound, after) = quotas.try_admit(&name("a"), two, start).unwrap_err();
        assert_eq!((bound, after), (QuotaKind::Requests, Duration::from_millis(500)));
        quotas.try_admit(&name("b"), two, start).unwrap();
        assert!(quotas.try_admit(&name("a"), two, start + after / 2).is_err());
        quotas.try_admit(&name("a"), two, start + after).unwrap();
        assert!(quotas.try_admit(&name("a"), two, start + after).is_err());
    }

    #[test]
    fn a_long_prompt_is_served_and_those_after_it_wait() {
        let (quotas, start) = (QuotaTracker::default(), Instant::now());
        let slow = |_: &str| TrafficQuota { input_tokens_per_second: Some(100.0), ..TrafficQuota::default() };
        quotas.try_admit(&name("a"), slow, start).unwrap().unwrap().spend(1100);
        let (bound, after) = quotas.try_admit(&name("a"), slow, start).unwrap_err();
        assert_eq!(bound, QuotaKind::InputTokens);
        assert!((after.as_secs_f64() - 10.01).abs() < 1e-6, "{after:?}");
        quotas.try_admit(&name("a"), slow, start + after).unwrap();
    }

    #[test]
    fn requests_at_once_are_counted_until_they_end() {
        let (quotas, now) = (QuotaTracker::default(), Instant::now());
        let one = |_: &str| TrafficQuota {
            concurrent_requests: Some(1),
            requests_per_second: Some(1000.0),
            ..TrafficQuota::default()
        };
        let permit = quotas.try_admit(&name("a"), one, now).unwrap();
        assert_eq!(
            quotas.try_admit(&name("a"), one, now).unwrap_err(),
            (QuotaKind::Concurrency, CONCURRENCY_RETRY_AFTER)
        );
        drop(permit);
        drop(quotas.try_admit(&name("a"), one, now).unwrap());
        assert_eq!(quotas.tenant(&name("a"), one, now).running.load(Ordering::Acquire), 0);
    }

    #[test]
    fn idle_tenants_are_evicted() {
        let (quotas, start) = (QuotaTracker::default(), Instant::now());
        let quota = |_: &str| TrafficQuota { requests_per_second: Some(1.0), ..TrafficQuota::default() };
        let kept = quotas.try_admit(&name("kept"), quota, start).unwrap();
        for round in 0..10 {
            for client in 0..MIN_SWEEP_TENANTS {
                let now = start + Duration::from_secs(10 * round);
                drop(quotas.try_admit(&name(&format!("{round}.{client}")), quota, now).unwrap());
            }
        }
        let known = quotas.tenants.lock();
        assert!(known.by_name.len() <= 2 * MIN_SWEEP_TENANTS + 1, "{}", known.by_name.len());
        assert!(known.by_name.contains_key("kept"));
        drop(kept);
    }

    #[test]
    fn tenants_without_quota_are_not_tracked() {
        let quotas = QuotaTracker::default();
        assert!(quotas.try_admit(&name("a"), |_| TrafficQuota::default(), Instant::now()).unwrap().is_none());
        assert!(quotas.tenants.lock().by_name.is_empty());
    }
}
