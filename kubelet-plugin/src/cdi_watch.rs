//! Watches the CDI folder, so that files which vanish under running pods (a cleared tmpfs, a careless administrator)
//! come back within a second or two: without them no further container of the claim can start.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use rustix::fs::inotify;
use tokio::io::unix::AsyncFd;

/// Tells when something vanished from a folder.
pub(crate) struct FolderWatch {
    inotify: AsyncFd<OwnedFd>,
}

impl FolderWatch {
    /// Watches a folder, which must exist. Needs a tokio runtime.
    pub(crate) fn new(folder: &Path) -> io::Result<Self> {
        let fd = inotify::init(inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC)?;
        let gone = inotify::WatchFlags::DELETE
            | inotify::WatchFlags::MOVED_FROM
            | inotify::WatchFlags::DELETE_SELF
            | inotify::WatchFlags::MOVE_SELF
            | inotify::WatchFlags::ONLYDIR;
        inotify::add_watch(&fd, folder, gone)?;
        #[expect(
            deprecated,
            reason = "an OwnedFd keeps the promise that the unsafe successor asks for; unsafe is forbidden here"
        )]
        let inotify = AsyncFd::new(fd)?;
        Ok(Self { inotify })
    }

    /// Waits until something vanished, and then for `settle`, so that a burst is told once.
    pub(crate) async fn vanished(&mut self, settle: Duration) -> io::Result<()> {
        drop(self.inotify.readable().await?);
        tokio::time::sleep(settle).await;
        let mut guard = self.inotify.readable().await?;
        let mut buffer = [0_u8; 4096];
        // What happened does not matter: the restore looks at every file that should be there.
        while let Ok(Ok(read)) = guard.try_io(|fd| Ok(rustix::io::read(fd.get_ref(), &mut buffer)?)) {
            if read == 0 {
                break;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_file_or_the_folder_that_vanishes_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("cdi");
        fs_err::create_dir(&folder).unwrap();
        fs_err::write(folder.join("a.json"), "{}").unwrap();
        let mut watch = FolderWatch::new(&folder).unwrap();
        fs_err::remove_file(folder.join("a.json")).unwrap();
        let in_time = Duration::from_secs(10);
        let settle = Duration::from_millis(1);
        tokio::time::timeout(in_time, watch.vanished(settle)).await.unwrap().unwrap();
        let quiet = tokio::time::timeout(Duration::from_millis(50), watch.vanished(settle)).await;
        assert!(quiet.is_err(), "told once");
        fs_err::remove_dir(&folder).unwrap();
        tokio::time::timeout(in_time, watch.vanished(settle)).await.unwrap().unwrap();
        assert!(FolderWatch::new(&folder).is_err());
    }
}
