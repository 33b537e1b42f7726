//! Probes an engine: its kind, its facts, and whether it is ready for traffic.

mod adapters;
mod events;
mod hashing;
pub(crate) mod http;
pub(crate) mod options;
pub(crate) mod report;
mod responses;
mod sglang;
pub(crate) mod sizes;
mod store;
mod version;
mod vllm;

use crate::endpoint::bracketed;
use crate::error::DiscoveryError;
use crate::kv_transfer::BootstrapAddress;
use crate::listing::ListedInstance;
use crate::topology::{EngineFacts, EngineKind, EngineRole};

use self::http::{ProbeError, ProbeResponse, ProbeSession};
use self::options::ProbeOptions;
use self::report::{ProbeReport, ProbeVerdict};
use self::responses::SglangServerInfo;

/// The bootstrap server's port if neither source nor engine names one: the default of SGLang and of vLLM's Mooncake.
pub(crate) const DEFAULT_BOOTSTRAP_PORT: u16 = 8998;

/// Probes engines over a shared HTTP client.
pub(crate) struct EngineProber {
    client: reqwest::Client,
    api_key: Option<String>,
}

/// The engine's kind, with the response that identified it.
enum ProbedEngineKind {
    Sglang(Box<SglangServerInfo>),
    Vllm { version: String },
}

impl EngineProber {
    pub(crate) fn new(options: &ProbeOptions) -> Result<Self, DiscoveryError> {
        Ok(Self { client: http::client(options)?, api_key: options.api_key.clone() })
    }

    /// Sends all requests that determine whether the gateway may route to `listed`.
    pub(crate) async fn probe(&self, listed: &ListedInstance) -> ProbeReport {
        let mut session = ProbeSession::new(&self.client, self.api_key.as_deref());
        let verdict = match kind(&mut session, listed).await {
            Ok(ProbedEngineKind::Sglang(info)) => sglang::probe(&mut session, listed, *info).await,
            Ok(ProbedEngineKind::Vllm { version }) => vllm::probe(&mut session, listed, version).await,
            Err(error) => not_ready(error, None),
        };
        ProbeReport { checks: session.checks, verdict }
    }
}

fn not_ready(error: ProbeError, facts: Option<EngineFacts>) -> ProbeVerdict {
    ProbeVerdict::NotReady { reason: error.reason, facts, timed_out: error.timed_out }
}

/// Determines the engine's kind. The deprecated `/get_server_info` comes last: a vLLM would log one more 404 per probe.
async fn kind(
    session: &mut ProbeSession<'_>,
    listed: &ListedInstance,
) -> Result<ProbedEngineKind, ProbeError> {
    let declared = listed.declared.engine;
    let mut failed = None;
    if declared != Some(EngineKind::Vllm) {
        match server_info(session, &listed.url, "/server_info").await {
            Ok(Some(info)) => return Ok(ProbedEngineKind::Sglang(Box::new(info))),
            Ok(None) => {}
            // A vLLM in development mode has this path too, and returns 500 if it cannot describe its environment.
            Err(error) if error.server_error && declared.is_none() => failed = Some(error),
            Err(error) => return Err(error),
        }
    }
    if declared != Some(EngineKind::Sglang) {
        match vllm::version(session, &listed.url).await {
            Ok(Some(version)) => return Ok(ProbedEngineKind::Vllm { version }),
            Ok(None) => {}
            Err(error) => return Err(failed.unwrap_or(error)),
        }
    }
    if let Some(error) = failed {
        return Err(error);
    }
    if declared != Some(EngineKind::Vllm)
        && let Some(info) = server_info(session, &listed.url, "/get_server_info").await?
    {
        return Ok(ProbedEngineKind::Sglang(Box::new(info)));
    }
    let expected = match declared {
        Some(EngineKind::Sglang) => {
            "it does not respond as SGLang (no usable /server_info or /get_server_info)"
        }
        Some(EngineKind::Vllm) => "it does not respond as vLLM (no usable /version)",
        None => "it responds neither as SGLang (/server_info) nor as vLLM (/version)",
    };
    let reason = session.set_fix(
        format!("{}: {expected}", listed.url),
        "check that the URL is an engine's HTTP port, and `engine` if it is set",
    );
    Err(ProbeError::new(reason))
}

