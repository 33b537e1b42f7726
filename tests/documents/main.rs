//! README.md and docs/ describe the program: every setting, error code, metric and command line in them is compared with the
//! program itself.
#![expect(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

mod architecture;
mod commands;
mod metrics;
mod paths;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use moongate_gateway::ApiErrorCode;
use moongate_scheduler::PolicyName;

/// Commands whose settings docs/configuration.md lists under a heading of their name.
const COMMANDS: [&str; 18] = [
    "moongate gateway",
    "moongate epp",
    "moongate operator",
    "moongate planner",
    "moongate kubectl",
    "moongate store",
    "moongate store-holder",
    "moongate store-router",
    "moongate sidecar",
    "moongate sidecar drain",
    "moongate up",
    "moongate kv",
    "moongate loadtest",
    "moongate loadtest run",
    "moongate loadtest engine",
    "moongate loadtest scaling",
    "moongate loadtest simulate",
    "moongate loadtest live",
];

fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn moongate(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_moongate"));
    command.args(arguments).env_clear().stdin(Stdio::null()).stderr(Stdio::inherit());
    command
}

/// Help of a command line such as `moongate loadtest run`.
fn help(command: &str) -> String {
    let words: Vec<&str> = command.split(' ').skip(1).chain(["--help"]).collect();
    let output = moongate(&words).output().unwrap();
    assert!(output.status.success(), "`{command} --help` fails");
    String::from_utf8(output.stdout).unwrap()
}

/// Environment variable and default of each flag of a command, from its help; `none` where there is none.
fn settings(command: &str) -> BTreeMap<String, (String, String)> {
    let mut settings = BTreeMap::new();
    let mut flag = String::new();
    for line in help(command).lines() {
        // Flags are indented by six columns, those of the master by two; their texts by more.
        let short = || line.strip_prefix("  -").and_then(|rest| rest.get(1..)?.strip_prefix(", --"));
        let long = line.strip_prefix("      --").or_else(|| line.strip_prefix("  --")).or_else(short);
        if let Some(rest) = long {
            flag = rest.split([' ', '=']).next().unwrap().to_owned();
            if flag != "help" && flag != "version" {
                settings.insert(flag.clone(), ("none".to_owned(), "none".to_owned()));
            }
        }
        let Some(setting) = settings.get_mut(&flag) else { continue };
        let text = line.trim();
        if let Some(env) = text.strip_prefix("[env: ") {
            setting.0 = env.split(['=', ']']).next().unwrap().to_owned();
        } else if let Some(default) = text.strip_prefix("[default: ") {
            setting.1 = default.trim_end_matches(']').to_owned();
        }
    }
    assert!(!settings.is_empty(), "{command} has settings");
    settings
}

/// Cells of the Markdown table rows in `text` whose first cell begins with a backtick; backticks removed.
fn rows(text: &str) -> Vec<Vec<String>> {
    let lines = text.lines().filter(|line| line.starts_with("| `"));
    lines
        .map(|line| line.trim_matches('|').split(" | ").map(|cell| cell.trim().replace('`', "")).collect())
        .collect()
}

/// The part of a page under `## heading`.
fn section<'a>(page: &'a str, heading: &str) -> &'a str {
    let start = page.find(&format!("\n## {heading}\n")).unwrap_or_else(|| panic!("no heading {heading:?}"));
    let after = &page[start + 1..];
    after.find("\n## ").map_or(after, |end| &after[..end])
}

#[test]
fn every_setting_is_described_with_its_variable_and_default() {
    let page = read("docs/configuration.md");
    for command in COMMANDS {
        let described: BTreeMap<String, (String, String)> = rows(section(&page, command))
            .into_iter()
            .filter_map(|row| {
                let flag = row[0].strip_prefix("--")?.to_owned();
                Some((flag, (row[1].clone(), row[2].clone())))
            })
            .collect();
        let mut real = settings(command);
        if command == "moongate epp" {
            // The others are the gateway's.
            let of_gateway = settings("moongate gateway");
            assert!(of_gateway.keys().all(|flag| real.contains_key(flag)));
            real.retain(|flag, setting| of_gateway.get(flag) != Some(setting));
        }
        let only_described = described.iter().filter(|(flag, row)| real.get(*flag) != Some(*row));
        let only_real = real.iter().filter(|(flag, row)| described.get(*flag) != Some(*row));
        let (only_described, only_real) = (only_described.collect::<Vec<_>>(), only_real.collect::<Vec<_>>());
        assert!(
            only_described.is_empty() && only_real.is_empty(),
            "only in docs/configuration.md: {only_described:?}; only in `{command} --help`: {only_real:?}"
        );
    }
}

#[test]
fn every_policy_is_described_and_in_the_help() {
    let page = read("docs/configuration.md");
    let described: BTreeSet<String> =
        rows(section(&page, "moongate gateway")).into_iter().map(|row| row[0].clone()).collect();
    let help = help("moongate gateway");
    for name in PolicyName::ALL {
        assert!(described.contains(name.as_str()), "docs/configuration.md does not describe {name}");
        assert!(help.contains(name.as_str()), "--help does not name {name}");
    }
}

