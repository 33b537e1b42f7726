//! Recent computation by tenant.

use std::collections::BTreeMap;

use crate::seconds::Seconds;

/// Time constant: after it, past use counts for 1/e.
const DECAY_TIME: Seconds = 60.0;

/// Maximum number of tenants tracked; the one with the least use is dropped first.
const MAX_TENANTS: usize = 1024;

/// Limit of a tenant's factor, in both directions.
const MAX_FACTOR: f64 = 8.0;

/// Computation used by tenants, with exponential decay.
#[derive(Debug, Default)]
pub(super) struct TenantUsage {
    used: BTreeMap<u64, Seconds>,
    total: Seconds,
    /// Time of the last update.
    updated_at: Seconds,
}

impl TenantUsage {
    /// The tenant's recent use as a multiple of its fair share: its requests count as that much longer. 1 for requests
    /// without a tenant, and while only one tenant has used any.
    pub(super) fn factor(&self, tenant: Option<u64>, now: Seconds) -> f64 {
        let Some(tenant) = tenant else { return 1.0 };
        // Little use is no evidence yet.
        let faded = self.total * ((self.updated_at - now) / DECAY_TIME).exp();
        if self.used.len() < 2 || faded < 1.0 {
            return 1.0;
        }
        let used = self.used.get(&tenant).copied().unwrap_or(0.0);
        let tenants = self.used.len() as f64;
        (used / self.total * tenants).clamp(1.0 / MAX_FACTOR, MAX_FACTOR)
    }

    pub(super) fn record(&mut self, tenant: Option<u64>, now: Seconds, service: Seconds) {
        let Some(tenant) = tenant else { return };
        let fade = ((self.updated_at - now) / DECAY_TIME).exp();
        self.updated_at = now;
        self.used.retain(|_, used| {
            *used *= fade;
            *used > 1e-3
        });
        if self.used.len() >= MAX_TENANTS && !self.used.contains_key(&tenant) {
            let least = self.used.iter().min_by(|a, b| a.1.total_cmp(b.1)).map(|(&tenant, _)| tenant);
            least.map(|least| self.used.remove(&least));
        }
        *self.used.entry(tenant).or_insert(0.0) += service;
        self.total = self.used.values().sum();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tenant_over_its_share_counts_as_longer_until_it_decays() {
        let mut tenants = TenantUsage::default();
        assert_eq!(tenants.factor(Some(1), 0.0), 1.0);
        for _ in 0..9 {
            tenants.record(Some(1), 0.0, 1.0);
        }
        assert_eq!(tenants.factor(Some(1), 0.0), 1.0, "it is the only tenant");
        tenants.record(Some(2), 0.0, 1.0);
        assert!((tenants.factor(Some(1), 0.0) - 1.8).abs() < 1e-9);
        assert!((tenants.factor(Some(2), 0.0) - 0.2).abs() < 1e-9);
        assert_eq!(tenants.factor(Some(3), 0.0), 1.0 / MAX_FACTOR);
        assert_eq!(tenants.factor(None, 0.0), 1.0);
        assert_eq!(tenants.factor(Some(1), 1000.0), 1.0);
    }

    #[test]
    fn number_of_tracked_tenants_is_bounded() {
        let mut tenants = TenantUsage::default();
        for tenant in 0..2000 {
            tenants.record(Some(tenant), 0.0, 1.0);
        }
        assert_eq!(tenants.used.len(), MAX_TENANTS);
    }
}
