//! Asks an engine what it is and whether it can take part.

mod events;
mod hashing;
pub(crate) mod http;
pub(crate) mod report;
pub(crate) mod responses;
mod sglang;
pub(crate) mod sizes;
pub(crate) mod store;
mod version;
mod vllm;

use crate::endpoint::bracketed;
use crate::error::DiscoveryError;
use crate::listing::ListedInstance;
use crate::options::ProbeOptions;
use crate::topology::{BootstrapAddress, EngineFacts, EngineKind, EngineRole};

use self::http::{ProbeError, ProbeResponse, ProbeSession};
use self::report::{ProbeReport, ProbeVerdict};
use self::responses::SglangServerInfo;

/// The bootstrap server's port where neither source nor engine names one: the default of SGLang and of vLLM's Mooncake.
pub(crate) const DEFAULT_BOOTSTRAP_PORT: u16 = 8998;

/// Probes engines; cheap to share.
pub(crate) struct EngineProber {
    client: reqwest::Client,
    api_key: Option<String>,
}

/// What the first exchange told about the engine's kind.
enum ProbedEngineKind {
    Sglang(Box<SglangServerInfo>),
    Vllm { version: String },
}

impl EngineProber {
    pub(crate) fn new(options: &ProbeOptions) -> Result<Self, DiscoveryError> {
        Ok(Self { client: http::client(options)?, api_key: options.api_key.clone() })
    }

    /// Asks everything that decides whether `listed` may be sent traffic.
    pub(crate) async fn probe(&self, listed: &ListedInstance) -> ProbeReport {
        let mut talk = ProbeSession::new(&self.client, self.api_key.as_deref());
        let verdict = match kind(&mut talk, listed).await {
            Ok(ProbedEngineKind::Sglang(info)) => sglang::probe(&mut talk, listed, *info).await,
            Ok(ProbedEngineKind::Vllm { version }) => vllm::probe(&mut talk, listed, version).await,
            Err(trouble) => not_ready(trouble, None),
        };
        ProbeReport { checks: talk.checks, verdict }
    }
}

fn not_ready(trouble: ProbeError, facts: Option<EngineFacts>) -> ProbeVerdict {
    ProbeVerdict::NotReady { reason: trouble.reason, facts, timed_out: trouble.timed_out }
}

/// Finds the engine's kind. The deprecated `/get_server_info` comes last: a vLLM would log one more 404 per probe.
async fn kind(talk: &mut ProbeSession<'_>, listed: &ListedInstance) -> Result<ProbedEngineKind, ProbeError> {
    let declared = listed.declared.engine;
    let mut failed = None;
    if declared != Some(EngineKind::Vllm) {
        match server_info(talk, &listed.url, "/server_info").await {
            Ok(Some(info)) => return Ok(ProbedEngineKind::Sglang(Box::new(info))),
            Ok(None) => {}
            // A vLLM in development mode has this path too, and fails there if it cannot describe its environment.
            Err(trouble) if trouble.server_error && declared.is_none() => failed = Some(trouble),
            Err(trouble) => return Err(trouble),
        }
    }
    if declared != Some(EngineKind::Sglang) {
        match vllm::version(talk, &listed.url).await {
            Ok(Some(version)) => return Ok(ProbedEngineKind::Vllm { version }),
            Ok(None) => {}
            Err(trouble) => return Err(failed.unwrap_or(trouble)),
        }
    }
    if let Some(trouble) = failed {
        return Err(trouble);
    }
    if declared != Some(EngineKind::Vllm)
        && let Some(info) = server_info(talk, &listed.url, "/get_server_info").await?
    {
        return Ok(ProbedEngineKind::Sglang(Box::new(info)));
    }
    let expected = match declared {
        Some(EngineKind::Sglang) => {
            "it does not answer as SGLang (no usable /server_info or /get_server_info)"
        }
        Some(EngineKind::Vllm) => "it does not answer as vLLM (no usable /version)",
        None => "it answers neither as SGLang (/server_info) nor as vLLM (/version)",
    };
    let reason = talk.set_fix(
        format!("{}: {expected}", listed.url),
        "check that the URL is an engine's HTTP port, and `engine` if it is set",
    );
    Err(ProbeError::new(reason))
}

