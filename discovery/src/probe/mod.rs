//! Asks an engine what it is and whether it can take part.

pub(crate) mod answers;
mod events;
mod hashing;
pub(crate) mod http;
pub(crate) mod report;
mod sglang;
pub(crate) mod sizes;
pub(crate) mod store;
mod version;
mod vllm;

use crate::endpoint::bracketed;
use crate::error::DiscoveryError;
use crate::listing::Listed;
use crate::options::ProbeOptions;
use crate::topology::{Bootstrap, Engine, EngineFacts, Role};

use self::answers::ServerInfo;
use self::http::{Answer, Conversation, Trouble};
use self::report::{ProbeReport, Verdict};

/// The bootstrap server's port where neither source nor engine names one: the default of SGLang and of vLLM's Mooncake.
pub(crate) const DEFAULT_BOOTSTRAP_PORT: u16 = 8998;

/// Probes engines; cheap to share.
pub(crate) struct Prober {
    client: reqwest::Client,
    api_key: Option<String>,
}

/// What the first exchange told about the engine's kind.
enum Kind {
    Sglang(Box<ServerInfo>),
    Vllm { version: String },
}

impl Prober {
    pub(crate) fn new(options: &ProbeOptions) -> Result<Self, DiscoveryError> {
        Ok(Self { client: http::client(options)?, api_key: options.api_key.clone() })
    }

    /// Asks everything that decides whether `listed` may be sent traffic.
    pub(crate) async fn probe(&self, listed: &Listed) -> ProbeReport {
        let mut talk = Conversation::new(&self.client, self.api_key.as_deref());
        let verdict = match kind(&mut talk, listed).await {
            Ok(Kind::Sglang(info)) => sglang::probe(&mut talk, listed, *info).await,
            Ok(Kind::Vllm { version }) => vllm::probe(&mut talk, listed, version).await,
            Err(trouble) => not_ready(trouble, None),
        };
        ProbeReport { checks: talk.checks, verdict }
    }
}

fn not_ready(trouble: Trouble, facts: Option<EngineFacts>) -> Verdict {
    Verdict::NotReady { reason: trouble.reason, facts, timed_out: trouble.timed_out }
}

/// Finds the engine's kind. The deprecated `/get_server_info` comes last: a vLLM would log one more 404 per probe.
async fn kind(talk: &mut Conversation<'_>, listed: &Listed) -> Result<Kind, Trouble> {
    let declared = listed.declared.engine;
    let mut failed = None;
    if declared != Some(Engine::Vllm) {
        match server_info(talk, &listed.url, "/server_info").await {
            Ok(Some(info)) => return Ok(Kind::Sglang(Box::new(info))),
            Ok(None) => {}
            // A vLLM in development mode has this path too, and fails there if it cannot describe its environment.
            Err(trouble) if trouble.server_error && declared.is_none() => failed = Some(trouble),
            Err(trouble) => return Err(trouble),
        }
    }
    if declared != Some(Engine::Sglang) {
        match vllm::version(talk, &listed.url).await {
            Ok(Some(version)) => return Ok(Kind::Vllm { version }),
            Ok(None) => {}
            Err(trouble) => return Err(failed.unwrap_or(trouble)),
        }
    }
    if let Some(trouble) = failed {
        return Err(trouble);
    }
    if declared != Some(Engine::Vllm)
        && let Some(info) = server_info(talk, &listed.url, "/get_server_info").await?
    {
        return Ok(Kind::Sglang(Box::new(info)));
    }
    let expected = match declared {
        Some(Engine::Sglang) => "it does not answer as SGLang (no usable /server_info or /get_server_info)",
        Some(Engine::Vllm) => "it does not answer as vLLM (no usable /version)",
        None => "it answers neither as SGLang (/server_info) nor as vLLM (/version)",
    };
    let reason = talk.mend(
        format!("{}: {expected}", listed.url),
        "check that the URL is an engine's HTTP port, and `engine` if it is set",
    );
    Err(Trouble::new(reason))
}

async fn server_info(
    talk: &mut Conversation<'_>,
    base: &str,
    path: &str,
) -> Result<Option<ServerInfo>, Trouble> {
    let answer = talk.get(format!("{base}{path}")).await?;
    usable(talk, &answer)?;
    let info = (answer.status == 200).then(|| ServerInfo::parse(&answer.body)).flatten();
    talk.concluded(match &info {
        Some(info) => format!("SGLang {}", info.version.as_deref().unwrap_or("of unknown version")),
        None => "not SGLang's answer".to_owned(),
    });
    Ok(info)
}

/// Refuses the statuses that no other path would answer better.
fn usable(talk: &mut Conversation<'_>, answer: &Answer) -> Result<(), Trouble> {
    let Answer { url, status, .. } = answer;
    match status {
        401 | 403 => Err(Trouble::new(talk.mend(
            format!("GET {url}: HTTP {status}, the engine wants an API key"),
            "set the engine API key of the gateway to the engine's --api-key",
        ))),
        500.. => {
            let reason = talk
                .mend(format!("GET {url}: HTTP {status}"), "the engine is starting or broken; see its log");
            Err(Trouble { server_error: true, ..Trouble::new(reason) })
        }
        _ => Ok(()),
    }
}

/// Served models: declared, else `/v1/models`, else what `fallback` says. And the context length, if told.
async fn models(
    talk: &mut Conversation<'_>,
    listed: &Listed,
    fallback: Option<String>,
) -> Result<answers::Models, Trouble> {
    let answer = talk.get(format!("{}/v1/models", listed.url)).await?;
    usable(talk, &answer)?;
    let mut models = answers::Models::parse(&answer.body).unwrap_or_default();
    if !listed.declared.models.is_empty() {
        models.names = answers::distinct(listed.declared.models.iter().cloned());
    } else if models.names.is_empty() {
        models.names = answers::distinct(fallback);
    }
    if models.names.is_empty() {
        let reason = talk.mend(
            format!("GET {}: HTTP {} names no model", answer.url, answer.status),
            "name the served models with `models`",
        );
        return Err(Trouble::new(reason));
    }
    talk.concluded(format!("serves {}", models.names.join(", ")));
    Ok(models)
}

/// Where decode engines reach the bootstrap server of a prefill.
fn bootstrap(listed: &Listed, reported: Option<u16>) -> Bootstrap {
    let port = listed.declared.bootstrap_port.or(reported).unwrap_or(DEFAULT_BOOTSTRAP_PORT);
    Bootstrap { host: listed.host.clone(), port }
}

fn bootstrap_url(bootstrap: &Bootstrap, path_and_query: &str) -> String {
    format!("http://{}:{}{path_and_query}", bracketed(&bootstrap.host), bootstrap.port)
}

/// Why an engine in another role than listed cannot be used.
fn role_mismatch(listed: Role, reported: Option<Role>) -> Option<(String, String)> {
    let reported = reported.filter(|reported| *reported != listed)?;
    let started = match reported {
        Role::Plain => "without --disaggregation-mode".to_owned(),
        role => format!("with --disaggregation-mode {role}"),
    };
    let wanted = match listed {
        Role::Plain => "start it without --disaggregation-mode".to_owned(),
        role => format!("start it with --disaggregation-mode {role}"),
    };
    Some((
        format!("listed as {listed}, but the engine runs {started}"),
        format!("list it as {reported}, or {wanted}"),
    ))
}
