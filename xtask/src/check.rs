//! `cargo xtask check`: the structure that ARCHITECTURE.md describes, compared with the tree. Pure
//! crates are pure, dependencies point one way, every crate takes the workspace's lints, every
//! source file is in a module tree and not too long, links in documents lead somewhere, and texts
//! avoid the words of [`crate::words`].

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

/// Crates that decide: no clock, files, async, environment or Kubernetes client.
const PURE: &[&str] = &[
    "divvy-allocator",
    "divvy-api",
    "divvy-boards",
    "divvy-cdi",
    "divvy-claims",
    "divvy-fleet",
    "divvy-forms",
    "divvy-gpu",
    "divvy-model",
    "divvy-offer",
    "divvy-quota",
    "divvy-usage",
    "divvy-why",
];

/// Packages that would make a pure crate impure, directly or through another dependency.
const IMPURE_PACKAGES: &[&str] = &[
    "tokio",
    "kube",
    "kube-client",
    "hyper",
    "tonic",
    "libloading",
    "rustix",
    "fs-err",
];

/// Words that would make a pure crate's source impure (tests excepted).
const IMPURE_WORDS: &[&str] = &[
    "std::fs",
    "fs_err",
    "std::net",
    "std::process",
    "std::thread",
    "std::env::",
    "SystemTime::now",
    "Instant::now",
];

/// Crates of ours that each may use in a shipped build: one way only (ARCHITECTURE.md, "What lives
/// where").
const MAY_USE: &[(&str, &[&str])] = &[
    ("divvy-model", &[]),
    ("divvy-conformance", &["divvy-model"]),
    ("divvy-proto", &[]),
    ("divvy-cdi", &[]),
    ("divvy-files", &[]),
    ("divvy-allocator", &["divvy-model"]),
    (
        "divvy-fleet",
        &["divvy-allocator", "divvy-api", "divvy-model"],
    ),
    ("divvy-telemetry", &["divvy-model"]),
    ("divvy-cdi-hook", &[]),
    ("divvy-api", &["divvy-model"]),
    ("divvy-forms", &["divvy-api", "divvy-model"]),
    ("divvy-offer", &["divvy-api", "divvy-forms", "divvy-model"]),
    ("divvy-gpu", &["divvy-model"]),
    ("divvy-claims", &["divvy-api", "divvy-gpu", "divvy-model"]),
    (
        "divvy-quota",
        &["divvy-allocator", "divvy-api", "divvy-model"],
    ),
    ("divvy-usage", &["divvy-api", "divvy-claims", "divvy-model"]),
    ("divvy-nvml", &["divvy-model"]),
    ("divvy-boards", &["divvy-model"]),
    ("divvy-gpu-sim", &["divvy-boards", "divvy-model"]),
    ("divvy-host", &["divvy-cdi", "divvy-files", "divvy-model"]),
    ("divvy-nvml-mock", &["divvy-gpu-sim", "divvy-model"]),
    ("divvy-mps-stand-in", &[]),
    (
        "divvy-executor",
        &[
            "divvy-cdi",
            "divvy-claims",
            "divvy-files",
            "divvy-gpu",
            "divvy-host",
            "divvy-model",
        ],
    ),
    (
        "divvy-mps-supervisor",
        &[
            "divvy-files",
            "divvy-host",
            "divvy-model",
            "divvy-proto",
            "divvy-telemetry",
        ],
    ),
    ("divvy-fake-cluster", &["divvy-model", "divvy-proto"]),
    (
        "divvy-controller",
        &["divvy-api", "divvy-model", "divvy-offer"],
    ),
    (
        "divvy-cluster-controller",
        &[
            "divvy-api",
            "divvy-controller",
            "divvy-quota",
            "divvy-telemetry",
        ],
    ),
    (
        "divvy-kubelet-plugin",
        &[
            "divvy-api",
            "divvy-cdi",
            "divvy-claims",
            "divvy-controller",
            "divvy-executor",
            "divvy-files",
            "divvy-host",
            "divvy-model",
            "divvy-nvml",
            "divvy-offer",
            "divvy-proto",
            "divvy-telemetry",
            "divvy-usage",
        ],
    ),
    (
        "divvy-why",
        &[
            "divvy-allocator",
            "divvy-api",
            "divvy-boards",
            "divvy-model",
        ],
    ),
    (
        "divvy-cli",
        &[
            "divvy-allocator",
            "divvy-api",
            "divvy-boards",
            "divvy-claims",
            "divvy-controller",
            "divvy-fleet",
            "divvy-host",
            "divvy-model",
            "divvy-nvml",
            "divvy-offer",
            "divvy-quota",
            "divvy-telemetry",
            "divvy-why",
        ],
    ),
];

