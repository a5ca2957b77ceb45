//! Configurations and manifests of other systems: converted, and what comes out run.

use super::cases::served;
use super::*;

/// Converts a text and runs the result, with further manifests, on a node with a label.
async fn converted(line: &str, text: &str, more: &str) -> Report {
    let new = divvy_cli::convert::text("m", text).unwrap();
    of(line, &format!("{new}---\n{more}")).await
}

fn pods(limits: &str, count: usize) -> String {
    let pod = |number| {
        format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: p{number}}}\nspec: {{containers: [{{name: c, image: x, resources: {{limits: \
             {{{limits}}}}}}}]}}\n---\n"
        )
    };
    (0..count).map(pod).collect()
}

/// Returns the devices of all claims that were served.
fn given(report: &Report) -> Vec<String> {
    assert_eq!(report.problems(), Vec::<String>::new());
    let served = served(report);
    let mut devices: Vec<String> = served
        .into_iter()
        .flat_map(|(_, devices)| devices)
        .collect();
    devices.sort();
    devices
}

/// Pods ask for the class of shares by name, as the chart's value makes `nvidia.com/gpu` mean it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn time_slicing_of_the_device_plugin_becomes_shares_that_run() {
    let config = include_str!("../../fixtures/mistakes/time-slicing-of-the-device-plugin.yaml");
    let shares = pods("deviceclass.resource.kubernetes.io/share.divvy.dev: 1", 4);
    let report = converted("l4x1", config, &shares).await;
    assert_eq!(given(&report), ["gpu-0-ts"; 4]);
    // The fifth is one too many for four replicas.
    let more = pods("deviceclass.resource.kubernetes.io/share.divvy.dev: 1", 5);
    let report = converted("l4x1", config, &more).await;
    assert_eq!(report.problems().len(), 1, "{:?}", report.problems());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mps_of_the_device_plugin_becomes_mps_shares_that_run() {
    let config = include_str!("../../fixtures/mistakes/mps-of-the-device-plugin.yaml");
    let shares = pods("deviceclass.resource.kubernetes.io/mps.divvy.dev: 1", 2);
    let report = converted("l4x1", config, &shares).await;
    assert_eq!(given(&report), ["gpu-0-mps"; 2]);
}

/// A policy of mig-parted is for nodes with its label.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_config_of_mig_parted_becomes_partitions_that_run() {
    let config = include_str!("../../fixtures/mistakes/mig-parted.yaml");
    let partitions = pods("nvidia.com/mig-1g.10gb: 1", 3);
    let line = "h100x1 --node-label nvidia.com/mig.config=all-1g.10gb";
    let report = converted(line, config, &partitions).await;
    let devices = given(&report);
    assert_eq!(devices.len(), 3);
    let is_partition = |device: &String| device.starts_with("gpu-0-mig-1g10gb-");
    assert!(devices.iter().all(is_partition), "{devices:?}");
    // Only the profiles of the config are there.
    let other = pods("nvidia.com/mig-3g.40gb: 1", 1);
    let report = converted(line, config, &other).await;
    assert_eq!(report.problems().len(), 1, "{:?}", report.problems());
}

/// Pods for gpu-manager in units of its own, under a policy of shares.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_with_vcuda_resources_become_shares_that_run() {
    let folder = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../cli/fixtures/convert/corpus/others"
    );
    let mps = "apiVersion: divvy.dev/v1beta1\nkind: GpuPolicy\nmetadata: {name: mps}\nspec: {rules: [{modes: [Mps]}]}\n";
    for (file, line, policy, share) in [
        (
            "vcuda-half.yaml",
            "h100x1",
            include_str!("../../../examples/all-modes.yaml"),
            "gpu-0-ts",
        ),
        (
            "vcuda-megabytes.yaml",
            "a10x1 --driver-version 615.71.09",
            mps,
            "gpu-0-mps",
        ),
    ] {
        let text = fs_err::read_to_string(format!("{folder}/{file}")).unwrap();
        let report = converted(line, &text, policy).await;
        let devices = given(&report);
        assert!(!devices.is_empty(), "{file}");
        assert!(
            devices.iter().all(|device| device == share),
            "{file} {devices:?}"
        );
    }
}