async fn server_info(
    session: &mut ProbeSession<'_>,
    base: &str,
    path: &str,
) -> Result<Option<SglangServerInfo>, ProbeError> {
    let response = session.get(format!("{base}{path}")).await?;
    check_status(session, &response)?;
    let info = (response.status == 200).then(|| SglangServerInfo::parse(&response.body)).flatten();
    session.set_conclusion(match &info {
        Some(info) => format!("SGLang {}", info.version.as_deref().unwrap_or("of unknown version")),
        None => "not SGLang's response".to_owned(),
    });
    Ok(info)
}

/// Fails for statuses for which trying another path would not help.
fn check_status(session: &mut ProbeSession<'_>, response: &ProbeResponse) -> Result<(), ProbeError> {
    let ProbeResponse { url, status, .. } = response;
    match status {
        401 | 403 => Err(ProbeError::new(session.set_fix(
            format!("GET {url}: HTTP {status}, the engine requires an API key"),
            "set the gateway's --engine-api-key to the engine's --api-key",
        ))),
        500.. => {
            let reason = session.set_fix(
                format!("GET {url}: HTTP {status}"),
                "the engine is starting or has failed; see its log",
            );
            Err(ProbeError { server_error: true, ..ProbeError::new(reason) })
        }
        _ => Ok(()),
    }
}

/// Served models: the declared ones, else those of `/v1/models`, else `fallback`; with the context length, if reported.
async fn models(
    session: &mut ProbeSession<'_>,
    listed: &ListedInstance,
    fallback: Option<String>,
) -> Result<responses::ServedModels, ProbeError> {
    let response = session.get(format!("{}/v1/models", listed.url)).await?;
    check_status(session, &response)?;
    let mut models = responses::ServedModels::parse(&response.body).unwrap_or_default();
    if !listed.declared.models.is_empty() {
        models.names = responses::distinct(listed.declared.models.iter().cloned());
    } else if models.names.is_empty() {
        models.names = responses::distinct(fallback);
    }
    if models.names.is_empty() {
        let reason = session.set_fix(
            format!("GET {}: HTTP {} names no model", response.url, response.status),
            "list the served models in `models`",
        );
        return Err(ProbeError::new(reason));
    }
    session.set_conclusion(format!("serves {}", models.names.join(", ")));
    Ok(models)
}

/// Address at which decode engines reach the bootstrap server of a prefill.
fn bootstrap(listed: &ListedInstance, reported: Option<u16>) -> BootstrapAddress {
    let port = listed.declared.bootstrap_port.or(reported).unwrap_or(DEFAULT_BOOTSTRAP_PORT);
    BootstrapAddress { host: listed.host.clone(), port }
}

fn bootstrap_url(bootstrap: &BootstrapAddress, path_and_query: &str) -> String {
    format!("http://{}:{}{path_and_query}", bracketed(&bootstrap.host), bootstrap.port)
}

/// The problem and the fix for an engine that runs in another role than listed; `None` if the roles match.
fn role_mismatch(listed: EngineRole, reported: Option<EngineRole>) -> Option<(String, String)> {
    let reported = reported.filter(|reported| *reported != listed)?;
    let started = match reported {
        EngineRole::Plain => "without --disaggregation-mode".to_owned(),
        role => format!("with --disaggregation-mode {role}"),
    };
    let restart = match listed {
        EngineRole::Plain => "start it without --disaggregation-mode".to_owned(),
        role => format!("start it with --disaggregation-mode {role}"),
    };
    Some((
        format!("listed as {listed}, but the engine runs {started}"),
        format!("list it as {reported}, or {restart}"),
    ))
}
