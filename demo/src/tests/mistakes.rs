//! Manifests with mistakes that users make (`demo/fixtures/mistakes`), each with the way out that
//! the demo names, once, and its exit status: the comments in its first lines.

use std::path::{Path, PathBuf};

use super::*;
use divvy_cli::Usage;

/// Returns the exit status of a file, and all that is said of it.
async fn answer(file: &Path) -> (u8, Vec<String>) {
    let stay = match examples::of_files(&[file.to_owned()], false, None) {
        Ok(stay) => stay,
        Err(error) => {
            let status = if error.is::<Usage>() { 2 } else { 1 };
            return (status, vec![format!("{error:#}")]);
        }
    };
    let report = perform(&gpus("h100x2"), &[stay], &Show::default()).await;
    let report = report.unwrap();
    let mut said = report.problems();
    let status = u8::from(!said.is_empty());
    said.extend(report.notes.iter().cloned());
    said.extend(report.scenarios.iter().flat_map(|s| s.notes.clone()));
    (status, said)
}

/// Returns the value of a comment in the first lines of a text.
fn comment<'t>(text: &'t str, name: &str) -> &'t str {
    let start = format!("# {name}: ");
    let mut lines = text.lines();
    lines.find_map(|line| line.strip_prefix(&start)).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_mistake_is_answered_once_and_with_the_way_out() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/mistakes");
    let entries = fs_err::read_dir(folder).unwrap();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(files.len() > 50, "{}", files.len());
    let mut wrong = Vec::new();
    for file in files {
        let text = fs_err::read_to_string(&file).unwrap();
        let (says, status) = (comment(&text, "says"), comment(&text, "status"));
        let (found, said) = answer(&file).await;
        let times: usize = said.iter().map(|said| said.matches(says).count()).sum();
        if found.to_string() != status || times != 1 {
            let said = said.join("\n  ");
            wrong.push(format!(
                "{}: status {found}, {times} times:\n  {says}\n  is in\n  {said}",
                file.display()
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}

#[tokio::test]
async fn all_files_with_mistakes_are_named_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let inner = folder.path().join("inner");
    fs_err::create_dir(&inner).unwrap();
    let write = |path: PathBuf| fs_err::write(path, "apiVersion: v1\nkind: Pod\nspec: {a: 1}\n");
    write(folder.path().join("a.yaml")).unwrap();
    write(folder.path().join("b.yaml")).unwrap();
    write(inner.join("c.yaml")).unwrap();
    let files = [folder.path().to_owned()];
    for (recursive, expected) in [(false, 2), (true, 3)] {
        let error = examples::of_files(&files, recursive, None).unwrap_err();
        let said = format!("{error:#}");
        assert_eq!(said.matches("unknown field").count(), expected, "{said}");
        assert!(!error.is::<Usage>());
    }
    let missing = examples::of_files(&[folder.path().join("x.yaml")], false, None);
    assert!(missing.unwrap_err().is::<Usage>());
}
