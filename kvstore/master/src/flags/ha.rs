//! Flags for HA mode.

use std::net::SocketAddr;
use std::time::Duration;

use super::options::rpc;
use super::{FlagError, FlagValues, store_tls};
use crate::ha::{LeaseName, PodName, TlsFiles, TlsIdentityFiles};

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HaBackend {
    /// Election through etcd.
    Etcd {
        /// Endpoints, separated by `;` or `,`.
        endpoints: String,
        /// Cluster name, which is a part of the keys.
        cluster: String,
        /// TLS files for etcd; `None` for plain HTTP.
        tls: Option<TlsFiles>,
    },
    /// Election through a Kubernetes Lease.
    Kubernetes {
        /// Namespace and name of the Lease.
        lease: LeaseName,
        /// The pod to label while this master leads.
        pod: Option<PodName>,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HaFlags {
    pub backend: HaBackend,
    /// Address of this master for clients.
    pub address: String,
    /// Address of this master's replication port for other masters.
    pub replication_address: String,
    /// Listen address of the replication port.
    pub replication: SocketAddr,
    /// Files for mutual TLS between masters.
    pub tls: Option<TlsFiles>,
    /// Lease duration: a leader without a renewal in this time loses the leadership.
    pub lease: Duration,
    /// A follower without a frame for this long leaves the in-sync set.
    pub follower_timeout: Duration,
    /// Whether to become leader once without being in sync.
    pub force_leader: bool,
}

impl HaFlags {
    pub(super) fn new(values: &FlagValues) -> Result<Self, FlagError> {
        let rpc = rpc(values)?;
        let replication_port = match values.port("ha_replication_port") {
            0 => rpc.port().wrapping_add(1),
            port => port,
        };
        let backend = backend(values)?;
        let address = match values.optional("ha_address") {
            Some(address) => address,
            None if rpc.ip().is_unspecified() || rpc.port() == 0 => {
                return Err(values.invalid(
                    "ha_address",
                    "the HOST:PORT of this master for clients; or set --rpc_address and --rpc_port",
                ));
            }
            None => rpc.to_string(),
        };
        let host = address.rsplit_once(':').map(|(host, _)| host).filter(|host| !host.is_empty());
        let host = host.ok_or_else(|| values.invalid("ha_address", "HOST:PORT"))?;
        let names = ["ha_replication_ca", "ha_replication_cert", "ha_replication_key"];
        // Without settings of its own, replication uses the files of --store_tls_….
        let tls = tls(values, names)?.or_else(|| store_tls::replication_files(values));
        if tls.as_ref().is_some_and(|files| files.identity.is_none()) {
            return Err(values.invalid(
                "ha_replication_cert",
                "a file: masters authenticate each other with certificates",
            ));
        }
        Ok(Self {
            backend,
            replication_address: format!("{host}:{replication_port}"),
            address,
            replication: SocketAddr::new(rpc.ip(), replication_port),
            tls,
            lease: Duration::from_secs(
                values.number(values.set_name("ha_leader_lease_ttl_sec", "ha_lease_seconds")),
            ),
            follower_timeout: Duration::from_millis(values.milliseconds("ha_follower_timeout").max(100)),
            force_leader: values.is_on("ha_force_leader"),
        })
    }
}

fn backend(values: &FlagValues) -> Result<HaBackend, FlagError> {
    let connection_string = values.optional("ha_backend_connstring");
    match values.text("ha_backend_type") {
        "etcd" => {
            let endpoints = connection_string.or_else(|| values.optional("etcd_endpoints"));
            let endpoints = endpoints.ok_or_else(|| {
                values.invalid("ha_backend_connstring", "the HOST:PORT of etcd with --enable_ha")
            })?;
            let tls = tls(values, ["etcd_ca", "etcd_cert", "etcd_key"])?;
            Ok(HaBackend::Etcd { endpoints, cluster: values.text("cluster_id").to_owned(), tls })
        }
        "k8s" => {
            let lease = connection_string.as_deref().and_then(LeaseName::read);
            let lease = lease.ok_or_else(|| {
                values
                    .invalid("ha_backend_connstring", "a Lease as NAMESPACE/NAME with --ha_backend_type=k8s")
            })?;
            let pod = values.optional("pod_namespace").zip(values.optional("pod_name"));
            Ok(HaBackend::Kubernetes { lease, pod: pod.map(|(namespace, name)| PodName { namespace, name }) })
        }
        _ => Err(values.invalid("ha_backend_type", "etcd or k8s; other backends are not supported")),
    }
}

/// TLS files from three flags: CA certificates, certificate, private key.
fn tls(values: &FlagValues, [ca, cert, key]: [&'static str; 3]) -> Result<Option<TlsFiles>, FlagError> {
    let file = |name| values.optional(name).map(Into::into);
    let identity = match (file(cert), file(key)) {
        (Some(certificate), Some(key)) => Some(TlsIdentityFiles { certificate, key }),
        (None, None) => None,
        (Some(_), None) => return Err(values.invalid(key, "the file with the certificate's private key")),
        (None, Some(_)) => return Err(values.invalid(cert, "the file with the certificate for the key")),
    };
    match (file(ca), identity) {
        (Some(ca), identity) => Ok(Some(TlsFiles { ca, identity, server_name: None })),
        (None, None) => Ok(None),
        (None, Some(_)) => Err(values.invalid(ca, "the file with the CA certificates for the peer")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flags::{MasterInvocation, read};

    fn flags(line: &str, variables: &[(&str, &str)]) -> Result<HaFlags, FlagError> {
        let variable = |name: &str| {
            variables
                .iter()
                .find(|(variable_name, _)| *variable_name == name)
                .map(|(_, value)| (*value).to_owned())
        };
        let line = format!("--enable_ha {line}");
        match read(line.split(' ').filter(|word| !word.is_empty()).map(Into::into), variable)? {
            MasterInvocation::Serve(options) => Ok(options.ha.unwrap()),
            MasterInvocation::PrintText(text) => panic!("{text}"),
        }
    }

    #[test]
    fn with_etcd() {
        let line = "--ha_backend_connstring=a:1;b:2 --rpc_address=10.0.0.1 --rpc_port=50051";
        let ha = flags(line, &[]).unwrap();
        let etcd = |endpoints: &str, tls| HaBackend::Etcd {
            endpoints: endpoints.to_owned(),
            cluster: "mooncake_cluster".to_owned(),
            tls,
        };
        assert_eq!(ha.backend, etcd("a:1;b:2", None));
        assert_eq!(
            (ha.address.as_str(), ha.replication_address.as_str()),
            ("10.0.0.1:50051", "10.0.0.1:50052")
        );
        let line = "--etcd_endpoints=a:1 --ha_address=host:7 --ha_replication_port=9 --etcd_ca=/ca";
        let ha = flags(line, &[]).unwrap();
        assert_eq!((ha.address.as_str(), ha.replication_address.as_str()), ("host:7", "host:9"));
        assert_eq!((ha.replication.to_string().as_str(), &ha.tls), ("0.0.0.0:9", &None));
        assert_eq!(
            ha.backend,
            etcd("a:1", Some(TlsFiles { ca: "/ca".into(), identity: None, server_name: None }))
        );
    }

    #[test]
    fn with_a_lease() {
        let line = "--ha_backend_type=k8s --ha_backend_connstring=llm/store --ha_address=host:7";
        let lease = LeaseName { namespace: "llm".to_owned(), name: "store".to_owned() };
        let backend = |pod| HaBackend::Kubernetes { lease: lease.clone(), pod };
        let pod = |name: &str| Some(PodName { namespace: "llm".to_owned(), name: name.to_owned() });
        assert_eq!(flags(line, &[]).unwrap().backend, backend(None));
        assert_eq!(flags(line, &[("POD_NAME", "m-0")]).unwrap().backend, backend(None));
        let variables = [("POD_NAME", "m-0"), ("POD_NAMESPACE", "llm")];
        assert_eq!(flags(line, &variables).unwrap().backend, backend(pod("m-0")));
        let line = format!("{line} --pod_name=m-1");
        assert_eq!(flags(&line, &variables).unwrap().backend, backend(pod("m-1")));
    }

    #[test]
    fn invalid_flags_are_rejected() {
        let etcd = "--etcd_endpoints=a:1 --ha_address=h:1";
        for (line, expected) in [
            (String::new(), "for --ha_backend_connstring; expected"),
            ("--etcd_endpoints=a:1".to_owned(), "for --ha_address; expected"),
            ("--ha_backend_type=redis".to_owned(), "expected etcd or k8s"),
            ("--ha_backend_type=k8s --ha_backend_connstring=a:1".to_owned(), "NAMESPACE/NAME"),
            ("--ha_backend_type=k8s --etcd_endpoints=a".to_owned(), "for --ha_backend_connstring; expected"),
            (format!("{etcd} --etcd_ca=/ca --etcd_key=/k"), "for --etcd_cert; expected"),
            (format!("{etcd} --etcd_cert=/c --etcd_key=/k"), "for --etcd_ca; expected"),
            (
                format!("{etcd} --ha_replication_ca=/ca --ha_replication_cert=/c"),
                "for --ha_replication_key; expected",
            ),
            (format!("{etcd} --ha_replication_ca=/ca"), "for --ha_replication_cert; expected"),
        ] {
            let error = flags(&line, &[]).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
