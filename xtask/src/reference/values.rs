//! The chart's values: names and defaults from `values.yaml`, meanings from its comments, what is a
//! value and what a part of one from the schema.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::cell;

const INTRO: &str = "# Values of the chart

With their defaults, from [values.yaml](../../deploy/chart/divvy/values.yaml). `values.schema.json` refuses wrong and unknown values.
";

pub(super) fn page(yaml: &str, schema: &str) -> Result<String> {
    let defaults: Value = serde_saphyr::from_str(yaml).context("values.yaml")?;
    let schema: Value = serde_json::from_str(schema).context("values.schema.json")?;
    let comments = comments(yaml);
    let mut rows = String::new();
    describe(&defaults, &schema, "", &comments, &mut rows)?;
    Ok(format!(
        "{INTRO}\n| value | default | meaning |\n|---|---|---|\n{rows}"
    ))
}

/// Returns the schema with the comment of each value as its description, which editors and Artifact
/// Hub show.
pub(super) fn described(yaml: &str, schema: &str) -> Result<String> {
    let mut schema: Value = serde_json::from_str(schema).context("values.schema.json")?;
    for (path, comment) in comments(yaml) {
        let inner = path.split('.').try_fold(&mut schema, |above, name| {
            above.get_mut("properties")?.get_mut(name)
        });
        let inner = inner.and_then(Value::as_object_mut);
        let inner = inner.with_context(|| format!("the schema lacks {path}"))?;
        inner.insert("description".to_owned(), comment.trim().into());
    }
    Ok(serde_json::to_string_pretty(&schema)? + "\n")
}

fn describe(
    values: &Value,
    schema: &Value,
    path: &str,
    comments: &BTreeMap<String, String>,
    rows: &mut String,
) -> Result<()> {
    for (name, value) in values.as_object().into_iter().flatten() {
        let path = if path.is_empty() {
            name.clone()
        } else {
            format!("{path}.{name}")
        };
        let inner = schema.get("properties").and_then(|all| all.get(name));
        let inner = inner.with_context(|| format!("the schema lacks {path}"))?;
        let comment = comments.get(&path).map(String::as_str).unwrap_or_default();
        let above = path
            .rsplit_once('.')
            .is_some_and(|(above, _)| comments.contains_key(above));
        let leaf = !value.is_object() || inner.get("properties").is_none();
        ensure!(
            !leaf || above || !comment.is_empty(),
            "{path} has no comment in values.yaml"
        );
        if leaf {
            *rows += &format!(
                "| `{path}` | `{}` | {} |\n",
                cell(&value.to_string()),
                cell(comment)
            );
            continue;
        }
        if !comment.is_empty() {
            *rows += &format!("| `{path}` | | {} |\n", cell(comment));
        }
        describe(value, inner, &path, comments, rows)?;
    }
    Ok(())
}

/// Returns the comment above each key, without examples (its lines that are indented or begin with
/// a dash).
fn comments(yaml: &str) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut pending = String::new();
    let mut parent = String::new();
    for line in yaml.lines() {
        let text = line.trim_start();
        if let Some(comment) = text.strip_prefix("# ") {
            if !comment.starts_with("- ") && !comment.starts_with("  ") {
                pending = format!("{pending} {comment}");
            }
        } else if let Some((key, _)) = text.split_once(':').filter(|_| !text.starts_with('-')) {
            let nested = text.len() < line.len();
            let path = if nested {
                format!("{parent}.{key}")
            } else {
                key.to_owned()
            };
            if !nested {
                parent.clone_from(&path);
            }
            let comment = std::mem::take(&mut pending);
            if !comment.is_empty() {
                found.insert(path, comment);
            }
        } else if text.is_empty() {
            pending.clear();
        }
    }
    found
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_schema_says_what_each_value_means() {
        let yaml = "# One.\na:\n  # Inner.\n  b: 1\n";
        let schema = r#"{"properties": {"a": {"properties": {"b": {"description": "Old."}}}}}"#;
        let text = super::described(yaml, schema).unwrap();
        let schema: serde_json::Value = serde_json::from_str(&text).unwrap();
        let at = |path: &str| schema.pointer(path).unwrap();
        assert_eq!(at("/properties/a/description"), "One.");
        assert_eq!(at("/properties/a/properties/b/description"), "Inner.");
        assert!(super::described("# More.\nc: 1\n", &text).is_err());
    }

    #[test]
    fn a_value_has_the_comment_above_it() {
        let yaml = "# The file.\n\n# One,\n# two:\n# - an example\n#   of it\na:\n  # Inner.\n  b: 1\n  c: {d: 2}\n# Last.\ne: []\n";
        let schema =
            r#"{"properties": {"a": {"properties": {"b": {}, "c": {}}}, "e": {"properties": {}}}}"#;
        let text = super::page(yaml, schema).unwrap();
        let rows: Vec<&str> = text
            .lines()
            .filter(|line| line.starts_with("| `"))
            .collect();
        assert_eq!(
            rows,
            [
                "| `a` | | One, two: |",
                "| `a.b` | `1` | Inner. |",
                "| `a.c` | `{\"d\":2}` |  |",
                "| `e` | `[]` | Last. |"
            ]
        );
        assert!(
            super::page("e: []\n", schema).is_err(),
            "a value without a comment"
        );
    }
}
