use super::*;
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::io::Write as _;
use std::net::SocketAddr;

/// Set in the child process of [`the_environment_takes_precedence_over_the_file`].
const CHILD: &str = "MOONGATE_CONFIG_TEST_CHILD";

#[derive(Parser, Debug)]
#[command(name = "moongate")]
struct ConfigTestArgs {
    #[arg(long, global = true, default_value = "info")]
    log: String,
    #[command(subcommand)]
    command: ConfigTestCommand,
}

#[derive(Subcommand, Debug)]
enum ConfigTestCommand {
    Gateway(GatewayTestArgs),
    Dev(DevTestArgs),
}

#[derive(Args, Debug)]
struct DevTestArgs {
    #[command(subcommand)]
    command: DevTestCommand,
}

#[derive(Subcommand, Debug)]
enum DevTestCommand {
    Engine(GatewayTestArgs),
    Other,
}

#[derive(Args, Debug)]
struct GatewayTestArgs {
    #[arg(long)]
    config: Option<PathBuf>,
    #[arg(long, env = "MOONGATE_TEST_LISTEN")]
    listen: SocketAddr,
    #[arg(long, default_value_t = 4)]
    connections: u16,
    #[arg(long)]
    ratio: Option<f64>,
    #[arg(long)]
    endpoint: Vec<String>,
    #[arg(long, value_delimiter = ',')]
    label: Vec<String>,
    #[arg(long, env = "MOONGATE_TEST_VERBOSE")]
    verbose: bool,
    #[arg(long, default_value = "auto")]
    mode: ConfigTestMode,
    #[arg(long)]
    admin_listen: Option<SocketAddr>,
    #[arg(long, hide_env_values = true)]
    api_key: Option<String>,
    #[arg(short, action = ArgAction::Count, long)]
    loud: u8,
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq)]
enum ConfigTestMode {
    Auto,
    Manual,
}

fn file(text: &str) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file
}

fn args(file: Option<&tempfile::NamedTempFile>, more: &[&str]) -> Vec<OsString> {
    let mut args = vec!["moongate".into(), "gateway".into()];
    if let Some(file) = file {
        args.extend(["--config".into(), file.path().as_os_str().to_owned()]);
    }
    args.extend(more.iter().map(OsString::from));
    args
}

fn gateway(text: &str, more: &[&str]) -> Result<GatewayTestArgs, ConfigError> {
    match parse::<ConfigTestArgs>(args(Some(&file(text)), more))?.command {
        ConfigTestCommand::Gateway(gateway) => Ok(gateway),
        other => panic!("{other:?}"),
    }
}

/// The error message after `FILE:`.
fn problem(text: &str) -> String {
    let message = gateway(text, &[]).unwrap_err().to_string();
    let tail = message.split_once(".tmp").map_or(message.as_str(), |(_, tail)| tail);
    tail.split_once(':').unwrap().1.to_owned()
}

#[test]
fn every_value_type_is_parsed() {
    let settings = gateway(
        "listen = '127.0.0.1:1'\nconnections = 0x10\nratio = 0.5\nendpoint = ['a,b', 'c']\nlabel = ['x,y', 'z']\n\
         verbose = true\nmode = 'manual'\nadmin_listen = '[::1]:2'\nloud = 2\n",
        &[],
    )
    .unwrap();
    assert_eq!(settings.listen, "127.0.0.1:1".parse().unwrap());
    assert_eq!(settings.connections, 16);
    assert_eq!(settings.ratio, Some(0.5));
    assert_eq!(settings.endpoint, ["a,b", "c"]);
    assert_eq!(settings.label, ["x", "y", "z"]);
    assert!(settings.verbose);
    assert_eq!(settings.mode, ConfigTestMode::Manual);
    assert_eq!(settings.admin_listen, Some("[::1]:2".parse().unwrap()));
    assert_eq!(settings.loud, 2);
    assert!(settings.api_key.is_none());
}

