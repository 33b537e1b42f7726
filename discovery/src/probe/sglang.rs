//! Probes SGLang engines (0.5.23: `/server_info`, `/model_info`, `/v1/models`, the prefill's bootstrap server).

use super::http::{ProbeError, ProbeSession};
use super::report::ProbeVerdict;
use super::responses::SglangServerInfo;
use super::version::release;
use super::{adapters, bootstrap, bootstrap_url, events, hashing, models, not_ready, role_mismatch, store};
use crate::kv_cache::MAX_RANKS;
use crate::kv_transfer::{BootstrapAddress, KvTransferMethod};
use crate::listing::ListedInstance;
use crate::topology::{EngineFacts, EngineKind, EngineRole};

/// First known release whose Messages take the members that connect a pair. Development builds are newer.
const MESSAGES_IN_PAIRS_SINCE: (u32, u32, u32) = (0, 5, 23);
/// Returns 200 once every rank of the prefill is registered, and 503 before.
const ROUTE_ALL_RANKS: &str =
    "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1";
/// The same query for SGLang before about 0.5.6; newer servers support the one above.
const ROUTE_ALL_RANKS_OLD: &str = "/route?engine_rank=-1&target_dp_group=-1&target_pp_rank=-1";

pub(super) async fn probe(
    session: &mut ProbeSession<'_>,
    listed: &ListedInstance,
    mut info: SglangServerInfo,
) -> ProbeVerdict {
    if (info.disaggregation_mode.is_none() || info.served_model_name.is_none())
        && let Err(error) = complete(session, listed, &mut info).await
    {
        return not_ready(error, None);
    }
    let fallback = info.served_model_name.clone().or_else(|| info.model_path.clone());
    let mut models = match models(session, listed, fallback).await {
        Ok(models) => models,
        Err(error) => return not_ready(error, None),
    };
    let adapters = adapters::sglang(&info, models.adapters);
    if listed.declared.models.is_empty() {
        adapters::add_sglang_names(&mut models.names, &adapters);
    }
    let bootstrap =
        (listed.role == EngineRole::Prefill).then(|| bootstrap(listed, info.disaggregation_bootstrap_port));
    let dp_size = info.dp_size.unwrap_or(1).clamp(1, MAX_RANKS);
    let facts = EngineFacts {
        version: info.version.clone().unwrap_or_default(),
        models: models.names,
        reported_role: info.role(),
        dp_size,
        page_size: info.page_size,
        context_length: info.context_length.or(models.context_length),
        tokenizer: info.tokenizer(),
        transfer: (listed.role != EngineRole::Plain)
            .then(|| KvTransferMethod::SglangBootstrap { bootstrap: bootstrap.clone() }),
        hashing: hashing::sglang(&info),
        events: events::with_declared(listed, dp_size, Some(events::sglang(&info, &listed.host))),
        host_cache: info.enable_hierarchical_cache,
        store: store::sglang(&info, &listed.declared.kv),
        priority_order: info.priority_order(),
        checkpoints: info.checkpoints(),
        adapters,
        pairs_serve_messages: info
            .version
            .as_deref()
            .and_then(release)
            .is_none_or(|release| release >= MESSAGES_IN_PAIRS_SINCE),
        ..EngineFacts::unreported(EngineKind::Sglang)
    };
    if let Some((concluded, fix)) = role_mismatch(listed.role, facts.reported_role) {
        let reason = format!("{}: {}", listed.url, session.set_fix(concluded, fix));
        return not_ready(ProbeError::new(reason), Some(facts));
    }
    if let Some(bootstrap) = bootstrap
        && let Err(error) = all_ranks_registered(session, &bootstrap).await
    {
        return not_ready(error, Some(facts));
    }
    ProbeVerdict::Ready(facts)
}

/// Fills in members that `/server_info` lacks. A missing path is not an error.
async fn complete(
    session: &mut ProbeSession<'_>,
    listed: &ListedInstance,
    info: &mut SglangServerInfo,
) -> Result<(), ProbeError> {
    for path in ["/model_info", "/get_model_info"] {
        let response = session.get(format!("{}{path}", listed.url)).await?;
        if response.status == 200
            && let Some(more) = SglangServerInfo::parse(&response.body)
        {
            session.set_conclusion("completes the response of /server_info");
            info.disaggregation_mode = info.disaggregation_mode.take().or(more.disaggregation_mode);
            info.served_model_name = info.served_model_name.take().or(more.served_model_name);
            info.model_path = info.model_path.take().or(more.model_path);
            info.tokenizer_path = info.tokenizer_path.take().or(more.tokenizer_path);
            return Ok(());
        }
        session.set_conclusion("no usable response");
    }
    Ok(())
}

async fn all_ranks_registered(
    session: &mut ProbeSession<'_>,
    bootstrap: &BootstrapAddress,
) -> Result<(), ProbeError> {
    let mut response = session.get(bootstrap_url(bootstrap, ROUTE_ALL_RANKS)).await.map_err(|error| {
        let reason = session.set_fix(
            error.reason,
            "check --disaggregation-bootstrap-port of the prefill against `bootstrap_port`, and that the port is reachable",
        );
        ProbeError { reason, ..error }
    })?;
    if response.status == 400 {
        session.set_conclusion("an older bootstrap server: retrying with the old query");
        response = session.get(bootstrap_url(bootstrap, ROUTE_ALL_RANKS_OLD)).await?;
    }
    let what = format!("GET {}: HTTP {}", response.url, response.status);
    match response.status {
        200 => {
            session.set_conclusion("all ranks are registered");
            Ok(())
        }
        503 => Err(ProbeError::new(session.set_fix(
            format!("{what}, not all ranks of the prefill are registered"),
            "it is starting; if this persists, see its log for a rank that failed",
        ))),
        _ => Err(ProbeError::new(session.set_fix(
            format!("{what} is no SGLang bootstrap server's response"),
            "check --disaggregation-bootstrap-port of the prefill against `bootstrap_port`",
        ))),
    }
}
