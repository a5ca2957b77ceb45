//! Devices for admins, and foreign MIG instances.

use divvy_gpu_sim::MIG_BOARDS;
use divvy_model::mig::{GpuInstance, GpuInstanceId, GpuInstanceProfileId};
use divvy_model::{DeviceKind, MigUuid, NamedTarget, Sharing};

use super::*;
use crate::Instances;

fn all_names(pool: &Pool) -> Vec<&str> {
    pool.devices().map(|device| device.name.as_str()).collect()
}

#[test]
fn the_device_for_admins_is_the_gpu_without_counters_and_comes_last() {
    let mut node = Node::everything("h100x2");
    let pool = node.carve(None).pool;
    assert_eq!(
        all_names(&pool).iter().rev().take(2).collect::<Vec<_>>(),
        [&"gpu-1-admin", &"gpu-0-admin"]
    );
    let whole = device(&node.whole_only().pool, "gpu-0").clone();
    let mut expected = Device {
        name: "gpu-0-admin".parse().unwrap(),
        ..whole
    };
    expected.attributes.insert(
        "type".into(),
        AttributeValue::String("gpu-admin".to_owned()),
    );
    assert_eq!(device(&pool, "gpu-0-admin"), &expected);

    // It is for looking at a GPU that is in use, but not at one that is lost.
    let of = |key| vec![Taint::no_schedule(key, None)];
    for key in [keys::LINGERING, keys::FENCED, keys::FOREIGN] {
        node.taints.insert(node.uuid(0), of(key));
        assert_eq!(
            device(&node.carve(None).pool, "gpu-0-admin").taints,
            [],
            "{key}"
        );
    }
    node.taints.insert(node.uuid(0), of("gpu.divvy.dev/xid"));
    assert_eq!(
        device(&node.carve(None).pool, "gpu-0-admin").taints,
        of("gpu.divvy.dev/xid")
    );
    let before = node.carve(None).pool;
    let uuid = node.uuid(0);
    node.taints.insert(uuid.clone(), of(keys::LOST));
    node.inventory.gpus.remove(&uuid);
    assert_eq!(
        device(&node.carve(Some(&before)).pool, "gpu-0-admin").taints,
        of(keys::LOST)
    );
}

#[test]
fn a_gpu_that_is_there_as_a_whole_only_needs_no_device_for_admins() {
    let has_one = |node: Node| all_names(&node.carve(None).pool).contains(&"gpu-0-admin");
    assert!(!has_one(Node::new("h100x1")) && !has_one(Node::everything("l4x1").server(36, 0)));
    assert!(has_one(Node::new("h100x1").mig_on()) && has_one(Node::everything("l4x1")));
    assert!(has_one(Node::only("l4x1", &[Form::TIME_SLICED])));
    let mut held = Node::new("h100x1");
    held.hold("gpu-0-admin");
    assert_eq!(
        all_names(&held.carve(None).pool),
        ["gpu-0"],
        "admin access keeps nothing"
    );
}

/// A node whose first GPU has two instances; the second has no compute instance.
fn with_instances(mut node: Node) -> Node {
    let uuid = node.uuid(0);
    let caps = node.capabilities[&uuid].clone();
    let instance = |id: u32, profile: u32, start: u32| {
        let profile = GpuInstanceProfileId(profile);
        let placement = caps.placement(profile, start).unwrap();
        GpuInstance {
            id: GpuInstanceId(id),
            profile,
            placement,
        }
    };
    let mig = node
        .inventory
        .gpus
        .get_mut(&uuid)
        .unwrap()
        .mig
        .as_mut()
        .unwrap();
    mig.instances = Some(vec![instance(1, 9, 4), instance(7, 19, 0)]);
    let live: MigUuid = "MIG-11111111-2222-3333-4444-555555555555".parse().unwrap();
    mig.uuids = BTreeMap::from([(GpuInstanceId(1), live)]);
    node
}

