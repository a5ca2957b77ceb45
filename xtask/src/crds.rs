//! `cargo xtask crds`: writes the chart's CustomResourceDefinitions from `divvy_api::crd`. `cargo
//! xtask check` and a test say when they are not what the types say.

use std::path::Path;

use anyhow::{Context, Result};

use crate::written::Files;

const FOLDER: &str = "deploy/chart/divvy/files/crds";

/// Returns the files with the contents that the types demand.
pub(crate) fn wanted(root: &Path) -> Result<Files> {
    let files = divvy_api::crd::all()?
        .into_iter()
        .map(|(name, definition)| {
            let text =
                serde_saphyr::to_string(&definition).with_context(|| format!("{name} as YAML"))?;
            let text = format!(
                "# Written by `cargo xtask crds` from the types in api/src.\n{}\n",
                text.trim_end()
            );
            Ok((root.join(FOLDER).join(name), text))
        });
    files.collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_charts_definitions_are_what_the_types_say() {
        let stale = crate::written::stale(super::wanted(&crate::root()).unwrap());
        assert!(stale.is_empty(), "run `cargo xtask crds`: {stale:?}");
        for (path, text) in super::wanted(&crate::root()).unwrap() {
            let read: serde_json::Value = serde_saphyr::from_str(&text).unwrap();
            let (_, value) = divvy_api::crd::all()
                .unwrap()
                .into_iter()
                .find(|(name, _)| path.ends_with(name))
                .unwrap();
            assert_eq!(read, value, "{}", path.display());
        }
    }
}
