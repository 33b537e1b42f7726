//! Reading what belongs to a group, and writing its spec.

use std::collections::BTreeSet;
use std::path::PathBuf;

use futures_util::future::join_all;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, ApiResource, DynamicObject, GroupVersionKind, ListParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config, Error};
use rbg_api::conversion::{ApiVersion, convert};
use rbg_api::keys::GROUP_NAME;
use serde_json::Value;

use super::KubectlError;
use crate::ResourceKind;
use crate::controllers::error_text;
use crate::forecast::SimulatedApiServer;

/// API group of RoleBasedGroups.
const API_GROUP: &str = "workloads.x-k8s.io";
/// Who an edit is by.
const FIELD_MANAGER: &str = "kubectl-moongate";
/// An edit is made anew when somebody else was faster, so often.
const MAX_EDIT_ATTEMPTS: usize = 20;

/// Which cluster, and which namespace of it.
#[derive(Debug, Clone, Default)]
pub struct KubeContextOptions {
    /// Client configuration; `None`: `KUBECONFIG`, `~/.kube/config`, or the pod's service account.
    pub kubeconfig: Option<PathBuf>,
    /// Context of it; `None`: the current one.
    pub context: Option<String>,
    /// Namespace; `None`: that of the context.
    pub namespace: Option<String>,
}

/// A cluster, as a person sees it.
#[derive(Clone)]
pub struct ClusterClient {
    client: Client,
    /// The namespace in which groups are looked for.
    pub namespace: String,
}

/// All objects of a namespace.
#[derive(Debug, Clone)]
pub struct NamespaceSnapshot {
    objects: Vec<(ResourceKind, Value)>,
    absent: Vec<ResourceKind>,
}

/// A group and what belongs to it.
#[derive(Debug, Clone)]
pub struct GroupSnapshot {
    /// Its objects, and policies and profiles that it may use.
    pub server: SimulatedApiServer,
    /// Kinds that the cluster does without.
    pub absent: Vec<ResourceKind>,
}

impl ClusterClient {
    /// Finds the cluster. Nothing is asked of it yet.
    ///
    /// # Errors
    /// [`KubectlError::Config`].
    pub async fn connect(place: KubeContextOptions) -> Result<Self, KubectlError> {
        let failed = |error: &dyn std::fmt::Display| KubectlError::Config(error_text(error));
        let options = KubeConfigOptions { context: place.context.clone(), ..KubeConfigOptions::default() };
        let config = match (&place.kubeconfig, &place.context) {
            (Some(path), _) => {
                let file = Kubeconfig::read_from(path).map_err(|error| failed(&error))?;
                Config::from_custom_kubeconfig(file, &options).await.map_err(|error| failed(&error))?
            }
            (None, Some(_)) => Config::from_kubeconfig(&options).await.map_err(|error| failed(&error))?,
            (None, None) => Config::infer().await.map_err(|error| failed(&error))?,
        };
        let namespace = place.namespace.unwrap_or_else(|| config.default_namespace.clone());
        let client = Client::try_from(config).map_err(|error| failed(&error))?;
        Ok(Self::new(client, namespace))
    }

    /// Through this client.
    #[must_use]
    pub fn new(client: Client, namespace: String) -> Self {
        Self { client, namespace }
    }

    pub(super) fn client(&self) -> &Client {
        &self.client
    }

    /// The same, looking into another namespace.
    #[must_use]
    pub fn in_namespace(&self, namespace: &str) -> Self {
        Self { namespace: namespace.to_owned(), ..self.clone() }
    }

    /// The kind of groups in the version that the cluster serves: v1alpha2 where it has it.
    async fn groups_resource(&self) -> Result<ApiResource, KubectlError> {
        let groups = self.client.list_api_groups().await?;
        let own = groups.groups.iter().find(|group| group.name == API_GROUP);
        let own = own.ok_or(KubectlError::NoDefinitions)?;
        let mut versions: Vec<&str> = own.versions.iter().map(|version| version.version.as_str()).collect();
        versions.sort_unstable();
        let version = versions.last().copied().ok_or(KubectlError::NoDefinitions)?;
        let kind = GroupVersionKind::gvk(API_GROUP, version, ResourceKind::Group.name());
        Ok(ApiResource::from_gvk_with_plural(&kind, "rolebasedgroups"))
    }

    /// All groups, of this namespace or of all, as v1alpha2.
    ///
    /// # Errors
    /// [`KubectlError::NoDefinitions`], [`KubectlError::Api`].
    pub async fn groups(&self, everywhere: bool) -> Result<Vec<Value>, KubectlError> {
        let resource = self.groups_resource().await?;
        let api: Api<DynamicObject> = match everywhere {
            true => Api::all_with(self.client.clone(), &resource),
            false => Api::namespaced_with(self.client.clone(), &self.namespace, &resource),
        };
        let list = api.list(&ListParams::default()).await.map_err(not_served)?;
        list.items.into_iter().map(|object| current(as_json(object, &resource))).collect()
    }

