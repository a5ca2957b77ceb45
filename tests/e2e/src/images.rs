//! The images of a cluster, all made here: pause, a shell for test pods, and the driver.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use fs_err as fs;

use crate::oci::Image;
use crate::parts::Parts;
use crate::process::output;
use crate::programs::workspace;
use crate::target::Target;

/// Keeps a pod's namespaces alive.
pub const PAUSE: &str = "localhost/pause:1";
/// A shell and the usual small programs, for test pods.
pub const BUSYBOX: &str = "localhost/busybox:1";
/// The driver, without its tag.
pub const DRIVER: &str = "localhost/divvy";

/// The images that every cluster has.
pub fn common(parts: &Parts) -> Result<Vec<Image>> {
    Ok(vec![
        Image::new(PAUSE, &["/pause"]).program("/pause", &parts.bin("pause")?),
        busybox_image(BUSYBOX)?,
    ])
}

/// The machine's own busybox, a static program.
pub(crate) fn busybox_program() -> Result<&'static Path> {
    let program = ["/bin/busybox", "/usr/bin/busybox"]
        .into_iter()
        .map(Path::new)
        .find(|path| path.exists());
    program.context("no busybox; install it with: apt-get install busybox-static")
}

/// Makes an image of this name with busybox in it.
pub(crate) fn busybox_image(name: &str) -> Result<Image> {
    let program = busybox_program()?;
    let mut image = Image::new(name, &["/bin/sh"])
        .program("/bin/busybox", program)
        .folder("/tmp");
    for applet in output(Command::new(program).arg("--list"))?
        .lines()
        .filter(|&name| name != "busybox")
    {
        image = image.link(&format!("/bin/{applet}"), "busybox");
    }
    Ok(image)
}

/// The images that the examples name. None can be had without a network; [`BUSYBOX`] stands in for
/// each.
pub fn of_examples() -> Result<BTreeSet<String>> {
    let mut images = BTreeSet::new();
    for example in fs::read_dir(workspace().join("examples"))? {
        let file = example?.path().join("manifests.yaml");
        if file.exists() {
            let text = fs::read_to_string(file)?;
            images.extend(
                text.lines()
                    .filter_map(|line| Some(line.split_once(" image: ")?.1.to_owned())),
            );
        }
    }
    Ok(images)
}

/// Libraries that NVIDIA's `libnvidia-ml.so.1` asks for beside libc. Nothing of ours does: these
/// are empty files since glibc 2.34, but the loader wants to see them.
const NVML_NEEDS: [&str; 4] = ["libdl.so.2", "libpthread.so.0", "librt.so.1", "libm.so.6"];

/// The driver's image of this name: its programs, the libraries they and NVIDIA's NVML link,
/// nothing else.
pub fn driver(name: &str, target: Target, programs: &[&Path]) -> Result<Image> {
    let version = name.rsplit_once(':').map_or("latest", |(_, tag)| tag);
    let mut image = Image::new(name, &["/usr/bin/divvy-kubelet-plugin"])
        .architecture(target.oci)
        .label("org.opencontainers.image.title", "divvy")
        .label("org.opencontainers.image.version", version)
        .label("org.opencontainers.image.licenses", "Apache-2.0");
    for program in programs {
        let file = program.file_name().context("a program has a name")?;
        image = image.program(&format!("/usr/bin/{}", file.display()), program);
        for (path, library) in target.libraries(program)? {
            image = image.program(&path, &library);
        }
    }
    for name in NVML_NEEDS {
        let library = target.library(name)?;
        image = image.program(&target.path_of(&library)?, &library);
    }
    Ok(image)
}
