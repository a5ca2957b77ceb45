//! Comments of YAML: taken from the fields where they stand, and put to the same fields of another
//! text. Pure.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_saphyr::Spanned;

use crate::yaml;

/// Comments of one document.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Comments(Vec<Comment>);

#[derive(Debug, Clone, PartialEq)]
struct Comment {
    /// Field that it is about.
    path: Path,
    /// Text with its sign.
    text: String,
    place: Place,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Lines before the field.
    Before,
    /// The end of the field's line.
    Beside,
    /// Behind all fields.
    End,
}

/// Steps to a value: names of fields, and numbers of items.
type Path = Vec<String>;

/// Returns the comments of each document that has content.
pub(crate) fn of(text: &str) -> Vec<Comments> {
    let documents = places(text);
    let mut all = vec![Comments::default(); documents.len()];
    let fields: Vec<(usize, usize, &Path)> = documents
        .iter()
        .enumerate()
        .flat_map(|(document, places)| {
            places
                .iter()
                .map(move |(line, path)| (*line, document, path))
        })
        .collect();
    let ends: Vec<usize> = text
        .lines()
        .enumerate()
        .filter(|(_, line)| line.starts_with("---"))
        .map(|(number, _)| number + 1)
        .collect();
    for (line, column, comment) in lines(text) {
        let is_alone = column == 0;
        let beside = fields.iter().find(|(of, ..)| *of == line && !is_alone);
        let next = fields.iter().find(|(of, ..)| *of > line && is_alone);
        // What stands before the end of a document belongs to it.
        let next = next.filter(|(of, ..)| {
            let is_between = |end: &usize| line < *end && end < of;
            !ends.iter().any(is_between) || fields.iter().all(|(other, ..)| *other > line)
        });
        let last = fields.iter().rev().find(|(of, ..)| *of <= line);
        let (place, found) = match (beside, next) {
            (Some(found), _) => (Place::Beside, Some(found)),
            (None, Some(found)) => (Place::Before, Some(found)),
            (None, None) => (Place::End, last),
        };
        let Some((_, document, path)) = found else {
            continue;
        };
        if let Some(comments) = all.get_mut(*document) {
            comments.0.push(Comment {
                path: (*path).clone(),
                text: comment.to_owned(),
                place,
            });
        }
    }
    all
}

impl Comments {
    /// Puts the comments into the text of a document. A comment of a field that is gone stands
    /// before the one around it.
    pub(crate) fn put(&self, text: &str) -> String {
        if self.0.is_empty() {
            return text.to_owned();
        }
        let places: BTreeMap<Path, usize> = places(text)
            .into_iter()
            .flatten()
            .rev()
            .map(|(line, path)| (path, line))
            .collect();
        let mut before: BTreeMap<usize, Vec<&str>> = BTreeMap::new();
        let mut beside: BTreeMap<usize, Vec<&str>> = BTreeMap::new();
        let mut end = Vec::new();
        for Comment { path, text, place } in &self.0 {
            let around = (0..=path.len()).rev();
            let mut around = around.filter_map(|length| places.get(path.get(..length)?));
            match (place, places.get(path), around.next()) {
                (Place::Beside, Some(line), _) => beside.entry(*line).or_default().push(text),
                (Place::Before | Place::Beside, _, Some(line)) => {
                    before.entry(*line).or_default().push(text);
                }
                (Place::End, ..) | (_, _, None) => end.push(text.as_str()),
            }
        }
        let mut new = String::new();
        for (number, line) in text.lines().enumerate() {
            let number = number + 1;
            let indent = line.len() - line.trim_start().len();
            for comment in before.remove(&number).unwrap_or_default() {
                new += &format!("{}{comment}\n", " ".repeat(indent));
            }
            new += line;
            if let Some(all) = beside.remove(&number) {
                new += &format!(" {}", all.join(" "));
            }
            new.push('\n');
        }
        for comment in end {
            new += &format!("{comment}\n");
        }
        // Only what is read as the same is right.
        match (yaml::documents("", &new), yaml::documents("", text)) {
            (Ok(with), Ok(without)) if with == without => new,
            _ => text.to_owned(),
        }
    }
}

/// Returns each comment with its line and its column, which is 0 if nothing is before it.
fn lines(text: &str) -> Vec<(usize, usize, &str)> {
    let mut all = Vec::new();
    // Column of the field whose lines of text are being passed over.
    let mut block: Option<usize> = None;
    for (number, line) in text.lines().enumerate() {
        let content = line.trim_start();
        let indent = line.len() - content.len();
        if let Some(column) = block {
            if content.is_empty() || indent > column {
                continue;
            }
            block = None;
        }
        let start = sign(line);
        let code = line.get(..start.unwrap_or(line.len())).unwrap_or_default();
        let code = code.trim_end();
        if let Some(start) = start {
            let comment = line.get(start..).unwrap_or_default().trim_end();
            let column = if code.is_empty() { 0 } else { start };
            all.push((number + 1, column, comment));
        }
        let ending = code.trim_end_matches(|c: char| c.is_ascii_digit() || c == '+' || c == '-');
        if ending.ends_with([':', '-']) {
            continue;
        }
        let opened = ending.strip_suffix(['|', '>']).map(str::trim_end);
        if opened.is_some_and(|before| before.ends_with([':', '-'])) {
            let mut column = indent;
            let mut rest = content;
            while let Some(item) = rest.strip_prefix("- ").filter(|item| item.contains(':')) {
                column += rest.len() - item.len();
                rest = item;
            }
            block = Some(column);
        }
    }
    all
}

