//! The report as a file, to be committed as a fixture: the same text for each run on the same
//! machine. Values that differ from run to run are masked in it, and stand at its end.

use std::collections::BTreeMap;

use crate::report::{Allow, NEVER_ASKED, Outcome, Report};

/// Title of the part that is another in each run. A comparison ends there.
pub(crate) const MEASURED: &str = "## measured (another in each run)";

/// Returns the text of a report.
pub(crate) fn text(report: &Report, allowed: &[Allow]) -> String {
    let (mut body, mut measured) = (Body::default(), Vec::new());
    let allowed: Vec<_> = allowed.iter().map(|allow| allow.name()).collect();
    let allowed = if allowed.is_empty() {
        "nothing: it only read".to_owned()
    } else {
        allowed.join(", ")
    };
    let version = env!("CARGO_PKG_VERSION");
    let parts: Vec<String> = report
        .parts
        .iter()
        .map(|(title, text)| format!("\n## {title}\n{}\n", body.masked(text).trim_end()))
        .collect();
    let (mut asked, mut not_asked) = (Vec::new(), Vec::new());
    for (check, outcome) in report.outcomes() {
        let name = check.name();
        let (word, detail) = match outcome {
            Outcome::Ok(detail) => (" ok", detail),
            Outcome::Failed(detail) => (" FAILED", detail),
            Outcome::NotTried(why) => ("", why),
        };
        let masked = body.masked(detail);
        if masked != *detail {
            measured.push(format!("{name}: {detail}\n"));
        }
        let into = if word.is_empty() {
            &mut not_asked
        } else {
            &mut asked
        };
        into.push(format!("{name}{word}: {masked}\n"));
    }
    let never = NEVER_ASKED.map(|(what, why)| format!("{what}: {why}\n"));
    let names = body
        .names
        .iter()
        .map(|(name, mask)| format!("{mask}: {name}\n"));
    let names: Vec<String> = names.collect();
    [
        format!("divvy-hardware {version}\nallowed: {allowed}\n"),
        parts.concat(),
        format!("\n## asked\n{}", asked.concat()),
        format!("\n## not asked\n{}", not_asked.concat()),
        format!("\n## never asked by this program\n{}", never.concat()),
        format!("\n{MEASURED}\n{}{}", names.concat(), measured.concat()),
    ]
    .concat()
}

/// Masks names and times.
#[derive(Default)]
struct Body {
    /// Masks by the name that they stand for.
    names: BTreeMap<String, String>,
}

impl Body {
    fn masked(&mut self, text: &str) -> String {
        let is_part = |c: char| c.is_ascii_alphanumeric() || "-_.:%".contains(c) || c == 'µ';
        let mut masked = String::new();
        let mut rest = text;
        let mut before = "";
        while let Some(first) = rest.chars().next() {
            let end = rest.find(|c| is_part(c) != is_part(first));
            let (word, after) = rest.split_at(end.unwrap_or(rest.len()));
            rest = after;
            if is_part(first) {
                masked += &self.word(before, word);
                before = word;
            } else {
                masked += word;
            }
        }
        masked
    }

    fn word(&mut self, before: &str, word: &str) -> String {
        // Punctuation of a sentence is no part of it.
        let bare = word.trim_end_matches(['.', ':', '-']);
        let end = word.get(bare.len()..).unwrap_or_default();
        let mask = if bare.starts_with("GPU-") || bare.starts_with("MIG-") {
            self.name(bare, "GPU")
        } else if is_address(bare) {
            self.name(bare, "PCI")
        } else if is_time(bare) {
            "TIME".to_owned()
        } else if before == "process" && bare.parse::<u32>().is_ok() {
            "PID".to_owned()
        } else {
            return word.to_owned();
        };
        mask + end
    }

    fn name(&mut self, name: &str, kind: &str) -> String {
        let next = self.names.values().filter(|mask| mask.starts_with(kind));
        let next = format!("{kind}-{}", next.count());
        self.names.entry(name.to_owned()).or_insert(next).clone()
    }
}

/// Returns whether a word is a number and its unit of time.
fn is_time(word: &str) -> bool {
    let number = word.trim_end_matches(|c: char| c.is_alphabetic());
    let unit = word.get(number.len()..).unwrap_or_default();
    ["s", "ms", "µs", "ns"].contains(&unit) && number.parse::<f64>().is_ok()
}

/// Returns whether a word is the address of a PCI device, `0000:1a:00.0`.
fn is_address(word: &str) -> bool {
    let parts: Vec<&str> = word.split([':', '.']).collect();
    let is_hex = |part: &&str| !part.is_empty() && part.chars().all(|c| c.is_ascii_hexdigit());
    parts.len() == 4 && word.matches(':').count() == 2 && parts.iter().all(is_hex)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Check;

    #[test]
    fn names_times_and_processes_are_masked_and_measured_apart() {
        let mut report = Report::new(true);
        let uuid = "GPU-12345678-1234-1234-1234-123456780001";
        let found =
            format!("process 4711 on {uuid} (0000:1a:00.0) in 12.5ms, {uuid}: 50%, R580 1s");
        report.note(Check::Processes, Outcome::Ok(found.clone()));
        report.note(Check::Mps, Outcome::NotTried("not allowed".to_owned()));
        let text = text(&report, &[Allow::Program]);
        let (body, measured) = text.split_once(MEASURED).unwrap();
        let line = "processes ok: process PID on GPU-0 (PCI-0) in TIME, GPU-0: 50%, R580 TIME\n";
        assert!(body.contains(line), "{body}");
        assert!(body.contains("allowed: program\n"), "{body}");
        assert!(body.contains("## not asked\nmps: not allowed\n"), "{body}");
        assert!(body.contains("## never asked by this program\n"), "{body}");
        assert!(measured.contains(&found) && measured.contains(&format!("GPU-0: {uuid}")));
    }

    #[test]
    fn versions_and_numbers_are_no_times_and_no_addresses() {
        for word in ["580.95.05", "1024M", "50.0", "v2", "12:30", "s", "0x1as"] {
            assert_eq!(Body::default().masked(word), word);
        }
    }
}
