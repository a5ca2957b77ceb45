//! Manifests of other projects, reduced to what a conversion reads, in words of our own.

use std::path::{Path, PathBuf};

use super::*;

/// Files at least.
const LEAST: usize = 120;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/convert/corpus")
}

fn listed(folder: &Path) -> Vec<PathBuf> {
    let entries = fs_err::read_dir(folder).unwrap();
    let mut all: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    all.sort();
    all
}

/// Folders of the corpus, each with its files.
fn corpus() -> Vec<(String, Vec<PathBuf>)> {
    let name = |path: &Path| path.file_name().unwrap().to_string_lossy().into_owned();
    let folders = listed(&fixtures()).into_iter().filter(|path| path.is_dir());
    folders.map(|path| (name(&path), listed(&path))).collect()
}

#[test]
fn each_file_of_the_corpus_becomes_its_golden_text() {
    let mut files = 0;
    for (folder, all) in corpus() {
        let mut text = String::new();
        for path in all {
            files += 1;
            let converted = of(&fs_err::read_to_string(&path).unwrap());
            let name = path.file_stem().unwrap().to_string_lossy();
            let exit = u8::from(!converted.is_complete());
            let nothing = if converted.found_any {
                ""
            } else {
                ", nothing found"
            };
            text += &format!("##### {name}: exit {exit}{nothing}\n");
            text += &converted.yaml(true).unwrap();
        }
        crate::golden::same(&format!("convert/corpus/{folder}.txt"), text.trim_end());
    }
    assert!(files >= LEAST, "{files}");
}

/// Nothing is converted a second time, though a thing that stayed may be named again.
#[test]
fn what_the_corpus_becomes_is_not_converted_again() {
    for path in corpus().into_iter().flat_map(|(_, all)| all) {
        let first = of(&fs_err::read_to_string(&path).unwrap())
            .yaml(true)
            .unwrap();
        let again = of(&first);
        let nodes: Vec<Node> = again.documents.into_iter().map(|d| d.node).collect();
        let expected = yaml::documents("x", &first).unwrap();
        assert_eq!(nodes, expected, "{}", path.display());
    }
}
