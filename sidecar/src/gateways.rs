//! Discovers gateways: all addresses of each name in `--gateway`, and the instances of a role of the RoleBasedGroup.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use moongate_discovery::HttpScheme;
use rbg_api::{DiscoveryFile, DiscoveryFileError};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::context::SidecarContext;
use crate::gateway_address::{GatewayAddress, GatewayIdentity};
use crate::gateway_link;
use crate::options::SidecarOptions;
use crate::pod_metadata::read_bounded;

/// Maximum number of gateways; a name with more addresses is probably not a gateway's.
const MAX_GATEWAYS: usize = 64;
/// Interval of discovery.
const POLL_INTERVAL: Duration = Duration::from_secs(2);
/// Time limit for one DNS lookup.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(2);
/// Name of the admin listener's port in RBG's file.
const ADMIN_PORT: &str = "admin";

/// Why the list of gateways is incomplete.
#[derive(Debug, thiserror::Error)]
enum GatewayDiscoveryError {
    #[error("{address}: {source}")]
    Lookup { address: GatewayAddress, source: io::Error },
    #[error("{0}: DNS lookup timed out")]
    LookupTimeout(GatewayAddress),
    /// The file of `--rbg-config` cannot be used.
    #[error("{}: {source}", path.display())]
    RbgConfig { path: PathBuf, source: RbgConfigError },
    #[error("found {0} gateways; only the first {MAX_GATEWAYS} are used")]
    TooMany(usize),
}

/// Why the gateways of a role cannot be read from RBG's file.
#[derive(Debug, thiserror::Error)]
enum RbgConfigError {
    #[error(transparent)]
    Read(#[from] io::Error),
    #[error(transparent)]
    Syntax(#[from] serde_saphyr::Error),
    #[error(transparent)]
    Content(#[from] DiscoveryFileError),
}

/// Keeps one link to each gateway until `stop`.
pub(crate) async fn run(sidecar: Arc<SidecarContext>, stop: CancellationToken) {
    let mut has_warned = false;
    loop {
        let (gateways, error) = discover(&sidecar.options).await;
        match error {
            // A failed lookup, or a file that cannot be read, must not close working links.
            Some(error) => {
                if !std::mem::replace(&mut has_warned, true) {
                    tracing::warn!(%error, "discovery of gateways failed in part");
                }
                gateway_link::sync_links(&sidecar, &gateways, false);
            }
            None => {
                has_warned = false;
                gateway_link::sync_links(&sidecar, &gateways, true);
            }
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(POLL_INTERVAL) => {}
        }
    }
}

/// All gateways that were found, and the last error if discovery was incomplete.
async fn discover(
    options: &SidecarOptions,
) -> (BTreeMap<SocketAddr, GatewayIdentity>, Option<GatewayDiscoveryError>) {
    let mut problem = None;
    let mut names = options.gateway.iter().map(|address| (address.clone(), None)).collect::<Vec<_>>();
    if let Some(role) = &options.gateway_role {
        match gateways_of_role(options, role).await {
            Ok(of_role) => names.extend(of_role),
            Err(source) => {
                let path = options.rbg_config.clone();
                problem = Some(GatewayDiscoveryError::RbgConfig { path, source });
            }
        }
    }
    let mut gateways = BTreeMap::new();
    for (mut name, alternative) in names {
        let mut resolved = resolve(&name).await;
        if let (Err(_), Some(alternative)) = (&resolved, alternative) {
            resolved = resolve(&alternative).await;
            name = alternative;
        }
        let identity = GatewayIdentity { scheme: name.scheme, host: name.host };
        match resolved {
            Ok(addresses) => {
                gateways.extend(addresses.into_iter().map(|address| (address, identity.clone())));
            }
            Err(error) => problem = Some(error),
        }
    }
    if gateways.len() > MAX_GATEWAYS {
        problem = Some(GatewayDiscoveryError::TooMany(gateways.len()));
    }
    (gateways.into_iter().take(MAX_GATEWAYS).collect(), problem)
}

async fn resolve(address: &GatewayAddress) -> Result<Vec<SocketAddr>, GatewayDiscoveryError> {
    let lookup = tokio::net::lookup_host((address.host.as_str(), address.port));
    match timeout(LOOKUP_TIMEOUT, lookup).await {
        Ok(Ok(found)) => Ok(found.take(MAX_GATEWAYS).collect()),
        Ok(Err(source)) => Err(GatewayDiscoveryError::Lookup { address: address.clone(), source }),
        Err(_) => Err(GatewayDiscoveryError::LookupTimeout(address.clone())),
    }
}

/// The instances of a role, each with its alternative name, if any.
async fn gateways_of_role(
    options: &SidecarOptions,
    role: &str,
) -> Result<Vec<(GatewayAddress, Option<GatewayAddress>)>, RbgConfigError> {
    let text = read_bounded(&options.rbg_config).await?;
    instances(&text, role, options.gateway_scheme, options.gateway_port)
}

fn instances(
    text: &str,
    role: &str,
    scheme: HttpScheme,
    default_port: u16,
) -> Result<Vec<(GatewayAddress, Option<GatewayAddress>)>, RbgConfigError> {
    let file: DiscoveryFile = serde_saphyr::from_str(text)?;
    let config = file.resolve()?;
    let instances =
        config.roles.into_iter().filter(|other| other.name == role).flat_map(|role| role.instances);
    Ok(instances
        .map(|instance| {
            let port = instance.ports.get(ADMIN_PORT).copied().unwrap_or(default_port);
            let address = |host| GatewayAddress { scheme, host, port };
            (address(instance.address), instance.alternative.map(address))
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instances_of_a_role_are_found_with_their_admin_port() {
        let file = "
group: { name: g, size: 2, roles: [router, gateway, decode] }
roles:
  router: { size: 2, instances: [{ address: g-router-0.s-g-router }, { address: g-router-1.s-g-router }] }
  gateway: { size: 1, instances: [{ address: g-gateway-0.s-g-gateway, ports: { http: 8000, admin: 9100 } }] }
  decode: { size: 1, instances: [{ address: g-decode-0.s-g-decode }] }
";
        let found = |role| -> Vec<String> {
            instances(file, role, HttpScheme::Http, 9000)
                .unwrap()
                .iter()
                .map(|(address, _)| address.to_string())
                .collect()
        };
        assert_eq!(found("router"), ["g-router-0.s-g-router:9000", "g-router-1.s-g-router:9000"]);
        assert_eq!(found("gateway"), ["g-gateway-0.s-g-gateway:9100"]);
        assert!(found("missing").is_empty());
        assert!(instances("no: group", "router", HttpScheme::Http, 9000).is_err());
    }
}
