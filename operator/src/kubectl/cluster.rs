//! Reads the objects of a group, and writes its spec.

use std::collections::BTreeSet;
use std::path::PathBuf;

use futures_util::future::join_all;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, ApiResource, DynamicObject, GroupVersionKind, ListParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config, Error};
use rbg_api::conversion::{ApiVersion, ConversionError, convert, fold_mirrors};
use rbg_api::keys::GROUP_NAME;
use serde_json::Value;

use super::KubectlError;
use crate::forecast::SimulatedApiServer;
use crate::{KubeClientError, ResourceKind};

const API_GROUP: &str = "workloads.x-k8s.io";
const FIELD_MANAGER: &str = "kubectl-moongate";
/// Number of attempts of an edit in case of conflicts.
const MAX_EDIT_ATTEMPTS: usize = 20;

/// Cluster and namespace to use.
#[derive(Debug, Clone, Default)]
pub struct KubeContextOptions {
    /// Client configuration; `None` uses `KUBECONFIG`, `~/.kube/config`, or the pod's service account.
    pub kubeconfig: Option<PathBuf>,
    /// Context of the client configuration; `None` uses the current one.
    pub context: Option<String>,
    /// Namespace; `None` uses that of the context.
    pub namespace: Option<String>,
}

/// Client for the objects of one namespace.
#[derive(Clone)]
pub struct ClusterClient {
    client: Client,
    /// The namespace to search for groups.
    pub namespace: String,
}

/// All objects of a namespace that groups consist of.
#[derive(Debug, Clone)]
pub struct NamespaceSnapshot {
    objects: Vec<(ResourceKind, Value)>,
    absent: Vec<ResourceKind>,
}

/// A group with its objects.
#[derive(Debug, Clone)]
pub struct GroupSnapshot {
    /// Objects of the group, and policies and profiles that it may use.
    pub server: SimulatedApiServer,
    /// Kinds that the cluster does not serve.
    pub absent: Vec<ResourceKind>,
}

impl ClusterClient {
    /// Reads the client configuration. Sends no request yet.
    ///
    /// # Errors
    /// [`KubectlError::Config`].
    pub async fn connect(context: KubeContextOptions) -> Result<Self, KubectlError> {
        let config = config(&context).await?;
        let namespace = context.namespace.unwrap_or_else(|| config.default_namespace.clone());
        let client = Client::try_from(config).map_err(KubeClientError::Client)?;
        Ok(Self::new(client, namespace))
    }

    #[must_use]
    pub fn new(client: Client, namespace: String) -> Self {
        Self { client, namespace }
    }

    pub(super) fn client(&self) -> &Client {
        &self.client
    }

    /// The same cluster with another namespace.
    #[must_use]
    pub fn in_namespace(&self, namespace: &str) -> Self {
        Self { namespace: namespace.to_owned(), ..self.clone() }
    }

    /// API resource of groups in the newest version that the cluster serves.
    async fn groups_resource(&self) -> Result<ApiResource, KubectlError> {
        let groups = self.client.list_api_groups().await?;
        let api_group = groups.groups.iter().find(|group| group.name == API_GROUP);
        let api_group = api_group.ok_or(KubectlError::NoDefinitions)?;
        let mut versions: Vec<&str> =
            api_group.versions.iter().map(|version| version.version.as_str()).collect();
        versions.sort_unstable();
        let version = versions.last().copied().ok_or(KubectlError::NoDefinitions)?;
        let kind = GroupVersionKind::gvk(API_GROUP, version, ResourceKind::Group.name());
        Ok(ApiResource::from_gvk_with_plural(&kind, "rolebasedgroups"))
    }

    /// All groups of the namespace, or of all namespaces, as v1alpha2.
    ///
    /// # Errors
    /// [`KubectlError::NoDefinitions`], [`KubectlError::Api`].
    pub async fn groups(&self, all_namespaces: bool) -> Result<Vec<Value>, KubectlError> {
        let resource = self.groups_resource().await?;
        let api: Api<DynamicObject> = match all_namespaces {
            true => Api::all_with(self.client.clone(), &resource),
            false => Api::namespaced_with(self.client.clone(), &self.namespace, &resource),
        };
        let list = api.list(&ListParams::default()).await.map_err(not_served)?;
        list.items.into_iter().map(|object| Ok(current(&as_json(object, &resource))?)).collect()
    }

