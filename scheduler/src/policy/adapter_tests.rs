//! Where each policy sends a request for a LoRA adapter.

use super::fixture::PolicyFixture;
use super::*;
use crate::decision::CostTerm;
use crate::fleet::InstanceIndex;

/// Four prefills and two decodes. The adapter is loaded on one of each.
fn fixture() -> PolicyFixture {
    let mut fixture = PolicyFixture::new(4).with_prompt(&[1, 2, 3]);
    fixture.set_adapter_loaded_on(&[2, 5]);
    fixture
}

#[test]
fn every_policy_prefers_engines_with_the_adapter() {
    for name in PolicyName::ALL {
        let mut fixture = fixture();
        let mut policy = name.build(&SchedulerOptions::default());
        for step in 0..20 {
            fixture.entropy = name_hash::splitmix64(step);
            let route = fixture.decision(&mut *policy).route;
            let chosen = (route.prefill_instance(), route.decode_instance());
            assert_eq!(chosen, (InstanceIndex(2), InstanceIndex(5)), "{name}");
        }
    }
}

#[test]
fn an_adapter_that_no_engine_has_is_loaded_by_any() {
    for name in PolicyName::ALL {
        let mut fixture = fixture();
        fixture.set_adapter_loaded_on(&[]);
        let mut policy = name.build(&SchedulerOptions::default());
        let decision = fixture.decision(&mut *policy);
        assert!(decision.expected_ttft >= 1.0, "{name}: {decision:?}");
    }
}

#[test]
fn adapter_without_an_available_engine_is_loaded_elsewhere() {
    for name in PolicyName::ALL {
        let mut fixture = fixture();
        fixture.loads[2].available = false;
        fixture.loads[5].available = false;
        let route = fixture.decision(&mut *name.build(&SchedulerOptions::default())).route;
        assert_ne!(route.prefill_instance(), InstanceIndex(2), "{name}");
        assert_eq!(route.decode_instance(), InstanceIndex(4), "{name}");
    }
}

#[test]
fn a_load_is_a_term_of_the_predictive_price() {
    let fixture = fixture();
    let decision = fixture.decision(&mut *PolicyName::Predictive.build(&SchedulerOptions::default()));
    let loads = decision.explanation.terms.iter().map(|terms| terms.adapter_load);
    assert_eq!(loads.collect::<Vec<_>>(), [1.0, 1.0, 0.0, 1.0]);
    let candidates = &decision.explanation.candidates;
    assert_eq!(candidates[0].leading_term, CostTerm::AdapterLoad);
    assert_ne!(candidates[2].leading_term, CostTerm::AdapterLoad);
    assert!((candidates[0].cost - candidates[2].cost - 1.0).abs() < 1e-9, "{candidates:?}");
}
