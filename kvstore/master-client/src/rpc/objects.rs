//! Object calls, for one client and one tenant.

use std::collections::BTreeMap;
use std::sync::Arc;

use mooncake_wire::rpc::{
    BatchExistKey, BatchGetReplicaList, BatchPutEnd, BatchPutEndArguments, BatchPutRevoke,
    BatchPutRevokeArguments, BatchPutStart, BatchPutStartArguments, BatchRemove, BatchRemoveArguments,
    BatchUpsertEnd, BatchUpsertEndArguments, BatchUpsertRevoke, BatchUpsertRevokeArguments, BatchUpsertStart,
    GetReplicaList, GetReplicaListByRegex, KeyArguments, KeysArguments, MasterResult, PutEnd,
    PutEndArguments, PutRevoke, PutRevokeArguments, PutStart, PutStartArguments, Remove, RemoveAll,
    RemoveAllArguments, RemoveArguments, RemoveByRegex, UpsertEnd, UpsertRevoke, UpsertStart,
};
use mooncake_wire::types::{ObjectMeta, ReplicaDescriptor, ReplicaList, ReplicaType, ReplicateConfig, Uuid};

use super::error::{RpcError, RpcProtocolError};
use super::master::MasterClient;
use super::store_masters::StoreMasters;

/// Behaviour of a put when an object with its key exists.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PutMode {
    /// The existing object stays, and the put is refused.
    #[default]
    Put,
    /// The existing object is replaced. Supported by masters since 0.3.10.post2.
    Upsert,
}

/// Makes object calls to a master as one client, for one tenant. Clones are cheap.
///
/// Keys, sizes and results of a batch are in the same order. A response with another number of results than requested is a
/// protocol error.
#[derive(Clone, Debug)]
pub struct ObjectClient {
    masters: StoreMasters,
    client_id: Uuid,
    tenant: Arc<str>,
}

impl ObjectClient {
    /// Calls `master` as `client_id` for objects of `tenant`. Releases before 0.3.12 have no tenants. If `master` is a router for the
    /// masters of a store, they are called directly.
    #[must_use]
    pub fn new(master: MasterClient, client_id: Uuid, tenant: &str) -> Self {
        Self { masters: StoreMasters::new(master), client_id, tenant: tenant.into() }
    }

    /// The client of the master, or of the router.
    #[must_use]
    pub fn master(&self) -> &MasterClient {
        self.masters.entry()
    }

    /// Whether objects exist. **Leases** the existing ones.
    ///
    /// # Errors
    /// As [`MasterClient::call`], which also holds for all other calls here.
    pub async fn exist(&self, keys: Vec<&str>) -> Result<Vec<MasterResult<bool>>, RpcError> {
        let requested = keys.len();
        let results = self.masters.call::<BatchExistKey>(self.keys(keys)).await?;
        self.check_length(requested, results)
    }

    /// The replicas of an object. Leases the object.
    ///
    /// # Errors
    /// [`RpcError::Refused`] if no readable object exists.
    pub async fn replicas(&self, key: &str) -> Result<ReplicaList<String>, RpcError> {
        Ok(self.masters.call::<GetReplicaList>(self.key(key)).await??)
    }

    /// The replicas of several objects. Leases the objects.
    ///
    /// # Errors
    /// As [`ObjectClient::exist`].
    pub async fn replicas_of(
        &self,
        keys: Vec<&str>,
    ) -> Result<Vec<MasterResult<ReplicaList<String>>>, RpcError> {
        let requested = keys.len();
        let results = self.masters.call::<BatchGetReplicaList>(self.keys(keys)).await?;
        self.check_length(requested, results)
    }

    /// The replicas of all objects whose key matches a regular expression. Leases the objects.
    ///
    /// # Errors
    /// [`RpcError::Refused`] if the expression is invalid.
    pub async fn replicas_matching(
        &self,
        regex: &str,
    ) -> Result<BTreeMap<String, Vec<ReplicaDescriptor<String>>>, RpcError> {
        Ok(self.masters.call::<GetReplicaListByRegex>(self.key(regex)).await??)
    }

    /// Allocates replicas for an object of `size` bytes, and returns where to write them.
    ///
    /// # Errors
    /// [`RpcError::Refused`], for example when there is no free space, or when the object exists and `mode` is not an upsert.
    pub async fn start(
        &self,
        mode: PutMode,
        key: &str,
        size: u64,
        config: ReplicateConfig<&str>,
    ) -> Result<Vec<ReplicaDescriptor<String>>, RpcError> {
        let (client_id, tenant) = (self.client_id, &*self.tenant);
        let arguments = PutStartArguments { client_id, key, size, config, tenant };
        Ok(match mode {
            PutMode::Put => self.masters.call::<PutStart>(arguments).await??,
            PutMode::Upsert => self.masters.call::<UpsertStart>(arguments).await??,
        })
    }

    /// Makes a written object visible. This call is idempotent.
    ///
    /// # Errors
    /// [`RpcError::Refused`], for example when the master expired the put meanwhile.
    pub async fn end(&self, mode: PutMode, key: &str, checksum: Option<u64>) -> Result<(), RpcError> {
        let object = ObjectMeta { key, object_checksum: checksum };
        let (client_id, tenant) = (self.client_id, &*self.tenant);
        let arguments = PutEndArguments { client_id, object, replica_type: ReplicaType::ALL, tenant };
        match mode {
            PutMode::Put => self.masters.call::<PutEnd>(arguments).await??,
            PutMode::Upsert => self.masters.call::<UpsertEnd>(arguments).await??,
        }
        Ok(())
    }

