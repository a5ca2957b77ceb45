//! Constraints of a claim: devices that must have an attribute in common, or must differ in it.
//!
//! Values are numbered when first seen, so that a search compares numbers and can remember them.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{Device, DeviceAttribute, DeviceConstraint};

/// A value of an attribute. What has another type is another value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Value<'a> {
    Int(i64),
    Bool(bool),
    Text(&'a str),
    Version(&'a str),
    /// Of a type that cannot be compared: equal to nothing, not even to itself.
    Unknown,
}

/// What must hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Match,
    Distinct,
}

/// A constraint, resolved.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Constraint<'a> {
    pub(crate) kind: Kind,
    pub(crate) attribute: &'a str,
    /// The requests it is about; empty is all.
    requests: &'a [String],
}

impl<'a> Constraint<'a> {
    /// `None` for a constraint of a kind that is not known.
    pub(crate) fn new(constraint: &'a DeviceConstraint) -> Option<Self> {
        let (kind, attribute) = match (&constraint.match_attribute, &constraint.distinct_attribute) {
            (Some(attribute), _) => (Kind::Match, attribute),
            (None, Some(attribute)) => (Kind::Distinct, attribute),
            (None, None) => return None,
        };
        Some(Self { kind, attribute, requests: constraint.requests.as_deref().unwrap_or_default() })
    }

    /// Whether it is about a request, by its name or by that of its parent.
    pub(crate) fn covers(&self, request: &str) -> bool {
        let parent = request.split('/').next().unwrap_or_default();
        self.requests.is_empty() || self.requests.iter().any(|r| r == request || r == parent)
    }

    /// The values that a device has, sorted; `None` when it lacks the attribute, or in `lists` has none to compare.
    pub(crate) fn values(&self, driver: &str, device: &'a Device, lists: bool) -> Option<Vec<Value<'a>>> {
        let attributes = device.attributes.as_ref()?;
        let bare = || {
            let (domain, id) = self.attribute.split_once('/')?;
            attributes.get(id).filter(|_| domain == driver)
        };
        let attribute = attributes.get(self.attribute).or_else(bare)?;
        if !lists {
            return Some(vec![scalar(attribute).unwrap_or(Value::Unknown)]);
        }
        let mut values: Vec<Value<'a>> = match attribute {
            DeviceAttribute { ints: Some(v), .. } if !v.is_empty() => {
                v.iter().map(|v| Value::Int(*v)).collect()
            }
            DeviceAttribute { bools: Some(v), .. } if !v.is_empty() => {
                v.iter().map(|v| Value::Bool(*v)).collect()
            }
            DeviceAttribute { strings: Some(v), .. } if !v.is_empty() => {
                v.iter().map(|v| Value::Text(v)).collect()
            }
            DeviceAttribute { versions: Some(v), .. } if !v.is_empty() => {
                v.iter().map(|v| Value::Version(v)).collect()
            }
            _ => vec![scalar(attribute)?],
        };
        values.sort_unstable();
        values.dedup();
        Some(values)
    }
}

fn scalar(attribute: &DeviceAttribute) -> Option<Value<'_>> {
    match attribute {
        DeviceAttribute { string: Some(v), .. } => Some(Value::Text(v)),
        DeviceAttribute { int: Some(v), .. } => Some(Value::Int(*v)),
        DeviceAttribute { bool: Some(v), .. } => Some(Value::Bool(*v)),
        DeviceAttribute { version: Some(v), .. } => Some(Value::Version(v)),
        _ => None,
    }
}

/// What two sorted lists of values have in common.
fn common<'a>(a: &[Value<'a>], b: &[Value<'a>]) -> Vec<Value<'a>> {
    a.iter().filter(|v| **v != Value::Unknown && b.binary_search(v).is_ok()).copied().collect()
}

/// What is known of a candidate's values.
#[derive(Debug, Clone, Copy)]
enum Seen {
    NotAsked,
    Lacking,
    List(usize),
}

/// The devices that were picked under a constraint, by their values.
#[derive(Debug)]
pub(crate) struct State<'a> {
    /// Value lists, numbered.
    numbers: BTreeMap<Vec<Value<'a>>, usize>,
    lists: Vec<Vec<Value<'a>>>,
    /// By candidate: the number of its value list.
    seen: Vec<Seen>,
    /// For a match: what all picks so far have in common, one entry a pick. Else the picks' own values.
    stack: Vec<usize>,
}

impl<'a> State<'a> {
    pub(crate) fn new(candidates: usize) -> Self {
        Self {
            numbers: BTreeMap::new(),
            lists: Vec::new(),
            seen: vec![Seen::NotAsked; candidates],
            stack: Vec::new(),
        }
    }

    /// The number of a candidate's values.
    pub(crate) fn number(
        &mut self,
        candidate: usize,
        values: impl FnOnce() -> Option<Vec<Value<'a>>>,
    ) -> Option<usize> {
        match self.seen.get(candidate) {
            Some(Seen::List(number)) => return Some(*number),
            Some(Seen::Lacking) => return None,
            Some(Seen::NotAsked) | None => {}
        }
        let number = values().map(|values| self.intern(values));
        if let Some(slot) = self.seen.get_mut(candidate) {
            *slot = number.map_or(Seen::Lacking, Seen::List);
        }
        number
    }

    fn intern(&mut self, values: Vec<Value<'a>>) -> usize {
        if let Some(number) = self.numbers.get(&values) {
            return *number;
        }
        let number = self.lists.len();
        self.lists.push(values.clone());
        self.numbers.insert(values, number);
        number
    }

    pub(crate) fn list(&self, number: usize) -> &[Value<'a>] {
        self.lists.get(number).map(Vec::as_slice).unwrap_or_default()
    }

    /// What the stack would get if a device with these values were added; `None` when it must not be.
    fn after(&mut self, kind: Kind, number: usize) -> Option<usize> {
        match kind {
            Kind::Match => {
                let Some(last) = self.stack.last().copied() else { return Some(number) };
                let common = common(self.list(last), self.list(number));
                if common.is_empty() { None } else { Some(self.intern(common)) }
            }
            Kind::Distinct => {
                let unknown = self.list(number).contains(&Value::Unknown);
                let clash = |other: &usize| !common(self.list(*other), self.list(number)).is_empty();
                let refused = !self.stack.is_empty() && (unknown || self.stack.iter().any(clash));
                (!refused).then_some(number)
            }
        }
    }

    /// Whether a device with these values may join those that are there.
    pub(crate) fn allows(&mut self, kind: Kind, number: usize) -> bool {
        self.after(kind, number).is_some()
    }

    /// Adds a device that is allowed.
    pub(crate) fn push(&mut self, kind: Kind, number: usize) {
        let after = self.after(kind, number).unwrap_or(number);
        self.stack.push(after);
    }

    /// Takes the last device back.
    pub(crate) fn pop(&mut self) {
        self.stack.pop();
    }
}
