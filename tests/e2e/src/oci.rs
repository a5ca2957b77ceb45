//! Container images without a container engine: one layer of given files as an OCI layout.
//!
//! The same files give the same bytes (no times, sorted paths), so a digest says what is in an image.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use fs_err as fs;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// What is at a path of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Entry {
    File { source: PathBuf, mode: u32 },
    Link(String),
    Folder,
}

/// An image to be made.
#[derive(Debug, Clone)]
pub struct Image {
    name: String,
    entries: BTreeMap<String, Entry>,
    entrypoint: Vec<String>,
    labels: BTreeMap<String, String>,
}

impl Image {
    /// An empty image called `REGISTRY/NAME:TAG`.
    pub fn new(name: &str, entrypoint: &[&str]) -> Self {
        let entrypoint = entrypoint.iter().map(|&word| word.to_owned()).collect();
        Self { name: name.to_owned(), entries: BTreeMap::new(), entrypoint, labels: BTreeMap::new() }
    }

    /// Adds a program.
    #[must_use]
    pub fn program(self, path: &str, source: &Path) -> Self {
        self.entry(path, Entry::File { source: source.to_owned(), mode: 0o755 })
    }

    /// Adds a link.
    #[must_use]
    pub fn link(self, path: &str, target: &str) -> Self {
        self.entry(path, Entry::Link(target.to_owned()))
    }

    /// Adds an empty folder.
    #[must_use]
    pub fn folder(self, path: &str) -> Self {
        self.entry(path, Entry::Folder)
    }

    /// Adds a label as `org.opencontainers.image.version`.
    #[must_use]
    pub fn label(mut self, key: &str, value: &str) -> Self {
        self.labels.insert(key.to_owned(), value.to_owned());
        self
    }

    fn entry(mut self, path: &str, entry: Entry) -> Self {
        let path = path.trim_start_matches('/');
        // A runtime makes missing parents itself; stated ones have stated rights.
        for (end, _) in path.match_indices('/') {
            self.entries.entry(path.chars().take(end).collect()).or_insert(Entry::Folder);
        }
        self.entries.insert(path.to_owned(), entry);
        self
    }

    /// Every path in the image that is not a folder.
    pub fn files(&self) -> Vec<&str> {
        let files = self.entries.iter().filter(|(_, entry)| **entry != Entry::Folder);
        files.map(|(path, _)| path.as_str()).collect()
    }

    /// Writes the image as an OCI layout packed into one archive, which `ctr images import` takes.
    pub fn write_archive(&self, path: &Path) -> Result<()> {
        let mut archive = tar::Builder::new(fs::File::create(path)?);
        for (name, bytes) in self.layout()? {
            append(&mut archive, &name, &Content::File(&bytes, 0o644))?;
        }
        archive.finish().with_context(|| format!("cannot write {}", path.display()))
    }

    /// Writes the image as an OCI layout into a folder, which must not have another one.
    pub fn write_folder(&self, path: &Path) -> Result<()> {
        for (name, bytes) in self.layout()? {
            let file = path.join(name);
            fs::create_dir_all(file.parent().unwrap_or(path))?;
            fs::write(file, bytes)?;
        }
        Ok(())
    }

