//! Container images without a container engine: one layer of given files, in an OCI layout, which
//! may also have one image for each of several architectures, or something that is no image.
//!
//! The same files give the same bytes (no times, sorted paths), so a digest says what is in an
//! image.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use flate2::Compression;
use flate2::write::GzEncoder;
use fs_err as fs;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::target::Target;

/// Content at a path of an image.
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
    /// Name of the architecture in OCI.
    pub architecture: &'static str,
}

impl Image {
    /// An empty image called `REGISTRY/NAME:TAG`, for this machine's architecture.
    pub fn new(name: &str, entrypoint: &[&str]) -> Self {
        let entrypoint = entrypoint.iter().map(|&word| word.to_owned()).collect();
        let architecture = Target::HOST.oci;
        let (entries, labels) = (BTreeMap::new(), BTreeMap::new());
        Self {
            name: name.to_owned(),
            entries,
            entrypoint,
            labels,
            architecture,
        }
    }

    /// For another architecture, as OCI calls it.
    #[must_use]
    pub fn architecture(self, architecture: &'static str) -> Self {
        Self {
            architecture,
            ..self
        }
    }

    /// Adds a program.
    #[must_use]
    pub fn program(self, path: &str, source: &Path) -> Self {
        self.entry(
            path,
            Entry::File {
                source: source.to_owned(),
                mode: 0o755,
            },
        )
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
            self.entries
                .entry(path.chars().take(end).collect())
                .or_insert(Entry::Folder);
        }
        self.entries.insert(path.to_owned(), entry);
        self
    }

    /// The files that the image has by path, and where they are from.
    pub fn sources(&self) -> impl Iterator<Item = (&str, &Path)> {
        self.entries.iter().filter_map(|(path, entry)| match entry {
            Entry::File { source, .. } => Some((path.as_str(), source.as_path())),
            Entry::Link(_) | Entry::Folder => None,
        })
    }

    /// Puts what is in the image into a folder.
    pub fn unpack(&self, folder: &Path) -> Result<()> {
        Ok(tar::Archive::new(self.layer()?.as_slice()).unpack(folder)?)
    }

    /// Every path in the image that is not a folder.
    pub fn files(&self) -> Vec<&str> {
        let files = self
            .entries
            .iter()
            .filter(|(_, entry)| **entry != Entry::Folder);
        files.map(|(path, _)| path.as_str()).collect()
    }

    /// Writes the image as an OCI layout packed into one archive, which `ctr images import` takes.
    pub fn write_archive(&self, path: &Path) -> Result<()> {
        let mut archive = tar::Builder::new(fs::File::create(path)?);
        for (name, bytes) in self.layout()?.files {
            append(&mut archive, &name, &Content::File(&bytes, 0o644))?;
        }
        archive
            .finish()
            .with_context(|| format!("cannot write {}", path.display()))
    }

    /// Writes the image as an OCI layout into a folder, which must not have another one.
    pub fn write_folder(&self, path: &Path) -> Result<()> {
        self.layout()?.write(path)
    }

    /// Writes images of one name, each for an architecture of its own, as an OCI layout into a
    /// folder, for a registry: their layers are compressed.
    pub fn write_all(images: &[Self], path: &Path) -> Result<()> {
        let mut layout = Layout::default();
        let name = &images.first().context("no image")?.name;
        let mut manifests = Vec::new();
        for image in images {
            let mut manifest = image.add_to(&mut layout, Some(Compression::best()))?;
            let platform = json!({"architecture": image.architecture, "os": "linux"});
            insert(&mut manifest, "platform", platform);
            manifests.push(manifest);
        }
        let index = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests});
        let index = layout.blob(INDEX, serde_json::to_vec(&index)?);
        layout.name(index, name)?;
        layout.write(path)
    }

    fn layout(&self) -> Result<Layout> {
        let mut layout = Layout::default();
        let manifest = self.add_to(&mut layout, None)?;
        layout.name(manifest, &self.name)?;
        Ok(layout)
    }

    /// Adds the image's blobs and returns the descriptor of its manifest.
    fn add_to(&self, layout: &mut Layout, compression: Option<Compression>) -> Result<Value> {
        let tar = self.layer()?;
        // Of what is in the layer, however it is compressed.
        let diff_id = digest(&tar);
        let layer = match compression {
            Some(level) => layout.blob(
                "application/vnd.oci.image.layer.v1.tar+gzip",
                gzip(&tar, level)?,
            ),
            None => layout.blob("application/vnd.oci.image.layer.v1.tar", tar),
        };
        let config = json!({
            "architecture": self.architecture,
            "os": "linux",
            "config": {"Entrypoint": self.entrypoint, "Env": ["PATH=/usr/bin:/bin"], "Labels": self.labels},
            "rootfs": {"type": "layers", "diff_ids": [diff_id]},
        });
        let config = layout.blob(
            "application/vnd.oci.image.config.v1+json",
            serde_json::to_vec(&config)?,
        );
        layout.manifest(&json!({"config": config, "layers": [layer]}))
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

const INDEX: &str = "application/vnd.oci.image.index.v1+json";

/// The files of an OCI layout by name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Layout {
    files: BTreeMap<String, Vec<u8>>,
}

