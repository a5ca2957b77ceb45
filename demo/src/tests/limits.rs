//! Limits of the memory of shares, from the manifest to the container.

use super::cases::{PERCENT, WIDE, pod_with_share};
use super::*;
use crate::render::render;

/// A policy with limits of up to one and a half times the request.
const BURST: &str = "apiVersion: divvy.dev/v1beta1\nkind: GpuPolicy\nmetadata: {name: p}\n\
                     spec: {rules: [{modes: [TimeSlicing], shares: {burst: {memory: 1.5x}}}]}\n---\n";

/// A claim for a share with these requests and a limit, and a pod that has it.
fn limited(requests: &str, selector: &str, limit: &str) -> String {
    let pod = pod_with_share("c", requests);
    let limits = format!(
        "], config: [{{requests: [gpu], opaque: {{driver: gpu.divvy.dev, parameters: {{apiVersion: divvy.dev/v1beta1, \
         kind: ShareConfig, limits: {{memory: {limit}}}}}}}}}]}}}}"
    );
    let pod = pod.replacen("]}}", &limits, 1);
    pod.replacen(
        "deviceClassName: share.divvy.dev,",
        &format!("deviceClassName: share.divvy.dev,{selector}"),
        1,
    )
}

const SELECTS: &str = " selectors: [{cel: {expression: 'device.attributes[\"gpu.divvy.dev\"].memoryLimitMaxPercent >= 150'}}],";
const R615: &str = "h100x1 --driver-version 615.71.09";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_share_runs_with_a_limit_above_its_request() {
    for (policy, requests, limit, shown, bytes) in [
        (
            BURST,
            "memory: 10Gi",
            "15Gi",
            "(10Gi, limit 15 GiB, ",
            15_u64 << 30,
        ),
        (
            BURST,
            "memory: 10Gi",
            "10Gi",
            "(10Gi, limit 10 GiB, ",
            10 << 30,
        ),
    ] {
        let text = policy.to_owned() + &limited(requests, SELECTS, limit);
        let report = of(R615, &text).await;
        assert_eq!(report.problems(), [""; 0], "{limit}");
        let claim = &report.scenarios[0].rounds[0].claims[0];
        let cdi = claim.cdi.as_ref().unwrap().to_string();
        assert!(
            cdi.contains(&format!("DIVVY_MEMORY_LIMIT_GPU_0_TS={bytes}\"")),
            "{cdi}"
        );
        assert!(cdi.contains("createRuntime"), "{cdi}");
        let text = render(&report, WIDE);
        assert!(text.contains(shown), "{text}");
        // A limit that is the request is no news in the picture.
        assert_eq!(
            text.contains(" c, limit 15 GiB\n"),
            limit == "15Gi",
            "{text}"
        );
    }
}

/// Each is found where it can first be known: by the review of the manifest, or by prepare.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_limit_is_reported_with_its_place_and_the_remedy() {
    let refused = "ResourceClaim default/c: spec.devices.config[0].opaque.parameters";
    for (line, policy, selector, requests, limit, expected) in [
        (
            R615,
            BURST,
            SELECTS,
            "memory: 10Gi",
            "9Gi",
            format!("{refused}.limits.memory: 9Gi is below the 10 GiB that request gpu requests"),
        ),
        (
            R615,
            BURST,
            SELECTS,
            "memory: 10Gi",
            "\"16\"",
            format!("{refused}: field \"limits.memory\" is \"16\", expected a whole number with Mi, Gi or Ti"),
        ),
        (
            R615,
            BURST,
            "",
            "memory: 10Gi",
            "16Gi",
            "16Gi is 160 % of the request, and the policies here allow 150 %: raise shares.burst.memory".to_owned(),
        ),
        (
            R615,
            BURST,
            "",
            "memory: 10Gi",
            "90Gi",
            "90Gi is above the 79.6 GiB that the shares of a GPU have together".to_owned(),
        ),
        (
            R615,
            BURST,
            "",
            "memory: 10Gi",
            "12Gi",
            "request gpu does not select shares that allow it, and gets others, too: add the selector \
             device.attributes[\"gpu.divvy.dev\"].memoryLimitMaxPercent >= 120"
                .to_owned(),
        ),
        (
            "h100x1",
            BURST,
            "",
            "memory: 10Gi",
            "12Gi",
            "no node here keeps limits, so a share with one is refused when its pod starts".to_owned(),
        ),
        (
            R615,
            BURST,
            "",
            "memory: 10Gi",
            "16Gi",
            "limits.memory of its config, 16Gi, is above 15Gi, the most that the policy of its GPU allows".to_owned(),
        ),
        (
            "h100x1",
            SHARES,
            "",
            "memory: 10Gi",
            "10Gi",
            "limits.memory of its config cannot be kept on this node: its NVIDIA driver is older than R615".to_owned(),
        ),
    ] {
        let text = policy.to_owned() + &limited(requests, selector, limit);
        let report = of(line, &text).await;
        let shown = render(&report, WIDE);
        // Lines are broken to fit a terminal.
        let words: Vec<&str> = shown.split_whitespace().collect();
        assert!(words.join(" ").contains(&expected), "{expected}\n{shown}");
    }
}

/// A claim for half of any GPU may use three quarters of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_share_by_percent_has_a_limit_in_percent_too() {
    let policy = PERCENT.replace("unit: Percent", "unit: Percent, burst: {memory: 1.5x}");
    assert_ne!(policy, PERCENT);
    let text = policy.clone() + &limited("percent: \"50\"", SELECTS, "75%");
    let shown = render(&of(R615, &text).await, WIDE);
    assert!(
        shown.contains("(50 %, 39.8 GiB, limit 59.7 GiB)"),
        "{shown}"
    );
    let text = policy + &limited("percent: \"50\"", SELECTS, "40%");
    let shown = render(&of(R615, &text).await, WIDE);
    let words: Vec<&str> = shown.split_whitespace().collect();
    let expected = "40% is below the 50 % that request gpu requests";
    assert!(words.join(" ").contains(expected), "{shown}");
}
