//! The Rust files of the checkout, for the commands that measure and check them.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// Runs git in the checkout and returns its output.
pub(crate) fn git(root: &Path, args: &[&str]) -> Result<String> {
    let out = Command::new("git").args(args).current_dir(root).output();
    let out = out.context("git cannot be started")?;
    ensure!(
        out.status.success(),
        "git {}: {}",
        args.join(" "),
        String::from_utf8_lossy(&out.stderr)
    );
    Ok(String::from_utf8(out.stdout)?)
}

/// Folder of generated code, which has no style of ours.
const GENERATED: &str = "proto/generated/";

/// Returns the paths of files that git knows or would add, that exist, and that people write.
pub(crate) fn files(root: &Path, pattern: &str) -> Result<Vec<String>> {
    let listed = git(
        root,
        &[
            "ls-files",
            "--cached",
            "--others",
            "--exclude-standard",
            pattern,
        ],
    )?;
    let existing = listed
        .lines()
        .filter(|file| root.join(file).is_file())
        .filter(|file| !file.starts_with(GENERATED));
    Ok(existing.map(str::to_owned).collect())
}

/// Returns true for files that hold only tests.
pub(crate) fn is_test(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    path.starts_with("tests/")
        || path.contains("/tests/")
        || matches!(name, "test.rs" | "tests.rs")
        || name.ends_with("_test.rs")
        || name.ends_with("_tests.rs")
}

/// Returns the lines of a file without its modules under `#[cfg(test)]`.
pub(crate) fn product(text: &str) -> Vec<&str> {
    let lines: Vec<&str> = text.split('\n').collect();
    let mut kept = Vec::new();
    let mut at = 0;
    while let Some(line) = lines.get(at) {
        if line.trim_start().starts_with("#[cfg(test)]")
            && let Some(end) = end_of_module(&lines, at + 1)
        {
            at = end + 1;
            continue;
        }
        kept.push(*line);
        at += 1;
    }
    kept
}

/// Returns the last line of the inline module that begins at this line, after further attributes.
fn end_of_module(lines: &[&str], from: usize) -> Option<usize> {
    let is_attribute = |line: &&str| line.trim_start().starts_with("#[");
    let rest = lines.get(from..)?;
    let begin = from + rest.iter().take_while(|line| is_attribute(line)).count();
    let line = *lines.get(begin)?;
    let (indent, item) = line.split_at(line.len() - line.trim_start().len());
    let is_module = item.starts_with("mod ") || item.starts_with("pub") && item.contains(" mod ");
    if !is_module || !item.ends_with('{') {
        return None;
    }
    let end = format!("{indent}}}");
    let length = lines.get(begin..)?.iter().position(|line| **line == end)?;
    Some(begin + length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_of_tests_are_cut_and_other_test_items_stay() {
        let text = "a\n#[cfg(test)]\nuse b;\nmod c {\n    #[cfg(test)]\n    #[allow(x)]\n    mod t {\n        d\n    }\n}\n#[cfg(test)]\nmod tests;\n";
        let expected = [
            "a",
            "#[cfg(test)]",
            "use b;",
            "mod c {",
            "}",
            "#[cfg(test)]",
            "mod tests;",
            "",
        ];
        assert_eq!(product(text), expected);
    }

    #[test]
    fn files_of_tests_are_known_by_their_path() {
        for path in [
            "tests/bench/src/a.rs",
            "api/tests/a.rs",
            "api/src/tests.rs",
            "api/src/b_tests.rs",
        ] {
            assert!(is_test(path), "{path}");
        }
        for path in ["api/src/contests.rs", "api/src/testsuite.rs"] {
            assert!(!is_test(path), "{path}");
        }
    }
}
