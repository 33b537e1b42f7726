//! Tenants and priorities of requests.

use moongate_scheduler::BACKGROUND_PRIORITY;

use super::settings::SimulationOptions;
use super::workload::SimulatedWorkload;
use crate::engine::tokens::mix;

/// Tenant and priority of a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RequestClass {
    /// Position in [`SimulationOptions::tenants`].
    pub tenant: Option<usize>,
    pub urgent: bool,
    /// Runs only when it delays no others, as a line of a batch does.
    pub background: bool,
}

impl RequestClass {
    pub(crate) fn priority(self) -> i32 {
        if self.background { BACKGROUND_PRIORITY } else { i32::from(self.urgent) }
    }
}

/// Gives every conversation a tenant and a priority, selected by the seed: the same for every policy.
pub(crate) fn assign_classes(workload: &mut SimulatedWorkload, settings: &SimulationOptions, seed: u64) {
    for request in &mut workload.requests {
        let mut random = fastrand::Rng::with_seed(mix(request.session, seed ^ 0x7e4a_4700));
        request.class = RequestClass {
            tenant: select(&settings.tenants, random.f64()),
            urgent: random.f64() < settings.urgent,
            background: request.class.background,
        };
    }
}

/// The tenant at `position`, from 0 to 1, of all shares; `None` without tenants.
fn select(shares: &[f64], position: f64) -> Option<usize> {
    let mut remaining = position * shares.iter().sum::<f64>();
    let reached = shares.iter().position(|share| {
        remaining -= share;
        remaining < 0.0
    });
    reached.or(shares.len().checked_sub(1))
}

#[cfg(test)]
mod tests {
    use super::super::workload::{ArrivalMode, NewRequest, WorkloadBuilder};
    use super::*;

    #[test]
    fn conversations_are_divided_by_share_and_never_split() {
        let mut builder = WorkloadBuilder::new(512);
        for number in 0..20_000 {
            builder.push(NewRequest {
                recorded_s: 0.0,
                input_tokens: 1,
                output_tokens: 1,
                block_ids: &[],
                predecessor: None,
                session: number / 2,
            });
        }
        let mut workload = builder.finish(ArrivalMode::Open);
        let settings = SimulationOptions {
            tenants: vec![7.0, 1.0, 2.0],
            urgent: 0.1,
            ..SimulationOptions::eight_plus_four()
        };
        assign_classes(&mut workload, &settings, 1);
        let classes: Vec<RequestClass> = workload.requests.iter().map(|request| request.class).collect();
        assert!(classes.chunks(2).all(|turns| turns[0] == turns[1]));
        let share = |is: &dyn Fn(&RequestClass) -> bool| {
            classes.iter().filter(|class| is(class)).count() as f64 / classes.len() as f64
        };
        for (tenant, expected) in [0.7, 0.1, 0.2].into_iter().enumerate() {
            let share = share(&|class| class.tenant == Some(tenant));
            assert!((share - expected).abs() < 0.02, "{tenant}: {share}");
        }
        let urgent = share(&|class| class.urgent && class.tenant == Some(0));
        assert!((urgent - 0.07).abs() < 0.01, "{urgent}");
        assign_classes(&mut workload, &settings, 2);
        assert!(workload.requests.iter().zip(&classes).any(|(request, class)| request.class != *class));
        assert_eq!(select(&[], 0.5), None);
    }
}
