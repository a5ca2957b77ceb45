//! A file that is locked (flock(2)) until it is dropped.

use std::fs::TryLockError;
use std::io;
use std::ops::{Deref, DerefMut};

use fs_err as fs;

/// An open file with a lock on it. Closing the file alone would not free the lock while a child
/// process has a copy of its descriptor, as each has from its fork until its exec; unlocking it
/// does.
#[derive(Debug)]
pub struct Locked(fs::File);

impl Locked {
    /// Waits for a share of the lock.
    pub(crate) fn shared(file: fs::File) -> io::Result<Self> {
        file.file().lock_shared()?;
        Ok(Self(file))
    }

    /// Waits for the lock, and takes it alone.
    pub fn waiting(file: fs::File) -> io::Result<Self> {
        file.file().lock()?;
        Ok(Self(file))
    }

    /// Takes the lock alone if it is free; else gives the file back, to be tried again.
    ///
    /// # Errors
    /// The lock is taken, or the file cannot be locked.
    pub fn alone(file: fs::File) -> Result<Self, (fs::File, TryLockError)> {
        match file.file().try_lock() {
            Ok(()) => Ok(Self(file)),
            Err(error) => Err((file, error)),
        }
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        // Closing it, which follows, is the second try.
        drop(self.0.file().unlock());
    }
}

impl Deref for Locked {
    type Target = fs::File;

    fn deref(&self) -> &fs::File {
        &self.0
    }
}

impl DerefMut for Locked {
    fn deref_mut(&mut self) -> &mut fs::File {
        &mut self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A child that is about to start a program has a copy of the descriptor.
    #[test]
    fn a_lock_is_free_at_once_although_a_child_has_its_file() {
        let dir = tempfile::tempdir().unwrap();
        let open = || fs::File::create(dir.path().join("lock")).unwrap();
        for take in [Locked::shared, |file| Ok(Locked::alone(file).unwrap())] {
            let lock = take(open()).unwrap();
            let of_child = lock.file().try_clone().unwrap();
            assert!(Locked::alone(open()).is_err(), "it is held");
            drop(lock);
            assert!(Locked::alone(open()).is_ok(), "a child keeps it");
            drop(of_child);
        }
    }
}
