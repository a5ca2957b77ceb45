//! `cargo xtask reference`: writes the pages of `docs/reference` that follow from code. `cargo
//! xtask check` and tests say when one is not what the code says.

mod attributes;
mod configs;
mod schema;
mod schemas;
mod values;

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::programs::succeeds;
use crate::written::{self, Files};

const FOLDER: &str = "docs/reference";
const SCHEMAS: &str = "docs/schemas";

/// Tests that compare pages about command lines, which this program does not link: crate, test.
const ELSEWHERE: &[(&str, &str)] = &[
    ("divvy-kubelet-plugin", "reference_lists_every_flag"),
    ("divvy", "reference_has_the_help_of_every_command"),
];

/// Writes the pages.
pub(crate) fn run(root: &Path) -> Result<()> {
    written::write(&wanted(root)?)?;
    for (package, test) in ELSEWHERE {
        let mut cargo = Command::new("cargo");
        cargo
            .args(["test", "--quiet", "-p", package, test])
            .env("DIVVY_BLESS", "1")
            .current_dir(root);
        succeeds(&mut cargo)?;
    }
    Ok(())
}

/// Returns the pages with the contents that the code demands.
pub(crate) fn wanted(root: &Path) -> Result<Files> {
    let read = |path: &str| fs_err::read_to_string(root.join(path));
    let fixed = [
        (
            "attributes.md",
            attributes::page(&read("api/src/names.rs")?)?,
        ),
        ("configs.md", configs::page()?),
        (
            "chart-values.md",
            values::page(
                &read("deploy/chart/divvy/values.yaml")?,
                &read("deploy/chart/divvy/values.schema.json")?,
            )?,
        ),
    ];
    let fixed = fixed.into_iter();
    let mut pages: Vec<(String, String)> =
        fixed.map(|(name, text)| (name.to_owned(), text)).collect();
    for (_, definition) in divvy_api::crd::all()? {
        let kind = definition.pointer("/spec/names/singular");
        let kind = kind.and_then(serde_json::Value::as_str);
        let kind = kind.context("a definition without a singular name")?;
        pages.push((format!("{kind}.md"), schema::page(&definition)?));
    }
    let written = |(name, text): (String, String)| {
        let note = "<!-- Written by `cargo xtask reference`. -->\n\n";
        (
            root.join(FOLDER).join(name),
            format!("{note}{}\n", text.trim_end()),
        )
    };
    let mut files: Files = pages.into_iter().map(written).collect();
    for (name, schema) in schemas::all()? {
        let text = serde_json::to_string_pretty(&schema)? + "\n";
        files.push((root.join(SCHEMAS).join(name), text));
    }
    let schema = "deploy/chart/divvy/values.schema.json";
    let described = values::described(&read("deploy/chart/divvy/values.yaml")?, &read(schema)?)?;
    files.push((root.join(schema), described));
    Ok(files)
}

/// Writes a text for a cell of a table.
fn cell(text: &str) -> String {
    text.split_whitespace()
        .collect::<Vec<_>>()
        .join(" ")
        .replace('|', "\\|")
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_pages_are_what_the_code_says() {
        let stale = crate::written::stale(super::wanted(&crate::root()).unwrap());
        assert!(stale.is_empty(), "run `cargo xtask reference`: {stale:?}");
    }
}
