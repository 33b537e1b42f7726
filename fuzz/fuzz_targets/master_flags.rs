//! The master's command line is parsed or rejected, and one dash equals two. A flag file equals the flags in it.
//!
//! The input has one argument per line, followed by a zero byte and the text of a file, for which `@` in an argument stands.

#![no_main]

use std::ffi::OsString;

use libfuzzer_sys::fuzz_target;
use moongate_fuzz::file_of;
use moongate_master::flags::{MasterInvocation, read};

/// The settings of the command line, without the random seed.
fn shown(asked: MasterInvocation) -> String {
    match asked {
        MasterInvocation::Serve(mut options) => {
            options.server.core.seed = 0;
            format!("{options:?}")
        }
        MasterInvocation::PrintText(text) => text,
    }
}

fn outcome(arguments: &[String]) -> String {
    let environment = |name: &str| (name == "FLAGS_rpc_port").then(|| "50052".to_owned());
    match read(arguments.iter().map(OsString::from), environment) {
        Ok(asked) => shown(asked),
        Err(error) => error.to_string(),
    }
}

fuzz_target!(|input: &str| {
    let (arguments, file) = input.split_once('\0').unwrap_or((input, ""));
    // Nothing but that file is to be opened, and what a file excuses counts for a command line only.
    if arguments.contains('/') || ["file", "path", "undefok"].iter().any(|name| file.contains(name)) {
        return;
    }
    let path = file_of(file.as_bytes()).to_string_lossy().into_owned();
    let arguments: Vec<String> = arguments.lines().map(|argument| argument.replace('@', &path)).collect();
    let expected = outcome(&arguments);
    if arguments.iter().all(|argument| argument.contains('=')) {
        let doubled = arguments.iter().map(|argument| match argument.strip_prefix('-') {
            Some(rest) if !rest.starts_with('-') => format!("--{rest}"),
            _ => argument.clone(),
        });
        assert_eq!(outcome(&doubled.collect::<Vec<_>>()), expected);
    }
    let flags: Vec<String> =
        file.lines().map(str::trim).filter(|line| line.starts_with('-')).map(str::to_owned).collect();
    // A flag in a file has its value in the same line, and a lone `--` ends only the file.
    if flags.iter().all(|flag| flag.contains('=')) {
        let by_file = read([format!("--flagfile={path}").into()], |_| None);
        let by_line = read(flags.iter().map(OsString::from), |_| None);
        match (by_file, by_line) {
            (Ok(by_file), Ok(by_line)) => assert_eq!(shown(by_file), shown(by_line)),
            (by_file, by_line) => assert_eq!(by_file.is_ok(), by_line.is_ok()),
        }
    }
});
