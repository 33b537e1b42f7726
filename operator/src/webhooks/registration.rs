//! Reconciles what the webhooks need in the cluster: the Secret with their certificate, the conversion of our CRDs, and the
//! ValidatingWebhookConfiguration.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::stream::{BoxStream, SelectAll, select_all};
use futures_util::{FutureExt as _, StreamExt as _};
use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::{
    RuleWithOperations, ServiceReference as ValidatorReference, ValidatingWebhook,
    ValidatingWebhookConfiguration, WebhookClientConfig as ValidatorConfig,
};
use k8s_openapi::api::core::v1::{Secret, Service};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceConversion, CustomResourceDefinition, ServiceReference, WebhookClientConfig,
    WebhookConversion,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use kube::api::{ListParams, PartialObjectMeta, Patch, PatchParams, PostParams};
use kube::runtime::watcher::{Config, Event};
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use serde_json::json;
use tokio::sync::watch;
use tokio::time::Instant;

use super::certificate::{WebhookCertificate, WebhookCertificateError};
use super::ownership::{Ownership, OwnershipTracker, WebhookOwner};
use super::server::ServingCertificate;
use super::{CONVERT, VALIDATE, WebhookOptions};
use crate::OperatorMetrics;

/// CRDs with two versions that need conversion.
const CONVERTED: [&str; 2] = ["rolebasedgroups.workloads.x-k8s.io", "rolebasedgroupsets.workloads.x-k8s.io"];
/// Upstream's name, so that a configuration left by upstream does not point to a removed server.
const CONFIGURATION: &str = "rbgs-validating-webhook-configuration";
/// Names of the webhooks with the resource that each validates. Upstream has the first two.
const WEBHOOKS: [(&str, &str); 3] = [
    ("vrolebasedgroup.kb.io", "rolebasedgroups"),
    ("vrolebasedgroupset.kb.io", "rolebasedgroupsets"),
    ("vcoordinatedpolicy.moongate.io", "coordinatedpolicies"),
];
/// Timeout of the API server for a validation.
const WEBHOOK_TIMEOUT_SECONDS: i32 = 10;

