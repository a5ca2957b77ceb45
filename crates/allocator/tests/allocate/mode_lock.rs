//! The mode lock: everything a GPU can become draws on one counter set, so the first claim decides.
//!
//! The cases are those that were run on real schedulers of 1.36.4 and 1.37.1.

use super::*;

const GPU: &str = "driver-a/gpu";

/// Devices that a GPU offers: the whole, a time-sliced and an MPS share, the halves, 1g placements
/// and their shared twins.
fn alternatives(gpu: usize) -> Vec<Device> {
    let slices: Vec<String> = (0..8).map(|i| format!("slice-{i}")).collect();
    let draws = |kind: &str, name: String, from: usize, to: usize, compute: &str| {
        let memory = slices
            .iter()
            .enumerate()
            .filter(|(i, _)| (from..to).contains(i))
            .map(|(_, s)| (s.as_str(), "1"));
        let all: Vec<(&str, &str)> = memory.chain([("compute", compute)]).collect();
        let device = Device {
            name: format!("gpu-{gpu}{name}"),
            ..Device::default()
        };
        let device = with_attribute(device, "gpu", text(&format!("GPU-{gpu}")));
        drawing(
            with_attribute(device, "kind", text(kind)),
            &format!("gpu-{gpu}"),
            &all,
        )
    };
    let open = |device, memory: &str, most: &str| {
        let memory = ranged(memory, "1Gi", "1Mi", most, "1Mi");
        shared(
            device,
            &[
                ("memory", memory),
                ("cores", ranged("100", "0", "0", "100", "1")),
                ("slots", ranged("8", "1", "1", "1", "")),
            ],
        )
    };
    let mut all = vec![
        having(
            draws("whole", String::new(), 0, 8, "7"),
            &[("memory", amount("80Gi"))],
        ),
        open(draws("ts", "-ts".to_owned(), 0, 8, "7"), "80Gi", "80Gi"),
        open(draws("mps", "-mps".to_owned(), 0, 8, "7"), "80Gi", "80Gi"),
    ];
    for placement in 0..7 {
        let draw = |kind, name| draws(kind, name, placement, placement + 1, "1");
        all.push(draw("1g", format!("-1g-{placement}")));
        all.push(open(
            draw("twin", format!("-1g-{placement}-ts")),
            "10Gi",
            "10Gi",
        ));
    }
    all.extend([0, 4].map(|placement| {
        draws(
            "3g",
            format!("-3g-{placement}"),
            placement,
            placement + 4,
            "3",
        )
    }));
    all
}

fn node(gpus: usize) -> World {
    let names: Vec<String> = (0..gpus).map(|gpu| format!("gpu-{gpu}")).collect();
    let slices: Vec<String> = (0..8).map(|i| format!("slice-{i}")).collect();
    let counters: Vec<(&str, &str)> = slices
        .iter()
        .map(|s| (s.as_str(), "1"))
        .chain([("compute", "7")])
        .collect();
    let all: Vec<(&str, &[(&str, &str)])> = names
        .iter()
        .map(|n| (n.as_str(), counters.as_slice()))
        .collect();
    let mut pool: Vec<ResourceSlice> = (0..gpus).map(|gpu| slice_of(alternatives(gpu))).collect();
    pool.push(sets(&all));
    let mut world = World::new(one_pool(pool), Vec::new());
    for kind in ["whole", "ts", "mps", "1g", "3g", "twin"] {
        let mut class = class(kind, DRIVER_A);
        class.spec.as_mut().unwrap().selectors = Some(vec![selector(&format!(
            r#"device.attributes["driver-a"].kind == "{kind}""#
        ))]);
        world.classes.push(class);
    }
    world
}

/// A claim for one device of a kind.
fn one(name: &str, kind: &str) -> Vec<ResourceClaim> {
    vec![claim(name, vec![request("r", kind, 1)])]
}

/// A claim for a share of so much memory.
fn share(name: &str, kind: &str, memory: &str) -> Vec<ResourceClaim> {
    vec![claim(
        name,
        vec![wanting("r", kind, 1, &[("memory", memory)])],
    )]
}

/// The devices of an answer, without names of requests, amounts and place.
fn devices(answer: &str) -> String {
    let words = answer
        .split([' ', '|'])
        .filter_map(|word| word.split_once('='));
    let devices: Vec<&str> = words.map(|(_, d)| d.split('{').next().unwrap()).collect();
    if devices.is_empty() {
        answer.to_owned()
    } else {
        devices.join(" ")
    }
}

