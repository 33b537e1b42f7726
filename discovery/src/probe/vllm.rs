//! Probes vLLM engines (0.32/0.33: `/version`, `/v1/models`, `/kv_event_sources`, `/metrics`, the Mooncake bootstrap's `/query`).

use super::http::{ProbeError, ProbeSession};
use super::report::ProbeVerdict;
use super::responses::{self, VllmMetrics};
use super::{adapters, bootstrap, bootstrap_url, check_status, events, hashing, models, not_ready, store};
use crate::kv_transfer::{BootstrapAddress, KvConnector, KvTransferMethod};
use crate::listing::ListedInstance;
use crate::parse_names::enumerate;
use crate::topology::{EngineFacts, EngineKind, EngineRole};

/// The version, if the server is a vLLM.
pub(super) async fn version(
    session: &mut ProbeSession<'_>,
    base: &str,
) -> Result<Option<String>, ProbeError> {
    let response = session.get(format!("{base}/version")).await?;
    check_status(session, &response)?;
    let version = (response.status == 200).then(|| responses::version(&response.body)).flatten();
    session.set_conclusion(match &version {
        Some(version) => format!("vLLM {version}"),
        None => "not vLLM's response".to_owned(),
    });
    Ok(version)
}

pub(super) async fn probe(
    session: &mut ProbeSession<'_>,
    listed: &ListedInstance,
    version: String,
) -> ProbeVerdict {
    let models = match models(session, listed, None).await {
        Ok(models) => models,
        Err(error) => return not_ready(error, None),
    };
    let sources = events::vllm(session, listed).await;
    // Each rank is a source; the metrics may be disabled.
    let ranks = sources.as_ref().and_then(|sources| u32::try_from(sources.len()).ok());
    let metrics = metrics(session, listed).await;
    let with_store = metrics.store || listed.declared.connector == Some(KvConnector::Store);
    let kv = &listed.declared.kv;
    let mut facts = EngineFacts {
        hashing: hashing::vllm(&metrics, &version, kv),
        adapters: adapters::vllm(&version, models.adapters),
        version,
        models: models.names,
        dp_size: metrics.ranks.max(ranks).unwrap_or(1).max(1),
        page_size: metrics.block_size,
        context_length: models.context_length,
        tokenizer: responses::tokenizer(models.root.as_deref()),
        host_cache: metrics.offloading,
        speculates: metrics.speculates,
        store: with_store.then(|| store::vllm(models.root.as_deref(), kv)),
        ..EngineFacts::unreported(EngineKind::Vllm)
    };
    facts.events = events::with_declared(listed, facts.dp_size, sources);
    if listed.role == EngineRole::Plain {
        return ProbeVerdict::Ready(facts);
    }
    match transfer(session, listed, &metrics).await {
        Ok(Some(transfer)) => {
            if let KvTransferMethod::VllmMooncake { engine_ids, .. } = &transfer
                && let Ok(ranks) = u32::try_from(engine_ids.len())
            {
                facts.dp_size = facts.dp_size.max(ranks);
                facts.events = events::with_declared(listed, facts.dp_size, facts.events);
            }
            facts.transfer = Some(transfer);
            ProbeVerdict::Ready(facts)
        }
        Ok(None) => {
            let reason = session.set_fix(
                format!("{}: this vLLM {} does not report its KV connector", listed.url, listed.role),
                format!("set `connector` to {}", enumerate(KvConnector::CHOICES, "or")),
            );
            ProbeVerdict::NoConnector { facts, reason }
        }
        Err(error) => not_ready(error, Some(facts)),
    }
}

/// Metrics may be disabled; the result is then empty.
async fn metrics(session: &mut ProbeSession<'_>, listed: &ListedInstance) -> VllmMetrics {
    match session.get(format!("{}/metrics", listed.url)).await {
        Ok(response) if response.status == 200 => {
            let metrics = VllmMetrics::parse(&response.body);
            session.set_conclusion(match metrics.connector() {
                Some(connector) => format!("metrics of the connector {connector:?}"),
                None => "no connector's metrics".to_owned(),
            });
            metrics
        }
        Ok(_) | Err(_) => {
            session.set_conclusion("does not report the connector");
            VllmMetrics::default()
        }
    }
}

/// A declared connector has precedence. Otherwise a bootstrap server that responds means Mooncake, else the metrics decide.
async fn transfer(
    session: &mut ProbeSession<'_>,
    listed: &ListedInstance,
    metrics: &VllmMetrics,
) -> Result<Option<KvTransferMethod>, ProbeError> {
    let prefill = listed.role == EngineRole::Prefill;
    match listed.declared.connector {
        Some(KvConnector::Mooncake) if prefill => return mooncake_prefill(session, listed).await.map(Some),
        Some(connector) => return Ok(Some(connector.into())),
        None => {}
    }
    let by_metrics = metrics.connector();
    // Another engine on this host may own the default port, so NIXL's metrics have precedence over probing that port.
    let guess_port = listed.declared.bootstrap_port.is_some() || by_metrics != Some(KvConnector::Nixl);
    if prefill && guess_port {
        match mooncake_prefill(session, listed).await {
            Ok(transfer) => return Ok(Some(transfer)),
            Err(error) if by_metrics == Some(KvConnector::Mooncake) => return Err(error),
            // Until 0.32 Mooncake has no metrics: a bootstrap server that times out may be the one that responded last time.
            Err(error) if by_metrics.is_none() && error.timed_out => return Err(error),
            Err(_) => {}
        }
    }
    Ok(by_metrics.map(KvTransferMethod::from))
}

async fn mooncake_prefill(
    session: &mut ProbeSession<'_>,
    listed: &ListedInstance,
) -> Result<KvTransferMethod, ProbeError> {
    let bootstrap: BootstrapAddress = bootstrap(listed, None);
    let response = session.get(bootstrap_url(&bootstrap, "/query")).await.map_err(|error| {
        let reason = session.set_fix(
            error.reason,
            "for MooncakeConnector check VLLM_MOONCAKE_BOOTSTRAP_PORT of the prefill against `bootstrap_port`; for another connector set `connector`",
        );
        ProbeError { reason, ..error }
    })?;
    let what = format!("GET {}: HTTP {}", response.url, response.status);
    let ids = (response.status == 200).then(|| responses::engine_ids(&response.body)).flatten();
    match ids {
        Some(engine_ids) if !engine_ids.is_empty() => {
            session.set_conclusion(format!(
                "Mooncake bootstrap server with {} data-parallel rank(s)",
                engine_ids.len()
            ));
            Ok(KvTransferMethod::VllmMooncake { bootstrap: Some(bootstrap), engine_ids })
        }
        Some(_) => Err(ProbeError::new(session.set_fix(
            format!("{what}, no engine is registered at the Mooncake bootstrap server"),
            "it is starting; if this persists, see the prefill's log",
        ))),
        None => Err(ProbeError::new(session.set_fix(
            format!("{what} is no Mooncake bootstrap server's response"),
            "check VLLM_MOONCAKE_BOOTSTRAP_PORT of the prefill against `bootstrap_port`, or set `connector`",
        ))),
    }
}
