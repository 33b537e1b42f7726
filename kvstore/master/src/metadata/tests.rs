use std::sync::Arc;

use bytes::Bytes;

use super::store::{MetadataPutOutcome, MetadataStore};

fn put(metadata: &MetadataStore, key: &str, value: &str) -> MetadataPutOutcome {
    let put = metadata.put(key, &Bytes::copy_from_slice(value.as_bytes()));
    metadata.commit().unwrap();
    put
}

#[test]
fn entries_persist_across_restarts() {
    let folder = tempfile::tempdir().unwrap();
    let (ram, rpc) = ("mooncake/ram/10.0.0.1:1", "mooncake/rpc_meta/10.0.0.1:1");
    {
        let metadata = MetadataStore::open(folder.path()).unwrap();
        assert_eq!(put(&metadata, ram, "old"), MetadataPutOutcome::Updated);
        assert_eq!(put(&metadata, ram, "new"), MetadataPutOutcome::Updated);
        assert_eq!(put(&metadata, rpc, "{}"), MetadataPutOutcome::Updated);
        assert_eq!(put(&metadata, rpc, "{}"), MetadataPutOutcome::Unchanged);
        assert_eq!(put(&metadata, rpc, "{1}"), MetadataPutOutcome::Duplicate);
        assert_eq!(put(&metadata, "gone", ""), MetadataPutOutcome::Updated);
        assert!(metadata.delete("gone") && !metadata.delete("gone"));
        metadata.commit().unwrap();
        // Not closed, as after a crash.
        std::mem::forget(metadata);
    }
    // The process holds the folder's lock until it ends, so a copy is opened.
    let copy = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(folder.path()).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), copy.path().join(file.file_name())).unwrap();
    }
    let metadata = MetadataStore::open(copy.path()).unwrap();
    assert_eq!(metadata.count(), 2);
    assert_eq!(metadata.get(ram).as_deref(), Some(&b"new"[..]));
    assert_eq!(put(&metadata, rpc, "{}"), MetadataPutOutcome::Unchanged);
    // The client may have been restarted meanwhile.
    assert_eq!(put(&metadata, rpc, "{1}"), MetadataPutOutcome::Updated);
    assert_eq!(put(&metadata, rpc, "{2}"), MetadataPutOutcome::Duplicate);
}

#[test]
fn the_log_is_compacted() {
    let folder = tempfile::tempdir().unwrap();
    let value = "x".repeat(1 << 20);
    {
        let metadata = MetadataStore::open(folder.path()).unwrap();
        put(&metadata, "first", "1");
        for number in 0..200 {
            put(&metadata, "key", &format!("{number}{value}"));
        }
        put(&metadata, "last", "2");
    }
    let size = |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().metadata().unwrap().len();
    let bytes: u64 = std::fs::read_dir(folder.path()).unwrap().map(size).sum();
    assert!(bytes < 150 << 20, "{bytes}");
    let metadata = MetadataStore::open(folder.path()).unwrap();
    let get = |key| metadata.get(key).map(|value| value.len());
    assert_eq!([get("first"), get("key"), get("last")], [Some(1), Some(3 + (1 << 20)), Some(1)]);
}

#[test]
fn entries_and_bytes_are_bounded() {
    let metadata = MetadataStore::in_memory();
    assert_eq!(put(&metadata, &"k".repeat(5000), ""), MetadataPutOutcome::Full);
    let value = Bytes::from(vec![0; 100 << 20]);
    assert_eq!(
        [1, 2, 3].map(|number| metadata.put(&number.to_string(), &value)),
        [MetadataPutOutcome::Updated, MetadataPutOutcome::Updated, MetadataPutOutcome::Full]
    );
    assert!(metadata.delete("1"));
    assert_eq!(metadata.put("3", &value), MetadataPutOutcome::Updated);
}

#[test]
fn an_expired_nodes_entries_are_removed() {
    let metadata = MetadataStore::in_memory();
    for key in
        ["mooncake/ram/n:1", "mooncake/c/rpc_meta/n:1", "mooncake/ram/other-n:1", "mooncake/ram/n:12", "n:1"]
    {
        put(&metadata, key, "{}");
    }
    assert_eq!(metadata.remove_node("n:1"), 2);
    assert_eq!(metadata.remove_node("n:1"), 0);
    assert_eq!(metadata.count(), 3);
}

#[test]
fn writers_do_not_lose_each_others_entries() {
    let folder = tempfile::tempdir().unwrap();
    {
        let metadata = Arc::new(MetadataStore::open(folder.path()).unwrap());
        let write = |writer: usize| {
            let metadata = Arc::clone(&metadata);
            std::thread::spawn(move || {
                let value = Bytes::from(vec![b'x'; 200_000]);
                for number in 0..20 {
                    metadata.put(&format!("{writer}-{number}"), &value);
                    metadata.put("all", &Bytes::from(format!("{writer}-{number}")));
                    metadata.commit().unwrap();
                }
            })
        };
        let threads: Vec<_> = (0..4).map(write).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    }
    assert_eq!(MetadataStore::open(folder.path()).unwrap().count(), 81);
}
