//! `cargo xtask book`: the documents as a site, with mdBook. Its pages are those of
//! `docs/SUMMARY.md`, and each example, runbook and decision below the page about them. Links in
//! the site are checked.

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use anyhow::{Result, bail, ensure};

use crate::check::files_below;
use crate::programs::{installed, succeeds};

/// Version of mdBook. Pinned: the configuration is for it.
const MDBOOK: &str = "0.5.4";

/// Extension of the images, which are in the book beside its pages.
const IMAGE: &str = "png";

/// Folders whose pages come below their README.
const LISTED: &[&str] = &["examples", "docs/runbooks", "docs/adr"];

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
    for image in files_below(&root.join("docs/images"), IMAGE)? {
        let to = source.join(image.strip_prefix(root).unwrap_or(&image));
        fs_err::create_dir_all(to.parent().unwrap_or(&source))?;
        fs_err::copy(&image, to)?;
    }
    for page in links(&summary) {
        let to = source.join(&page);
        fs_err::create_dir_all(to.parent().unwrap_or(&source))?;
        let text = fs_err::read_to_string(root.join(&page))?;
        fs_err::write(to, outside(root, &page, &text, &links(&summary)))?;
    }
    fs_err::write(source.join("SUMMARY.md"), &summary)?;
    let mdbook = installed(
        "mdbook",
        MDBOOK,
        &["--no-default-features", "--features", "search"],
    )?;
    succeeds(Command::new(mdbook).arg("build").arg(&book))?;
    let site = book.join("site");
    let broken = broken_links(&site)?;
    for link in &broken {
        crate::say(link);
    }
    ensure!(
        broken.is_empty(),
        "{} links in the site lead nowhere",
        broken.len()
    );
    crate::say(&format!(
        "{} pages: {}",
        links(&summary).len(),
        site.join("index.html").display()
    ));
    Ok(())
}

/// Documents that are not in the book.
pub(crate) fn missing(root: &Path) -> Result<Vec<PathBuf>> {
    let pages = links(&summary(root)?);
    let all = files_below(&root.join("docs"), "md")?;
    let all = all.into_iter().map(|path| {
        path.strip_prefix(root)
            .map_or_else(|_| path.clone(), Path::to_owned)
    });
    Ok(all
        .filter(|page| !page.ends_with("SUMMARY.md") && !pages.contains(page))
        .collect())
}

/// Returns `docs/SUMMARY.md` with paths from the root of the checkout, as the site has them, and
/// with what it leaves to [`LISTED`].
fn summary(root: &Path) -> Result<String> {
    let text = fs_err::read_to_string(root.join("docs/SUMMARY.md"))?;
    let mut lines = Vec::new();
    for line in text.lines() {
        let Some((title, link)) = line.split_once("](") else {
            lines.push(line.to_owned());
            continue;
        };
        let page = within(Path::new("docs"), link.trim_end_matches(')'));
        lines.push(format!("{title}]({})", page.display()));
        if let Some(folder) = LISTED
            .iter()
            .find(|folder| page == Path::new(folder).join("README.md"))
        {
            lines.extend(listed(root, folder)?);
        }
    }
    Ok(lines.join("\n") + "\n")
}

/// Returns the pages of a folder, and the READMEs of its folders, as lines of a summary.
fn listed(root: &Path, folder: &str) -> Result<Vec<String>> {
    let mut lines = Vec::new();
    for entry in fs_err::read_dir(root.join(folder))? {
        let path = entry?.path();
        let page = if path.is_dir() {
            path.join("README.md")
        } else {
            path.clone()
        };
        if path.ends_with("README.md")
            || page.extension().is_none_or(|e| e != "md")
            || !page.exists()
        {
            continue;
        }
        let text = fs_err::read_to_string(&page)?;
        let title = text
            .lines()
            .find_map(|line| line.strip_prefix("# "))
            .unwrap_or_default();
        let page = page.strip_prefix(root).unwrap_or(&page);
        lines.push((
            page.to_owned(),
            format!("  - [{title}]({})", page.display()),
        ));
    }
    lines.sort();
    Ok(lines.into_iter().map(|(_, line)| line).collect())
}

