//! The publisher's corpus, which its own tests run against the fake API server, against the real
//! one.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::api::at;
use crate::case::Env;
use crate::process::{Signal, output, say};
use crate::programs::workspace;
use crate::wait::poll;

/// Feature gates that the publisher's cases depend on.
const GATES: [&str; 3] = [
    "DRADeviceTaints",
    "DRAPartitionableDevices",
    "DRAConsumableCapacity",
];
/// Where the cases find the API server, inside the cluster's network.
const ADDRESS: &str = "127.0.0.1:8001";

pub(super) fn all(env: &Env) -> Result<()> {
    let program = built()?;
    let proxy = env.cluster.daemon("corpus-proxy");
    let kubectl = env.cluster.parts().bin("kubectl")?.display().to_string();
    let (_, port) = ADDRESS
        .rsplit_once(':')
        .context("an address without a port")?;
    let kubeconfig = format!("--kubeconfig={}", env.cluster.layout().kubeconfig("admin"));
    let args = [
        kubectl,
        "proxy".to_owned(),
        format!("--port={port}"),
        kubeconfig,
    ];
    proxy.define(&args, &[("HOME".to_owned(), "/root".to_owned())])?;
    proxy.start()?;
    let result = run(env, &program);
    proxy.stop(Signal::Term)?;
    result
}

fn run(env: &Env, program: &str) -> Result<()> {
    let readyz = ["wget", "-q", "-O", "-", &format!("http://{ADDRESS}/readyz")];
    poll("proxy to the API server", Duration::from_secs(10), || {
        Ok(output(&mut env.cluster.command("busybox", &readyz))? == "ok")
    })?;
    let metrics = env.api().text("/metrics")?;
    let off: Vec<_> = GATES
        .into_iter()
        .filter(|gate| !is_on(&metrics, gate))
        .collect();
    let args = ["--ignored", "--nocapture", "against_a_real_api_server"];
    let mut command = env.cluster.command(program, &args);
    command
        .env("DIVVY_CORPUS_API", format!("http://{ADDRESS}"))
        .env("DIVVY_CORPUS_OFF", off.join(","));
    let said = output(&mut command)?;
    let summary = said
        .lines()
        .find(|line| line.contains(" passed, skipped: "));
    say(&format!(
        "     corpus: {}",
        summary.context("the corpus does not say how many cases passed")?
    ));
    ensure!(
        said.contains("test result: ok. 1 passed"),
        "the corpus did not run: {said}"
    );
    Ok(())
}

/// Returns true if the API server says that a feature is on.
fn is_on(metrics: &str, gate: &str) -> bool {
    let line = format!("kubernetes_feature_enabled{{name=\"{gate}\"");
    metrics
        .lines()
        .any(|found| found.starts_with(&line) && found.ends_with(" 1"))
}

/// Builds the corpus' test program and returns its path. The whole workspace is selected, so that
/// nothing is built again in another way after `cargo test --workspace`.
fn built() -> Result<String> {
    let mut cargo = Command::new("cargo");
    cargo.args([
        "test",
        "--locked",
        "--workspace",
        "--test",
        "corpus",
        "--no-run",
        "--message-format=json",
    ]);
    let messages = output(cargo.current_dir(workspace()))?;
    let executable = |line: &str| {
        let message: Value = serde_json::from_str(line).ok()?;
        (at(&message, "target.name") == "corpus").then_some(())?;
        at(&message, "executable").as_str().map(str::to_owned)
    };
    messages
        .lines()
        .find_map(executable)
        .context("cargo did not say where the corpus' program is")
}

#[cfg(test)]
mod tests {
    use super::is_on;

    #[test]
    fn a_gate_is_on_if_the_api_server_says_one() {
        let metrics = "kubernetes_feature_enabled{name=\"DRADeviceTaints\",stage=\"BETA\"} 1\n\
                       kubernetes_feature_enabled{name=\"DRADeviceTaintRules\",stage=\"BETA\"} 0\n";
        assert!(is_on(metrics, "DRADeviceTaints"));
        assert!(!is_on(metrics, "DRADeviceTaintRules"));
        assert!(!is_on(metrics, "DRAConsumableCapacity"));
    }
}
