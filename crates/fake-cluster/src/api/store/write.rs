//! Writing: what the verbs of the API do to an object, and what is checked before.

use serde_json::{Value, json};

use super::{Key, Store};
use crate::api::defaults::store_form;
use crate::api::error::ApiError;
use crate::api::gates::drop_fields;
use crate::api::json::{copy, set, text};
use crate::api::kinds::Kind;
use crate::api::owners::{self, By};
use crate::api::{claim_check, patch};

/// Part of an object that a write may change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    Main,
    Status,
    /// Both: for the typed helpers, which stand above the API.
    All,
}

/// Conditions of a delete.
#[derive(Debug, Clone, Default)]
pub(crate) struct Preconditions {
    pub(crate) uid: Option<String>,
    pub(crate) version: Option<String>,
}

/// Part and object that are written, and the time.
pub(crate) struct Written<'a> {
    pub(crate) kind: &'a Kind,
    pub(crate) key: &'a Key,
    pub(crate) part: Part,
    pub(crate) now: &'a str,
}

impl Store {
    pub(crate) fn create(
        &mut self,
        kind: &Kind,
        key: &Key,
        mut object: Value,
        now: &str,
    ) -> Result<Value, ApiError> {
        let mut key = key.clone();
        text(&object, "/metadata/name").clone_into(&mut key.name);
        if key.name.is_empty() {
            let prefix = text(&object, "/metadata/generateName").to_owned();
            if prefix.is_empty() {
                return Err(ApiError::new(
                    422,
                    "metadata.name: Required value: name or generateName is required",
                ));
            }
            self.names += 1;
            key.name = format!("{prefix}{}", suffix(self.names));
        }
        if self.objects.contains_key(&key) {
            return Err(ApiError::exists(&kind.qualified(), &key.name));
        }
        if !text(&object, "/metadata/resourceVersion").is_empty() {
            return Err(ApiError::new(
                400,
                "resourceVersion should not be set on objects to be created",
            ));
        }
        for field in ["uid", "creationTimestamp", "deletionTimestamp"] {
            set(&mut object, &["metadata", field], None);
        }
        self.write(
            &Written {
                kind,
                key: &key,
                part: Part::Main,
                now,
            },
            None,
            object,
        )
    }

    pub(crate) fn update(
        &mut self,
        kind: &Kind,
        key: &Key,
        object: Value,
        part: Part,
        now: &str,
    ) -> Result<Value, ApiError> {
        let old = self.get(kind, key)?;
        self.write(
            &Written {
                kind,
                key,
                part,
                now,
            },
            Some(old),
            object,
        )
    }

    /// Creates or replaces everything, status too, with no check but that of the types.
    pub(crate) fn put(
        &mut self,
        kind: &Kind,
        key: &Key,
        mut object: Value,
        now: &str,
    ) -> Result<Value, ApiError> {
        let old = self.objects.get(key).cloned();
        set(&mut object, &["metadata", "resourceVersion"], None);
        self.write(
            &Written {
                kind,
                key,
                part: Part::All,
                now,
            },
            old,
            object,
        )
    }

    pub(crate) fn merge(
        &mut self,
        kind: &Kind,
        key: &Key,
        change: &Value,
        part: Part,
        now: &str,
    ) -> Result<Value, ApiError> {
        let old = self.get(kind, key)?;
        let mut object = old.clone();
        if text(change, "/metadata/resourceVersion").is_empty() {
            set(&mut object, &["metadata", "resourceVersion"], None);
        }
        patch::merge(&mut object, change);
        self.write(
            &Written {
                kind,
                key,
                part,
                now,
            },
            Some(old),
            object,
        )
    }

