//! Tables: who uses what beside us, and what is said about it.

use divvy_gpu_sim::SimNode;

use super::*;

struct World {
    inventory: Inventory,
    given: BTreeSet<GivenOut>,
    devices: BTreeMap<DriverDevice, GpuUuid>,
    processes: BTreeMap<GpuUuid, BTreeSet<u32>>,
    before: BTreeMap<GpuUuid, BTreeSet<u32>>,
    held: BTreeSet<GpuUuid>,
}

impl World {
    fn new() -> Self {
        Self {
            inventory: SimNode::parse("h100x3").unwrap().inventory(),
            given: BTreeSet::new(),
            devices: BTreeMap::new(),
            processes: BTreeMap::new(),
            before: BTreeMap::new(),
            held: BTreeSet::new(),
        }
    }

    /// In NVML's order.
    fn gpu(&self, index: usize) -> GpuUuid {
        let mut all: Vec<_> = self.inventory.gpus.values().collect();
        all.sort_by_key(|gpu| gpu.facts.pci_address);
        all[index].facts.uuid.clone()
    }

    fn give(&mut self, by: Giver, device: &str) {
        self.give_to("pod default/other", by, device);
    }

    fn give_to(&mut self, to: &str, by: Giver, device: &str) {
        self.given.insert(GivenOut {
            by,
            to: to.into(),
            device: device.into(),
        });
    }

    /// Index of each GPU that is used, and how.
    fn uses(&self) -> Vec<(usize, Vec<String>)> {
        let Self {
            inventory,
            given,
            devices,
            processes,
            before,
            held,
        } = self;
        let uses = decide(&Observations {
            inventory,
            given,
            devices,
            pool: "n1/divvy",
            nvidias: Some(("gpu.nvidia.com", "n1")),
            processes,
            before,
            held,
        });
        let index = |gpu: &GpuUuid| (0..3).find(|i| self.gpu(*i) == *gpu).unwrap();
        let mut uses: Vec<_> = uses
            .iter()
            .map(|(gpu, uses)| (index(gpu), uses.iter().map(ToString::to_string).collect()))
            .collect();
        uses.sort();
        uses
    }
}

fn nvidia() -> Giver {
    Giver::DevicePlugin("nvidia.com/gpu".into())
}

#[test]
fn a_device_plugins_ids_are_uuids_indexes_and_replicas_of_both() {
    let said = "the device plugin of nvidia.com/gpu has allocated it to pod default/other";
    let uuid = World::new().gpu(2).to_string();
    for (id, expected) in [
        (uuid.clone(), Some(2)),
        (format!("{uuid}::7"), Some(2)),
        ("1".to_owned(), Some(1)),
        ("0::3".to_owned(), Some(0)),
        ("3".to_owned(), None),
        ("0:1".to_owned(), None),
        ("MIG-8c1e2a4b-0000-5000-8000-000000000001".to_owned(), None),
        ("GPU-00000000-0000-0000-0000-000000000000".to_owned(), None),
        (String::new(), None),
    ] {
        let mut world = World::new();
        world.give(nvidia(), &id);
        let expected: Vec<_> = expected
            .map(|index| (index, vec![said.to_owned()]))
            .into_iter()
            .collect();
        assert_eq!(world.uses(), expected, "{id}");
    }
}

#[test]
fn numbers_of_other_resources_are_no_gpus() {
    let mut world = World::new();
    world.give(Giver::DevicePlugin("rdma/hca".into()), "1");
    assert_eq!(world.uses(), []);
    let uuid = world.gpu(1).to_string();
    world.give(Giver::DevicePlugin("example.com/gpu".into()), &uuid);
    assert_eq!(
        world.uses().len(),
        1,
        "a UUID is a GPU, whichever plugin has allocated it"
    );
}

#[test]
fn another_drivers_device_is_found_by_driver_pool_and_name() {
    let mut world = World::new();
    let name = |pool: &str, device: &str| {
        (
            "gpu.example.com".to_owned(),
            pool.to_owned(),
            device.to_owned(),
        )
    };
    let (zero, one) = (world.gpu(0), world.gpu(1));
    world.devices = BTreeMap::from([(name("n1", "gpu-0"), one), (name("n1", "gpu-1"), zero)]);
    let other = |pool: &str| Giver::Driver {
        name: "gpu.example.com".into(),
        pool: pool.into(),
    };
    world.give(other("n1"), "gpu-0");
    world.give(other("n2"), "gpu-1");
    world.give(other("n1"), "nic-0");
    let said = "the driver gpu.example.com has allocated it to pod default/other".to_owned();
    assert_eq!(world.uses(), [(1, vec![said])]);
}

