//! Constraints of a claim: devices that must have an attribute in common, or must differ in it.

use k8s_openapi::api::resource::v1::{Device, DeviceAttribute, DeviceConstraint};

/// A value of an attribute. A value of another type is another value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Value<'a> {
    Int(i64),
    Bool(bool),
    Text(&'a str),
    Version(&'a str),
    /// A value of a type that cannot be compared: equal to nothing, not even to itself.
    Unknown,
}

/// Rule that must hold.
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
        let (kind, attribute) = match (&constraint.match_attribute, &constraint.distinct_attribute)
        {
            (Some(attribute), _) => (Kind::Match, attribute),
            (None, Some(attribute)) => (Kind::Distinct, attribute),
            (None, None) => return None,
        };
        Some(Self {
            kind,
            attribute,
            requests: constraint.requests.as_deref().unwrap_or_default(),
        })
    }

    /// Says whether it is about a request, by its name or by that of its parent.
    pub(crate) fn covers(&self, request: &str) -> bool {
        let parent = request.split('/').next().unwrap_or_default();
        self.requests.is_empty() || self.requests.iter().any(|r| r == request || r == parent)
    }

    /// The values that a device has, sorted; `None` when it lacks the attribute, or in `lists` has
    /// none to compare.
    pub(crate) fn values(
        &self,
        driver: &str,
        device: &'a Device,
        lists: bool,
    ) -> Option<Vec<Value<'a>>> {
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
            DeviceAttribute {
                strings: Some(v), ..
            } if !v.is_empty() => v.iter().map(|v| Value::Text(v)).collect(),
            DeviceAttribute {
                versions: Some(v), ..
            } if !v.is_empty() => v.iter().map(|v| Value::Version(v)).collect(),
            _ => vec![scalar(attribute)?],
        };
        values.sort_unstable();
        values.dedup();
        Some(values)
    }
}

fn scalar(attribute: &DeviceAttribute) -> Option<Value<'_>> {
    match attribute {
        DeviceAttribute {
            string: Some(v), ..
        } => Some(Value::Text(v)),
        DeviceAttribute { int: Some(v), .. } => Some(Value::Int(*v)),
        DeviceAttribute { bool: Some(v), .. } => Some(Value::Bool(*v)),
        DeviceAttribute {
            version: Some(v), ..
        } => Some(Value::Version(v)),
        _ => None,
    }
}

/// Returns the values that two sorted lists have in common.
fn common<'a>(a: &[Value<'a>], b: &[Value<'a>]) -> Vec<Value<'a>> {
    a.iter()
        .filter(|v| **v != Value::Unknown && b.binary_search(v).is_ok())
        .copied()
        .collect()
}

/// The devices that were picked under a constraint: for a match what all picks so far have in
/// common, one entry a pick; else the picks' own values.
#[derive(Debug, Default)]
pub(crate) struct State<'a>(Vec<Vec<Value<'a>>>);

impl<'a> State<'a> {
    /// Returns what would be added for a device with these values; `None` when it must not join
    /// those that
    /// are there.
    pub(crate) fn after(&self, kind: Kind, values: &[Value<'a>]) -> Option<Vec<Value<'a>>> {
        match kind {
            Kind::Match => {
                let Some(last) = self.0.last() else {
                    return Some(values.to_vec());
                };
                let common = common(last, values);
                (!common.is_empty()).then_some(common)
            }
            Kind::Distinct => {
                let unknown = values.contains(&Value::Unknown);
                let clash = |other: &Vec<Value<'a>>| !common(other, values).is_empty();
                let refused = !self.0.is_empty() && (unknown || self.0.iter().any(clash));
                (!refused).then(|| values.to_vec())
            }
        }
    }

    /// Adds a device that is allowed.
    pub(crate) fn push(&mut self, kind: Kind, values: Vec<Value<'a>>) {
        let after = self.after(kind, &values).unwrap_or(values);
        self.0.push(after);
    }

    /// Takes the last device back.
    pub(crate) fn pop(&mut self) {
        self.0.pop();
    }
}
