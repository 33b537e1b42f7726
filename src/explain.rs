//! `moongate explain`: the terms behind a routing decision, and the decision of another policy for the same request.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::Args;
use moongate_runtime::{ClientTls, ClientTlsFiles, SecretString, tls_error_hint};
use moongate_scheduler::{DecisionSnapshot, EngineRoute, PolicyName, PolicyVerdict, SchedulableInstance};
use moongate_telemetry::LoggingArgs;
use serde_json::Value;

use crate::settings::invalid_settings;

/// Time limit for the gateway's response.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Flags of `moongate explain`.
#[derive(Debug, Args)]
pub(crate) struct ExplainArgs {
    /// Request id: the x-request-id of the response. Without it, the latest decisions are listed.
    #[arg(value_name = "REQUEST")]
    request: Option<String>,

    /// The gateway's admin address, as host:port, or https://host:port if it has TLS.
    #[arg(long, value_name = "ADDR", env = "MOONGATE_ADMIN", default_value = "127.0.0.1:9000")]
    admin: String,

    /// The gateway's --admin-token, or a key with the scope `admin`.
    #[arg(long, value_name = "TOKEN", env = "MOONGATE_ADMIN_TOKEN", hide_env_values = true)]
    admin_token: Option<SecretString>,

    /// CA certificates (PEM) for a gateway with TLS. Default: the system store.
    #[arg(long, value_name = "FILE", env = "MOONGATE_ADMIN_CA")]
    admin_ca: Option<PathBuf>,

    /// Client certificate (PEM) for a gateway that requires mTLS.
    #[arg(long, value_name = "FILE", env = "MOONGATE_ADMIN_CERT")]
    admin_cert: Option<PathBuf>,

    /// Private key (PEM) for --admin-cert.
    #[arg(long, value_name = "FILE", env = "MOONGATE_ADMIN_KEY")]
    admin_key: Option<PathBuf>,

    /// Expected name in the gateway's certificate. Default: the host in --admin.
    #[arg(long, value_name = "NAME", env = "MOONGATE_ADMIN_TLS_NAME")]
    admin_tls_name: Option<String>,

    /// A saved response of /debug/decisions/REQUEST instead of a gateway.
    #[arg(long, value_name = "FILE", env = "MOONGATE_EXPLAIN_FILE", conflicts_with = "request")]
    file: Option<PathBuf>,

    /// Also show the decision of this policy for the same request.
    #[arg(long, value_name = "NAME", env = "MOONGATE_EXPLAIN_POLICY")]
    policy: Option<PolicyName>,

    /// Print the gateway's response as JSON, which --file accepts.
    #[arg(long, env = "MOONGATE_EXPLAIN_JSON")]
    json: bool,

    #[command(flatten)]
    pub(crate) logs: LoggingArgs,
}