#[test]
fn foreign_instances_are_published_as_they_are_and_nothing_beside_them() {
    let mut node = with_instances(Node::everything("h100x2").mig_on());
    node.rule(|rules| rules.instances = Instances::Static);
    let carved = node.carve(None);
    assert_eq!(
        names(&carved.pool),
        ["gpu-1", "gpu-1-ts", "gpu-0-mig-static-3g40gb-9-4"]
    );
    let partition = device(&carved.pool, "gpu-0-mig-static-3g40gb-9-4");
    let uuid = AttributeValue::String("MIG-11111111-2222-3333-4444-555555555555".to_owned());
    assert_eq!(
        (&partition.attributes["uuid"], partition.allow_multiple),
        (&uuid, false)
    );
    assert_eq!(
        findings(&carved),
        [format!(
            "the MIG instance of {0} at memory slices 0:1 is not offered: it must have exactly one compute instance \
             (create it with `nvidia-smi mig -i {0} -cci`)",
            node.uuid(0)
        )]
    );

    // Gone while a claim holds it: kept, and closed to other claims.
    node.hold("gpu-0-mig-static-3g40gb-9-4");
    let uuid = node.uuid(0);
    node.inventory
        .gpus
        .get_mut(&uuid)
        .unwrap()
        .mig
        .as_mut()
        .unwrap()
        .instances = Some(Vec::new());
    let after = node.carve(Some(&carved.pool)).pool;
    assert_eq!(blocked(&after), ["gpu-0-mig-static-3g40gb-9-4"]);
}

/// While the list of instances has never been read, some may live: the GPU is not given out whole.
#[test]
fn a_gpu_whose_instances_were_never_listed_is_not_offered_whole() {
    let mut node = Node::everything("h100x2").mig_on();
    node.rule(|rules| rules.instances = Instances::Static);
    let (unread, empty) = (node.uuid(0), node.uuid(1));
    for (uuid, instances) in [(unread, None), (empty, Some(Vec::new()))] {
        let mig = node.inventory.gpus.get_mut(&uuid).unwrap().mig.as_mut();
        mig.unwrap().instances = instances;
    }
    assert_eq!(names(&node.carve(None).pool), ["gpu-1", "gpu-1-ts"]);
}

#[test]
fn without_mig_mode_a_gpu_with_others_instances_is_there_as_a_whole() {
    let mut node = Node::everything("h100x1");
    node.rule(|rules| rules.instances = Instances::Static);
    assert_eq!(names(&node.carve(None).pool), ["gpu-0", "gpu-0-ts"]);
    let mut as_is = with_instances(Node::new("a100-40x1").mig_on());
    as_is.rule(|rules| rules.instances = Instances::Static);
    assert_eq!(
        names(&as_is.carve(None).pool),
        ["gpu-0-mig-static-3g20gb-9-4"]
    );
}

#[test]
fn profiles_are_offered_by_name_if_rules_name_them_the_rare_ones_too() {
    let mut node = Node::both("h100x1");
    node.rule(|rules| rules.profiles = Some(["1g.10gb+me", "7g.80gb"].map(str::to_owned).into()));
    let pool = node.carve(None).pool;
    let expected: Vec<_> = (0..7)
        .map(|start| format!("gpu-0-mig-1g10gb-me-20-{start}"))
        .collect();
    let mut expected: Vec<&str> = expected.iter().map(String::as_str).collect();
    expected.insert(0, "gpu-0");
    expected.push("gpu-0-mig-7g80gb-0-0");
    assert_eq!(names(&pool), expected);
}

/// The names of all profiles of all boards, also of the partitions that were made outside divvy,
/// with the suffix of each way of use. No label is cut, so names say all of a profile.
#[test]
fn no_profile_of_a_board_has_a_name_longer_than_a_label() {
    let mut longest = String::new();
    for board in MIG_BOARDS {
        let mut node = Node::only(&format!("{board}x1"), &[Form::PARTITIONS]).mig_on();
        let rare = [
            ProfileVariant::Media,
            ProfileVariant::AllMedia,
            ProfileVariant::NoMedia,
            ProfileVariant::Graphics,
        ];
        node.rule(|rules| rules.rare = BTreeSet::from(rare));
        let pool = node.carve(None).pool;
        for device in forms(&pool) {
            let AttributeValue::String(profile) = &device.attributes["profile"] else {
                panic!("{board}: profile is no text")
            };
            let mut name = PartitionName::parse(&device.name).unwrap();
            // More GPUs than a node can have.
            name.ordinal = 9999;
            let whole: String = profile.replace('.', "").replace(['+', '-', ','], "-");
            for target in [name.clone(), name.into_static()] {
                assert_eq!(target.label(), whole, "{board}");
                for sharing in Sharing::ALL {
                    let target = NamedTarget::Partition(target.clone());
                    let text = DeviceKind { target, sharing }.device_name().to_string();
                    if text.len() > longest.len() {
                        longest = text;
                    }
                }
            }
        }
    }
    // 63 are allowed.
    assert_eq!(longest, "gpu-9999-mig-static-1g24gb-meall-64-0-admin");
}
