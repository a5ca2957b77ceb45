//! `cargo xtask figures`: measures of how easy the code is to live in, printed and never judged.
//! Tests are left out. Most measures are of what runs on a node ([`NODE`]).

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::Result;
use regex::Regex;

use crate::metadata::{Metadata, Node, Package};
use crate::prose::is_relative;
use crate::sources;

/// Programs that run on a node. The crates that they link are found by `cargo metadata`, so that a
/// new one counts from its first day.
const NODE: &[&str] = &[
    "divvy-kubelet-plugin",
    "divvy-mps-supervisor",
    "divvy-cdi-hook",
];

/// Functions with more lines than this are named.
const LONG_FUNCTION: usize = 80;
/// Types with fewer methods are not looked at for cycles.
const MANY_METHODS: usize = 16;

struct File {
    path: String,
    room: Option<String>,
    lines: Vec<String>,
}

/// A type: its room and name.
type Type = (String, String);

/// Prints the measures.
pub(crate) fn run(root: &Path) -> Result<()> {
    let mut files = Vec::new();
    let rooms = rooms(root, &crate::metadata::read(root, &[])?);
    for path in sources::files(root, "*.rs")? {
        if !sources::is_test(&path) {
            let text = fs_err::read_to_string(root.join(&path))?;
            let lines = sources::product(&text).into_iter().map(str::to_owned);
            files.push(File {
                room: room(&rooms, &path),
                lines: lines.collect(),
                path,
            });
        }
    }
    for line in report(&files)? {
        crate::say(&line);
    }
    Ok(())
}

/// Returns the folders of our crates that the programs of a node link.
fn rooms(root: &Path, metadata: &Metadata) -> BTreeSet<String> {
    let ours: BTreeMap<&str, &Package> = metadata
        .packages
        .iter()
        .filter(|package| package.source.is_none())
        .map(|package| (package.id.as_str(), package))
        .collect();
    let programs = ours.values().filter(|p| NODE.contains(&p.name.as_str()));
    let mut todo: Vec<&str> = programs.map(|package| package.id.as_str()).collect();
    let mut linked = BTreeSet::new();
    while let Some(id) = todo.pop() {
        if linked.insert(id) {
            let mut nodes = metadata.resolve.nodes.iter();
            let links = nodes.find(|node| node.id == id).map(Node::linked);
            let links = links.into_iter().flatten();
            todo.extend(links.filter(|to| ours.contains_key(to)));
        }
    }
    let folder = |id: &str| {
        let folder = ours.get(id)?.manifest_path.parent()?;
        Some(folder.strip_prefix(root).ok()?.to_str()?.to_owned())
    };
    linked.into_iter().filter_map(folder).collect()
}

fn room(rooms: &BTreeSet<String>, path: &str) -> Option<String> {
    let is_in = |room: &&String| {
        path.strip_prefix(room.as_str())
            .is_some_and(|rest| rest.starts_with('/'))
    };
    rooms.iter().find(is_in).cloned()
}

fn report(files: &[File]) -> Result<Vec<String>> {
    let lines = Lines::of(files)?;
    let code: usize = lines.code.values().sum();
    let rooms = largest(lines.code.iter().map(|(room, count)| (*count, room)), 99);
    let long = functions(files)?;
    let (methods, homes) = methods(files)?;
    let mut cycles = Vec::new();
    for (of, count) in &methods {
        if let Some(homes) = homes.get(of).filter(|_| *count >= MANY_METHODS) {
            cycles.push((largest_cycle(files, &of.0, homes)?, of));
        }
    }
    let refusals = files
        .iter()
        .filter(|file| file.path.starts_with("crates/executor/"))
        .flat_map(|file| &file.lines)
        .map(|line| word_count(line, "Why::"))
        .sum::<usize>();
    Ok(vec![
        format!("code lines on a node: {code} ({})", shown(&rooms)),
        format!(
            "doc comments that begin with a relative word: {} % of {}",
            tenths(100 * lines.relative, lines.docs),
            lines.docs
        ),
        format!(
            "inline comments: {} % of {} lines",
            tenths(100 * lines.inline, lines.all),
            lines.all
        ),
        format!(
            "named closures per 1000 code lines: {}",
            tenths(1000 * lines.closures, code)
        ),
        format!(
            "functions over {LONG_FUNCTION} lines: {} ({})",
            long.len(),
            shown(&largest(long.into_iter(), 4))
        ),
        format!(
            "methods on one type: {}",
            shown(&largest(
                methods
                    .iter()
                    .map(|((room, name), count)| (*count, format!("{room} {name}"))),
                4
            ))
        ),
        format!(
            "files in the largest cycle of calls: {}",
            shown(&largest(
                cycles
                    .into_iter()
                    .map(|(size, (room, name))| (size, format!("{room} {name}"))),
                3
            ))
        ),
        format!("refusals made in the executor: {refusals}"),
    ])
}