impl Layout {
    /// Adds a blob and returns its descriptor.
    pub fn blob(&mut self, media_type: &str, bytes: Vec<u8>) -> Value {
        let (digest, size) = (digest(&bytes), bytes.len());
        self.files
            .insert(format!("blobs/{}", digest.replace(':', "/")), bytes);
        json!({"mediaType": media_type, "digest": digest, "size": size})
    }

    /// Adds a manifest with these fields and returns its descriptor.
    pub fn manifest(&mut self, fields: &Value) -> Result<Value> {
        let media_type = "application/vnd.oci.image.manifest.v1+json";
        let mut manifest = fields.clone();
        insert(&mut manifest, "schemaVersion", json!(2));
        insert(&mut manifest, "mediaType", json!(media_type));
        Ok(self.blob(media_type, serde_json::to_vec(&manifest)?))
    }

    /// Calls what is described `REGISTRY/NAME:TAG`.
    pub fn name(&mut self, mut descriptor: Value, name: &str) -> Result<()> {
        let tag = name.rsplit_once(':').map_or("latest", |(_, tag)| tag);
        // The second is what containerd calls the image; without it the name would be the bare tag.
        let names =
            json!({"org.opencontainers.image.ref.name": tag, "io.containerd.image.name": name});
        insert(&mut descriptor, "annotations", names);
        let index = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": [descriptor]});
        self.files
            .insert("index.json".to_owned(), serde_json::to_vec(&index)?);
        self.files.insert(
            "oci-layout".to_owned(),
            br#"{"imageLayoutVersion":"1.0.0"}"#.to_vec(),
        );
        Ok(())
    }

    /// Writes it into a folder, which must not have another one.
    pub fn write(&self, path: &Path) -> Result<()> {
        for (name, bytes) in &self.files {
            let file = path.join(name);
            fs::create_dir_all(file.parent().unwrap_or(path))?;
            fs::write(file, bytes)?;
        }
        Ok(())
    }
}

fn insert(object: &mut Value, key: &str, value: Value) {
    if let Some(fields) = object.as_object_mut() {
        fields.insert(key.to_owned(), value);
    }
}

/// The digest of bytes, as OCI writes it.
pub fn digest(bytes: &[u8]) -> String {
    format!("sha256:{}", hex(&Sha256::digest(bytes)))
}

fn gzip(bytes: &[u8], level: Compression) -> Result<Vec<u8>> {
    // Without a name and a time.
    let mut writer = GzEncoder::new(Vec::new(), level);
    writer.write_all(bytes)?;
    Ok(writer.finish()?)
}