    /// A group, as v1alpha2. `None` if there is none of that name.
    ///
    /// # Errors
    /// As [`Self::groups`].
    pub async fn find(&self, name: &str) -> Result<Option<Value>, KubectlError> {
        let resource = self.groups_resource().await?;
        let api: Api<DynamicObject> = Api::namespaced_with(self.client.clone(), &self.namespace, &resource);
        let object = api.get_opt(name).await?;
        object.map(|object| current(as_json(object, &resource))).transpose()
    }

    /// A group, as v1alpha2.
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
        let there = self.groups(false).await.unwrap_or_default();
        let names = there.iter().filter_map(|group| group["metadata"]["name"].as_str());
        KubectlError::NoGroup {
            name: name.to_owned(),
            namespace: self.namespace.clone(),
            there: names.map(str::to_owned).collect(),
        }
    }

    /// Changes a group in the version that is served, and answers what it is then. If somebody else was faster, the change
    /// is made to what they made of it.
    ///
    /// # Errors
    /// What `change` says, or [`KubectlError`].
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
            change(&mut wanted)?;
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

    /// The group of that name and all that belongs to it; what a new group of that name would find, if there is none.
    ///
    /// # Errors
    /// [`KubectlError::Api`].
    pub async fn group_snapshot(&self, name: &str) -> Result<GroupSnapshot, KubectlError> {
        Ok(self.namespace_snapshot().await?.group_snapshot(name))
    }

    /// All objects of the namespace, as far as groups are made of them.
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
        let mut everything = NamespaceSnapshot { objects: Vec::new(), absent: Vec::new() };
        for (kind, list) in kinds.into_iter().zip(lists) {
            match list {
                Ok(objects) => everything.objects.extend(objects.into_iter().map(|object| (kind, object))),
                Err(Error::Api(status)) if status.code == 404 => everything.absent.push(kind),
                // Who may see groups need not be allowed to see profiles.
                Err(Error::Api(status)) if status.code == 403 && kind == ResourceKind::Profile => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(everything)
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

    /// Events of the namespace about objects with these UIDs, the oldest first.
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

fn not_served(error: Error) -> KubectlError {
    match error {
        Error::Api(status) if status.code == 404 => KubectlError::NoDefinitions,
        error => error.into(),
    }
}

/// Items of lists do not say of what kind they are.
fn as_json(mut object: DynamicObject, resource: &ApiResource) -> Value {
    object.types =
        Some(kube::api::TypeMeta { api_version: resource.api_version.clone(), kind: resource.kind.clone() });
    serde_json::to_value(object).unwrap_or_default()
}

/// The group as v1alpha2.
pub(super) fn current(group: Value) -> Result<Value, KubectlError> {
    convert(&group, ApiVersion::V1alpha2).map_err(|error| KubectlError::Unreadable(error.to_string()))
}

impl NamespaceSnapshot {
    /// The group of that name, all that it owns however far down, its policy, and all profiles.
    #[must_use]
    pub fn group_snapshot(&self, name: &str) -> GroupSnapshot {
        let is_first = |kind: ResourceKind, object: &Value| match kind {
            ResourceKind::Group | ResourceKind::Policy => object["metadata"]["name"] == name,
            ResourceKind::ForeignPod => object["metadata"]["labels"][GROUP_NAME] == name,
            kind => kind == ResourceKind::Profile,
        };
        let (mut found, mut left): (Vec<_>, Vec<_>) =
            self.objects.iter().partition(|(kind, object)| is_first(*kind, object));
        let mut uids: BTreeSet<&str> = BTreeSet::new();
        let mut seen = 0;
        while seen < found.len() {
            let new = found.iter().skip(seen).filter_map(|(_, object)| object["metadata"]["uid"].as_str());
            uids.extend(new);
            seen = found.len();
            let is_owned = |object: &Value| {
                let owners = object["metadata"]["ownerReferences"].as_array().into_iter().flatten();
                owners.into_iter().any(|owner| owner["uid"].as_str().is_some_and(|uid| uids.contains(uid)))
            };
            let (owned, others): (Vec<_>, Vec<_>) =
                left.into_iter().partition(|(_, object)| is_owned(object));
            found.extend(owned);
            left = others;
        }
        let mut server = SimulatedApiServer::new(Timestamp::now());
        for (kind, object) in found {
            server.restore(*kind, object.clone());
        }
        GroupSnapshot { server, absent: self.absent.clone() }
    }
}
