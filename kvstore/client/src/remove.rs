//! Exist, stat and remove operations.

use crate::client::KvClient;
use crate::error::KvError;
use crate::locate::ObjectStat;

impl KvClient {
    /// Whether objects with these keys exist, in the keys' order. The master leases the existing ones.
    ///
    /// # Errors
    /// When the master does not answer.
    pub async fn exist(&self, keys: &[&str]) -> Result<Vec<bool>, KvError> {
        let results = self.shared.objects.exist(keys.to_vec()).await;
        let what = || format!("look up {} keys", keys.len());
        let results = results.map_err(|source| KvError::Master { what: what(), source })?;
        Ok(results.into_iter().map(|exists| exists.unwrap_or(false)).collect())
    }

    /// The master's record of an object. The query leases the object.
    ///
    /// # Errors
    /// When the object does not exist, or the master does not answer.
    pub async fn stat(&self, key: &str) -> Result<ObjectStat, KvError> {
        let list = self.shared.objects.replicas(key).await;
        list.map(|list| ObjectStat::from(&list)).map_err(|source| KvError::master("find", key, source))
    }

    /// Removes an object. With `force` also a leased one, which a client may be reading.
    ///
    /// # Errors
    /// When the object does not exist or is leased, or the master does not answer.
    pub async fn remove(&self, key: &str, force: bool) -> Result<(), KvError> {
        self.shared.cache.remove(key);
        let removed = self.shared.objects.remove(key, force).await;
        removed.map_err(|source| KvError::master("remove", key, source))
    }

    /// Removes the objects whose key matches a regular expression, except leased ones without `force`. Returns
    /// their number.
    ///
    /// # Errors
    /// When the expression is invalid, or the master does not answer.
    pub async fn remove_matching(&self, regex: &str, force: bool) -> Result<u64, KvError> {
        self.shared.cache.clear();
        let removed = self.shared.objects.remove_matching(regex, force).await;
        removed.map_err(|source| KvError::master("remove the keys that match", regex, source))
    }

    /// Removes all objects of the tenant, except leased ones without `force`. Returns their number.
    ///
    /// # Errors
    /// When the master does not answer.
    pub async fn remove_all(&self, force: bool) -> Result<u64, KvError> {
        self.shared.cache.clear();
        let removed = self.shared.objects.remove_all(force).await;
        removed.map_err(|source| KvError::Master { what: "remove all objects".to_owned(), source })
    }
}
