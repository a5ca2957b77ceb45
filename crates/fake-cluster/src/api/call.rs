//! Reads method, path and query of a request.

use std::collections::BTreeMap;

use super::error::ApiError;

/// A path below a group and version.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Path {
    pub(crate) group: String,
    pub(crate) version: String,
    pub(crate) namespace: String,
    pub(crate) plural: String,
    pub(crate) name: String,
    pub(crate) subresource: String,
}

/// Query parameters, decoded.
pub(crate) type Query = BTreeMap<String, String>;

/// The parts of a path; `/version` is an object without a group and version.
pub(crate) fn target(path: &str) -> Result<Path, ApiError> {
    let missing = || {
        ApiError::new(
            404,
            format!("the server could not find the requested resource: {path}"),
        )
    };
    let parts: Vec<String> = path
        .split('/')
        .filter(|p| !p.is_empty())
        .map(decode)
        .collect();
    let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
    let (group, version, rest) = match parts.as_slice() {
        ["version"] => {
            return Ok(Path {
                plural: "version".into(),
                ..Path::default()
            });
        }
        ["api", version, rest @ ..] => ("", *version, rest),
        ["apis", group, version, rest @ ..] => (*group, *version, rest),
        _ => return Err(missing()),
    };
    // A namespace's own status is not distinguished from a resource called "status"; neither is
    // used.
    let (namespace, rest) = match rest {
        ["namespaces", namespace, rest @ ..] if !rest.is_empty() => (*namespace, rest),
        rest => ("", rest),
    };
    let (plural, name, subresource) = match rest {
        [plural] => (*plural, "", ""),
        [plural, name] => (*plural, *name, ""),
        // The rest of the path is the pod's.
        ["pods", name, "proxy", ..] => ("pods", *name, "proxy"),
        [plural, name, subresource] => (*plural, *name, *subresource),
        _ => return Err(missing()),
    };
    Ok(Path {
        group: group.into(),
        version: version.into(),
        namespace: namespace.into(),
        plural: plural.into(),
        name: name.into(),
        subresource: subresource.into(),
    })
}

pub(crate) fn query(raw: &str) -> Query {
    raw.split('&')
        .filter(|pair| !pair.is_empty())
        .map(|pair| {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            (
                decode(&key.replace('+', " ")),
                decode(&value.replace('+', " ")),
            )
        })
        .collect()
}

/// Undoes percent-encoding; a malformed escape stays as it is.
fn decode(text: &str) -> String {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, tail)) = rest.split_first() {
        rest = tail;
        let escaped = tail
            .get(..2)
            .filter(|_| byte == b'%')
            .and_then(|hex| std::str::from_utf8(hex).ok());
        match escaped.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(decoded) => {
                out.push(decoded);
                rest = tail.get(2..).unwrap_or_default();
            }
            None => out.push(byte),
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// The Kubernetes verb of a request.
pub(crate) fn verb(
    method: &http::Method,
    path: &Path,
    query: &Query,
) -> Result<&'static str, ApiError> {
    let named = !path.name.is_empty();
    let watch = query.get("watch").is_some_and(|v| v == "true" || v == "1");
    match (method.as_str(), named) {
        ("GET", _) if path.version.is_empty() => Ok("get"),
        ("GET", true) if !watch => Ok("get"),
        ("GET", _) if watch => Ok("watch"),
        ("GET", _) => Ok("list"),
        ("POST", false) => Ok("create"),
        ("POST", true) if path.subresource == "eviction" => Ok("create"),
        ("PUT", true) => Ok("update"),
        ("PATCH", true) => Ok("patch"),
        ("DELETE", true) => Ok("delete"),
        (other, _) => Err(ApiError::new(
            405,
            format!("method {other} is not allowed here"),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_path_is_split_into_its_parts() {
        let path =
            target("/apis/resource.k8s.io/v1/namespaces/ns/resourceclaims/c/status").unwrap();
        let expected = Path {
            group: "resource.k8s.io".into(),
            version: "v1".into(),
            namespace: "ns".into(),
            plural: "resourceclaims".into(),
            name: "c".into(),
            subresource: "status".into(),
        };
        assert_eq!(path, expected);
    }

    #[test]
    fn a_namespace_itself_is_an_object_without_namespace() {
        let path = target("/api/v1/namespaces/ns").unwrap();
        assert_eq!(
            (
                path.plural.as_str(),
                path.name.as_str(),
                path.namespace.as_str()
            ),
            ("namespaces", "ns", "")
        );
    }

    #[test]
    fn query_values_are_decoded_and_bad_escapes_survive() {
        let query = query("fieldSelector=spec.nodeName%3Dnode%2B1&x=%zz&watch=true");
        assert_eq!(query.get("fieldSelector").unwrap(), "spec.nodeName=node+1");
        assert_eq!(query.get("x").unwrap(), "%zz");
    }
}
