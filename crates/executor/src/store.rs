//! Where records, GPU states, tombstones and ordinals are kept: files, behind a seam that tests
//! crash.

mod files;

use std::io;

pub use files::FileStore;

/// The folders of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Folder {
    /// Records, `<uid>.json`.
    Claims,
    /// GPU states, `<uuid>.json`.
    Gpus,
    /// When claims were last unprepared, `<uid>.json`.
    Tombstones,
    /// Files about the node: ordinals, and promises of caps by GPU.
    Node,
    /// Files that could not be read, kept for people.
    Corrupt,
}

impl Folder {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::Claims,
        Self::Gpus,
        Self::Tombstones,
        Self::Node,
        Self::Corrupt,
    ];

    /// The folder's name below the plugin's.
    pub fn name(self) -> &'static str {
        match self {
            Self::Claims => "claims",
            Self::Gpus => "gpus",
            Self::Tombstones => "tombstones",
            Self::Node => "node",
            Self::Corrupt => "corrupt",
        }
    }
}

/// Changes whenever the file or folder does: inode, time of modification (seconds, nanoseconds) and
/// size. A file is always replaced by a new one. Its inode may be one that was free a moment ago,
/// and the clock of a filesystem ticks every few milliseconds, so the writer sets an explicit time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Stamp(pub u64, pub (i64, i64), pub u64);

/// A file in a folder.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Entry {
    pub name: String,
    pub stamp: Stamp,
}

/// Durability of a write: whether a loss of power may undo it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    /// Nothing: on disk when the call returns (temp file, fsync, rename, fsync folder).
    Synced,
    /// This change: whole or not at all, but perhaps not at all.
    Lazy,
}

/// Files by folder and name. A write replaces a file as a whole: a reader sees the old or the new
/// content. Opening a store makes all that is seen in it last.
pub trait Store: Send + Sync {
    /// Files of a folder, by name.
    fn list(&self, folder: Folder) -> io::Result<Vec<Entry>>;
    /// Changes when a file of the folder comes or goes; perhaps not for two changes within a few
    /// milliseconds.
    fn stamp(&self, folder: Folder) -> io::Result<Stamp>;
    /// A file's content; `None` if there is none. An error has the system's code.
    fn read(&self, folder: Folder, name: &str) -> io::Result<Option<Vec<u8>>>;
    /// Writes a file, and returns the stamp that it is listed with until the next write.
    fn write(
        &self,
        folder: Folder,
        name: &str,
        bytes: &[u8],
        durability: Durability,
    ) -> io::Result<Stamp>;
    /// Writes over a file in the blocks that it has, for a full disk, and returns its stamp as
    /// [`write`](Self::write) does. Only here a crash may leave content that cannot be read. Fails
    /// with `StorageFull` where the content needs another block.
    fn overwrite(&self, folder: Folder, name: &str, bytes: &[u8]) -> io::Result<Stamp>;
    /// Removes a file; whether there was one.
    fn remove(&self, folder: Folder, name: &str, durability: Durability) -> io::Result<bool>;
}
