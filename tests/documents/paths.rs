//! Files and names in the walks and recipes for contributors: each file exists, and contains the names that follow it.
//!
//! The convention: in backticks, a path from the root, then names of items in that file, up to the end of the line or of the cell.

use std::path::Path;

use super::read;

const PAGES: [&str; 4] =
    ["ARCHITECTURE.md", "docs/claims.md", "docs/how-to-add.md", "docs/upstream-tests.md"];
/// What begins a path from the root.
const TOP_FOLDERS: [&str; 14] = [
    "benches/",
    "charts/",
    "crates/",
    "discovery/",
    "docs/",
    "fuzz/",
    "gateway/",
    "kvstore/",
    "loadtest/",
    "operator/",
    "scheduler/",
    "scripts/",
    "src/",
    "tests/",
];

/// The text in backticks of a line or cell.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// `a/{b,c}.rs` as `a/b.rs` and `a/c.rs`.
fn expand(path: &str) -> Vec<String> {
    match path.split_once('{').and_then(|(before, rest)| Some((before, rest.split_once('}')?))) {
        Some((before, (choices, after))) => {
            choices.split(',').map(|choice| format!("{before}{choice}{after}")).collect()
        }
        None => vec![path.to_owned()],
    }
}

fn is_path(text: &str) -> bool {
    let is_part = |c: char| c.is_ascii_alphanumeric() || "/._-{},".contains(c);
    TOP_FOLDERS.iter().any(|folder| text.starts_with(folder)) && text.chars().all(is_part)
}

/// The item's own name in `Type::function`.
fn item(text: &str) -> Option<&str> {
    let is_name = |part: &str| {
        part.starts_with(|c: char| c.is_ascii_alphabetic())
            && part.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
    };
    text.split("::").all(is_name).then(|| text.rsplit("::").next())?
}

fn has_word(text: &str, word: &str) -> bool {
    text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').any(|other| other == word)
}

/// What is wrong with a page, and how many names of items were found.
fn problems(page: &str) -> (Vec<String>, usize) {
    let (mut problems, mut items) = (Vec::new(), 0);
    for cell in page.lines().flat_map(|line| line.split('|')) {
        let mut file = None;
        for text in quoted(cell) {
            if is_path(text) {
                let missing = |path: &String| !Path::new(env!("CARGO_MANIFEST_DIR")).join(path).exists();
                problems.extend(expand(text).into_iter().filter(missing));
                file = text.ends_with(".rs").then_some(text);
            } else if let (Some(path), Some(name)) = (file, item(text)) {
                items += 1;
                if Path::new(env!("CARGO_MANIFEST_DIR")).join(path).is_file() && !has_word(&read(path), name)
                {
                    problems.push(format!("{path} has no {name}"));
                }
            }
        }
    }
    (problems, items)
}

#[test]
fn files_and_items_in_walks_and_recipes_exist() {
    let mut items = 0;
    for page in PAGES {
        let (problems, found) = problems(&read(page));
        assert!(problems.is_empty(), "{page}: {problems:#?}");
        items += found;
    }
    assert!(items >= 40, "{items} names of items");
}

#[test]
fn a_missing_file_or_item_is_noticed() {
    let line = "`tests/documents/paths.rs` `problems` and `Page::item`, `tests/{documents,nowhere}/main.rs`, `/v1/models`, `a b`";
    assert_eq!(problems(line), (vec!["tests/nowhere/main.rs".to_owned()], 2));
    let line = "`tests/documents/main.rs` `has_word` | `also_unknown`";
    assert_eq!(problems(line), (vec!["tests/documents/main.rs has no has_word".to_owned()], 1));
}
