//! Files that follow from code and are checked in: written by a command, compared by `cargo xtask
//! check` and by tests.

use std::path::PathBuf;

use anyhow::Result;

/// Files and the contents that they should have.
pub(crate) type Files = Vec<(PathBuf, String)>;

/// Writes the files.
pub(crate) fn write(files: &Files) -> Result<()> {
    for (path, text) in files {
        fs_err::write(path, text)?;
        crate::say(&path.display().to_string());
    }
    Ok(())
}

/// Files that are not as they should be.
pub(crate) fn stale(files: Files) -> Vec<PathBuf> {
    let differs = |(path, text): (PathBuf, String)| {
        (fs_err::read_to_string(&path).ok().as_deref() != Some(&text)).then_some(path)
    };
    files.into_iter().filter_map(differs).collect()
}
