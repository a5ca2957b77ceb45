//! Traces: pods with the time of their arrival, as CSV or JSON lines.

use serde::Deserialize;
use thiserror::Error;

/// A line of a trace.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Line {
    /// Arrival, in seconds from the beginning.
    pub time: f64,
    pub namespace: String,
    /// Request in words ([`crate::request`]).
    pub request: String,
    /// Seconds that it runs; without them it stays.
    #[serde(default)]
    pub duration: Option<f64>,
    /// Priority; 0 without it.
    #[serde(default)]
    pub priority: Option<i32>,
}

/// A trace that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("line {number}: {problem}")]
pub struct TraceError {
    number: usize,
    problem: String,
}

/// Columns of a CSV file, in any order.
const COLUMNS: [&str; 5] = ["time", "namespace", "request", "duration", "priority"];

/// Reads a trace: JSON lines where it begins with a brace, else CSV with a line of names.
pub fn read(text: &str) -> Result<Vec<Line>, TraceError> {
    let lines = text.lines().enumerate();
    let lines = lines.map(|(number, line)| (number + 1, line.trim()));
    let mut lines = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
    if !text.trim_start().starts_with('{') {
        return csv(lines);
    }
    let read = |(number, line): (usize, &str)| {
        let line = serde_json::from_str(line);
        let line = line.map_err(|error| fail(number, &error))?;
        checked(number, line)
    };
    lines.try_fold(Vec::new(), |mut all, line| {
        all.push(read(line)?);
        Ok(all)
    })
}

fn fail(number: usize, problem: &dyn std::fmt::Display) -> TraceError {
    TraceError {
        number,
        problem: problem.to_string(),
    }
}

fn csv<'t>(mut lines: impl Iterator<Item = (usize, &'t str)>) -> Result<Vec<Line>, TraceError> {
    let Some((number, head)) = lines.next() else {
        return Err(fail(1, &"the trace is empty"));
    };
    let head: Vec<&str> = head.split(',').map(str::trim).collect();
    if let Some(unknown) = head.iter().find(|name| !COLUMNS.contains(name)) {
        let columns = COLUMNS.join(",");
        return Err(fail(
            number,
            &format!("{unknown:?} is no column: the first line is {columns}"),
        ));
    }
    let place = |name: &str| head.iter().position(|column| *column == name);
    let mut all = Vec::new();
    for (number, line) in lines {
        if line.contains('"') {
            return Err(fail(
                number,
                &"quoted values are not read: write JSON lines",
            ));
        }
        let values: Vec<&str> = line.split(',').map(str::trim).collect();
        if values.len() > head.len() {
            return Err(fail(
                number,
                &format!("{} values for {} columns", values.len(), head.len()),
            ));
        }
        let value = |name: &str| {
            let value = place(name).and_then(|place| values.get(place)).copied();
            value.filter(|value| !value.is_empty())
        };
        let needed =
            |name: &str| value(name).ok_or_else(|| fail(number, &format!("{name} is missing")));
        let seconds = |name: &str, text: &str| {
            let wrong = |_| fail(number, &format!("{name}: {text:?} is no number of seconds"));
            text.parse::<f64>().map_err(wrong)
        };
        let priority = |text: &str| {
            let wrong = |_| fail(number, &format!("priority: {text:?} is no whole number"));
            text.parse::<i32>().map_err(wrong)
        };
        let line = Line {
            time: seconds("time", needed("time")?)?,
            namespace: value("namespace").unwrap_or("default").to_owned(),
            request: needed("request")?.to_owned(),
            duration: value("duration")
                .map(|text| seconds("duration", text))
                .transpose()?,
            priority: value("priority").map(priority).transpose()?,
        };
        all.push(checked(number, line)?);
    }
    Ok(all)
}

fn checked(number: usize, line: Line) -> Result<Line, TraceError> {
    let is_time = |seconds: f64| seconds.is_finite() && (0.0..1e12).contains(&seconds);
    if !is_time(line.time) {
        return Err(fail(number, &"time: it must be 0 or more seconds"));
    }
    if line.duration.is_some_and(|duration| !is_time(duration)) {
        return Err(fail(number, &"duration: it must be 0 or more seconds"));
    }
    Ok(line)
}

/// Converts seconds of a line to milliseconds.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "checked when the line was read"
)]
pub fn milliseconds(seconds: f64) -> u64 {
    (seconds * 1000.0).round() as u64
}