    /// Revokes a put that was not completed.
    ///
    /// # Errors
    /// [`RpcError::Refused`], for example when the object is visible already.
    pub async fn revoke(&self, mode: PutMode, key: &str) -> Result<(), RpcError> {
        let (client_id, tenant) = (self.client_id, &*self.tenant);
        let arguments = PutRevokeArguments { client_id, key, replica_type: ReplicaType::ALL, tenant };
        match mode {
            PutMode::Put => self.masters.call::<PutRevoke>(arguments).await??,
            PutMode::Upsert => self.masters.call::<UpsertRevoke>(arguments).await??,
        }
        Ok(())
    }

    /// [`ObjectClient::start`] for several objects.
    ///
    /// # Errors
    /// As [`ObjectClient::exist`].
    pub async fn start_batch(
        &self,
        mode: PutMode,
        keys: Vec<&str>,
        sizes: Vec<u64>,
        config: ReplicateConfig<&str>,
    ) -> Result<Vec<MasterResult<Vec<ReplicaDescriptor<String>>>>, RpcError> {
        let requested = keys.len();
        let (client_id, tenant) = (self.client_id, &*self.tenant);
        let arguments = BatchPutStartArguments { client_id, keys, sizes, config, tenant };
        let results = match mode {
            PutMode::Put => self.masters.call::<BatchPutStart>(arguments).await?,
            PutMode::Upsert => self.masters.call::<BatchUpsertStart>(arguments).await?,
        };
        self.check_length(requested, results)
    }

    /// [`ObjectClient::end`] for several objects.
    ///
    /// # Errors
    /// As [`ObjectClient::exist`].
    pub async fn end_batch(
        &self,
        mode: PutMode,
        objects: Vec<ObjectMeta<&str>>,
    ) -> Result<Vec<MasterResult<()>>, RpcError> {
        let requested = objects.len();
        let (client_id, tenant) = (self.client_id, &*self.tenant);
        let results = match mode {
            PutMode::Put => {
                let replica_type = ReplicaType::ALL;
                let arguments = BatchPutEndArguments { client_id, objects, replica_type, tenant };
                self.masters.call::<BatchPutEnd>(arguments).await?
            }
            PutMode::Upsert => {
                let arguments = BatchUpsertEndArguments { client_id, objects, tenant };
                self.masters.call::<BatchUpsertEnd>(arguments).await?
            }
        };
        self.check_length(requested, results)
    }

    /// [`ObjectClient::revoke`] for several objects.
    ///
    /// # Errors
    /// As [`ObjectClient::exist`].
    pub async fn revoke_batch(
        &self,
        mode: PutMode,
        keys: Vec<&str>,
    ) -> Result<Vec<MasterResult<()>>, RpcError> {
        let requested = keys.len();
        let (client_id, tenant) = (self.client_id, &*self.tenant);
        let results = match mode {
            PutMode::Put => {
                let replica_type = ReplicaType::ALL;
                let arguments = BatchPutRevokeArguments { client_id, keys, replica_type, tenant };
                self.masters.call::<BatchPutRevoke>(arguments).await?
            }
            PutMode::Upsert => {
                let arguments = BatchUpsertRevokeArguments { client_id, keys, tenant };
                self.masters.call::<BatchUpsertRevoke>(arguments).await?
            }
        };
        self.check_length(requested, results)
    }

    /// Removes an object. With `force` also a leased one.
    ///
    /// # Errors
    /// [`RpcError::Refused`], for example when the object does not exist or is leased.
    pub async fn remove(&self, key: &str, force: bool) -> Result<(), RpcError> {
        let arguments = RemoveArguments { key, force, tenant: &*self.tenant };
        Ok(self.masters.call::<Remove>(arguments).await??)
    }

    /// [`ObjectClient::remove`] for several objects. Supported by masters since 0.3.10.post2.
    ///
    /// # Errors
    /// As [`ObjectClient::exist`].
    pub async fn remove_batch(
        &self,
        keys: Vec<&str>,
        force: bool,
    ) -> Result<Vec<MasterResult<()>>, RpcError> {
        let requested = keys.len();
        let arguments = BatchRemoveArguments { keys, force, tenant: &*self.tenant };
        let results = self.masters.call::<BatchRemove>(arguments).await?;
        self.check_length(requested, results)
    }

    /// Removes the objects whose key matches a regular expression, and returns their number. Without `force`, leased objects
    /// stay.
    ///
    /// # Errors
    /// [`RpcError::Refused`] if the expression is invalid.
    pub async fn remove_matching(&self, regex: &str, force: bool) -> Result<u64, RpcError> {
        let arguments = RemoveArguments { key: regex, force, tenant: &*self.tenant };
        let removed = self.masters.call::<RemoveByRegex>(arguments).await??;
        Ok(u64::try_from(removed).unwrap_or(0))
    }

    /// Removes all objects of the tenant, and returns their number. Without `force`, leased objects stay.
    ///
    /// # Errors
    /// As [`ObjectClient::exist`].
    pub async fn remove_all(&self, force: bool) -> Result<u64, RpcError> {
        let arguments = RemoveAllArguments { force, tenant: &*self.tenant };
        let removed = self.masters.call::<RemoveAll>(arguments).await?;
        Ok(u64::try_from(removed).unwrap_or(0))
    }

    fn key<'a>(&'a self, key: &'a str) -> KeyArguments<&'a str> {
        KeyArguments { key, tenant: &self.tenant }
    }

    fn keys<'a>(&'a self, keys: Vec<&'a str>) -> KeysArguments<&'a str> {
        KeysArguments { keys, tenant: &self.tenant }
    }

    fn check_length<T>(&self, requested: usize, results: Vec<T>) -> Result<Vec<T>, RpcError> {
        if results.len() == requested {
            return Ok(results);
        }
        let results = results.len();
        Err(self.masters.entry().protocol_error(RpcProtocolError::ResultCount { requested, results }))
    }
}