async fn server_info(
    talk: &mut ProbeSession<'_>,
    base: &str,
    path: &str,
) -> Result<Option<SglangServerInfo>, ProbeError> {
    let answer = talk.get(format!("{base}{path}")).await?;
    check_status(talk, &answer)?;
    let info = (answer.status == 200).then(|| SglangServerInfo::parse(&answer.body)).flatten();
    talk.set_conclusion(match &info {
        Some(info) => format!("SGLang {}", info.version.as_deref().unwrap_or("of unknown version")),
        None => "not SGLang's answer".to_owned(),
    });
    Ok(info)
}

/// Refuses the statuses that no other path would answer better.
fn check_status(talk: &mut ProbeSession<'_>, answer: &ProbeResponse) -> Result<(), ProbeError> {
    let ProbeResponse { url, status, .. } = answer;
    match status {
        401 | 403 => Err(ProbeError::new(talk.set_fix(
            format!("GET {url}: HTTP {status}, the engine wants an API key"),
            "set the engine API key of the gateway to the engine's --api-key",
        ))),
        500.. => {
            let reason = talk.set_fix(
                format!("GET {url}: HTTP {status}"),
                "the engine is starting or broken; see its log",
            );
            Err(ProbeError { server_error: true, ..ProbeError::new(reason) })
        }
        _ => Ok(()),
    }
}

/// Served models: declared, else `/v1/models`, else what `fallback` says. And the context length, if told.
async fn models(
    talk: &mut ProbeSession<'_>,
    listed: &ListedInstance,
    fallback: Option<String>,
) -> Result<responses::ServedModels, ProbeError> {
    let answer = talk.get(format!("{}/v1/models", listed.url)).await?;
    check_status(talk, &answer)?;
    let mut models = responses::ServedModels::parse(&answer.body).unwrap_or_default();
    if !listed.declared.models.is_empty() {
        models.names = responses::distinct(listed.declared.models.iter().cloned());
    } else if models.names.is_empty() {
        models.names = responses::distinct(fallback);
    }
    if models.names.is_empty() {
        let reason = talk.set_fix(
            format!("GET {}: HTTP {} names no model", answer.url, answer.status),
            "name the served models with `models`",
        );
        return Err(ProbeError::new(reason));
    }
    talk.set_conclusion(format!("serves {}", models.names.join(", ")));
    Ok(models)
}

/// Where decode engines reach the bootstrap server of a prefill.
fn bootstrap(listed: &ListedInstance, reported: Option<u16>) -> BootstrapAddress {
    let port = listed.declared.bootstrap_port.or(reported).unwrap_or(DEFAULT_BOOTSTRAP_PORT);
    BootstrapAddress { host: listed.host.clone(), port }
}

fn bootstrap_url(bootstrap: &BootstrapAddress, path_and_query: &str) -> String {
    format!("http://{}:{}{path_and_query}", bracketed(&bootstrap.host), bootstrap.port)
}

/// Why an engine in another role than listed cannot be used.
fn role_mismatch(listed: EngineRole, reported: Option<EngineRole>) -> Option<(String, String)> {
    let reported = reported.filter(|reported| *reported != listed)?;
    let started = match reported {
        EngineRole::Plain => "without --disaggregation-mode".to_owned(),
        role => format!("with --disaggregation-mode {role}"),
    };
    let wanted = match listed {
        EngineRole::Plain => "start it without --disaggregation-mode".to_owned(),
        role => format!("start it with --disaggregation-mode {role}"),
    };
    Some((
        format!("listed as {listed}, but the engine runs {started}"),
        format!("list it as {reported}, or {wanted}"),
    ))
}
