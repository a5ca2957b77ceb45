//! YAML documents as they are: fields in their order, numbers and texts apart. Comments are lost.

use std::fmt;

use anyhow::{Context, Result};
use serde::de::{MapAccess, SeqAccess, Visitor};
use serde::ser::{SerializeMap as _, SerializeSeq as _};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A value in a document.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Node {
    Null,
    Bool(bool),
    Number(serde_json::Number),
    Text(String),
    List(Vec<Node>),
    Map(Map),
}

/// Fields in their order.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Map(Vec<(String, Node)>);

impl Node {
    /// Returns the fields of a map.
    pub(crate) fn map(&self) -> Option<&Map> {
        match self {
            Self::Map(map) => Some(map),
            _ => None,
        }
    }

    /// Returns the fields of a map, to change them.
    pub(crate) fn map_mut(&mut self) -> Option<&mut Map> {
        match self {
            Self::Map(map) => Some(map),
            _ => None,
        }
    }

    /// Returns the items of a list; of anything else there are none.
    pub(crate) fn items(&self) -> &[Node] {
        match self {
            Self::List(items) => items,
            _ => &[],
        }
    }

    /// Returns the items of a list, to change them.
    pub(crate) fn items_mut(&mut self) -> Option<&mut Vec<Node>> {
        match self {
            Self::List(items) => Some(items),
            _ => None,
        }
    }

    /// Returns a text.
    pub(crate) fn text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    /// Returns a text, or a number or boolean as it is written.
    pub(crate) fn scalar(&self) -> Option<String> {
        match self {
            Self::Text(text) => Some(text.clone()),
            Self::Number(number) => Some(number.to_string()),
            Self::Bool(value) => Some(value.to_string()),
            _ => None,
        }
    }

    /// Returns the value below these fields.
    pub(crate) fn at(&self, path: &[&str]) -> Option<&Node> {
        path.iter()
            .try_fold(self, |node, field| node.map()?.get(field))
    }

    /// Returns the text below these fields.
    pub(crate) fn text_at(&self, path: &[&str]) -> Option<&str> {
        self.at(path)?.text()
    }

    /// Returns the value below these fields, to change it.
    pub(crate) fn at_mut(&mut self, path: &[&str]) -> Option<&mut Node> {
        path.iter()
            .try_fold(self, |node, field| node.map_mut()?.get_mut(field))
    }
}

impl From<&str> for Node {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<String> for Node {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<u64> for Node {
    fn from(number: u64) -> Self {
        Self::Number(number.into())
    }
}

impl From<Map> for Node {
    fn from(map: Map) -> Self {
        Self::Map(map)
    }
}

impl<T: Into<Node>> From<Vec<T>> for Node {
    fn from(items: Vec<T>) -> Self {
        Self::List(items.into_iter().map(Into::into).collect())
    }
}

impl<K: Into<String>, const N: usize> From<[(K, Node); N]> for Map {
    fn from(fields: [(K, Node); N]) -> Self {
        Self(fields.into_iter().map(|(k, v)| (k.into(), v)).collect())
    }
}

impl<K: Into<String>, const N: usize> From<[(K, Node); N]> for Node {
    fn from(fields: [(K, Node); N]) -> Self {
        Self::Map(fields.into())
    }
}

impl Map {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &Node)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value))
    }

    pub(crate) fn get(&self, field: &str) -> Option<&Node> {
        self.0
            .iter()
            .find(|(name, _)| name == field)
            .map(|(_, value)| value)
    }

    pub(crate) fn get_mut(&mut self, field: &str) -> Option<&mut Node> {
        self.0
            .iter_mut()
            .find(|(name, _)| name == field)
            .map(|(_, value)| value)
    }

    /// Sets a field in its place, or puts it behind the others.
    pub(crate) fn set(&mut self, field: &str, value: impl Into<Node>) {
        match self.get_mut(field) {
            Some(old) => *old = value.into(),
            None => self.0.push((field.to_owned(), value.into())),
        }
    }

    /// Sets a field that is not there before another one, or behind all without that one.
    pub(crate) fn set_before(&mut self, other: &str, field: &str, value: impl Into<Node>) {
        let place = self.0.iter().position(|(name, _)| name == other);
        self.0.insert(
            place.unwrap_or(self.0.len()),
            (field.to_owned(), value.into()),
        );
    }

    /// Gives a field another name, in its place.
    pub(crate) fn rename(&mut self, field: &str, new: &str) {
        if let Some((name, _)) = self.0.iter_mut().find(|(name, _)| name == field) {
            new.clone_into(name);
        }
    }

    /// Takes a field out.
    pub(crate) fn remove(&mut self, field: &str) -> Option<Node> {
        let place = self.0.iter().position(|(name, _)| name == field)?;
        Some(self.0.remove(place).1)
    }

    /// Takes a field out if its value is an empty map or list.
    pub(crate) fn remove_if_empty(&mut self, field: &str) {
        let is_empty = match self.get(field) {
            Some(Node::Map(map)) => map.is_empty(),
            Some(Node::List(items)) => items.is_empty(),
            _ => false,
        };
        if is_empty {
            self.remove(field);
        }
    }
}