/// Returns the pages of a summary.
fn links(summary: &str) -> BTreeSet<PathBuf> {
    summary
        .lines()
        .filter_map(|line| Some(line.split_once("](")?.1.trim_end_matches(')').into()))
        .collect()
}

/// Resolves a link of a document in this folder; returns its path from the root.
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

/// Replaces links to files outside the book by texts: the site has no place for the source.
fn outside(root: &Path, page: &Path, text: &str, pages: &BTreeSet<PathBuf>) -> String {
    let folder = page.parent().unwrap_or(Path::new(""));
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("](") {
        let Some((link, tail)) = after.split_once(')') else {
            break;
        };
        let target = link.split('#').next().unwrap_or_default();
        let path = within(folder, target);
        let label = before.rfind('[');
        match label {
            Some(at)
                if !target.is_empty()
                    && !link.contains("://")
                    && !link.starts_with("mailto:")
                    && !pages.contains(&path)
                    && path.extension().is_none_or(|extension| extension != IMAGE)
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
    for page in files_below(site, "html")? {
        // The links of these are those of the root's pages, wherever they are shown.
        if [site.join("404.html"), site.join("toc.html")].contains(&page) {
            continue;
        }
        check_page(site, &page, &mut broken)?;
    }
    Ok(broken.into_iter().collect())
}

fn check_page(site: &Path, page: &Path, broken: &mut BTreeSet<String>) -> Result<()> {
    let text = fs_err::read_to_string(page)?;
    let shown = page.strip_prefix(site).unwrap_or(page);
    let folder = page.parent().unwrap_or(site);
    for part in text.split("href=\"").skip(1) {
        let Some((link, _)) = part.split_once('"') else {
            bail!("{}: an open attribute", shown.display())
        };
        if link.contains("://") || link.starts_with("mailto:") || link.starts_with("javascript:") {
            continue;
        }
        let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
        let target = if file.is_empty() {
            page.to_owned()
        } else {
            folder.join(file)
        };
        if !target.exists() {
            broken.insert(format!("{}: {link} leads nowhere", shown.display()));
        } else if !anchor.is_empty()
            && target
                .extension()
                .is_some_and(|extension| extension == "html")
        {
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
    fn pages_of_listed_folders_are_in_the_book_and_others_are_missed() {
        let root = tempfile::tempdir().unwrap();
        let docs = "docs";
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs_err::create_dir_all(path.parent().unwrap()).unwrap();
            fs_err::write(path, text).unwrap();
        };
        let text = "# Summary\n\n- [All](README.md)\n- [Records](adr/README.md)\n- [Examples](../examples/README.md)\n";
        write(&format!("{docs}/SUMMARY.md"), text);
        for page in [
            "README.md",
            "adr/README.md",
            "lost.md",
            "../examples/README.md",
        ] {
            write(&format!("{docs}/{page}"), "# A page\n");
        }
        write(&format!("{docs}/adr/0001-a.md"), "# 1. First\n");
        write("examples/one/README.md", "# One\n");
        assert_eq!(
            summary(root.path()).unwrap(),
            format!(
                "# Summary\n\n- [All]({docs}/README.md)\n- [Records]({docs}/adr/README.md)\n  - [1. First]({docs}/adr/0001-a.md)\n\
                 - [Examples](examples/README.md)\n  - [One](examples/one/README.md)\n"
            )
        );
        assert_eq!(
            missing(root.path()).unwrap(),
            [Path::new(docs).join("lost.md")]
        );
    }

    #[test]
    fn links_out_of_the_book_become_texts_and_others_stay() {
        let root = crate::root();
        let pages = BTreeSet::from([PathBuf::from("docs/policy.md")]);
        let text = "See [rules](../xtask/src/words.rs), [policy](policy.md#x), [site](https://a.b/c), ![it](images/ui-dark.png) and [here](#top).";
        assert_eq!(
            outside(&root, Path::new("docs/metrics.md"), text, &pages),
            "See rules (`xtask/src/words.rs`), [policy](policy.md#x), [site](https://a.b/c), ![it](images/ui-dark.png) and [here](#top)."
        );
    }
}
