//! A follower processes frames of any peer that claims to be the leader without a panic, and its acknowledged position never decreases.
//!
//! The input is frames without their headers: a little-endian length of two bytes, and as many bytes.

#![no_main]

use libfuzzer_sys::fuzz_target;
use moongate_master::ha::follower::ReplicationFollower;
use moongate_master::ha::{StandbyReplica, frame};
use moongate_master_core::MasterCoreOptions;

const TERM: i64 = 7;

fuzz_target!(|bytes: &[u8]| {
    if let Some(head) = bytes.first_chunk() {
        let _ = frame::header(*head);
    }
    let mut replica = StandbyReplica::new(MasterCoreOptions { shards: 2, ..MasterCoreOptions::default() });
    let mut follower = ReplicationFollower::new(TERM, None);
    let (mut rest, mut acknowledged) = (bytes, 0);
    while let Some((length, after)) = rest.split_first_chunk() {
        let Some((body, after)) = after.split_at_checked(u16::from_le_bytes(*length).into()) else { return };
        rest = after;
        let Ok(frame) = frame::read(body, crc32fast::hash(body)) else { return };
        let mut again = Vec::new();
        frame::write(&frame, &mut again);
        let (length, sum) = frame::header(*again.first_chunk().unwrap()).unwrap();
        assert_eq!(
            (length, frame::read(&again[frame::HEADER..], sum).as_ref()),
            (again.len() - frame::HEADER, Ok(&frame))
        );
        match follower.handle_frame(frame, &mut replica) {
            Ok(Some(number)) => {
                assert!(number >= acknowledged);
                acknowledged = number;
            }
            Ok(None) => {}
            Err(_) => return,
        }
    }
});
