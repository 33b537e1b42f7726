//! Enforces ARCHITECTURE.md: dependencies between crates, linked packages, and names and sizes of files and folders.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use super::read;

/// Crates that may import every crate of the workspace.
const EVERYTHING: &[&str] = &["*"];

/// Folder, crate, and the workspace crates that it may depend on. ARCHITECTURE.md has the same table.
const TABLE: &[(&str, &str, &[&str])] = &[
    ("src", "moongate", EVERYTHING),
    (
        "gateway",
        "moongate-gateway",
        &[
            "moongate-batch",
            "moongate-scheduler",
            "moongate-discovery",
            "moongate-master-client",
            "moongate-store-shards",
            "moongate-tokenize",
            "moongate-translate",
            "mooncake-wire",
            "moongate-block-hash",
            "moongate-zmtp",
            "moongate-runtime",
            "moongate-telemetry",
        ],
    ),
    ("gateway/batch", "moongate-batch", &["moongate-backoff", "moongate-testkit"]),
    ("gateway/epp", "moongate-epp", &["moongate-gateway", "moongate-runtime", "moongate-telemetry"]),
    ("gateway/tokenize", "moongate-tokenize", &[]),
    ("gateway/translate", "moongate-translate", &[]),
    ("scheduler", "moongate-scheduler", &[]),
    ("scheduler/capacity", "moongate-capacity", &[]),
    ("discovery", "moongate-discovery", &["rbg-api", "moongate-runtime"]),
    ("operator/api", "rbg-api", &["moongate-testkit"]),
    ("operator/render", "moongate-render", &["rbg-api", "moongate-testkit"]),
    (
        "operator",
        "moongate-operator",
        &[
            "moongate-render",
            "rbg-api",
            "moongate-kube-lease",
            "moongate-runtime",
            "moongate-telemetry",
            "moongate-testkit",
            "moongate-operator-testkit",
        ],
    ),
    (
        "operator/planner",
        "moongate-planner",
        &["moongate-capacity", "moongate-runtime", "rbg-api", "moongate-testkit"],
    ),
    ("operator/testkit", "moongate-operator-testkit", &["moongate-operator", "rbg-api"]),
    (
        "kvstore/master-client",
        "moongate-master-client",
        &["moongate-store-shards", "mooncake-wire", "moongate-runtime", "moongate-store-testkit"],
    ),
    (
        "kvstore/client",
        "moongate-store-client",
        &[
            "moongate-master-client",
            "moongate-rdma",
            "moongate-transfer",
            "mooncake-wire",
            "moongate-runtime",
            "moongate-store-testkit",
        ],
    ),
    ("kvstore/master-core", "moongate-master-core", &["moongate-retention", "mooncake-wire"]),
    (
        "kvstore/master",
        "moongate-master",
        &[
            "moongate-master-core",
            "moongate-master-client",
            "moongate-kube-lease",
            "moongate-oplog",
            "mooncake-wire",
            "moongate-runtime",
            "moongate-store-testkit",
            "moongate-telemetry",
            "moongate-testkit",
            "moongate-zmtp",
        ],
    ),
    ("kvstore/memory", "moongate-memory", &[]),
    (
        "kvstore/node",
        "moongate-store-node",
        &[
            "moongate-store-client",
            "moongate-master-client",
            "moongate-memory",
            "moongate-rdma",
            "moongate-tier",
            "moongate-transfer",
            "mooncake-wire",
            "moongate-runtime",
            "moongate-telemetry",
        ],
    ),
    ("kvstore/oplog", "moongate-oplog", &["moongate-store-testkit"]),
    (
        "kvstore/python",
        "moongate-store-python",
        &[
            "moongate-master-client",
            "moongate-memory",
            "moongate-runtime",
            "moongate-store-client",
            "moongate-store-node",
            "moongate-store-testkit",
            "moongate-telemetry",
            "mooncake-wire",
        ],
    ),
    ("kvstore/retention", "moongate-retention", &[]),
    ("kvstore/rdma", "moongate-rdma", &["moongate-memory", "moongate-transfer", "moongate-runtime"]),
    (
        "kvstore/router",
        "moongate-store-router",
        &[
            "moongate-master-client",
            "moongate-store-shards",
            "mooncake-wire",
            "moongate-runtime",
            "moongate-master",
            "moongate-master-core",
            "moongate-oplog",
            "moongate-store-testkit",
        ],
    ),
    ("kvstore/shards", "moongate-store-shards", &["mooncake-wire"]),
    (
        "kvstore/testkit",
        "moongate-store-testkit",
        &[
            "moongate-master",
            "moongate-master-client",
            "moongate-master-core",
            "moongate-oplog",
            "mooncake-wire",
            "moongate-runtime",
            "moongate-testkit",
        ],
    ),
    ("kvstore/tier", "moongate-tier", &["moongate-memory"]),
    (
        "kvstore/transfer",
        "moongate-transfer",
        &["moongate-memory", "mooncake-wire", "moongate-runtime", "moongate-testkit"],
    ),
    ("kvstore/wire", "mooncake-wire", &[]),
    (
        "loadtest",
        "moongate-loadtest",
        &[
            "moongate-scheduler",
            "moongate-capacity",
            "moongate-retention",
            "moongate-block-hash",
            "moongate-store-client",
            "moongate-runtime",
            "moongate-zmtp",
            "mooncake-wire",
        ],
    ),
    ("sidecar", "moongate-sidecar", &["moongate-discovery", "rbg-api", "moongate-runtime"]),
    (
        "simulation",
        "moongate-simulation",
        &[
            "moongate-gateway",
            "moongate-store-client",
            "moongate-loadtest",
            "moongate-master",
            "moongate-operator",
            "moongate-operator-testkit",
            "moongate-store-node",
            "moongate-runtime",
            "moongate-telemetry",
        ],
    ),
    ("crates/backoff", "moongate-backoff", &[]),
    ("crates/block-hash", "moongate-block-hash", &[]),
    ("crates/kube-lease", "moongate-kube-lease", &[]),
    ("crates/runtime", "moongate-runtime", &["moongate-backoff", "moongate-testkit"]),
    ("crates/telemetry", "moongate-telemetry", &["moongate-runtime", "moongate-testkit"]),
    ("crates/testkit", "moongate-testkit", &[]),
    ("crates/zmtp", "moongate-zmtp", &["moongate-backoff"]),
    ("benches", "moongate-benches", &["moongate-loadtest"]),
];

