//! A Kubernetes Lease as the place where masters settle who leads: what it says, and how it is changed.
//!
//! - `spec.holderIdentity`: the leader's RPC address, as Mooncake's master has it. Empty: nobody leads.
//! - `spec.leaseTransitions`: the leader's term. It is also above every revision that the in-sync set had before.
//! - Annotations, which Mooncake's master does not have: where the leader serves its followers, who may lead next, and the revision
//!   of that.
//!
//! Nothing here waits or asks.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};

use super::coordinator::{Candidacy, CoordinationError, ElectedLeader, ElectionView};
use super::member::{InSyncSet, read_in_sync, write_in_sync};

const REPLICATION: &str = "moongate.io/replication";
const IN_SYNC: &str = "moongate.io/in-sync";
const REVISION: &str = "moongate.io/in-sync-revision";
/// The first term of a Lease that was just made is the seconds from then (the year 2020) to its making, so that no term of one that
/// was deleted comes again.
const EPOCH: i64 = 1_577_836_800;

fn invalid_lease(what: &str) -> CoordinationError {
    CoordinationError(format!("the Lease has an unknown {what}"))
}

/// A Lease that says nothing yet.
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

/// Whoever holds it, whether still alive or not.
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

/// What it says, while its holder is alive or not.
pub(super) fn view(lease: &Lease, is_alive: bool) -> Result<ElectionView, CoordinationError> {
    let leader = holder(lease).filter(|_| is_alive).map(|address| ElectedLeader {
        address: address.to_owned(),
        replication: annotation(lease, REPLICATION).map(str::to_owned),
        term: term(lease),
    });
    Ok(ElectionView { leader, in_sync: in_sync(lease)? })
}

/// Whether the leader of this term holds it.
pub(super) fn is_held(lease: &Lease, of: i64) -> bool {
    holder(lease).is_some() && term(lease) == of
}

/// Gives it to a new leader. Returns the leader's term.
pub(super) fn acquire(lease: &mut Lease, bid: &Candidacy, now: MicroTime) -> Result<i64, CoordinationError> {
    let made = lease.metadata.creation_timestamp.as_ref().map_or(0, |made| made.0.as_second() - EPOCH);
    let before = in_sync(lease)?.map_or(made, |(_, revision)| revision);
    let term = term(lease).max(before).saturating_add(1);
    let transitions = i32::try_from(term).map_err(|_| invalid_lease("number of transitions"))?;
    let seconds = bid.lease.as_secs_f64().ceil().max(1.0) as i32;
    *spec(lease) = LeaseSpec {
        holder_identity: Some(bid.member.address.clone()),
        lease_duration_seconds: Some(seconds),
        lease_transitions: Some(transitions),
        acquire_time: Some(now.clone()),
        renew_time: Some(now),
        ..LeaseSpec::default()
    };
    annotations(lease).insert(REPLICATION.to_owned(), bid.replication.clone());
    set_in_sync(lease, &InSyncSet::from([bid.member.clone()]), term);
    Ok(term)
}

/// Begins its time anew.
pub(super) fn renew(lease: &mut Lease, now: MicroTime) {
    spec(lease).renew_time = Some(now);
}

/// Takes it from its holder.
pub(super) fn release(lease: &mut Lease, now: MicroTime) {
    let spec = spec(lease);
    (spec.holder_identity, spec.renew_time) = (Some(String::new()), Some(now));
}

/// Says who may lead next.
pub(super) fn set_in_sync(lease: &mut Lease, members: &InSyncSet, revision: i64) {
    annotations(lease).insert(IN_SYNC.to_owned(), write_in_sync(members));
    annotations(lease).insert(REVISION.to_owned(), revision.to_string());
}

/// A sign of life of a holder: none is like another.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ObservedLease {
    lease: Option<String>,
    term: i64,
    holder: Option<String>,
    renewed: Option<MicroTime>,
}

/// Whether the holder is alive, as this master sees it with its own clock alone: the times in a Lease are told by other clocks, which
/// may be wrong. Kubernetes' own elections do it so.
#[derive(Debug, Default)]
pub(super) struct LeaseLivenessTracker {
    /// The last sign of life, and when it was here for the first time.
    last: Option<(ObservedLease, Duration)>,
}