#[test]
fn a_flag_overrides_the_file() {
    let text = "listen = '127.0.0.1:1'\nendpoint = ['a', 'b']\nconnections = 1\n";
    let settings = gateway(text, &["--listen", "127.0.0.1:2", "--endpoint", "c"]).unwrap();
    assert_eq!(settings.listen.port(), 2);
    assert_eq!(settings.endpoint, ["c"]);
    assert_eq!(settings.connections, 1);
}

#[test]
fn a_repeated_flag_takes_one_value_or_an_empty_array() {
    assert_eq!(gateway("listen = '[::]:1'\nendpoint = 'a'\n", &[]).unwrap().endpoint, ["a"]);
    let none = gateway("listen = '[::]:1'\nendpoint = []\nverbose = false\n", &[]).unwrap();
    assert!(none.endpoint.is_empty());
    assert!(!none.verbose);
}

#[test]
fn global_flags_and_nested_subcommands_read_the_file() {
    let file = file("listen = '[::]:9'\nlog = 'debug'\n");
    let nested = ["moongate", "dev", "engine", "--config"].map(OsString::from);
    let cli = parse::<ConfigTestArgs>(nested.into_iter().chain([file.path().into()])).unwrap();
    assert_eq!(cli.log, "debug");
    let ConfigTestCommand::Dev(DevTestArgs { command: DevTestCommand::Engine(engine) }) = cli.command else {
        panic!("{cli:?}")
    };
    assert_eq!(engine.listen.port(), 9);
    let flag = parse::<ConfigTestArgs>(args(Some(&file), &["--log", "trace"])).unwrap();
    assert_eq!(flag.log, "trace");
}

#[test]
fn a_subcommand_without_config_reads_none() {
    let cli = parse::<ConfigTestArgs>(["moongate", "dev", "other"].map(OsString::from)).unwrap();
    assert!(matches!(cli.command, ConfigTestCommand::Dev(DevTestArgs { command: DevTestCommand::Other })));
}

#[test]
fn errors_name_the_line_and_a_fix() {
    assert_eq!(
        problem("# first\n\nlisen = '[::]:1'\n"),
        "3: `moongate gateway` has no setting `lisen`; did you mean `listen`?"
    );
    assert_eq!(
        problem("zzz = 1\n"),
        "1: `moongate gateway` has no setting `zzz`; `moongate gateway --help` lists them, without `--`"
    );
    assert_eq!(
        problem("[zzz]\n"),
        "1: `zzz` is a table; settings are not grouped: write the key without a table"
    );
    assert!(problem("config = 'x'\n").contains("has no setting `config`"));
    assert!(problem("help = true\n").contains("has no setting `help`"));
    assert_eq!(
        problem("\nlisten = 'nowhere'\n"),
        "2: invalid value 'nowhere' for '--listen <LISTEN>': invalid socket address syntax"
    );
    assert!(problem("connections = 70000\n").contains("70000 is not in 0..=65535"));
    assert!(problem("connections = -1\n").contains("-1 is not in 0..=65535"));
    assert!(problem("mode = 'manul'\n").contains("[possible values: auto, manual]"));
    assert_eq!(problem("connections = [1, 2]\n"), "1: `connections` takes one value, not an array");
    assert_eq!(problem("listen = true\n"), "1: `listen` takes a string or a number, not a boolean");
    assert_eq!(
        problem("listen = 2020-01-01\n"),
        "1: `listen` takes a string or a number, not a date or time"
    );
    assert_eq!(problem("verbose = 'yes'\n"), "1: `verbose` is true or false, not a string");
    assert_eq!(
        problem("admin-listen = '[::]:1'\nadmin_listen = '[::]:2'\n"),
        "2: `admin-listen` is set twice; remove one of the two"
    );
}

#[test]
fn overridden_values_in_the_file_are_validated() {
    let error = gateway("listen = 'nowhere'\n", &["--listen", "[::]:1"]).unwrap_err();
    let ConfigError::Entry { line: 1, source: ConfigEntryError::Value { key, .. }, .. } = error else {
        panic!("{error}")
    };
    assert_eq!(key, "listen");
}

#[test]
fn syntax_errors_show_line_and_column() {
    let error = gateway("listen = '[::]:1'\nconnections = = 3\n", &[]).unwrap_err();
    assert!(matches!(error, ConfigError::Syntax { .. }));
    assert!(error.to_string().contains("line 2, column 15"), "{error}");
    assert!(gateway("a = 1\na = 2\n", &[]).unwrap_err().to_string().contains("line 2"));
}