/// All dependencies of the scheduler besides the standard library: derive macros and data types.
const SCHEDULER_CLOSURE: &[&str] = &[
    "moongate-scheduler",
    "proc-macro2",
    "quote",
    "serde",
    "serde_core",
    "serde_derive",
    "syn",
    "thiserror",
    "thiserror-impl",
    "unicode-ident",
];

/// Parts of the standard library through which a decision could depend on more than its input.
const NOT_IN_SCHEDULER: &[&str] =
    &["std::env", "std::fs", "std::io", "std::net", "std::process", "std::thread", "Instant", "SystemTime"];

/// Crates that may have unsafe code, and all files with any.
const UNSAFE_CRATES: &[&str] =
    &["moongate-memory", "moongate-rdma", "moongate-store-python", "moongate-tier"];
const UNSAFE_FILES: &[&str] = &[
    "kvstore/memory/src/mapping.rs",
    "kvstore/memory/src/numa.rs",
    "kvstore/memory/src/socket.rs",
    "kvstore/python/src/registered_memory.rs",
    "kvstore/python/tests/in_process.rs",
    "kvstore/rdma/src/verbs/context.rs",
    "kvstore/rdma/src/verbs/queue_pair.rs",
    "kvstore/rdma/src/verbs/registered.rs",
    "kvstore/tier/src/ring.rs",
];

/// Maximum number of lines of a source file. A longer file has more than one subject.
const MAX_LINES: usize = 600;
/// Names that do not describe the content.
const VAGUE_NAMES: &[&str] = &["common", "helper", "helpers", "manager", "managers", "misc", "util", "utils"];
const SOURCE_EXTENSIONS: &[&str] = &["rs", "py", "sh", "js", "ts", "tsx"];
/// Folders with third-party or generated files.
const FOREIGN_FOLDERS: &[&str] = &["target", "node_modules", "corpus", "artifacts"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn cargo(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO")).args(arguments).current_dir(root()).output().unwrap();
    let problem = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "cargo {}: {problem}", arguments.join(" "));
    String::from_utf8(output.stdout).unwrap()
}