impl LeaseLivenessTracker {
    /// The Lease was asked for at the time `asked` and here at the time `seen`. Whether its holder is alive: it renewed within the
    /// time for which it holds. What happened before an answer was here says nothing of what happened since, so silence is counted
    /// from the first answer with a sign to the last question that brought no other.
    pub(super) fn is_alive(
        &mut self,
        lease: &Lease,
        asked: Duration,
        seen: Duration,
        least: Duration,
    ) -> bool {
        let spec = lease.spec.as_ref();
        let sign = ObservedLease {
            lease: lease.metadata.uid.clone(),
            term: term(lease),
            holder: holder(lease).map(str::to_owned),
            renewed: spec.and_then(|spec| spec.renew_time.clone()),
        };
        let held = spec.and_then(|spec| spec.lease_duration_seconds).map_or(0, i64::from);
        let held = Duration::from_secs(u64::try_from(held).unwrap_or(0)).max(least);
        match &self.last {
            _ if sign.holder.is_none() => false,
            Some((last, since)) if *last == sign => asked.saturating_sub(*since) < held,
            _ => {
                self.last = Some((sign, seen));
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

    fn bid(address: &str) -> Candidacy {
        Candidacy {
            member: HaMember { address: address.to_owned(), incarnation: 1 },
            replication: format!("{address}:r"),
            revision: 0,
            lease: Duration::from_millis(2500),
        }
    }

    #[test]
    fn a_leader_is_given_it_and_says_who_is_in_sync() {
        let mut lease = empty("store");
        assert_eq!(view(&lease, true).unwrap(), ElectionView::default());
        let first = acquire(&mut lease, &bid("a"), at(7)).unwrap();
        let seen = view(&lease, true).unwrap();
        let leader =
            ElectedLeader { address: "a".to_owned(), replication: Some("a:r".to_owned()), term: first };
        assert_eq!(
            (seen.leader, seen.in_sync),
            (Some(leader), Some((InSyncSet::from([bid("a").member]), first)))
        );
        assert_eq!(lease.spec.as_ref().unwrap().lease_duration_seconds, Some(3));
        assert!(is_held(&lease, first) && !is_held(&lease, first - 1));
        assert_eq!(view(&lease, false).unwrap().leader, None);
        set_in_sync(&mut lease, &InSyncSet::new(), first + 5);
        release(&mut lease, at(9));
        assert!(!is_held(&lease, first) && view(&lease, true).unwrap().leader.is_none());
        assert_eq!(acquire(&mut lease, &bid("b"), at(10)).unwrap(), first + 6, "no revision comes again");
    }

    #[test]
    fn terms_of_a_lease_that_was_deleted_do_not_come_again() {
        let made = |second: i64| {
            let mut lease = empty("store");
            let time = k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(at(second).0);
            lease.metadata.creation_timestamp = Some(time);
            lease
        };
        let mut first = made(EPOCH + 1000);
        assert_eq!(acquire(&mut first, &bid("a"), at(0)).unwrap(), 1001);
        assert_eq!(acquire(&mut made(EPOCH + 2000), &bid("a"), at(0)).unwrap(), 2001);
        // A Lease that somebody has made for them, and that has changed hands.
        first.metadata.annotations = None;
        first.spec.as_mut().unwrap().lease_transitions = Some(5000);
        assert_eq!(acquire(&mut first, &bid("a"), at(0)).unwrap(), 5001);
    }

    #[test]
    fn nonsense_is_refused() {
        let mut lease = empty("store");
        set_in_sync(&mut lease, &InSyncSet::new(), 1);
        annotations(&mut lease).insert(REVISION.to_owned(), "x".to_owned());
        assert!(view(&lease, true).is_err());
        annotations(&mut lease).remove(REVISION);
        assert!(view(&lease, true).is_err() && acquire(&mut lease, &bid("a"), at(0)).is_err());
        set_in_sync(&mut lease, &InSyncSet::new(), i64::from(i32::MAX));
        assert!(acquire(&mut lease, &bid("a"), at(0)).is_err());
        annotations(&mut lease).insert(IN_SYNC.to_owned(), "?".to_owned());
        assert!(view(&lease, true).is_err());
    }

    #[test]
    fn silence_is_counted_by_the_watcher() {
        let (mut watch, mut lease) = (LeaseLivenessTracker::default(), empty("store"));
        let ms = Duration::from_millis;
        let mut look = |lease: &Lease, asked, seen| watch.is_alive(lease, ms(asked), ms(seen), ms(2000));
        assert!(!look(&lease, 0, 1), "nobody holds it");
        acquire(&mut lease, &bid("a"), at(1)).unwrap();
        // Held for three seconds, whatever its times say.
        assert!(look(&lease, 0, 500));
        assert!(look(&lease, 3499, 9000), "the answer may be of the time of the question");
        assert!(!look(&lease, 3500, 3501));
        renew(&mut lease, at(0));
        assert!(look(&lease, 3600, 3700) && look(&lease, 6699, 6700) && !look(&lease, 6700, 6701));
        acquire(&mut lease, &bid("a"), at(0)).unwrap();
        assert!(look(&lease, 6800, 6900), "another term");
        lease.metadata.uid = Some("another".to_owned());
        assert!(look(&lease, 20_000, 20_001));
        lease.spec.as_mut().unwrap().lease_duration_seconds = Some(-1);
        assert!(look(&lease, 22_000, 22_001) && !look(&lease, 22_001, 22_002));
        release(&mut lease, at(1));
        assert!(!look(&lease, 22_002, 22_003));
    }
}
