//! `divvy-hardware`: one program for a machine with a real NVIDIA GPU and no network. It reads what
//! divvy reads, as the plugin's image would, and compares it with what `nvidia-smi`, the kernel and
//! CUDA say; it prepares a claim with the real node plugin in this process against a fake API
//! server, and runs a small CUDA program with nothing but what the claim's CDI file gives. It only
//! reads unless it is allowed more, by name. Run by people; what it tries, and the exit status, are
//! in [`report`].

mod apply;
mod caps;
mod changes;
mod claim;
mod clients;
mod compare;
mod cuda;
mod image;
mod mps;
mod report;
mod root;
mod smi;
mod stages;
#[cfg(test)]
mod testing;
mod written;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;

use crate::report::{Allow, Check, Outcome, Report};

/// Looks at a real NVIDIA GPU as divvy does. Exit status: 0 all was tried and is well, 1 something
/// is not, 3 no GPU, 4 all that was tried is well, but not all was.
#[derive(Debug, Parser)]
#[command(name = "divvy-hardware", version)]
struct Args {
    /// Where the driver is installed; the known places are tried if left out
    #[arg(long, value_name = "FOLDER")]
    driver_root: Option<PathBuf>,
    /// The NVML library; by default the one in the driver root
    #[arg(long, value_name = "FILE")]
    nvml_library: Option<PathBuf>,
    /// The hook program that the claim's CDI file calls [default: divvy-cdi-hook beside this
    /// program]
    #[arg(long, value_name = "FILE")]
    hook: Option<PathBuf>,
    /// Write what was read into this folder, to be used as fixtures
    #[arg(long, value_name = "FOLDER")]
    capture: Option<PathBuf>,
    /// A JSON object per check instead of text
    #[arg(long)]
    json: bool,
    /// Write all that was found out into this file: the same text each time on the same machine,
    /// but for its last part
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Do more than read, on one GPU that nothing uses and that is yours alone. Without it nothing
    /// is started and nothing changed
    #[arg(long, value_name = "WHAT", value_delimiter = ',')]
    allow: Vec<Allow>,
    /// Run as a program of the host, not as in the plugin's image
    #[arg(long)]
    as_host: bool,
    /// Root of the host's /proc, /sys and /dev (tests)
    #[arg(long, hide = true, value_name = "FOLDER", default_value = "/")]
    host_root: PathBuf,
    /// Table of device nodes (tests)
    #[arg(long, hide = true, value_name = "FILE")]
    device_nodes: Option<PathBuf>,
    /// Where the host is seen (used by this program itself)
    #[arg(long, hide = true, value_name = "FOLDER", default_value = "/")]
    prefix: PathBuf,
    /// Run as in the image, its root in this folder (used by this program itself)
    #[arg(long, hide = true, value_name = "FOLDER")]
    image_root: Option<PathBuf>,
    /// Run as the program in the claim's container (used by this program itself)
    #[arg(long, hide = true, value_name = "FILE")]
    inside: Option<PathBuf>,
}

fn main() -> ExitCode {
    if let Some(code) = divvy_host::become_other(std::env::args_os()) {
        return code.into();
    }
    let args = Args::parse();
    let status = match (&args.inside, &args.image_root) {
        (Some(container), _) => apply::inside(container),
        (None, Some(root)) => image::become_it(root, &args),
        (None, None) => Ok(run(args)),
    };
    status.map_or_else(
        |error| {
            say(&format!("{error:#}"));
            ExitCode::FAILURE
        },
        ExitCode::from,
    )
}

fn run(mut args: Args) -> u8 {
    let mut report = Report::new(args.json);
    let in_image = args.prefix != Path::new("/");
    if in_image {
        report.note(Check::AsTheImage, stages::as_the_image());
    } else if args.as_host {
        report.not_tried(
            &[Check::AsTheImage],
            "asked to run as a program of the host (--as-host)",
        );
    } else {
        match image::run() {
            Ok(Some(code)) => return code,
            Ok(None) => report.not_tried(
                &[Check::AsTheImage],
                "mount namespaces are not allowed here",
            ),
            Err(error) => report.note(Check::AsTheImage, Outcome::Failed(format!("{error:#}"))),
        }
    }
    if args.hook.is_none() {
        let beside =
            std::env::current_exe().map(|program| program.with_file_name("divvy-cdi-hook"));
        args.hook = beside.ok().filter(|hook| hook.exists());
    }
    let ended = stages::all(&args, &mut report);
    let status = match ended {
        Ok(()) => report.finish(),
        Err(why) => report.no_gpu(&format!(
            "there is no NVIDIA GPU that can be used on this machine: {why:#}"
        )),
    };
    let Some(file) = &args.report else {
        return status;
    };
    match fs_err::write(file, written::text(&report, &args.allow)) {
        Ok(()) => status,
        Err(error) => {
            say(&format!("the report cannot be written: {error}"));
            1
        }
    }
}

fn say(line: &str) {
    use std::io::Write;
    // With a closed stdout there is still the exit status.
    let _written = writeln!(std::io::stdout(), "{line}");
}
