//! `moongate doctor`: checks the settings of a gateway against its environment, and prints a fix for each problem.

mod cache;
mod running_gateway;

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use moongate_discovery::{
    DiscoveryOptions, EngineFacts, EngineRole, InstanceReadiness, KvTransferMethod, ProbeOptions,
    ProbeVerdict, StaticInstance, Topology, probe_once,
};
use moongate_gateway::{
    DiscoverySource, GatewayOptions, check_model_folders, check_shared_queue, exposures, prediction_gaps,
};
use moongate_runtime::config::{EffectiveSetting, SettingOrigin};
use moongate_runtime::{Supervisor, config};
use moongate_telemetry::{LoggingArgs, TelemetryArgs, Tracer};

use crate::output::print;

/// How long engines found by RBG or Kubernetes may take to become ready.
const DISCOVERY_TIMEOUT: Duration = Duration::from_secs(8);

/// Flags of `moongate doctor`: those of the gateway to check.
#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    #[command(flatten)]
    options: GatewayOptions,
    #[command(flatten)]
    telemetry: TelemetryArgs,
    #[command(flatten)]
    pub(crate) logs: LoggingArgs,
}

/// The report of all checks as text, and the number of problems in it.
#[derive(Debug, Default)]
struct DoctorReport {
    text: String,
    problems: usize,
}

impl DoctorReport {
    fn section(&mut self, title: &str) {
        let gap = if self.text.is_empty() { "" } else { "\n" };
        let _infallible = writeln!(self.text, "{gap}{title}");
    }

    fn ok(&mut self, what: &str) {
        let _infallible = writeln!(self.text, "  ok    {what}");
    }

    fn note(&mut self, what: &str) {
        let _infallible = writeln!(self.text, "        {what}");
    }

    fn problem(&mut self, what: &str, fix: &str) {
        self.problems += 1;
        let _infallible = writeln!(self.text, "  ERROR {what}");
        let _infallible = writeln!(self.text, "        fix: {fix}");
    }
}

