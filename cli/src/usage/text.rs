//! Samples of the text format that Prometheus and OpenMetrics share. Lines that are none are passed
//! over: what is served beside our metrics is no concern of a reader.

use std::borrow::Cow;

/// Names and values.
type Labels<'t> = Vec<(&'t str, Cow<'t, str>)>;

/// A line of the text.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Sample<'t> {
    pub(super) name: &'t str,
    labels: Labels<'t>,
    pub(super) value: f64,
}

impl Sample<'_> {
    /// A label's value; one that is absent is empty, as for Prometheus.
    pub(super) fn label(&self, name: &str) -> &str {
        self.labels
            .iter()
            .find(|(label, _)| *label == name)
            .map_or("", |(_, value)| value)
    }
}

pub(super) fn samples(text: &str) -> impl Iterator<Item = Sample<'_>> {
    text.lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(sample)
}

fn sample(line: &str) -> Option<Sample<'_>> {
    let end = line.find(['{', ' '])?;
    let (name, rest) = line.split_at(end);
    let (labels, rest) = match rest.strip_prefix('{') {
        Some(rest) => labels(rest)?,
        None => (Vec::new(), rest),
    };
    // A time or an exemplar may follow.
    let value = rest.split_whitespace().next()?.parse().ok()?;
    Some(Sample {
        name,
        labels,
        value,
    })
}

/// Labels up to the closing brace, and what follows it.
fn labels(mut rest: &str) -> Option<(Labels<'_>, &str)> {
    let mut all = Vec::new();
    loop {
        rest = rest.trim_start_matches([',', ' ']);
        if let Some(rest) = rest.strip_prefix('}') {
            return Some((all, rest));
        }
        let (name, quoted) = rest.split_once("=\"")?;
        let mut escaped = false;
        let end = quoted.find(|c| {
            let ends = c == '"' && !escaped;
            escaped = c == '\\' && !escaped;
            ends
        })?;
        let (value, after) = quoted.split_at(end);
        all.push((name, plain(value)));
        rest = after.strip_prefix('"')?;
    }
}

/// Without the escapes `\\`, `\"` and `\n`.
fn plain(value: &str) -> Cow<'_, str> {
    if !value.contains('\\') {
        return value.into();
    }
    let mut out = String::with_capacity(value.len());
    let mut chars = value.chars();
    while let Some(c) = chars.next() {
        match c {
            '\\' => out.extend(chars.next().map(|c| if c == 'n' { '\n' } else { c })),
            c => out.push(c),
        }
    }
    out.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_may_contain_what_ends_them() {
        let line = r#"m{a="x\"} 9",b="back\\",c="two\nlines",} 1.5 1700000000 # {trace="1"} 3"#;
        let sample = samples(line).next().unwrap();
        assert_eq!((sample.name, sample.value), ("m", 1.5));
        assert_eq!(
            ["a", "b", "c", "d"].map(|name| sample.label(name)),
            ["x\"} 9", "back\\", "two\nlines", ""]
        );
    }

    #[test]
    fn lines_that_are_no_samples_are_passed_over() {
        let text = "# TYPE m gauge\n\nm\nm{a=\"1\" 3\nm{a=\"1} 3\nm{a} 3\nm{} x\nn 4\n# EOF";
        let found: Vec<_> = samples(text)
            .map(|sample| (sample.name, sample.value))
            .collect();
        assert_eq!(found, [("n", 4.0)]);
    }
}
