//! What SGLang says about itself (0.5.23: `/server_info`, `/model_info`, `/v1/models`, the prefill's bootstrap server).

use super::http::{ProbeError, ProbeSession};
use super::report::ProbeVerdict;
use super::responses::SglangServerInfo;
use super::{bootstrap, bootstrap_url, events, hashing, models, not_ready, role_mismatch, store};
use crate::listing::ListedInstance;
use crate::topology::{BootstrapAddress, EngineFacts, EngineKind, EngineRole, KvTransferMethod};

/// Answers 200 once every rank of the prefill is registered, and 503 before.
const ROUTE_ALL_RANKS: &str =
    "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1";
/// The same question as SGLang before 0.5.6 or so asks it; a newer server answers the one above.
const ROUTE_ALL_RANKS_OLD: &str = "/route?engine_rank=-1&target_dp_group=-1&target_pp_rank=-1";

pub(super) async fn probe(
    talk: &mut ProbeSession<'_>,
    listed: &ListedInstance,
    mut info: SglangServerInfo,
) -> ProbeVerdict {
    if (info.disaggregation_mode.is_none() || info.served_model_name.is_none())
        && let Err(trouble) = complete(talk, listed, &mut info).await
    {
        return not_ready(trouble, None);
    }
    let fallback = info.served_model_name.clone().or_else(|| info.model_path.clone());
    let models = match models(talk, listed, fallback).await {
        Ok(models) => models,
        Err(trouble) => return not_ready(trouble, None),
    };
    let bootstrap =
        (listed.role == EngineRole::Prefill).then(|| bootstrap(listed, info.disaggregation_bootstrap_port));
    let dp_size = info.dp_size.unwrap_or(1).max(1);
    let facts = EngineFacts {
        engine: EngineKind::Sglang,
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
    };
    if let Some((concluded, mend)) = role_mismatch(listed.role, facts.reported_role) {
        let reason = format!("{}: {}", listed.url, talk.set_fix(concluded, mend));
        return not_ready(ProbeError::new(reason), Some(facts));
    }
    if let Some(bootstrap) = bootstrap
        && let Err(trouble) = all_ranks_registered(talk, &bootstrap).await
    {
        return not_ready(trouble, Some(facts));
    }
    ProbeVerdict::Ready(facts)
}

/// Fills in what the first answer lacks; that there is no such path is no trouble.
async fn complete(
    talk: &mut ProbeSession<'_>,
    listed: &ListedInstance,
    info: &mut SglangServerInfo,
) -> Result<(), ProbeError> {
    for path in ["/model_info", "/get_model_info"] {
        let answer = talk.get(format!("{}{path}", listed.url)).await?;
        if answer.status == 200
            && let Some(more) = SglangServerInfo::parse(&answer.body)
        {
            talk.set_conclusion("completes the server's answer");
            info.disaggregation_mode = info.disaggregation_mode.take().or(more.disaggregation_mode);
            info.served_model_name = info.served_model_name.take().or(more.served_model_name);
            info.model_path = info.model_path.take().or(more.model_path);
            info.tokenizer_path = info.tokenizer_path.take().or(more.tokenizer_path);
            return Ok(());
        }
        talk.set_conclusion("tells nothing");
    }
    Ok(())
}

async fn all_ranks_registered(
    talk: &mut ProbeSession<'_>,
    bootstrap: &BootstrapAddress,
) -> Result<(), ProbeError> {
    let mut answer = talk.get(bootstrap_url(bootstrap, ROUTE_ALL_RANKS)).await.map_err(|trouble| {
        let reason = talk.set_fix(
            trouble.reason,
            "check --disaggregation-bootstrap-port of the prefill against `bootstrap_port`, and that the port is reachable",
        );
        ProbeError { reason, ..trouble }
    })?;
    if answer.status == 400 {
        talk.set_conclusion("an older bootstrap server: asked in the old way");
        answer = talk.get(bootstrap_url(bootstrap, ROUTE_ALL_RANKS_OLD)).await?;
    }
    let what = format!("GET {}: HTTP {}", answer.url, answer.status);
    match answer.status {
        200 => {
            talk.set_conclusion("all ranks are registered");
            Ok(())
        }
        503 => Err(ProbeError::new(talk.set_fix(
            format!("{what}, not all ranks of the prefill are registered"),
            "it is starting; if this stays, see its log for a rank that failed",
        ))),
        _ => Err(ProbeError::new(talk.set_fix(
            format!("{what} is no SGLang bootstrap server's answer"),
            "check --disaggregation-bootstrap-port of the prefill against `bootstrap_port`",
        ))),
    }
}
