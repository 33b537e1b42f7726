//! Volumes of pods, as folders of the host.

use std::collections::BTreeMap;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};

use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{
    ConfigMap, Container, KeyToPath, Pod, ProjectedVolumeSource, Secret, ServiceAccount, Volume,
};
use kube::Client;
use kube::api::{Api, PostParams};

use super::host::run;
use super::launch::field;

/// Who the processes are.
const USER: u32 = 65532;

/// Where a volume's folder or file is to be seen.
pub(crate) struct ContainerMount {
    pub(crate) source: PathBuf,
    pub(crate) target: String,
    pub(crate) is_read_only: bool,
}

/// Makes the folder of each volume of a pod.
pub(crate) async fn make(client: &Client, pod: &Pod, folder: &Path, address: &str) {
    for volume in pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten()) {
        let folder = folder.join(&volume.name);
        std::fs::create_dir_all(&folder).unwrap();
        fill(client, pod, volume, &folder, address).await;
    }
}

/// What a container mounts.
pub(crate) fn mounts(container: &Container, folder: &Path) -> Vec<ContainerMount> {
    let mounts = container.volume_mounts.iter().flatten();
    mounts
        .map(|mount| ContainerMount {
            source: folder.join(&mount.name).join(mount.sub_path.as_deref().unwrap_or_default()),
            target: mount.mount_path.clone(),
            is_read_only: mount.read_only == Some(true),
        })
        .collect()
}

async fn fill(client: &Client, pod: &Pod, volume: &Volume, folder: &Path, address: &str) {
    if let Some(empty) = &volume.empty_dir {
        if empty.medium.as_deref() == Some("Memory") {
            run("mount", &["-t", "tmpfs", "memory", folder.to_str().unwrap()]);
        }
        chown(folder, Some(USER), Some(USER)).unwrap();
    } else if let Some(map) = &volume.config_map {
        write(folder, config_map(client, &map.name).await, map.items.as_deref());
    } else if let Some(secret) = &volume.secret {
        write(
            folder,
            self::secret(client, secret.secret_name.as_deref().unwrap()).await,
            secret.items.as_deref(),
        );
    } else if let Some(projected) = &volume.projected {
        project(client, pod, projected, folder, address).await;
    } else if let Some(downward) = &volume.downward_api {
        for item in downward.items.iter().flatten() {
            let path = &item.field_ref.as_ref().unwrap().field_path;
            std::fs::write(folder.join(&item.path), field(pod, path, address)).unwrap();
        }
    } else {
        panic!("a volume of a kind that there is not: {volume:?}");
    }
}

async fn project(
    client: &Client,
    pod: &Pod,
    projected: &ProjectedVolumeSource,
    folder: &Path,
    address: &str,
) {
    for source in projected.sources.iter().flatten() {
        if let Some(token) = &source.service_account_token {
            let account = pod.spec.as_ref().unwrap().service_account_name.as_deref().unwrap_or("default");
            std::fs::write(folder.join(&token.path), self::token(client, account).await).unwrap();
        } else if let Some(map) = &source.config_map {
            write(folder, config_map(client, &map.name).await, map.items.as_deref());
        } else if let Some(secret) = &source.secret {
            write(folder, self::secret(client, &secret.name).await, secret.items.as_deref());
        } else if let Some(downward) = &source.downward_api {
            for item in downward.items.iter().flatten() {
                let path = &item.field_ref.as_ref().unwrap().field_path;
                std::fs::write(folder.join(&item.path), field(pod, path, address)).unwrap();
            }
        } else {
            panic!("a source of a kind that there is not: {source:?}");
        }
    }
}

/// A token that holds longer than the test takes.
async fn token(client: &Client, account: &str) -> String {
    let accounts = Api::<ServiceAccount>::default_namespaced(client.clone());
    let asked = TokenRequest { spec: TokenRequestSpec::default(), ..TokenRequest::default() };
    let made = accounts.create_token_request(account, &PostParams::default(), &asked).await.unwrap();
    made.status.unwrap().token
}

async fn config_map(client: &Client, name: &str) -> BTreeMap<String, Vec<u8>> {
    let map = Api::<ConfigMap>::default_namespaced(client.clone()).get(name).await.unwrap();
    let texts = map.data.into_iter().flatten().map(|(key, text)| (key, text.into_bytes()));
    texts.chain(map.binary_data.into_iter().flatten().map(|(key, bytes)| (key, bytes.0))).collect()
}

async fn secret(client: &Client, name: &str) -> BTreeMap<String, Vec<u8>> {
    let secret = Api::<Secret>::default_namespaced(client.clone()).get(name).await.unwrap();
    secret.data.into_iter().flatten().map(|(key, bytes)| (key, bytes.0)).collect()
}

/// Writes all files, or those that are asked for.
fn write(folder: &Path, files: BTreeMap<String, Vec<u8>>, items: Option<&[KeyToPath]>) {
    for (key, bytes) in files {
        let path = match items {
            None => Some(&key),
            Some(items) => items.iter().find(|item| item.key == key).map(|item| &item.path),
        };
        if let Some(path) = path {
            let file = folder.join(path);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, bytes).unwrap();
        }
    }
}
