//! The tables of all metrics in docs/metrics.md. They are generated from the metrics of the programs: from metrics that all have a sample where labels show
//! only then, else from a running program. Each name in them is written in one place of the code.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::architecture::source_files;
use super::{http_exchange, moongate, read};

/// Set, the page is written instead of compared.
const WRITE: &str = "MOONGATE_WRITE_DOCS";
const PAGE: &str = "docs/metrics.md";

/// A family of metrics, as it is scraped.
#[derive(Debug, Default)]
struct ScrapedMetricFamily {
    kind: String,
    help: String,
    labels: BTreeSet<String>,
}

/// Reads either text format; the families have the names that queries use. OpenMetrics text has families of counters without `_total`.
fn families(text: &str) -> BTreeMap<String, ScrapedMetricFamily> {
    let mut families: BTreeMap<String, ScrapedMetricFamily> = BTreeMap::new();
    for line in text.lines() {
        if let Some((name, help)) = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' ')) {
            families.entry(name.to_owned()).or_default().help = help.to_owned();
        } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' '))
        {
            families.entry(name.to_owned()).or_default().kind = kind.to_owned();
        } else if let Some((sample, labels)) = line.split_once('{') {
            let base = |suffix: &&str| families.contains_key(sample.strip_suffix(suffix).unwrap_or_default());
            let suffix = ["_total", "_bucket", "_sum", "_count"].into_iter().find(base);
            let name = if families.contains_key(sample) {
                sample
            } else {
                sample.strip_suffix(suffix.unwrap_or("")).unwrap()
            };
            let labels = labels.rsplit_once('}').unwrap().0;
            let names = labels.split("\",").filter_map(|label| label.split_once("=\"")).map(|(name, _)| name);
            let family = families.get_mut(name).unwrap_or_else(|| panic!("{line} has no family"));
            family.labels.extend(names.filter(|name| *name != "le").map(str::to_owned));
        }
    }
    let is_open_metrics = text.contains("\n# EOF");
    let name_of = |name: String, kind: &str| {
        if is_open_metrics && kind == "counter" { format!("{name}_total") } else { name }
    };
    families.into_iter().map(|(name, family)| (name_of(name, &family.kind), family)).collect()
}

/// The table's rows; `is_listed` selects metrics by name.
fn table(text: &str, is_listed: impl Fn(&str) -> bool) -> String {
    let mut table = String::from("| name | type | unit | labels | what |\n|---|---|---|---|---|\n");
    for (name, family) in families(text).iter().filter(|(name, _)| is_listed(name)) {
        let base = name.trim_end_matches("_total");
        let unit =
            ["seconds", "bytes", "tokens"].into_iter().find(|unit| base.ends_with(&format!("_{unit}")));
        let labels: Vec<String> = family.labels.iter().map(|label| format!("`{label}`")).collect();
        let labels = if labels.is_empty() { "–".to_owned() } else { labels.join(", ") };
        let (kind, unit, help) = (&family.kind, unit.unwrap_or("–"), family.help.replace('|', "\\|"));
        assert!(
            !help.is_empty() && ["counter", "gauge", "histogram"].contains(&kind.as_str()),
            "{name}: {family:?}"
        );
        writeln!(table, "| `{name}` | {kind} | {unit} | {labels} | {help} |").unwrap();
    }
    table
}

/// A program that is ended when dropped.
struct ScrapedProgram {
    child: Child,
    /// The value after each of the words that were looked for in its log.
    log_values: [String; 2],
}

impl ScrapedProgram {
    /// Starts a program, and reads the two addresses that follow `words` in its log.
    fn start(command: &mut Command, words: [&str; 2]) -> Self {
        let mut child = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
        let mut values = [const { None }; 2];
        while values.contains(&None) {
            let line = log.next().unwrap_or_else(|| panic!("exited before logging {words:?}: {values:?}"));
            for (word, value) in words.iter().zip(&mut values) {
                if let Some((_, after)) = line.split_once(word) {
                    *value = after.split(' ').next().map(str::to_owned);
                }
            }
        }
        // Without a reader the program would block on a full pipe.
        std::thread::spawn(move || log.for_each(drop));
        Self { child, log_values: values.map(Option::unwrap) }
    }
}

