//! Selectors of claims and classes, evaluated for kinds of devices instead of devices.
//!
//! A kind lacks the attributes that only one device or GPU has. A selector that might read one of
//! those is taken for one that selects everything: a price is an upper bound, and tenants write
//! selectors.

use divvy_allocator::{CelError, evaluate};

use crate::catalogue::{Catalogue, Kind};

/// Most selectors whose answers are kept: tenants write them.
const MOST_ANSWERS: usize = 1000;

/// Functions by which an expression can read no attribute whose name is not in its text.
const PLAIN: &[&str] = &[
    "quantity",
    "isGreaterThan",
    "isLessThan",
    "compareTo",
    "semver",
    "major",
    "minor",
    "patch",
    "matches",
    "startsWith",
    "endsWith",
    "contains",
    "has",
];

/// Returns whether the text of an expression says which attributes it reads, and none of them is
/// left out of kinds.
fn is_plain(expression: &str, catalogue: &Catalogue) -> bool {
    let reads_left_out = catalogue
        .left_out
        .iter()
        .any(|name| expression.contains(name.as_str()));
    !reads_left_out && !expression.contains(['+', '\\', '{']) && calls(expression).all(is_known)
}

fn is_known(function: &str) -> bool {
    function.is_empty() || PLAIN.contains(&function) || function == "in"
}

/// Returns the names before opening brackets.
fn calls(expression: &str) -> impl Iterator<Item = &str> {
    expression.match_indices('(').map(|(at, _)| {
        let before = expression.get(..at).unwrap_or_default().trim_end();
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let start = before.trim_end_matches(is_name).len();
        before.get(start..).unwrap_or_default()
    })
}

impl Catalogue {
    /// Returns of each kind whether devices of it may satisfy a selector.
    pub(crate) fn selected(&mut self, expression: &str) -> Vec<bool> {
        let kinds = self.kinds().len();
        if !is_plain(expression, self) {
            return vec![true; kinds];
        }
        if let Some(known) = self.answers.get(expression) {
            return known.clone();
        }
        let driver = self.driver.clone();
        let answers = self.kinds().iter();
        let answers: Vec<_> = answers
            .map(|kind| may_select(expression, kind, &driver))
            .collect();
        if self.answers.len() >= MOST_ANSWERS {
            self.answers.clear();
        }
        self.answers.insert(expression.to_owned(), answers.clone());
        answers
    }
}

/// Returns whether devices of a kind may satisfy a selector.
fn may_select(expression: &str, kind: &Kind, driver: &str) -> bool {
    match evaluate(expression, driver, &kind.reduced.device) {
        Ok(selects) => selects,
        Err(CelError::Offline(_)) => true,
        // The scheduler cannot allocate by it either.
        Err(_) => false,
    }
}
