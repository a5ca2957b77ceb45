//! Twelve things that people ask for, each with the devices that it gets.

use super::*;

/// A policy with this mode for every GPU, or for those with a number.
fn policy(rules: &str) -> String {
    format!(
        "apiVersion: divvy.dev/v1beta1\nkind: GpuPolicy\nmetadata: {{name: p}}\nspec: {{rules: [{rules}]}}\n---\n"
    )
}

/// Claims with one request each.
fn claims(requests: &[&str]) -> String {
    let claim = |(number, request): (usize, &&str)| {
        format!(
            "apiVersion: resource.k8s.io/v1\nkind: ResourceClaim\nmetadata: {{name: c{number}}}\nspec: {{devices: {{requests: [{request}]}}}}\n"
        )
    };
    let all: Vec<String> = requests.iter().enumerate().map(claim).collect();
    all.join("---\n")
}

fn request(class: &str, more: &str) -> String {
    format!("{{name: gpu, exactly: {{deviceClassName: {class}{more}}}}}")
}

fn selected(class: &str, expression: &str) -> String {
    request(
        class,
        &format!(", selectors: [{{cel: {{expression: '{expression}'}}}}]"),
    )
}

fn devices(report: &Report) -> Vec<String> {
    let rounds = report
        .scenarios
        .iter()
        .flat_map(|scenario| &scenario.rounds);
    let mut all = Vec::new();
    for claim in rounds.flat_map(|round| &round.claims) {
        if let report::State::Prepared { devices, .. } = &claim.state {
            all.extend(devices.iter().map(|device| device.device.clone()));
        }
    }
    all.sort();
    all
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[expect(clippy::too_many_lines, reason = "a table of cases")]
async fn twelve_asks_get_what_they_ask_for() {
    let everything = policy("{modes: [Whole, Mig, TimeSlicing]}");
    let gpu = "gpu.divvy.dev";
    let share = |amounts: &str| {
        request(
            "share.divvy.dev",
            &format!(", capacity: {{requests: {{{amounts}}}}}"),
        )
    };
    let alternatives = "{name: gpu, firstAvailable: [\
        {name: slice, deviceClassName: mig.divvy.dev}, \
        {name: share, deviceClassName: share.divvy.dev, capacity: {requests: {memory: 10Gi}}}, \
        {name: whole, deviceClassName: gpu.divvy.dev}]}";
    let legacy = "apiVersion: resource.k8s.io/v1\nkind: DeviceClass\nmetadata: {name: by-name}\nspec: {extendedResourceName: \
        nvidia.com/gpu, selectors: [{cel: {expression: 'device.driver == \"gpu.divvy.dev\"'}}]}\n---\n";
    let team = "apiVersion: resource.k8s.io/v1\nkind: DeviceClass\nmetadata: {name: team-a}\nspec: {selectors: [{cel: {expression: \
        'device.driver == \"gpu.divvy.dev\" && device.attributes[\"gpu.divvy.dev\"].productName == \"NVIDIA L4\"'}}]}\n---\n";
    let fifteen = vec![request("share.divvy.dev", ""); 15];
    let fifteen: Vec<&str> = fifteen.iter().map(String::as_str).collect();
    let linked = claims(&[&request(gpu, ", count: 2")]).replace(
        "]}}\n",
        "], constraints: [{matchAttribute: gpu.divvy.dev/nvlinkDomain}]}}\n",
    );
    for (ask, line, text, expected) in [
        (
            "one GPU",
            "h100x2",
            claims(&[&request(gpu, "")]),
            vec!["gpu-1"],
        ),
        (
            "one GPU by its old name",
            "h100x1",
            format!("{legacy}{}", limits("nvidia.com/gpu", "1")),
            vec!["gpu-0"],
        ),
        (
            "two GPUs",
            "h100x2",
            claims(&[&request(gpu, ", count: 2")]),
            vec!["gpu-0", "gpu-1"],
        ),
        (
            "half of the slots of a GPU, twice",
            "h100x1",
            format!(
                "{everything}{}",
                claims(&[&share("slots: 8"), &share("slots: 8")])
            ),
            vec!["gpu-0-ts", "gpu-0-ts"],
        ),
        (
            "10 GiB and a tenth of the cores",
            "h100x1",
            format!(
                "{everything}{}",
                claims(&[&share("memory: 10Gi, cores: 10")])
            ),
            vec!["gpu-0-ts"],
        ),
        (
            "three partitions 1g.10gb",
            "h100x1",
            format!(
                "{everything}{}",
                claims(&[&selected(
                    "mig.divvy.dev",
                    "device.attributes[\"gpu.divvy.dev\"].profile == \"1g.10gb\""
                )
                .replace("exactly: {", "exactly: {count: 3, ")])
            ),
            vec![
                "gpu-0-mig-1g10gb-19-0",
                "gpu-0-mig-1g10gb-19-1",
                "gpu-0-mig-1g10gb-19-2",
            ],
        ),
        (
            "any slice of at least 9 GiB",
            "h100x1",
            format!(
                "{everything}{}",
                claims(&[&selected(
                    "mig.divvy.dev",
                    "device.capacity[\"gpu.divvy.dev\"].memory.compareTo(quantity(\"9Gi\")) >= 0"
                )])
            ),
            vec!["gpu-0-mig-1g10gb-19-0"],
        ),
        (
            "an H100 only",
            "l4x1,h100x1",
            claims(&[&selected(
                gpu,
                "device.attributes[\"gpu.divvy.dev\"].productName.startsWith(\"NVIDIA H100\")",
            )]),
            vec!["gpu-1"],
        ),
        ("two by NVLink", "h100x2", linked, vec!["gpu-0", "gpu-1"]),
        (
            "a slice, else a share, else a whole GPU: a share where there is no MIG",
            "l40sx1",
            format!("{everything}{}", claims(&[alternatives])),
            vec!["gpu-0-ts"],
        ),
        (
            "the same without a policy",
            "l40sx1",
            claims(&[alternatives]),
            vec!["gpu-0"],
        ),
        (
            "GPU 0 shared, the rest whole",
            "h100x3",
            format!(
                "{}{}",
                policy("{gpus: {ordinals: [0]}, modes: [TimeSlicing]}, {modes: [Whole]}"),
                claims(&[&request(gpu, ", count: 2"), &share("memory: 10Gi")])
            ),
            vec!["gpu-0-ts", "gpu-1", "gpu-2"],
        ),
        (
            "fifteen replicas",
            "h100x1",
            format!("{everything}{}", claims(&fifteen)),
            vec!["gpu-0-ts"; 15],
        ),
        (
            "own GPUs for a team",
            "h100x1,l4x1",
            format!("{team}{}", claims(&[&request("team-a", "")])),
            vec!["gpu-0"],
        ),
    ] {
        let report = of(line, &text).await;
        assert_eq!(report.problems(), Vec::<String>::new(), "{ask}: {text}");
        assert_eq!(super::asks::devices(&report), expected, "{ask}");
    }
}
