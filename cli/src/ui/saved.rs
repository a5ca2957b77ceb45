//! A view in a file: what the page's link has saved, of this cluster or of another.

use std::path::Path;

use anyhow::{Context, Result, anyhow};
use serde_json::Value;

use crate::Usage;

/// Reads a view and checks that the page can draw it.
pub(super) fn read(path: &Path) -> Result<Value> {
    let text = fs_err::read_to_string(path).map_err(|error| Usage(format!("--from: {error}")))?;
    let view = serde_json::from_str(&text)
        .map_err(anyhow::Error::from)
        .and_then(checked);
    view.with_context(|| {
        format!(
            "--from {}: no view that `divvy ui` has saved",
            path.display()
        )
    })
}

/// Returns the view, marked as one that is not live, if it has every list that the page goes
/// through.
fn checked(mut view: Value) -> Result<Value> {
    lists(
        &view,
        "",
        &["nodes", "troubles", "refused", "waiting", "unread"],
    )?;
    text(&view, "now")?;
    for (node, at) in entries(&view, "nodes", "") {
        text(node, "name").with_context(|| at.clone())?;
        lists(node, &at, &["gpus"])?;
        for (gpu, at) in entries(node, "gpus", &at) {
            for name in ["name", "uuid", "product", "mode"] {
                text(gpu, name).with_context(|| at.clone())?;
            }
            lists(gpu, &at, &["troubles", "holds"])?;
            for (hold, at) in entries(gpu, "holds", &at) {
                for name in ["namespace", "claim", "device", "part", "phase"] {
                    text(hold, name).with_context(|| at.clone())?;
                }
                lists(hold, &at, &["pods"])?;
            }
        }
    }
    for (claim, at) in entries(&view, "refused", "") {
        for name in ["claim", "reason", "message"] {
            text(claim, name).with_context(|| at.clone())?;
        }
    }
    for (pod, at) in entries(&view, "waiting", "") {
        text(pod, "pod").with_context(|| at.clone())?;
        lists(pod, &at, &["claims"])?;
    }
    for (trouble, at) in entries(&view, "troubles", "") {
        text(trouble, "why").with_context(|| at.clone())?;
    }
    let fields = view.as_object_mut().context("it is no object")?;
    fields.insert("saved".to_owned(), Value::Bool(true));
    Ok(view)
}

/// Returns the entries of a list, each with its path.
fn entries<'v>(of: &'v Value, list: &str, at: &str) -> Vec<(&'v Value, String)> {
    let all = of.get(list).and_then(Value::as_array).into_iter().flatten();
    let at = if at.is_empty() {
        String::new()
    } else {
        format!("{at}.")
    };
    all.enumerate()
        .map(|(number, entry)| (entry, format!("{at}{list}[{number}]")))
        .collect()
}

fn lists(of: &Value, at: &str, names: &[&str]) -> Result<()> {
    for name in names {
        let is_list = of.get(name).is_some_and(Value::is_array);
        if !is_list {
            let at = if at.is_empty() { "the view" } else { at };
            return Err(anyhow!("{at}: it has no list \"{name}\""));
        }
    }
    Ok(())
}

fn text(of: &Value, name: &str) -> Result<()> {
    let found = of.get(name).and_then(Value::as_str);
    found
        .map(drop)
        .with_context(|| format!("it has no text \"{name}\""))
}
