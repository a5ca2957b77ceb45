//! Marks of NVML calls that change a GPU, for the other plugin instance of a rolling update: what
//! one instance has begun and what may still happen must not look to the other like something that
//! never will.

use std::io::{self, Write};
use std::path::PathBuf;

use divvy_model::{CallMarks, GpuOp, GpuUuid};
use fs_err as fs;

use crate::locked::Locked;

/// A lock file for each GPU, shared by the calls that are under way: the kernel frees it when the
/// last of them has returned, or its process is really gone.
#[derive(Debug)]
pub struct FileMarks {
    dir: PathBuf,
}

impl FileMarks {
    /// In the folder of the lock files.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into() }
    }

    fn path(&self, gpu: &GpuUuid) -> PathBuf {
        self.dir.join(format!("{gpu}.inflight"))
    }
}

impl CallMarks for FileMarks {
    fn mark(&self, gpu: &GpuUuid, op: GpuOp) -> io::Result<Box<dyn Send>> {
        let path = self.path(gpu);
        let file = fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)?;
        // Waits for a moment at most: a process that only asks lets go at once.
        let mut file = Locked::shared(file)?;
        file.set_len(0)?;
        file.write_all(op.name().as_bytes())?;
        Ok(Box::new(file))
    }

    fn marked(&self, gpu: &GpuUuid) -> Option<GpuOp> {
        let path = self.path(gpu);
        let file = match fs::File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            Err(error) => {
                tracing::warn!(%gpu, %error, "failed to read whether another instance changes the GPU; assuming that it does");
                return Some(GpuOp::CreateGpuInstance);
            }
        };
        // An exclusive lock can be had only while no call holds its share. This one is freed at
        // once, when it is dropped.
        if Locked::alone(file).is_ok() {
            return None;
        }
        let name = fs::read_to_string(&path).unwrap_or_default();
        let op = GpuOp::ALL.into_iter().find(|op| op.name() == name);
        Some(op.unwrap_or(GpuOp::CreateGpuInstance))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_is_marked_while_a_call_runs_and_calls_do_not_wait() {
        let dir = tempfile::tempdir().unwrap();
        let (ours, theirs) = (FileMarks::new(dir.path()), FileMarks::new(dir.path()));
        let gpu = "GPU-12345678-1234-1234-1234-123456780001".parse().unwrap();
        assert_eq!(theirs.marked(&gpu), None);
        let first = ours.mark(&gpu, GpuOp::SetMigMode).unwrap();
        assert_eq!(
            (theirs.marked(&gpu), ours.marked(&gpu)),
            (Some(GpuOp::SetMigMode), Some(GpuOp::SetMigMode))
        );
        let second = theirs.mark(&gpu, GpuOp::DestroyGpuInstance).unwrap();
        drop(first);
        assert_eq!(ours.marked(&gpu), Some(GpuOp::DestroyGpuInstance));
        drop(second);
        assert_eq!(ours.marked(&gpu), None);
        fs::write(dir.path().join("file"), b"").unwrap();
        let unreadable = FileMarks::new(dir.path().join("file"));
        assert!(
            unreadable.marked(&gpu).is_some(),
            "a mark that cannot be read is taken for one"
        );
    }
}
