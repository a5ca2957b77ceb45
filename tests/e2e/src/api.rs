//! Reading objects of a cluster, about a millisecond each: plain HTTP on the Unix socket of the `api-proxy` component.
//!
//! Waiting for a state is nearly all that end-to-end tests do, and starting kubectl for each look costs a hundred times
//! as much. Writing is left to `kubectl apply`.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

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
        let answer = self.request(path)?;
        match answer.status {
            200 => Ok(Some(serde_json::from_str(&answer.body).with_context(|| format!("GET {path}"))?)),
            404 => Ok(None),
            status => bail!("GET {path}: {status}: {}", answer.body.trim()),
        }
    }

    /// The objects of the list at a path.
    pub fn list(&self, path: &str) -> Result<Vec<Value>> {
        let list = self.get(path)?.with_context(|| format!("the API server has no {path}"))?;
        Ok(list.get("items").and_then(Value::as_array).cloned().unwrap_or_default())
    }

    /// The text at a path, as a pod's log or `/readyz`.
    pub fn text(&self, path: &str) -> Result<String> {
        let answer = self.request(path)?;
        match answer.status {
            200 => Ok(answer.body),
            status => bail!("GET {path}: {status}: {}", answer.body.trim()),
        }
    }

    fn request(&self, path: &str) -> Result<Answer> {
        let mut stream = UnixStream::connect(&self.socket)
            .with_context(|| format!("no API proxy on {}", self.socket.display()))?;
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        // HTTP/1.0: one answer, not chunked, then the end of the stream.
        stream.write_all(format!("GET {path} HTTP/1.0\r\nHost: localhost\r\nAccept: application/json\r\n\r\n").as_bytes())?;
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).with_context(|| format!("GET {path}"))?;
        parse(&String::from_utf8_lossy(&bytes)).with_context(|| format!("GET {path}: not an HTTP answer"))
    }
}

fn parse(text: &str) -> Option<Answer> {
    let (head, body) = text.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    Some(Answer { status, body: body.to_owned() })
}

/// The value at a path of keys and list positions as `status.conditions.0.type`; `Null` where there is none.
pub fn at<'a>(object: &'a Value, path: &str) -> &'a Value {
    path.split('.').fold(object, |value, key| match key.parse::<usize>() {
        Ok(position) if value.is_array() => value.get(position).unwrap_or(&Value::Null),
        _ => value.get(key).unwrap_or(&Value::Null),
    })
}

/// Whether an object has this condition with status `True`.
pub fn has_condition(object: &Value, name: &str) -> bool {
    let conditions = at(object, "status.conditions").as_array().map_or(&[][..], Vec::as_slice);
    conditions.iter().any(|condition| at(condition, "type") == name && at(condition, "status") == "True")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{Answer, at, has_condition, parse};

    #[test]
    fn an_answer_is_its_status_and_everything_after_the_headers() {
        let text = "HTTP/1.0 404 Not Found\r\nDate: x\r\n\r\n{}\r\n\r\n";
        assert_eq!(parse(text), Some(Answer { status: 404, body: "{}\r\n\r\n".to_owned() }));
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
