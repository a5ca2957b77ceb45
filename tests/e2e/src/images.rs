//! The images of a cluster, all made here: pause, a shell for test pods, and the driver.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use fs_err as fs;

use crate::oci::Image;
use crate::parts::Parts;
use crate::process::output;
use crate::programs::Programs;

/// Keeps a pod's namespaces alive.
pub const PAUSE: &str = "localhost/pause:1";
/// A shell and the usual small programs, for test pods.
pub const BUSYBOX: &str = "localhost/busybox:1";
/// The driver, without its tag.
pub const DRIVER: &str = "localhost/divvy";

/// The images that every cluster has.
pub fn common(parts: &Parts) -> Result<Vec<Image>> {
    Ok(vec![Image::new(PAUSE, &["/pause"]).program("/pause", &parts.bin("pause")?), busybox()?])
}

/// The machine's own busybox, a static program.
pub(crate) fn busybox_program() -> Result<&'static Path> {
    let program = ["/bin/busybox", "/usr/bin/busybox"].into_iter().map(Path::new).find(|path| path.exists());
    program.context("no busybox; install it with: apt-get install busybox-static")
}

fn busybox() -> Result<Image> {
    let program = busybox_program()?;
    let mut image = Image::new(BUSYBOX, &["/bin/sh"]).program("/bin/busybox", program).folder("/tmp");
    for applet in output(Command::new(program).arg("--list"))?.lines().filter(|&name| name != "busybox") {
        image = image.link(&format!("/bin/{applet}"), "busybox");
    }
    Ok(image)
}

/// What NVIDIA's `libnvidia-ml.so.1` asks for beside libc. Nothing of ours does: these are empty files since glibc 2.34,
/// but the loader wants to see them.
const NVML_NEEDS: [&str; 4] = ["libdl.so.2", "libpthread.so.0", "librt.so.1", "libm.so.6"];

/// The driver's image: its programs, the libraries they and NVIDIA's NVML link, nothing else.
pub fn driver(programs: &Programs, version: &str) -> Result<Image> {
    let mut image = Image::new(&format!("{DRIVER}:{version}"), &["/usr/bin/divvy-kubelet-plugin"])
        .label("org.opencontainers.image.title", "divvy")
        .label("org.opencontainers.image.version", version)
        .label("org.opencontainers.image.licenses", "Apache-2.0");
    for (path, program) in
        [("/usr/bin/divvy-kubelet-plugin", &programs.plugin), ("/usr/bin/divvy-cdi-hook", &programs.hook)]
    {
        image = image.program(path, program);
        image = with(image, &libraries(program)?)?;
    }
    with(image, &nvml_needs(&libraries(&programs.plugin)?)?)
}

/// Adds libraries under the names they are asked for by, whatever files those lead to.
fn with(mut image: Image, libraries: &[PathBuf]) -> Result<Image> {
    for library in libraries {
        let source = fs::canonicalize(library)?;
        image = image.program(&library.display().to_string(), &source);
    }
    Ok(image)
}

/// The libraries that the plugin needs for loading NVML: those of the libc that it links.
fn nvml_needs(linked: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let libc = linked.iter().find(|path| path.ends_with("libc.so.6"));
    let libc = libc.context("the plugin does not link glibc, so it could not load NVML")?;
    Ok(NVML_NEEDS.iter().map(|name| libc.with_file_name(name)).collect())
}

/// The files that the loader needs to start a program, itself included; none for a static one.
fn libraries(program: &Path) -> Result<Vec<PathBuf>> {
    // ldd fails on a static program; what it says in that case is the only other answer there is.
    let said = Command::new("ldd").arg(program).output().context("cannot start ldd")?;
    let text = String::from_utf8_lossy(&said.stdout);
    let complaint = String::from_utf8_lossy(&said.stderr);
    if said.status.success() {
        return parse_ldd(&text).with_context(|| format!("ldd {}", program.display()));
    }
    ensure!(
        [&text, &complaint].iter().any(|said| said.contains("not a dynamic executable")),
        "ldd {}: {complaint}",
        program.display()
    );
    Ok(Vec::new())
}

/// Lines are `libc.so.6 => /lib/x/libc.so.6 (0x…)`, `/lib64/ld-linux-x86-64.so.2 (0x…)` or `linux-vdso.so.1 (0x…)`.
fn parse_ldd(text: &str) -> Result<Vec<PathBuf>> {
    let mut libraries = Vec::new();
    for line in text.lines().map(str::trim) {
        ensure!(!line.contains("not found"), "a library is missing: {line}");
        let target = line.split_once("=> ").map_or(line, |(_, target)| target);
        if let Some(path) = target.split(' ').next().filter(|path| path.starts_with('/')) {
            libraries.push(PathBuf::from(path));
        }
    }
    Ok(libraries)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::{nvml_needs, parse_ldd};

    #[test]
    fn what_nvml_needs_is_taken_from_beside_the_libc_that_is_linked() {
        let linked = ["/lib64/ld-linux-x86-64.so.2".into(), "/usr/lib/libc.so.6".into()];
        let expected: Vec<PathBuf> = ["libdl.so.2", "libpthread.so.0", "librt.so.1", "libm.so.6"]
            .map(|name| PathBuf::from("/usr/lib").join(name))
            .into();
        assert_eq!(nvml_needs(&linked).unwrap(), expected);
        assert!(nvml_needs(&[]).is_err(), "a static plugin cannot load anything");
    }

    #[test]
    fn the_loader_and_every_library_found_are_taken_and_a_missing_one_is_an_error() {
        let text = "\tlinux-vdso.so.1 (0x00007)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007)\n\t/lib64/ld-linux-x86-64.so.2 (0x00007)\n";
        let expected: Vec<PathBuf> =
            vec!["/lib/x86_64-linux-gnu/libc.so.6".into(), "/lib64/ld-linux-x86-64.so.2".into()];
        assert_eq!(parse_ldd(text).unwrap(), expected);
        assert_eq!(parse_ldd("\tstatically linked\n").unwrap(), Vec::<PathBuf>::new());
        let missing = parse_ldd("\tlibx.so.1 => not found\n").unwrap_err();
        assert_eq!(missing.to_string(), "a library is missing: libx.so.1 => not found");
    }
}