/// Crates of the workspace according to cargo: folder, and the names of all dependencies of any kind.
fn members() -> BTreeMap<String, (PathBuf, BTreeSet<String>)> {
    let metadata: Value =
        serde_json::from_str(&cargo(&["metadata", "--no-deps", "--format-version=1"])).unwrap();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let packages = metadata["packages"].as_array().unwrap().iter();
    packages
        .map(|package| {
            let manifest = PathBuf::from(text(&package["manifest_path"]));
            let folder = manifest.parent().unwrap().strip_prefix(root()).unwrap().to_owned();
            let dependencies = package["dependencies"].as_array().unwrap().iter();
            (text(&package["name"]), (folder, dependencies.map(|d| text(&d["name"])).collect()))
        })
        .collect()
}

/// Packages that are linked into the binary or run during its build: name and licence. From `cargo tree`, because `cargo metadata` also
/// lists packages of features that are off.
fn linked(extra: &[&str]) -> BTreeMap<String, String> {
    let fixed =
        ["tree", "--locked", "--prefix=none", "--target=x86_64-unknown-linux-gnu", "--format={p}\t{l}"];
    let tree = cargo(&[&fixed, extra].concat());
    let lines = tree.lines().filter(|line| !line.is_empty());
    lines
        .map(|line| {
            let (package, licence) = line.split_once('\t').unwrap();
            let name = package.split(' ').next().unwrap();
            (name.to_owned(), licence.trim_end_matches(" (*)").to_owned())
        })
        .collect()
}

/// The quoted words of a list in deny.toml, from the line that starts with `start` to its closing bracket.
fn deny_list(start: &str) -> Vec<String> {
    let text = read("deny.toml");
    let lines = text.lines().skip_while(|line| !line.starts_with(start)).skip(1);
    let list: Vec<String> = lines
        .take_while(|line| !line.starts_with(']'))
        .filter_map(|line| line.split('"').nth(1).map(str::to_owned))
        .collect();
    assert!(!list.is_empty(), "deny.toml has no list {start:?}");
    list
}

#[test]
fn crates_import_only_what_the_table_allows() {
    let members = members();
    for (name, (folder, dependencies)) in &members {
        let row = TABLE.iter().find(|(_, of, _)| of == name);
        let Some((expected, _, allowed)) = row else {
            panic!("{name} is missing in the tables of ARCHITECTURE.md and tests/documents/architecture.rs");
        };
        let place = if *name == "moongate" { "src" } else { folder.to_str().unwrap() };
        assert_eq!(place, *expected, "{name} is in another folder than the table says");
        for other in dependencies.iter().filter(|other| members.contains_key(*other)) {
            let fine = *allowed == EVERYTHING || allowed.contains(&other.as_str());
            assert!(fine, "{name} depends on {other}, which the table in ARCHITECTURE.md does not allow");
        }
    }
    for (_, name, _) in TABLE {
        assert!(members.contains_key(*name), "{name} is in the table, but not in the workspace");
    }
}

#[test]
fn no_test_kit_is_linked_into_the_binary() {
    let linked = linked(&["--package=moongate", "--edges=normal,build"]);
    let kits: Vec<&String> = linked.keys().filter(|name| name.ends_with("testkit")).collect();
    assert_eq!(kits, [""; 0], "dependencies that belong under [dev-dependencies]");
}

#[test]
fn architecture_md_has_the_same_table() {
    let page = read("ARCHITECTURE.md");
    let quoted = |text: &str| text.split('`').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>();
    let mut rows = Vec::new();
    for line in page.lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<&str> = line.trim_matches('|').split(" | ").collect();
        let [folder, name, _, imports] = cells[..] else { panic!("not four cells: {line}") };
        let imports = match imports.trim() {
            "everything" => vec!["*".to_owned()],
            "nothing of ours" => Vec::new(),
            imports => quoted(imports),
        };
        rows.push((quoted(folder)[0].trim_end_matches('/').to_owned(), quoted(name)[0].clone(), imports));
    }
    let table: Vec<_> = TABLE
        .iter()
        .map(|(folder, name, imports)| {
            let imports: Vec<String> = imports.iter().map(|&import| import.to_owned()).collect();
            ((*folder).to_owned(), (*name).to_owned(), imports)
        })
        .collect();
    assert_eq!(rows, table, "ARCHITECTURE.md on the left, tests/documents/architecture.rs on the right");
}