/// Counts of lines on a node.
#[derive(Default)]
struct Lines {
    code: BTreeMap<String, usize>,
    all: usize,
    inline: usize,
    closures: usize,
    /// Blocks of documentation.
    docs: usize,
    /// Blocks of documentation that begin with a relative word.
    relative: usize,
}

impl Lines {
    fn of(files: &[File]) -> Result<Self> {
        let closure = Regex::new(r"^let \w+ = (move )?\|")?;
        let mut counts = Self::default();
        for file in files {
            let Some(room) = &file.room else { continue };
            let mut in_docs = false;
            for line in file.lines.iter().map(|line| line.trim()) {
                counts.all += 1;
                if let Some(text) = line.strip_prefix("///").or(line.strip_prefix("//!")) {
                    if !in_docs {
                        counts.docs += 1;
                        counts.relative += usize::from(is_relative(text.trim()));
                    }
                    in_docs = true;
                    continue;
                }
                in_docs = false;
                if line.starts_with("//") {
                    counts.inline += 1;
                } else if !line.is_empty() {
                    *counts.code.entry(room.clone()).or_default() += 1;
                }
                counts.closures += usize::from(closure.is_match(line));
            }
        }
        Ok(counts)
    }
}

/// Matches the line that begins a function; groups: indentation, name.
fn function() -> Result<Regex> {
    Ok(Regex::new(
        r"^(\s*)(?:pub(?:\([^)]*\))? )?(?:const )?(?:async )?(?:unsafe )?fn (\w+)",
    )?)
}

/// Returns the long functions of all crates: lines, place.
fn functions(files: &[File]) -> Result<Vec<(usize, String)>> {
    let function = function()?;
    let mut found = Vec::new();
    for file in files {
        for (begin, line) in file.lines.iter().enumerate() {
            let Some(parts) = function.captures(line) else {
                continue;
            };
            let end = format!("{}}}", &parts[1]);
            let rest = file.lines.iter().skip(begin);
            let Some(last) = rest.into_iter().position(|line| *line == end) else {
                continue;
            };
            if last + 1 > LONG_FUNCTION {
                found.push((last + 1, format!("{} {}", file.path, &parts[2])));
            }
        }
    }
    Ok(found)
}

/// Files of the methods of a type, by method.
type Homes = BTreeMap<String, String>;

/// Returns the number of methods of each type on a node, and the files they are in.
fn methods(files: &[File]) -> Result<(BTreeMap<Type, usize>, BTreeMap<Type, Homes>)> {
    let function = function()?;
    let implementation = Regex::new(r"^impl(?:<[^>]*>)? (?:[\w:<>, ]+ for )?(\w+)")?;
    let mut counts = BTreeMap::new();
    let mut homes: BTreeMap<Type, Homes> = BTreeMap::new();
    for file in files {
        let Some(room) = &file.room else { continue };
        let mut of = None;
        for line in &file.lines {
            if let Some(parts) = implementation.captures(line) {
                of = Some((room.clone(), parts[1].to_owned()));
            } else if line.starts_with('}') {
                of = None;
            }
            if let (Some(of), Some(parts)) = (&of, function.captures(line))
                && &parts[1] == "    "
            {
                *counts.entry(of.clone()).or_default() += 1;
                let methods = homes.entry(of.clone()).or_default();
                methods
                    .entry(parts[2].to_owned())
                    .or_insert_with(|| file.path.clone());
            }
        }
    }
    Ok((counts, homes))
}

