//! Waiting for somebody else's change of a folder without looking again and again.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify;
use rustix::io::Errno;

use crate::Cancel;

/// Tells when files of a folder come, go or are replaced, by whichever process. Changes since it was made are kept until
/// they are told.
pub trait Watch: Send {
    /// Waits until something has changed, the call is cancelled, or so much time has passed. Whether something has
    /// changed; perhaps more than once for the same change.
    fn wait(&mut self, cancel: &Cancel, time: Duration) -> bool;
    /// What has changed up to now need not be told.
    fn forget(&mut self);
}

/// A folder on disk.
pub(crate) struct FolderWatch {
    /// There until this is dropped.
    inotify: Option<OwnedFd>,
}

impl Drop for FolderWatch {
    /// The kernel takes its time to take a watch down (10 ms and more: it waits until nobody looks at it any more), and
    /// whoever waited has an answer to give.
    fn drop(&mut self) {
        if let Some(inotify) = self.inotify.take() {
            // Without a thread to spare it is done here.
            drop(std::thread::Builder::new().name("watch-end".to_owned()).spawn(move || drop(inotify)));
        }
    }
}

impl FolderWatch {
    pub(crate) fn new(dir: &Path) -> io::Result<Self> {
        let inotify = inotify::init(inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC)?;
        // Files are only ever renamed into place.
        let changes = inotify::WatchFlags::MOVED_TO
            | inotify::WatchFlags::MOVED_FROM
            | inotify::WatchFlags::DELETE
            | inotify::WatchFlags::ONLYDIR;
        inotify::add_watch(&inotify, dir, changes)?;
        Ok(Self { inotify: Some(inotify) })
    }

    /// Reads all that there is to tell; whether it was about more than files being written.
    fn drain(&self) -> bool {
        let Some(inotify) = &self.inotify else { return false };
        let mut changed = false;
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut reader = inotify::Reader::new(inotify, &mut buffer);
        loop {
            match reader.next() {
                // Without a name: so much has happened that events were lost.
                Ok(event) => {
                    changed |= event.file_name().is_none_or(|name| !name.to_bytes().starts_with(b"."));
                }
                Err(Errno::INTR) => {}
                Err(_) => return changed,
            }
        }
    }
}

impl Watch for FolderWatch {
    fn wait(&mut self, cancel: &Cancel, time: Duration) -> bool {
        let fds = self.inotify.as_ref().map(AsFd::as_fd).into_iter().chain(cancel.told());
        let mut wanted: Vec<_> = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        // Asked after `told`, so that a cancel in between is not missed.
        if cancel.is_cancelled() {
            return false;
        }
        let time = Timespec {
            tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: time.subsec_nanos().into(),
        };
        // An interrupted wait is a short one; the caller looks at the time.
        let _ = poll(&mut wanted, Some(&time));
        self.drain()
    }

    fn forget(&mut self) {
        self.drain();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::{Durability, FileStore, Folder, Store};

    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn what_comes_goes_or_is_replaced_is_told_once_and_what_is_forgotten_never() {
        let dir = tempfile::tempdir().unwrap();
        let (ours, theirs) = (FileStore::open(dir.path()).unwrap(), FileStore::open(dir.path()).unwrap());
        let mut watch = ours.watch(Folder::Claims).unwrap();
        let never = Cancel::new();
        assert!(!watch.wait(&never, Duration::from_millis(5)), "nothing has happened");
        let changes: [&dyn Fn(); 3] = [
            &|| theirs.write(Folder::Claims, "a.json", b"1", Durability::Synced).unwrap(),
            &|| theirs.write(Folder::Claims, "a.json", b"2", Durability::Lazy).unwrap(),
            &|| assert!(theirs.remove(Folder::Claims, "a.json", Durability::Synced).unwrap()),
        ];
        for change in changes {
            change();
            assert!(watch.wait(&never, LONG));
            assert!(!watch.wait(&never, Duration::from_millis(5)), "told once");
        }
        changes[0]();
        watch.forget();
        assert!(!watch.wait(&never, Duration::from_millis(5)), "forgotten");
        theirs.write(Folder::Gpus, "a.json", b"1", Durability::Lazy).unwrap();
        assert!(!watch.wait(&never, Duration::from_millis(5)), "of another folder");
    }

    #[test]
    fn a_cancelled_call_waits_no_longer_whether_it_is_cancelled_before_or_meanwhile() {
        let dir = tempfile::tempdir().unwrap();
        let store = FileStore::open(dir.path()).unwrap();
        let mut watch = store.watch(Folder::Claims).unwrap();
        let start = Instant::now();
        let before = Cancel::new();
        before.cancel();
        assert!(!watch.wait(&before, LONG));
        let meanwhile = Cancel::new();
        let other = meanwhile.clone();
        let canceller = std::thread::spawn(move || other.cancel());
        while !meanwhile.is_cancelled() {
            assert!(!watch.wait(&meanwhile, LONG));
        }
        canceller.join().unwrap();
        assert!(start.elapsed() < LONG);
    }
}
