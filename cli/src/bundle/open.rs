//! Reads what a bundle has of objects.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::Path;

use anyhow::{Context, Result, bail};
use flate2::read::GzDecoder;
use serde::de::DeserializeOwned;

/// The most bytes that are read of an archive, unpacked.
const MOST: u64 = 4 << 30;
/// Text before the list of what a bundle lacks.
const MISSING: &str = "\nNot in it:\n";

/// Objects of a bundle.
#[derive(Debug, Default)]
pub struct Opened {
    /// JSON of each kind, by plural name.
    objects: BTreeMap<String, String>,
    /// Parts that could not be read when it was made.
    pub missing: Vec<String>,
}

impl Opened {
    /// Reads an archive, or a folder.
    pub fn read(path: &Path) -> Result<Self> {
        let mut opened = Self::default();
        if path.is_dir() {
            let readme = fs_err::read_to_string(path.join("README.txt"));
            opened.add("README.txt", readme?);
            for entry in fs_err::read_dir(path.join("objects"))? {
                let entry = entry?;
                let name = format!("objects/{}", entry.file_name().to_string_lossy());
                opened.add(&name, fs_err::read_to_string(entry.path())?);
            }
            return Ok(opened);
        }
        let unpacked = GzDecoder::new(fs_err::File::open(path)?).take(MOST);
        let mut archive = tar::Archive::new(unpacked);
        let wrong = || format!("{}: no archive of divvy bundle", path.display());
        for entry in archive.entries()? {
            let mut entry = entry.with_context(wrong)?;
            let name = entry.path()?.to_string_lossy().into_owned();
            let Some((_, name)) = name.split_once('/') else {
                continue;
            };
            let name = name.to_owned();
            if name == "README.txt" || name.starts_with("objects/") {
                let mut text = String::new();
                entry.read_to_string(&mut text).with_context(wrong)?;
                opened.add(&name, text);
            }
        }
        if opened.objects.is_empty() {
            bail!("{}: there are no objects in it", path.display());
        }
        Ok(opened)
    }

    fn add(&mut self, name: &str, text: String) {
        if name == "README.txt" {
            let list = text.split_once(MISSING).map_or("", |(_, list)| list);
            let lines = list.lines().filter_map(|line| line.strip_prefix("- "));
            self.missing = lines.map(str::to_owned).collect();
        } else if let Some(plural) = name
            .strip_prefix("objects/")
            .and_then(|name| name.strip_suffix(".json"))
        {
            self.objects.insert(plural.to_owned(), text);
        }
    }

    /// Returns the objects of a kind; nothing where the bundle does not have the kind.
    pub fn of<K: DeserializeOwned>(&self, plural: &str) -> Result<Option<Vec<K>>> {
        let Some(text) = self.objects.get(plural) else {
            return Ok(None);
        };
        let all = serde_json::from_str(text);
        all.map(Some)
            .with_context(|| format!("objects/{plural}.json of the bundle"))
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Node;

    use super::*;
    use crate::bundle::write;

    #[test]
    fn an_archive_is_read_as_it_was_written() {
        let folder = tempfile::tempdir().unwrap();
        let files = [
            (
                "README.txt",
                "x\n\nNot in it:\n- nodes: you may not read them\n",
            ),
            ("objects/nodes.json", "[{\"metadata\": {\"name\": \"n\"}}]"),
            ("logs/a/b/c.log", "text"),
        ];
        let files = files.map(|(name, text)| (name.to_owned(), text.to_owned()));
        for name in ["bundle.tar.gz", "bundle"] {
            let path = folder.path().join(name);
            write(&path, &files.clone().into()).unwrap();
            let opened = Opened::read(&path).unwrap();
            assert_eq!(opened.missing, ["nodes: you may not read them"]);
            let nodes: Vec<Node> = opened.of("nodes").unwrap().unwrap();
            assert_eq!(nodes[0].metadata.name.as_deref(), Some("n"));
            assert!(opened.of::<Node>("pods").unwrap().is_none());
        }
        let none = folder.path().join("none.tar.gz");
        fs_err::write(&none, "no archive").unwrap();
        assert!(Opened::read(&none).is_err());
    }
}
