//! Every alert of `deploy/chart/divvy/files/divvy.rules.yaml` on the plugin's metrics fires in a
//! plugin's life that causes it, and not in a calm one. Alerts on metrics of other programs are
//! tested end to end, with a Prometheus.

use std::time::Duration;

use divvy_fake_cluster::Fault as ApiFault;
use divvy_gpu_sim::Fault;
use divvy_model::health::RecoveryAction;
use divvy_model::{GpuErrorCode, GpuOp};
use divvy_telemetry::MetricsRegistry;

use crate::node::{Node, PATIENCE, wait};
use crate::records::{make_newer, record};

/// Name and expression of each alert; an expression of several lines is `>-`.
fn alerts() -> Vec<(String, String)> {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../deploy/chart/divvy/files/divvy.rules.yaml"
    );
    let text = fs_err::read_to_string(path).unwrap();
    let field = |line: &str, key: &str| line.trim().strip_prefix(key).map(|v| v.trim().to_owned());
    // The expression follows the name; what is recorded is no alert.
    let lines: Vec<&str> = text.lines().collect();
    let pairs = lines.iter().zip(lines.iter().skip(1));
    pairs
        .filter_map(|(one, next)| Some((field(one, "- alert:")?, field(next, "expr:").unwrap())))
        .collect()
}

/// Returns true if `metric{label="value"} == number` (or `>`) holds for any series. An increase
/// since a plugin began is its counter's value, since that began at zero.
fn holds(term: &str, metrics: &str) -> bool {
    let (series, number) = term.rsplit_once(' ').unwrap();
    let (series, operator) = series.rsplit_once(' ').unwrap();
    let series = series
        .trim()
        .strip_prefix("increase(")
        .map_or(series, |s| s.split('[').next().unwrap());
    let (name, labels) = series.trim().split_once('{').unwrap_or((series.trim(), ""));
    let labels: Vec<&str> = labels
        .trim_end_matches('}')
        .split(',')
        .filter(|label| !label.is_empty())
        .collect();
    let number: f64 = number.parse().unwrap();
    metrics.lines().any(|line| {
        let fits = line
            .strip_prefix(name)
            .is_some_and(|rest| rest.starts_with(['{', ' ']))
            && labels.iter().all(|label| line.contains(label));
        let value: Option<f64> = line.rsplit(' ').next().and_then(|value| value.parse().ok());
        assert!(
            ["==", ">"].contains(&operator),
            "{operator} is not understood"
        );
        let is = |value: f64| {
            if operator == ">" {
                value > number
            } else {
                (value - number).abs() < f64::EPSILON
            }
        };
        fits && value.is_some_and(is)
    })
}

/// Alerts whose expression holds.
fn firing(metrics: &MetricsRegistry) -> Vec<String> {
    firing_on(&metrics.encode())
}

fn firing_on(text: &str) -> Vec<String> {
    let ours = alerts()
        .into_iter()
        .filter(|(_, expr)| expr.contains("divvy_"));
    ours.filter(|(_, expr)| expr.split(" and ").all(|term| holds(term, text)))
        .map(|(name, _)| name)
        .collect()
}

/// The alert of MPS servers that serve no program, which fires in `mps.rs`.
pub(crate) const MPS_WEDGED: &str = "DivvyMpsWedged";

