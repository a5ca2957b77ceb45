//! The small static program that CDI files call to make driver libraries findable in a container.
//!
//! A container runtime calls it as a `createContainer` hook: in the container's namespaces, the driver's files mounted, the
//! root not changed yet, the container's state as JSON on stdin. Names and arguments of the sub-commands are those of
//! NVIDIA's hook program, so either can be named in a CDI file:
//!
//! - `create-symlinks --link TARGET::LINK …` makes the names under which libraries are asked for;
//! - `update-ldcache --folder FOLDER …` enters the folders' libraries into the loader's cache ([`loader`]);
//! - `enable-cuda-compat --host-driver-version VERSION --folder FOLDER` lets an image's newer libraries of CUDA win ([`compat`]);
//! - `update-application-profile` restricts EGL and Vulkan to the container's GPUs ([`profile`]);
//! - `disable-device-node-modification` keeps the driver's libraries from making or changing device nodes ([`device_files`]).
//!
//! It runs as root on the host with files of an unchecked image. Hence: nothing of the image is ever executed;
//! every path is resolved by the kernel with the container's root as its end ([`rootfs`]), so that no link leads out; nothing
//! is written to a volume of the pod; and the program is static, so that `LD_PRELOAD` of an image cannot reach it.

mod args;
mod bundle;
mod compat;
mod device_files;
mod error;
mod ldcache;
mod loader;
mod profile;
mod rootfs;
mod symlinks;

use std::io::Write;
use std::process::ExitCode;

use args::Command;
use error::HookError;

fn main() -> ExitCode {
    match run(std::env::args().skip(1)) {
        Ok(text) => {
            // Only `--help` and `--version` have something to say; a closed stdout is no failure.
            let _ = std::io::stdout().write_all(text.as_bytes());
            ExitCode::SUCCESS
        }
        Err(error) => {
            // The runtime puts this into the pod's event.
            let _ = writeln!(std::io::stderr(), "divvy-cdi-hook: {}", error::chain(&error));
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: impl Iterator<Item = String>) -> Result<String, HookError> {
    let command = args::parse(arguments)?;
    if let Command::Show(text) = command {
        return Ok(text.to_owned());
    }
    let root = bundle::open_root(std::io::stdin().lock())?;
    match command {
        Command::CreateSymlinks(links) => symlinks::create(&root, &links)?,
        Command::UpdateLdCache(folders) => loader::update(&root, &folders)?,
        Command::EnableCudaCompat { host_driver, folder } => compat::enable(&root, &host_driver, &folder)?,
        Command::UpdateApplicationProfile => profile::update(&root)?,
        Command::DisableDeviceNodeModification => device_files::disable_modification(&root)?,
        Command::Show(_) => {}
    }
    Ok(String::new())
}
