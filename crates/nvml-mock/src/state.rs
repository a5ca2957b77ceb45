//! [`MockState`]: the engine in a file that several processes share.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use divvy_gpu_sim::{Engine, SimSpec};
use divvy_model::lock;
use rustix::fs::FlockOperation;

/// The state could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// The file or its lock.
    #[error("mock GPU state cannot be used")]
    Io(#[from] io::Error),
    /// The file does not hold a state.
    #[error("mock GPU state {path:?} cannot be read: delete it to start afresh")]
    Parse {
        path: PathBuf,
        /// The fault.
        #[source]
        source: serde_json::Error,
    },
}

/// A file with an engine. Each change replaces the file as a whole, under a lock (`<file>.lock`);
/// readers need none.
#[derive(Debug)]
pub struct MockState {
    path: PathBuf,
    cache: Mutex<Option<Cached>>,
    /// The engine of a state that has no file.
    memory: Option<Mutex<Arc<Engine>>>,
}

#[derive(Debug)]
struct Cached {
    stamp: Stamp,
    engine: Arc<Engine>,
    /// Keeps the inode taken, so that no later version of the file can look like this one.
    _file: fs_err::File,
}

/// Distinguishes one version of the file from another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    modified: (i64, i64),
    size: u64,
}

impl MockState {
    /// The state in an existing file.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, StateError> {
        let state = Self {
            path: path.as_ref().to_owned(),
            cache: Mutex::new(None),
            memory: None,
        };
        state.read()?;
        Ok(state)
    }

    /// The state in a file, made with these GPUs if there is none.
    pub fn open_or_create(path: impl AsRef<Path>, gpus: &SimSpec) -> Result<Self, StateError> {
        let state = Self {
            path: path.as_ref().to_owned(),
            cache: Mutex::new(None),
            memory: None,
        };
        let lock = state.lock()?;
        if !state.path.try_exists()? {
            state.write(&Engine::new(gpus))?;
        }
        drop(lock);
        state.read()?;
        Ok(state)
    }

    /// A state without a file.
    pub(crate) fn in_memory(engine: Engine) -> Self {
        Self {
            path: PathBuf::new(),
            cache: Mutex::new(None),
            memory: Some(Mutex::new(Arc::new(engine))),
        }
    }

    /// The engine as it is now. Parses the file only if it is another than last time.
    pub fn read(&self) -> Result<Arc<Engine>, StateError> {
        if let Some(memory) = &self.memory {
            return Ok(lock(memory).clone());
        }
        let mut cache = lock(&self.cache);
        let now = stamp(&fs_err::metadata(&self.path)?);
        if let Some(cached) = cache.as_ref().filter(|c| c.stamp == now) {
            return Ok(Arc::clone(&cached.engine));
        }
        let file = fs_err::File::open(&self.path)?;
        // The stamp of the opened file, which may be newer than the one looked at above.
        let stamp = stamp(&file.metadata()?);
        let text = io::read_to_string(&file)?;
        let engine: Engine = serde_json::from_str(&text).map_err(|source| StateError::Parse {
            path: self.path.clone(),
            source,
        })?;
        let engine = Arc::new(engine);
        *cache = Some(Cached {
            stamp,
            engine: Arc::clone(&engine),
            _file: file,
        });
        Ok(engine)
    }

    /// Changes the engine; nothing is written if it stays the same.
    pub fn edit<R>(&self, edit: impl FnOnce(&mut Engine) -> R) -> Result<R, StateError> {
        if let Some(memory) = &self.memory {
            return Ok(edit(Arc::make_mut(&mut lock(memory))));
        }
        let lock = self.lock()?;
        let before = self.read()?;
        let mut engine = Engine::clone(&before);
        let result = edit(&mut engine);
        if engine != *before {
            let file = self.write(&engine)?;
            self.remember(engine, file)?;
        }
        drop(lock);
        Ok(result)
    }

    /// The engine as last written: it need not be parsed again.
    fn remember(&self, engine: Engine, file: fs_err::File) -> Result<(), StateError> {
        let stamp = stamp(&file.metadata()?);
        let mut cache = lock(&self.cache);
        *cache = Some(Cached {
            stamp,
            engine: Arc::new(engine),
            _file: file,
        });
        Ok(())
    }

    /// Held until dropped, across processes; a killed holder lets go.
    fn lock(&self) -> Result<fs_err::File, StateError> {
        let mut path = self.path.clone().into_os_string();
        path.push(".lock");
        let file = fs_err::OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(PathBuf::from(path))?;
        rustix::fs::flock(&file, FlockOperation::LockExclusive).map_err(io::Error::from)?;
        Ok(file)
    }

    /// The file that was written, opened: whatever happens to its name later, it holds this engine.
    fn write(&self, engine: &Engine) -> Result<fs_err::File, StateError> {
        let text = serde_json::to_vec_pretty(engine).map_err(|source| StateError::Parse {
            path: self.path.clone(),
            source,
        })?;
        let mut temporary = self.path.clone().into_os_string();
        temporary.push(".new");
        // Not synced: it has to outlive processes, not the machine.
        fs_err::write(&temporary, text)?;
        let file = fs_err::File::open(PathBuf::from(&temporary))?;
        fs_err::rename(temporary, &self.path)?;
        Ok(file)
    }
}

fn stamp(metadata: &std::fs::Metadata) -> Stamp {
    Stamp {
        device: metadata.dev(),
        inode: metadata.ino(),
        modified: (metadata.mtime(), metadata.mtime_nsec()),
        size: metadata.size(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use divvy_gpu_sim::profile;

    #[test]
    fn two_openers_see_each_others_changes_and_lose_none() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("gpus.json");
        let one = MockState::open_or_create(&path, &"h100x1".parse().unwrap()).unwrap();
        let two = MockState::open_or_create(&path, &"l4x7".parse().unwrap()).unwrap();
        assert_eq!(
            two.read().unwrap().gpus().len(),
            1,
            "an existing file is kept"
        );
        std::thread::scope(|scope| {
            for state in [&one, &two] {
                scope.spawn(|| {
                    for _ in 0..6 {
                        state.edit(|e| e.add_gpu(profile("l4").unwrap())).unwrap();
                    }
                });
            }
        });
        assert_eq!(one.read().unwrap().gpus().len(), 13);
        assert_eq!(one.read().unwrap(), two.read().unwrap());
    }

    #[test]
    fn a_reader_parses_only_what_changed() {
        let dir = tempfile::tempdir().unwrap();
        let state =
            MockState::open_or_create(dir.path().join("s"), &"l4".parse().unwrap()).unwrap();
        let first = state.read().unwrap();
        state.edit(|_| ()).unwrap();
        assert!(Arc::ptr_eq(&first, &state.read().unwrap()));
        state.edit(Engine::reboot).unwrap();
        assert!(!Arc::ptr_eq(&first, &state.read().unwrap()));
    }

    #[test]
    fn a_broken_or_missing_file_is_an_error_that_names_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("gpus.json");
        assert!(matches!(MockState::open(&path), Err(StateError::Io(_))));
        fs_err::write(&path, "{}").unwrap();
        let error = MockState::open(&path).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("mock GPU state {path:?} cannot be read: delete it to start afresh")
        );
    }
}
