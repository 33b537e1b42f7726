//! An accepted config file gives the same settings as the same values in flags, and each of its keys has a setting.

#![no_main]

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{ArgAction, Parser, ValueEnum};
use libfuzzer_sys::fuzz_target;
use moongate_fuzz::file_of;
use moongate_runtime::{effective_settings, parse};

/// One setting of each kind.
#[derive(Debug, Parser)]
#[command(name = "fuzz")]
struct Settings {
    #[arg(long)]
    config: Option<PathBuf>,
    #[arg(long)]
    listen: Option<SocketAddr>,
    #[arg(long, default_value_t = 7)]
    slots: u32,
    #[arg(long)]
    sample_ratio: Option<f64>,
    #[arg(long)]
    allow_origin: bool,
    #[arg(long, action = ArgAction::Set)]
    cache: Option<bool>,
    #[arg(long)]
    static_endpoint: Vec<String>,
    #[arg(long, value_delimiter = ',')]
    model: Vec<String>,
    #[arg(long, value_enum)]
    policy: Option<Policy>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Policy {
    Random,
    CacheAware,
}

impl Settings {
    fn command_line(&self) -> Vec<OsString> {
        let mut line: Vec<String> = vec!["fuzz".to_owned(), format!("--slots={}", self.slots)];
        line.extend(self.listen.map(|address| format!("--listen={address}")));
        line.extend(self.sample_ratio.map(|ratio| format!("--sample-ratio={ratio}")));
        line.extend(self.allow_origin.then(|| "--allow-origin".to_owned()));
        line.extend(self.cache.map(|cache| format!("--cache={cache}")));
        line.extend(self.static_endpoint.iter().map(|endpoint| format!("--static-endpoint={endpoint}")));
        line.extend(self.model.iter().map(|model| format!("--model={model}")));
        let policy = self.policy.and_then(|policy| policy.to_possible_value());
        line.extend(policy.map(|policy| format!("--policy={}", policy.get_name())));
        line.into_iter().map(OsString::from).collect()
    }
}

fuzz_target!(|text: &[u8]| {
    let path = file_of(text);
    let line = || ["fuzz".into(), "--config".into(), path.clone().into_os_string()];
    let Ok(mut settings) = parse::<Settings>(line()) else { return };
    let listed = effective_settings::<Settings>(line()).expect("the same file");
    let file: toml::Table = std::str::from_utf8(text).unwrap().parse().expect("what was read is TOML");
    for key in file.keys() {
        assert!(listed.iter().any(|setting| setting.key == key.replace('_', "-")), "{key}");
    }
    settings.config = None;
    let again = parse::<Settings>(settings.command_line()).expect("what a file may say a flag may say");
    assert_eq!(format!("{again:?}"), format!("{settings:?}"));
});
