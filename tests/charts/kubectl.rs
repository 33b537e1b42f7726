//! `moongate kubectl`, and the binary as a kubectl plugin, without a cluster. The operator's tests cover it with one.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;

fn run(program: impl AsRef<Path>, arguments: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(program.as_ref());
    let output: Output = command.args(arguments).env_clear().stdin(Stdio::null()).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8(text).unwrap())
}

#[test]
fn a_link_with_the_plugins_name_is_the_plugin() {
    let folder = TempDir::new().unwrap();
    let plugin = folder.path().join("kubectl-moongate");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_moongate"), &plugin).unwrap();
    let (code, text) = run(&plugin, &["rollout", "--help"]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("Usage: moongate kubectl rollout"), "{text}");
    for tool in ["history", "diff", "undo", "pause", "resume", "status", "restart"] {
        assert!(text.contains(tool), "{tool} in {text}");
    }
}

#[test]
fn exit_codes_distinguish_invalid_arguments_from_failures() {
    let moongate = env!("CARGO_BIN_EXE_moongate");
    let wrong = [
        vec!["kubectl", "upgrade", "g"],
        vec!["kubectl", "upgrade", "g", "--image", "r="],
        vec!["kubectl", "plan"],
        vec!["kubectl", "status", "g", "-A"],
        vec!["kubectl", "rollout", "undo", "g", "--to-revision", "x"],
    ];
    for arguments in wrong {
        let (code, text) = run(moongate, &arguments);
        assert_eq!(code, Some(2), "{arguments:?}: {text}");
    }
    let (code, text) = run(moongate, &["kubectl", "status", "--kubeconfig", "/none"]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.starts_with("error: no cluster configured: ") && text.contains("--kubeconfig"), "{text}");

    // No server listens on this port.
    let folder = TempDir::new().unwrap();
    let config = folder.path().join("config");
    let text = "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
                contexts: [{name: c, context: {cluster: k, user: u}}]\n\
                clusters: [{name: k, cluster: {server: 'http://127.0.0.1:1'}}]\nusers: [{name: u, user: {}}]\n";
    std::fs::write(&config, text).unwrap();
    let (code, text) = run(moongate, &["kubectl", "status", "--kubeconfig", config.to_str().unwrap()]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.starts_with("error: request to the API server failed: "), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    let (code, text) =
        run(moongate, &["kubectl", "status", "--kubeconfig", config.to_str().unwrap(), "--context", "x"]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("no cluster configured"), "{text}");
}
