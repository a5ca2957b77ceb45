//! What the API server refuses with 422, as far as a DRA driver can run into it.

mod claim;
mod slice;

use serde_json::Value;

use super::error::ApiError;

/// Checks an object of a known kind; `old` is what is stored, on updates.
pub(crate) fn check(kind: &str, name: &str, old: Option<&Value>, new: &Value) -> Result<(), ApiError> {
    let mut problems = Problems::default();
    match kind {
        "ResourceSlice" => slice::check(&mut problems, old, new),
        "ResourceClaim" => claim::check(&mut problems, old, new),
        _ => return Ok(()),
    }
    let problems = problems.0;
    if problems.is_empty() {
        return Ok(());
    }
    let list = match problems.as_slice() {
        [one] => one.clone(),
        many => format!("[{}]", many.join(", ")),
    };
    Err(ApiError::new(422, format!("{kind}.resource.k8s.io \"{name}\" is invalid: {list}")))
}

/// Every problem found, worded as the API server does: `path: message`.
#[derive(Debug, Default)]
struct Problems(Vec<String>);

impl Problems {
    fn add(&mut self, path: impl AsRef<str>, message: impl AsRef<str>) {
        self.0.push(format!("{}: {}", path.as_ref(), message.as_ref()));
    }

    fn unless(&mut self, fine: bool, path: impl AsRef<str>, message: impl AsRef<str>) {
        if !fine {
            self.add(path, message);
        }
    }

    fn too_many(&mut self, path: impl AsRef<str>, count: usize, max: usize) {
        self.unless(count <= max, path, format!("Too many: {count}: must have at most {max} items"));
    }

    fn immutable<T: PartialEq>(&mut self, path: &str, old: &T, new: &T) {
        self.unless(old == new, path, "Invalid value: field is immutable");
    }
}

/// DNS label, at most 63 characters.
fn is_label(text: &str) -> bool {
    !text.is_empty()
        && text.len() <= 63
        && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
        && !text.starts_with('-')
        && !text.ends_with('-')
}

/// DNS subdomain, at most `max` characters.
fn is_subdomain(text: &str, max: usize) -> bool {
    text.len() <= max && text.split('.').all(is_label)
}

/// `id` or `domain/id`.
fn is_qualified_name(text: &str) -> bool {
    let (domain, id) = text.split_once('/').map_or((None, text), |(domain, id)| (Some(domain), id));
    let starts_well = id.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
    domain.is_none_or(|d| is_subdomain(d, 63))
        && starts_well
        && id.len() <= 32
        && id.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
}

/// Strict semver 2.0.0: three numbers without leading zeros, then optional pre-release and build parts.
fn is_semver(text: &str) -> bool {
    let (rest, build) = text.split_once('+').map_or((text, None), |(a, b)| (a, Some(b)));
    let (core, pre) = rest.split_once('-').map_or((rest, None), |(a, b)| (a, Some(b)));
    let number =
        |s: &str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_digit()) && (s == "0" || !s.starts_with('0'));
    let identifier = |s: &str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
    core.split('.').count() == 3
        && core.split('.').all(number)
        && pre.is_none_or(|p| {
            p.split('.').all(|s| identifier(s) && (number(s) || s.bytes().any(|b| !b.is_ascii_digit())))
        })
        && build.is_none_or(|b| b.split('.').all(identifier))
}