/// Runs all checks and prints the report. The exit code is 1 if there is a problem.
pub(crate) async fn run(command: DoctorArgs, supervisor: Supervisor) -> anyhow::Result<ExitCode> {
    let mut findings = DoctorReport::default();
    findings.section("Settings (only those that are not defaults)");
    match config::effective_settings::<crate::MoongateArgs>(std::env::args_os()) {
        Ok(settings) => show_settings(&mut findings, &settings),
        Err(error) => findings.problem(&error.to_string(), "correct the named setting"),
    }
    findings.section("Addresses");
    check_address(&mut findings, "listen", command.options.listen);
    check_address(&mut findings, "admin-listen", command.options.admin_listen);

    check_files(&mut findings, &command);
    let engines = check_engines(&mut findings, &command.options, &supervisor).await;
    check_fleet(&mut findings, &engines);
    advise_on_cache(&mut findings, &engines);
    running_gateway::check(&mut findings, &command.options).await;
    let problems = findings.problems;
    findings.section(&match problems {
        0 => "No problems found.".to_owned(),
        1 => "1 problem.".to_owned(),
        problems => format!("{problems} problems."),
    });
    print(findings.text.trim_end())?;
    Ok(if problems == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn show_settings(findings: &mut DoctorReport, settings: &[EffectiveSetting]) {
    let changed: Vec<_> =
        settings.iter().filter(|setting| setting.origin != SettingOrigin::Default).collect();
    if changed.is_empty() {
        findings.note("all are defaults");
    }
    for EffectiveSetting { key, value, origin, .. } in changed {
        findings.ok(&format!("{key} = {} (from {origin})", value.as_deref().unwrap_or("unset")));
    }
}

fn check_address(findings: &mut DoctorReport, name: &str, address: SocketAddr) {
    match std::net::TcpListener::bind(address) {
        Ok(_) => findings.ok(&format!("--{name} {address} is free")),
        Err(error) => findings.problem(
            &format!("--{name} {address}: {error}"),
            "choose another port, or stop the process that listens there (not needed if it is this gateway, already running)",
        ),
    }
}

/// Checks the files that the gateway reads at start.
fn check_files(findings: &mut DoctorReport, command: &DoctorArgs) {
    let guards = exposures(&command.options).err().map(|error| error.to_string());
    let models = check_model_folders(&command.options).err().map(|error| error.to_string());
    let aliases = command.options.model_aliases.check().err().map(|error| error.to_string());
    let adapters = command.options.lora_adapters.check().err().map(|error| error.to_string());
    let traces = Tracer::start(&command.telemetry, "moongate-gateway").err().map(|error| error.to_string());
    let queue = check_shared_queue(&command.options).err().map(|error| error.to_string());
    let problems: Vec<String> =
        [guards, models, aliases, adapters, queue, traces].into_iter().flatten().collect();
    if !problems.is_empty() {
        findings.section("Files");
    }
    for problem in problems {
        findings.problem(&problem, "correct the named setting, or the file");
    }
}

fn static_instances(findings: &mut DoctorReport, options: &GatewayOptions) -> Vec<StaticInstance> {
    let instances = options.engines.static_instances();
    if instances.is_empty()
        && options.engines.instances_file.is_none()
        && options.engines.discovery == DiscoverySource::Static
    {
        findings.section("Engines");
        findings.problem(
            "no engine is configured",
            "set --prefill and --decode (or --worker), --instances-file FILE, or --discovery rbg|kubernetes",
        );
    }
    instances
}

/// A usable engine, for the check of the fleet.
struct UsableEngine {
    role: EngineRole,
    facts: EngineFacts,
}

/// Checks the engines given by flags and those found by discovery.
async fn check_engines(
    findings: &mut DoctorReport,
    options: &GatewayOptions,
    supervisor: &Supervisor,
) -> Vec<UsableEngine> {
    let instances = static_instances(findings, options);
    let trust = match options.engines.engine_tls.trust() {
        Ok(trust) => trust,
        Err(error) => {
            findings.section("TLS towards engines");
            findings.problem(&error.to_string(), "correct the named setting");
            return Vec::new();
        }
    };
    let mut discovery = options.engines.discovery_options(&trust);
    let mut engines = Vec::new();
    for instance in &instances {
        engines.extend(check_engine(findings, instance, &discovery.probe).await);
    }
    if options.engines.discovery != DiscoverySource::Static || options.engines.instances_file.is_some() {
        discovery.instances.clear();
        engines.extend(check_discovery(findings, discovery, supervisor).await);
    }
    engines
}

async fn check_engine(
    findings: &mut DoctorReport,
    instance: &StaticInstance,
    probing: &ProbeOptions,
) -> Option<UsableEngine> {
    findings.section(&format!("Engine {} ({})", instance.url, instance.role));
    let report = match probe_once(instance, probing).await {
        Ok(report) => report,
        Err(error) => {
            findings.problem(&error.to_string(), "correct the engine's address");
            return None;
        }
    };
    for check in &report.checks {
        let line =
            format!("GET {} -> {} in {:.0?}: {}", check.url, check.outcome, check.duration, check.conclusion);
        findings.note(&line);
    }
    match report.verdict {
        ProbeVerdict::Ready(facts) => {
            findings.ok(&describe(&facts));
            describe_cache(findings, &facts);
            Some(UsableEngine { role: instance.role, facts })
        }
        ProbeVerdict::NoConnector { facts, reason } => {
            findings.note(&reason);
            describe_cache(findings, &facts);
            Some(UsableEngine { role: instance.role, facts })
        }
        ProbeVerdict::NotReady { reason, .. } => {
            let advice = report.checks.iter().rev().find_map(|check| check.fix.as_deref());
            findings.problem(&reason, advice.unwrap_or("correct the cause named above"));
            None
        }
    }
}

/// Checks the engines of a file, RBG or Kubernetes, as reported by discovery within [`DISCOVERY_TIMEOUT`].
async fn check_discovery(
    findings: &mut DoctorReport,
    discovery: DiscoveryOptions,
    supervisor: &Supervisor,
) -> Vec<UsableEngine> {
    findings.section("Discovery");
    let mut topology = match moongate_discovery::start(discovery, supervisor).await {
        Ok(topology) => topology,
        Err(error) => {
            findings.problem(&error.to_string(), "correct the named cause, or choose another --discovery");
            return Vec::new();
        }
    };
    let settled = |topology: &Topology| {
        !topology.instances.is_empty()
            && topology.instances.iter().all(|instance| instance.usable_facts().is_some())
    };
    drop(tokio::time::timeout(DISCOVERY_TIMEOUT, topology.wait_for(settled)).await);
    let topology = topology.current();
    if topology.instances.is_empty() {
        findings.problem(
            "no engine was found",
            "check the role names, labels and namespace that discovery looks for",
        );
    }
    let mut usable = Vec::new();
    for instance in &topology.instances {
        let name = format!("{} {} at {}", instance.role, instance.id, instance.url);
        match (&instance.readiness, instance.usable_facts()) {
            (_, Some(facts)) => {
                findings.ok(&format!("{name}: {}", describe(facts)));
                describe_cache(findings, facts);
                usable.push(UsableEngine { role: instance.role, facts: facts.clone() });
            }
            (InstanceReadiness::NotReady { reason }, None) => findings.problem(&name, reason),
            (InstanceReadiness::Ready, None) => {
                findings
                    .problem(&name, "the engine has not responded yet; run doctor again in a few seconds");
            }
        }
    }
    usable
}

fn describe_cache(findings: &mut DoctorReport, facts: &EngineFacts) {
    findings.note(&cache::describe(facts));
    for gap in prediction_gaps(facts) {
        findings.note(&format!("not predicted: {}", gap.message));
    }
}

fn describe(facts: &EngineFacts) -> String {
    let engine = facts.engine.title();
    let transfer = facts.transfer.as_ref().and_then(KvTransferMethod::description);
    let transfer = transfer.map(|text| format!(", {text}")).unwrap_or_default();
    format!("{engine} {} serves {} (dp {}{transfer})", facts.version, facts.models.join(", "), facts.dp_size)
}

fn check_fleet(findings: &mut DoctorReport, engines: &[UsableEngine]) {
    findings.section("Fleet");
    let count = |role: EngineRole| engines.iter().filter(|engine| engine.role == role).count();
    let (prefills, decodes, plain) =
        (count(EngineRole::Prefill), count(EngineRole::Decode), count(EngineRole::Plain));
    let mut models: Vec<&String> = engines.iter().flat_map(|engine| &engine.facts.models).collect();
    models.sort_unstable();
    models.dedup();
    for model in models {
        let serving = |role: EngineRole| {
            engines.iter().filter(move |engine| engine.role == role && engine.facts.models.contains(model))
        };
        let pairs = serving(EngineRole::Prefill)
            .flat_map(|p| serving(EngineRole::Decode).filter(move |d| d.facts.engine == p.facts.engine))
            .count();
        let alone = serving(EngineRole::Plain).count();
        if pairs + alone > 0 {
            findings.ok(&format!("{model}: {pairs} prefill/decode pairs, {alone} plain workers"));
        } else {
            findings.problem(
                &format!("{model} cannot be served: its engines are {prefills} prefill, {decodes} decode, {plain} plain"),
                "a model needs a prefill and a decode of the same engine kind, or a plain worker",
            );
        }
    }
    if engines.is_empty() {
        findings.problem("no engine is usable", "fix the problems above");
    }
}

/// Decode engines are excluded: they receive a prompt's KV cache from a prefill engine, and are not selected by cache hits.
fn advise_on_cache(findings: &mut DoctorReport, engines: &[UsableEngine]) {
    let computing = engines.iter().filter(|engine| engine.role != EngineRole::Decode);
    let advice = cache::advice(computing.map(|engine| &engine.facts));
    if advice.is_empty() {
        return;
    }
    findings.section("Needed to predict cache hits (optional: requests are served without it)");
    for text in advice {
        findings.note(&text);
    }
}
