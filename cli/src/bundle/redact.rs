//! Parts that a bundle leaves out: values of variables, text that looks like a secret, and details
//! of a cluster that a fault does not need. Pure.

use serde_json::Value;

/// Text in the place of what is left out.
pub(super) const REDACTED: &str = "(redacted)";

/// Words of names whose values are secrets.
const SECRET: [&str; 6] = [
    "password",
    "passwd",
    "secret",
    "token",
    "credential",
    "apikey",
];
/// Annotation with a copy of the whole object.
const COPY: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// Leaves out of an object what support does not need.
pub(super) fn object(object: &mut Value) {
    if let Some(meta) = object.get_mut("metadata").and_then(Value::as_object_mut) {
        meta.remove("managedFields");
        if let Some(notes) = meta.get_mut("annotations").and_then(Value::as_object_mut) {
            notes.remove(COPY);
        }
    }
    if let Some(status) = object.get_mut("status").and_then(Value::as_object_mut) {
        // Of nodes and pods.
        for field in [
            "addresses",
            "images",
            "podIP",
            "podIPs",
            "hostIP",
            "hostIPs",
        ] {
            status.remove(field);
        }
    }
    if let Some(spec) = object.get_mut("spec").and_then(Value::as_object_mut) {
        for field in ["podCIDR", "podCIDRs", "imagePullSecrets"] {
            spec.remove(field);
        }
    }
    fields(object);
}

/// Leaves out values of variables, and of fields whose names say that they are secrets.
fn fields(value: &mut Value) {
    match value {
        Value::Object(all) => {
            for (name, value) in all {
                let plain = name.to_lowercase().replace(['-', '_', '.'], "");
                if value.is_string() && SECRET.iter().any(|word| plain.contains(word)) {
                    *value = Value::from(REDACTED);
                } else if name == "env" {
                    variables(value);
                } else {
                    fields(value);
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(fields),
        Value::String(text) => {
            if let Some(clean) = line(text) {
                *text = clean;
            }
        }
        _ => {}
    }
}

fn variables(env: &mut Value) {
    for variable in env.as_array_mut().into_iter().flatten() {
        if let Some(value) = variable.get_mut("value") {
            *value = Value::from(REDACTED);
        }
    }
}

/// Returns a log without what looks like a secret.
pub(super) fn log(text: &str) -> String {
    let mut all = String::with_capacity(text.len());
    for one in text.lines() {
        all += line(one).as_deref().unwrap_or(one);
        all.push('\n');
    }
    all
}

/// Returns a line without its secrets, if it has any: bearer tokens, JSON web tokens, passwords of
/// URLs.
fn line(text: &str) -> Option<String> {
    let mut found = false;
    let mut after_bearer = false;
    let words = text.split(' ').map(|word| {
        let plain = word.trim_matches(|c: char| !c.is_ascii_alphanumeric());
        let is_token = plain.starts_with("eyJ") && plain.len() > 20;
        let is_secret = is_token || (after_bearer && !plain.is_empty());
        after_bearer = plain.eq_ignore_ascii_case("bearer");
        if is_secret {
            found = true;
            return REDACTED.to_owned();
        }
        match without_password(word) {
            Some(clean) => {
                found = true;
                clean
            }
            None => word.to_owned(),
        }
    });
    let clean = words.collect::<Vec<_>>().join(" ");
    found.then_some(clean)
}

/// Returns a URL without its user and password.
fn without_password(word: &str) -> Option<String> {
    let (scheme, rest) = word.split_once("://")?;
    let (host, _) = rest.split_once('/').unwrap_or((rest, ""));
    let (user, _) = host.rsplit_once('@')?;
    let after = rest.get(user.len()..)?;
    Some(format!("{scheme}://{REDACTED}{after}"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn secrets_and_copies_of_objects_are_left_out() {
        let mut pod = json!({
            "metadata": {"name": "p", "managedFields": [1], "annotations": {COPY: "{}", "a": "b"}},
            "spec": {"imagePullSecrets": [{"name": "s"}], "containers": [{
                "name": "c", "args": ["--url=https://user:pass@host/x"],
                "env": [{"name": "A", "value": "1"}, {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}]}]},
            "status": {"podIP": "10.0.0.1", "phase": "Running"},
            "data": {"api-token": "x"},
        });
        object(&mut pod);
        let expected = json!({
            "metadata": {"name": "p", "annotations": {"a": "b"}},
            "spec": {"containers": [{
                "name": "c", "args": ["--url=https://(redacted)@host/x"],
                "env": [{"name": "A", "value": REDACTED}, {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}]}]},
            "status": {"phase": "Running"},
            "data": {"api-token": REDACTED},
        });
        assert_eq!(pod, expected);
    }

    #[test]
    fn logs_lose_tokens_and_keep_their_words() {
        for (text, expected) in [
            ("claim a/b is prepared", "claim a/b is prepared\n"),
            (
                "Authorization: Bearer abc.def next",
                "Authorization: Bearer (redacted) next\n",
            ),
            (
                "got eyJhbGciOiJSUzI1NiIsImtpZCI6 here",
                "got (redacted) here\n",
            ),
            (
                "GET https://u:p@example.com/v1\nok",
                "GET https://(redacted)@example.com/v1\nok\n",
            ),
        ] {
            assert_eq!(log(text), expected);
        }
    }
}
