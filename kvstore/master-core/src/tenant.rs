//! Tenants: namespaces with quotas.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use arc_swap::ArcSwap;
use mooncake_wire::ErrorCode;
use mooncake_wire::admin::TenantQuota;
use mooncake_wire::types::DEFAULT_TENANT;
use parking_lot::Mutex;

use crate::indices::TenantIndex;

const MAX_QUOTA: u64 = i64::MAX as u64;
/// Maximum number of tenants, including removed ones.
const MAX_TENANTS: usize = u16::MAX as usize;

/// A tenant. It is never removed from the list, since object entries store its index.
#[derive(Debug)]
pub(crate) struct TenantEntry {
    pub(crate) name: Arc<str>,
    /// Quota as configured, in bytes.
    requested: AtomicU64,
    /// Quota after scaling to the pool's capacity, in bytes.
    effective: AtomicU64,
    /// Bytes of all replicas of its objects.
    charged: AtomicU64,
    has_policy: AtomicBool,
}

impl TenantEntry {
    fn new(name: &str) -> Self {
        Self {
            name: name.into(),
            requested: AtomicU64::new(0),
            effective: AtomicU64::new(0),
            charged: AtomicU64::new(0),
            has_policy: AtomicBool::new(false),
        }
    }

    /// Charges bytes to the quota. Returns false if that exceeds it and `limited` is set.
    pub(crate) fn charge(&self, bytes: u64, limited: bool) -> bool {
        let before = self.charged.fetch_add(bytes, Relaxed);
        if limited && before.saturating_add(bytes) > self.effective.load(Relaxed) {
            self.discharge(bytes);
            return false;
        }
        true
    }

    pub(crate) fn discharge(&self, bytes: u64) {
        self.charged.fetch_sub(bytes, Relaxed);
    }

    fn has_policy(&self) -> bool {
        self.has_policy.load(Relaxed)
    }

    fn report(&self) -> TenantQuota {
        let (charged, effective) = (self.charged.load(Relaxed), self.effective.load(Relaxed));
        TenantQuota {
            tenant_id: self.name.to_string(),
            requested_quota_bytes: self.requested.load(Relaxed),
            effective_quota_bytes: effective,
            charged_bytes: charged,
            admission_closed: !self.has_policy(),
            over_quota: charged > effective,
            has_explicit_policy: self.has_policy(),
        }
    }
}

/// All tenants. The first one owns everything while multi-tenancy is off.
#[derive(Debug)]
pub(crate) struct TenantTable {
    list: ArcSwap<Vec<Arc<TenantEntry>>>,
    changes: Mutex<()>,
    enabled: bool,
}

impl TenantTable {
    pub(crate) fn new(enabled: bool) -> Self {
        let first = Arc::new(TenantEntry::new(DEFAULT_TENANT));
        Self { list: ArcSwap::from_pointee(vec![first]), changes: Mutex::new(()), enabled }
    }

    pub(crate) fn enabled(&self) -> bool {
        self.enabled
    }

    /// Index of a tenant; `None` for an unknown one.
    pub(crate) fn index_of(&self, name: &str) -> Option<TenantIndex> {
        if !self.enabled {
            return Some(TenantIndex::DEFAULT);
        }
        let index = self.list.load().iter().position(|tenant| *tenant.name == *name)?;
        TenantIndex::new(index)
    }

    /// Index of a tenant that has permission to write.
    pub(crate) fn index_for_writer(&self, name: &str) -> Result<TenantIndex, ErrorCode> {
        let index = self.index_of(name).ok_or(ErrorCode::TENANT_NOT_REGISTERED)?;
        let may_write = !self.enabled || self.get(index).is_some_and(|tenant| tenant.has_policy());
        if may_write { Ok(index) } else { Err(ErrorCode::TENANT_NOT_REGISTERED) }
    }

    pub(crate) fn get(&self, index: TenantIndex) -> Option<Arc<TenantEntry>> {
        self.list.load().get(index.get()).cloned()
    }

