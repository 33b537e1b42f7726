//! Reads the metrics of all gateways of a deployment.

use std::collections::BTreeMap;
use std::error::Error;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use moongate_runtime::{ClientTls, plain_http_client, tls_error_hint};
use reqwest::header::HOST;
use reqwest::{Client, StatusCode};
use url::{Host, Url};

use crate::gateway_metrics::{GatewaySample, NotGatewayMetrics};

/// Time limit of one scrape.
const SCRAPE_TIMEOUT: Duration = Duration::from_secs(3);
/// Largest response in bytes.
const MAX_RESPONSE_BYTES: usize = 32 << 20;
/// Largest announced length for which memory is reserved.
const MAX_RESERVED_BYTES: u64 = 1 << 20;
/// How long the addresses of a host are used. A failed scrape looks them up again.
const ADDRESS_LIFETIME: Duration = Duration::from_secs(15);
/// Most addresses of all hosts of a deployment.
const MAX_ADDRESSES: usize = 256;

/// Samples of all gateways, by URL and address.
pub(crate) type ScrapeRound = BTreeMap<GatewayAddress, Result<GatewaySample, ScrapeError>>;

/// One gateway: a URL, and an address of its host; `None` if the host has no address.
pub(crate) type GatewayAddress = (String, Option<SocketAddr>);

/// Why a gateway has no sample.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum ScrapeError {
    #[error("{host} has no address: {problem}")]
    NoAddress { host: String, problem: String },
    /// The host has more addresses than are scraped.
    #[error("the gateways have more than {MAX_ADDRESSES} addresses")]
    TooManyAddresses,
    #[error("{0}")]
    Transport(String),
    #[error("HTTP {0}; metrics must be open without authentication (--admin-open of the gateway)")]
    Status(StatusCode),
    #[error("the response has more than {MAX_RESPONSE_BYTES} bytes")]
    TooLarge,
    #[error(transparent)]
    Content(#[from] NotGatewayMetrics),
}

impl From<reqwest::Error> for ScrapeError {
    fn from(error: reqwest::Error) -> Self {
        Self::Transport(root_cause(&error))
    }
}

/// Clients for gateways with and without TLS, shared by all deployments.
#[derive(Debug, Clone)]
pub(crate) struct GatewayClients {
    plain: Client,
    tls: ClientTls,
}

impl GatewayClients {
    /// Clients with these settings for `https://` URLs.
    ///
    /// # Errors
    /// When the HTTP client cannot be created.
    pub(crate) fn new(tls: ClientTls) -> reqwest::Result<Self> {
        let plain = plain_http_client().redirect(reqwest::redirect::Policy::none()).timeout(SCRAPE_TIMEOUT);
        Ok(Self { plain: plain.build()?, tls })
    }

    /// A client that connects to this address of the URL's host. For plain HTTP the address is in the URL instead.
    fn for_address(&self, url: &Url, address: SocketAddr) -> reqwest::Result<Client> {
        match (url.scheme(), url.host_str()) {
            ("https", Some(host)) => {
                let client = self.tls.http_client().redirect(reqwest::redirect::Policy::none());
                client.timeout(SCRAPE_TIMEOUT).resolve(host, address).build()
            }
            _ => Ok(self.plain.clone()),
        }
    }
}

/// Scrapes the gateways of one deployment.
pub(crate) struct GatewayScraper {
    clients: GatewayClients,
    urls: Vec<Url>,
    resolved: Option<(Instant, Vec<ResolvedGateway>)>,
}

struct ResolvedGateway {
    address: GatewayAddress,
    /// Until the next lookup, an error is that of every scrape.
    target: Result<ScrapeRequest, ScrapeError>,
}

struct ScrapeRequest {
    client: Client,
    url: Url,
    host: String,
}

impl GatewayScraper {
    pub(crate) fn new(clients: GatewayClients, urls: Vec<Url>) -> Self {
        Self { clients, urls, resolved: None }
    }

