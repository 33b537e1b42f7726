//! A real Kubernetes control plane on loopback, without nodes.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Namespace as NamespaceObject, ServiceAccount};
use kube::api::{DeleteParams, ObjectMeta, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Api, Client, Config};
use tempfile::TempDir;
use tokio::sync::OnceCell;

use crate::audit::{self, AuditEvent};

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/control-plane");

/// Exceeded only when something hangs.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Poll interval while waiting for a condition.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Control plane shared by all tests of a process.
static SHARED: OnceCell<Arc<ControlPlane>> = OnceCell::const_new();

/// A control plane could not be started or used.
#[derive(Debug, thiserror::Error)]
pub enum ControlPlaneError {
    /// `scripts/control-plane` cannot be run, or its folder cannot be created.
    #[error("scripts/control-plane: {0}")]
    Io(#[from] io::Error),
    /// The control plane does not start; the text is its error output.
    #[error("{0}")]
    Start(String),
    /// The kubeconfig cannot be used.
    #[error("kubeconfig: {0}")]
    Kubeconfig(#[from] KubeconfigError),
    /// The API server rejected a request.
    #[error(transparent)]
    Api(#[from] kube::Error),
}

/// etcd, API server, controllers and scheduler. They stop on drop, or with the process.
#[derive(Debug)]
pub struct ControlPlane {
    folder: TempDir,
}

/// A namespace of one test, deleted by [`Self::delete`] or with the control plane.
#[derive(Clone)]
pub struct TestNamespace {
    /// Name of the namespace.
    pub name: String,
    /// A client with this namespace as default.
    pub client: Client,
}

impl ControlPlane {
    /// Starts a control plane and waits until it is ready, which takes some seconds.
    ///
    /// # Errors
    /// [`ControlPlaneError`], for instance when `scripts/control-plane build` has not been run.
    pub async fn start() -> Result<Self, ControlPlaneError> {
        Self::start_in(TempDir::with_prefix("moongate-control-plane-")?).await
    }

    /// Starts a control plane that logs requests of service accounts, see [`Self::audit`].
    ///
    /// # Errors
    /// As [`Self::start`].
    pub async fn start_audited() -> Result<Self, ControlPlaneError> {
        let folder = TempDir::with_prefix("moongate-control-plane-")?;
        std::fs::write(folder.path().join("audit.yaml"), audit::POLICY)?;
        Self::start_in(folder).await
    }

    async fn start_in(folder: TempDir) -> Result<Self, ControlPlaneError> {
        let path = folder.path().to_owned();
        let up = tokio::task::spawn_blocking(move || {
            // The script stops with its parent, which must be this process and not a shell.
            Command::new(SCRIPT).args(["up", "--remove"]).arg(path).stdin(Stdio::null()).output()
        });
        let up = up.await.map_err(io::Error::other)??;
        match up.status.success() {
            true => Ok(Self { folder }),
            false => Err(ControlPlaneError::Start(String::from_utf8_lossy(&up.stderr).into_owned())),
        }
    }

    /// The control plane shared by this process: started on first use, stopped with the process.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub async fn shared() -> Result<Arc<Self>, ControlPlaneError> {
        let shared = SHARED.get_or_try_init(async || Self::start().await.map(Arc::new));
        Ok(Arc::clone(shared.await?))
    }

    /// Path of the administrator's kubeconfig.
    pub fn kubeconfig(&self) -> PathBuf {
        self.folder.path().join("kubeconfig")
    }

    /// Folder with the logs of its components.
    pub fn logs(&self) -> &Path {
        self.folder.path()
    }

    /// Path of the audit log, if [started](Self::start_audited) with one.
    pub fn audit_log(&self) -> PathBuf {
        self.folder.path().join("audit.log")
    }

    /// All requests of service accounts so far.
    ///
    /// # Errors
    /// [`ControlPlaneError::Io`].
    pub fn audit(&self) -> Result<Vec<AuditEvent>, ControlPlaneError> {
        Ok(audit::read(&self.audit_log())?)
    }

    /// Writes a kubeconfig for an existing service account, valid for one hour.
    ///
    /// # Errors
    /// [`ControlPlaneError`].
    pub async fn kubeconfig_of(&self, namespace: &str, account: &str) -> Result<PathBuf, ControlPlaneError> {
        let client = Client::try_from(self.config(namespace).await?)?;
        let accounts = Api::<ServiceAccount>::default_namespaced(client);
        let request = TokenRequest { spec: TokenRequestSpec::default(), ..TokenRequest::default() };
        let created: TokenRequest =
            accounts.create_subresource("token", account, &PostParams::default(), &request).await?;
        let mut file = Kubeconfig::read_from(self.kubeconfig())?;
        for user in file.auth_infos.iter_mut().filter_map(|user| user.auth_info.as_mut()) {
            user.token = created.status.as_ref().map(|status| status.token.clone().into());
        }
        for context in file.contexts.iter_mut().filter_map(|context| context.context.as_mut()) {
            context.namespace = Some(namespace.to_owned());
        }
        let path = self.folder.path().join(format!("kubeconfig-{namespace}-{account}"));
        std::fs::write(&path, serde_saphyr::to_string(&file).map_err(io::Error::other)?)?;
        Ok(path)
    }

    /// A client configuration with `namespace` as default.
    ///
    /// # Errors
    /// [`ControlPlaneError::Kubeconfig`].
    pub async fn config(&self, namespace: &str) -> Result<Config, ControlPlaneError> {
        let file = Kubeconfig::read_from(self.kubeconfig())?;
        let mut config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?;
        namespace.clone_into(&mut config.default_namespace);
        Ok(config)
    }

    /// Creates a namespace for one test, with a name that starts with `prefix`, and waits until pods can be created in it.
    ///
    /// # Errors
    /// [`ControlPlaneError`].
    pub async fn namespace(&self, prefix: &str) -> Result<TestNamespace, ControlPlaneError> {
        let client = Client::try_from(self.config("default").await?)?;
        let generate_name = Some(format!("{prefix}-"));
        let metadata = ObjectMeta { generate_name, ..ObjectMeta::default() };
        let object = NamespaceObject { metadata, ..NamespaceObject::default() };
        let created = Api::all(client).create(&PostParams::default(), &object).await?;
        let name = created.metadata.name.unwrap_or_default();
        let client = Client::try_from(self.config(&name).await?)?;
        let accounts = Api::<ServiceAccount>::default_namespaced(client.clone());
        let started = Instant::now();
        while accounts.get_opt("default").await?.is_none() {
            if started.elapsed() > START_TIMEOUT {
                return Err(ControlPlaneError::Start(format!(
                    "namespace {name} has no default service account after {START_TIMEOUT:?}"
                )));
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        Ok(TestNamespace { name, client })
    }
}

impl TestNamespace {
    /// Deletes the namespace and its objects, without waiting for the end.
    ///
    /// # Errors
    /// [`ControlPlaneError::Api`].
    pub async fn delete(&self) -> Result<(), ControlPlaneError> {
        let all = Api::<NamespaceObject>::all(self.client.clone());
        all.delete(&self.name, &DeleteParams::default()).await?;
        Ok(())
    }
}

impl Drop for ControlPlane {
    fn drop(&mut self) {
        // If this fails, it stops with the process.
        let _ = Command::new(SCRIPT).arg("down").arg(self.folder.path()).stderr(Stdio::null()).status();
    }
}
