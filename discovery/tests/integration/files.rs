//! Discovery follows topology files through every way in which they are replaced.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::Duration;

use moongate_discovery::{
    DiscoveryError, DiscoveryOptions, EngineRole, InstanceSource, RbgDiscoveryOptions, StaticInstance,
    TopologyFileError, TopologyReader, start,
};
use moongate_runtime::Supervisor;
use tokio::sync::mpsc;
use tracing_subscriber::fmt::MakeWriter;

/// Nothing listens on port 1: these tests check the listing, not probes.
fn instance(id: &str) -> String {
    format!("[[instance]]\nid = \"{id}\"\nurl = \"http://127.0.0.1:1\"\nrole = \"decode\"\n")
}

fn ids(reader: &TopologyReader) -> Vec<String> {
    reader.current().instances.iter().map(|instance| instance.id.to_string()).collect()
}

async fn until(reader: &mut TopologyReader, expected: &[&str]) {
    let listed = reader.wait_for(|topology| {
        topology.instances.iter().map(|instance| &*instance.id.0).collect::<Vec<_>>() == expected
    });
    let waited = tokio::time::timeout(Duration::from_secs(9), listed).await;
    assert!(waited.is_ok(), "expected {expected:?}, have {:?}", ids(reader));
}

async fn follow(path: &Path, supervisor: &Supervisor) -> TopologyReader {
    let options = DiscoveryOptions { file: Some(path.to_owned()), ..DiscoveryOptions::default() };
    start(options, supervisor).await.unwrap()
}

/// Updates a mount as the kubelet does: files are links into `..data`, itself a link that is replaced by rename.
fn swap_config_map(mount: &Path, version: &str, name: &str, content: &str) {
    let directory = mount.join(version);
    fs::create_dir(&directory).unwrap();
    fs::write(directory.join(name), content).unwrap();
    let next = mount.join("..data_tmp");
    symlink(version, &next).unwrap();
    fs::rename(&next, mount.join("..data")).unwrap();
    if !mount.join(name).exists() {
        symlink(Path::new("..data").join(name), mount.join(name)).unwrap();
    }
}

#[tokio::test]
async fn a_file_is_reloaded_when_rewritten_and_when_replaced() {
    let supervisor = Supervisor::new();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("instances.toml");
    fs::write(&path, instance("a")).unwrap();
    let mut reader = follow(&path, &supervisor).await;
    assert_eq!(ids(&reader), ["a"], "listed when start returns");
    fs::write(&path, instance("b")).unwrap();
    until(&mut reader, &["b"]).await;
    fs::write(folder.path().join("next"), instance("c")).unwrap();
    fs::rename(folder.path().join("next"), &path).unwrap();
    until(&mut reader, &["c"]).await;
}

#[tokio::test]
async fn a_config_map_mount_is_followed_through_its_link_swaps() {
    let supervisor = Supervisor::new();
    let mount = tempfile::tempdir().unwrap();
    swap_config_map(mount.path(), "..v1", "instances.toml", &instance("a"));
    let mut reader = follow(&mount.path().join("instances.toml"), &supervisor).await;
    assert_eq!(ids(&reader), ["a"]);
    swap_config_map(mount.path(), "..v2", "instances.toml", &instance("b"));
    until(&mut reader, &["b"]).await;
    fs::remove_dir_all(mount.path().join("..v1")).unwrap();
    swap_config_map(mount.path(), "..v3", "instances.toml", &format!("{}{}", instance("b"), instance("c")));
    until(&mut reader, &["b", "c"]).await;
}

/// A log writer that sends every line to a channel.
#[derive(Clone)]
struct LogLineSender(mpsc::UnboundedSender<String>);

impl io::Write for LogLineSender {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let _ = self.0.send(String::from_utf8_lossy(line).into_owned());
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for LogLineSender {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        self.clone()
    }
}