    /// Charges bytes to a tenant's quota, if they fit.
    pub(crate) fn charge(&self, index: TenantIndex, bytes: u64) -> bool {
        self.list.load().get(index.get()).is_some_and(|tenant| tenant.charge(bytes, self.enabled))
    }

    /// Whether a tenant without any object could be charged these bytes.
    pub(crate) fn has_quota_for(&self, index: TenantIndex, bytes: u64) -> bool {
        let list = self.list.load();
        list.get(index.get()).is_some_and(|tenant| !self.enabled || bytes <= tenant.effective.load(Relaxed))
    }

    /// Charges bytes without checking the quota.
    pub(crate) fn count(&self, index: TenantIndex, bytes: u64) {
        if let Some(tenant) = self.list.load().get(index.get()) {
            tenant.charge(bytes, false);
        }
    }

    pub(crate) fn discharge(&self, index: TenantIndex, bytes: u64) {
        if let Some(tenant) = self.list.load().get(index.get()) {
            tenant.discharge(bytes);
        }
    }

    /// Index of a tenant, which is added if it is new.
    pub(crate) fn register(&self, name: &str) -> Result<TenantIndex, ErrorCode> {
        let _guard = self.changes.lock();
        if let Some(index) = self.index_of(name) {
            return Ok(index);
        }
        let mut list = Vec::clone(&self.list.load());
        if list.len() >= MAX_TENANTS {
            return Err(ErrorCode::INVALID_PARAMS);
        }
        list.push(Arc::new(TenantEntry::new(name)));
        let index = list.len() - 1;
        self.list.store(Arc::new(list));
        TenantIndex::new(index).ok_or(ErrorCode::INVALID_PARAMS)
    }

    pub(crate) fn set_quota(
        &self,
        name: &str,
        requested: u64,
        capacity: u64,
    ) -> Result<TenantQuota, ErrorCode> {
        if requested == 0 || requested > MAX_QUOTA || name.is_empty() {
            return Err(ErrorCode::INVALID_PARAMS);
        }
        let index = self.register(name)?;
        let tenant = self.get(index).ok_or(ErrorCode::INTERNAL_ERROR)?;
        tenant.requested.store(requested, Relaxed);
        tenant.has_policy.store(true, Relaxed);
        self.scale(capacity);
        Ok(tenant.report())
    }

    pub(crate) fn remove_quota(&self, name: &str, capacity: u64) -> Result<(), ErrorCode> {
        let tenant = self.with_policy(name).ok_or(ErrorCode::OBJECT_NOT_FOUND)?;
        if tenant.charged.load(Relaxed) > 0 {
            return Err(ErrorCode::TENANT_NOT_EMPTY);
        }
        tenant.has_policy.store(false, Relaxed);
        tenant.requested.store(0, Relaxed);
        tenant.effective.store(0, Relaxed);
        self.scale(capacity);
        Ok(())
    }

    fn with_policy(&self, name: &str) -> Option<Arc<TenantEntry>> {
        self.list.load().iter().find(|tenant| *tenant.name == *name && tenant.has_policy()).cloned()
    }

    /// Sets effective quotas: as configured, or scaled down in proportion if their sum exceeds the capacity.
    pub(crate) fn scale(&self, capacity: u64) {
        let _guard = self.changes.lock();
        let list = self.list.load();
        let with_policy = || list.iter().filter(|tenant| tenant.has_policy());
        let total: u128 = with_policy().map(|tenant| u128::from(tenant.requested.load(Relaxed))).sum();
        for tenant in with_policy() {
            let requested = tenant.requested.load(Relaxed);
            let share = u128::from(requested) * u128::from(capacity) / total.max(1);
            let scaled = u64::try_from(share).unwrap_or(requested).min(requested);
            let effective = if total > u128::from(capacity) { scaled } else { requested };
            tenant.effective.store(effective, Relaxed);
        }
    }

    pub(crate) fn quota(&self, name: &str) -> Option<TenantQuota> {
        self.with_policy(name).map(|tenant| tenant.report())
    }

    pub(crate) fn quotas(&self) -> Vec<TenantQuota> {
        self.list.load().iter().filter(|tenant| tenant.has_policy()).map(|tenant| tenant.report()).collect()
    }
}
