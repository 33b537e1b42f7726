//! Which engines should be alike.

use crate::book::EngineBook;
use crate::cluster::{Cluster, ModelIx};
use crate::learn::Learner;
use crate::settings::Settings;

/// Groups engines that serve the same model and so should be alike. A group goes on with what one of its engines has shown before.
pub(super) fn divide(
    cluster: &Cluster,
    engines: &[Option<(EngineBook, usize)>],
    learners: &[Learner],
    settings: &Settings,
) -> (Vec<Learner>, Vec<usize>) {
    let mut groups: Vec<(Option<ModelIx>, Option<Learner>)> = Vec::new();
    let mut kinds = Vec::with_capacity(engines.len());
    for (instance, engine) in cluster.instances().iter().zip(engines) {
        let model = instance.models.first().copied();
        let kind = groups.iter().position(|(known, _)| *known == model).unwrap_or_else(|| {
            groups.push((model, None));
            groups.len() - 1
        });
        kinds.push(kind);
        if let (None, Some((_, old))) = (&groups[kind].1, engine) {
            groups[kind].1 = learners.get(*old).cloned();
        }
    }
    let fresh = || Learner::new(&settings.service_prior, settings.handover_prior_s_per_token);
    (groups.into_iter().map(|(_, learner)| learner.unwrap_or_else(fresh)).collect(), kinds)
}
