//! A Kubernetes Lease as the coordinator's storage: its fields, and how they change.
//!
//! - `spec.holderIdentity`: the leader's RPC address, as Mooncake's master writes it. Empty: there is no leader.
//! - `spec.leaseTransitions`: the leader's term. It is also higher than every earlier revision of the in-sync set.
//! - Annotations of Moongate's master only: the address of the leader's replication port, the in-sync set, and the revision of
//!   that set.
//!
//! Nothing here does I/O.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};

use super::coordinator::{Candidacy, CoordinationError, ElectedLeader, ElectionView};
use super::member::{InSyncSet, read_in_sync, write_in_sync};

const REPLICATION: &str = "moongate.io/replication";
const IN_SYNC: &str = "moongate.io/in-sync";
const REVISION: &str = "moongate.io/in-sync-revision";
/// A new Lease starts with the term "seconds from this time (2020-01-01) to its creation", so that terms of a deleted Lease are not
/// reused.
const EPOCH: i64 = 1_577_836_800;

fn invalid_lease(what: &str) -> CoordinationError {
    CoordinationError(format!("the Lease has an unknown {what}"))
}

/// A Lease without a holder.
pub(super) fn empty(name: &str) -> Lease {
    let metadata = ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() };
    Lease { metadata, spec: Some(LeaseSpec::default()) }
}

fn annotation<'a>(lease: &'a Lease, name: &str) -> Option<&'a str> {
    lease.metadata.annotations.as_ref()?.get(name).map(String::as_str)
}

fn annotations(lease: &mut Lease) -> &mut BTreeMap<String, String> {
    lease.metadata.annotations.get_or_insert_default()
}

fn spec(lease: &mut Lease) -> &mut LeaseSpec {
    lease.spec.get_or_insert_default()
}

/// The holder, whether its lease has expired or not.
fn holder(lease: &Lease) -> Option<&str> {
    lease.spec.as_ref()?.holder_identity.as_deref().filter(|holder| !holder.is_empty())
}

fn term(lease: &Lease) -> i64 {
    lease.spec.as_ref().and_then(|spec| spec.lease_transitions).map_or(0, i64::from)
}

fn in_sync(lease: &Lease) -> Result<Option<(InSyncSet, i64)>, CoordinationError> {
    let Some(members) = annotation(lease, IN_SYNC) else { return Ok(None) };
    let members = read_in_sync(members).ok_or_else(|| invalid_lease("in-sync set"))?;
    let revision = annotation(lease, REVISION).and_then(|revision| revision.parse().ok());
    Ok(Some((members, revision.ok_or_else(|| invalid_lease("revision"))?)))
}

/// The election view that the Lease represents. `is_alive`: whether its holder has renewed in time.
pub(super) fn view(lease: &Lease, is_alive: bool) -> Result<ElectionView, CoordinationError> {
    let leader = holder(lease).filter(|_| is_alive).map(|address| ElectedLeader {
        address: address.to_owned(),
        replication: annotation(lease, REPLICATION).map(str::to_owned),
        term: term(lease),
    });
    Ok(ElectionView { leader, in_sync: in_sync(lease)? })
}

/// Whether the leader of this term is the holder.
pub(super) fn is_held(lease: &Lease, of: i64) -> bool {
    holder(lease).is_some() && term(lease) == of
}

