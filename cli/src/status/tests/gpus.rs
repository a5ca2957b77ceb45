//! A GPU that is asked about by its name.

use super::*;

#[test]
fn a_gpu_is_found_by_uuid_its_beginning_or_its_node_and_name() {
    let mut world = world();
    let gpu = report::gpu(&world, "n1/gpu-1").unwrap();
    assert!(gpu.needs_person);
    golden("gpu.txt", &render::gpu(&world, &gpu));
    assert!(!report::gpu(&world, "n1/gpu-0").unwrap().needs_person);
    world.reports.retain(|name, _| name == "n1");
    assert_eq!(report::gpu(&world, &gpu.gpu.uuid).unwrap().gpu, gpu.gpu);
    let error = |wanted: &str| report::gpu(&world, wanted).unwrap_err().to_string();
    assert_eq!(
        error("GPU-1234"),
        "\"GPU-1234\" matches several GPUs: n1/gpu-0, n1/gpu-1"
    );
    for (wanted, expected) in [
        ("n2/gpu-0", "node n2 reports no GPUs"),
        ("n9/gpu-0", "there is no node n9"),
        ("n1/gpu-9", "node n1 has no gpu-9: there are gpu-0, gpu-1"),
        (
            "0000",
            "no GPU matches \"0000\": give a UUID (or its beginning, GPU-…) or NODE/gpu-0",
        ),
    ] {
        assert!(error(wanted).starts_with(expected), "{}", error(wanted));
    }
    world.reports.clear();
    world.nodes = vec![typed(node("n1"))];
    let without = report::gpu(&world, "n1/gpu-0").unwrap_err().to_string();
    assert!(
        without.starts_with("node n1 reports no GPUs: "),
        "{without}"
    );
}
