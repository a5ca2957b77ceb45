//! Logs to stderr.

use std::io::{IsTerminal, stderr};
use std::str::FromStr;

use tracing_subscriber::filter::{LevelFilter, ParseError, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::{SubscriberInitExt, TryInitError};

/// Form of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LogFormat {
    /// For people.
    #[default]
    Plain,
    /// A JSON object on each line, for collectors.
    Json,
}

impl FromStr for LogFormat {
    type Err = LogError;

    fn from_str(text: &str) -> Result<Self, LogError> {
        match text {
            "plain" => Ok(Self::Plain),
            "json" => Ok(Self::Json),
            other => Err(LogError::Format(other.to_owned())),
        }
    }
}

/// Why logging could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// Not a format.
    #[error("unknown log format {0:?}: use \"plain\" or \"json\"")]
    Format(String),
    /// The filter does not parse.
    #[error(
        "invalid log filter {filter:?}: use a level such as \"info\", or \"info,divvy_executor=debug\""
    )]
    Filter {
        /// The directives as given.
        filter: String,
        /// The parser's reason.
        source: ParseError,
    },
    /// Set up twice in one process.
    #[error("logging is already set up")]
    Twice(#[source] TryInitError),
}

/// Sends logs to stderr. `filter` is a level, or levels by module (`info,kube=warn`).
pub fn init_logs(format: LogFormat, filter: &str) -> Result<(), LogError> {
    let filter = parse(filter)?;
    // `filter` alone decides what is logged.
    let builder = tracing_subscriber::fmt()
        .with_max_level(LevelFilter::TRACE)
        .with_writer(stderr);
    match format {
        LogFormat::Plain => builder
            .with_ansi(stderr().is_terminal())
            .finish()
            .with(filter)
            .try_init(),
        LogFormat::Json => builder
            .json()
            .flatten_event(true)
            .with_current_span(false)
            .finish()
            .with(filter)
            .try_init(),
    }
    .map_err(LogError::Twice)
}

/// Levels by module. Not tracing's `EnvFilter`: its filters by span and field are not worth a regex
/// engine.
fn parse(filter: &str) -> Result<Targets, LogError> {
    filter.parse().map_err(|source| LogError::Filter {
        filter: filter.to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bad_filter_or_format_says_what_to_write_instead() {
        parse("info,divvy_executor=debug").unwrap();
        let error = parse("info,divvy=loud").unwrap_err().to_string();
        assert!(
            error.starts_with("invalid log filter \"info,divvy=loud\": use a level"),
            "{error}"
        );
        let error = "xml".parse::<LogFormat>().unwrap_err().to_string();
        assert_eq!(
            error,
            "unknown log format \"xml\": use \"plain\" or \"json\""
        );
        assert_eq!("json".parse::<LogFormat>().unwrap(), LogFormat::Json);
    }

    #[test]
    fn setting_up_twice_is_an_error_and_not_a_panic() {
        init_logs(LogFormat::Json, "error").unwrap();
        assert!(matches!(
            init_logs(LogFormat::Plain, "error"),
            Err(LogError::Twice(_))
        ));
    }
}
