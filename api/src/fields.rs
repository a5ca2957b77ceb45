//! Reads an object field by field: what is taken is known, what is left over is refused.

use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use crate::ConfigError;

/// The fields of one object. Take each known field once, then [`Fields::finish`].
pub(crate) struct Fields {
    /// Path of the object, with a trailing dot unless it is the config itself.
    prefix: String,
    entries: Map<String, Value>,
    known: Vec<&'static str>,
}

impl Fields {
    /// Opens an object.
    pub(crate) fn open(path: &str, value: Value) -> Result<Self, ConfigError> {
        let prefix = if path.is_empty() {
            String::new()
        } else {
            format!("{path}.")
        };
        match value {
            Value::Object(entries) => Ok(Self {
                prefix,
                entries,
                known: Vec::new(),
            }),
            other => Err(wrong(path.to_owned(), "an object", &other)),
        }
    }

    /// Takes a field that must be a string.
    pub(crate) fn string(&mut self, name: &'static str, hint: &str) -> Result<String, ConfigError> {
        self.known.push(name);
        let path = self.path(name);
        match self.entries.remove(name) {
            Some(Value::String(text)) => Ok(text),
            Some(other) => Err(wrong(path, "a string", &other)),
            None => {
                // A field that is most likely this one, misspelt, helps more than that it is
                // missing.
                let typo = self.entries.keys().find(|n| near(n, &[name]).is_some());
                let hint = match typo {
                    Some(typo) => format!("write {hint} instead of {typo:?}"),
                    None => format!("add {hint}"),
                };
                Err(ConfigError::Missing { path, hint })
            }
        }
    }

    /// Takes a field that may be absent and is a string.
    pub(crate) fn optional_string(
        &mut self,
        name: &'static str,
    ) -> Result<Option<String>, ConfigError> {
        self.known.push(name);
        match self.entries.remove(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(wrong(self.path(name), "a string", &other)),
        }
    }

    /// Takes a field that may be absent and is a boolean.
    pub(crate) fn boolean(&mut self, name: &'static str) -> Result<Option<bool>, ConfigError> {
        self.known.push(name);
        match self.entries.remove(name) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(value)),
            Some(other) => Err(wrong(self.path(name), "a boolean", &other)),
        }
    }

    /// Takes a field that may be absent and is a string or a number, as text.
    pub(crate) fn text_or_number(
        &mut self,
        name: &'static str,
    ) -> Result<Option<String>, ConfigError> {
        self.known.push(name);
        match self.entries.remove(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(Value::Number(number)) => Ok(Some(number.to_string())),
            Some(other) => Err(wrong(self.path(name), "a string or a number", &other)),
        }
    }

    /// Returns whether nothing is left to take.
    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Takes a field that may be absent and is a whole number in a range; `form` describes it.
    pub(crate) fn whole_number(
        &mut self,
        name: &'static str,
        range: RangeInclusive<u32>,
        form: &'static str,
    ) -> Result<Option<u32>, ConfigError> {
        self.known.push(name);
        match self.entries.remove(name) {
            None => Ok(None),
            Some(Value::Number(number)) => {
                let whole = number
                    .as_u64()
                    .and_then(|number| u32::try_from(number).ok());
                let fits = whole.filter(|number| range.contains(number));
                fits.map(Some).ok_or_else(|| ConfigError::Value {
                    path: self.path(name),
                    found: number.to_string(),
                    known: vec![form],
                    near: None,
                })
            }
            Some(other) => Err(wrong(self.path(name), "a number", &other)),
        }
    }

    /// Takes a field that may be absent and is an object.
    pub(crate) fn object(&mut self, name: &'static str) -> Result<Option<Self>, ConfigError> {
        self.known.push(name);
        let path = self.path(name);
        self.entries
            .remove(name)
            .map(|value| Self::open(&path, value))
            .transpose()
    }

    /// Returns whether there is a field, which counts as not known all the same.
    pub(crate) fn contains(&self, name: &str) -> bool {
        self.entries.contains_key(name)
    }

    /// Takes a list of strings; none if the field is absent.
    pub(crate) fn strings(&mut self, name: &'static str) -> Result<Vec<String>, ConfigError> {
        self.known.push(name);
        let path = self.path(name);
        match self.entries.remove(name) {
            None => Ok(Vec::new()),
            Some(Value::Array(items)) => items
                .into_iter()
                .enumerate()
                .map(|(at, item)| match item {
                    Value::String(text) => Ok(text),
                    other => Err(wrong(format!("{path}[{at}]"), "a string", &other)),
                })
                .collect(),
            Some(other) => Err(wrong(path, "a list of strings", &other)),
        }
    }

    /// Path of a field of the object.
    pub(crate) fn path(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// Refuses what was not taken, naming the nearest known field.
    pub(crate) fn finish(self, kind: &'static str) -> Result<(), ConfigError> {
        match self.entries.into_iter().next() {
            None => Ok(()),
            Some((name, _)) => Err(ConfigError::UnknownField {
                path: format!("{}{name}", self.prefix),
                kind,
                near: near(&name, &self.known),
                known: self.known,
            }),
        }
    }
}

fn wrong(path: String, expected: &'static str, value: &Value) -> ConfigError {
    let found = match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    };
    ConfigError::WrongType {
        path,
        expected,
        found,
    }
}

/// The known name that a person most likely meant: the same but for letter case, or at most a third
/// of its letters away.
pub(crate) fn near(name: &str, known: &[&'static str]) -> Option<String> {
    let lower = name.to_lowercase();
    known
        .iter()
        .map(|k| (distance(&lower, &k.to_lowercase()), *k))
        // At least a single letter, so that short names can be misspelt too.
        .filter(|(d, k)| *d <= (k.len() / 3).max(1))
        .min()
        .map(|(_, k)| k.to_owned())
}

/// Edit distance by letters.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    // Levenshtein's table, of which only the last row is kept.
    for (i, x) in a.chars().enumerate() {
        let mut next = vec![i + 1];
        for ((y, diagonal), above) in b.iter().zip(&row).zip(row.iter().skip(1)) {
            let left = next.last().copied().unwrap_or(i + 1);
            next.push(
                (diagonal + usize::from(x != *y))
                    .min(above + 1)
                    .min(left + 1),
            );
        }
        row = next;
    }
    row.last().copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_typo_finds_its_field_and_another_word_does_not() {
        let known = ["apiVersion", "kind", "sharing"];
        assert_eq!(near("apiversion", &known).as_deref(), Some("apiVersion"));
        assert_eq!(
            near("knid", &known),
            None,
            "two edits are too many for four letters"
        );
        assert_eq!(near("kin", &known).as_deref(), Some("kind"));
        assert_eq!(near("shareing", &known).as_deref(), Some("sharing"));
        assert_eq!(near("strategy", &known), None);
    }
}
