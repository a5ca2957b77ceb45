//! Contents of a release as a CycloneDX document: every crate that the shipped programs link, and
//! every file of the images that is not ours.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use divvy_e2e::oci::{Image, digest};
use divvy_e2e::target::Target;
use fs_err as fs;
use serde_json::{Value, json};

use super::VERSION;
use crate::metadata::{Metadata, Node, Package};

/// The packages of the shipped programs.
const SHIPPED: [&str; 5] = [
    "divvy",
    "divvy-cdi-hook",
    "divvy-cluster-controller",
    "divvy-kubelet-plugin",
    "divvy-mps-supervisor",
];

/// Has neither a time nor a random number, so that the same sources give the same document.
pub(super) fn document(root: &Path, images: &[Image]) -> Result<Value> {
    let mut flags = vec!["--offline".to_owned()];
    for target in Target::ALL {
        flags.extend([
            "--filter-platform".to_owned(),
            target.gnu(),
            "--filter-platform".to_owned(),
            target.musl(),
        ]);
    }
    let metadata = crate::metadata::read(root, &flags)?;
    let lock = fs::read_to_string(root.join("Cargo.lock"))?;
    let (mut components, dependencies) = crates(&metadata, &sums(&lock))?;
    for image in images {
        for (path, source) in image
            .sources()
            .filter(|(path, _)| !path.starts_with("usr/bin/divvy"))
        {
            components.push(file(image.architecture, path, &fs::read(source)?));
        }
    }
    Ok(json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {
            "type": "application", "bom-ref": "release", "name": "divvy", "version": VERSION,
            "licenses": [{"expression": "Apache-2.0"}],
        }},
        "components": components,
        "dependencies": dependencies,
    }))
}

/// Describes a library of the distribution that built the release.
fn file(architecture: &str, path: &str, bytes: &[u8]) -> Value {
    let digest = digest(bytes);
    json!({
        "type": "file",
        "bom-ref": format!("image/{architecture}/{path}"),
        "name": format!("/{path}"),
        "hashes": [{"alg": "SHA-256", "content": digest.trim_start_matches("sha256:")}],
        "properties": [{"name": "divvy:architecture", "value": architecture}],
    })
}

impl Package {
    fn purl(&self) -> String {
        format!("pkg:cargo/{}@{}", self.name, self.version)
    }

    fn component(&self, sums: &BTreeMap<String, String>) -> Value {
        let purl = self.purl();
        let sums = sums
            .get(&purl)
            .map(|sum| json!({"alg": "SHA-256", "content": sum}));
        // Older crates write a slash.
        let licences: Vec<&str> = self
            .license
            .as_deref()
            .unwrap_or("NOASSERTION")
            .split('/')
            .map(str::trim)
            .collect();
        json!({
            "type": "library", "bom-ref": purl, "purl": purl, "name": self.name, "version": self.version,
            "licenses": [{"expression": licences.join(" OR ")}],
            "hashes": sums.into_iter().collect::<Vec<_>>(),
        })
    }
}

