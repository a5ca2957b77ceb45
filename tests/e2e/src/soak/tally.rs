//! Counts of events.

use std::collections::BTreeMap;
use std::fmt;

/// Counts of everything that happened, and what must not have.
#[derive(Debug, Clone, Default)]
pub struct Tally {
    counts: BTreeMap<String, u64>,
    /// Events that must not have happened.
    pub wrong: Vec<String>,
}

impl Tally {
    /// Counts one more of these.
    pub fn count(&mut self, what: impl Into<String>) {
        *self.counts.entry(what.into()).or_default() += 1;
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self
            .counts
            .keys()
            .map(|what| what.chars().count())
            .max()
            .unwrap_or(0);
        for (what, count) in &self.counts {
            writeln!(f, "{what:<width$}  {count:>6}")?;
        }
        writeln!(f, "{} things were wrong", self.wrong.len())?;
        self.wrong
            .iter()
            .try_for_each(|what| writeln!(f, "  {what}"))
    }
}

#[cfg(test)]
mod tests {
    use super::Tally;

    #[test]
    fn a_tally_is_a_table_in_a_stable_order_and_ends_with_what_was_wrong() {
        let mut tally = Tally::default();
        for what in ["b", "a, more", "b"] {
            tally.count(what);
        }
        tally.wrong.push("two holders".to_owned());
        assert_eq!(
            tally.to_string(),
            "a, more       1\nb             2\n1 things were wrong\n  two holders\n"
        );
    }
}
