//! Output formats, and the only places that write to standard output and standard error.

use std::io::Write as _;

use anyhow::Result;
use divvy_gpu_sim::SimNode;
use serde::Serialize;

/// How to show the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Format {
    /// For people
    Table,
    /// For programs
    Json,
    /// For people and programs
    Yaml,
}

/// Shows a value: as it is in JSON and YAML, or drawn by `table`.
pub(crate) fn show<T: Serialize>(value: &T, format: Format, table: impl FnOnce(&T) -> String) -> Result<()> {
    match format {
        Format::Table => print(&table(value)),
        Format::Json => print(&serde_json::to_string_pretty(value)?),
        Format::Yaml => print(serde_saphyr::to_string(value)?.trim_end()),
    }
}

/// Data, on standard output. A closed pipe (`| head`) ends the output quietly.
pub(crate) fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => Ok(other?),
    }
}

/// A message on standard error. Failure to write it is ignored: there is no other place to report it.
pub(crate) fn talk(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// The argument of `--sim`, if it names GPUs.
pub(crate) fn simulated(text: &str) -> Result<String, String> {
    // Clap shows one line, whatever of the error's causes.
    SimNode::parse(text).map(|_| text.to_owned()).map_err(|error| error.to_string())
}

/// The argument of `--log-level`: a level, or directives such as `warn,divvy_executor=debug`.
pub(crate) fn log_level(text: &str) -> Result<String, String> {
    const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
    let known = |part: &str| {
        let level = part.rsplit_once('=').map_or(part, |(_, level)| level);
        LEVELS.contains(&level.to_ascii_lowercase().as_str())
    };
    match text.split(',').find(|part| !known(part.trim())) {
        None => Ok(text.to_owned()),
        Some(part) => Err(format!("{part:?} is neither one of {} nor TARGET=LEVEL", LEVELS.join(", "))),
    }
}

/// Bytes as people say them: `80 GiB`, `512 MiB`.
pub(crate) fn bytes(amount: u64) -> String {
    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;
    match amount {
        a if a >= GIB => {
            // Integers only: tenths, rounded to the nearest.
            let tenths = (u128::from(a) * 10 + u128::from(GIB) / 2) / u128::from(GIB);
            if tenths % 10 == 0 {
                format!("{} GiB", tenths / 10)
            } else {
                format!("{}.{} GiB", tenths / 10, tenths % 10)
            }
        }
        a if a >= MIB => format!("{} MiB", a / MIB),
        a => format!("{a} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::bytes;

    #[test]
    fn bytes_read_well() {
        assert_eq!(bytes(85_520_809_984), "79.6 GiB");
        assert_eq!(bytes(80 << 30), "80 GiB");
        assert_eq!(bytes(512 << 20), "512 MiB");
        assert_eq!(bytes(12), "12 B");
    }
}