/// Crates for development only: never in a shipped build, except of the demo and the mock library.
const DEVELOPMENT_ONLY: &[&str] = &[
    "divvy-conformance",
    "divvy-gpu-sim",
    "divvy-mps-stand-in",
    "divvy-fake-cluster",
    "divvy-nvml-mock",
    "divvy-e2e",
];

/// Crates that spell out their own lint table: those that hold the product's `unsafe`, and the
/// check on hardware, which calls CUDA.
const OWN_LINTS: &[&str] = &["divvy-nvml", "divvy-nvml-mock", "divvy-hardware"];

/// No file above this; above [`SOFT_LINES`] it is named.
const HARD_LINES: usize = 800;
const SOFT_LINES: usize = 400;

/// Runs every check; all findings are printed, then one error counts them.
pub(crate) fn run(root: &Path) -> Result<()> {
    let mut findings = Vec::new();
    let packages = packages(root)?;
    check_dependencies(&packages, &mut findings);
    for package in &packages {
        check_lints(package, &mut findings)?;
        check_sources(package, root, &mut findings)?;
    }
    check_links(root, &mut findings)?;
    check_cited(root, &mut findings)?;
    crate::promises::check(root, &mut findings)?;
    crate::words::check(root, &mut findings)?;
    crate::prose::check(root, &mut findings)?;
    crate::prose::check_subjects(root)?;
    for path in crate::written::stale(crate::crds::wanted(root)?) {
        findings.push(format!(
            "{}: not what the types say (run `cargo xtask crds`)",
            path.display()
        ));
    }
    for page in crate::book::missing(root)? {
        findings.push(format!(
            "{} is not in the site (a line in docs/SUMMARY.md)",
            page.display()
        ));
    }
    for path in crate::written::stale(crate::reference::wanted(root)?) {
        findings.push(format!(
            "{}: not what the code says (run `cargo xtask reference`)",
            path.display()
        ));
    }
    for finding in &findings {
        crate::say(finding);
    }
    if findings.is_empty() {
        crate::say(&format!(
            "structure: {} crates, {} of them pure: fine",
            packages.len(),
            PURE.len()
        ));
        return Ok(());
    }
    bail!("{} findings", findings.len())
}

struct Package {
    name: String,
    folder: PathBuf,
    /// Names of normal (shipped) dependencies.
    uses: BTreeSet<String>,
    /// The same with theirs, and theirs.
    closure: BTreeSet<String>,
}