pub(crate) async fn run(command: ExplainArgs) -> anyhow::Result<ExitCode> {
    let response: Value = match &command.file {
        Some(file) => {
            let text = std::fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
            serde_json::from_slice(&text).with_context(|| format!("{} is not JSON", file.display()))?
        }
        None => fetch_decisions(&command).await?,
    };
    let text = if command.json {
        format!("{response}\n")
    } else {
        let decisions = response["decisions"].as_array().context("the JSON has no member `decisions`")?;
        let mut text = String::new();
        for decision in decisions {
            match decision.get("snapshot") {
                None => list(&mut text, decision),
                Some(_) => explain(&mut text, decision, command.policy)?,
            }
        }
        if decisions.is_empty() {
            text.push_str("no decisions yet\n");
        }
        text
    };
    std::io::stdout().write_all(text.as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

async fn fetch_decisions(command: &ExplainArgs) -> anyhow::Result<Value> {
    let id = command.request.as_deref().unwrap_or_default();
    let base = command.admin.trim_end_matches('/');
    let scheme = if base.contains("://") { "" } else { "http://" };
    let mut url = reqwest::Url::parse(&format!("{scheme}{base}/debug/decisions"))
        .with_context(|| format!("--admin {:?} is not host:port", command.admin))?;
    if let (false, Ok(mut path)) = (id.is_empty(), url.path_segments_mut()) {
        path.push(id);
    }
    let client = trust(command)?.http_client().timeout(REQUEST_TIMEOUT).build()?;
    let mut request = client.get(url.clone());
    if let Some(token) = &command.admin_token {
        request = request.bearer_auth(token.expose());
    }
    let response = request.send().await.map_err(|error| {
        let tls_hint = tls_error_hint(&error);
        let hint = tls_hint.map_or_else(|| format!("is --admin {base} right?"), str::to_owned);
        anyhow::Error::from(error).context(format!("cannot reach the gateway; {hint}"))
    })?;
    let status = response.status();
    let body: Value = response.json().await.with_context(|| format!("the response of {url} is not JSON"))?;
    if !status.is_success() {
        bail!("{}", body["error"]["message"].as_str().unwrap_or(status.as_str()));
    }
    Ok(body)
}

/// TLS settings for the gateway's admin address.
fn trust(command: &ExplainArgs) -> anyhow::Result<ClientTls> {
    let identity = [command.admin_cert.as_ref(), command.admin_key.as_ref()];
    let (flags, name) = (["--admin-cert", "--admin-key"], command.admin_tls_name.as_ref());
    let loaded = ClientTlsFiles::from_options(command.admin_ca.as_ref(), identity, name, flags)
        .and_then(ClientTls::load);
    let files = [("--admin-ca", command.admin_ca.as_ref()), (flags[0], identity[0]), (flags[1], identity[1])];
    loaded.map_err(|error| invalid_settings(error.with_flag(&files)))
}

fn list(text: &mut String, decision: &Value) {
    let word = |name: &str| decision[name].as_str().unwrap_or("-").to_owned();
    let _infallible = writeln!(
        text,
        "{}  {} tokens -> {} + {}  {} ({})",
        word("request_id"),
        decision["input_tokens"],
        word("prefill"),
        word("decode"),
        word("reason"),
        word("policy"),
    );
}

fn explain(text: &mut String, decision: &Value, other: Option<PolicyName>) -> anyhow::Result<()> {
    list(text, decision);
    if let (Some(model), Some(alias)) = (decision["model"].as_str(), decision["alias"].as_str()) {
        let _infallible = writeln!(text, "  model {model}, for the alias {alias}");
    }
    let words = |name: &str| {
        let all = decision[name].as_array().into_iter().flatten().filter_map(Value::as_str);
        all.filter(|word| !word.is_empty()).collect::<Vec<_>>().join(", ")
    };
    for (name, label) in [
        ("versions", "versions of these engines"),
        ("unpaired", "without a partner of their version (--pair-versions)"),
        ("suspects", "suspect, since they produce no output"),
    ] {
        let found = words(name);
        if !found.is_empty() {
            let _infallible = writeln!(text, "  {label}: {found}");
        }
    }
    let seconds = |value: &Value| value.as_f64().map_or("-".to_owned(), |value| format!("{value:.3}"));
    let _infallible = writeln!(
        text,
        "  held {} s, first token predicted after {} s\n  {:<32} {:>10} {:>8} {:>8} {:>8} {:>8} {:>8} {:>9} {:>8}  L1/L2/L3 tokens",
        seconds(&decision["queue_wait_s"]),
        seconds(&decision["predicted_ttft_s"]),
        "engine",
        "cost",
        "wait",
        "fetch",
        "service",
        "handover",
        "adapter",
        "duplicate",
        "decode",
    );
    for candidate in decision["candidates"].as_array().into_iter().flatten() {
        let (terms, hits) = (&candidate["terms"], &candidate["hits"]);
        let _infallible = writeln!(
            text,
            "  {:<32} {:>10} {:>8} {:>8} {:>8} {:>8} {:>8} {:>9} {:>8}  {}/{}/{}",
            candidate["instance"].as_str().unwrap_or("-"),
            seconds(&candidate["cost"]),
            seconds(&terms["wait"]),
            seconds(&terms["fetch"]),
            seconds(&terms["service"]),
            seconds(&terms["handover"]),
            seconds(&terms["adapter_load"]),
            seconds(&terms["duplicate"]),
            seconds(&terms["decode"]),
            hits["l1_tokens"],
            hits["l2_tokens"],
            hits["l3_tokens"],
        );
        if let Some(pending @ 1..) = hits["pending_tokens"].as_u64() {
            let _infallible =
                writeln!(text, "    {pending} of its L1 tokens are being computed by earlier requests");
        }
    }
    let snapshot: DecisionSnapshot = serde_json::from_value(decision["snapshot"].clone())
        .context("the snapshot was saved by another release of moongate")?;
    replay(text, &snapshot);
    if let Some(policy) = other {
        replay(text, &DecisionSnapshot { policy, ..snapshot });
    }
    Ok(())
}

/// Appends the policy's decision for the saved state.
fn replay(text: &mut String, snapshot: &DecisionSnapshot) {
    let name = |ix: moongate_scheduler::InstanceIndex| {
        snapshot.instances.get(ix.as_usize()).map_or("?", |instance: &SchedulableInstance| &instance.name)
    };
    let outcome = match snapshot.replay() {
        Ok(PolicyVerdict::Send(decision)) => match decision.route {
            EngineRoute::Pair { prefill, decode, .. } => format!("{} + {}", name(prefill), name(decode)),
            EngineRoute::Single { worker, .. } => name(worker).to_owned(),
        },
        Ok(PolicyVerdict::Defer { until, .. }) => format!("queue for {:.3} s", until - snapshot.now),
        Err(rejection) => format!("reject: {rejection}"),
    };
    let _infallible = writeln!(text, "  replayed with {}: {outcome}", snapshot.policy);
}
