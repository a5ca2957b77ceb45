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

/// Writes the chart, with this repository for the image, as a package and as a layout; the name of the package.
pub(super) fn write(root: &Path, registry: &str, repository: &str, out: &Path) -> Result<String> {
    let staged = tempfile::tempdir()?;
    let chart = staged.path().join("divvy");
    stage(&root.join("deploy/chart/divvy"), &chart, repository)?;
    let mut helm = Command::new(parts::helm()?);
    helm.args(["package", "--version", VERSION, "--app-version", VERSION, "--destination"])
        .arg(out)
        .arg(&chart);
    let done = helm.output().context("helm cannot be started")?;
    ensure!(done.status.success(), "helm package: {}", String::from_utf8_lossy(&done.stderr));
    let package = format!("divvy-{VERSION}.tgz");
    let about: Value = serde_saphyr::from_str(&fs::read_to_string(chart.join("Chart.yaml"))?)?;
    let mut layout = Layout::default();
    let config = layout.blob("application/vnd.cncf.helm.config.v1+json", serde_json::to_vec(&about)?);
    let content =
        layout.blob("application/vnd.cncf.helm.chart.content.v1.tar+gzip", fs::read(out.join(&package))?);
    let manifest = layout.manifest(&json!({"config": config, "layers": [content]}))?;
    layout.name(manifest, &format!("{registry}/charts/divvy:{VERSION}"))?;
    layout.write(&out.join("chart"))?;
    Ok(package)
}

/// Copies the chart. Its values name the published image, and its files are of no time: helm packages the times that it finds.
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
            ensure!(text.contains(REPOSITORY), "{}: no line {REPOSITORY:?}", source.display());
            text = text.replacen(REPOSITORY, &format!("  repository: {repository}\n"), 1);
        }
        fs::write(&target, text)?;
        fs::File::options().write(true).open(&target)?.into_parts().0.set_modified(SystemTime::UNIX_EPOCH)?;
    }
    Ok(())
}
