//! Watches the CDI folder, so that files which vanish under running pods (a cleared tmpfs, a
//! careless administrator) come back within a second or two: without them no further container of
//! the claim can start.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use futures::FutureExt;
use rustix::fs::inotify;
use rustix::io::Errno;
use tokio::io::unix::AsyncFd;

/// Reports files that vanish from a folder.
pub(crate) struct FolderWatch {
    inotify: AsyncFd<OwnedFd>,
}

impl FolderWatch {
    /// Watches a folder, which must exist. Needs a tokio runtime.
    pub(crate) fn new(folder: &Path) -> io::Result<Self> {
        let fd = inotify::init(inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC)?;
        // Losses only: files that appear are written by this plugin itself, or are other vendors'.
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

    /// Waits until a file vanished, and then for `settle`, so that a burst is reported once.
    pub(crate) async fn vanished(&mut self, settle: Duration) -> io::Result<()> {
        loop {
            let mut event = self.inotify.readable().await?;
            let vanished = drain(event.get_inner())?;
            // Readiness as it was before the drain: what came since stays ready.
            event.clear_ready();
            if vanished {
                break;
            }
        }
        tokio::time::sleep(settle).await;
        if let Some(event) = self.inotify.readable().now_or_never() {
            let mut event = event?;
            drain(event.get_inner())?;
            event.clear_ready();
        }
        Ok(())
    }
}

/// Reads all pending events; whether a file vanished that a runtime would have read.
fn drain(fd: &OwnedFd) -> io::Result<bool> {
    let mut vanished = false;
    let mut buffer = [MaybeUninit::uninit(); 4096];
    let mut reader = inotify::Reader::new(fd, &mut buffer);
    loop {
        match reader.next() {
            // Without a name it is the folder itself. Other names are files being written, renamed
            // when done.
            Ok(event) => {
                vanished |= event
                    .file_name()
                    .is_none_or(|name| name.to_bytes().ends_with(b".json"));
            }
            Err(Errno::WOULDBLOCK) => return Ok(vanished),
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_file_or_the_folder_that_vanishes_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("cdi");
        fs_err::create_dir(&folder).unwrap();
        fs_err::write(folder.join("a.json"), "{}").unwrap();
        let mut watch = FolderWatch::new(&folder).unwrap();
        fs_err::write(folder.join("b.tmp"), "{}").unwrap();
        fs_err::rename(folder.join("b.tmp"), folder.join("b.json")).unwrap();
        let quiet =
            tokio::time::timeout(Duration::from_millis(50), watch.vanished(Duration::ZERO)).await;
        assert!(
            quiet.is_err(),
            "a file that is being written is not reported"
        );
        fs_err::remove_file(folder.join("a.json")).unwrap();
        let in_time = Duration::from_secs(10);
        let settle = Duration::from_millis(1);
        tokio::time::timeout(in_time, watch.vanished(settle))
            .await
            .unwrap()
            .unwrap();
        let quiet = tokio::time::timeout(Duration::from_millis(50), watch.vanished(settle)).await;
        assert!(quiet.is_err(), "reported once");
        fs_err::remove_dir_all(&folder).unwrap();
        tokio::time::timeout(in_time, watch.vanished(settle))
            .await
            .unwrap()
            .unwrap();
        assert!(FolderWatch::new(&folder).is_err());
    }
}
