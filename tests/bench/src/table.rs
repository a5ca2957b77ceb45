//! Measured values, each beside its reference and its budget; as a table for people and as JSON.

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A number with its unit.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "unit", content = "value", rename_all = "camelCase")]
pub(crate) enum Value {
    /// Seconds.
    Seconds(f64),
    /// Bytes.
    Bytes(u64),
    /// Per cent of one core.
    Percent(f64),
    /// A number of things.
    Count(u64),
}

impl Value {
    fn number(self) -> f64 {
        #[expect(
            clippy::cast_precision_loss,
            reason = "sizes and counts here are far below 2^52"
        )]
        match self {
            Self::Seconds(n) | Self::Percent(n) => n,
            Self::Bytes(n) | Self::Count(n) => n as f64,
        }
    }
}

impl From<Duration> for Value {
    fn from(time: Duration) -> Self {
        Self::Seconds(time.as_secs_f64())
    }
}

/// Writes a number with three digits that count.
fn three_digits(number: f64) -> String {
    let places = match number {
        n if n < 9.995 => 2,
        n if n < 99.95 => 1,
        _ => 0,
    };
    format!("{number:.places$}")
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.number() {
            n if matches!(self, Self::Seconds(_)) => match n {
                n if n < 999.5e-6 => write!(f, "{} µs", three_digits(n * 1e6)),
                n if n < 0.9995 => write!(f, "{} ms", three_digits(n * 1e3)),
                n => write!(f, "{} s", three_digits(n)),
            },
            n if matches!(self, Self::Bytes(_)) => {
                write!(f, "{} MiB", three_digits(n / f64::from(1 << 20)))
            }
            n if matches!(self, Self::Percent(_)) => write!(f, "{n:.3} %"),
            n => write!(f, "{n}"),
        }
    }
}

/// The budget.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Budget {
    /// So many times the reference.
    Times(f64),
    /// At most this.
    AtMost(Value),
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Times(times) => write!(f, "≤ {times} ×"),
            Self::AtMost(value) if value.number() == 0.0 => f.write_str("none"),
            Self::AtMost(value) => write!(f, "≤ {value}"),
        }
    }
}

/// Result of comparing a figure with its budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Verdict {
    Within,
    Over,
}

/// Value for comparison, measured in the same run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Reference {
    what: String,
    measured: Value,
}

/// A figure.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Row {
    what: String,
    measured: Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    reference: Option<Reference>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ratio: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    budget: Option<Budget>,
    #[serde(skip_serializing_if = "Option::is_none")]
    verdict: Option<Verdict>,
    /// NVIDIA's driver, where a figure exists; measured earlier, on this kind of machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    theirs: Option<Cow<'static, str>>,
}

impl Row {
    pub(crate) fn new(what: impl Into<String>, measured: impl Into<Value>) -> Self {
        let (what, measured) = (what.into(), measured.into());
        Self {
            what,
            measured,
            reference: None,
            ratio: None,
            budget: None,
            verdict: None,
            theirs: None,
        }
    }

    /// Adds the reference.
    pub(crate) fn beside(mut self, what: impl Into<String>, measured: impl Into<Value>) -> Self {
        let measured = measured.into();
        self.ratio = (measured.number() > 0.0).then(|| self.measured.number() / measured.number());
        self.reference = Some(Reference {
            what: what.into(),
            measured,
        });
        self
    }

    /// Judges it. A budget of so many times the reference needs the reference first.
    pub(crate) fn budget(mut self, budget: Budget) -> Self {
        let within = match budget {
            Budget::Times(times) => self.ratio.map(|ratio| ratio <= times),
            Budget::AtMost(most) => Some(self.measured.number() <= most.number()),
        };
        self.verdict = within.map(|within| {
            if within {
                Verdict::Within
            } else {
                Verdict::Over
            }
        });
        self.budget = Some(budget);
        self
    }

    pub(crate) fn theirs(mut self, theirs: &'static str) -> Self {
        self.theirs = Some(theirs.into());
        self
    }

    fn cells(&self) -> [String; 7] {
        let text = |text: Option<String>| text.unwrap_or_else(|| "–".to_owned());
        [
            self.what.clone(),
            self.measured.to_string(),
            text(
                self.reference
                    .as_ref()
                    .map(|r| format!("{}  {}", r.measured, r.what)),
            ),
            text(self.ratio.map(|ratio| format!("{ratio:.2} ×"))),
            text(self.budget.map(|budget| budget.to_string())),
            text(self.verdict.map(|verdict| {
                match verdict {
                    Verdict::Within => "within",
                    Verdict::Over => "OVER",
                }
                .to_owned()
            })),
            text(self.theirs.as_deref().map(str::to_owned)),
        ]
    }
}