/// Reads all documents of a text; those without content are left out.
pub(crate) fn documents(name: &str, text: &str) -> Result<Vec<Node>> {
    // kubectl reads 0644 as YAML 1.1 does: as octal.
    let options = serde_saphyr::options! { legacy_octal_numbers: true };
    let all: Vec<Node> = serde_saphyr::from_multiple_with_options(text, options)
        .with_context(|| format!("{name} is not YAML"))?;
    Ok(all.into_iter().filter(|node| *node != Node::Null).collect())
}

/// Writes objects as JSON: one as it is, several as a List.
pub(crate) fn json(nodes: &[Node]) -> Result<String> {
    let list = match nodes {
        [one] => one.clone(),
        all => Node::from([
            ("apiVersion", "v1".into()),
            ("kind", "List".into()),
            ("items", Node::List(all.to_vec())),
        ]),
    };
    Ok(serde_json::to_string_pretty(&list)?)
}

/// Writes a document, in block style.
pub(crate) fn text(node: &Node) -> Result<String> {
    // Long lines are as they were: an expression that is folded is hard to read.
    let options = serde_saphyr::ser_options! { folded_wrap_chars: 100_000 };
    Ok(serde_saphyr::to_string_with_options(node, options)?)
}

impl Serialize for Node {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Null => serializer.serialize_unit(),
            Self::Bool(value) => serializer.serialize_bool(*value),
            Self::Number(number) => number.serialize(serializer),
            Self::Text(text) => serializer.serialize_str(text),
            Self::List(items) => {
                let mut list = serializer.serialize_seq(Some(items.len()))?;
                items
                    .iter()
                    .try_for_each(|item| list.serialize_element(item))?;
                list.end()
            }
            Self::Map(Map(fields)) => {
                let mut map = serializer.serialize_map(Some(fields.len()))?;
                fields
                    .iter()
                    .try_for_each(|(name, value)| map.serialize_entry(name, value))?;
                map.end()
            }
        }
    }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Reader)
    }
}

struct Reader;

impl<'de> Visitor<'de> for Reader {
    type Value = Node;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<Node, E> {
        Ok(Node::Null)
    }

    fn visit_none<E>(self) -> Result<Node, E> {
        Ok(Node::Null)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Node, D::Error> {
        Node::deserialize(deserializer)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Node, E> {
        Ok(Node::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Node, E> {
        Ok(Node::Number(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Node, E> {
        Ok(Node::Number(value.into()))
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<Node, E> {
        serde_json::Number::from_f64(value)
            .map(Node::Number)
            .ok_or_else(|| E::custom(format!("{value} is not a number of JSON")))
    }

    fn visit_str<E>(self, value: &str) -> Result<Node, E> {
        Ok(value.into())
    }

    fn visit_string<E>(self, value: String) -> Result<Node, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Node, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = access.next_element()? {
            items.push(item);
        }
        Ok(Node::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Node, A::Error> {
        let mut fields = Vec::new();
        while let Some(field) = access.next_entry()? {
            fields.push(field);
        }
        Ok(Node::Map(Map(fields)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_document_keeps_its_fields_and_the_kinds_of_its_values() {
        let text = "kind: Pod
apiVersion: v1
metadata:
  name: p
  labels:
    zone: b
    app: a
spec:
  number: 1
  text: \"1\"
  truth: true
  word: \"true\"
  switch: \"on\"
  answer: \"yes\"
  letter: \"y\"
  octal: \"0644\"
  hex: \"0x1f\"
  exponent: \"1e3\"
  underscores: \"1_000\"
  nothing: \"~\"
  none: null
  part: 0.5
  list:
  - first
  - second: 2
  script: |
    set -e
    echo a
  empty: {}
";
        let read = documents("x", text).unwrap();
        let written = super::text(&read[0]).unwrap();
        assert_eq!(documents("x", &written).unwrap(), read);
        assert_eq!(written, text);
    }

    #[test]
    fn numbers_are_read_as_kubectl_reads_them_and_anchors_are_followed() {
        let text = "a: &a {mode: 0644, x: 1}\nb: *a\nc: {<<: *a, x: 2}\n---\n---\nd: 1\n";
        let read = documents("x", text).unwrap();
        assert_eq!(read.len(), 2);
        assert_eq!(read[0].at(&["b", "mode"]), Some(&Node::from(420)));
        assert_eq!(read[0].at(&["c", "x"]), Some(&Node::from(2)));
        assert_eq!(read[0].at(&["c", "mode"]), Some(&Node::from(420)));
        assert!(documents("x", "a: [").is_err());
    }
}
