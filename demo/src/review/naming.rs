//! Names: of objects, of what lists in them hold, and of labels.

use std::collections::BTreeMap;

use super::Findings;

/// Rule for names of objects, in the words of the API server.
pub(super) const SUBDOMAIN: &str = "a lowercase RFC 1123 subdomain must consist of at most 253 lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character";
/// Rule for names in lists.
const LABEL: &str = "a lowercase RFC 1123 label must consist of at most 63 lower case alphanumeric characters or '-', and must start and end with an alphanumeric character";
/// Rule for the name in a label's key.
const NAME_PART: &str = "name part must consist of at most 63 alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character";

impl Findings {
    /// Checks the names of an object's list, in its order: labels, each there once.
    pub(super) fn labels<'n>(&mut self, list: &str, names: impl Iterator<Item = &'n str>) {
        let mut before = Vec::new();
        for (number, name) in names.enumerate() {
            let at = format!("{list}[{number}].name");
            self.label(&at, name, &before);
            before.push(name);
        }
    }

    /// Checks one name of a list, after those before it.
    pub(super) fn label(&mut self, at: &str, name: &str, before: &[&str]) {
        if name.is_empty() {
            self.refuse(at, "Required value");
        } else if name.len() > 63 || !is_label(name) {
            self.refuse(at, &format!("Invalid value: {name:?}: {LABEL}"));
        } else if before.contains(&name) {
            self.refuse(at, &format!("Duplicate value: {name:?}"));
        }
    }

    /// Checks the name of an object.
    pub(super) fn subdomain(&mut self, object: &str, name: Option<&str>) {
        let at = format!("{object}: metadata.name");
        match name {
            None | Some("") => {
                self.refuse(&at, "Required value: name or generateName is required");
            }
            Some(name) if !is_subdomain(name) => {
                self.refuse(&at, &format!("Invalid value: {name:?}: {SUBDOMAIN}"));
            }
            Some(_) => {}
        }
    }

    /// Checks the keys and values of labels.
    pub(super) fn label_values(&mut self, at: &str, labels: Option<&BTreeMap<String, String>>) {
        for (key, value) in labels.into_iter().flatten() {
            self.label_key(at, key);
            if !value.is_empty() && !is_name_part(value) {
                let what = "a valid label must be an empty string or consist of at most 63 alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character";
                self.refuse(at, &format!("Invalid value: {value:?}: {what}"));
            }
        }
    }

    /// Checks a qualified name: a name, or a domain, a slash and a name.
    pub(super) fn label_key(&mut self, at: &str, key: &str) {
        if let Some(what) = not_a_key(key) {
            self.refuse(at, &format!("Invalid value: {key:?}: {what}"));
        }
    }
}

/// Says why this is no key of a label, if it is none.
pub(super) fn not_a_key(key: &str) -> Option<String> {
    let (domain, name) = match key.split_once('/') {
        Some((domain, name)) => (Some(domain), name),
        None => (None, key),
    };
    if domain.is_some_and(|domain| !is_subdomain(domain)) {
        return Some(format!("prefix part {SUBDOMAIN}"));
    }
    (!is_name_part(name)).then(|| NAME_PART.to_owned())
}

/// Says whether this can be the name of an object.
pub(super) fn is_subdomain(name: &str) -> bool {
    name.len() <= 253 && name.split('.').all(is_label)
}

fn is_name_part(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric();
    (1..=63).contains(&text.len())
        && text.starts_with(plain)
        && text.ends_with(plain)
        && text.chars().all(|c| plain(c) || "-_.".contains(c))
}

fn is_label(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    text.starts_with(plain) && text.ends_with(plain) && text.chars().all(|c| plain(c) || c == '-')
}