fn packages(root: &Path) -> Result<Vec<Package>> {
    let metadata = crate::metadata::read(root, &[])?;
    let names: BTreeMap<&str, &str> = metadata
        .packages
        .iter()
        .map(|package| (package.id.as_str(), package.name.as_str()))
        .collect();
    let linked: BTreeMap<&str, Vec<&str>> = metadata
        .resolve
        .nodes
        .iter()
        .map(|node| (node.id.as_str(), node.linked()))
        .collect();
    let of_all = |ids: &mut dyn Iterator<Item = &&str>| -> BTreeSet<String> {
        ids.filter_map(|id| names.get(id))
            .map(|name| (*name).to_owned())
            .collect()
    };
    let ours = metadata
        .packages
        .iter()
        .filter(|package| package.source.is_none());
    Ok(ours
        .map(|package| {
            let uses = linked.get(package.id.as_str()).cloned().unwrap_or_default();
            let (mut seen, mut todo) = (BTreeSet::new(), uses.clone());
            while let Some(next) = todo.pop() {
                if seen.insert(next) {
                    todo.extend(linked.get(next).into_iter().flatten());
                }
            }
            Package {
                name: package.name.clone(),
                folder: package.manifest_path.parent().unwrap_or(root).to_owned(),
                uses: of_all(&mut uses.iter()),
                closure: of_all(&mut seen.iter()),
            }
        })
        .collect())
}

fn check_dependencies(packages: &[Package], findings: &mut Vec<String>) {
    for package in packages {
        let name = &package.name;
        if PURE.contains(&name.as_str()) {
            for bad in IMPURE_PACKAGES
                .iter()
                .filter(|p| package.closure.contains(**p))
            {
                findings.push(format!("{name} is pure but depends on {bad}"));
            }
        }
        if let Some((_, allowed)) = MAY_USE.iter().find(|(n, _)| n == name) {
            for used in package.uses.iter().filter(|u| u.starts_with("divvy")) {
                if !allowed.contains(&used.as_str()) {
                    findings.push(format!(
                        "{name} must not depend on {used} (table in xtask/src/check.rs)"
                    ));
                }
            }
            for bad in DEVELOPMENT_ONLY
                .iter()
                .filter(|d| package.closure.contains(**d) && !allowed.contains(d))
            {
                findings.push(format!("{name} ships {bad}, which is for development only"));
            }
        } else if ![
            "divvy",
            "divvy-demo",
            "xtask",
            "divvy-e2e",
            "divvy-bench",
            "divvy-hardware",
        ]
        .contains(&name.as_str())
            && !name.starts_with("divvy-test")
        {
            findings.push(format!(
                "{name} has no line in the dependency table in xtask/src/check.rs"
            ));
        }
    }
}

fn check_lints(package: &Package, findings: &mut Vec<String>) -> Result<()> {
    let manifest = fs_err::read_to_string(package.folder.join("Cargo.toml"))?;
    let inherits = manifest.contains("[lints]\nworkspace = true");
    if inherits == OWN_LINTS.contains(&package.name.as_str()) {
        findings.push(format!(
            "{}: `[lints] workspace = true` is missing, or not expected here",
            package.name
        ));
    }
    Ok(())
}

fn check_sources(package: &Package, root: &Path, findings: &mut Vec<String>) -> Result<()> {
    let files = files_below(&package.folder.join("src"), "rs")?;
    for file in &files {
        let shown = file
            .strip_prefix(root)
            .unwrap_or(file)
            .display()
            .to_string();
        let text = fs_err::read_to_string(file)?;
        let lines = text.lines().count();
        if lines > HARD_LINES {
            findings.push(format!(
                "{shown}: {lines} lines, {HARD_LINES} is the limit: split by concept"
            ));
        } else if lines > SOFT_LINES {
            crate::say(&format!(
                "note: {shown}: {lines} lines, over the soft limit of {SOFT_LINES}"
            ));
        }
        if PURE.contains(&package.name.as_str()) && !is_test_file(file) {
            let shipped = text.split("#[cfg(test)]").next().unwrap_or_default();
            for word in IMPURE_WORDS.iter().filter(|w| shipped.contains(**w)) {
                findings.push(format!("{shown}: {word} in a pure crate"));
            }
        }
        if !is_declared(file, &files)? {
            findings.push(format!(
                "{shown}: no `mod` line leads here, so it is never compiled"
            ));
        }
    }
    Ok(())
}

