//! Equal problems of several GPUs and nodes.

use divvy_api::node::{GpuStatus, Trouble};

use super::{gpu, status, world};
use crate::status::{render, report};

/// A policy that asks for an unknown profile puts all GPUs of a node out of use.
#[test]
fn equal_troubles_of_several_gpus_and_nodes_are_one() {
    let mut world = world();
    let trouble = |n: u32, why: &str, since: &str| Trouble {
        kind: "not-offered".to_owned(),
        gpu: format!("gpu-{n}"),
        why: why.to_owned(),
        remedy: format!("look at `nvidia-smi -i GPU-{n}`"),
        since: Some(since.to_owned()),
        ..Trouble::default()
    };
    let gpus = |ids: &[u32]| -> Vec<GpuStatus> {
        let one = |n: &u32| GpuStatus {
            uuid: format!("GPU-{n}"),
            ..gpu(*n, (*n == 3).then_some("holder"))
        };
        ids.iter().map(one).collect()
    };
    let (old, new) = ("2026-11-21T19:48:00Z", "2026-11-21T19:50:00Z");
    let all = [0, 1, 2, 3, 5, 6, 7];
    let mut of_n1: Vec<Trouble> = all.iter().map(|n| trouble(*n, "no form", new)).collect();
    of_n1[2].since = Some(old.to_owned());
    of_n1[6].why = "another".to_owned();
    let report = status(gpus(&all), of_n1, "");
    world.reports.insert("n1".to_owned(), report);
    let of_n2 = vec![trouble(1, "no form", new)];
    let report = status(gpus(&[0, 1]), of_n2, "");
    world.reports.insert("n2".to_owned(), report);
    let head = "n1 gpu-0 to gpu-3, gpu-5, gpu-6";
    let block = |places: &str| {
        format!(
            "  {places}: not-offered, for 12m (since {old})\n    why: no form\n    held by: default/holder (pod holder-pod)\n    do:  look at `nvidia-smi -i UUID`\n"
        )
    };
    let alone = "  n1 gpu-7: not-offered, for 10m (since 2026-11-21T19:50:00Z)\n    why: another\n    do:  look at `nvidia-smi -i GPU-7`";
    let fleet = report::fleet(&world, None);
    let text = render::fleet(&world, &fleet, false);
    assert!(
        text.contains(&block(&format!("{head}, n2 gpu-1"))),
        "{text}"
    );
    assert!(text.contains(alone), "{text}");
    let values = serde_json::to_value(&fleet).unwrap();
    let listed = values["troubles"].as_array().unwrap();
    let listed = listed.iter().filter(|one| one["kind"] == "not-offered");
    assert_eq!(listed.count(), 8, "all of them as values");

    let node = report::node(&world, "n1").unwrap();
    let text = render::node(&world, &node);
    assert!(
        text.contains(&block(head)) && text.contains(alone),
        "{text}"
    );
}