    /// Reads the metrics of all gateways at the same time.
    pub(crate) async fn scrape(&mut self) -> ScrapeRound {
        let recent = self.resolved.take().filter(|(since, _)| since.elapsed() < ADDRESS_LIFETIME);
        let (since, gateways) = match recent {
            Some(resolved) => resolved,
            None => (Instant::now(), self.resolve().await),
        };
        let samples = join_all(gateways.iter().map(|gateway| gateway.scrape())).await;
        let round: ScrapeRound =
            gateways.iter().map(|gateway| gateway.address.clone()).zip(samples).collect();
        if round.values().all(Result::is_ok) {
            self.resolved = Some((since, gateways));
        }
        round
    }

    async fn resolve(&self) -> Vec<ResolvedGateway> {
        let lookups = self.urls.iter().map(|url| async move { (url, addresses(url).await) });
        let mut gateways = Vec::new();
        for (url, found) in join_all(lookups).await {
            let name = url.to_string();
            match found {
                Ok(addresses) => gateways.extend(addresses.into_iter().map(|address| ResolvedGateway {
                    address: (name.clone(), Some(address)),
                    target: self.request(url, address).map_err(ScrapeError::from),
                })),
                Err(error) => {
                    let host = url.host_str().unwrap_or_default().to_owned();
                    let error = ScrapeError::NoAddress { host, problem: error.to_string() };
                    gateways.push(ResolvedGateway { address: (name, None), target: Err(error) });
                }
            }
        }
        if gateways.len() > MAX_ADDRESSES {
            gateways.truncate(MAX_ADDRESSES - 1);
            let target = Err(ScrapeError::TooManyAddresses);
            gateways.push(ResolvedGateway { address: (String::new(), None), target });
        }
        gateways
    }

    fn request(&self, url: &Url, address: SocketAddr) -> reqwest::Result<ScrapeRequest> {
        let client = self.clients.for_address(url, address)?;
        let host = url.host_str().unwrap_or_default();
        let host = url.port().map_or_else(|| host.to_owned(), |port| format!("{host}:{port}"));
        let mut url = url.clone();
        // A client for TLS has the address, and needs the name in the URL.
        if url.scheme() == "http" && url.set_ip_host(address.ip()).is_ok() {
            // Refused only by URLs without a host.
            let _accepted = url.set_port(Some(address.port()));
        }
        Ok(ScrapeRequest { client, url, host })
    }
}

impl ResolvedGateway {
    async fn scrape(&self) -> Result<GatewaySample, ScrapeError> {
        let ScrapeRequest { client, url, host } = self.target.as_ref().map_err(Clone::clone)?;
        let mut response = client.get(url.clone()).header(HOST, host).send().await?;
        if response.status() != StatusCode::OK {
            return Err(ScrapeError::Status(response.status()));
        }
        let length = response.content_length().unwrap_or(0).min(MAX_RESERVED_BYTES);
        let mut body = Vec::with_capacity(usize::try_from(length).unwrap_or(0));
        while let Some(chunk) = response.chunk().await? {
            if body.len() + chunk.len() > MAX_RESPONSE_BYTES {
                return Err(ScrapeError::TooLarge);
            }
            body.extend_from_slice(&chunk);
        }
        Ok(GatewaySample::parse(&body)?)
    }
}

/// All addresses of the URL's host, at least one.
async fn addresses(url: &Url) -> std::io::Result<Vec<SocketAddr>> {
    let port = url.port_or_known_default().unwrap_or(80);
    let mut addresses: Vec<SocketAddr> = match url.host() {
        Some(Host::Ipv4(address)) => vec![(address, port).into()],
        Some(Host::Ipv6(address)) => vec![(address, port).into()],
        Some(Host::Domain(name)) => tokio::net::lookup_host((name, port)).await?.collect(),
        None => Vec::new(),
    };
    addresses.sort_unstable();
    addresses.dedup();
    if addresses.is_empty() {
        return Err(std::io::Error::new(std::io::ErrorKind::NotFound, "the lookup found none"));
    }
    Ok(addresses)
}

/// The innermost cause, which is more specific than the outer ones, with a hint for errors of TLS.
fn root_cause(error: &(dyn Error + 'static)) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    match tls_error_hint(error) {
        Some(hint) => format!("{cause}; {hint}"),
        None => cause.to_string(),
    }
}
