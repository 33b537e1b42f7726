//! What kube-proxy and CoreDNS do: Services are reached at their addresses and found by their names.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::runtime::reflector::{self, Store};
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client};
use tokio::net::{TcpListener, TcpStream};

/// Between two looks at which Services there are.
const PAUSE: Duration = Duration::from_millis(100);
const SERVICE_OF_SLICE: &str = "kubernetes.io/service-name";

/// Where a pod takes part in a Service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ServiceEndpoint {
    pub(crate) hostname: Option<String>,
    pub(crate) address: Ipv4Addr,
}

/// All Services of the cluster.
#[derive(Clone)]
pub(crate) struct ServiceProxy {
    services: Store<Service>,
    slices: Store<EndpointSlice>,
    /// Where the API server really is: the Service `kubernetes` has no endpoints.
    api_server: SocketAddr,
    round_robin: Arc<AtomicUsize>,
}

/// A store that follows what the API server has.
fn followed<K>(client: Client) -> Store<K>
where
    K: kube::Resource<DynamicType = ()> + Clone + std::fmt::Debug + Send + Sync + 'static,
    K: serde::de::DeserializeOwned,
{
    let (reader, writer) = reflector::store();
    let watched = watcher(Api::<K>::all(client), watcher::Config::default());
    let mut events = Box::pin(reflector::reflector(writer, watched.default_backoff()));
    tokio::spawn(async move { while events.next().await.is_some() {} });
    reader
}

impl ServiceProxy {
    /// Follows all Services and serves each at its address, and their names at the cluster's DNS.
    pub(crate) async fn start(client: &Client, api_server: SocketAddr) -> Self {
        let services = Self {
            services: followed(client.clone()),
            slices: followed(client.clone()),
            api_server,
            round_robin: Arc::default(),
        };
        services.services.wait_until_ready().await.unwrap();
        services.slices.wait_until_ready().await.unwrap();
        tokio::spawn(services.clone().listen());
        super::dns::start(services.clone()).await;
        services
    }

    /// The Service of this name, if there is one.
    pub(crate) fn get(&self, namespace: &str, name: &str) -> Option<Arc<Service>> {
        self.services.find(|service| {
            service.metadata.name.as_deref() == Some(name)
                && service.metadata.namespace.as_deref() == Some(namespace)
        })
    }

    /// Ready endpoints with the number of this port. Without a port, whatever their ports.
    pub(crate) fn endpoints(
        &self,
        namespace: &str,
        name: &str,
        port: Option<&str>,
    ) -> Vec<(ServiceEndpoint, u16)> {
        let mut found = Vec::new();
        for slice in self.slices.state() {
            let labels = slice.metadata.labels.iter().flatten();
            let mut service =
                labels.filter(|(key, _)| *key == SERVICE_OF_SLICE).map(|(_, name)| name.as_str());
            if slice.metadata.namespace.as_deref() != Some(namespace) || service.next() != Some(name) {
                continue;
            }
            let mut ports = slice.ports.iter().flatten();
            let number = match port {
                None => Some(0),
                Some(port) => ports.find(|one| one.name.as_deref() == Some(port)).and_then(|one| one.port),
            };
            let Some(number) = number else { continue };
            let ready = |ready: Option<bool>| ready != Some(false);
            let endpoints = slice
                .endpoints
                .iter()
                .filter(|one| ready(one.conditions.as_ref().and_then(|conditions| conditions.ready)));
            for one in endpoints {
                let addresses = one.addresses.iter().filter_map(|address| address.parse().ok());
                found.extend(addresses.map(|address| {
                    (
                        ServiceEndpoint { hostname: one.hostname.clone(), address },
                        u16::try_from(number).unwrap(),
                    )
                }));
            }
        }
        found
    }

    /// Listens at the address of every Service there is and will be.
    async fn listen(self) {
        let mut listening: HashMap<SocketAddr, tokio::task::JoinHandle<()>> = HashMap::new();
        loop {
            let mut wanted = HashMap::new();
            for service in self.services.state() {
                let spec = service.spec.clone().unwrap_or_default();
                let Some(Ok(address)) = spec.cluster_ip.map(|address| address.parse::<Ipv4Addr>()) else {
                    continue;
                };
                for port in spec.ports.into_iter().flatten() {
                    let at = SocketAddr::from((address, u16::try_from(port.port).unwrap()));
                    wanted.insert(at, (Arc::clone(&service), port.name.unwrap_or_default()));
                }
            }
            listening.retain(|at, task| {
                let stays = wanted.contains_key(at);
                if !stays {
                    task.abort();
                }
                stays
            });
            for (at, (service, port)) in wanted {
                if let Entry::Vacant(entry) = listening.entry(at) {
                    let listener = TcpListener::bind(at).await.unwrap();
                    entry.insert(tokio::spawn(self.clone().accept(listener, service, port)));
                }
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    async fn accept(self, listener: TcpListener, service: Arc<Service>, port: String) {
        let name = service.metadata.name.clone().unwrap();
        let namespace = service.metadata.namespace.clone().unwrap();
        while let Ok((stream, _)) = listener.accept().await {
            let at = match (namespace.as_str(), name.as_str()) {
                ("default", "kubernetes") => Some(self.api_server),
                _ => {
                    let endpoints = self.endpoints(&namespace, &name, Some(&port));
                    let turn = self.round_robin.fetch_add(1, Ordering::Relaxed);
                    let one = (!endpoints.is_empty()).then(|| endpoints[turn % endpoints.len()].clone());
                    one.map(|(endpoint, port)| SocketAddr::from((endpoint.address, port)))
                }
            };
            // Without an endpoint the connection is refused, here by its end.
            if let Some(at) = at {
                tokio::spawn(join(stream, at));
            }
        }
    }
}

/// Passes everything on, until both sides have ended.
async fn join(mut stream: TcpStream, to: SocketAddr) {
    let Ok(mut other) = TcpStream::connect(to).await else { return };
    let _ = stream.set_nodelay(true).and(other.set_nodelay(true));
    // However it ends, both are closed.
    let _ = tokio::io::copy_bidirectional(&mut stream, &mut other).await;
}
