//! etcd's response about the leader can be written by any client with write access. Data taken from it is bounded, and a parsed in-sync
//! set is unchanged after a round trip.

#![no_main]

use libfuzzer_sys::fuzz_target;
use moongate_master::ha::{MAX_ADDRESS, MAX_MEMBERS, read_in_sync, read_view, write_in_sync};

fn check(text: &str) {
    let Some(members) = read_in_sync(text) else { return };
    assert!(members.len() <= MAX_MEMBERS);
    assert!(members.iter().all(|member| member.address.len() <= MAX_ADDRESS));
    assert_eq!(read_in_sync(&write_in_sync(&members)), Some(members));
}

fuzz_target!(|answer: &[u8]| {
    if let Ok(text) = std::str::from_utf8(answer) {
        check(text);
    }
    let Ok(view) = read_view(answer) else { return };
    let most = answer.len();
    if let Some(leader) = &view.leader {
        assert!(leader.address.len() + leader.replication.as_ref().map_or(0, String::len) <= most);
    }
    if let Some((members, revision)) = &view.in_sync {
        assert_eq!((members.len() <= MAX_MEMBERS, *revision), (true, view.revision()));
        check(&write_in_sync(members));
    }
});
