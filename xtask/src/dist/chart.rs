//! The chart as helm packages it, and as an artefact of an OCI registry.

use std::path::Path;
use std::process::Command;
use std::time::SystemTime;

use anyhow::{Context, Result, ensure};
use divvy_e2e::oci::Layout;
use divvy_e2e::parts;
use fs_err as fs;
use serde_json::{Value, json};

use super::VERSION;

/// The line of the values that says where the image is.
const REPOSITORY: &str = "  repository: localhost/divvy\n";

/// Writes the chart, with this repository for the image, as a package and as a layout; the name of
/// the package.
pub(super) fn write(root: &Path, registry: &str, repository: &str, out: &Path) -> Result<String> {
    let staged = tempfile::tempdir()?;
    let chart = staged.path().join("divvy");
    stage(&root.join("deploy/chart/divvy"), &chart, repository)?;
    let mut helm = Command::new(parts::helm()?);
    helm.args([
        "package",
        "--version",
        VERSION,
        "--app-version",
        VERSION,
        "--destination",
    ])
    .arg(out)
    .arg(&chart);
    let done = helm.output().context("helm cannot be started")?;
    ensure!(
        done.status.success(),
        "helm package: {}",
        String::from_utf8_lossy(&done.stderr)
    );
    let package = format!("divvy-{VERSION}.tgz");
    let about: Value = serde_saphyr::from_str(&fs::read_to_string(chart.join("Chart.yaml"))?)?;
    let mut layout = Layout::default();
    let config = layout.blob(
        "application/vnd.cncf.helm.config.v1+json",
        serde_json::to_vec(&about)?,
    );
    let content = layout.blob(
        "application/vnd.cncf.helm.chart.content.v1.tar+gzip",
        fs::read(out.join(&package))?,
    );
    let manifest = layout.manifest(&json!({"config": config, "layers": [content]}))?;
    layout.name(manifest, &format!("{registry}/charts/divvy:{VERSION}"))?;
    layout.write(&out.join("chart"))?;
    Ok(package)
}

/// Copies the chart. Its values name the published image, its README links to nothing outside, and
/// its files are of no time: helm packages the times that it finds.
fn stage(from: &Path, to: &Path, repository: &str) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let (source, target) = {
            let entry = entry?;
            (entry.path(), to.join(entry.file_name()))
        };
        if source.is_dir() {
            stage(&source, &target, repository)?;
            continue;
        }
        let mut text = fs::read_to_string(&source)?;
        if source.ends_with("divvy/values.yaml") {
            ensure!(
                text.contains(REPOSITORY),
                "{}: no line {REPOSITORY:?}",
                source.display()
            );
            text = text.replacen(REPOSITORY, &format!("  repository: {repository}\n"), 1);
        }
        if source.ends_with("divvy/README.md") {
            text = without_links_out(&text);
        }
        fs::write(&target, text)?;
        fs::File::options()
            .write(true)
            .open(&target)?
            .into_parts()
            .0
            .set_modified(SystemTime::UNIX_EPOCH)?;
    }
    Ok(())
}

/// Replaces links that lead out of the chart's folder: a package lacks their targets, so the reader
/// gets the text and the path in the sources.
fn without_links_out(text: &str) -> String {
    let mut made = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("](../") {
        let (Some((head, label)), Some((path, tail))) =
            (before.rsplit_once('['), after.split_once(')'))
        else {
            break;
        };
        let path = path.trim_start_matches("../");
        let path = path.split('#').next().unwrap_or(path);
        made.push_str(head);
        if label == path {
            made.push_str(&format!("`{path}`"));
        } else {
            made.push_str(&format!("{label} (`{path}`)"));
        }
        rest = tail;
    }
    made.push_str(rest);
    made
}

#[cfg(test)]
mod tests {
    use base64::Engine;
    use base64::engine::general_purpose::STANDARD;

    use super::*;

    #[test]
    fn links_out_of_the_chart_become_paths() {
        let text = "a [b c](../../../docs/ui.md#y), [docs/policy.md](../../../docs/policy.md) and [here](#here).";
        assert_eq!(
            without_links_out(text),
            "a b c (`docs/ui.md`), `docs/policy.md` and [here](#here)."
        );
        let path = crate::root().join("deploy/chart/divvy/README.md");
        let readme = without_links_out(&fs_err::read_to_string(path).unwrap());
        assert!(!readme.contains("](../"), "{readme}");
        assert!(readme.contains("`docs/policy.md`"), "{readme}");
    }
    /// Artifact Hub reads an icon from the address itself, so it needs no place on the web.
    #[test]
    fn the_icon_of_the_chart_is_that_of_the_page() {
        let text = |path: &str| fs::read_to_string(crate::root().join(path)).unwrap();
        let about: Value = serde_saphyr::from_str(&text("deploy/chart/divvy/Chart.yaml")).unwrap();
        let icon = about["icon"].as_str().unwrap();
        let icon = icon.strip_prefix("data:image/svg+xml;base64,").unwrap();
        assert_eq!(
            String::from_utf8(STANDARD.decode(icon).unwrap()).unwrap(),
            text("cli/src/ui/page/icon.svg").trim_end()
        );
    }
}