impl Drop for ScrapedProgram {
    fn drop(&mut self) {
        // Already gone is fine.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The metrics of a master and a store node with all optional functions, after an object was put and read.
fn store() -> [String; 2] {
    let folder = tempfile::tempdir().unwrap();
    let events = "--kv_events_bind_endpoint=tcp://127.0.0.1:0";
    let here = ["--rpc_address=127.0.0.1", "--rpc_port=0", "--metrics_host=127.0.0.1", "--metrics_port=0"];
    let data = format!("--data_dir={}", folder.path().join("master").display());
    let flags =
        ["master", "--enable_kv_events", events, "--kv_events_backend_id=b", "--enable_offload", &data];
    let master = ScrapedProgram::start(&mut moongate(&[&flags[..], &here].concat()), [" rpc=", " admin="]);
    let mut store = moongate(&["store", "--port=0", "--tier-size=64mb", "-Dglobal_segment_size=64mb"]);
    store.env("MOONCAKE_MASTER", &master.log_values[0]).env("MOONCAKE_LOCAL_HOSTNAME", "127.0.0.1");
    store.env("MOONCAKE_OFFLOAD_ENABLED", "true").env("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH", folder.path());
    let store = ScrapedProgram::start(&mut store, [" data_port=", " http="]);
    let [object, again] = ["object", "again"].map(|name| folder.path().join(name).display().to_string());
    fs::write(&object, "value").unwrap();
    for arguments in [["kv", "put", "a/key", &object], ["kv", "get", "a/key", &again]] {
        let done = moongate(&arguments).env("MOONCAKE_MASTER", &master.log_values[0]).status().unwrap();
        assert!(done.success(), "{arguments:?}");
    }
    [&master, &store].map(|running| http_exchange(&running.log_values[1], "GET /metrics", ""))
}

/// The page with these tables between the marks of their names.
fn replace_tables(page: &str, tables: &[(&str, String)]) -> String {
    let mut page = page.to_owned();
    for (name, table) in tables {
        let begin = format!("<!-- table: {name} -->\n");
        let (before, rest) = page.split_once(&begin).unwrap_or_else(|| panic!("{PAGE} has no mark {begin}"));
        let (_, after) = rest.split_once("<!-- end -->").unwrap();
        page = format!("{before}{begin}{table}<!-- end -->{after}");
    }
    page
}

/// What a running gateway shows is in the table, with its labels.
pub(super) fn describe_what_is_scraped(scraped: &str) {
    let described = families(&moongate_gateway::all_metrics());
    for (name, family) in families(scraped.split_once("\r\n\r\n").unwrap().1) {
        let row = described.get(&name).unwrap_or_else(|| panic!("{name} is in no table"));
        assert!(family.labels.is_subset(&row.labels), "{name}: {family:?}, not {row:?}");
    }
}

#[test]
fn the_page_of_metrics_matches_the_programs() {
    let [master, node] = store();
    let is_ours = |name: &str| name.starts_with("moongate_");
    // Of each call of the master there are two to five, which the page describes in one sentence.
    let of_master = families(&master);
    let is_of_calls =
        |name: &str| of_master[name].help.split_once(": ").is_some_and(|(call, _)| !call.contains(' '));
    let tables = [
        ("gateway", table(&moongate_gateway::all_metrics(), is_ours)),
        ("operator", table(&moongate_operator::OperatorMetrics::sample_text(), is_ours)),
        ("planner", table(&moongate_planner::PlannerMetrics::sample_text(), is_ours)),
        ("sidecar", table(&moongate_sidecar::all_metrics(), is_ours)),
        ("store", table(&node, is_ours)),
        ("master", table(&master, |name| !is_of_calls(name))),
    ];
    let of_gateway = families(&moongate_gateway::all_metrics());
    let aliases = of_gateway.iter().filter_map(|(alias, family)| {
        let name = family.help.strip_prefix("Same as ")?.strip_suffix('.')?;
        Some(format!("| `{alias}` | {name} |\n"))
    });
    let aliases = format!("| name in smg | name here |\n|---|---|\n{}", aliases.collect::<String>());
    let tables = tables.into_iter().chain([("aliases", aliases)]);
    let page = read(PAGE);
    let wanted = replace_tables(&page, &tables.collect::<Vec<_>>());
    if std::env::var_os(WRITE).is_some() {
        fs::write(Path::new(env!("CARGO_MANIFEST_DIR")).join(PAGE), wanted).unwrap();
        return;
    }
    let differ: Vec<_> = page.lines().zip(wanted.lines()).filter(|(is, shall)| is != shall).take(3).collect();
    assert!(page == wanted, "{PAGE} differs from the programs; {WRITE}=1 writes it: {differ:#?}");
}

/// Names of all metrics in the tables of the page.
fn documented_names(page: &str) -> BTreeSet<String> {
    let tables = page.split("<!-- table: ").skip(1).filter_map(|table| table.split("<!-- end -->").next());
    let rows = tables.flat_map(str::lines).filter_map(|row| row.strip_prefix("| `")?.split_once('`'));
    rows.map(|(name, _)| name.to_owned()).collect()
}

fn is_test_code(path: &Path) -> bool {
    let is_test_folder = |part: &std::ffi::OsStr| part == "tests" || part == "benches";
    let stem = path.file_stem().and_then(std::ffi::OsStr::to_str).unwrap_or_default();
    path.iter().any(is_test_folder) || stem == "tests" || stem.ends_with("_tests")
}

#[test]
fn every_metric_name_is_whole_in_one_file() {
    let names = documented_names(&read(PAGE));
    assert!(names.contains("moongate_requests_total") && names.contains("master_key_count"), "{names:?}");
    let mut files: BTreeMap<&str, Vec<&Path>> =
        names.iter().map(|name| (name.as_str(), Vec::new())).collect();
    let sources = source_files();
    for path in sources.iter().filter(|path| path.extension().is_some_and(|extension| extension == "rs")) {
        if is_test_code(path) {
            continue;
        }
        let text = read(path.to_str().unwrap());
        let literals: BTreeSet<&str> = text.split('"').collect();
        for literal in literals {
            if let Some(found) = files.get_mut(literal) {
                found.push(path);
            }
        }
    }
    files.retain(|_, found| found.len() != 1);
    assert!(files.is_empty(), "names that are not a whole literal in exactly one file: {files:#?}");
}
