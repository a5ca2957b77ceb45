//! The table of promises (`docs/contributing/promises.md`) against the tree: each place and each
//! test that it names exists.

use std::path::Path;

use anyhow::Result;

use crate::sources;

const DOCUMENT: &str = "docs/contributing/promises.md";
/// Folders of the files that the table names.
const PLACES: &[&str] = &["crates/claims/src", "crates/executor/src", "crates/gpu/src"];

/// Compares the table with the tree.
pub(crate) fn check(root: &Path, findings: &mut Vec<String>) -> Result<()> {
    let table = fs_err::read_to_string(root.join(DOCUMENT))?;
    let mut code = String::new();
    for file in sources::files(root, "*.rs")? {
        code.push_str(&fs_err::read_to_string(root.join(file))?);
    }
    let has = |test: &str| code.contains(&format!("fn {test}("));
    // Files of one name in several places count as one.
    let text_of = |name: &str| {
        let files = PLACES.iter().map(|folder| root.join(folder).join(name));
        let texts = files.filter_map(|path| fs_err::read_to_string(path).ok());
        texts.reduce(|all, text| all + &text)
    };
    findings.extend(wrong(&table, has, text_of));
    Ok(())
}

/// Lists what the table names and the tree has not. `text_of` returns the content of a file.
fn wrong(
    table: &str,
    has_test: impl Fn(&str) -> bool,
    text_of: impl Fn(&str) -> Option<String>,
) -> Vec<String> {
    let mut wrong = Vec::new();
    for (number, line) in table.lines().enumerate() {
        let cells: Vec<&str> = line.split('|').collect();
        let [_, promise, places, tests, _] = cells.as_slice() else {
            continue;
        };
        if promise.trim() == "promise" || promise.trim().starts_with("---") {
            continue;
        }
        let mut find = |what: &str| wrong.push(format!("{DOCUMENT}:{}: {what}", number + 1));
        let mut text = String::new();
        for name in quoted(places) {
            let is_file = name.contains('.');
            match is_file.then(|| text_of(name)) {
                Some(Some(found)) => text = found,
                Some(None) => find(&format!("there is no {name}")),
                None if text.contains(name) => {}
                None => find(&format!("`{name}` is not in the file before it")),
            }
        }
        let mut any = false;
        for name in quoted(tests) {
            any = true;
            if !has_test(name) {
                find(&format!("there is no test `{name}`"));
            }
        }
        if !any {
            find("a promise without a test");
        }
    }
    wrong
}

/// Returns what stands between backticks.
fn quoted(cell: &str) -> impl Iterator<Item = &str> {
    cell.split('`').skip(1).step_by(2)
}

#[cfg(test)]
mod tests {
    use super::wrong;

    #[test]
    fn names_that_the_tree_has_not_are_found() {
        let row = |places: &str, tests: &str| {
            let table =
                format!("| promise | place | test |\n|---|---|---|\n| p | {places} | {tests} |");
            let text_of = |name: &str| (name == "a.rs").then(|| "fn look()".to_owned());
            wrong(&table, |test| test == "it_works", text_of)
        };
        assert_eq!(row("`a.rs` `look`", "`it_works`"), Vec::<String>::new());
        for (places, tests, found) in [
            (
                "`b.rs`",
                "`it_works`",
                "docs/contributing/promises.md:3: there is no b.rs",
            ),
            (
                "`a.rs` `see`",
                "`it_works`",
                "docs/contributing/promises.md:3: `see` is not in the file before it",
            ),
            (
                "`a.rs`",
                "`it_worked`",
                "docs/contributing/promises.md:3: there is no test `it_worked`",
            ),
            (
                "`a.rs`",
                "",
                "docs/contributing/promises.md:3: a promise without a test",
            ),
        ] {
            assert_eq!(row(places, tests), [found]);
        }
    }
}
