//! Rules about names and comments that were introduced when many places broke them: no crate may
//! get worse, and [`ALLOWED`] is lowered when one gets better.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::Result;

use crate::sources;

/// Sentences of documentation that begin with a relative word, and functions with a long name, by
/// crate. A crate without a line has none.
const ALLOWED: &[(&str, usize, usize)] = &[];

/// Words that no sentence of documentation begins with: the reader has to look ahead, or back, to
/// learn what the sentence is about.
const RELATIVE: &[&str] = &[
    "What", "Whether", "Who", "Whose", "Which", "How", "Those", "That", "One", "Of", "As",
];

/// Most characters in the name of a test.
const LONGEST_NAME: usize = 70;
/// Most characters in a line. The formatter wraps code and leaves comments as they are.
const WIDEST_LINE: usize = 100;
/// Most characters in the subject of a commit.
const LONGEST_SUBJECT: usize = 72;
/// Commits before this moment are older than the rule about subjects.
const SUBJECTS_SINCE: &str = "2026-11-25T12:30:00Z";

/// Findings of one crate, each with its place.
#[derive(Debug, Default)]
struct Found {
    sentences: Vec<String>,
    names: Vec<String>,
    wide: Vec<String>,
}

/// Checks comments and names of the crates, given by name and folder.
pub(crate) fn check(
    root: &Path,
    crates: &[(&str, &Path)],
    findings: &mut Vec<String>,
) -> Result<()> {
    let changed = sources::git(root, &["diff", "--name-only", "HEAD"])?;
    let new = sources::git(root, &["ls-files", "--others", "--exclude-standard"])?;
    let changed: BTreeSet<String> = changed
        .lines()
        .chain(new.lines())
        .map(str::to_owned)
        .collect();
    let mut by_crate: BTreeMap<&str, Found> = BTreeMap::new();
    for file in sources::files(root, "*.rs")? {
        let path = root.join(&file);
        let owner = crates
            .iter()
            .filter(|(_, folder)| path.starts_with(folder))
            .max_by_key(|(_, folder)| folder.components().count());
        if let Some((name, _)) = owner {
            let text = fs_err::read_to_string(&path)?;
            look(&file, &text, by_crate.entry(name).or_default());
        }
    }
    for (name, found) in &by_crate {
        let allowed = ALLOWED.iter().find(|line| line.0 == *name);
        let (sentences, names) = allowed.map_or((0, 0), |line| (line.1, line.2));
        for (what, found, allowed) in [
            (
                "sentences of documentation begin with a relative word (begin with a verb or a noun)",
                &found.sentences,
                sentences,
            ),
            (
                "names of tests have over 70 characters (put the story in a comment)",
                &found.names,
                names,
            ),
            ("lines of comments have over 100 characters", &found.wide, 0),
        ] {
            findings.extend(ratchet(name, what, found, allowed, &changed));
        }
    }
    Ok(())
}

/// Compares a crate with its line in [`ALLOWED`]. A finding lists the places in files that were
/// changed, where the new ones are; all places if no file was.
fn ratchet(
    name: &str,
    what: &str,
    found: &[String],
    allowed: usize,
    changed: &BTreeSet<String>,
) -> Option<String> {
    let count = found.len();
    if count > allowed {
        let is_changed = |place: &&String| {
            let file = place.split(':').next();
            file.is_some_and(|file| changed.contains(file))
        };
        let mut places: Vec<&String> = found.iter().filter(is_changed).collect();
        if places.is_empty() {
            places = found.iter().collect();
        }
        let places: Vec<_> = places.iter().map(|place| format!("\n  {place}")).collect();
        let places = places.concat();
        return Some(format!(
            "{name}: {count} {what}, {allowed} are allowed:{places}"
        ));
    } else if count < allowed {
        crate::say(&format!(
            "note: {name}: {count} {what}: lower its {allowed} in xtask/src/prose.rs"
        ));
    }
    None
}

