//! Tenants: name spaces with quotas.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use arc_swap::ArcSwap;
use mooncake_wire::ErrorCode;
use mooncake_wire::admin::TenantQuota;
use mooncake_wire::types::DEFAULT_TENANT;
use parking_lot::Mutex;

/// The largest quota.
const MAX_QUOTA: u64 = i64::MAX as u64;
/// Tenants with a quota or objects at a time.
const MAX_TENANTS: usize = u16::MAX as usize;

/// A tenant. It stays in the list for good: its place is in the entries.
#[derive(Debug)]
pub(crate) struct TenantEntry {
    pub(crate) name: Arc<str>,
    /// Bytes that were asked for.
    requested: AtomicU64,
    /// Bytes that it has.
    effective: AtomicU64,
    /// Bytes of its objects, all replicas counted.
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

    /// Takes bytes out of the quota, or says that they are not in it.
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

/// All tenants. The first is the one that everything belongs to while tenants are off.
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

    /// The place of a tenant that may own something; nothing for one that never did.
    pub(crate) fn index_of(&self, name: &str) -> Option<u16> {
        if !self.enabled {
            return Some(0);
        }
        let at = self.list.load().iter().position(|it| *it.name == *name)?;
        u16::try_from(at).ok()
    }

    /// The place of a tenant that wants to write.
    pub(crate) fn index_for_writer(&self, name: &str) -> Result<u16, ErrorCode> {
        let at = self.index_of(name).ok_or(ErrorCode::TENANT_NOT_REGISTERED)?;
        let may = !self.enabled || self.get(at).is_some_and(|it| it.has_policy());
        if may { Ok(at) } else { Err(ErrorCode::TENANT_NOT_REGISTERED) }
    }

    pub(crate) fn get(&self, at: u16) -> Option<Arc<TenantEntry>> {
        self.list.load().get(usize::from(at)).cloned()
    }

    /// Takes bytes out of a tenant's quota.
    pub(crate) fn charge(&self, at: u16, bytes: u64) -> bool {
        self.list.load().get(usize::from(at)).is_some_and(|it| it.charge(bytes, self.enabled))
    }

    /// Counts bytes without asking the quota.
    pub(crate) fn count(&self, at: u16, bytes: u64) {
        if let Some(it) = self.list.load().get(usize::from(at)) {
            it.charge(bytes, false);
        }
    }

    pub(crate) fn discharge(&self, at: u16, bytes: u64) {
        if let Some(it) = self.list.load().get(usize::from(at)) {
            it.discharge(bytes);
        }
    }

    /// The place of a tenant, which is made if it is new.
    pub(crate) fn register(&self, name: &str) -> Result<u16, ErrorCode> {
        let _changing = self.changes.lock();
        if let Some(at) = self.index_of(name) {
            return Ok(at);
        }
        let mut list = Vec::clone(&self.list.load());
        if list.len() >= MAX_TENANTS {
            return Err(ErrorCode::INVALID_PARAMS);
        }
        list.push(Arc::new(TenantEntry::new(name)));
        let at = list.len() - 1;
        self.list.store(Arc::new(list));
        u16::try_from(at).map_err(|_| ErrorCode::INVALID_PARAMS)
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
        let at = self.register(name)?;
        let tenant = self.get(at).ok_or(ErrorCode::INTERNAL_ERROR)?;
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
        self.list.load().iter().find(|it| *it.name == *name && it.has_policy()).cloned()
    }

    /// Gives every tenant what it asked for, or its share if there is not enough for all.
    pub(crate) fn scale(&self, capacity: u64) {
        let _changing = self.changes.lock();
        let list = self.list.load();
        let with_policy = || list.iter().filter(|it| it.has_policy());
        let total: u128 = with_policy().map(|it| u128::from(it.requested.load(Relaxed))).sum();
        for tenant in with_policy() {
            let requested = tenant.requested.load(Relaxed);
            let share = u128::from(requested) * u128::from(capacity) / total.max(1);
            let scaled = u64::try_from(share).unwrap_or(requested).min(requested);
            let effective = if total > u128::from(capacity) { scaled } else { requested };
            tenant.effective.store(effective, Relaxed);
        }
    }

    pub(crate) fn quota(&self, name: &str) -> Option<TenantQuota> {
        self.with_policy(name).map(|it| it.report())
    }

    pub(crate) fn quotas(&self) -> Vec<TenantQuota> {
        self.list.load().iter().filter(|it| it.has_policy()).map(|it| it.report()).collect()
    }
}
