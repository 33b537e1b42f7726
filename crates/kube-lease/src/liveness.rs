//! Expiry of a Lease by the observer's own clock: the times in a Lease are written by other clocks, which may be wrong.

use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;

use crate::{holder, transitions};

/// The fields that change with every renewal or change of the holder.
#[derive(Clone, Debug, PartialEq, Eq)]
struct LeaseRenewal {
    lease: Option<String>,
    transitions: i32,
    holder: Option<String>,
    time: Option<MicroTime>,
}

/// Decides whether the holder of a Lease is alive.
#[derive(Debug, Default)]
pub(crate) struct LeaseLivenessTracker {
    /// The last observed renewal, and when it was first received.
    last: Option<(LeaseRenewal, Instant)>,
}

impl LeaseLivenessTracker {
    /// Whether the holder of this Lease is alive: it renewed within its lease duration. The Lease was requested at `requested` and
    /// received at `received`. A response only describes a moment before it was received, so the time without a renewal runs from the
    /// first response with a change to the last request whose response had no other.
    pub(crate) fn is_alive(
        &mut self,
        lease: &Lease,
        requested: Instant,
        received: Instant,
        min_duration: Duration,
    ) -> bool {
        let spec = lease.spec.as_ref();
        let renewal = LeaseRenewal {
            lease: lease.metadata.uid.clone(),
            transitions: transitions(lease),
            holder: holder(lease).map(str::to_owned),
            time: spec.and_then(|spec| spec.renew_time.clone()),
        };
        let seconds = spec.and_then(|spec| spec.lease_duration_seconds).unwrap_or(0);
        let duration = Duration::from_secs(u64::try_from(seconds).unwrap_or(0)).max(min_duration);
        match &self.last {
            _ if renewal.holder.is_none() => false,
            Some((last, since)) if *last == renewal => requested.saturating_duration_since(*since) < duration,
            _ => {
                self.last = Some((renewal, received));
                true
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{acquire, empty, release, renew};

    fn at(second: i64) -> MicroTime {
        MicroTime(k8s_openapi::jiff::Timestamp::from_second(second).unwrap())
    }

    #[test]
    fn expiry_is_measured_by_the_observers_clock() {
        let (mut tracker, mut lease) = (LeaseLivenessTracker::default(), empty("store"));
        let start = Instant::now();
        let ms = Duration::from_millis;
        let mut is_alive = |lease: &Lease, requested, received| {
            tracker.is_alive(lease, start + ms(requested), start + ms(received), ms(2000))
        };
        assert!(!is_alive(&lease, 0, 1), "no holder");
        acquire(&mut lease, "a", 3, 1, at(1));
        // The lease lasts three seconds, regardless of the times in it.
        assert!(is_alive(&lease, 0, 500));
        assert!(is_alive(&lease, 3499, 9000), "the response may describe the time of the request");
        assert!(!is_alive(&lease, 3500, 3501));
        renew(&mut lease, at(0));
        assert!(
            is_alive(&lease, 3600, 3700) && is_alive(&lease, 6699, 6700) && !is_alive(&lease, 6700, 6701)
        );
        acquire(&mut lease, "a", 3, 2, at(0));
        assert!(is_alive(&lease, 6800, 6900), "another term");
        lease.metadata.uid = Some("another".to_owned());
        assert!(is_alive(&lease, 20_000, 20_001));
        lease.spec.as_mut().unwrap().lease_duration_seconds = Some(-1);
        assert!(is_alive(&lease, 22_000, 22_001) && !is_alive(&lease, 22_001, 22_002));
        release(&mut lease);
        assert!(!is_alive(&lease, 22_002, 22_003));
    }
}