#[test]
fn two_shares_fit_and_a_third_over_memory_goes_to_the_next_gpu() {
    let mut node = node(2);
    assert_eq!(
        node.place(share("a", "ts", "30Gi")),
        "r=gpu-0-ts{cores=0,memory=30Gi,slots=1} @node-1"
    );
    assert_eq!(devices(&node.place(share("b", "ts", "40Gi"))), "gpu-0-ts");
    assert_eq!(devices(&node.place(share("c", "ts", "20Gi"))), "gpu-1-ts");
    let ids: Vec<String> = node
        .held
        .iter()
        .filter_map(|c| c.status.clone()?.allocation?.devices?.results)
        .flatten()
        .map(|r| r.share_id.unwrap())
        .collect();
    assert!(ids[0] != ids[1] && ids[1] != ids[2], "{ids:?}");

    // While both GPUs hold shares, nothing else fits on either.
    for kind in ["whole", "mps", "1g", "3g", "twin"] {
        assert_eq!(
            devices(&node.place(one("x", kind))),
            "does not fit",
            "{kind}"
        );
    }
    // The last share of gpu-1 goes: it can be whole again.
    node.release("c");
    assert_eq!(devices(&node.place(one("w1", "whole"))), "gpu-1");
    // The first of two shares of gpu-0 goes, then the last.
    node.release("a");
    assert_eq!(devices(&node.place(one("w0", "whole"))), "does not fit");
    node.release("b");
    assert_eq!(devices(&node.place(one("w0", "whole"))), "gpu-0");
}

#[test]
fn a_share_over_memory_cores_or_slots_is_refused_with_the_amounts() {
    let mut node = node(1);
    let cores = |name: &str, cores: &str| {
        vec![claim(
            name,
            vec![wanting("r", "ts", 1, &[("cores", cores)])],
        )]
    };
    assert_eq!(devices(&node.place(cores("a", "50"))), "gpu-0-ts");
    assert_eq!(devices(&node.place(cores("b", "40"))), "gpu-0-ts");
    node.claims = cores("c", "20");
    let text = detail(&node.explanation());
    assert!(
        text.contains("1 device is short of cores (20 requested, 10 left, shared by claim default/a, default/b): gpu-0-ts"),
        "{text}"
    );
    assert!(
        text.contains("hint: devices become free when the pods that use default/a, default/b end"),
        "{text}"
    );
    node.claims = share("c", "ts", "79Gi");
    let text = detail(&node.explanation());
    assert!(
        text.contains("short of memory (79Gi requested, 78Gi left"),
        "{text}"
    );
    for more in 0..6 {
        assert_eq!(
            devices(&node.place(one(&format!("more-{more}"), "ts"))),
            "gpu-0-ts"
        );
    }
    node.claims = one("ninth", "ts");
    let text = detail(&node.explanation());
    assert!(
        text.contains("short of slots (1 requested, 0 left"),
        "{text}"
    );
}

#[test]
fn another_mode_is_refused_while_shares_run_with_the_holders_of_the_gpu() {
    let mut node = node(1);
    node.place(share("a", "ts", "30Gi"));
    node.place(share("b", "ts", "30Gi"));
    node.claims = one("x", "whole");
    let text = detail(&node.explanation());
    assert!(
        text.contains("1 device is blocked by devices in use (counter set gpu-0: gpu-0 needs compute 7, left 0, held by claim default/a, default/b): gpu-0"),
        "{text}"
    );
    assert!(
        text.ends_with("hint: devices become free when the pods that use default/a, default/b end"),
        "{text}"
    );
}

#[test]
fn twins_share_a_placement_and_everything_else_goes_beside_it() {
    let mut node = node(2);
    assert_eq!(devices(&node.place(one("a", "twin"))), "gpu-0-1g-0-ts");
    assert_eq!(
        devices(&node.place(one("b", "twin"))),
        "gpu-0-1g-0-ts",
        "the same twin"
    );
    assert_eq!(
        devices(&node.place(one("c", "1g"))),
        "gpu-0-1g-1",
        "the next placement"
    );
    assert_eq!(
        devices(&node.place(one("d", "3g"))),
        "gpu-0-3g-4",
        "the other half"
    );
    assert_eq!(devices(&node.place(one("e", "3g"))), "gpu-1-3g-0");
    assert_eq!(devices(&node.place(one("f", "whole"))), "does not fit");
    assert_eq!(devices(&node.place(one("f", "ts"))), "does not fit");
}

