use divvy_api::node::Versions;
use serde_json::json;

use super::*;

fn gpu(product: &str) -> GpuStatus {
    GpuStatus {
        product: product.to_owned(),
        memory_mib: Some(81_559),
        architecture: "Hopper".to_owned(),
        compute_capability: "9.0".to_owned(),
        mig_capable: Some(true),
        nvlink_domain: "GPU-1".to_owned(),
        ..GpuStatus::default()
    }
}

fn report(gpus: Vec<GpuStatus>) -> GpuNodeStatus {
    GpuNodeStatus {
        versions: Versions {
            driver: "580.95.05".to_owned(),
            ..Versions::default()
        },
        gpus,
        ..GpuNodeStatus::default()
    }
}

/// The labels of a report that have a value, without those of the driver.
fn said(report: &GpuNodeStatus) -> Vec<(&'static str, String)> {
    let of_gpus = wanted(Some(report)).into_iter();
    let of_gpus = of_gpus.filter(|(name, _)| !name.contains("driver-version"));
    of_gpus
        .filter_map(|(name, wanted)| match wanted {
            Wanted::Is(value) => Some((name, value)),
            Wanted::Gone | Wanted::Kept => None,
        })
        .collect()
}

/// An entry as the API server writes it.
fn managed(manager: &str, operation: &str, labels: &[&str]) -> ManagedFieldsEntry {
    let fields: serde_json::Map<String, Value> = labels
        .iter()
        .map(|name| (format!("f:{name}"), json!({})))
        .chain([(".".to_owned(), json!({}))])
        .collect();
    serde_json::from_value(json!({
        "manager": manager, "operation": operation, "apiVersion": "v1", "fieldsType": "FieldsV1",
        "time": "2026-11-28T10:00:00Z",
        "fieldsV1": {"f:metadata": {"f:labels": fields}, "f:spec": {"f:unschedulable": {}}},
    }))
    .unwrap()
}

fn ours(labels: &[&str]) -> ManagedFieldsEntry {
    managed(FIELD_MANAGER_LABELS, "Apply", labels)
}

fn labels(of: &[(&str, &str)]) -> Labels {
    let pairs = of
        .iter()
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    pairs.collect()
}

/// Only the product is wanted.
fn product(value: &str) -> BTreeMap<&'static str, Wanted> {
    BTreeMap::from([(names::PRODUCT, Wanted::Is(value.to_owned()))])
}

#[test]
fn a_node_of_one_product_says_all_of_it() {
    let found = said(&report(vec![
        gpu("NVIDIA H100 80GB HBM3"),
        gpu("NVIDIA H100 80GB HBM3"),
    ]));
    let expected = [
        (names::NVLINK_DOMAIN, "GPU-1"),
        (names::COMPUTE_MAJOR, "9"),
        (names::COMPUTE_MINOR, "0"),
        (names::COUNT, "2"),
        (names::FAMILY, "hopper"),
        (names::MEMORY, "81559"),
        (names::PRODUCT, "NVIDIA-H100-80GB-HBM3"),
        (names::MIG_CAPABLE, "true"),
    ];
    let expected = expected.map(|(name, value)| (name, value.to_owned()));
    assert_eq!(found, expected);
    let all = wanted(Some(&report(vec![gpu("X")])));
    for (name, value) in [
        (names::DRIVER, "580.95.05"),
        (names::DRIVER_MAJOR, "580"),
        (names::DRIVER_MINOR, "95"),
        (names::DRIVER_REVISION, "05"),
    ] {
        assert_eq!(all[name], Wanted::Is(value.to_owned()));
    }
    assert_eq!(all.len(), names::ALL.len());
    assert!(names::ALL.is_sorted());
}

#[test]
fn a_mixed_node_says_only_what_is_so_of_all_its_gpus() {
    let l4 = GpuStatus {
        memory_mib: Some(23_034),
        architecture: "Ada".to_owned(),
        compute_capability: "8.9".to_owned(),
        mig_capable: Some(false),
        nvlink_domain: String::new(),
        ..gpu("NVIDIA L4")
    };
    let found = said(&report(vec![gpu("NVIDIA H100"), l4.clone()]));
    assert_eq!(found, [(names::MIG_CAPABLE, "true".to_owned())]);
    // Two halves of a node in two NVLink domains are in no common one.
    let other = GpuStatus {
        nvlink_domain: "GPU-2".to_owned(),
        ..gpu("NVIDIA H100")
    };
    let found = said(&report(vec![gpu("NVIDIA H100"), other]));
    assert!(
        !found.iter().any(|(name, _)| *name == names::NVLINK_DOMAIN),
        "{found:?}"
    );
    assert!(found.contains(&(names::COUNT, "2".to_owned())));
    assert!(said(&report(vec![l4])).contains(&(names::FAMILY, "ada-lovelace".to_owned())));
}

#[test]
fn a_fabric_is_the_clique_of_nodes_whose_gpus_are_all_in_it() {
    let fabric = GpuStatus {
        fabric: "11111111-2222-3333-4444-555555555555.7".to_owned(),
        nvlink_domain: "11111111-2222-3333-4444-555555555555.7".to_owned(),
        ..gpu("NVIDIA GB200")
    };
    let found = said(&report(vec![fabric.clone(), fabric.clone()]));
    assert!(
        found.contains(&(names::CLIQUE, fabric.fabric.clone())),
        "{found:?}"
    );
    let found = said(&report(vec![fabric, gpu("NVIDIA GB200")]));
    assert!(
        !found.iter().any(|(name, _)| *name == names::CLIQUE),
        "{found:?}"
    );
}