    pub(crate) fn apply(
        &mut self,
        what: &Written<'_>,
        wanted: &Value,
        (manager, force): (&str, bool),
    ) -> Result<Value, ApiError> {
        let Written {
            kind, key, part, ..
        } = *what;
        if manager.is_empty() {
            return Err(ApiError::new(
                422,
                "fieldManager: Required value: is required for apply patch",
            ));
        }
        let slot = (
            key.clone(),
            format!(
                "{manager}{}",
                if part == Part::Status { "/status" } else { "" }
            ),
        );
        let mut others = self
            .applied
            .iter()
            .filter(|((k, m), _)| k == key && *m != slot.1);
        let conflict = others.find_map(|((_, m), theirs)| {
            patch::conflict(theirs, wanted, "").map(|at| (m.clone(), at))
        });
        let has_owners = kind.name == "Node";
        let current = self.objects.get(key).filter(|_| has_owners);
        let conflict = conflict.or_else(|| owners::conflict(current, manager, wanted));
        if let Some((owner, at)) = conflict.filter(|_| !force) {
            let message = format!("Apply failed with 1 conflict: conflict with \"{owner}\": {at}");
            return Err(ApiError::new(409, message));
        }
        let old = self.objects.get(key).cloned();
        if old.is_none() && part == Part::Status {
            return Err(ApiError::not_found(&kind.qualified(), &key.name));
        }
        let mut object = old.clone().unwrap_or_else(|| json!({}));
        set(&mut object, &["metadata", "resourceVersion"], None);
        patch::apply(&mut object, self.applied.get(&slot), wanted);
        if has_owners {
            owners::keep_shared(old.as_ref(), &mut object, manager);
        }
        let stored = self.write_by(what, old, object, By::Apply(manager, wanted))?;
        if !self.dry_run {
            self.applied.insert(slot, wanted.clone());
        }
        Ok(stored)
    }

    /// Deletes, or marks as deleted while finalizers remain. `Ok(Some)` is the object that still
    /// exists.
    pub(crate) fn delete(
        &mut self,
        kind: &Kind,
        key: &Key,
        must: &Preconditions,
        now: &str,
    ) -> Result<Option<Value>, ApiError> {
        let old = self.get(kind, key)?;
        for (field, expected) in [("uid", &must.uid), ("resourceVersion", &must.version)] {
            let found = text(&old, &format!("/metadata/{field}"));
            if let Some(expected) = expected.as_deref().filter(|e| *e != found) {
                let what = format!(
                    "Operation cannot be fulfilled on {} \"{}\"",
                    kind.qualified(),
                    key.name
                );
                let why = format!(
                    "the {field} in the precondition ({expected}) does not match ({found})"
                );
                return Err(ApiError::new(409, format!("{what}: {why}")));
            }
        }
        let finalizers = old
            .pointer("/metadata/finalizers")
            .and_then(Value::as_array);
        if finalizers.is_none_or(Vec::is_empty) {
            self.remove(key, old);
            return Ok(None);
        }
        if old.pointer("/metadata/deletionTimestamp").is_some() {
            return Ok(Some(old));
        }
        let mut object = old.clone();
        set(
            &mut object,
            &["metadata", "deletionTimestamp"],
            Some(json!(now)),
        );
        Ok(Some(self.commit(key, Some(old), object)))
    }

    fn write(
        &mut self,
        what: &Written<'_>,
        old: Option<Value>,
        object: Value,
    ) -> Result<Value, ApiError> {
        self.write_by(what, old, object, By::Other)
    }