/// Waits until exactly these fire.
pub(crate) async fn fires(metrics: &MetricsRegistry, expected: &[&str]) {
    let until = tokio::time::Instant::now() + PATIENCE;
    while firing(metrics) != expected {
        assert!(
            tokio::time::Instant::now() < until,
            "{:?} fire, not {expected:?}",
            firing(metrics)
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[test]
fn each_alert_has_a_runbook_and_a_test() {
    let here = include_str!("alerts.rs");
    let end_to_end = include_str!("../../../tests/e2e/src/cases/shares/prometheus.rs");
    let runbooks = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/runbooks/README.md");
    let runbooks = fs_err::read_to_string(runbooks).unwrap();
    for (name, expr) in alerts() {
        let this = if expr.contains("divvy_") {
            here
        } else {
            end_to_end
        };
        assert!(this.contains(&format!("\"{name}\"")), "{name} has no test");
        assert!(runbooks.contains(&name), "{name} has no runbook");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn none_fires_while_claims_come_and_go_and_a_sick_gpu_fires_one() {
    let node = Node::new("h100x2");
    let plugin = node.start().await;
    let claim = node.claim("c", &["gpu-0"]);
    node.prepare(&claim).await.unwrap();
    node.unprepare(&claim).await.unwrap();
    fires(&plugin.metrics, &[]).await;
    let gpu = node.sim.uuids().remove(0);
    node.sim
        .edit(|e| e.set_recovery(&gpu, Some(RecoveryAction::Reset)))
        .unwrap();
    fires(&plugin.metrics, &["DivvyGpuUnhealthy"]).await;
    node.sim
        .edit(|e| e.set_recovery(&gpu, Some(RecoveryAction::Nothing)))
        .unwrap();
    fires(&plugin.metrics, &[]).await;
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_and_a_partition_that_vanish_fire_held_or_not() {
    let node = Node::new("h100x3");
    let plugin = node.start_with(node.config(&["--offer", "everything"]));
    plugin.wait_ready().await;
    let gpus = node.sim.uuids();
    let firing_for = |gpu: &divvy_model::GpuUuid, ailment: &str| {
        let labels = format!("UUID=\"{gpu}\"");
        let text = plugin.metrics.encode();
        let mut of_gpu = text.lines().filter(|line| line.contains(&labels));
        of_gpu.any(|line| line.contains(&format!("ailment=\"{ailment}\"")))
    };
    let claim = node.claim("whole", &["gpu-0"]);
    let part = node.claim("part", &["gpu-1-mig-1g10gb-19-0"]);
    for claim in [&claim, &part] {
        node.prepare(claim).await.unwrap();
    }
    fires(&plugin.metrics, &[]).await;
    // No claim holds it.
    let board = node.sim.remove_gpu(&gpus[2]).unwrap();
    fires(&plugin.metrics, &["DivvyGpuUnhealthy"]).await;
    assert!(firing_for(&gpus[2], "gpu-removed"));
    node.sim.edit(|e| e.insert_gpu(board));
    fires(&plugin.metrics, &[]).await;

    let board = node.sim.remove_gpu(&gpus[0]).unwrap();
    fires(
        &plugin.metrics,
        &["DivvyGpuUnhealthy", "DivvyClaimDeviceGone"],
    )
    .await;
    node.sim.edit(|e| e.insert_gpu(board));
    fires(&plugin.metrics, &[]).await;

    node.sim.edit(|e| e.reset_gpu(&gpus[1])).unwrap();
    fires(
        &plugin.metrics,
        &["DivvyGpuUnhealthy", "DivvyClaimDeviceGone"],
    )
    .await;
    assert!(firing_for(&gpus[1], "partition-gone"));
    node.unprepare(&part).await.unwrap();
    fires(&plugin.metrics, &[]).await;
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fence_a_lingering_claim_and_failing_prepares_fire() {
    let node = Node::new("h100x2");
    let plugin = node.start().await;
    let newer = node.claim("newer", &["gpu-1"]);
    node.prepare(&newer).await.unwrap();
    plugin.stop().await;
    make_newer(&record(&node, &newer.uid));
    let plugin = node.start().await;
    fires(&plugin.metrics, &["DivvyGpuFenced"]).await;

    let claim = node.claim("c", &["gpu-0"]);
    node.prepare(&claim).await.unwrap();
    node.sim.start_process(&node.sim.uuids()[0], 4711);
    node.unprepare(&claim).await.unwrap();
    fires(&plugin.metrics, &["DivvyGpuFenced", "DivvyClaimLingers"]).await;

    node.prepare(&node.claim("bad", &["gpu-9"]))
        .await
        .unwrap_err();
    fires(
        &plugin.metrics,
        &["DivvyGpuFenced", "DivvyClaimLingers", "DivvyPrepareFails"],
    )
    .await;
    node.sim.end_process(4711);
    fires(&plugin.metrics, &["DivvyGpuFenced", "DivvyPrepareFails"]).await;
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unprepare_that_cannot_write_fires() {
    let node = Node::new("h100x1");
    let plugin = node.start().await;
    let claim = node.claim("c", &["gpu-0"]);
    node.prepare(&claim).await.unwrap();
    // A folder where the file of an unprepare's mark or record has to go.
    let dir = node.kubelet.config().plugin_dir(crate::node::DRIVER);
    fs_err::rename(dir.join("claims"), dir.join("claims.away")).unwrap();
    fs_err::write(dir.join("claims"), "not a folder").unwrap();
    node.unprepare(&claim).await.unwrap_err();
    wait("the alert", || {
        firing(&plugin.metrics)
            .contains(&"DivvyUnprepareFails".to_owned())
            .then_some(())
    })
    .await;
    fs_err::remove_file(dir.join("claims")).unwrap();
    fs_err::rename(dir.join("claims.away"), dir.join("claims")).unwrap();
    node.unprepare(&claim).await.unwrap();
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_driver_that_goes_and_slices_that_are_refused_fire() {
    let node = Node::new("h100x2");
    let plugin = node.start().await;
    let gone = node
        .sim
        .fault(Fault::fail(GpuErrorCode::DRIVER_NOT_LOADED).of(GpuOp::List));
    wait("the alert", || {
        firing(&plugin.metrics)
            .contains(&"DivvyDriverDown".to_owned())
            .then_some(())
    })
    .await;
    let _ = gone;
    node.sim.clear_faults();
    fires(&plugin.metrics, &[]).await;

    for verb in ["create", "update", "delete"] {
        node.api
            .fail_next(10_000, verb, "resourceslices", ApiFault::Status(403));
    }
    node.sim
        .add_gpu(divvy_gpu_sim::profile("l4").unwrap())
        .unwrap();
    fires(&plugin.metrics, &["DivvySlicesNotPublished"]).await;
    node.api.clear_faults();
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kubelet_that_does_not_come_fires() {
    let node = Node::new("h100x1");
    let elsewhere = node.dir.path().join("not-watched");
    fs_err::create_dir_all(&elsewhere).unwrap();
    let mut config = node.config(&[]);
    let socket = config.sockets.registration.file_name().unwrap().to_owned();
    config.sockets.registration = elsewhere.join(&socket);
    let plugin = node.start_with(config);
    wait("the driver", || {
        plugin
            .metrics
            .encode()
            .contains("divvy_driver_up 1")
            .then_some(())
    })
    .await;
    fires(&plugin.metrics, &["DivvyNotRegistered"]).await;
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_share_over_its_grant_and_a_claim_that_is_idle_fire() {
    let node = Node::new("l4x1");
    let plugin = node.start_with(node.config(&["--offer", "everything"]));
    plugin.wait_ready().await;
    let gpu = node.sim.uuids().remove(0);
    crate::usage::share(&node, 0, 1).await;
    node.sim.set_usage(&gpu, 1, Some(6 << 30), 30);
    fires(&plugin.metrics, &["DivvyClaimOverGrant"]).await;
    node.sim.set_usage(&gpu, 1, Some(1 << 30), 0);
    let idle = || {
        plugin
            .metrics
            .encode()
            .lines()
            .find(|l| l.starts_with("divvy_claim_idle_seconds{"))
            .map(str::to_owned)
    };
    let counts = |line: &String| {
        line.rsplit(' ')
            .next()
            .is_some_and(|value| value.parse::<f64>().unwrap() > 0.0)
    };
    let line = wait("an idle claim", || idle().filter(counts)).await;
    fires(&plugin.metrics, &[]).await;
    // An hour later.
    let (series, _) = line.rsplit_once(' ').unwrap();
    assert_eq!(firing_on(&format!("{series} 3601.0")), ["DivvyClaimIdle"]);
    plugin.stop().await;
}
