//! The small static program that CDI files call to make driver libraries findable in a container.
//!
//! A container runtime calls it as a `createContainer` hook: in the container's namespaces, the
//! driver's files mounted, the root not changed yet, the container's state as JSON on stdin. Names
//! and arguments of the sub-commands are those of NVIDIA's hook program, so either can be named in
//! a CDI file:
//!
//! - `create-symlinks --link TARGET::LINK …` makes the names under which libraries are asked for;
//! - `update-ldcache --folder FOLDER …` enters the folders' libraries into the loader's cache
//!   ([`loader`]);
//! - `enable-cuda-compat --host-driver-version VERSION --folder FOLDER` lets an image's newer
//!   libraries of CUDA win ([`compat`]);
//! - `update-application-profile` restricts EGL and Vulkan to the container's GPUs ([`profile`]);
//! - `disable-device-node-modification` keeps the driver's libraries from making or changing device
//!   nodes ([`device_files`]).
//!
//! A call may have several of these, with the word `then` between them: each call costs a
//! container's start some milliseconds.
//!
//! A sub-command for caps is a `createRuntime` hook, in the runtime's own namespaces:
//!
//! - `limits --socket PATH --claim UID --device NAME` has divvy's node plugin cap the memory of a
//!   share before its program runs ([`limits`]).
//!
//! A call that fails reports to the node plugin why ([`report`]).
//!
//! It runs as root on the host with files of an unchecked image, before the container is confined.
//! Hence: nothing of the image is ever executed; every path is resolved by the kernel with the
//! container's root as its end ([`rootfs`]), so that no link leads out; a path of the image enters
//! no mount, so that nothing of `/proc` or of a volume is copied and no volume is changed; and the
//! program is static, so that `LD_PRELOAD` of an image cannot reach it. A root that the runtime has
//! made read-only already is writable while the hook works ([`read_only`]). The rules and their
//! tests are in `docs/adr/0001-driver-libraries-without-the-toolkit.md`.

mod args;
mod bundle;
mod compat;
mod device_files;
mod error;
mod ldcache;
mod limits;
mod loader;
mod profile;
mod read_only;
mod report;
mod rootfs;
mod symlinks;

use std::io::Write;
use std::process::ExitCode;

use args::{Command, InRoot};
use bundle::{Container, State};
use error::{HookError, left_out};

fn main() -> ExitCode {
    // The runtime's umask is not the image's affair: folders and files get the modes given here.
    rustix::process::umask(rustix::fs::Mode::empty());
    match run(std::env::args().skip(1)) {
        Ok(text) => {
            // Only `--help` and `--version` have something to say; a closed stdout is no failure.
            let _ = std::io::stdout().write_all(text.as_bytes());
            ExitCode::SUCCESS
        }
        Err(error) => {
            // The runtime puts this into the pod's event.
            let _ = writeln!(
                std::io::stderr(),
                "divvy-cdi-hook: {}",
                error::chain(&error)
            );
            ExitCode::from(error.exit_code())
        }
    }
}

/// Runs a call and returns the text to print.
fn run(arguments: impl Iterator<Item = String>) -> Result<String, HookError> {
    let steps = match args::parse(arguments)? {
        Command::Show(text) => return Ok(text.to_owned()),
        Command::Limits(share) => {
            limits::cap(&State::read(std::io::stdin().lock())?, &share)?;
            return Ok(String::new());
        }
        Command::InRoot(steps) => steps,
    };
    in_root(steps)
        .inspect_err(report::to_plugin)
        .map(|()| String::new())
}

/// Makes changes in the container's root, until one fails.
fn in_root(steps: Vec<InRoot>) -> Result<(), HookError> {
    let container = State::read(std::io::stdin().lock())?.container()?;
    steps
        .into_iter()
        .try_for_each(|step| make(step, &container))
}

/// Makes a change in a container's root.
fn make(step: InRoot, container: &Container) -> Result<(), HookError> {
    let root = &container.root;
    match step {
        InRoot::CreateSymlinks(links) => root.change(|| symlinks::create(root, &links)),
        InRoot::UpdateLdCache(folders) => root.change(|| {
            let updated = loader::update(root, &folders);
            // Where a volume covers them, they are found elsewhere alone.
            let are_there = folders.iter().all(|folder| root.exists(folder));
            if are_there && container.searches(&folders) {
                left_out(
                    updated,
                    "the container's LD_LIBRARY_PATH has the driver's libraries",
                );
                return Ok(());
            }
            updated
        }),
        InRoot::EnableCudaCompat {
            host_driver,
            folder,
        } => root.change(|| compat::enable(root, &host_driver, &folder)),
        InRoot::UpdateApplicationProfile => root.change(|| {
            let without = "EGL and Vulkan may not find the GPU on a node with several";
            left_out(profile::update(root), without);
            Ok(())
        }),
        InRoot::DisableDeviceNodeModification => {
            let without = "the driver's libraries may change device nodes in this container";
            left_out(device_files::disable_modification(root), without);
            Ok(())
        }
    }
}