const RETRY: Duration = Duration::from_secs(2);
/// Number of attempts of a write that conflicts with others.
const CONFLICT_ATTEMPTS: usize = 5;
/// Interval between checks whether another release, which owns the webhooks, is still installed.
const OWNER_CHECK_INTERVAL: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
enum WebhookRegistrationError {
    #[error("{what}: {error}")]
    Api { what: &'static str, error: Box<kube::Error> },
    #[error(transparent)]
    Certificate(#[from] WebhookCertificateError),
}

fn failed(what: &'static str) -> impl Fn(kube::Error) -> WebhookRegistrationError {
    move |error| WebhookRegistrationError::Api { what, error: Box::new(error) }
}

/// Registers the webhooks in the cluster.
pub(super) struct WebhookRegistration {
    client: Client,
    options: WebhookOptions,
    certificate: Arc<ServingCertificate>,
    metrics: Arc<OperatorMetrics>,
    tracker: OwnershipTracker,
    owner: watch::Sender<WebhookOwner>,
}

impl WebhookRegistration {
    pub(super) fn new(
        client: Client,
        options: WebhookOptions,
        certificate: Arc<ServingCertificate>,
        metrics: Arc<OperatorMetrics>,
        owner: watch::Sender<WebhookOwner>,
    ) -> Self {
        let own = format!("{}/{}", options.namespace, options.service);
        let tracker = OwnershipTracker::new(own, options.ownership);
        Self { client, options, certificate, metrics, tracker, owner }
    }

    /// Reconciles all objects, and again after each change of them.
    pub(super) async fn run(mut self) {
        let mut changes = self.changes();
        loop {
            let wait = match self.reconcile().await {
                Ok(wait) => wait,
                Err(error) => {
                    tracing::warn!(%error, "cannot register the webhooks; retrying");
                    RETRY
                }
            };
            let _ = tokio::time::timeout(wait, changes.next()).await;
            while changes.next().now_or_never().is_some() {}
        }
    }

    /// Returns the time until the next check without events. Other releases' objects stay unchanged.
    async fn reconcile(&mut self) -> Result<Duration, WebhookRegistrationError> {
        let certificate = self.certificate().await?;
        let ca_bundle = ByteString(certificate.authorities.clone());
        // First, since it has the owner of all others.
        let (owner, wait) = match self.register_validation(&ca_bundle).await? {
            Ownership::Own { .. } => (WebhookOwner::Own, self.tracker.renewal()),
            Ownership::Other { owner, expires_in } => {
                (WebhookOwner::Other(owner), expires_in.min(OWNER_CHECK_INTERVAL))
            }
        };
        if owner == WebhookOwner::Own {
            for definition in CONVERTED {
                self.register_conversion(definition, &ca_bundle).await?;
            }
        }
        // Serve the certificate only after its CA is registered.
        self.certificate.replace(certificate.signing()?);
        self.metrics.set_webhooks_owned(owner == WebhookOwner::Own);
        self.metrics.set_webhooks_pending(false);
        self.publish(owner);
        Ok(wait)
    }

    fn publish(&self, owner: WebhookOwner) {
        let is_new = self.owner.send_if_modified(|last| std::mem::replace(last, owner.clone()) != owner);
        if let (true, WebhookOwner::Other(owner)) = (is_new, owner) {
            let expiry = self.options.ownership.expiry;
            tracing::warn!(
                owner,
                ?expiry,
                "another release owns the webhooks and the conversion of the CRDs; this one takes over when it is uninstalled"
            );
        }
    }

    /// The certificate shared by the replicas; a new one if it is missing, invalid or due for renewal.
    async fn certificate(&self) -> Result<WebhookCertificate, WebhookRegistrationError> {
        let WebhookOptions { namespace, service, secret, .. } = &self.options;
        let secrets: Api<Secret> = Api::namespaced(self.client.clone(), namespace);
        let (host, now) = (format!("{service}.{namespace}.svc"), SystemTime::now());
        let live = secrets.get_opt(secret).await.map_err(failed("cannot read the webhooks' Secret"))?;
        let data = live.as_ref().and_then(|live| live.data.as_ref());
        let before = match data.map(WebhookCertificate::from_data) {
            None => None,
            Some(Err(error)) => {
                tracing::warn!(secret, %error, "the Secret has no valid webhook certificate; generating one");
                None
            }
            Some(Ok(before)) => match before.check(&host, now) {
                Ok(()) => return Ok(before),
                Err(error) => {
                    tracing::info!(secret, %error, "renewing the webhooks' certificate");
                    Some(before)
                }
            },
        };
        let certificate = WebhookCertificate::generate(&host, before.as_ref(), now)?;
        let data = Some(certificate.clone().into_data());
        let parameters = PostParams::default();
        // If another replica has written first, this is a conflict, and the next attempt reads its certificate.
        match live {
            Some(live) => secrets.replace(secret, &parameters, &Secret { data, ..live }).await,
            None => {
                let metadata = ObjectMeta { name: Some(secret.clone()), ..ObjectMeta::default() };
                let type_ = Some("kubernetes.io/tls".to_owned());
                secrets.create(&parameters, &Secret { metadata, type_, data, ..Secret::default() }).await
            }
        }
        .map_err(failed("cannot write the webhooks' Secret"))?;
        Ok(certificate)
    }

    async fn register_conversion(
        &self,
        definition: &str,
        ca_bundle: &ByteString,
    ) -> Result<(), WebhookRegistrationError> {
        let definitions: Api<CustomResourceDefinition> = Api::all(self.client.clone());
        let wanted = self.conversion(ca_bundle);
        let mut attempts = 0;
        loop {
            let live = definitions.get_opt(definition).await.map_err(failed("cannot read a CRD"))?;
            // The watch triggers again when the CRD is created.
            let Some(live) = live else { return Ok(()) };
            // Another release may have taken over since the configuration was read. If it does so after this check, its write of the CRD
            // and this one conflict. The watch of the configuration triggers again.
            if live.spec.conversion.as_ref() == Some(&wanted) || !self.is_still_owner().await? {
                return Ok(());
            }
            let mut body = json!({ "metadata": { "resourceVersion": live.metadata.resource_version },
                "spec": { "conversion": wanted } });
            body["spec"]["conversion"]["webhook"]["clientConfig"]["url"] = serde_json::Value::Null;
            attempts += 1;
            match definitions.patch(definition, &PatchParams::default(), &Patch::Merge(body)).await {
                // The API server writes the status of a new CRD several times.
                Err(kube::Error::Api(status)) if status.code == 409 && attempts < CONFLICT_ATTEMPTS => {}
                Err(error) => return Err(failed("cannot write a CRD's conversion")(error)),
                Ok(_) => break,
            }
        }
        tracing::info!(definition, "registered conversion webhook");
        Ok(())
    }

    async fn is_still_owner(&self) -> Result<bool, WebhookRegistrationError> {
        let configurations: Api<ValidatingWebhookConfiguration> = Api::all(self.client.clone());
        let live = configurations.get_metadata_opt(CONFIGURATION).await;
        let live = live.map_err(failed("cannot read the ValidatingWebhookConfiguration"))?;
        Ok(live.is_some_and(|live| self.tracker.is_own(&live.metadata)))
    }

    fn conversion(&self, ca_bundle: &ByteString) -> CustomResourceConversion {
        let service = ServiceReference {
            namespace: self.options.namespace.clone(),
            name: self.options.service.clone(),
            path: Some(CONVERT.to_owned()),
            port: Some(self.options.port.into()),
        };
        let client_config =
            WebhookClientConfig { ca_bundle: Some(ca_bundle.clone()), service: Some(service), url: None };
        CustomResourceConversion {
            strategy: "Webhook".to_owned(),
            webhook: Some(WebhookConversion {
                client_config: Some(client_config),
                conversion_review_versions: vec!["v1".to_owned()],
            }),
        }
    }

    /// Writes the configuration if this release owns it, with a renewal if that is due.
    async fn register_validation(
        &mut self,
        ca_bundle: &ByteString,
    ) -> Result<Ownership, WebhookRegistrationError> {
        let configurations: Api<ValidatingWebhookConfiguration> = Api::all(self.client.clone());
        let live = configurations.get_opt(CONFIGURATION).await;
        let live = live.map_err(failed("cannot read the ValidatingWebhookConfiguration"))?;
        let mut ownership = self.tracker.observe(live.as_ref().map(|live| &live.metadata), Instant::now());
        if let Ownership::Other { owner, .. } = &ownership
            && self.is_uninstalled(owner).await
        {
            tracing::info!(owner, "the Service of the webhooks' owner is gone; taking over");
            ownership = Ownership::Own { is_due: true };
        }
        let Ownership::Own { is_due } = ownership else { return Ok(ownership) };
        let webhooks = Some(WEBHOOKS.map(|(name, plural)| self.webhook(name, plural, ca_bundle)).to_vec());
        let is_registered = live.as_ref().is_some_and(|live| live.webhooks == webhooks);
        if is_registered && !is_due {
            return Ok(ownership);
        }
        let parameters = PostParams::default();
        // A release that has written first causes a conflict.
        match live {
            Some(live) => {
                let mut wanted = ValidatingWebhookConfiguration { webhooks, ..live };
                self.tracker.write(&mut wanted.metadata);
                configurations.replace(CONFIGURATION, &parameters, &wanted).await
            }
            None => {
                let mut metadata =
                    ObjectMeta { name: Some(CONFIGURATION.to_owned()), ..ObjectMeta::default() };
                self.tracker.write(&mut metadata);
                let wanted = ValidatingWebhookConfiguration { metadata, webhooks };
                configurations.create(&parameters, &wanted).await
            }
        }
        .map_err(failed("cannot write the ValidatingWebhookConfiguration"))?;
        if !is_registered {
            tracing::info!(configuration = CONFIGURATION, "registered validating webhook");
        }
        Ok(ownership)
    }

    /// Whether a release, as `NAMESPACE/SERVICE`, has no Service any more. Without permission to list Services, it may have one.
    async fn is_uninstalled(&self, owner: &str) -> bool {
        let Some((namespace, service)) = owner.split_once('/') else { return true };
        let services: Api<Service> = Api::namespaced(self.client.clone(), namespace);
        let named = ListParams::default().fields(&format!("metadata.name={service}"));
        services.list_metadata(&named).await.is_ok_and(|list| list.items.is_empty())
    }

    /// The webhook with all defaults of the API server, so that it equals the stored one.
    fn webhook(&self, name: &str, plural: &str, ca_bundle: &ByteString) -> ValidatingWebhook {
        let service = ValidatorReference {
            namespace: self.options.namespace.clone(),
            name: self.options.service.clone(),
            path: Some(VALIDATE.to_owned()),
            port: Some(self.options.port.into()),
        };
        let texts = |texts: &[&str]| Some(texts.iter().map(|&text| text.to_owned()).collect());
        ValidatingWebhook {
            name: name.to_owned(),
            admission_review_versions: vec!["v1".to_owned()],
            client_config: ValidatorConfig {
                ca_bundle: Some(ca_bundle.clone()),
                service: Some(service),
                url: None,
            },
            failure_policy: Some("Fail".to_owned()),
            match_policy: Some("Equivalent".to_owned()),
            namespace_selector: Some(LabelSelector::default()),
            object_selector: Some(LabelSelector::default()),
            rules: Some(vec![RuleWithOperations {
                api_groups: texts(&["workloads.x-k8s.io"]),
                api_versions: texts(&["v1alpha2"]),
                operations: texts(&["CREATE", "UPDATE"]),
                resources: texts(&[plural]),
                scope: Some("Namespaced".to_owned()),
            }]),
            side_effects: "None".to_owned(),
            timeout_seconds: Some(WEBHOOK_TIMEOUT_SECONDS),
            ..ValidatingWebhook::default()
        }
    }

    /// Emits an item for each change of the registered objects.
    fn changes(&self) -> SelectAll<BoxStream<'static, ()>> {
        let definitions = CONVERTED.map(|name| {
            changes_of(Api::<PartialObjectMeta<CustomResourceDefinition>>::all(self.client.clone()), name)
        });
        let configurations =
            Api::<PartialObjectMeta<ValidatingWebhookConfiguration>>::all(self.client.clone());
        let secrets: Api<PartialObjectMeta<Secret>> =
            Api::namespaced(self.client.clone(), &self.options.namespace);
        let others = [changes_of(configurations, CONFIGURATION), changes_of(secrets, &self.options.secret)];
        select_all(definitions.into_iter().chain(others))
    }
}

fn changes_of<K>(api: Api<PartialObjectMeta<K>>, name: &str) -> BoxStream<'static, ()>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let config = Config::default().fields(&format!("metadata.name={name}"));
    let events = watcher(api, config).default_backoff();
    let changes = events.filter_map(async |event| match event {
        Ok(Event::Apply(_) | Event::Delete(_) | Event::InitDone) => Some(()),
        Ok(Event::Init | Event::InitApply(_)) => None,
        Err(error) => {
            tracing::warn!(%error, "watch of the webhooks' objects failed; restarting");
            None
        }
    });
    changes.boxed()
}

#[cfg(test)]
mod tests;
