//! What vLLM says about itself (0.32/0.33: `/version`, `/v1/models`, `/kv_event_sources`, `/metrics`, the Mooncake bootstrap's `/query`).

use std::collections::BTreeMap;

use super::http::{ProbeError, ProbeSession};
use super::report::ProbeVerdict;
use super::responses::{self, VllmMetrics};
use super::{bootstrap, bootstrap_url, check_status, events, hashing, models, not_ready, store};
use crate::listing::ListedInstance;
use crate::topology::{BootstrapAddress, EngineFacts, EngineKind, EngineRole, KvConnector, KvTransferMethod};

const SET_CONNECTOR: &str = "set `connector` to nixl, mooncake or store";

/// The version, if the server is a vLLM.
pub(super) async fn version(talk: &mut ProbeSession<'_>, base: &str) -> Result<Option<String>, ProbeError> {
    let answer = talk.get(format!("{base}/version")).await?;
    check_status(talk, &answer)?;
    let version = (answer.status == 200).then(|| responses::version(&answer.body)).flatten();
    talk.set_conclusion(match &version {
        Some(version) => format!("vLLM {version}"),
        None => "not vLLM's answer".to_owned(),
    });
    Ok(version)
}

pub(super) async fn probe(
    talk: &mut ProbeSession<'_>,
    listed: &ListedInstance,
    version: String,
) -> ProbeVerdict {
    let models = match models(talk, listed, None).await {
        Ok(models) => models,
        Err(trouble) => return not_ready(trouble, None),
    };
    let sources = events::vllm(talk, listed).await;
    let metrics = metrics(talk, listed).await;
    let with_store = metrics.store || listed.declared.connector == Some(KvConnector::Store);
    let kv = &listed.declared.kv;
    let mut facts = EngineFacts {
        engine: EngineKind::Vllm,
        hashing: hashing::vllm(&metrics, &version, kv),
        version,
        models: models.names,
        reported_role: None,
        dp_size: metrics.ranks.unwrap_or(1),
        page_size: metrics.block_size,
        context_length: models.context_length,
        tokenizer: responses::tokenizer(models.root.as_deref()),
        transfer: None,
        events: None,
        host_cache: metrics.offloading,
        store: with_store.then(|| store::vllm(models.root.as_deref(), kv)),
        priority_order: None,
    };
    facts.events = events::with_declared(listed, facts.dp_size, sources);
    if listed.role == EngineRole::Plain {
        return ProbeVerdict::Ready(facts);
    }
    match transfer(talk, listed, &metrics).await {
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
            let reason = talk.set_fix(
                format!("{}: this vLLM {} does not tell its KV connector", listed.url, listed.role),
                SET_CONNECTOR,
            );
            ProbeVerdict::NoConnector { facts, reason }
        }
        Err(trouble) => not_ready(trouble, Some(facts)),
    }
}

/// Metrics may be off; then they tell nothing.
async fn metrics(talk: &mut ProbeSession<'_>, listed: &ListedInstance) -> VllmMetrics {
    match talk.get(format!("{}/metrics", listed.url)).await {
        Ok(answer) if answer.status == 200 => {
            let metrics = VllmMetrics::parse(&answer.body);
            talk.set_conclusion(match metrics.connector() {
                Some(connector) => format!("metrics of the connector {connector:?}"),
                None => "no connector's metrics".to_owned(),
            });
            metrics
        }
        Ok(_) | Err(_) => {
            talk.set_conclusion("tells nothing about the connector");
            VllmMetrics::default()
        }
    }
}

/// Declared wins. Undeclared: a bootstrap server that answers means Mooncake, otherwise the metrics decide.
async fn transfer(
    talk: &mut ProbeSession<'_>,
    listed: &ListedInstance,
    metrics: &VllmMetrics,
) -> Result<Option<KvTransferMethod>, ProbeError> {
    let prefill = listed.role == EngineRole::Prefill;
    match listed.declared.connector {
        Some(KvConnector::Nixl) => return Ok(Some(KvTransferMethod::VllmNixl)),
        Some(KvConnector::Store) => return Ok(Some(KvTransferMethod::VllmStore)),
        Some(KvConnector::Mooncake) if prefill => return mooncake_prefill(talk, listed).await.map(Some),
        Some(KvConnector::Mooncake) => return Ok(Some(mooncake_decode())),
        None => {}
    }
    let by_metrics = metrics.connector();
    // Another engine on this host may own the default port, so NIXL's own word comes before a guess at it.
    let guess_port = listed.declared.bootstrap_port.is_some() || by_metrics != Some(KvConnector::Nixl);
    if prefill && guess_port {
        match mooncake_prefill(talk, listed).await {
            Ok(transfer) => return Ok(Some(transfer)),
            Err(trouble) if by_metrics == Some(KvConnector::Mooncake) => return Err(trouble),
            // Until 0.32 Mooncake has no metrics: a silent server may be the one that answered last time.
            Err(trouble) if by_metrics.is_none() && trouble.timed_out => return Err(trouble),
            Err(_) => {}
        }
    }
    Ok(by_metrics.map(|connector| match connector {
        KvConnector::Nixl => KvTransferMethod::VllmNixl,
        KvConnector::Store => KvTransferMethod::VllmStore,
        KvConnector::Mooncake => mooncake_decode(),
    }))
}

fn mooncake_decode() -> KvTransferMethod {
    KvTransferMethod::VllmMooncake { bootstrap: None, engine_ids: BTreeMap::new() }
}

async fn mooncake_prefill(
    talk: &mut ProbeSession<'_>,
    listed: &ListedInstance,
) -> Result<KvTransferMethod, ProbeError> {
    let bootstrap: BootstrapAddress = bootstrap(listed, None);
    let answer = talk.get(bootstrap_url(&bootstrap, "/query")).await.map_err(|trouble| {
        let reason = talk.set_fix(
            trouble.reason,
            "for MooncakeConnector check VLLM_MOONCAKE_BOOTSTRAP_PORT of the prefill against `bootstrap_port`; for another connector set `connector`",
        );
        ProbeError { reason, ..trouble }
    })?;
    let what = format!("GET {}: HTTP {}", answer.url, answer.status);
    let ids = (answer.status == 200).then(|| responses::engine_ids(&answer.body)).flatten();
    match ids {
        Some(engine_ids) if !engine_ids.is_empty() => {
            talk.set_conclusion(format!(
                "Mooncake bootstrap server with {} data-parallel rank(s)",
                engine_ids.len()
            ));
            Ok(KvTransferMethod::VllmMooncake { bootstrap: Some(bootstrap), engine_ids })
        }
        Some(_) => Err(ProbeError::new(talk.set_fix(
            format!("{what}, no engine is registered at the Mooncake bootstrap server"),
            "it is starting; if this stays, see the prefill's log",
        ))),
        None => Err(ProbeError::new(talk.set_fix(
            format!("{what} is no Mooncake bootstrap server's answer"),
            "check VLLM_MOONCAKE_BOOTSTRAP_PORT of the prefill against `bootstrap_port`, or set `connector`",
        ))),
    }
}