/// Reports commits with long subjects: those that origin/main lacks, or recent ones in a checkout
/// without it.
pub(crate) fn check_subjects(root: &Path) -> Result<()> {
    let since = format!("--since={SUBJECTS_SINCE}");
    let range = sources::git(root, &["merge-base", "origin/main", "HEAD"])
        .map(|base| format!("{}..HEAD", base.trim()));
    let log = ["log", "--no-merges", "--format=%h %s"];
    let commits = match &range {
        Ok(range) => sources::git(root, &[&log[..], &[range]].concat())?,
        Err(_) => sources::git(root, &[&log[..], &[&since]].concat())?,
    };
    for commit in commits.lines() {
        let subject = commit.split_once(' ').map_or("", |(_, subject)| subject);
        let length = subject.chars().count();
        if length > LONGEST_SUBJECT {
            crate::say(&format!(
                "warning: commit subject with {length} characters, at most {LONGEST_SUBJECT}: {commit}"
            ));
        }
    }
    Ok(())
}

/// Returns the text of a comment that is a line of its own; nothing for code.
fn comment(line: &str) -> &str {
    let text = line.strip_prefix("//").unwrap_or_default();
    text.trim_start_matches(['/', '!']).trim()
}

/// Returns true where an example in a comment begins or ends.
fn is_fence(line: &str) -> bool {
    comment(line).starts_with("```")
}

/// Returns true for a comment with a place to break it, which rows of tables and addresses lack.
fn can_be_wrapped(line: &str) -> bool {
    let text = comment(line);
    text.contains(' ') && !text.starts_with('|')
}

/// Adds what one file contains.
fn look(file: &str, text: &str, found: &mut Found) {
    let mut docs = Docs::default();
    let mut is_code = false;
    for (number, line) in text.lines().enumerate() {
        let place = format!("{file}:{}", number + 1);
        let width = line.chars().count();
        let line = line.trim();
        is_code = line.starts_with("//") && is_code != is_fence(line);
        if width > WIDEST_LINE && !is_code && can_be_wrapped(line) {
            found.wide.push(format!("{place}: {width}"));
        }
        match line.strip_prefix("///").or(line.strip_prefix("//!")) {
            Some(text) if docs.begins_with_relative(text) => {
                found.sentences.push(format!("{place}: {}", text.trim()));
            }
            Some(_) => {}
            None => docs = Docs::default(),
        }
        if let Some(name) = function_name(line)
            && name.len() > LONGEST_NAME
        {
            found.names.push(format!("{place}: {name}"));
        }
    }
}

fn function_name(line: &str) -> Option<&str> {
    let (before, after) = line.split_once("fn ")?;
    let name = after.split(['(', '<']).next()?;
    let is_item = before.is_empty() || before.ends_with(' ');
    let is_name = name.chars().all(|c| c.is_alphanumeric() || c == '_');
    (is_item && is_name && !line.starts_with("//")).then_some(name)
}

/// Position in a block of documentation.
#[derive(Default)]
struct Docs {
    in_code: bool,
    in_sentence: bool,
}

impl Docs {
    /// Returns true if a sentence on this line, the next one of the block, begins with a relative
    /// word.
    fn begins_with_relative(&mut self, line: &str) -> bool {
        let line = line.trim();
        if line.starts_with("```") {
            self.in_code = !self.in_code;
            self.in_sentence = false;
            return false;
        }
        if self.in_code {
            return false;
        }
        // A list item, a heading and a paragraph begin a sentence wherever the last one ended.
        let text = line.trim_start_matches(|c: char| !c.is_alphabetic() && !"`[\"".contains(c));
        if line.is_empty() || text != line && ["-", "*", "#"].iter().any(|m| line.starts_with(m)) {
            self.in_sentence = false;
        }
        let mut found = false;
        for word in text.split_whitespace() {
            found |= !self.in_sentence && is_relative(word.trim_start_matches(['(', '"', '*']));
            let bare = word.trim_end_matches(['"', ')', '`', '*']);
            self.in_sentence = !bare.ends_with(['.', '?', '!']);
        }
        found
    }
}