#[test]
fn two_modes_in_one_pod_or_claim_need_two_gpus() {
    let pod = || [one("a", "ts"), one("b", "mps")].concat();
    assert_eq!(devices(&node(1).place(pod())), "does not fit");
    assert_eq!(devices(&node(2).place(pod())), "gpu-0-ts gpu-1-mps");
    let both = || {
        vec![claim(
            "c",
            vec![request("t", "ts", 1), request("m", "mps", 1)],
        )]
    };
    assert_eq!(devices(&node(1).place(both())), "does not fit");
    assert_eq!(devices(&node(2).place(both())), "gpu-0-ts gpu-1-mps");
}

#[test]
fn two_shares_with_a_matching_gpu_are_two_shares_of_one_gpu() {
    let pair = vec![matching(
        claim("c", vec![request("a", "ts", 1), request("b", "ts", 1)]),
        GPU,
        &[],
    )];
    let mut node = node(2);
    node.claims = pair;
    let results = node.results()[0].devices.clone().unwrap().results.unwrap();
    assert_eq!(
        results
            .iter()
            .map(|r| r.device.as_str())
            .collect::<Vec<_>>(),
        ["gpu-0-ts", "gpu-0-ts"]
    );
    assert_ne!(results[0].share_id, results[1].share_id);
}

#[test]
fn two_shares_with_distinct_gpus_are_spread() {
    let pair = || {
        vec![differing(
            claim("c", vec![request("a", "ts", 1), request("b", "ts", 1)]),
            GPU,
            &[],
        )]
    };
    assert_eq!(devices(&node(2).place(pair())), "gpu-0-ts gpu-1-ts");
    let mut one_gpu = node(1);
    one_gpu.claims = pair();
    let text = detail(&one_gpu.explanation());
    assert!(
        text.contains("constraint distinctAttribute driver-a/gpu of claim default/c: 2 devices must differ, but the available ones have only 1 values: GPU-0"),
        "{text}"
    );
}

#[test]
fn a_count_of_shares_is_as_many_gpus() {
    let two = || vec![claim("c", vec![request("r", "ts", 2)])];
    assert_eq!(devices(&node(2).place(two())), "gpu-0-ts gpu-1-ts");
    let mut one_gpu = node(1);
    one_gpu.claims = two();
    let text = detail(&one_gpu.explanation());
    assert!(
        text.ends_with("hint: node node-1 has 1 device that the class and claim select, in use or not, but 2 are requested: request fewer (spec.devices.requests count), or use a larger node"),
        "{text}"
    );
}

#[test]
fn two_halves_with_a_matching_gpu_go_where_both_fit() {
    let mut node = node(2);
    assert_eq!(devices(&node.place(one("half", "3g"))), "gpu-0-3g-0");
    let pair = matching(
        claim("c", vec![request("a", "3g", 1), request("b", "3g", 1)]),
        GPU,
        &[],
    );
    assert_eq!(devices(&node.place(vec![pair])), "gpu-1-3g-0 gpu-1-3g-4");
    let counted = |name: &str| matching(claim(name, vec![request("r", "3g", 2)]), GPU, &[]);
    node.claims = vec![counted("d")];
    let text = detail(&node.explanation());
    assert!(
        text.contains("needs 2 devices of class 3g, 1 of 38 available"),
        "{text}"
    );
    node.release("c");
    assert_eq!(
        devices(&node.place(vec![counted("d")])),
        "gpu-1-3g-0 gpu-1-3g-4"
    );
}

#[test]
fn a_pair_that_no_gpu_has_room_for_is_explained_by_gpu() {
    let mut node = node(2);
    node.place(one("a", "3g"));
    let mut second = one("b", "3g");
    second[0] = matching(
        claim(
            "b",
            vec![selecting(
                "r",
                "3g",
                1,
                r#"device.attributes["driver-a"].gpu == "GPU-1""#,
            )],
        ),
        GPU,
        &[],
    );
    assert_eq!(devices(&node.place(second)), "gpu-1-3g-0");
    node.claims = vec![matching(claim("c", vec![request("r", "3g", 2)]), GPU, &[])];
    let text = detail(&node.explanation());
    assert!(
        text.contains("constraint matchAttribute driver-a/gpu of claim default/c: no value has free devices for all its requests: GPU-0 has 1 of 2 for request \"r\"; GPU-1 has 1 of 2 for request \"r\""),
        "{text}"
    );
}