#[tokio::test]
async fn a_bad_file_is_reported_and_changes_nothing() {
    let (lines, mut log) = mpsc::unbounded_channel();
    let subscriber = tracing_subscriber::fmt()
        .with_ansi(false)
        .with_max_level(tracing::Level::ERROR)
        .with_writer(LogLineSender(lines));
    let _guard = tracing::subscriber::set_default(subscriber.finish());
    let supervisor = Supervisor::new();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("instances.toml");
    fs::write(&path, instance("a")).unwrap();
    let mut reader = follow(&path, &supervisor).await;
    let next = folder.path().join("next");
    for (invalid, expected) in [
        ("[[instance]]\nurl = \"http://a:1\"\nroll = \"decode\"\n", "line 3"),
        ("[[instance]]\nurl = \"ftp://a\"\nrole = \"decode\"\n", "ftp://a"),
    ] {
        fs::write(&next, invalid).unwrap();
        fs::rename(&next, &path).unwrap();
        let mut message = String::new();
        while !message.contains(expected) {
            message +=
                &tokio::time::timeout(Duration::from_secs(9), log.recv()).await.expect("a log line").unwrap();
        }
        assert!(message.contains("instances.toml") && message.contains("fix the file"), "{message}");
        assert_eq!(ids(&reader), ["a"]);
    }
    fs::remove_file(&path).unwrap();
    let gone = tokio::time::timeout(Duration::from_secs(9), log.recv()).await.expect("a log line").unwrap();
    assert!(gone.contains("cannot be read"), "{gone}");
    assert_eq!(ids(&reader), ["a"]);
    fs::write(&path, instance("b")).unwrap();
    until(&mut reader, &["b"]).await;
}

#[tokio::test]
async fn flags_and_file_are_combined_and_flags_win() {
    let supervisor = Supervisor::new();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("instances.toml");
    fs::write(&path, format!("{}{}", instance("a"), instance("b"))).unwrap();
    let flag = StaticInstance {
        id: Some("a".into()),
        ..StaticInstance::new(EngineRole::Prefill, "http://127.0.0.1:1")
    };
    let options =
        DiscoveryOptions { instances: vec![flag], file: Some(path.clone()), ..DiscoveryOptions::default() };
    let mut reader = start(options, &supervisor).await.unwrap();
    assert_eq!(ids(&reader), ["a", "b"]);
    assert_eq!(reader.current().instances[0].role, EngineRole::Prefill);
    fs::write(&path, "").unwrap();
    until(&mut reader, &["a"]).await;
}

#[tokio::test]
async fn rbgs_file_is_followed_through_its_link_swaps() {
    let supervisor = Supervisor::new();
    let mount = tempfile::tempdir().unwrap();
    let recorded = include_str!("../data/rbg-config-pd-mooncake.yaml");
    swap_config_map(mount.path(), "..v1", "config.yaml", recorded);
    let rbg =
        RbgDiscoveryOptions { path: mount.path().join("config.yaml"), ..RbgDiscoveryOptions::default() };
    let options = DiscoveryOptions { rbg: Some(rbg), ..DiscoveryOptions::default() };
    let mut reader = start(options, &supervisor).await.unwrap();
    let decode = "sglang-pd-with-mooncake-decode-0.s-sglang-pd-with-mooncake-decode";
    let prefill = "sglang-pd-with-mooncake-prefill-0.s-sglang-pd-with-mooncake-prefill";
    assert_eq!(ids(&reader), [decode, prefill]);
    assert!(reader.current().instances.iter().all(|instance| instance.source == InstanceSource::Rbg));
    let scaled = recorded.replace(
        &format!("- address: {decode}\n"),
        &format!("- address: {decode}\n    - address: {}\n", decode.replace("decode-0", "decode-1")),
    );
    swap_config_map(mount.path(), "..v2", "config.yaml", &scaled);
    until(&mut reader, &[decode, &decode.replace("decode-0", "decode-1"), prefill]).await;
}

#[tokio::test]
async fn invalid_sources_are_rejected_at_start() {
    let supervisor = Supervisor::new();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("instances.toml");
    let file = || DiscoveryOptions { file: Some(path.clone()), ..DiscoveryOptions::default() };
    let missing = start(file(), &supervisor).await.unwrap_err();
    assert!(matches!(&missing, DiscoveryError::File { error: TopologyFileError::Read(_), .. }), "{missing}");
    assert!(missing.to_string().contains("instances.toml"));
    fs::write(&path, "x".repeat(2 << 20)).unwrap();
    let huge = start(file(), &supervisor).await.unwrap_err();
    assert!(matches!(huge, DiscoveryError::File { error: TopologyFileError::TooLarge(_), .. }));
    fs::write(&path, [0xff, 0xfe]).unwrap();
    let binary = start(file(), &supervisor).await.unwrap_err();
    assert!(matches!(binary, DiscoveryError::File { error: TopologyFileError::NotText, .. }));
    let nothing = start(DiscoveryOptions::default(), &supervisor).await.unwrap_err();
    assert!(matches!(nothing, DiscoveryError::NoSource));
    let twice = vec![
        StaticInstance::new(EngineRole::Plain, "a:1"),
        StaticInstance::new(EngineRole::Plain, "http://a:1/"),
    ];
    let twice =
        start(DiscoveryOptions { instances: twice, ..DiscoveryOptions::default() }, &supervisor).await;
    assert!(matches!(twice, Err(DiscoveryError::Instance(_))));
}
