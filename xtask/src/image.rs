//! `cargo xtask image`: the driver's container image, made without a container engine.

use std::io::Write as _;
use std::path::PathBuf;

use anyhow::Result;
use divvy_e2e::images;
use fs_err as fs;

/// Arguments of `cargo xtask image`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Folder with the built programs
    #[arg(long, default_value = "target/release")]
    bin: PathBuf,
    /// Folder for the OCI layout; what is there is replaced
    #[arg(long, default_value = "target/image")]
    out: PathBuf,
    /// Also write the layout as one archive, for `ctr images import` or `docker load`
    #[arg(long)]
    archive: Option<PathBuf>,
    /// Tag of the image
    #[arg(long, default_value = env!("CARGO_PKG_VERSION"))]
    tag: String,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let image = images::driver(&args.bin, &args.tag)?;
    // Only what is an image layout is removed: the folder is the user's choice.
    if args.out.join("oci-layout").exists() {
        fs::remove_dir_all(&args.out)?;
    }
    image.write_folder(&args.out)?;
    if let Some(archive) = &args.archive {
        image.write_archive(archive)?;
    }
    let mut out = std::io::stdout();
    writeln!(out, "{}:{} in {}:", images::DRIVER, args.tag, args.out.display())?;
    for file in image.files() {
        writeln!(out, "  /{file}")?;
    }
    Ok(())
}
