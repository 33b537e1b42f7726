//! Division of the computation between tenants with queued requests.

use std::collections::BTreeMap;

use crate::seconds::Seconds;

/// Maximum number of tenants tracked; the one with the least computation is dropped first.
const MAX_TENANTS: usize = 1024;

/// Computation beyond the others, in seconds of the whole fleet, for which a tenant's requests count as twice as long.
const EXCESS_TO_DOUBLE: Seconds = 10.0;

/// A tenant that used less computation than the others is behind them by at most this much, in seconds of the whole
/// fleet. So after idling it cannot take the fleet for longer, and counts as at most four times shorter.
const MAX_CREDIT: Seconds = 20.0;

/// Upper limit of a tenant's factor.
const MAX_FACTOR: f64 = 64.0;

/// Computation by tenant, in seconds of the whole fleet. As in start-time fair queueing, a level follows the tenant with
/// the least computation among those with queued requests, and no tenant is more than a credit below it: computation
/// while no other tenant has queued requests does not count.
///
/// The excess of a tenant over the one with the least computation grows until tenants with backlogs get equal shares,
/// however much they offer. It scales lengths instead of ordering by tenant, so that mostly long requests are delayed,
/// which are few and take most of the computation. The least factor is 1, because the mean time to first token under overload
/// is shorter the more the length counts.
#[derive(Debug, Default)]
pub(super) struct TenantUsage {
    tenants: BTreeMap<u64, TenantComputation>,
    /// Follows the tenant with the least computation that waits. Never decreases while several are tracked, so that new
    /// tenants cannot hold back those that wait.
    level: Seconds,
    /// Computation of a tenant without excess.
    least: Seconds,
}

#[derive(Debug, Clone, Copy)]
struct TenantComputation {
    used: Seconds,
    /// Whether a request stayed queued in this round.
    queued: bool,
}

impl TenantUsage {
    /// Starts a round: raises the level to the least computation of a tenant with requests queued in the last one.
    pub(super) fn start_round(&mut self) {
        if self.tenants.is_empty() {
            return;
        }
        let queued = self.tenants.iter().filter(|(_, tenant)| tenant.queued);
        let least = queued.map(|(&number, _)| self.used(number)).reduce(f64::min);
        let most = || self.tenants.values().map(|tenant| tenant.used).fold(0.0, f64::max);
        let level = least.unwrap_or_else(most);
        // Requests of a single tenant are treated as without one.
        self.level = if self.tenants.len() == 1 { level } else { self.level.max(level) };
        // A tenant with all credit is the same as a new one. It is tracked for some time, so that others count as longer
        // between its requests too.
        let dropped_below = self.level - 2.0 * MAX_CREDIT;
        self.tenants.retain(|_, tenant| {
            tenant.queued = false;
            tenant.used > dropped_below
        });
        self.least =
            self.tenants.keys().map(|&number| self.used(number)).reduce(f64::min).unwrap_or(self.level);
    }

    /// How much longer the tenant's requests count; below 1 only for a tenant with credit before its first round.
    pub(super) fn factor(&self, tenant: Option<u64>) -> f64 {
        let excess = tenant.map_or(0.0, |tenant| self.used(tenant) - self.least);
        (excess / EXCESS_TO_DOUBLE).exp2().min(MAX_FACTOR)
    }

    /// A request of the tenant stays queued in this round.
    pub(super) fn record_queued(&mut self, tenant: Option<u64>) {
        if let Some(tenant) = tenant.and_then(|tenant| self.tracked(tenant)) {
            tenant.queued = true;
        }
    }

    /// A request of the tenant was sent whose computation takes the whole fleet `service`.
    pub(super) fn record_sent(&mut self, tenant: Option<u64>, service: Seconds) {
        let least = self.level - MAX_CREDIT;
        if let Some(tenant) = tenant.and_then(|tenant| self.tracked(tenant)) {
            tenant.used = tenant.used.max(least) + service;
        }
    }

    fn used(&self, tenant: u64) -> Seconds {
        let least = self.level - MAX_CREDIT;
        self.tenants.get(&tenant).map_or(least, |tenant| tenant.used.max(least))
    }