    /// Looks up a group, as v1alpha2. `None` if it does not exist.
    ///
    /// # Errors
    /// As [`Self::groups`].
    pub async fn find(&self, name: &str) -> Result<Option<Value>, KubectlError> {
        let resource = self.groups_resource().await?;
        let api: Api<DynamicObject> = Api::namespaced_with(self.client.clone(), &self.namespace, &resource);
        let object = api.get_opt(name).await?;
        Ok(object.map(|object| current(&as_json(object, &resource))).transpose()?)
    }

    /// Reads a group, as v1alpha2.
    ///
    /// # Errors
    /// As [`Self::groups`], and [`KubectlError::NoGroup`].
    pub async fn group(&self, name: &str) -> Result<Value, KubectlError> {
        match self.find(name).await? {
            Some(group) => Ok(group),
            None => Err(self.no_group(name).await),
        }
    }

    async fn no_group(&self, name: &str) -> KubectlError {
        let existing = self.groups(false).await.unwrap_or_default();
        let names = existing.iter().filter_map(|group| group["metadata"]["name"].as_str());
        KubectlError::NoGroup {
            name: name.to_owned(),
            namespace: self.namespace.clone(),
            existing: names.map(str::to_owned).collect(),
        }
    }

    /// Changes a group in the version that is served, and returns the result. After a conflict, the change is applied to the
    /// new state.
    ///
    /// # Errors
    /// The error of `change`, or [`KubectlError`].
    pub async fn edit(
        &self,
        name: &str,
        change: impl Fn(&mut Value) -> Result<(), KubectlError>,
    ) -> Result<Value, KubectlError> {
        let resource = self.groups_resource().await?;
        let api: Api<DynamicObject> = Api::namespaced_with(self.client.clone(), &self.namespace, &resource);
        let mut last = KubectlError::NoDefinitions;
        for _ in 0..MAX_EDIT_ATTEMPTS {
            let Some(live) = api.get_opt(name).await? else { return Err(self.no_group(name).await) };
            let before = as_json(live, &resource);
            let mut wanted = before.clone();
            fold_mirrors(&mut wanted);
            change(&mut wanted)?;
            fold_mirrors(&mut wanted);
            if wanted == before {
                return Ok(before);
            }
            let object: DynamicObject = serde_json::from_value(wanted).map_err(Error::SerdeError)?;
            let params =
                PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() };
            match api.replace(name, &params, &object).await {
                Ok(object) => return Ok(as_json(object, &resource)),
                Err(Error::Api(status)) if status.code == 409 => last = Error::Api(status).into(),
                Err(error) => return Err(error.into()),
            }
        }
        Err(last)
    }

    /// The group of that name with its objects. If it does not exist, the objects that a new group of that name would use.
    ///
    /// # Errors
    /// [`KubectlError::Api`].
    pub async fn group_snapshot(&self, name: &str) -> Result<GroupSnapshot, KubectlError> {
        Ok(self.namespace_snapshot().await?.group_snapshot(name))
    }

    /// All objects of the namespace that groups consist of.
    ///
    /// # Errors
    /// [`KubectlError::Api`].
    pub async fn namespace_snapshot(&self) -> Result<NamespaceSnapshot, KubectlError> {
        // Warmups are no part of a group.
        let others =
            [ResourceKind::GroupSet, ResourceKind::Warmup, ResourceKind::WarmupPod, ResourceKind::Node];
        let kinds: Vec<ResourceKind> =
            ResourceKind::ALL.into_iter().filter(|kind| !others.contains(kind)).collect();
        let lists = join_all(kinds.iter().map(|kind| self.list(*kind))).await;
        let mut snapshot = NamespaceSnapshot { objects: Vec::new(), absent: Vec::new() };
        for (kind, list) in kinds.into_iter().zip(lists) {
            match list {
                Ok(objects) => snapshot.objects.extend(objects.into_iter().map(|object| (kind, object))),
                Err(Error::Api(status)) if status.code == 404 => snapshot.absent.push(kind),
                // Accounts with access to groups may lack permission for profiles.
                Err(Error::Api(status)) if status.code == 403 && kind == ResourceKind::Profile => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(snapshot)
    }

    async fn list(&self, kind: ResourceKind) -> Result<Vec<Value>, Error> {
        let resource = kind.resource();
        let api: Api<DynamicObject> = match kind.is_of_cluster() {
            true => Api::all_with(self.client.clone(), &resource),
            false => Api::namespaced_with(self.client.clone(), &self.namespace, &resource),
        };
        let mut params = ListParams::default();
        if let Some(selector) = kind.selector() {
            params = params.labels(selector);
        }
        let list = api.list(&params).await?;
        Ok(list.items.into_iter().map(|object| as_json(object, &resource)).collect())
    }

    /// Events of the namespace about objects with these UIDs, oldest first.
    ///
    /// # Errors
    /// [`KubectlError::Api`].
    pub async fn events(&self, uids: &BTreeSet<String>) -> Result<Vec<Value>, KubectlError> {
        let resource = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk("", "v1", "Event"), "events");
        let api: Api<DynamicObject> = Api::namespaced_with(self.client.clone(), &self.namespace, &resource);
        let all = api.list(&ListParams::default()).await?.items;
        let all = all.into_iter().map(|object| as_json(object, &resource));
        let is_about =
            |event: &Value| event["involvedObject"]["uid"].as_str().is_some_and(|uid| uids.contains(uid));
        let mut events: Vec<Value> = all.filter(is_about).collect();
        events.sort_by_cached_key(|event| super::report::event_time(event).to_owned());
        Ok(events)
    }
}

