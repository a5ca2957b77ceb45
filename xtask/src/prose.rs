//! Rules about names, comments and the subjects of commits.

use std::path::Path;

use anyhow::Result;

use crate::sources;

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

/// Findings, each with its place.
#[derive(Debug, Default)]
struct Found {
    sentences: Vec<String>,
    names: Vec<String>,
    wide: Vec<String>,
}

/// Checks comments and names.
pub(crate) fn check(root: &Path, findings: &mut Vec<String>) -> Result<()> {
    let mut all = Found::default();
    for file in sources::files(root, "*.rs")? {
        look(&file, &fs_err::read_to_string(root.join(&file))?, &mut all);
    }
    for (rule, found) in [
        (
            "a sentence of documentation begins with a relative word (begin with a verb or a noun)",
            all.sentences,
        ),
        (
            "the name of a test has over 70 characters (put the story in a comment)",
            all.names,
        ),
        ("a line of a comment has over 100 characters", all.wide),
    ] {
        findings.extend(found.iter().map(|place| format!("{rule}: {place}")));
    }
    Ok(())
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