    /// The files of the layout by name.
    fn layout(&self) -> Result<BTreeMap<String, Vec<u8>>> {
        let mut files = BTreeMap::new();
        let mut blob = |media_type: &str, bytes: Vec<u8>| -> Value {
            let (digest, size) = (hex(&Sha256::digest(&bytes)), bytes.len());
            files.insert(format!("blobs/sha256/{digest}"), bytes);
            json!({"mediaType": media_type, "digest": format!("sha256:{digest}"), "size": size})
        };
        let layer = blob("application/vnd.oci.image.layer.v1.tar", self.layer()?);
        let config = json!({
            "architecture": if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" },
            "os": "linux",
            "config": {"Entrypoint": self.entrypoint, "Env": ["PATH=/usr/bin:/bin"], "Labels": self.labels},
            "rootfs": {"type": "layers", "diff_ids": [layer.get("digest")]},
        });
        let config = blob("application/vnd.oci.image.config.v1+json", serde_json::to_vec(&config)?);
        let manifest_type = "application/vnd.oci.image.manifest.v1+json";
        let manifest =
            json!({"schemaVersion": 2, "mediaType": manifest_type, "config": config, "layers": [layer]});
        let mut manifest = blob(manifest_type, serde_json::to_vec(&manifest)?);
        let tag = self.name.rsplit_once(':').map_or("latest", |(_, tag)| tag);
        if let Some(fields) = manifest.as_object_mut() {
            // The second is what containerd calls the image; without it the name would be the bare tag.
            let names =
                json!({"org.opencontainers.image.ref.name": tag, "io.containerd.image.name": self.name});
            fields.insert("annotations".to_owned(), names);
        }
        let index_type = "application/vnd.oci.image.index.v1+json";
        let index = json!({"schemaVersion": 2, "mediaType": index_type, "manifests": [manifest]});
        files.insert("index.json".to_owned(), serde_json::to_vec(&index)?);
        files.insert("oci-layout".to_owned(), br#"{"imageLayoutVersion":"1.0.0"}"#.to_vec());
        Ok(files)
    }

    fn layer(&self) -> Result<Vec<u8>> {
        let mut layer = tar::Builder::new(Vec::new());
        for (path, entry) in &self.entries {
            match entry {
                Entry::File { source, mode } => {
                    append(&mut layer, path, &Content::File(&fs::read(source)?, *mode))?;
                }
                Entry::Link(target) => append(&mut layer, path, &Content::Link(target))?,
                Entry::Folder => append(&mut layer, &format!("{path}/"), &Content::Folder)?,
            }
        }
        Ok(layer.into_inner()?)
    }
}

enum Content<'a> {
    File(&'a [u8], u32),
    Link(&'a str),
    Folder,
}

/// Adds an entry of root's without a time.
fn append<W: std::io::Write>(archive: &mut tar::Builder<W>, path: &str, content: &Content) -> Result<()> {
    let mut header = tar::Header::new_gnu();
    header.set_mtime(0);
    header.set_uid(0);
    header.set_gid(0);
    header.set_size(0);
    let added = match *content {
        Content::File(bytes, mode) => {
            header.set_entry_type(tar::EntryType::Regular);
            header.set_mode(mode);
            header.set_size(u64::try_from(bytes.len())?);
            archive.append_data(&mut header, path, bytes)
        }
        Content::Link(target) => {
            header.set_entry_type(tar::EntryType::Symlink);
            header.set_mode(0o777);
            archive.append_link(&mut header, path, target)
        }
        Content::Folder => {
            header.set_entry_type(tar::EntryType::Directory);
            header.set_mode(0o755);
            archive.append_data(&mut header, path, std::io::empty())
        }
    };
    added.with_context(|| format!("cannot add {path} to the image"))
}

/// Bytes as lower-case hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::Image;

    #[test]
    fn every_blob_is_named_after_its_bytes_and_the_index_leads_to_the_layer() {
        let dir = tempfile::tempdir().unwrap();
        let source = dir.path().join("program");
        fs_err::write(&source, "bytes").unwrap();
        let image = Image::new("localhost/x:1", &["/usr/bin/x"])
            .program("/usr/bin/x", &source)
            .link("bin", "usr/bin");
        assert_eq!(image.files(), ["bin", "usr/bin/x"]);

        let files = image.layout().unwrap();
        let blob = |descriptor: &Value| {
            let digest = descriptor["digest"].as_str().unwrap().replace("sha256:", "blobs/sha256/");
            files[&digest].clone()
        };
        let index: Value = serde_json::from_slice(&files["index.json"]).unwrap();
        assert_eq!(index["manifests"][0]["annotations"]["io.containerd.image.name"], "localhost/x:1");
        let manifest: Value = serde_json::from_slice(&blob(&index["manifests"][0])).unwrap();
        let layer = blob(&manifest["layers"][0]);
        let mut archive = tar::Archive::new(layer.as_slice());
        let paths: Vec<String> = archive
            .entries()
            .unwrap()
            .map(|entry| entry.unwrap().path().unwrap().display().to_string())
            .collect();
        assert_eq!(paths, ["bin", "usr/", "usr/bin/", "usr/bin/x"]);
        assert_eq!(image.layout().unwrap(), files, "the same files give the same bytes");
    }
}