fn is_test_file(file: &Path) -> bool {
    file.components().any(|c| c.as_os_str() == "tests")
        || file.file_stem().is_some_and(|s| s == "tests")
}

/// Returns the files below a folder with this extension, in order.
pub(crate) fn files_below(folder: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut todo = vec![folder.to_owned()];
    while let Some(folder) = todo.pop() {
        if !folder.is_dir() {
            continue;
        }
        for entry in fs_err::read_dir(&folder)? {
            let path = entry?.path();
            if path.is_dir() {
                todo.push(path);
            } else if path.extension().is_some_and(|e| e == extension) {
                files.push(path);
            }
        }
    }
    files.sort();
    Ok(files)
}

/// Returns true if a `mod` line leads to the file: in its folder's `mod.rs`, `lib.rs` or `main.rs`,
/// or in the file named like its folder.
fn is_declared(file: &Path, files: &[PathBuf]) -> Result<bool> {
    let (Some(stem), Some(folder)) = (file.file_stem().and_then(|s| s.to_str()), file.parent())
    else {
        return Ok(true);
    };
    if ["lib", "main"].contains(&stem) || folder.ends_with("bin") {
        return Ok(true);
    }
    let (module, folder) = if stem == "mod" {
        (
            folder
                .file_name()
                .and_then(|s| s.to_str())
                .unwrap_or_default(),
            folder.parent().unwrap_or(folder),
        )
    } else {
        (stem, folder)
    };
    let parents = [
        folder.join("lib.rs"),
        folder.join("main.rs"),
        folder.join("mod.rs"),
        folder.with_extension("rs"),
    ];
    for parent in files.iter().filter(|f| parents.contains(f)) {
        let text = fs_err::read_to_string(parent)?;
        if text.contains(&format!("mod {module};")) || text.contains(&format!("mod {module} {{")) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Checks the relative links of all Markdown files.
fn check_links(root: &Path, findings: &mut Vec<String>) -> Result<()> {
    for name in crate::sources::files(root, "*.md")? {
        let file = root.join(&name);
        let text = fs_err::read_to_string(&file)?;
        for (number, line) in text.lines().enumerate() {
            for part in line.split("](").skip(1) {
                let target = part.split(')').next().unwrap_or_default();
                let path = target.split('#').next().unwrap_or_default();
                if path.is_empty() || target.contains("://") || target.starts_with("mailto:") {
                    continue;
                }
                if !file.parent().unwrap_or(root).join(path).exists() {
                    findings.push(format!(
                        "{name}:{}: link to {target} leads nowhere",
                        number + 1
                    ));
                }
            }
        }
    }
    Ok(())
}

/// Documents that any file cites as `docs/….md`, from the root of the tree.
fn check_cited(root: &Path, findings: &mut Vec<String>) -> Result<()> {
    let out = std::process::Command::new("git")
        .args([
            "grep",
            "-noE",
            r"(^|[^/.[:alnum:]_-])docs/[[:alnum:]_/-]+\.md",
        ])
        .current_dir(root)
        .output()?;
    for line in String::from_utf8_lossy(&out.stdout).lines() {
        let Some((place, cited)) = line.rfind("docs/").and_then(|at| line.split_at_checked(at))
        else {
            continue;
        };
        if !root.join(cited).exists() {
            findings.push(format!(
                "{} cites {cited}, which does not exist",
                place.trim_end_matches(|c: char| !c.is_alphanumeric())
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn contributing_lists_every_pure_crate() {
        let text = fs_err::read_to_string(crate::root().join("CONTRIBUTING.md")).unwrap();
        let list = text.split_once("Pure crates (").unwrap().1;
        let list = list.split_once(')').unwrap().0;
        let mut listed: Vec<_> = list
            .split(", ")
            .map(|name| format!("divvy-{}", name.trim_matches('`')))
            .collect();
        listed.sort_unstable();
        assert_eq!(listed, super::PURE);
    }
}