/// Finds the sign of a comment in a line, outside of quotes.
fn sign(line: &str) -> Option<usize> {
    let mut quote: Option<char> = None;
    let mut before = ' ';
    let mut is_escaped = false;
    for (place, c) in line.char_indices() {
        match quote {
            Some('"') if is_escaped => is_escaped = false,
            Some('"') if c == '\\' => is_escaped = true,
            Some(open) if c == open => quote = None,
            None if c == '#' && before.is_whitespace() => return Some(place),
            None if matches!(c, '"' | '\'') && " [{,".contains(before) => quote = Some(c),
            Some(_) | None => {}
        }
        before = c;
    }
    None
}

/// Returns the lines of the fields and items of each document that has content, in their order.
fn places(text: &str) -> Vec<Vec<(usize, Path)>> {
    let options = serde_saphyr::options! { legacy_octal_numbers: true };
    let all: Vec<Spanned<Placed>> =
        serde_saphyr::from_multiple_with_options(text, options).unwrap_or_default();
    let flat = |document: &Spanned<Placed>| {
        let mut places = Vec::new();
        document.value.list(&mut Vec::new(), &mut places);
        places.sort();
        places
    };
    all.iter()
        .filter(|document| !matches!(document.value, Placed::Nothing))
        .map(flat)
        .collect()
}

/// A value with the lines of what is below it.
#[derive(Debug)]
enum Placed {
    Nothing,
    Scalar,
    List(Vec<Spanned<Placed>>),
    Map(Vec<(Spanned<String>, Placed)>),
}

impl Placed {
    fn list(&self, path: &mut Path, places: &mut Vec<(usize, Path)>) {
        let mut add = |line: u64, step: String, below: &Placed| {
            path.push(step);
            places.push((usize::try_from(line).unwrap_or(usize::MAX), path.clone()));
            below.list(path, places);
            path.pop();
        };
        match self {
            Self::Nothing | Self::Scalar => {}
            Self::List(items) => {
                for (number, item) in items.iter().enumerate() {
                    add(item.referenced.line(), number.to_string(), &item.value);
                }
            }
            Self::Map(fields) => {
                for (name, below) in fields {
                    add(name.referenced.line(), name.value.clone(), below);
                }
            }
        }
    }
}

impl<'de> Deserialize<'de> for Placed {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Reader)
    }
}

struct Reader;

impl<'de> Visitor<'de> for Reader {
    type Value = Placed;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<Placed, E> {
        Ok(Placed::Nothing)
    }

    fn visit_none<E>(self) -> Result<Placed, E> {
        Ok(Placed::Nothing)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Placed, D::Error> {
        Placed::deserialize(deserializer)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Placed, E> {
        Ok(Placed::Scalar)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Placed, E> {
        Ok(Placed::Scalar)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Placed, E> {
        Ok(Placed::Scalar)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Placed, E> {
        Ok(Placed::Scalar)
    }

    fn visit_str<E>(self, _: &str) -> Result<Placed, E> {
        Ok(Placed::Scalar)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Placed, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = access.next_element()? {
            items.push(item);
        }
        Ok(Placed::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Placed, A::Error> {
        let mut fields = Vec::new();
        while let Some(field) = access.next_entry()? {
            fields.push(field);
        }
        Ok(Placed::Map(fields))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"# About the pod.
kind: Pod # of Kubernetes
metadata:
  # Its name.
  name: p
spec:
  text: "a # in quotes"
  script: |
    # no comment
    echo a # nor this
  containers:
  # The only one.
  - name: c
    note: don't # an apostrophe
    resources:
      limits:
        gpu: 1 # one GPU
# The end.
---
# Another.
kind: Other
"#;

    #[test]
    fn comments_go_with_their_fields() {
        let documents = yaml::documents("x", TEXT).unwrap();
        let comments = of(TEXT);
        let put: Vec<String> = documents
            .iter()
            .zip(&comments)
            .map(|(node, comments)| comments.put(&yaml::text(node).unwrap()))
            .collect();
        assert_eq!(put.join("---\n"), TEXT);
    }

    #[test]
    fn a_comment_of_a_field_that_is_gone_stands_before_the_one_around_it() {
        let text = "a:\n  # The first.\n  b: 1\n  c: 2 # the second\n";
        let comments = of(text);
        assert_eq!(
            comments[0].put("a:\n  d: 3\n"),
            "# The first.\n# the second\na:\n  d: 3\n"
        );
        assert_eq!(
            comments[0].put("e: 1\n"),
            "e: 1\n# The first.\n# the second\n"
        );
    }
}
