//! The admin servers of a store's masters.

use futures_util::future::join_all;
use mooncake_wire::admin::KeyReplicas;
use moongate_master_client::admin::{AdminClient, AdminError};
use moongate_store_shards::{InvalidShardCount, ShardCount, ShardIndex};
use parking_lot::Mutex;

/// The admin servers, in the order of the masters' shards.
#[derive(Debug)]
pub(crate) struct StoreAdmins {
    admins: Vec<AdminClient>,
    count: ShardCount,
}

impl StoreAdmins {
    /// # Errors
    /// When there is none, or too many.
    pub(crate) fn new(admins: Vec<AdminClient>) -> Result<Self, InvalidShardCount> {
        Ok(Self { count: ShardCount::new(admins.len())?, admins })
    }

    pub(super) fn count(&self) -> usize {
        self.admins.len()
    }

    pub(super) fn get(&self, shard: ShardIndex) -> Option<&AdminClient> {
        self.admins.get(shard)
    }

    /// Logs masters that are not the shard at whose position they are configured: their objects would not be found.
    pub(super) async fn check_order(&self) {
        if self.admins.len() < 2 {
            return;
        }
        for (index, admin) in self.admins.iter().enumerate() {
            let expected = format!("{index}/{}", self.admins.len());
            // One that does not respond now is not checked.
            if let Ok(health) = admin.health().await
                && health.shard.as_ref() != Some(&expected)
            {
                let actual = health.shard.unwrap_or_else(|| "no shard".to_owned());
                tracing::error!(
                    expected,
                    actual,
                    "a master is another shard than its position in --mooncake-admin says; give them in the order of their --shard"
                );
            }
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &AdminClient> {
        self.admins.iter()
    }

    /// Locates objects, each at the master of its shard.
    ///
    /// # Errors
    /// When a master does not respond. `found` may have been called for some keys before.
    pub(super) async fn locate(
        &self,
        keys: &[&str],
        mut found: impl FnMut(&str, &KeyReplicas<'_>) + Send,
    ) -> Result<(), AdminError> {
        if let [admin] = &self.admins[..] {
            return admin.locate(keys, found).await.map(drop);
        }
        let mut by_shard: Vec<Vec<&str>> = vec![Vec::new(); self.admins.len()];
        for key in keys {
            if let Some(keys) = by_shard.get_mut(self.count.shard_of(key)) {
                keys.push(key);
            }
        }
        let found = Mutex::new(&mut found);
        let queries = self.admins.iter().zip(&by_shard).filter(|(_, keys)| !keys.is_empty());
        let queries =
            queries.map(|(admin, keys)| admin.locate(keys, |key, replicas| found.lock()(key, replicas)));
        join_all(queries).await.into_iter().try_for_each(|located| located.map(drop))
    }
}
