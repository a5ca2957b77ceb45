//! `cargo xtask dist`: everything that a release publishes, made without a network once the crates
//! are here. The same sources, compiler and paths give the same bytes.

mod chart;
mod sbom;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use divvy_e2e::oci::{Image, digest, tar_gz};
use divvy_e2e::programs::OfNode;
use divvy_e2e::target::Target;
use fs_err as fs;

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Arguments of `cargo xtask dist`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The registry that image and chart are for, as ghcr.io/OWNER: `/divvy` and `/charts/divvy`
    /// are appended
    #[arg(long, default_value = "localhost")]
    registry: String,
    /// Folder for all of it; what is there is replaced
    #[arg(long, default_value = "target/dist")]
    out: PathBuf,
}

pub(crate) fn run(root: &Path, args: &Args) -> Result<()> {
    let start = Instant::now();
    let built = Target::ALL
        .into_iter()
        .map(OfNode::build)
        .collect::<Result<Vec<_>>>()?;
    crate::say(&format!(
        "built after {:.0} s",
        start.elapsed().as_secs_f32()
    ));
    // Only what this command has made is removed: the folder is the user's choice.
    if args.out.join(SUMS).exists() {
        fs::remove_dir_all(&args.out)?;
    }
    fs::create_dir_all(&args.out)?;
    let made = pack(root, args, &built)?;
    for (name, size) in made {
        crate::say(&format!("{:>7} KiB  {name}", size.div_ceil(1024)));
    }
    crate::say(&format!(
        "{} after {:.0} s",
        args.out.display(),
        start.elapsed().as_secs_f32()
    ));
    Ok(())
}

const SUMS: &str = "SHA256SUMS";

/// Writes every artefact; the sizes by name.
fn pack(root: &Path, args: &Args, built: &[OfNode]) -> Result<Vec<(String, u64)>> {
    let repository = format!("{}/divvy", args.registry);
    let image_name = format!("{repository}:{VERSION}");
    let images = built
        .iter()
        .map(|one| one.image(&image_name))
        .collect::<Result<Vec<_>>>()?;
    let mut files = Vec::new();
    for (one, image) in built.iter().zip(&images) {
        starts(one, image)?;
        let name = format!("divvy-{VERSION}-linux-{}", one.target.oci);
        let inside = |file: &str, source: PathBuf, mode| (format!("{name}/{file}"), source, mode);
        let mut inner = vec![
            inside("divvy", one.cli.clone(), 0o755),
            inside("LICENSE", root.join("LICENSE"), 0o644),
            inside("README.md", root.join("README.md"), 0o644),
        ];
        let pages = tempfile::tempdir()?;
        for page in manual(one, pages.path())? {
            let file = page.file_name().unwrap_or_default().to_string_lossy();
            inner.push(inside(&format!("man/man1/{file}"), page.clone(), 0o644));
        }
        let archive = tar_gz(&inner)?;
        fs::write(args.out.join(format!("{name}.tar.gz")), archive)?;
        files.push(format!("{name}.tar.gz"));
    }
    Image::write_all(&images, &args.out.join("image"))?;
    files.push(chart::write(root, &args.registry, &repository, &args.out)?);
    let sbom = format!("divvy-{VERSION}.cdx.json");
    fs::write(
        args.out.join(&sbom),
        serde_json::to_vec_pretty(&sbom::document(root, &images)?)?,
    )?;
    let changes = fs::read_to_string(root.join("CHANGELOG.md"))?;
    fs::write(args.out.join("NOTES.md"), notes(&changes, VERSION)?)?;
    files.extend([sbom, "NOTES.md".to_owned()]);
    // An index leads to everything in its layout by digest.
    files.extend(["image", "chart"].map(|layout| format!("{layout}/index.json")));
    sums(&args.out, &files)?;
    let sizes =
        ["image", "chart"].map(|layout| Ok((format!("{layout}/"), size(&args.out.join(layout))?)));
    let plain = files.iter().filter(|name| !name.contains('/'));
    let plain = plain.map(|name| Ok((name.clone(), size(&args.out.join(name))?)));
    sizes.into_iter().chain(plain).collect()
}