#[test]
fn a_request_that_spans_modes_finds_the_one_that_works() {
    // Nothing pins the mode: the whole GPU comes first and leaves nothing for the other, so both
    // become shares.
    let pair = matching(
        claim(
            "c",
            vec![request("a", CLASS_A, 1), request("b", CLASS_A, 1)],
        ),
        GPU,
        &[],
    );
    assert_eq!(devices(&node(2).place(vec![pair])), "gpu-0-ts gpu-0-ts");
    // A tainted whole must not keep the counters it was tried with.
    let mut tainted_whole = node(1);
    let first = &mut tainted_whole.slices[0].spec.devices.as_mut().unwrap()[0];
    first.taints = tainted("x-1", &[("divvy.dev/health", "NoSchedule")]).taints;
    let any = vec![claim("c", vec![request("a", CLASS_A, 1)])];
    assert_eq!(devices(&tainted_whole.place(any)), "gpu-0-ts");
    // firstAvailable across modes under matchAttribute.
    let either = first_of("a", vec![sub("whole", "whole", 1), sub("half", "3g", 1)]);
    let pair = matching(claim("c", vec![either, request("b", "3g", 1)]), GPU, &[]);
    assert_eq!(
        node(1).place(vec![pair]),
        "a/half=gpu-0-3g-0 b=gpu-0-3g-4 @node-1"
    );
}

#[test]
fn all_overlapping_placements_cannot_be_had_and_all_halves_can() {
    let overlapping = exact("r", CLASS_A, |r| {
        r.allocation_mode = Some("All".to_owned());
        r.selectors = Some(vec![selector(
            r#"device.attributes["driver-a"].kind in ["1g", "3g"]"#,
        )]);
    });
    assert_eq!(
        devices(&node(1).place(vec![claim("c", vec![overlapping])])),
        "does not fit"
    );
    assert_eq!(
        devices(&node(1).place(vec![claim("c", vec![all_of("r", "3g")])])),
        "gpu-0-3g-0 gpu-0-3g-4"
    );
}

#[test]
fn a_share_that_publishes_no_capacity_is_still_charged_once() {
    // As in 1.37; schedulers of 1.36 charge it again and refuse the second claim.
    let mut node = node(1);
    node.slices[0].spec.devices.as_mut().unwrap()[1].capacity = None;
    assert_eq!(node.place(one("a", "ts")), "r=gpu-0-ts @node-1");
    assert_eq!(node.place(one("b", "ts")), "r=gpu-0-ts @node-1");
    assert_eq!(devices(&node.place(one("c", "mps"))), "does not fit");
    assert_eq!(
        devices(&self::node(1).place([one("a", "ts"), one("b", "ts")].concat())),
        "gpu-0-ts gpu-0-ts"
    );
}

#[test]
fn slices_are_tried_by_name_and_devices_as_listed() {
    let mut node = node(2);
    node.slices[0].metadata.name = Some("slice-9".to_owned());
    assert_eq!(devices(&node.place(one("a", "whole"))), "gpu-1");
}

#[test]
fn fifty_six_1g_on_eight_gpus_of_seven_fit_without_a_detour() {
    let mut node = node(8);
    node.claims = vec![
        claim("a", vec![request("r", "1g", 32)]),
        claim("b", vec![request("r", "1g", 24)]),
    ];
    let Ok(Outcome::Fits(found)) = node.outcome() else {
        panic!("56 fit")
    };
    assert_eq!(found.steps, 61, "one for each device, one for each end");
}

#[test]
fn mixed_profiles_that_cannot_all_fit_are_refused() {
    // A GPU has room for two halves, or for one and three or four 1g beside it; two halves on two
    // GPUs leave seven or eight 1g and not nine.
    let mut node = node(2);
    let pod = |small| {
        vec![claim(
            "a",
            vec![request("small", "1g", small), request("half", "3g", 2)],
        )]
    };
    assert_eq!(devices(&node.place(pod(9))), "does not fit");
    node.claims = pod(7);
    assert!(
        matches!(node.outcome(), Ok(Outcome::Fits(_))),
        "{}",
        node.try_it()
    );
}