/// A compressed archive of programs and texts, `name` in it.
pub fn tar_gz(files: &[(String, PathBuf, u32)]) -> Result<Vec<u8>> {
    let mut archive = tar::Builder::new(Vec::new());
    for (name, source, mode) in files {
        append(
            &mut archive,
            name,
            &Content::File(&fs::read(source)?, *mode),
        )?;
    }
    gzip(&archive.into_inner()?, Compression::best())
}

enum Content<'a> {
    File(&'a [u8], u32),
    Link(&'a str),
    Folder,
}

/// Adds an entry of root's without a time.
fn append<W: std::io::Write>(
    archive: &mut tar::Builder<W>,
    path: &str,
    content: &Content,
) -> Result<()> {
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
    use std::io::Read as _;

    use flate2::read::GzDecoder;
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

        let files = image.layout().unwrap().files;
        let blob = |descriptor: &Value| {
            let digest = descriptor["digest"]
                .as_str()
                .unwrap()
                .replace("sha256:", "blobs/sha256/");
            files[&digest].clone()
        };
        let index: Value = serde_json::from_slice(&files["index.json"]).unwrap();
        assert_eq!(
            index["manifests"][0]["annotations"]["io.containerd.image.name"],
            "localhost/x:1"
        );
        let manifest: Value = serde_json::from_slice(&blob(&index["manifests"][0])).unwrap();
        let layer = blob(&manifest["layers"][0]);
        let mut archive = tar::Archive::new(layer.as_slice());
        let paths: Vec<String> = archive
            .entries()
            .unwrap()
            .map(|entry| entry.unwrap().path().unwrap().display().to_string())
            .collect();
        assert_eq!(paths, ["bin", "usr/", "usr/bin/", "usr/bin/x"]);
        assert_eq!(
            image.layout().unwrap().files,
            files,
            "the same files give the same bytes"
        );
    }

    #[test]
    fn images_of_several_architectures_are_one_index_of_compressed_layers() {
        let dir = tempfile::tempdir().unwrap();
        let source = dir.path().join("program");
        let write = |name: &str| {
            fs_err::write(&source, "bytes").unwrap();
            let image = Image::new("localhost/x:1", &["/x"]).program("/x", &source);
            let images =
                ["amd64", "arm64"].map(|architecture| image.clone().architecture(architecture));
            Image::write_all(&images, &dir.path().join(name)).unwrap();
        };
        write("once");
        let read =
            |folder: &str, file: &str| fs_err::read(dir.path().join(folder).join(file)).unwrap();
        let blob = |descriptor: &Value| {
            let digest = descriptor["digest"].as_str().unwrap();
            let bytes = read("once", &format!("blobs/{}", digest.replace(':', "/")));
            assert_eq!(super::digest(&bytes), digest);
            bytes
        };
        let json = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).unwrap();
        let top = json(&read("once", "index.json"));
        assert_eq!(
            top["manifests"][0]["annotations"]["org.opencontainers.image.ref.name"],
            "1"
        );
        let index = json(&blob(&top["manifests"][0]));
        let manifests = index["manifests"].as_array().unwrap();
        let architectures: Vec<&Value> = manifests
            .iter()
            .map(|manifest| &manifest["platform"]["architecture"])
            .collect();
        assert_eq!(architectures, ["amd64", "arm64"]);
        for (manifest, architecture) in manifests.iter().zip(architectures) {
            let manifest = json(&blob(manifest));
            let config = json(&blob(&manifest["config"]));
            assert_eq!(config["architecture"], *architecture);
            let mut tar = Vec::new();
            GzDecoder::new(blob(&manifest["layers"][0]).as_slice())
                .read_to_end(&mut tar)
                .unwrap();
            assert_eq!(config["rootfs"]["diff_ids"][0], super::digest(&tar));
        }
        // Written later: what is in an image decides its digest, and not when.
        write("twice");
        assert_eq!(read("once", "index.json"), read("twice", "index.json"));
    }
}