/// Makes the candidate the holder. Returns its term.
pub(super) fn acquire(
    lease: &mut Lease,
    candidacy: &Candidacy,
    now: MicroTime,
) -> Result<i64, CoordinationError> {
    let seconds_since_epoch =
        lease.metadata.creation_timestamp.as_ref().map_or(0, |time| time.0.as_second() - EPOCH);
    let last_revision = in_sync(lease)?.map_or(seconds_since_epoch, |(_, revision)| revision);
    let term = term(lease).max(last_revision).saturating_add(1);
    let transitions = i32::try_from(term).map_err(|_| invalid_lease("number of transitions"))?;
    let seconds = candidacy.lease.as_secs_f64().ceil().max(1.0) as i32;
    *spec(lease) = LeaseSpec {
        holder_identity: Some(candidacy.member.address.clone()),
        lease_duration_seconds: Some(seconds),
        lease_transitions: Some(transitions),
        acquire_time: Some(now.clone()),
        renew_time: Some(now),
        ..LeaseSpec::default()
    };
    annotations(lease).insert(REPLICATION.to_owned(), candidacy.replication.clone());
    set_in_sync(lease, &InSyncSet::from([candidacy.member.clone()]), term);
    Ok(term)
}

pub(super) fn renew(lease: &mut Lease, now: MicroTime) {
    spec(lease).renew_time = Some(now);
}

/// Removes the holder.
pub(super) fn release(lease: &mut Lease, now: MicroTime) {
    let spec = spec(lease);
    (spec.holder_identity, spec.renew_time) = (Some(String::new()), Some(now));
}

/// Writes the in-sync set and its revision.
pub(super) fn set_in_sync(lease: &mut Lease, members: &InSyncSet, revision: i64) {
    annotations(lease).insert(IN_SYNC.to_owned(), write_in_sync(members));
    annotations(lease).insert(REVISION.to_owned(), revision.to_string());
}

/// The fields that change with every renewal or change of the holder.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ObservedLease {
    lease: Option<String>,
    term: i64,
    holder: Option<String>,
    renewed: Option<MicroTime>,
}

/// Decides whether the holder is alive by this master's own clock: the times in a Lease are written by other clocks, which may be
/// wrong. Client-go's leader election does the same.
#[derive(Debug, Default)]
pub(super) struct LeaseLivenessTracker {
    /// The last observed change, and when it was first received.
    last: Option<(ObservedLease, Duration)>,
}

