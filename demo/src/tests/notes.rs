//! Notes on what a cluster takes although it is hardly meant, by the review alone.

use super::*;

/// Returns the notes about a manifest.
fn notes_on(text: &str) -> String {
    let example = Example::parse("m", text).unwrap();
    let known = review::Known::of(divvy_api::names::DRIVER, &[], []);
    review::review(&example.manifests, &known)
        .doubtful
        .join("\n")
}

#[test]
fn an_update_that_never_ends_is_noted_where_a_pod_has_a_gpu_alone() {
    let what = "spec.strategy: an update makes a new pod";
    let gpu = "nvidia.com/gpu: 1";
    for (fields, limit, noted) in [
        ("", gpu, true),
        ("replicas: 3", gpu, true),
        ("replicas: 4", gpu, false),
        (
            "strategy: {type: RollingUpdate, rollingUpdate: {maxUnavailable: 0}}",
            gpu,
            true,
        ),
        (
            "strategy: {type: RollingUpdate, rollingUpdate: {maxUnavailable: 1}}",
            gpu,
            false,
        ),
        (
            "strategy: {type: RollingUpdate, rollingUpdate: {maxUnavailable: 100%}}",
            gpu,
            false,
        ),
        (
            "strategy: {type: RollingUpdate, rollingUpdate: {maxSurge: 0}}",
            gpu,
            false,
        ),
        ("strategy: {type: Recreate}", gpu, false),
        ("", "nvidia.com/mig-1g.10gb: 1", true),
        ("", "cpu: 1", false),
    ] {
        let notes = notes_on(&deployment(fields, limit));
        assert_eq!(notes.contains(what), noted, "{fields} {limit}: {notes}");
    }
}

#[test]
fn devices_that_one_container_cannot_use_together_are_noted() {
    let claim = |name: &str, class: &str, more: &str| {
        format!(
            "apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {{name: {name}}}
spec: {{devices: {{requests: [{{name: r, exactly: {{deviceClassName: {class}}}}}]{more}}}}}
---
"
        )
    };
    let by_mps = ", config: [{opaque: {driver: gpu.divvy.dev, parameters: {apiVersion: divvy.dev/v1beta1, kind: GpuConfig, mps: {}}}}]";
    let claims = [
        claim("gpu", "gpu.divvy.dev", ""),
        claim("served", "gpu.divvy.dev", by_mps),
        claim("mig", "mig.divvy.dev", ""),
        claim("other-mig", "mig-1g.10gb.divvy.dev", ""),
        claim("mps", "mps.divvy.dev", ""),
        claim("share", "share.divvy.dev", ""),
    ]
    .concat();
    for (used, limits, expected) in [
        (&["mig"][..], "", None),
        (
            &["mig", "other-mig"],
            "",
            Some("2 partitions in one container"),
        ),
        (
            &[],
            "nvidia.com/mig-1g.10gb: 2",
            Some("2 partitions in one container"),
        ),
        (&["mig"], "nvidia.com/mig-2g.20gb: 1", Some("2 partitions")),
        (&["mig", "share"], "", Some("a partition and a GPU")),
        (&["gpu", "share"], "", None),
        (&["mps"], "", None),
        (&["mps", "served"], "", Some("2 MPS servers")),
        (
            &["served", "gpu"],
            "",
            Some("a device with an MPS server and others"),
        ),
        (&["gpu"], "nvidia.com/gpu: 2", None),
    ] {
        let entry = |name: &&str| format!("{{name: {name}, resourceClaimName: {name}}}");
        let entries: Vec<String> = used.iter().map(entry).collect();
        let names: Vec<String> = used
            .iter()
            .map(|name| format!("{{name: {name}}}"))
            .collect();
        let text = format!(
            "{claims}apiVersion: v1\nkind: Pod\nmetadata: {{name: p}}\nspec:\n  resourceClaims: [{}]\n  containers: [{{name: c, image: x, \
             resources: {{claims: [{}], limits: {{{limits}}}}}}}]\n",
            entries.join(", "),
            names.join(", ")
        );
        let notes = notes_on(&text);
        let found = notes
            .lines()
            .filter(|note| note.contains("one container"))
            .count();
        assert_eq!(
            found,
            usize::from(expected.is_some()),
            "{used:?} {limits}: {notes}"
        );
        assert!(
            expected.is_none_or(|expected| notes.contains(expected)),
            "{notes}"
        );
    }
}