/// Returns the crates that the shipped programs link, and their dependencies on each other.
fn crates(
    metadata: &Metadata,
    sums: &BTreeMap<String, String>,
) -> Result<(Vec<Value>, Vec<Value>)> {
    let packages: BTreeMap<&str, &Package> = metadata
        .packages
        .iter()
        .map(|one| (one.id.as_str(), one))
        .collect();
    let nodes: BTreeMap<&str, &Node> = metadata
        .resolve
        .nodes
        .iter()
        .map(|one| (one.id.as_str(), one))
        .collect();
    let ours = metadata.packages.iter().filter(|one| one.source.is_none());
    let mut unread: Vec<&str> = ours
        .filter(|one| SHIPPED.contains(&one.name.as_str()))
        .map(|one| one.id.as_str())
        .collect();
    ensure!(
        unread.len() == SHIPPED.len(),
        "cargo metadata does not name {SHIPPED:?}"
    );
    let package = |id: &str| packages.get(id).with_context(|| format!("no package {id}"));
    let references = |ids: &[&str]| -> Result<BTreeSet<String>> {
        ids.iter().map(|id| Ok(package(id)?.purl())).collect()
    };
    let mut dependencies = BTreeMap::from([("release".to_owned(), references(&unread)?)]);
    let mut components = BTreeMap::new();
    while let Some(id) = unread.pop() {
        let package = package(id)?;
        if components
            .insert(package.purl(), package.component(sums))
            .is_some()
        {
            continue;
        }
        let linked = nodes
            .get(id)
            .with_context(|| format!("no node {id}"))?
            .linked();
        dependencies.insert(package.purl(), references(&linked)?);
        unread.extend(linked);
    }
    let dependencies = dependencies
        .into_iter()
        .map(|(of, on)| json!({"ref": of, "dependsOn": on}));
    Ok((components.into_values().collect(), dependencies.collect()))
}

/// Returns the checksums of a lock file by package.
fn sums(lock: &str) -> BTreeMap<String, String> {
    let sum = |part: &str| {
        let value = |key: &str| {
            let line = part
                .lines()
                .find_map(|line| line.strip_prefix(key)?.strip_prefix(" = \""));
            line.map(|line| line.trim_end_matches('"'))
        };
        Some((
            format!("pkg:cargo/{}@{}", value("name")?, value("version")?),
            value("checksum")?.to_owned(),
        ))
    };
    lock.split("[[package]]").filter_map(sum).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{crates, sums};

    #[test]
    fn what_is_linked_is_listed_once_and_what_only_tests_is_not() {
        let package = |name: &str, source: Option<&str>| json!({"id": name, "name": name, "version": "1.0.0", "license": "MIT / Apache-2.0", "source": source, "manifest_path": ""});
        let on =
            |name: &str, kind: Option<&str>| json!({"pkg": name, "dep_kinds": [{"kind": kind}]});
        let ours = super::SHIPPED;
        let others = ["linked", "deeper", "tested", "building"];
        let packages = ours.iter().map(|name| package(name, None));
        let packages = packages.chain(others.iter().map(|name| package(name, Some("registry"))));
        let mut nodes: Vec<_> = ours[1..]
            .iter()
            .chain(&["deeper"])
            .map(|name| json!({"id": name, "deps": []}))
            .collect();
        let deps = [
            on("linked", None),
            on("tested", Some("dev")),
            on("building", Some("build")),
        ];
        nodes.push(json!({"id": "divvy", "deps": deps}));
        nodes.push(
            json!({"id": "linked", "deps": [on("deeper", None), on("divvy-cdi-hook", None)]}),
        );
        let metadata =
            json!({"packages": packages.collect::<Vec<_>>(), "resolve": {"nodes": nodes}});
        let lock = "[[package]]\nname = \"deeper\"\nversion = \"1.0.0\"\nchecksum = \"abc\"\n";

        let metadata = serde_json::from_value(metadata).unwrap();
        let (components, dependencies) = crates(&metadata, &sums(lock)).unwrap();
        let names: Vec<_> = components
            .iter()
            .map(|one| one["name"].as_str().unwrap())
            .collect();
        let expected = [
            "deeper",
            "divvy-cdi-hook",
            "divvy-cluster-controller",
            "divvy-kubelet-plugin",
            "divvy-mps-supervisor",
            "divvy",
            "linked",
        ];
        assert_eq!(names, expected);
        assert_eq!(components[0]["hashes"][0]["content"], "abc");
        assert_eq!(
            components[0]["licenses"][0]["expression"],
            "MIT OR Apache-2.0"
        );
        let of_divvy = dependencies
            .iter()
            .find(|one| one["ref"] == "pkg:cargo/divvy@1.0.0")
            .unwrap();
        assert_eq!(of_divvy["dependsOn"], json!(["pkg:cargo/linked@1.0.0"]));
    }
}