#[test]
fn what_cannot_be_read_stays_and_what_is_gone_goes() {
    let unread = report(vec![gpu("NVIDIA H100"), GpuStatus::default()]);
    let all = wanted(Some(&unread));
    for name in [names::PRODUCT, names::COUNT, names::NVLINK_DOMAIN] {
        assert_eq!(all[name], Wanted::Kept, "{name}");
    }
    assert_eq!(all[names::MIG_CAPABLE], Wanted::Is("true".to_owned()));
    let mut no_driver = report(vec![gpu("NVIDIA H100")]);
    for odd in ["", "580", "a.b", "1.2.3.4"] {
        no_driver.versions.driver = odd.to_owned();
        assert_eq!(
            wanted(Some(&no_driver))[names::DRIVER],
            Wanted::Kept,
            "{odd}"
        );
    }
    for none in [None, Some(&report(Vec::new()))] {
        assert!(wanted(none).values().all(|wanted| *wanted == Wanted::Gone));
    }
}

#[test]
fn no_name_of_a_product_makes_a_label_that_the_server_refuses() {
    for (product, expected) in [
        (
            "NVIDIA RTX PRO 6000 (Max-Q)",
            Some("NVIDIA-RTX-PRO-6000-Max-Q"),
        ),
        ("Tesla  V100-", Some("Tesla-V100")),
        ("日本", None),
        ("--", None),
    ] {
        assert_eq!(label(product).as_deref(), expected, "{product}");
    }
    assert_eq!(label(&"a".repeat(90)).unwrap().len(), 63);
}

#[test]
fn labels_of_others_stay_as_they_are_and_are_named() {
    let name = names::PRODUCT;
    let there = labels(&[(name, "theirs")]);
    // By the operation of NFD's master, by no known manager, by both.
    for managed in [
        vec![managed("nfd-master", "Update", &[name])],
        vec![],
        vec![ours(&[name]), managed("kubectl-label", "Update", &[name])],
    ] {
        let decision = decide(&there, &managed, &product("mine"));
        let left = &decision.left[0];
        assert_eq!(
            (left.name, &*left.theirs, &*left.ours),
            (name, "theirs", "mine")
        );
        let written = decision.apply.unwrap_or_default();
        assert_eq!(written, Labels::new(), "{managed:?}");
    }
    // The same value is nothing to report, and nothing to write.
    let managed = [managed("nfd-master", "Update", &[name])];
    let same = decide(&there, &managed, &product("theirs"));
    assert_eq!(
        same,
        Decision {
            apply: None,
            left: Vec::new()
        }
    );
    // A label of the same name under another operation of this manager is not an apply of ours.
    let by_hand = [self::managed(FIELD_MANAGER_LABELS, "Update", &[name])];
    assert_eq!(decide(&there, &by_hand, &product("mine")).apply, None);
}

#[test]
fn what_is_absent_is_written_and_what_is_ours_follows_or_goes() {
    let name = names::PRODUCT;
    let none = decide(&Labels::new(), &[], &product("x"));
    assert_eq!(none.apply, Some(labels(&[(name, "x")])));
    let mine = [ours(&[name])];
    let there = labels(&[(name, "x")]);
    assert_eq!(decide(&there, &mine, &product("x")).apply, None);
    assert_eq!(
        decide(&there, &mine, &product("y")).apply,
        Some(labels(&[(name, "y")]))
    );
    let gone = BTreeMap::from([(name, Wanted::Gone)]);
    assert_eq!(decide(&there, &mine, &gone).apply, Some(Labels::new()));
    let kept = BTreeMap::from([(name, Wanted::Kept)]);
    assert_eq!(decide(&there, &mine, &kept).apply, None);
    // Nothing of ours is there: no write, also not of an empty set.
    assert_eq!(decide(&Labels::new(), &[], &gone).apply, None);
    assert_eq!(decide(&Labels::new(), &[], &kept).apply, None);
}

#[test]
fn a_shortened_node_decides_as_the_whole_one() {
    let name = names::PRODUCT;
    let mut there = Some(labels(&[(name, "x"), ("kubernetes.io/arch", "amd64")]));
    let mut managed = Some(vec![
        managed("kubelet", "Update", &["kubernetes.io/arch"]),
        ours(&[name]),
        managed(
            "nfd-master",
            "Update",
            &[names::COUNT, "feature.node.kubernetes.io/x"],
        ),
    ]);
    let before = (there.clone().unwrap(), managed.clone().unwrap());
    shorten(&mut there, &mut managed);
    let (there, managed) = (there.unwrap(), managed.unwrap());
    assert_eq!((there.len(), managed.len()), (1, 2));
    for wanted in [
        product("x"),
        product("y"),
        BTreeMap::from([(names::COUNT, Wanted::Is("1".to_owned()))]),
    ] {
        assert_eq!(
            decide(&there, &managed, &wanted),
            decide(&before.0, &before.1, &wanted)
        );
    }
}
