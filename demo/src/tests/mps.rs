//! MPS shares: what is asked for wrongly is refused with the message and the place.

use super::*;
use crate::report::State;

const POLICY: &str = "
apiVersion: divvy.dev/v1beta1
kind: GpuPolicy
metadata: {name: m}
spec: {rules: [{modes: [Whole, Mps], shares: {slots: 4}}]}
";

/// A claim of MPS shares, with this more of `devices` and of the request, in flow style.
fn claim(requests: &[&str], more: &str) -> String {
    let request = |more: &&str| {
        let name = char::from(b'a' + u8::try_from(more.len() % 26).unwrap());
        format!("{{name: \"{name}\", exactly: {{deviceClassName: mps.divvy.dev{more}}}}}")
    };
    let requests: Vec<String> = requests.iter().map(request).collect();
    format!(
        "---\napiVersion: resource.k8s.io/v1\nkind: ResourceClaim\nmetadata: {{name: c}}\n\
         spec: {{devices: {{requests: [{}]{more}}}}}\n",
        requests.join(", ")
    )
}

fn config(fields: &str) -> String {
    format!(
        ", config: [{{opaque: {{driver: gpu.divvy.dev, parameters: {{apiVersion: divvy.dev/v1beta1, kind: MpsConfig, {fields}}}}}}}]"
    )
}

/// All that is said against it.
async fn said(line: &str, text: &str) -> String {
    let report = of(line, text).await;
    let rounds = report.scenarios.iter().flat_map(|s| &s.rounds);
    let claims = rounds.flat_map(|round| &round.claims);
    let of_claims = claims.filter_map(|claim| match &claim.state {
        State::Prepared { .. } => None,
        State::Pending { reason, .. } | State::Failed { reason } => Some(reason.clone()),
    });
    let mut all: Vec<String> = of_claims.chain(report.problems()).collect();
    all.extend(report.notes.iter().cloned());
    all.join("\n")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_mps_share_is_refused_with_the_place_and_the_reason() {
    let plain = |more: &str| POLICY.to_owned() + &claim(&[""], more);
    for (line, text, words) in [
        (
            "h100x1",
            plain(&config("limits: {cores: 0}")),
            "spec.devices.config[0].opaque.parameters: field \"limits.cores\" is \"0\"",
        ),
        (
            "h100x1",
            plain(&config("limits: {memory: 10}")),
            "field \"limits.memory\" is a number, expected a string",
        ),
        (
            "h100x1",
            plain(&config("limits: {cores: 50}")),
            "each of 4 equal slots has 25 percent of the threads and 20389Mi",
        ),
        (
            "h100x1",
            POLICY.to_owned() + &claim(&[", capacity: {requests: {slots: 2}}"], ""),
            "at most 1 slots to one request",
        ),
        (
            "h100x1",
            POLICY.to_owned() + &claim(&[", capacity: {requests: {memory: 1Gi}}"], ""),
            "no capacity \"memory\"; there are slots",
        ),
        (
            "h100x2",
            POLICY.to_owned()
                + &claim(
                    &["", " "],
                    ", constraints: [{distinctAttribute: gpu.divvy.dev/gpuUUID}]",
                ),
            "its claim has MPS on device gpu-0-mps already, and a program can use the MPS server of one GPU or partition",
        ),
        // Before Hopper, MIG mode that is on stays on.
        (
            "a100-40x1 --mig-on all",
            plain(""),
            "its MIG mode changes only with a GPU reset",
        ),
        // A rule has to name it.
        (
            "h100x1",
            plain("")
                .replace("[Whole, Mps]", "[Whole]")
                .replace(", shares: {slots: 4}", ""),
            "A GpuPolicy with modes: [Mps] offers them: add -f examples/mps-share/manifests.yaml",
        ),
    ] {
        let said = said(line, &text).await;
        assert!(said.contains(words), "{words}: {said}");
    }
    let equal = plain(&config("limits: {cores: 25}, priority: BelowNormal"));
    assert_eq!(said("h100x1", &equal).await, "");
}

/// A claim of whole GPUs whose config has `mps`.
fn own(count: usize, fields: &str) -> String {
    let config = config(fields).replace("MpsConfig", "GpuConfig");
    claim(&[""], &config).replace("mps.divvy.dev", &format!("gpu.divvy.dev, count: {count}"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_with_a_server_of_its_own_needs_no_policy() {
    let right = own(1, "mps: {limits: {cores: 50, memory: 10Gi}}");
    assert_eq!(said("h100x1", &right).await, "");
    for (line, text, words) in [
        (
            "h100x2",
            own(2, "mps: {}"),
            "its claim has MPS on device gpu-1 already, and a program can use the MPS server of one GPU or partition",
        ),
        (
            "h100x1",
            own(1, "mps: {}, timeSlicing: {interval: Short}"),
            "field \"mps\" and field \"timeSlicing\" exclude each other",
        ),
        (
            "h100x1 --driver-version 530.30.02",
            own(1, "mps: {}"),
            "its config asks for an MPS server, which cannot be had here: its NVIDIA driver is older than R535",
        ),
    ] {
        let said = said(line, &text).await;
        assert!(said.contains(words), "{words}: {said}");
    }
}

/// With protocol v3 a share has a namespace of its own size.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_r615_shares_have_the_size_that_they_ask_for() {
    const R615: &str = "h100x1 --driver-version 615.71.09";
    let part = |amounts: &str| format!(", capacity: {{requests: {{{amounts}}}}}");
    let asked = |amounts: &str, more: &str| POLICY.to_owned() + &claim(&[&part(amounts)], more);
    for text in [
        asked("memory: 10Gi, cores: 30", ""),
        asked("memory: 10Gi, cores: 30", &config("limits: {cores: 50}")),
        asked(
            "memory: 10Gi",
            &config("limits: {memory: 10Gi}, priority: BelowNormal"),
        ),
        own(1, "mps: {limits: {cores: 50}}"),
    ] {
        assert_eq!(said(R615, &text).await, "", "{text}");
    }
    for (text, words) in [
        (
            asked("cores: 30", &config("limits: {cores: 29}")),
            "limits.cores of its MpsConfig, 29, is below the 30 percent that its share has been granted",
        ),
        (
            asked("memory: 10Gi", &config("limits: {memory: 9Gi}")),
            "limits.memory of its config, 9Gi, is below the 10Gi that its share has been granted",
        ),
        (
            asked("memory: 10Gi", &config("limits: {memory: 11Gi}")),
            "limits.memory of its config, 11Gi, is above 10Gi, the most that the policy of its GPU allows",
        ),
        (asked("memory: 100Gi", ""), "memory"),
    ] {
        let said = said(R615, &text).await;
        assert!(said.contains(words), "{words}: {said}");
    }
    // The sums of a GPU are the scheduler's.
    let two = POLICY.to_owned() + &claim(&[&part("cores: 60"), &part("cores: 60, slots: 1")], "");
    let said = said(R615, &two).await;
    assert!(said.contains("but not all together"), "{said}");
}