/// Returns the number of files that reach each other by calls of a type's methods.
fn largest_cycle(files: &[File], room: &str, homes: &Homes) -> Result<usize> {
    let call = Regex::new(r"(?:self|Self)(?:\.|::)(\w+)\(")?;
    let members: BTreeSet<&str> = homes.values().map(String::as_str).collect();
    let mut calls: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for file in files
        .iter()
        .filter(|file| file.room.as_deref() == Some(room) && members.contains(file.path.as_str()))
    {
        let called = call
            .captures_iter(&file.lines.join("\n"))
            .filter_map(|parts| homes.get(&parts[1]))
            .map(String::as_str)
            .filter(|home| *home != file.path)
            .collect();
        calls.insert(&file.path, called);
    }
    let reach: BTreeMap<&str, BTreeSet<&str>> = members
        .iter()
        .map(|file| (*file, reached(&calls, file)))
        .collect();
    let size = |(file, to): (&&str, &BTreeSet<&str>)| {
        let back = |other: &&&str| reach.get(**other).is_some_and(|all| all.contains(file));
        to.iter().filter(back).count()
    };
    Ok(reach.iter().map(size).max().unwrap_or_default())
}

/// Returns the files that a file reaches by calls, itself only if it is called back.
fn reached<'a>(calls: &BTreeMap<&'a str, BTreeSet<&'a str>>, from: &'a str) -> BTreeSet<&'a str> {
    let (mut seen, mut todo) = (BTreeSet::new(), vec![from]);
    while let Some(file) = todo.pop() {
        let called = calls.get(file).into_iter().flatten();
        todo.extend(called.filter(|to| seen.insert(**to)));
    }
    seen
}

/// Counts occurrences that do not continue a longer word.
fn word_count(line: &str, word: &str) -> usize {
    let begins = |(at, _): &(usize, &str)| {
        let before = line.get(..*at).and_then(|before| before.chars().last());
        before.is_none_or(|c| !c.is_alphanumeric() && c != '_')
    };
    line.match_indices(word).filter(begins).count()
}

/// Returns the first of a list in descending order of their number.
fn largest<T>(all: impl Iterator<Item = (usize, T)>, count: usize) -> Vec<(usize, T)> {
    let mut all: Vec<_> = all.collect();
    all.sort_by_key(|(number, _)| std::cmp::Reverse(*number));
    all.truncate(count);
    all
}

fn shown<T: std::fmt::Display>(all: &[(usize, T)]) -> String {
    let all = all.iter().map(|(number, name)| format!("{name} {number}"));
    all.collect::<Vec<_>>().join(", ")
}

/// Writes a quotient with one decimal place, rounded.
fn tenths(number: usize, of: usize) -> String {
    let tenths = (20 * number + of).checked_div(2 * of).unwrap_or_default();
    format!("{}.{}", tenths / 10, tenths % 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, text: &str) -> File {
        File {
            path: path.to_owned(),
            room: room(&BTreeSet::from(["crates/executor".to_owned()]), path),
            lines: text.lines().map(str::to_owned).collect(),
        }
    }

    /// A crate that is new is counted without being named here.
    #[test]
    fn all_crates_that_a_node_links_are_counted() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let rooms = rooms(root, &crate::metadata::read(root, &[]).unwrap());
        let counted = [
            "kubelet-plugin",
            "crates/gpu",
            "crates/forms",
            "crates/files",
        ];
        for room in counted {
            assert!(rooms.contains(room), "{room}: {rooms:?}");
        }
        for other in ["cli", "crates/fake-cluster", "crates/nvml-mock", "xtask"] {
            assert!(!rooms.contains(other), "{other}");
        }
    }

    #[test]
    fn each_measure_counts_what_it_names() {
        let long = format!("fn long() {{\n{}}}\n", "    x();\n".repeat(79));
        let many: Vec<_> = (0..15).map(|n| format!("    fn m{n}() {{}}\n")).collect();
        let many = many.concat();
        let files = [
            file(
                "crates/executor/src/a.rs",
                &format!(
                    "//! What it is.\n\n/// Returns b.\n/// How, does not count.\nimpl Executor {{\n    fn a(&self) {{ self.b() }}\n{many}}}\n"
                ),
            ),
            file(
                "crates/executor/src/b.rs",
                "impl Port for Executor {\n    // Inline.\n    fn b(&self) {\n        let f = || Why::Held;\n        Self::a(self, NotWhy::Held)\n    }\n}\n",
            ),
            file("cli/src/c.rs", &long),
        ];
        assert_eq!(
            report(&files).unwrap(),
            [
                "code lines on a node: 24 (crates/executor 24)",
                "doc comments that begin with a relative word: 50.0 % of 2",
                "inline comments: 3.4 % of 29 lines",
                "named closures per 1000 code lines: 41.7",
                "functions over 80 lines: 1 (cli/src/c.rs long 81)",
                "methods on one type: crates/executor Executor 17",
                "files in the largest cycle of calls: crates/executor Executor 2",
                "refusals made in the executor: 1",
            ]
        );
    }
}