async fn config(context: &KubeContextOptions) -> Result<Config, KubeClientError> {
    let options = KubeConfigOptions { context: context.context.clone(), ..KubeConfigOptions::default() };
    Ok(match (&context.kubeconfig, &context.context) {
        (Some(path), _) => Config::from_custom_kubeconfig(Kubeconfig::read_from(path)?, &options).await?,
        (None, Some(_)) => Config::from_kubeconfig(&options).await?,
        (None, None) => Config::infer().await?,
    })
}

fn not_served(error: Error) -> KubectlError {
    match error {
        Error::Api(status) if status.code == 404 => KubectlError::NoDefinitions,
        error => error.into(),
    }
}

/// Items of lists lack `apiVersion` and `kind`.
fn as_json(mut object: DynamicObject, resource: &ApiResource) -> Value {
    object.types =
        Some(kube::api::TypeMeta { api_version: resource.api_version.clone(), kind: resource.kind.clone() });
    serde_json::to_value(object).unwrap_or_default()
}

/// Converts a group to v1alpha2.
pub(super) fn current(group: &Value) -> Result<Value, ConversionError> {
    convert(group, ApiVersion::V1alpha2)
}

impl NamespaceSnapshot {
    /// The group of that name, the objects that it owns directly or indirectly, its policy, and all profiles.
    #[must_use]
    pub fn group_snapshot(&self, name: &str) -> GroupSnapshot {
        let is_first = |kind: ResourceKind, object: &Value| match kind {
            ResourceKind::Group | ResourceKind::Policy => object["metadata"]["name"] == name,
            ResourceKind::ForeignPod => object["metadata"]["labels"][GROUP_NAME] == name,
            kind => kind == ResourceKind::Profile,
        };
        let (mut found, mut remaining): (Vec<_>, Vec<_>) =
            self.objects.iter().partition(|(kind, object)| is_first(*kind, object));
        let mut uids: BTreeSet<&str> = BTreeSet::new();
        let mut scanned = 0;
        while scanned < found.len() {
            let new = found.iter().skip(scanned).filter_map(|(_, object)| object["metadata"]["uid"].as_str());
            uids.extend(new);
            scanned = found.len();
            let is_owned = |object: &Value| {
                let owners = object["metadata"]["ownerReferences"].as_array().into_iter().flatten();
                owners.into_iter().any(|owner| owner["uid"].as_str().is_some_and(|uid| uids.contains(uid)))
            };
            let (owned, others): (Vec<_>, Vec<_>) =
                remaining.into_iter().partition(|(_, object)| is_owned(object));
            found.extend(owned);
            remaining = others;
        }
        let mut server = SimulatedApiServer::new(Timestamp::now());
        for (kind, object) in found {
            server.restore(*kind, object.clone());
        }
        GroupSnapshot { server, absent: self.absent.clone() }
    }
}