/// Figures that belong together.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Section {
    pub(crate) name: String,
    pub(crate) rows: Vec<Row>,
}

/// All of it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Report {
    /// Where it was measured.
    pub(crate) machine: Vec<String>,
    pub(crate) sections: Vec<Section>,
}

const HEAD: [&str; 7] = [
    "what",
    "measured",
    "reference",
    "ratio",
    "budget",
    "verdict",
    "theirs",
];

impl Report {
    /// Adds a section.
    pub(crate) fn add(&mut self, name: String, rows: Vec<Row>) {
        self.sections.push(Section { name, rows });
    }

    /// Returns the numbers of figures that are over their budget and that have a budget.
    pub(crate) fn over(&self) -> (usize, usize) {
        let verdicts = || {
            self.sections
                .iter()
                .flat_map(|s| &s.rows)
                .filter_map(|row| row.verdict)
        };
        (
            verdicts()
                .filter(|verdict| *verdict == Verdict::Over)
                .count(),
            verdicts().count(),
        )
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for line in &self.machine {
            writeln!(f, "{line}")?;
        }
        let head = HEAD.map(str::to_owned);
        let rows: Vec<_> = self
            .sections
            .iter()
            .flat_map(|s| s.rows.iter().map(Row::cells))
            .collect();
        let mut widths = [0; 7];
        for row in rows.iter().chain([&head]) {
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = (*width).max(cell.chars().count());
            }
        }
        let line = |f: &mut fmt::Formatter<'_>, cells: &[String; 7]| {
            let padded: Vec<_> = cells
                .iter()
                .zip(widths)
                .map(|(cell, width)| format!("{cell:<width$}"))
                .collect();
            writeln!(f, "{}", padded.join("  ").trim_end())
        };
        for section in &self.sections {
            writeln!(f, "\n{}", section.name)?;
            line(f, &head)?;
            for row in &section.rows {
                line(f, &row.cells())?;
            }
        }
        let (over, of) = self.over();
        writeln!(f, "\n{over} of {of} budgets exceeded")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_an_aligned_table_and_json_and_says_what_is_over() {
        let millis = Duration::from_millis;
        let rows = vec![
            Row::new("prepare", millis(4))
                .beside("GET", millis(2))
                .budget(Budget::Times(1.5))
                .theirs("3.8 ×"),
            Row::new("memory", Value::Bytes(1 << 20)).budget(Budget::AtMost(Value::Bytes(2 << 20))),
            Row::new("writes", Value::Count(0)).budget(Budget::AtMost(Value::Count(0))),
            Row::new("bare", Duration::from_micros(1500)),
        ];
        let sections = vec![Section {
            name: "claims".to_owned(),
            rows,
        }];
        let report = Report {
            machine: vec!["here".to_owned()],
            sections,
        };
        let table = "here\n\nclaims\n\
            what     measured  reference     ratio   budget      verdict  theirs\n\
            prepare  4.00 ms   2.00 ms  GET  2.00 ×  ≤ 1.5 ×     OVER     3.8 ×\n\
            memory   1.00 MiB  –             –       ≤ 2.00 MiB  within   –\n\
            writes   0         –             –       none        within   –\n\
            bare     1.50 ms   –             –       –           –        –\n\
            \n1 of 3 budgets exceeded\n";
        assert_eq!(report.to_string(), table);
        let json = serde_json::to_value(report.sections.first().unwrap().rows.first()).unwrap();
        let expected = serde_json::json!({
            "what": "prepare",
            "measured": {"unit": "seconds", "value": 0.004},
            "reference": {"what": "GET", "measured": {"unit": "seconds", "value": 0.002}},
            "ratio": 2.0,
            "budget": {"times": 1.5},
            "verdict": "over",
            "theirs": "3.8 ×",
        });
        assert_eq!(json, expected);
    }

    #[test]
    fn numbers_have_three_digits_and_the_unit_that_fits() {
        let shown = |seconds: f64| Value::Seconds(seconds).to_string();
        assert_eq!(
            [
                shown(0.000_001_234),
                shown(0.000_999_6),
                shown(0.123_4),
                shown(12.34)
            ],
            ["1.23 µs", "1.00 ms", "123 ms", "12.3 s"]
        );
        assert_eq!(Value::Percent(0.0123).to_string(), "0.012 %");
    }
}
