//! Regular expressions in the dialect of Kubernetes (RE2), compiled once per thread.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use regex::Regex;

/// Patterns that are kept compiled; the number of selectors of a cluster is small.
const CACHED: usize = 128;

thread_local! {
    /// Compiling costs 25 times a selector's evaluation. Shared, never cloned: a clone of a `Regex`
    /// starts with an empty scratch space, which costs five evaluations.
    static CACHE: RefCell<BTreeMap<String, Rc<Regex>>> = const { RefCell::new(BTreeMap::new()) };
}

/// The compiled pattern.
pub(super) fn compiled(pattern: &str) -> Result<Rc<Regex>, regex::Error> {
    CACHE.with_borrow_mut(|cache| {
        if let Some(regex) = cache.get(pattern) {
            return Ok(Rc::clone(regex));
        }
        let regex = Rc::new(Regex::new(&from_re2(pattern))?);
        if cache.len() >= CACHED {
            cache.clear();
        }
        cache.insert(pattern.to_owned(), Rc::clone(&regex));
        Ok(regex)
    })
}

/// RE2's perl classes and word boundaries are ASCII, those of the regex crate are Unicode.
fn from_re2(pattern: &str) -> String {
    let mut out = String::with_capacity(pattern.len());
    let mut chars = pattern.chars();
    while let Some(c) = chars.next() {
        if c != '\\' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some('d') => out.push_str("[0-9]"),
            Some('D') => out.push_str("[^0-9]"),
            Some('w') => out.push_str("[0-9A-Za-z_]"),
            Some('W') => out.push_str("[^0-9A-Za-z_]"),
            Some('s') => out.push_str("[\\t\\n\\f\\r ]"),
            Some('S') => out.push_str("[^\\t\\n\\f\\r ]"),
            Some('b') => out.push_str("(?-u:\\b)"),
            Some(other) => {
                out.push('\\');
                out.push(other);
            }
            None => out.push('\\'),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_are_ascii_as_in_re2() {
        let matches = |pattern, text| compiled(pattern).unwrap().is_match(text);
        assert!(matches(r"^H\d+$", "H100"));
        assert!(!matches(r"^\d$", "٣"));
        assert!(!matches(r"^\w$", "ä"));
        assert!(matches(r"^[\d-]+$", "1-2"));
        assert!(matches(r"(?i)h100", "NVIDIA H100"));
        assert!(matches(r"\bH100\b", "NVIDIA H100 80GB"));
        assert!(matches(r"\\d", r"\d"));
        assert!(compiled("a(").is_err());
    }
}
