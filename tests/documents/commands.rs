//! Command lines in README.md and docs/ are given to the program itself, which must understand them.
//!
//! The convention: a block with command lines to type is marked `sh`, one that shows a command's form (`[--flag]`, `A | B`) is marked
//! `text`. In `sh` blocks, words in capitals are placeholders, and a line that ends with `…` continues as the one before.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use super::read;

/// The pages whose command lines are checked.
fn pages() -> Vec<String> {
    let docs = fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs")).unwrap();
    let names = docs.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let pages = names.filter(|name| name.ends_with(".md")).map(|name| format!("docs/{name}"));
    pages.chain(["README.md".to_owned()]).collect()
}

/// The fenced blocks of a page: what they are marked as, and their text.
fn blocks(page: &str) -> Vec<(String, String)> {
    let mut lines = page.lines();
    let mut blocks = Vec::new();
    while let Some(line) = lines.next() {
        if let Some(mark) = line.trim_start().strip_prefix("```") {
            let text: Vec<&str> = lines.by_ref().take_while(|line| line.trim() != "```").collect();
            blocks.push((mark.trim().to_owned(), text.join("\n")));
        }
    }
    blocks
}

/// Whether the line runs the program, perhaps with variables of its own.
fn runs_it(line: &str) -> bool {
    let is_variable = |word: &&str| {
        word.split_once('=')
            .is_some_and(|(name, _)| name.bytes().all(|c| c.is_ascii_uppercase() || c == b'_'))
    };
    line.split_whitespace().find(|word| !is_variable(word)) == Some("moongate")
}

/// The program's command lines in a block, each on one line.
fn commands(text: &str) -> Vec<String> {
    let whole = text.replace("\\\n", " ");
    let lines = whole.lines().map(str::trim).filter(|line| runs_it(line));
    // The rest of the line belongs to another program.
    lines.map(|line| line.split(" | ").next().unwrap().trim_end_matches(['…', '&', ' ']).to_owned()).collect()
}

/// The program's error message for an invalid command line. With `--help` at the end the program parses the line, and does nothing.
fn parse_error(line: &str) -> Option<String> {
    let script = format!("moongate() {{ \"$PROGRAM\" \"$@\" --help; }}\n{line}");
    let output = Command::new("sh")
        .args(["-c", &script])
        .env_clear()
        .env("PROGRAM", env!("CARGO_BIN_EXE_moongate"))
        .env("HOME", "/root")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    (!output.status.success()).then(|| String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn every_command_line_is_understood_by_the_program() {
    let mut checked = 0;
    for page in pages() {
        for (mark, text) in blocks(&read(&page)) {
            let found = commands(&text);
            assert!(
                found.is_empty() || ["sh", "text"].contains(&mark.as_str()),
                "{page}: a block with `{}` is marked {mark:?}; mark it `sh`, or `text` if it shows a form",
                found[0]
            );
            for line in found.iter().filter(|_| mark == "sh") {
                if let Some(complaint) = parse_error(line) {
                    panic!("{page}: {line}\n{complaint}");
                }
                checked += 1;
            }
        }
    }
    assert!(checked >= 35, "{checked} command lines");
}

#[test]
fn a_wrong_command_line_is_noticed() {
    for line in [
        "moongate gateway --prefil http://a:1",
        "moongate gateway --attempts 0",
        "moongate kv lst",
        "A=b moongate loadtest simulate --l3-gbs 3",
        "moongate master --rpc_prt=1",
    ] {
        assert!(parse_error(line).is_some(), "{line}");
    }
    assert_eq!(parse_error("A=b moongate gateway --prefill http://a:1 --policy 'least_load' # words"), None);
    let block = "A=1 B_C=2 \\\n  moongate store --x …\n# moongate none\nmoongate kv ls | wc -l\nkubectl moongate status";
    assert_eq!(commands(block), ["A=1 B_C=2    moongate store --x", "moongate kv ls"]);
}
