//! `cargo xtask book`: the documents as a site, with mdBook. What is in it is `docs/SUMMARY.md`; the README of every example comes
//! below that of all. Links in the site are checked.

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

/// Version of mdBook. Pinned: the configuration is for it.
const MDBOOK: &str = "0.5.4";

pub(crate) fn run(root: &Path) -> Result<()> {
    let book = root.join("target/book");
    if book.exists() {
        fs_err::remove_dir_all(&book)?;
    }
    let source = book.join("src");
    fs_err::create_dir_all(&source)?;
    for file in ["book.toml", "book.css"] {
        fs_err::copy(root.join("docs").join(file), book.join(file))?;
    }
    let summary = summary(root)?;
    for page in links(&summary) {
        let to = source.join(&page);
        fs_err::create_dir_all(to.parent().unwrap_or(&source))?;
        let text = fs_err::read_to_string(root.join(&page))?;
        fs_err::write(to, outside(root, &page, &text, &links(&summary)))?;
    }
    fs_err::write(source.join("SUMMARY.md"), &summary)?;
    let status = Command::new(mdbook(root)?).arg("build").arg(&book).status().context("mdbook")?;
    ensure!(status.success(), "mdbook: {status}");
    let site = book.join("site");
    let broken = broken_links(&site)?;
    for link in &broken {
        crate::say(link);
    }
    ensure!(broken.is_empty(), "{} links in the site lead nowhere", broken.len());
    crate::say(&format!("{} pages: {}", links(&summary).len(), site.join("index.html").display()));
    Ok(())
}

fn mdbook(root: &Path) -> Result<PathBuf> {
    let cache = divvy_e2e::parts::cache_dir()?.join(format!("mdbook-{MDBOOK}"));
    let binary = cache.join("bin/mdbook");
    if !binary.exists() {
        let features = ["--no-default-features", "--features", "search"];
        let mut cargo = Command::new("cargo");
        cargo.args(["install", "--locked", "--root"]).arg(&cache).args(["--version", MDBOOK]).args(features);
        let status = cargo.arg("mdbook").current_dir(root).status().context("cargo cannot be started")?;
        ensure!(status.success(), "cargo install mdbook: {status}");
    }
    Ok(binary)
}

/// `docs/SUMMARY.md` with paths from the root of the checkout, as the site has them, and the examples below their page.
fn summary(root: &Path) -> Result<String> {
    let text = fs_err::read_to_string(root.join("docs/SUMMARY.md"))?;
    let mut examples = Vec::new();
    for entry in fs_err::read_dir(root.join("examples"))? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if root.join("examples").join(&name).join("README.md").exists() {
            examples.push(format!("  - [{name}](examples/{name}/README.md)"));
        }
    }
    examples.sort();
    let mut lines = Vec::new();
    for line in text.lines() {
        let Some((title, link)) = line.split_once("](") else {
            lines.push(line.to_owned());
            continue;
        };
        let page = within(Path::new("docs"), link.trim_end_matches(')'));
        lines.push(format!("{title}]({})", page.display()));
        if page == Path::new("examples/README.md") {
            lines.append(&mut examples);
        }
    }
    Ok(lines.join("\n") + "\n")
}

/// The pages of a summary.
fn links(summary: &str) -> BTreeSet<PathBuf> {
    summary.lines().filter_map(|line| Some(line.split_once("](")?.1.trim_end_matches(')').into())).collect()
}

/// A link of a document in this folder, from the root.
fn within(folder: &Path, link: &str) -> PathBuf {
    let mut path = PathBuf::new();
    for part in folder.join(link).components() {
        match part {
            Component::ParentDir => drop(path.pop()),
            Component::Normal(name) => path.push(name),
            _ => {}
        }
    }
    path
}

/// A page whose links to files outside the book are texts: the site has no place for the source.
fn outside(root: &Path, page: &Path, text: &str, pages: &BTreeSet<PathBuf>) -> String {
    let folder = page.parent().unwrap_or(Path::new(""));
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("](") {
        let Some((link, tail)) = after.split_once(')') else { break };
        let target = link.split('#').next().unwrap_or_default();
        let path = within(folder, target);
        let label = before.rfind('[');
        match label {
            Some(at)
                if !target.is_empty()
                    && !link.contains("://")
                    && !link.starts_with("mailto:")
                    && !pages.contains(&path)
                    && root.join(&path).exists() =>
            {
                let (start, label) = before.split_at(at);
                let label = label.trim_start_matches('[');
                out += &format!("{start}{label} (`{}`)", path.display());
            }
            _ => out += &format!("{before}]({link})"),
        }
        rest = tail;
    }
    out + rest
}

/// Links of every page of a site that lead to no file of it.
fn broken_links(site: &Path) -> Result<Vec<String>> {
    let mut broken = BTreeSet::new();
    let mut todo = vec![site.to_owned()];
    while let Some(folder) = todo.pop() {
        for entry in fs_err::read_dir(&folder)? {
            let path = entry?.path();
            if path.is_dir() {
                todo.push(path);
            } else if path.extension().is_some_and(|extension| extension == "html") {
                let shown = path.strip_prefix(site).unwrap_or(&path).to_owned();
                // Its links are those of the root's pages, wherever it is shown.
                if shown == Path::new("404.html") || shown == Path::new("toc.html") {
                    continue;
                }
                check_page(site, &path, &mut broken)?;
            }
        }
    }
    Ok(broken.into_iter().collect())
}

fn check_page(site: &Path, page: &Path, broken: &mut BTreeSet<String>) -> Result<()> {
    let text = fs_err::read_to_string(page)?;
    let shown = page.strip_prefix(site).unwrap_or(page);
    let folder = page.parent().unwrap_or(site);
    for part in text.split("href=\"").skip(1) {
        let Some((link, _)) = part.split_once('"') else { bail!("{}: an open attribute", shown.display()) };
        if link.contains("://") || link.starts_with("mailto:") || link.starts_with("javascript:") {
            continue;
        }
        let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
        let target = if file.is_empty() { page.to_owned() } else { folder.join(file) };
        if !target.exists() {
            broken.insert(format!("{}: {link} leads nowhere", shown.display()));
        } else if !anchor.is_empty() && target.extension().is_some_and(|extension| extension == "html") {
            let there = fs_err::read_to_string(&target)?;
            if !there.contains(&format!("id=\"{anchor}\"")) {
                broken.insert(format!("{}: {link} names no heading", shown.display()));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_document_is_in_the_book() {
        let root = crate::root();
        let pages = links(&summary(&root).unwrap());
        let mut todo = vec![root.join("docs")];
        while let Some(folder) = todo.pop() {
            for entry in fs_err::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    todo.push(path);
                } else if path.extension().is_some_and(|e| e == "md") && !path.ends_with("SUMMARY.md") {
                    let page = path.strip_prefix(&root).unwrap();
                    assert!(pages.contains(page), "{} is missing in docs/SUMMARY.md", page.display());
                }
            }
        }
        assert!(pages.contains(Path::new("examples/one-gpu/README.md")));
    }

    #[test]
    fn links_out_of_the_book_become_texts_and_others_stay() {
        let root = crate::root();
        let pages = BTreeSet::from([PathBuf::from("docs/policy.md")]);
        let text = "See [rules](../xtask/src/words.rs), [policy](policy.md#x), [site](https://a.b/c) and [here](#top).";
        assert_eq!(
            outside(&root, Path::new("docs/metrics.md"), text, &pages),
            "See rules (`xtask/src/words.rs`), [policy](policy.md#x), [site](https://a.b/c) and [here](#top)."
        );
    }
}
