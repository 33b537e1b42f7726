//! A Kubernetes Lease as the coordinator's storage: its fields, and how they change.
//!
//! - `spec.holderIdentity`: the leader's RPC address, as Mooncake's master writes it. Empty: there is no leader.
//! - `spec.leaseTransitions`: the leader's term. It is also higher than every earlier revision of the in-sync set.
//! - Annotations of Moongate's master only: the address of the leader's replication port, the in-sync set, and the revision of
//!   that set.
//!
//! Nothing here does I/O.

use std::collections::BTreeMap;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use moongate_kube_lease::{self as kube_lease, holder, transitions};

use super::coordinator::{Candidacy, CoordinationError, ElectedLeader, ElectionView, KubernetesLeaseError};
use super::member::{InSyncSet, read_in_sync, write_in_sync};

const REPLICATION: &str = "moongate.io/replication";
const IN_SYNC: &str = "moongate.io/in-sync";
const REVISION: &str = "moongate.io/in-sync-revision";
/// A new Lease starts with the term "seconds from this time (2020-01-01) to its creation", so that terms of a deleted Lease are not
/// reused.
const EPOCH: i64 = 1_577_836_800;

fn invalid_lease(what: &'static str) -> CoordinationError {
    KubernetesLeaseError::UnknownFormat(what).into()
}

fn annotation<'a>(lease: &'a Lease, name: &str) -> Option<&'a str> {
    lease.metadata.annotations.as_ref()?.get(name).map(String::as_str)
}

fn annotations(lease: &mut Lease) -> &mut BTreeMap<String, String> {
    lease.metadata.annotations.get_or_insert_default()
}

fn term(lease: &Lease) -> i64 {
    transitions(lease).into()
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
    kube_lease::acquire(lease, &candidacy.member.address, seconds, transitions, now);
    annotations(lease).insert(REPLICATION.to_owned(), candidacy.replication.clone());
    set_in_sync(lease, &InSyncSet::from([candidacy.member.clone()]), term);
    Ok(term)
}

/// Removes the holder.
pub(super) fn release(lease: &mut Lease, now: MicroTime) {
    kube_lease::release(lease);
    kube_lease::renew(lease, now);
}

/// Writes the in-sync set and its revision.
pub(super) fn set_in_sync(lease: &mut Lease, members: &InSyncSet, revision: i64) {
    annotations(lease).insert(IN_SYNC.to_owned(), write_in_sync(members));
    annotations(lease).insert(REVISION.to_owned(), revision.to_string());
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use moongate_kube_lease::empty;

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
}
