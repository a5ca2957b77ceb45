use serde_json::json;

use super::*;

fn held(gpus: &[(&str, &str)], need: Need) -> Cause {
    let owned = |(gpu, state): &(&str, &str)| ((*gpu).to_owned(), (*state).to_owned());
    Cause::Held(Held {
        gpus: gpus.iter().map(owned).collect(),
        need,
    })
}

#[test]
fn one_sentence_says_who_has_the_gpus_and_when_it_starts() {
    let shared = ("gpu-0", "is shared by notebook-a, notebook-b");
    let whole = ("gpu-1", "is whole for training-1");
    for (cause, several, expected) in [
        (
            held(&[shared, whole], Need::Gpus(1)),
            false,
            "gpu-0 is shared by notebook-a, notebook-b; gpu-1 is whole for training-1: it starts when one is free",
        ),
        (
            held(&[whole], Need::Gpus(1)),
            true,
            "gpu-1 is whole for training-1: each starts when gpu-1 is free",
        ),
        (
            held(&[shared, whole], Need::Gpus(2)),
            false,
            "gpu-0 is shared by notebook-a, notebook-b; gpu-1 is whole for training-1: it starts when 2 are free",
        ),
        (
            held(&[shared], Need::Part),
            false,
            "gpu-0 is shared by notebook-a, notebook-b: it starts when enough is released",
        ),
        (
            held(&[whole], Need::Room("3 partitions 1g.10gb".to_owned())),
            true,
            "gpu-1 is whole for training-1: each starts when there is room for 3 partitions 1g.10gb",
        ),
    ] {
        assert_eq!(cause.full("this node", several, Reader::Demo), expected);
    }
}

#[test]
fn over_nodes_what_may_pass_comes_alone_and_equal_reasons_once() {
    let on = |node: &str, cause: Cause| (node.to_owned(), cause);
    let none = || Cause::NotOffered(Form::TIME_SLICED, Obstacle::Policy);
    let whole = || held(&[("gpu-0", "is whole for a")], Need::Gpus(1));
    assert_eq!(
        over_nodes(
            &[on("n1", none()), on("n2", whole()), on("n3", whole())],
            false
        ),
        "n2 gpu-0 is whole for a; n3 gpu-0 is whole for a: it starts when one is free"
    );
    // A claim is served by one node, so GPUs of two nodes do not add up.
    let two = || {
        held(
            &[("gpu-0", "is whole for a"), ("gpu-1", "is whole for b")],
            Need::Gpus(2),
        )
    };
    let text = over_nodes(&[on("n1", two()), on("n2", two())], false);
    assert!(
        text.ends_with(": it starts when 2 are free on one node"),
        "{text}"
    );
    let text = over_nodes(&[on("n1", two()), on("n2", whole())], false);
    assert!(text.ends_with(": it starts when one is free"), "{text}");
    let few = Cause::TooFew {
        wanted: 3,
        has: 2,
        what: "whole GPUs".to_owned(),
        by_limits: false,
    };
    assert_eq!(
        over_nodes(&[on("n1", none()), on("n2", few), on("n3", none())], false),
        "no GPU of nodes n1, n3 is offered in shares; it asks for 3 whole GPUs, and there are 2 on node n2"
    );
    let many: Vec<_> = (0..6).map(|n| on(&format!("n{n}"), whole())).collect();
    assert!(over_nodes(&many, false).contains("; 2 more GPUs are in use: it starts"));
}

#[test]
fn mig_is_there_by_compute_capability() {
    for (capability, product, expected) in [
        ("8.0.0", "NVIDIA A30", Mig::WithReset),
        ("9.0.0", "NVIDIA H100 PCIe", Mig::AtOnce),
        ("10.0.0", "NVIDIA B200", Mig::AtOnce),
        (
            "12.0.0",
            "NVIDIA RTX PRO 6000 Blackwell Server Edition",
            Mig::AtOnce,
        ),
        ("12.0.0", "NVIDIA GeForce RTX 5090", Mig::No),
        ("8.9.0", "NVIDIA L40S", Mig::No),
        ("7.0.0", "Tesla V100-SXM2-32GB", Mig::No),
    ] {
        let device = json!({"name": "gpu-0", "attributes": {"cudaComputeCapability": {"version": capability}}});
        let device = serde_json::from_value(device).unwrap();
        assert_eq!(mig(&device, product), expected, "{product}");
    }
}

/// The table of the boards that can be simulated has the same opinion.
#[test]
fn simulated_boards_have_mig_as_they_publish_it() {
    for board in divvy_gpu_sim::profiles() {
        let inventory = divvy_gpu_sim::SimNode::parse(&format!("{}x1", board.key))
            .unwrap()
            .inventory();
        let (_, gpu) = inventory.gpus.first_key_value().unwrap();
        let facts = &gpu.facts;
        let capability = &facts.compute_capability;
        let device = json!({"name": "gpu-0", "attributes": {"cudaComputeCapability": {"version": format!("{capability}.0")}}});
        let device = serde_json::from_value(device).unwrap();
        let found = mig(&device, &facts.product_name);
        let expected = match facts.mig_mode {
            divvy_model::MigMode::Unsupported => Mig::No,
            divvy_model::MigMode::Supported { .. }
                if facts.architecture.toggles_mig_without_reset() =>
            {
                Mig::AtOnce
            }
            divvy_model::MigMode::Supported { .. } => Mig::WithReset,
        };
        assert_eq!(found, expected, "{}", board.key);
    }
}