/// Has the program write its manual pages, and returns them in the order of their names. The
/// program is static, also that of another architecture.
fn manual(built: &OfNode, folder: &Path) -> Result<Vec<PathBuf>> {
    let mut command = if built.target == Target::HOST {
        Command::new(&built.cli)
    } else {
        let mut qemu = Command::new(format!("qemu-{}-static", built.target.name));
        qemu.arg(&built.cli);
        qemu
    };
    let done = command.arg("man").arg(folder).output();
    let done = done.with_context(|| format!("{command:?}"))?;
    let said = String::from_utf8_lossy(&done.stderr);
    ensure!(done.status.success(), "manual pages: {said}");
    let mut pages = fs::read_dir(folder)?
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<Vec<_>>>()?;
    pages.sort();
    ensure!(!pages.is_empty(), "no manual pages");
    Ok(pages)
}

/// Runs each program, with the libraries of the image where it links any: an architecture that is
/// not this machine's runs under QEMU.
fn starts(built: &OfNode, image: &Image) -> Result<()> {
    let target = built.target;
    let unpacked = tempfile::tempdir()?;
    image.unpack(unpacked.path())?;
    let inside = |program: &str| unpacked.path().join("usr/bin").join(program);
    let ours = [
        "divvy-kubelet-plugin",
        "divvy-cdi-hook",
        "divvy-cluster-controller",
        "divvy-mps-supervisor",
        "divvy",
    ]
    .map(inside);
    for program in ours {
        let mut command = if target == Target::HOST {
            Command::new(&program)
        } else {
            let mut qemu = Command::new(format!("qemu-{}-static", target.name));
            qemu.arg("-L").arg(unpacked.path()).arg(&program);
            qemu
        };
        let done = command
            .arg("--version")
            .output()
            .with_context(|| format!("{command:?}"))?;
        let said = String::from_utf8_lossy(&done.stderr);
        ensure!(
            done.status.success(),
            "{} for {} does not start: {said}",
            program.display(),
            target.name
        );
    }
    Ok(())
}

/// Writes a file as `sha256sum --check` reads it.
fn sums(folder: &Path, files: &[String]) -> Result<()> {
    let mut text = String::new();
    for file in files {
        let digest = digest(&fs::read(folder.join(file))?);
        text.push_str(&format!(
            "{}  {file}\n",
            digest.trim_start_matches("sha256:")
        ));
    }
    Ok(fs::write(folder.join(SUMS), text)?)
}

/// Returns the bytes of a file or of all files below a folder.
fn size(path: &Path) -> Result<u64> {
    if path.is_file() {
        return Ok(fs::metadata(path)?.len());
    }
    fs::read_dir(path)?.map(|entry| size(&entry?.path())).sum()
}

/// Returns the part of the changelog about a version, or the unreleased part if there is none yet.
fn notes(changelog: &str, version: &str) -> Result<String> {
    for title in [version, "Unreleased"] {
        let mut lines = changelog.lines().skip_while(|line| {
            let named = line
                .strip_prefix("## ")
                .and_then(|line| line.split(' ').next());
            named.is_none_or(|named| named.trim_matches(['[', ']']) != title)
        });
        if lines.next().is_some() {
            let part: Vec<&str> = lines.take_while(|line| !line.starts_with("## ")).collect();
            return Ok(format!("{}\n", part.join("\n").trim()));
        }
    }
    bail!("CHANGELOG.md has neither a section {version} nor a section Unreleased")
}

#[cfg(test)]
mod tests {
    use super::{notes, sums};

    #[test]
    fn notes_are_the_section_of_the_version_or_what_is_not_yet_released() {
        let text = "# Changelog\n\n## Unreleased\n\n- new\n\n## [0.2.0] - 2026-01-01\n\n### Added\n- two\n\n## 0.1.0\n- one\n";
        assert_eq!(notes(text, "0.2.0").unwrap(), "### Added\n- two\n");
        assert_eq!(notes(text, "0.1.0").unwrap(), "- one\n");
        assert_eq!(notes(text, "0.3.0").unwrap(), "- new\n");
        assert!(notes("# Changelog\n", "0.1.0").is_err());
    }

    #[test]
    fn sums_are_those_that_sha256sum_checks() {
        let folder = tempfile::tempdir().unwrap();
        fs_err::write(folder.path().join("a"), "text").unwrap();
        sums(folder.path(), &["a".to_owned()]).unwrap();
        let check = |folder: &std::path::Path| {
            let mut command = std::process::Command::new("sha256sum");
            command
                .args(["--check", "--status", "SHA256SUMS"])
                .current_dir(folder)
                .status()
                .unwrap()
                .success()
        };
        assert!(check(folder.path()));
        fs_err::write(folder.path().join("a"), "other").unwrap();
        assert!(!check(folder.path()));
    }
}