#[test]
fn a_missing_file_is_named() {
    let error = parse::<ConfigTestArgs>(args(None, &["--config", "/no/such.toml"])).unwrap_err();
    assert!(error.to_string().starts_with("cannot read the config file /no/such.toml: "), "{error}");
    let directory = parse::<ConfigTestArgs>(args(None, &["--config", "/"])).unwrap_err();
    assert!(matches!(directory, ConfigError::Read { .. }), "{directory}");
}

#[test]
fn usage_errors_stay_those_of_clap() {
    let code = |more: &[&str]| match parse::<ConfigTestArgs>(args(None, more)) {
        Err(ConfigError::Usage(error)) => error.exit_code(),
        other => panic!("{other:?}"),
    };
    assert_eq!(code(&[]), 2, "listen is required");
    assert_eq!(code(&["--nonsense"]), 2);
    assert_eq!(code(&["--listen", "nowhere"]), 2);
    assert_eq!(code(&["--help"]), 0);
}

#[test]
fn effective_settings_list_their_origin() {
    let file = file("listen = '[::]:1'\nendpoint = ['a', 'b']\napi-key = 'secret'\nverbose = true\n");
    let settings = effective_settings::<ConfigTestArgs>(args(Some(&file), &["--connections", "9"])).unwrap();
    let setting_of = |key: &str| {
        let setting = settings.iter().find(|setting| setting.key == key).unwrap();
        (setting.value.as_deref(), setting.origin)
    };
    assert_eq!(setting_of("listen"), (Some("[::]:1"), SettingOrigin::File));
    assert_eq!(setting_of("endpoint"), (Some("a,b"), SettingOrigin::File));
    assert_eq!(setting_of("connections"), (Some("9"), SettingOrigin::Flag));
    assert_eq!(setting_of("mode"), (Some("auto"), SettingOrigin::Default));
    assert_eq!(setting_of("admin-listen"), (None, SettingOrigin::Default));
    assert_eq!(setting_of("api-key"), (Some("(hidden)"), SettingOrigin::File));
    assert_eq!(setting_of("verbose"), (Some("true"), SettingOrigin::File));
    assert_eq!(setting_of("log"), (Some("info"), SettingOrigin::Default));
    assert!(!settings.iter().any(|setting| setting.key == "config" || setting.key == "help"));
    assert_eq!(settings.iter().filter(|setting| setting.key == "log").count(), 1);
}

/// The environment of a test process cannot be changed safely, so a child process reads the settings.
#[test]
fn the_environment_takes_precedence_over_the_file() {
    let file = file("listen = '[::]:1'\nverbose = true\n");
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "config::tests::child", "--nocapture"])
        .env(CHILD, "1")
        .env(CONFIG_ENV, file.path())
        .env("MOONGATE_TEST_LISTEN", "[::]:2")
        .env("MOONGATE_TEST_VERBOSE", "false")
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}");
    assert!(text.contains("child ran"), "{text}");
}

#[test]
fn child() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let settings = effective_settings::<ConfigTestArgs>(args(None, &[])).unwrap();
    let setting_of = |key: &str| settings.iter().find(|setting| setting.key == key).unwrap().clone();
    assert_eq!(
        (setting_of("listen").value.as_deref(), setting_of("listen").origin),
        (Some("[::]:2"), SettingOrigin::Env)
    );
    assert_eq!(setting_of("listen").env.as_deref(), Some("MOONGATE_TEST_LISTEN"));
    assert_eq!(
        (setting_of("verbose").value.as_deref(), setting_of("verbose").origin),
        (Some("false"), SettingOrigin::Env)
    );
    let flag = parse::<ConfigTestArgs>(args(None, &["--listen", "[::]:3", "--verbose"])).unwrap();
    let ConfigTestCommand::Gateway(flag) = flag.command else { panic!("{flag:?}") };
    assert_eq!(flag.listen.port(), 3);
    assert!(flag.verbose);
    println!("child ran");
}