/// A pod has the device of a driver by a claim, and both are seen: they are one user.
#[test]
fn a_claim_is_left_out_where_its_pod_is_named_for_the_same_device() {
    let mut world = World::new();
    let name = |device: &str| {
        (
            "gpu.example.com".to_owned(),
            "n1".to_owned(),
            device.to_owned(),
        )
    };
    world.devices = BTreeMap::from([(name("gpu-0"), world.gpu(0)), (name("gpu-1"), world.gpu(1))]);
    let other = || Giver::Driver {
        name: "gpu.example.com".into(),
        pool: "n1".into(),
    };
    world.give_to("claim default/c", other(), "gpu-0");
    world.give_to("pod default/p", other(), "gpu-0");
    // Its pod has not started yet.
    world.give_to("claim default/waits", other(), "gpu-1");
    let said = |to: &str| {
        vec![format!(
            "the driver gpu.example.com has allocated it to {to}"
        )]
    };
    assert_eq!(
        world.uses(),
        [(0, said("pod default/p")), (1, said("claim default/waits"))]
    );
}

#[test]
fn processes_count_where_no_claim_of_ours_is_and_if_they_last() {
    let mut world = World::new();
    let (a, b, c) = (world.gpu(0), world.gpu(1), world.gpu(2));
    let pids = |pids: &[u32]| pids.iter().copied().collect::<BTreeSet<_>>();
    world.before = BTreeMap::from([(a.clone(), pids(&[7, 8])), (b.clone(), pids(&[9]))]);
    world.processes = BTreeMap::from([
        (a.clone(), pids(&[8, 7, 11])),
        (b.clone(), pids(&[9])),
        (c, pids(&[10])),
    ]);
    world.held = BTreeSet::from([b]);
    let said = "process 7, 8 computes on it without a claim of divvy".to_owned();
    assert_eq!(
        world.uses(),
        [(0, vec![said])],
        "11 and 10 have only just come, 9 is on a GPU that a claim holds"
    );
    world.held.insert(a);
    assert_eq!(world.uses(), []);
}

#[test]
fn all_uses_of_one_gpu_are_reported_also_beside_a_claim_of_ours() {
    let mut world = World::new();
    let gpu = world.gpu(1);
    world.held.insert(gpu.clone());
    world.give(nvidia(), gpu.as_str());
    world.give(
        Giver::DevicePlugin("nvidia.com/gpu.shared".into()),
        &format!("{gpu}::1"),
    );
    let said =
        |resource| format!("the device plugin of {resource} has allocated it to pod default/other");
    assert_eq!(
        world.uses(),
        [(
            1,
            vec![said("nvidia.com/gpu"), said("nvidia.com/gpu.shared")]
        )]
    );
}

#[test]
fn a_device_name_of_nvidias_driver_has_the_minor_number() {
    let mut inventory = SimNode::parse("h100x2").unwrap().inventory();
    let uuids: Vec<GpuUuid> = inventory.gpus.keys().cloned().collect();
    for (uuid, minor) in uuids.iter().zip([5, 0]) {
        inventory.gpus.get_mut(uuid).unwrap().facts.minor = Some(minor);
    }
    let found = |name: &str| by_minor(name, &inventory);
    for name in ["gpu-5", "gpu-5-mig-1g10gb-19-0", "gpu-5-mig-1g10gb-me-20-0"] {
        assert_eq!(found(name).as_ref(), uuids.first(), "{name}");
    }
    assert_eq!(found("gpu-0").as_ref(), uuids.get(1));
    for name in ["gpu-1", "gpu-vfio-0", "gpu-5-ts", "card-5", "gpu-"] {
        assert_eq!(found(name), None, "{name}");
    }
}

#[test]
fn a_device_of_nvidias_pool_is_its_plugins_under_the_name_of_ours() {
    let mut world = World::new();
    for (pool, index) in [("n1", 0), ("n2", 1), ("n1/divvy", 2)] {
        let by = Giver::Driver {
            name: "gpu.nvidia.com".to_owned(),
            pool: pool.to_owned(),
        };
        let device = (
            "gpu.nvidia.com".to_owned(),
            pool.to_owned(),
            "gpu-0".to_owned(),
        );
        world.devices.insert(device, world.gpu(index));
        world.give(by, "gpu-0");
    }
    let said = |words: &str| vec![format!("{words} has allocated it to pod default/other")];
    let other_name = "divvy has allocated it to pod default/other under the driver name";
    assert_eq!(
        world.uses(),
        [
            (0, said("NVIDIA's plugin")),
            (1, said("the driver gpu.nvidia.com")),
            (2, vec![format!("{other_name} gpu.nvidia.com")]),
        ]
    );
}