#[test]
fn the_scheduler_has_no_io_and_no_clock() {
    let closure = linked(&["--package=moongate-scheduler", "--edges=normal,build"]);
    for package in closure.keys() {
        let known = SCHEDULER_CLOSURE.contains(&package.as_str());
        assert!(
            known,
            "the scheduler is built from {package}; if that is pure, list it in SCHEDULER_CLOSURE"
        );
    }
    for path in source_files().iter().filter(|path| path.starts_with("scheduler/src")) {
        let text = fs::read_to_string(root().join(path)).unwrap();
        let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
        for (line, word) in code.flat_map(|line| NOT_IN_SCHEDULER.iter().map(move |word| (line, word))) {
            assert!(!line.contains(word), "{}: the scheduler must not use {word}: {line}", path.display());
        }
    }
}

#[test]
fn only_listed_files_have_unsafe_code() {
    let denied = |path: &str| {
        let text = read(path).replace("[workspace.lints.", "[lints.");
        let tables = text.split("\n[").filter(|table| table.starts_with("lints."));
        let lines = tables.flat_map(str::lines).filter(|line| !line.is_empty() && !line.starts_with('#'));
        lines.map(|line| line.replace("\"forbid\"", "\"deny\"")).collect::<Vec<_>>()
    };
    for (folder, name, _) in TABLE.iter().filter(|(_, name, _)| *name != "moongate") {
        let manifest = format!("{folder}/Cargo.toml");
        if UNSAFE_CRATES.contains(name) {
            assert_eq!(denied(&manifest), denied("Cargo.toml"), "{manifest} must have the workspace's lints");
        } else {
            let inherits = read(&manifest).contains("[lints]\nworkspace = true");
            assert!(inherits, "{manifest} lacks the workspace's lints, which forbid unsafe code");
        }
    }
    let permits = |path: &PathBuf| read(path.to_str().unwrap()).contains("#![expect(unsafe_code");
    let mut found: Vec<_> =
        source_files().into_iter().filter(|path| !path.starts_with("tests") && permits(path)).collect();
    found.sort();
    let listed: Vec<_> = UNSAFE_FILES.iter().map(PathBuf::from).collect();
    assert_eq!(found, listed, "files with unsafe code on the left, UNSAFE_FILES on the right");
}

#[test]
fn linked_packages_are_allowed_with_their_licences() {
    let (banned, licences) = (deny_list("deny = ["), deny_list("allow = ["));
    let linked = linked(&["--workspace", "--edges=normal,build"]);
    for (package, licence) in &linked {
        assert!(
            !banned.contains(package),
            "{package} is banned by deny.toml; `cargo tree -i {package}` shows who asks for it"
        );
        assert!(
            allowed(licence, &licences),
            "{package} is under {licence:?}, which deny.toml does not allow"
        );
    }
}

/// Whether an SPDX expression can be satisfied by allowed licences alone. `OR` binds weaker than `AND`, `A/B` is an old form of `OR`.
fn allowed(expression: &str, licences: &[String]) -> bool {
    let spaced =
        expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ").replace(" WITH ", "+WITH+");
    let words: Vec<String> = spaced.split_whitespace().map(|word| word.replace("+WITH+", " WITH ")).collect();
    let mut rest = words.as_slice();
    !rest.is_empty() && any_of(&mut rest, licences) && rest.is_empty()
}

fn any_of(rest: &mut &[String], licences: &[String]) -> bool {
    let mut fine = all_of(rest, licences);
    while rest.first().is_some_and(|word| word == "OR") {
        *rest = &rest[1..];
        fine |= all_of(rest, licences);
    }
    fine
}

fn all_of(rest: &mut &[String], licences: &[String]) -> bool {
    let mut fine = single(rest, licences);
    while rest.first().is_some_and(|word| word == "AND") {
        *rest = &rest[1..];
        fine &= single(rest, licences);
    }
    fine
}

