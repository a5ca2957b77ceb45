//! Names: of objects, and of what lists in them hold.

use super::Findings;

impl Findings {
    /// The names of an object's list, in its order: labels, each there once.
    pub(super) fn labels<'n>(&mut self, list: &str, names: impl Iterator<Item = &'n str>) {
        let mut before = Vec::new();
        for (number, name) in names.enumerate() {
            let at = format!("{list}[{number}].name");
            if name.is_empty() {
                self.refuse(&at, "Required value");
            } else if name.len() > 63 || !is_label(name) {
                let what = "a lowercase RFC 1123 label must consist of at most 63 lower case alphanumeric characters or '-', and must start and end with an alphanumeric character";
                self.refuse(&at, &format!("Invalid value: {name:?}: {what}"));
            } else if before.contains(&name) {
                self.refuse(&at, &format!("Duplicate value: {name:?}"));
            }
            before.push(name);
        }
    }

    /// The name of an object.
    pub(super) fn subdomain(&mut self, object: &str, name: Option<&str>) {
        let at = format!("{object}: metadata.name");
        match name {
            None => self.refuse(&at, "Required value"),
            Some(name) if name.len() > 253 || !name.split('.').all(is_label) => {
                let what = "a lowercase RFC 1123 subdomain must consist of at most 253 lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character";
                self.refuse(&at, &format!("Invalid value: {name:?}: {what}"));
            }
            Some(_) => {}
        }
    }
}

fn is_label(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    text.starts_with(plain) && text.ends_with(plain) && text.chars().all(|c| plain(c) || c == '-')
}
