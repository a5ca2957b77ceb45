//! `cargo xtask image`: the driver's container image, made without a container engine.

use std::io::Write as _;
use std::path::PathBuf;

use anyhow::Result;
use divvy_e2e::images;
use divvy_e2e::programs::Programs;
use fs_err as fs;

/// Arguments of `cargo xtask image`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Take the programs from this folder instead of building them
    #[arg(long)]
    bin: Option<PathBuf>,
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
    let programs = args
        .bin
        .as_deref()
        .map_or_else(Programs::build, Programs::in_folder)?;
    let name = format!("{}:{}", images::DRIVER, args.tag);
    let image = programs.image(&name)?;
    // Only what is an image layout is removed: the folder is the user's choice.
    if args.out.join("oci-layout").exists() {
        fs::remove_dir_all(&args.out)?;
    }
    image.write_folder(&args.out)?;
    if let Some(archive) = &args.archive {
        image.write_archive(archive)?;
    }
    let mut out = std::io::stdout();
    writeln!(out, "{name} in {}:", args.out.display())?;
    for file in image.files() {
        writeln!(out, "  /{file}")?;
    }
    Ok(())
}