fn single(rest: &mut &[String], licences: &[String]) -> bool {
    let Some((word, after)) = rest.split_first() else { return false };
    *rest = after;
    if word != "(" {
        return licences.contains(word);
    }
    let fine = any_of(rest, licences);
    let closed = rest.first().is_some_and(|word| word == ")");
    *rest = rest.get(1..).unwrap_or_default();
    fine && closed
}

#[test]
fn licence_expressions_are_parsed() {
    let licences = ["MIT", "Apache-2.0", "Apache-2.0 WITH LLVM-exception"].map(str::to_owned);
    for fine in [
        "MIT",
        "GPL-3.0 OR MIT",
        "Unlicense/MIT",
        "Apache-2.0 WITH LLVM-exception",
        "(GPL-3.0 OR MIT) AND Apache-2.0",
        "MIT AND Apache-2.0 OR GPL-3.0",
    ] {
        assert!(allowed(fine, &licences), "{fine}");
    }
    for refused in
        ["", "GPL-3.0", "MIT AND GPL-3.0", "MIT AND (GPL-3.0 OR BSL-1.0)", "(MIT", "MIT MIT", "OR MIT"]
    {
        assert!(!allowed(refused, &licences), "{refused}");
    }
}

/// Every source file of the workspace, relative to the root.
pub(super) fn source_files() -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut folders = vec![root().to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            let foreign = name.starts_with('.') || FOREIGN_FOLDERS.contains(&name.as_str());
            if entry.file_type().unwrap().is_dir() && !foreign {
                folders.push(entry.path());
            } else if entry.file_type().unwrap().is_file() {
                files.push(entry.path().strip_prefix(root()).unwrap().to_owned());
            }
        }
    }
    files.retain(|path| path.extension().is_some_and(|e| SOURCE_EXTENSIONS.iter().any(|known| e == *known)));
    files
}

#[test]
fn files_are_short_and_have_descriptive_names() {
    let files = source_files();
    assert!(files.iter().any(|path| path.ends_with("gateway/src/app.rs")), "the search finds our files");
    for path in files {
        let lines = fs::read_to_string(root().join(&path)).unwrap().lines().count();
        assert!(lines <= MAX_LINES, "{} has {lines} lines; divide it by subject", path.display());
        for part in path.with_extension("").components() {
            let name = part.as_os_str().to_str().unwrap();
            assert!(!VAGUE_NAMES.contains(&name), "{}: {name:?} does not say what is inside", path.display());
        }
    }
}

/// Shared test code is in the test kits: compiled as a module of several crates, each would have its own copy and its own dead code.
#[test]
fn no_module_is_in_the_folder_of_another_crate() {
    for path in source_files().iter().filter(|path| path.extension().is_some_and(|e| e == "rs")) {
        let text = read(path.to_str().unwrap());
        let outside = text.lines().find(|line| line.trim_start().starts_with("#[path = \"../../"));
        assert_eq!(outside, None, "{}", path.display());
    }
}

/// fuzz/Cargo.toml has the list that `scripts/test` and `scripts/fuzz` read: each target has a file, seeds, and a row in the README.
#[test]
fn fuzz_targets_are_all_listed_once() {
    let quoted = |start: &str| -> Vec<String> {
        let manifest = read("fuzz/Cargo.toml");
        let values = manifest.lines().filter_map(|line| line.strip_prefix(start)?.strip_suffix('"'));
        values.map(|value| value.trim_end_matches(".rs").to_owned()).collect()
    };
    let listed = quoted("path = \"fuzz_targets/");
    let mut names = quoted("name = \"");
    names.retain(|name| name != "moongate-fuzz");
    assert_eq!(names, listed, "a target is named after its file");

    let entries = |folder: &str| -> BTreeSet<String> {
        let entries = fs::read_dir(root().join(folder)).unwrap();
        let stem = |path: PathBuf| path.file_stem().unwrap().to_str().unwrap().to_owned();
        entries.map(|entry| stem(entry.unwrap().path())).collect()
    };
    let listed: BTreeSet<String> = listed.into_iter().collect();
    assert_eq!(entries("fuzz/fuzz_targets"), listed);
    assert_eq!(entries("fuzz/seeds"), listed);
    let readme = read("fuzz/README.md");
    let rows = readme.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
    assert_eq!(rows.map(str::to_owned).collect::<BTreeSet<_>>(), listed);
}