    fn write_by(
        &mut self,
        what: &Written<'_>,
        old: Option<Value>,
        object: Value,
        by: By<'_>,
    ) -> Result<Value, ApiError> {
        let Written {
            kind,
            key,
            part,
            now,
        } = *what;
        check_identity(kind, key, &object)?;
        let mut new = (kind.normalize)(object).map_err(|e| {
            ApiError::new(
                400,
                format!("{} in version \"{}\": {e}", kind.name, kind.version),
            )
        })?;
        if part == Part::Status {
            let mut whole = old.clone().unwrap_or_default();
            copy(&new, &mut whole, &["status"]);
            copy(&new, &mut whole, &["metadata", "resourceVersion"]);
            new = whole;
        } else if kind.status && part == Part::Main {
            copy(old.as_ref().unwrap_or(&Value::Null), &mut new, &["status"]);
        }
        if let Some(old) = &old {
            let (found, given) = (
                text(old, "/metadata/resourceVersion"),
                text(&new, "/metadata/resourceVersion"),
            );
            let (uid, given_uid) = (text(old, "/metadata/uid"), text(&new, "/metadata/uid"));
            if (!given.is_empty() && given != found) || (!given_uid.is_empty() && given_uid != uid)
            {
                let what = format!(
                    "Operation cannot be fulfilled on {} \"{}\"",
                    kind.qualified(),
                    key.name
                );
                let why = "the object has been modified; please apply your changes to the latest version and try again";
                return Err(ApiError::new(409, format!("{what}: {why}")));
            }
            for field in [
                "uid",
                "creationTimestamp",
                "deletionTimestamp",
                "generation",
                "resourceVersion",
            ] {
                copy(old, &mut new, &["metadata", field]);
            }
        } else {
            self.stamp(&mut new, key, now);
        }
        if part != Part::All {
            drop_fields(&self.gates_off, old.as_ref(), &mut new);
        }
        store_form(&kind.name, &mut new, now)?;
        if kind.name == "Node" {
            owners::note(old.as_ref(), &mut new, by);
        }
        if part != Part::All && kind.name == "ResourceClaim" {
            claim_check::check(&key.name, old.as_ref(), &new)?;
        }
        if let Some(old) = &old {
            if *old == new {
                return Ok(new);
            }
            if old.get("spec") != new.get("spec") {
                let generation = old
                    .pointer("/metadata/generation")
                    .and_then(Value::as_i64)
                    .unwrap_or(1);
                set(
                    &mut new,
                    &["metadata", "generation"],
                    Some(json!(generation + 1)),
                );
            }
        }
        let finalizers = new
            .pointer("/metadata/finalizers")
            .and_then(Value::as_array);
        if new.pointer("/metadata/deletionTimestamp").is_some()
            && finalizers.is_none_or(Vec::is_empty)
        {
            return Ok(self.remove(key, new));
        }
        Ok(self.commit(key, old, new))
    }

    fn stamp(&mut self, new: &mut Value, key: &Key, now: &str) {
        if text(new, "/metadata/uid").is_empty() {
            self.names += 1;
            set(
                new,
                &["metadata", "uid"],
                Some(json!(format!(
                    "00000000-0000-4000-8000-{:012x}",
                    self.names
                ))),
            );
        }
        set(new, &["metadata", "name"], Some(json!(key.name)));
        let namespace = (!key.namespace.is_empty()).then(|| json!(key.namespace));
        set(new, &["metadata", "namespace"], namespace);
        if text(new, "/metadata/creationTimestamp").is_empty() {
            set(new, &["metadata", "creationTimestamp"], Some(json!(now)));
        }
        set(new, &["metadata", "generation"], Some(json!(1)));
    }
}

fn check_identity(kind: &Kind, key: &Key, object: &Value) -> Result<(), ApiError> {
    let given = [("name", &key.name), ("namespace", &key.namespace)];
    for (field, expected) in given {
        let found = text(object, &format!("/metadata/{field}"));
        if !found.is_empty() && found != expected {
            let message = format!(
                "the {field} of the object ({found}) does not match that of the request ({expected})"
            );
            return Err(ApiError::new(400, message));
        }
    }
    if kind.namespaced && key.namespace.is_empty() {
        return Err(ApiError::new(
            400,
            format!(
                "{} are namespaced, and no namespace was given",
                kind.qualified()
            ),
        ));
    }
    Ok(())
}

/// Five characters for a generated name: a counter in the alphabet that the server uses, so that
/// runs repeat.
fn suffix(mut number: u64) -> String {
    const ALPHABET: &[u8; 27] = b"bcdfghjklmnpqrstvwxz2456789";
    let mut out = [b'b'; 5];
    for slot in out.iter_mut().rev() {
        let digit = usize::try_from(number % 27).unwrap_or(0);
        *slot = ALPHABET.get(digit).copied().unwrap_or(b'b');
        number /= 27;
    }
    String::from_utf8_lossy(&out).into_owned()
}