/// Returns true if a text begins with one of the words of [`RELATIVE`].
pub(crate) fn is_relative(text: &str) -> bool {
    let word = text
        .split(|c: char| !c.is_alphanumeric() && c != '_')
        .next();
    word.is_some_and(|word| RELATIVE.contains(&word))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn found(text: &str) -> Found {
        let mut found = Found::default();
        look("a.rs", text, &mut found);
        found
    }

    #[test]
    fn sentences_that_begin_with_a_relative_word_are_found_in_documentation() {
        let text = [
            "//! What this is.",
            "//! Has one. Whose",
            "//! is it? That's known, e.g. as",
            "//! One of it.",
            "",
            "// Which is no documentation.",
            "/// Returns it.",
            "///",
            "/// - How it is",
            "/// ```",
            "/// As code",
            "/// ```",
            "/// It is. (Those are found.)",
        ];
        let text = text.join("\n");
        let lines: Vec<_> = found(&text).sentences;
        let lines: Vec<_> = lines.iter().map(|line| &line[..8]).collect();
        let expected = [1, 2, 3, 9, 13].map(|n| format!("{:<8}", format!("a.rs:{n}:")));
        assert_eq!(lines, expected.each_ref().map(|line| &line[..8]), "{text}");
    }

    #[test]
    fn other_words_and_continued_lines_are_not_found() {
        let text = "/// Whatever, Asks, Onerous: a `What` is fine, and\n/// One that continues too.\nstruct What;\n";
        assert_eq!(found(text).sentences, Vec::<String>::new());
    }

    #[test]
    fn long_names_of_functions_are_found() {
        let (fits, long) = ("a".repeat(70), "b".repeat(71));
        let text = format!("fn {fits}() {{}}\n    async fn {long}() {{}}\n// fn {long}()\n");
        assert_eq!(found(&text).names, [format!("a.rs:2: {long}")]);
    }

    #[test]
    fn wide_comments_are_found_where_they_can_be_wrapped() {
        let fits = format!("    // {} it", "a".repeat(WIDEST_LINE - 10));
        let wide = format!("{fits}s");
        let (word, row) = ("b".repeat(WIDEST_LINE), format!("| {wide} |"));
        let text = format!(
            "{fits}\n{wide}\n/// {word}\n/// {row}\n{}\n/// ```\n{wide}\n/// ```\n{wide}\n",
            wide.trim_start().trim_start_matches('/'),
        );
        assert_eq!(found(&text).wide, ["a.rs:2: 101", "a.rs:9: 101"]);
    }

    #[test]
    fn a_crate_above_its_number_is_a_finding_with_the_changed_places() {
        let places = ["a.rs:1: What".to_owned(), "b.rs:2: How".to_owned()];
        let none = BTreeSet::new();
        assert_eq!(ratchet("divvy-a", "things", &places, 2, &none), None);
        assert_eq!(
            ratchet("divvy-a", "things", &places, 1, &none).unwrap(),
            "divvy-a: 2 things, 1 are allowed:\n  a.rs:1: What\n  b.rs:2: How"
        );
        let changed = BTreeSet::from(["b.rs".to_owned(), "c.rs".to_owned()]);
        assert_eq!(
            ratchet("divvy-a", "things", &places, 1, &changed).unwrap(),
            "divvy-a: 2 things, 1 are allowed:\n  b.rs:2: How"
        );
    }

    #[test]
    fn the_commit_msg_hook_refuses_long_subjects() {
        let accepts = |message: &str| {
            let folder = tempfile::tempdir().unwrap();
            let file = folder.path().join("COMMIT_EDITMSG");
            fs_err::write(&file, message).unwrap();
            let hook = crate::root().join(".ci/hooks/commit-msg");
            let done = Command::new(hook).arg(&file).output().unwrap();
            done.status.success()
        };
        let (fits, long) = ("ü".repeat(72), "ü".repeat(73));
        assert!(accepts(&format!("# comment\n\n{fits}\n\n{long}\n")));
        assert!(!accepts(&format!("{long}\n\nbody\n")));
        assert!(accepts(&format!("Merge branch {long}\n")));
        assert!(accepts(&format!("fixup! {long}\n")));
    }
}
