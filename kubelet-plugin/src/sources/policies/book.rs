//! Pure: objects from the watch in, policies in force out.

use std::collections::BTreeMap;

use divvy_api::names::API_VERSION;
use divvy_api::policy::{GpuPolicy, KIND, decode_policy};
use kube::core::DynamicObject;
use serde_json::{Value, json};

use crate::sinks::notifier::PolicyRef;

/// The policies by name.
#[derive(Debug, Default)]
pub(super) struct Book {
    /// The last version that could be read.
    good: BTreeMap<String, GpuPolicy>,
    /// Why the present version cannot.
    bad: BTreeMap<String, String>,
}

/// A policy that cannot be read, to be reported once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Unreadable {
    pub(super) policy: PolicyRef,
    pub(super) why: String,
    /// True if an earlier version of it stays in force.
    pub(super) has_earlier: bool,
}

impl Book {
    /// With what an earlier process could read.
    pub(super) fn remembering(policies: Vec<GpuPolicy>) -> Self {
        let good = policies
            .into_iter()
            .map(|policy| (policy.name.clone(), policy))
            .collect();
        Self {
            good,
            bad: BTreeMap::new(),
        }
    }

    /// All policies that there are. A policy that is not among them is forgotten.
    pub(super) fn listed(&mut self, objects: Vec<DynamicObject>) -> Vec<Unreadable> {
        // Forget first: a policy that was deleted and made again while the watch was away is
        // another object.
        let there = |name: &String| {
            objects
                .iter()
                .any(|o| o.metadata.name.as_ref() == Some(name))
        };
        self.good.retain(|name, _| there(name));
        self.bad.retain(|name, _| there(name));
        objects
            .into_iter()
            .filter_map(|object| self.applied(object))
            .collect()
    }

    /// Takes in a policy that was made or changed.
    pub(super) fn applied(&mut self, object: DynamicObject) -> Option<Unreadable> {
        let name = object.metadata.name.clone().unwrap_or_default();
        let (uid, generation) = (object.metadata.uid.clone(), object.metadata.generation);
        // Another object of the same name has nothing to do with the one that could be read.
        if self
            .good
            .get(&name)
            .is_some_and(|good| good.uid.is_some() && good.uid != uid)
        {
            self.good.remove(&name);
        }
        // A version that cannot be read leaves the last good one in force: a typing error must not
        // take GPUs away from a cluster.
        match decode_policy(&written(object)) {
            Ok(policy) => {
                self.bad.remove(&name);
                self.good.insert(name, policy);
                None
            }
            Err(error) => {
                let why = error.to_string();
                let has_earlier = self.good.contains_key(&name);
                let before = self.bad.insert(name.clone(), why.clone());
                let policy = PolicyRef {
                    name,
                    uid,
                    generation,
                };
                (before.as_ref() != Some(&why)).then_some(Unreadable {
                    policy,
                    why,
                    has_earlier,
                })
            }
        }
    }

    /// Takes in that a policy was deleted.
    pub(super) fn deleted(&mut self, name: &str) {
        self.good.remove(name);
        self.bad.remove(name);
    }

    /// There are none.
    pub(super) fn clear(&mut self) {
        self.good.clear();
        self.bad.clear();
    }

    pub(super) fn policies(&self) -> Vec<GpuPolicy> {
        self.good.values().cloned().collect()
    }

    pub(super) fn bad(&self) -> &BTreeMap<String, String> {
        &self.bad
    }
}

/// The object as its author wrote it. Items of a list may lack their kind.
fn written(object: DynamicObject) -> Value {
    let mut value = object.data;
    if let Some(fields) = value.as_object_mut() {
        let types = object.types.unwrap_or_default();
        let or = |text: String, default: &str| {
            if text.is_empty() {
                default.to_owned()
            } else {
                text
            }
        };
        fields.insert(
            "apiVersion".to_owned(),
            or(types.api_version, API_VERSION).into(),
        );
        fields.insert("kind".to_owned(), or(types.kind, KIND).into());
        fields.insert(
            "metadata".to_owned(),
            json!({
                "name": object.metadata.name,
                "uid": object.metadata.uid,
                "generation": object.metadata.generation,
            }),
        );
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(name: &str, uid: &str, spec: &Value) -> DynamicObject {
        serde_json::from_value(json!({ "metadata": { "name": name, "uid": uid }, "spec": spec }))
            .unwrap()
    }

    fn priorities(book: &Book) -> Vec<(String, i32)> {
        book.policies()
            .into_iter()
            .map(|policy| (policy.name, policy.spec.priority))
            .collect()
    }

    #[test]
    fn a_bad_version_leaves_the_last_good_one_in_force_and_is_reported_once() {
        let mut book = Book::default();
        assert_eq!(
            book.listed(vec![object("a", "1", &json!({ "priority": 1 }))]),
            []
        );
        let bad = object("a", "1", &json!({ "prio": 2 }));
        let unreadable = book.applied(bad.clone()).unwrap();
        assert!(
            unreadable.has_earlier
                && unreadable
                    .why
                    .starts_with("spec.prio: unknown field `prio`"),
            "{unreadable:?}"
        );
        assert_eq!(book.applied(bad.clone()), None);
        assert_eq!(book.listed(vec![bad]), []);
        assert_eq!(priorities(&book), [("a".to_owned(), 1)]);
        assert_eq!(book.bad().len(), 1);
        assert_eq!(
            book.applied(object("a", "1", &json!({ "priority": 3 }))),
            None
        );
        assert_eq!(
            (priorities(&book), book.bad().len()),
            (vec![("a".to_owned(), 3)], 0)
        );
    }

    #[test]
    fn what_is_gone_or_made_anew_does_not_stay_in_force() {
        let good = |uid: &str| object("a", uid, &json!({ "priority": 1 }));
        let mut book = Book::default();
        book.listed(vec![good("1"), object("b", "2", &json!({}))]);
        book.deleted("b");
        assert_eq!(priorities(&book), [("a".to_owned(), 1)]);
        let unreadable = book
            .applied(object("a", "9", &json!({ "prio": 2 })))
            .unwrap();
        assert!(!unreadable.has_earlier);
        assert_eq!(priorities(&book), []);
        let mut book = Book::remembering(book_with_one());
        book.listed(Vec::new());
        assert_eq!(priorities(&book), []);
    }

    #[test]
    fn a_bad_policys_earlier_readable_version_stays_in_force() {
        let mut book = Book::remembering(book_with_one());
        assert!(book.listed(vec![object("a", "1", &json!({ "prio": 2 }))])[0].has_earlier);
        assert_eq!(priorities(&book), [("a".to_owned(), 1)]);
    }

    fn book_with_one() -> Vec<GpuPolicy> {
        let mut book = Book::default();
        book.listed(vec![object("a", "1", &json!({ "priority": 1 }))]);
        book.policies()
    }
}