    fn tracked(&mut self, tenant: u64) -> Option<&mut TenantComputation> {
        let used = self.used(tenant);
        if self.tenants.len() >= MAX_TENANTS && !self.tenants.contains_key(&tenant) {
            let least = self.tenants.iter().min_by(|left, right| left.1.used.total_cmp(&right.1.used));
            let least = least.map(|(&tenant, _)| tenant)?;
            self.tenants.remove(&least);
        }
        Some(self.tenants.entry(tenant).or_insert(TenantComputation { used, queued: false }))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A round in which requests of these tenants stay queued.
    fn round(usage: &mut TenantUsage, queued: &[u64]) {
        usage.start_round();
        queued.iter().for_each(|&tenant| usage.record_queued(Some(tenant)));
        usage.start_round();
    }

    #[test]
    fn tenant_ahead_of_a_waiting_one_counts_as_longer() {
        let mut usage = TenantUsage::default();
        round(&mut usage, &[1, 2]);
        usage.record_sent(Some(1), EXCESS_TO_DOUBLE);
        round(&mut usage, &[1, 2]);
        assert_eq!((usage.factor(Some(1)), usage.factor(Some(2)), usage.factor(None)), (2.0, 1.0, 1.0));
        usage.record_sent(Some(1), 1e6);
        assert_eq!(usage.factor(Some(1)), MAX_FACTOR);
    }

    #[test]
    fn idle_capacity_is_free_and_credit_is_bounded() {
        let mut usage = TenantUsage::default();
        usage.record_sent(Some(1), 1e4);
        round(&mut usage, &[]);
        assert_eq!(usage.factor(Some(1)), 1.0, "no request was queued");
        round(&mut usage, &[1, 2]);
        let credit = (MAX_CREDIT / EXCESS_TO_DOUBLE).exp2();
        assert_eq!((usage.factor(Some(1)), usage.factor(Some(2))), (credit, 1.0));
        usage.record_sent(Some(2), MAX_CREDIT);
        round(&mut usage, &[1, 2]);
        assert_eq!((usage.factor(Some(1)), usage.factor(Some(2))), (1.0, 1.0));
    }

    #[test]
    fn number_of_tracked_tenants_is_bounded() {
        let mut usage = TenantUsage::default();
        for tenant in 0..2000 {
            usage.record_sent(Some(tenant), 1.0);
        }
        assert_eq!(usage.tenants.len(), MAX_TENANTS);
        round(&mut usage, &[]);
        usage.record_sent(Some(1), 1e3);
        round(&mut usage, &[]);
        assert_eq!(usage.tenants.len(), 1, "the others have all credit again");
    }

    proptest! {
        /// Tenants with backlogs get the same computation, whatever the length of their requests.
        #[test]
        fn tenants_with_backlogs_get_equal_shares(services in prop::collection::vec(0.01..5.0_f64, 2..6)) {
            let mut usage = TenantUsage::default();
            let numbers: Vec<u64> = (0..services.len() as u64).collect();
            let mut received = vec![0.0; services.len()];
            for _ in 0..2_000 {
                round(&mut usage, &numbers);
                let factor = |tenant: &u64| usage.factor(Some(*tenant));
                let next = numbers.iter().copied().min_by(|a, b| factor(a).total_cmp(&factor(b))).unwrap();
                usage.record_sent(Some(next), services[next as usize]);
                received[next as usize] += services[next as usize];
            }
            let (least, most) = received.iter().fold((f64::INFINITY, 0.0_f64), |(least, most), &received| {
                (least.min(received), most.max(received))
            });
            prop_assert!(most - least <= 5.0, "{:?}", received);
        }

        /// Factors are bounded, the level does not fall, and a tenant alone is treated as if it had no name.
        #[test]
        fn factors_are_bounded(steps in prop::collection::vec((0_u64..4, 0.0..100.0_f64, any::<bool>()), 1..100)) {
            // Less by rounding.
            let least = (-MAX_CREDIT / EXCESS_TO_DOUBLE).exp2() * (1.0 - 1e-9);
            let (mut usage, mut alone) = (TenantUsage::default(), TenantUsage::default());
            alone.record_queued(Some(7));
            for (tenant, service, queued) in steps {
                let (level, tracked) = (usage.level, usage.tenants.len());
                usage.start_round();
                alone.start_round();
                prop_assert!(usage.level >= level || tracked == 1);
                prop_assert_eq!(alone.factor(Some(7)), 1.0);
                if queued {
                    usage.record_queued(Some(tenant));
                    alone.record_queued(Some(7));
                }
                usage.record_sent(Some(tenant), service);
                alone.record_sent(Some(7), service);
                for tenant in 0..5 {
                    prop_assert!((least..=MAX_FACTOR).contains(&usage.factor(Some(tenant))));
                }
            }
        }
    }
}
