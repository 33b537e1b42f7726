//! Where masters and nodes of etcd are, and what is between them.

use std::process::Stdio;

use moongate_testkit::free_port;
use tokio::process::Command;

use crate::cluster::MASTERS;

/// Runs a program to its end.
pub(crate) async fn run(line: &str) -> bool {
    let mut words = line.split(' ');
    let mut command = Command::new(words.next().unwrap());
    let ran = command.args(words).stdout(Stdio::null()).stderr(Stdio::null()).status().await;
    ran.is_ok_and(|status| status.success())
}

/// The addresses of etcd and of all masters.
pub(crate) struct HaNetwork {
    pub(crate) etcd: String,
    pub(crate) masters: Vec<String>,
    /// What the names of namespaces begin with, if masters have their own.
    pub(crate) namespaces: Option<String>,
}

impl HaNetwork {
    /// All programs listen on the loopback interface.
    pub(crate) fn loopback() -> Self {
        let mut masters = Vec::new();
        for _ in 0..MASTERS {
            masters.push(format!("127.0.0.1:{}", free_port()));
        }
        Self { etcd: "127.0.0.1".to_owned(), masters, namespaces: None }
    }

    /// Every master in a network namespace of its own, all on one bridge. Where that cannot be had, the
    /// command that has failed.
    pub(crate) async fn namespaces() -> Result<Self, String> {
        let id = std::process::id() % 10_000;
        let (prefix, net) = (format!("mgha{id}"), format!("10.{}.{}", 64 + id / 250 % 64, id % 250));
        let mut lines = vec![
            format!("ip link add {prefix}b type bridge"),
            format!("ip addr add {net}.1/24 dev {prefix}b"),
            format!("ip addr add {net}.2/24 dev {prefix}b"),
            format!("ip link set {prefix}b up"),
        ];
        let mut masters = Vec::new();
        for number in 0..MASTERS {
            let name = format!("{prefix}n{number}");
            let inside = format!("ip netns exec {name} ip");
            lines.extend([
                format!("ip netns add {name}"),
                format!("ip link add {prefix}v{number} type veth peer name eth0 netns {name}"),
                format!("ip link set {prefix}v{number} master {prefix}b up"),
                format!("{inside} addr add {net}.{}/24 dev eth0", 11 + number),
                format!("{inside} link set eth0 up"),
                format!("{inside} link set lo up"),
            ]);
            masters.push(format!("{net}.{}:50051", 11 + number));
        }
        let network = Self { etcd: format!("{net}.2"), masters, namespaces: Some(prefix) };
        for line in lines {
            if !run(&line).await {
                return Err(line);
            }
        }
        Ok(network)
    }

    /// What lets a program run where a master is.
    pub(crate) fn inside(&self, master: usize) -> Option<String> {
        self.namespaces.as_ref().map(|prefix| format!("ip netns exec {prefix}n{master} "))
    }
}

impl Drop for HaNetwork {
    fn drop(&mut self) {
        let Some(prefix) = &self.namespaces else { return };
        let delete = |line: String| {
            let mut words = line.split(' ');
            let mut command = std::process::Command::new(words.next().unwrap());
            let _ = command.args(words).stderr(Stdio::null()).status();
        };
        (0..MASTERS).for_each(|number| delete(format!("ip netns del {prefix}n{number}")));
        delete(format!("ip link del {prefix}b"));
    }
}
