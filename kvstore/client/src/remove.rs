//! Whether objects exist, where they are, and removing them.

use crate::client::KvClient;
use crate::error::KvError;
use crate::locate::ObjectStat;

impl KvClient {
    /// Whether there are objects of these keys, in their order. The master leases those that there are.
    ///
    /// # Errors
    /// When the master does not answer.
    pub async fn exist(&self, keys: &[&str]) -> Result<Vec<bool>, KvError> {
        let answers = self.shared.objects.exist(keys.to_vec()).await;
        let what = || format!("look for {} keys", keys.len());
        let answers = answers.map_err(|source| KvError::Master { what: what(), source })?;
        Ok(answers.into_iter().map(|answer| answer.unwrap_or(false)).collect())
    }

    /// What the master knows of an object, which it leases by that.
    ///
    /// # Errors
    /// When there is none, or the master does not answer.
    pub async fn stat(&self, key: &str) -> Result<ObjectStat, KvError> {
        let list = self.shared.objects.replicas(key).await;
        list.map(|list| ObjectStat::from(&list)).map_err(|source| KvError::master("find", key, source))
    }

    /// Removes an object. With `force` also one that is leased, because somebody may be reading it.
    ///
    /// # Errors
    /// When there is none, or it is leased, or the master does not answer.
    pub async fn remove(&self, key: &str, force: bool) -> Result<(), KvError> {
        self.shared.cache.remove(key);
        let removed = self.shared.objects.remove(key, force).await;
        removed.map_err(|source| KvError::master("remove", key, source))
    }

    /// Removes the objects whose key matches a regular expression, except leased ones without `force`. Returns
    /// their number.
    ///
    /// # Errors
    /// When the expression is none, or the master does not answer.
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
