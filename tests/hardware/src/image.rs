//! This program started anew as the plugin runs: in a root like that of its image, with the host's
//! below a prefix. Facts of a developer's machine only, such as a loader that finds libcuda
//! by itself, do not hold there.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::Args;
use crate::root::{self, Alone, NOT_ALLOWED, PROGRAM, below};

/// Where the host is.
const PREFIX: &str = "/host";

/// Runs it so; its exit status. `None` where that is not allowed.
pub(crate) fn run() -> Result<Option<u8>> {
    let folder = tempfile::tempdir()?;
    let status = Command::new(std::env::current_exe()?)
        .arg("--image-root")
        .arg(folder.path())
        .args(std::env::args_os().skip(1))
        .status()
        .context("starting the program as in the image")?;
    let code = status
        .code()
        .and_then(|code| u8::try_from(code).ok())
        .context("the program as in the image was killed")?;
    Ok((code != NOT_ALLOWED).then_some(code))
}

/// Becomes the program in the image. Comes back only with an exit status of a failure.
pub(crate) fn become_it(image: &Path, args: &Args) -> Result<u8> {
    // Before: it is not where it was in a root of another kind.
    let hook = std::env::current_exe()?.with_file_name("divvy-cdi-hook");
    let Some(alone) = Alone::new()? else {
        return Ok(NOT_ALLOWED);
    };
    alone.make(image)?;
    for (host, here) in [
        ("/", PREFIX),
        ("/proc", "/proc"),
        ("/sys", "/sys"),
        ("/dev", "/dev"),
    ] {
        root::bind(Path::new(host), &below(image, Path::new(here)))?;
    }
    let flags = flags(args, hook);
    root::enter(image)?;
    Err(Command::new(PROGRAM).args(flags).exec().into())
}

/// The same flags, paths of the host as they are seen in the image. The hook is the one beside this
/// program, if no other is named.
fn flags(args: &Args, hook: PathBuf) -> Vec<OsString> {
    // In the image there is no working folder.
    let here = |path: &Path| {
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        below(Path::new(PREFIX), &path).into_os_string()
    };
    let mut all: Vec<OsString> = vec![
        "--prefix".into(),
        PREFIX.into(),
        "--host-root".into(),
        here(&args.host_root),
    ];
    // As the host names it.
    if let Some(root) = &args.driver_root {
        all.extend(["--driver-root".into(), root.clone().into_os_string()]);
    }
    let hook = args.hook.clone().or_else(|| hook.exists().then_some(hook));
    for (flag, path) in [
        ("--nvml-library", &args.nvml_library),
        ("--capture", &args.capture),
        ("--report", &args.report),
        ("--device-nodes", &args.device_nodes),
        ("--hook", &hook),
    ] {
        all.extend(path.iter().flat_map(|path| [flag.into(), here(path)]));
    }
    all.extend(args.json.then(|| "--json".into()));
    for allow in &args.allow {
        all.extend(["--allow".into(), allow.name().into()]);
    }
    all
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::report::Allow;

    #[test]
    fn paths_of_the_host_are_below_the_prefix_and_nothing_is_lost() {
        let said = "divvy-hardware --json --allow mig,mps --report /tmp/report --driver-root /run/nvidia/driver --nvml-library /opt/nvml.so \
                    --capture /tmp/out --hook /opt/hook --host-root /tmp/host --device-nodes /tmp/nodes";
        let args = Args::parse_from(said.split_whitespace());
        let inside = Args::parse_from(
            ["divvy-hardware".into()]
                .into_iter()
                .chain(flags(&args, "/none".into()))
                .collect::<Vec<OsString>>(),
        );
        let path = |path: &str| Some(PathBuf::from(path));
        assert_eq!(inside.prefix, Path::new("/host"));
        assert_eq!(inside.host_root, Path::new("/host/tmp/host"));
        assert_eq!(
            inside.driver_root,
            path("/run/nvidia/driver"),
            "as the host names it"
        );
        assert_eq!(
            (inside.nvml_library, inside.capture),
            (path("/host/opt/nvml.so"), path("/host/tmp/out"))
        );
        assert_eq!(
            (inside.hook, inside.device_nodes),
            (path("/host/opt/hook"), path("/host/tmp/nodes"))
        );
        let relative = Args::parse_from(["divvy-hardware", "--capture", "out"]);
        let out = below(
            Path::new(PREFIX),
            &std::env::current_dir().unwrap().join("out"),
        );
        assert!(flags(&relative, "/none".into()).contains(&out.into_os_string()));
        assert_eq!(
            (inside.json, inside.allow, inside.report),
            (true, vec![Allow::Mig, Allow::Mps], path("/host/tmp/report"))
        );
    }
}