impl LeaseLivenessTracker {
    /// Whether the holder of this Lease is alive: it renewed within its lease duration. The Lease was requested at `requested` and
    /// received at `received`. A response only describes a moment before it was received, so the time without a renewal runs from the
    /// first response with a change to the last request whose response had no other.
    pub(super) fn is_alive(
        &mut self,
        lease: &Lease,
        requested: Duration,
        seen: Duration,
        min_duration: Duration,
    ) -> bool {
        let spec = lease.spec.as_ref();
        let observed = ObservedLease {
            lease: lease.metadata.uid.clone(),
            term: term(lease),
            holder: holder(lease).map(str::to_owned),
            renewed: spec.and_then(|spec| spec.renew_time.clone()),
        };
        let duration = spec.and_then(|spec| spec.lease_duration_seconds).map_or(0, i64::from);
        let duration = Duration::from_secs(u64::try_from(duration).unwrap_or(0)).max(min_duration);
        match &self.last {
            _ if observed.holder.is_none() => false,
            Some((last, since)) if *last == observed => requested.saturating_sub(*since) < duration,
            _ => {
                self.last = Some((observed, seen));
                true
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ha::member::HaMember;

    fn at(second: i64) -> MicroTime {
        MicroTime(k8s_openapi::jiff::Timestamp::from_second(second).unwrap())
    }

    fn candidacy(address: &str) -> Candidacy {
        Candidacy {
            member: HaMember { address: address.to_owned(), incarnation: 1 },
            replication: format!("{address}:r"),
            revision: 0,
            lease: Duration::from_millis(2500),
        }
    }

    #[test]
    fn acquiring_sets_the_leader_and_the_in_sync_set() {
        let mut lease = empty("store");
        assert_eq!(view(&lease, true).unwrap(), ElectionView::default());
        let first = acquire(&mut lease, &candidacy("a"), at(7)).unwrap();
        let seen = view(&lease, true).unwrap();
        let leader =
            ElectedLeader { address: "a".to_owned(), replication: Some("a:r".to_owned()), term: first };
        assert_eq!(
            (seen.leader, seen.in_sync),
            (Some(leader), Some((InSyncSet::from([candidacy("a").member]), first)))
        );
        assert_eq!(lease.spec.as_ref().unwrap().lease_duration_seconds, Some(3));
        assert!(is_held(&lease, first) && !is_held(&lease, first - 1));
        assert_eq!(view(&lease, false).unwrap().leader, None);
        set_in_sync(&mut lease, &InSyncSet::new(), first + 5);
        release(&mut lease, at(9));
        assert!(!is_held(&lease, first) && view(&lease, true).unwrap().leader.is_none());
        assert_eq!(
            acquire(&mut lease, &candidacy("b"), at(10)).unwrap(),
            first + 6,
            "revisions are not reused"
        );
    }

    #[test]
    fn terms_of_a_deleted_lease_are_not_reused() {
        let lease_created_at = |second: i64| {
            let mut lease = empty("store");
            let time = k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(at(second).0);
            lease.metadata.creation_timestamp = Some(time);
            lease
        };
        let mut first = lease_created_at(EPOCH + 1000);
        assert_eq!(acquire(&mut first, &candidacy("a"), at(0)).unwrap(), 1001);
        assert_eq!(acquire(&mut lease_created_at(EPOCH + 2000), &candidacy("a"), at(0)).unwrap(), 2001);
        // A Lease that was created externally and had 5000 holders.
        first.metadata.annotations = None;
        first.spec.as_mut().unwrap().lease_transitions = Some(5000);
        assert_eq!(acquire(&mut first, &candidacy("a"), at(0)).unwrap(), 5001);
    }

    #[test]
    fn invalid_leases_are_rejected() {
        let mut lease = empty("store");
        set_in_sync(&mut lease, &InSyncSet::new(), 1);
        annotations(&mut lease).insert(REVISION.to_owned(), "x".to_owned());
        assert!(view(&lease, true).is_err());
        annotations(&mut lease).remove(REVISION);
        assert!(view(&lease, true).is_err() && acquire(&mut lease, &candidacy("a"), at(0)).is_err());
        set_in_sync(&mut lease, &InSyncSet::new(), i64::from(i32::MAX));
        assert!(acquire(&mut lease, &candidacy("a"), at(0)).is_err());
        annotations(&mut lease).insert(IN_SYNC.to_owned(), "?".to_owned());
        assert!(view(&lease, true).is_err());
    }

    #[test]
    fn expiry_is_measured_by_the_observers_clock() {
        let (mut tracker, mut lease) = (LeaseLivenessTracker::default(), empty("store"));
        let ms = Duration::from_millis;
        let mut is_alive =
            |lease: &Lease, requested, seen| tracker.is_alive(lease, ms(requested), ms(seen), ms(2000));
        assert!(!is_alive(&lease, 0, 1), "no holder");
        acquire(&mut lease, &candidacy("a"), at(1)).unwrap();
        // The lease lasts three seconds, regardless of the times in it.
        assert!(is_alive(&lease, 0, 500));
        assert!(is_alive(&lease, 3499, 9000), "the response may describe the time of the request");
        assert!(!is_alive(&lease, 3500, 3501));
        renew(&mut lease, at(0));
        assert!(
            is_alive(&lease, 3600, 3700) && is_alive(&lease, 6699, 6700) && !is_alive(&lease, 6700, 6701)
        );
        acquire(&mut lease, &candidacy("a"), at(0)).unwrap();
        assert!(is_alive(&lease, 6800, 6900), "another term");
        lease.metadata.uid = Some("another".to_owned());
        assert!(is_alive(&lease, 20_000, 20_001));
        lease.spec.as_mut().unwrap().lease_duration_seconds = Some(-1);
        assert!(is_alive(&lease, 22_000, 22_001) && !is_alive(&lease, 22_001, 22_002));
        release(&mut lease, at(1));
        assert!(!is_alive(&lease, 22_002, 22_003));
    }
}