#[test]
fn every_error_code_is_described_with_its_status() {
    // A new variant does not compile until it is here.
    let listed = |code: ApiErrorCode| match code {
        ApiErrorCode::InvalidJson
        | ApiErrorCode::InvalidRequest
        | ApiErrorCode::BodyTooLarge
        | ApiErrorCode::UnsupportedMediaType
        | ApiErrorCode::BodyIncomplete
        | ApiErrorCode::ModelNotFound
        | ApiErrorCode::Unauthorized
        | ApiErrorCode::InvalidApiKey
        | ApiErrorCode::InsufficientPermissions
        | ApiErrorCode::RateLimited
        | ApiErrorCode::ResponseNotFound
        | ApiErrorCode::NotFound
        | ApiErrorCode::MethodNotAllowed
        | ApiErrorCode::NoEngineAvailable
        | ApiErrorCode::Overloaded
        | ApiErrorCode::UnsupportedByFleet
        | ApiErrorCode::PrefillFailed
        | ApiErrorCode::DecodeFailed
        | ApiErrorCode::WorkerFailed
        | ApiErrorCode::EngineUnavailable
        | ApiErrorCode::EngineTimeout
        | ApiErrorCode::GatewayOverloaded
        | ApiErrorCode::ShuttingDown
        | ApiErrorCode::AdapterLoadFailed
        | ApiErrorCode::StorageFailed => (code.as_str().to_owned(), code.status().as_u16().to_string()),
    };
    let codes = [
        ApiErrorCode::InvalidJson,
        ApiErrorCode::InvalidRequest,
        ApiErrorCode::BodyTooLarge,
        ApiErrorCode::UnsupportedMediaType,
        ApiErrorCode::BodyIncomplete,
        ApiErrorCode::ModelNotFound,
        ApiErrorCode::Unauthorized,
        ApiErrorCode::InvalidApiKey,
        ApiErrorCode::InsufficientPermissions,
        ApiErrorCode::RateLimited,
        ApiErrorCode::ResponseNotFound,
        ApiErrorCode::NotFound,
        ApiErrorCode::MethodNotAllowed,
        ApiErrorCode::NoEngineAvailable,
        ApiErrorCode::Overloaded,
        ApiErrorCode::UnsupportedByFleet,
        ApiErrorCode::PrefillFailed,
        ApiErrorCode::DecodeFailed,
        ApiErrorCode::WorkerFailed,
        ApiErrorCode::EngineUnavailable,
        ApiErrorCode::EngineTimeout,
        ApiErrorCode::GatewayOverloaded,
        ApiErrorCode::ShuttingDown,
        ApiErrorCode::AdapterLoadFailed,
        ApiErrorCode::StorageFailed,
    ];
    let real: BTreeSet<_> = codes.into_iter().map(listed).collect();
    let described: BTreeSet<_> =
        rows(&read("docs/errors.md")).into_iter().map(|row| (row[0].clone(), row[1].clone())).collect();
    assert_eq!(described, real, "docs/errors.md on the left, the program on the right");
}

/// `moongate up` on free ports; ended when dropped.
struct UpProcess {
    child: Child,
    /// The output of the program after its start.
    welcome: String,
}

impl UpProcess {
    fn start() -> Self {
        let arguments = ["up", "--listen=127.0.0.1:0", "--admin-listen=127.0.0.1:0"];
        let mut child = moongate(&arguments).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut welcome = String::new();
        while !welcome.contains("Metrics: ") {
            let line =
                lines.next().unwrap_or_else(|| panic!("`moongate up` ended after: {welcome}")).unwrap();
            welcome.push_str(&line);
            welcome.push('\n');
        }
        Self { child, welcome }
    }

    /// `host:port` after the first `mark` in the welcome.
    fn address(&self, mark: &str) -> &str {
        let after = self.welcome.split_once(mark).unwrap().1;
        after.split(|c: char| c.is_whitespace() || c == '/').next().unwrap()
    }
}

impl Drop for UpProcess {
    fn drop(&mut self) {
        // Already gone is fine.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn http_exchange(address: &str, head: &str, body: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    let length = body.len();
    let request = format!(
        "{head} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
    );
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{head}: {answer}");
    answer
}

#[test]
fn readme_quickstart_works_and_its_metrics_are_documented() {
    let up = UpProcess::start();
    let clients = up.address("http://");
    let readme = read("README.md");
    let example: Vec<&str> = up.welcome.lines().skip_while(|line| !line.contains("curl ")).take(2).collect();
    assert_eq!(example.len(), 2, "{}", up.welcome);
    for line in &example {
        let line = line.trim().replace(clients, "127.0.0.1:8000");
        assert!(readme.contains(&line), "README.md lacks what `moongate up` tells to try: {line}");
    }
    let body = example[1].split('\'').nth(1).unwrap();
    let answer = http_exchange(clients, "POST /v1/chat/completions", body);
    assert!(answer.contains("data: [DONE]"), "{answer}");

    let scraped = http_exchange(up.address("Metrics: http://"), "GET /metrics", "");
    metrics::describe_what_is_scraped(&scraped);
}

#[test]
fn the_bill_of_materials_lists_what_is_linked_and_nothing_else() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/sbom");
    let output = Command::new(script).stderr(Stdio::inherit()).output().unwrap();
    assert!(output.status.success());
    let bom: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(bom["metadata"]["component"]["name"], "moongate");
    let parts = bom["components"].as_array().unwrap();
    let names: BTreeSet<&str> = parts.iter().map(|part| part["name"].as_str().unwrap()).collect();
    for name in ["moongate-gateway", "rustls", "aws-lc-rs", "hyper", "tokio"] {
        assert!(names.contains(name), "{name} is linked");
    }
    for name in ["moongate", "moongate-testkit", "proptest", "tempfile", "criterion"] {
        assert!(!names.contains(name), "{name} is for tests");
    }
    for name in ["ring", "quinn"] {
        assert!(!names.contains(name), "{name} is named by features of others, and not built");
    }
    for part in parts {
        let ours = part["name"].as_str().unwrap().starts_with("moo") || part["name"] == "rbg-api";
        assert!(part["licenses"].is_array() && (ours || part["hashes"].is_array()), "{part}");
    }
}
