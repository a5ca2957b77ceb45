//! Output formats, and the only places that write to standard output and standard error.

use std::io::Write as _;

use anyhow::Result;
pub use divvy_why::device::bytes;
use serde::Serialize;

/// Format of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// For people
    Table,
    /// For programs
    Json,
    /// For people and programs
    Yaml,
}

/// Format of an answer of which there is more than fits a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Output {
    /// For people
    Table,
    /// For people, with everything
    Wide,
    /// For programs
    Json,
    /// For people and programs
    Yaml,
}

impl Output {
    pub fn format(self) -> Format {
        match self {
            Self::Table | Self::Wide => Format::Table,
            Self::Json => Format::Json,
            Self::Yaml => Format::Yaml,
        }
    }
}

/// Shows a value: as it is in JSON and YAML, or drawn by `table`.
pub fn show<T: Serialize>(
    value: &T,
    format: Format,
    table: impl FnOnce(&T) -> String,
) -> Result<()> {
    match format {
        Format::Table => print(&linked(&harmless(&table(value)), docs_url().as_deref())),
        Format::Json => print(&serde_json::to_string_pretty(value)?),
        Format::Yaml => print(serde_saphyr::to_string(value)?.trim_end()),
    }
}

/// Data, on standard output. A closed pipe (`| head`) ends the output quietly.
pub fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => Ok(other?),
    }
}

/// A message on standard error. Failure to write it is ignored: there is no other place to report
/// it.
pub fn talk(text: &str) {
    let text = linked(&harmless(text), docs_url().as_deref());
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// Returns the URL under which the folder `docs` is published: the environment's, or the one that
/// the program was built with.
pub(crate) fn docs_url() -> Option<String> {
    let own = std::env::var("DIVVY_DOCS_URL").ok();
    own.or_else(|| option_env!("DIVVY_DOCS_URL").map(str::to_owned))
        .filter(|url| !url.is_empty())
}

/// Makes links of pages of the documentation in a text, such as `docs/policy.md`: an installed
/// program has no folder of that name beside it.
fn linked(text: &str, base: Option<&str>) -> String {
    let Some(base) = base else {
        return text.to_owned();
    };
    let mut parts = text.split("docs/");
    let mut all = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let is_path = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '/' | '.');
        let end = part.find(|c: char| !is_path(c)).unwrap_or(part.len());
        let is_page = part.get(..end).is_some_and(|path| path.contains(".md"));
        // Not where it is a part of another path.
        let begins = !all.ends_with(is_path);
        if is_page && begins {
            all += base.trim_end_matches('/');
            all.push('/');
        } else {
            all += "docs/";
        }
        all += part;
    }
    all
}

/// The text with every character that a terminal would obey, and not show, written as `\u{1b}`:
/// names, expressions and messages in it are what tenants wrote.
pub fn harmless(text: &str) -> String {
    let obeyed = |c: char| {
        let turns_or_hides = matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}');
        c != '\n' && c.is_control() || turns_or_hides
    };
    let written = |c: char| {
        if obeyed(c) {
            c.escape_unicode().to_string()
        } else {
            c.to_string()
        }
    };
    text.chars().map(written).collect()
}

/// The same for a text that is to stay in its line.
pub fn one_line(text: &str) -> String {
    harmless(text).replace('\n', "\\n")
}

/// The argument of `--log-level`: a level, or directives such as `warn,divvy_executor=debug`.
pub fn log_level(text: &str) -> Result<String, String> {
    const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
    let known = |part: &str| {
        let level = part.rsplit_once('=').map_or(part, |(_, level)| level);
        LEVELS.contains(&level.to_ascii_lowercase().as_str())
    };
    match text.split(',').find(|part| !known(part.trim())) {
        None => Ok(text.to_owned()),
        Some(part) => Err(format!(
            "{part:?} is neither one of {} nor TARGET=LEVEL",
            LEVELS.join(", ")
        )),
    }
}

/// Takes a release such as 1.37.
pub fn release(text: &str) -> Result<u32, String> {
    let minor = text.strip_prefix("1.").and_then(|minor| minor.parse().ok());
    let known = minor.filter(|minor| (34..=37).contains(minor));
    known.ok_or_else(|| "a release is 1.34, 1.35, 1.36 or 1.37".to_owned())
}

/// Adds amounts up. Users and nodes write them, so that the sum may be beyond any number.
pub fn total(amounts: impl IntoIterator<Item = u64>) -> u64 {
    amounts.into_iter().fold(0, u64::saturating_add)
}

/// The text in at most so many characters.
pub fn shortened(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    text.chars()
        .take(width.saturating_sub(1))
        .chain(['…'])
        .collect()
}

#[cfg(test)]
mod tests {
    use super::{bytes, harmless, linked};

    #[test]
    fn pages_become_links_where_it_is_known_where_they_are() {
        let text = "reset it (docs/maintenance.md); see docs/install/README.md. Not x/docs/c.md, nor docs/images";
        assert_eq!(linked(text, None), text);
        assert_eq!(
            linked(text, Some("https://example.com/d/")),
            "reset it (https://example.com/d/maintenance.md); see https://example.com/d/install/README.md. Not x/docs/c.md, nor docs/images"
        );
    }

    #[test]
    fn what_a_terminal_would_obey_is_written_out() {
        assert_eq!(
            harmless("gpu-0  ── 79.6 GiB\nµ\t"),
            "gpu-0  ── 79.6 GiB\nµ\\u{9}"
        );
        assert_eq!(
            harmless("\u{1b}[2J\u{9b}31m\r\u{7}\u{202e}abc\u{2066}\u{200d}"),
            "\\u{1b}[2J\\u{9b}31m\\u{d}\\u{7}\\u{202e}abc\\u{2066}\\u{200d}"
        );
    }

    #[test]
    fn bytes_read_well() {
        assert_eq!(bytes(85_520_809_984), "79.6 GiB");
        assert_eq!(bytes(80 << 30), "80 GiB");
        assert_eq!(bytes(512 << 20), "512 MiB");
        assert_eq!(bytes(12), "12 B");
    }
}
