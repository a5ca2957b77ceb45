//! Objects of a cluster, about a millisecond each: plain HTTP on the Unix socket of the `api-proxy`
//! component.
//!
//! Waiting for a state is nearly all that end-to-end tests do, and starting kubectl for each look
//! costs a hundred times as much.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

const JSON: &str = "application/json";

/// The API server of a cluster.
#[derive(Debug, Clone)]
pub struct Api {
    socket: PathBuf,
}

/// An answer that is not an object: its status and what it said.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Answer {
    status: u16,
    body: String,
}

impl Api {
    /// The API behind this socket.
    pub fn new(socket: PathBuf) -> Self {
        Self { socket }
    }

    /// The object or list at a path as `/api/v1/nodes/node-1`; `None` if there is none.
    pub fn get(&self, path: &str) -> Result<Option<Value>> {
        let answer = self.request("GET", path, None)?;
        match answer.status {
            200 => Ok(Some(
                serde_json::from_str(&answer.body).with_context(|| format!("GET {path}"))?,
            )),
            404 => Ok(None),
            status => bail!("GET {path}: {status}: {}", answer.body.trim()),
        }
    }

    /// The objects of the list at a path.
    pub fn list(&self, path: &str) -> Result<Vec<Value>> {
        let list = self
            .get(path)?
            .with_context(|| format!("the API server has no {path}"))?;
        Ok(list
            .get("items")
            .and_then(Value::as_array)
            .cloned()
            .unwrap_or_default())
    }

    /// The text at a path, as a pod's log or `/readyz`.
    pub fn text(&self, path: &str) -> Result<String> {
        let answer = self.request("GET", path, None)?;
        match answer.status {
            200 => Ok(answer.body),
            status => bail!("GET {path}: {status}: {}", answer.body.trim()),
        }
    }

    /// Creates an object in the collection at a path and returns it as stored.
    pub fn create(&self, path: &str, object: &Value) -> Result<Value> {
        let answer = self.request("POST", path, Some((JSON, object)))?;
        match answer.status {
            200..=202 => serde_json::from_str(&answer.body).with_context(|| format!("POST {path}")),
            status => bail!("POST {path}: {status}: {}", answer.body.trim()),
        }
    }

    /// Changes fields of the object at a path (a JSON merge patch) and returns it as stored.
    pub fn patch(&self, path: &str, change: &Value) -> Result<Value> {
        let answer = self.request(
            "PATCH",
            path,
            Some(("application/merge-patch+json", change)),
        )?;
        match answer.status {
            200 => serde_json::from_str(&answer.body).with_context(|| format!("PATCH {path}")),
            status => bail!("PATCH {path}: {status}: {}", answer.body.trim()),
        }
    }

    /// Deletes the object at a path; one that is gone already is fine. `options` as
    /// `{"gracePeriodSeconds": 0}`.
    pub fn delete(&self, path: &str, options: &Value) -> Result<()> {
        let answer = self.request("DELETE", path, Some((JSON, options)))?;
        match answer.status {
            200 | 202 | 404 => Ok(()),
            status => bail!("DELETE {path}: {status}: {}", answer.body.trim()),
        }
    }

    fn request(&self, method: &str, path: &str, body: Option<(&str, &Value)>) -> Result<Answer> {
        let mut stream = UnixStream::connect(&self.socket)
            .with_context(|| format!("no API proxy on {}", self.socket.display()))?;
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        // HTTP/1.0: one answer, not chunked, then the end of the stream.
        let mut request =
            format!("{method} {path} HTTP/1.0\r\nHost: localhost\r\nAccept: application/json\r\n");
        if let Some((media_type, body)) = body {
            let body = body.to_string();
            let length = body.len();
            request.extend([
                format!("Content-Type: {media_type}\r\n"),
                format!("Content-Length: {length}\r\n\r\n"),
                body,
            ]);
        } else {
            request.push_str("\r\n");
        }
        stream.write_all(request.as_bytes())?;
        let mut bytes = Vec::new();
        stream
            .read_to_end(&mut bytes)
            .with_context(|| format!("{method} {path}"))?;
        parse(&String::from_utf8_lossy(&bytes))
            .with_context(|| format!("{method} {path}: not an HTTP answer"))
    }
}

fn parse(text: &str) -> Option<Answer> {
    let (head, body) = text.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    Some(Answer {
        status,
        body: body.to_owned(),
    })
}

/// The value at a path of keys and list positions as `status.conditions.0.type`; `Null` where there
/// is none.
pub fn at<'a>(object: &'a Value, path: &str) -> &'a Value {
    path.split('.')
        .fold(object, |value, key| match key.parse::<usize>() {
            Ok(position) if value.is_array() => value.get(position).unwrap_or(&Value::Null),
            _ => value.get(key).unwrap_or(&Value::Null),
        })
}

/// Returns true if an object has this condition with status `True`.
pub fn has_condition(object: &Value, name: &str) -> bool {
    let conditions = at(object, "status.conditions")
        .as_array()
        .map_or(&[][..], Vec::as_slice);
    conditions
        .iter()
        .any(|condition| at(condition, "type") == name && at(condition, "status") == "True")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{Answer, at, has_condition, parse};

    #[test]
    fn an_answer_is_its_status_and_everything_after_the_headers() {
        let text = "HTTP/1.0 404 Not Found\r\nDate: x\r\n\r\n{}\r\n\r\n";
        assert_eq!(
            parse(text),
            Some(Answer {
                status: 404,
                body: "{}\r\n\r\n".to_owned()
            })
        );
        assert_eq!(parse("half a li"), None);
    }

    #[test]
    fn a_path_leads_through_objects_and_lists_and_to_null_when_it_ends_early() {
        let pod = json!({"spec": {"containers": [{"name": "a"}, {"name": "b"}]}});
        assert_eq!(at(&pod, "spec.containers.1.name"), "b");
        assert_eq!(at(&pod, "spec.containers.2.name"), &json!(null));
        assert_eq!(at(&pod, "status.phase"), &json!(null));
    }

    #[test]
    fn only_a_true_condition_counts() {
        let node = json!({"status": {"conditions": [{"type": "Ready", "status": "True"}, {"type": "Other", "status": "False"}]}});
        assert!(has_condition(&node, "Ready"));
        assert!(!has_condition(&node, "Other"));
        assert!(!has_condition(&json!({}), "Ready"));
    }
}
