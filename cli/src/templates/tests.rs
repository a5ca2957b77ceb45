use std::collections::BTreeMap;

use divvy_api::names::DRIVER;
use divvy_gpu_sim::SimNode;
use divvy_offer::{GpuRules, NodeFacts};
use k8s_openapi::api::resource::v1::{DeviceTaint, ResourceSlice};

use super::diff::{Report, What, compare};
use super::{Template, clusterapi, karpenter};
use crate::manifests::Manifests;
use crate::offered::offered;

const NODE: &str = "n1";

fn template(sim: &str, modes: &str) -> Template {
    let text = format!(
        "apiVersion: divvy.dev/v1beta1\nkind: GpuPolicy\nmetadata: {{name: p}}\nspec: {{rules: [{{modes: [{modes}]}}]}}\n"
    );
    let policies = Manifests::parse("p", &text).unwrap().policies;
    let inventory = SimNode::parse(sim).unwrap().inventory();
    let labels = BTreeMap::new();
    let facts = NodeFacts {
        name: NODE,
        labels: &labels,
    };
    let pool = offered(&inventory, &facts, &policies, &GpuRules::default()).pool;
    Template::of(DRIVER, NODE, &pool)
}

/// A node that publishes the template, changed.
fn beside(template: &Template, change: impl FnOnce(&mut Vec<ResourceSlice>)) -> Report {
    let mut slices: Vec<ResourceSlice> = template.slices().collect();
    change(&mut slices);
    compare(template, NODE, &slices)
}

fn texts(report: &Report) -> Vec<(What, &str)> {
    let differences = report.differences.iter();
    differences
        .map(|one| (one.what, one.text.as_str()))
        .collect()
}

#[test]
fn a_template_names_nothing_that_is_of_one_node_only() {
    let node = SimNode::parse("h100x2").unwrap();
    let template = template("h100x2", "Whole, Mig, TimeSlicing");
    let yaml = template.yaml().unwrap();
    for uuid in node.uuids() {
        assert!(!yaml.contains(uuid.as_str()), "{uuid}");
    }
    assert!(
        !yaml.contains("nvlinkDomain") && !yaml.contains("taints"),
        "{yaml}"
    );
    assert!(yaml.contains("productName") && yaml.contains("sharedCounters"));
    let documents: Vec<ResourceSlice> = serde_saphyr::from_multiple(&yaml).unwrap();
    assert_eq!(documents, template.slices().collect::<Vec<_>>());
    assert_eq!(
        documents[0].metadata.name.as_deref(),
        Some("00000-gpu.divvy.dev-n1")
    );
}

#[test]
fn a_node_that_is_as_its_template_is_ready() {
    let report = beside(&template("h100x2", "Whole, Mig"), |slices| {
        // Written again since, and with its own UUIDs: no autoscaler minds.
        for slice in slices {
            slice.spec.pool.generation = 7;
        }
    });
    assert!(report.is_ready(), "{report:?}");
    assert_eq!(texts(&report), []);
    assert_eq!(
        super::diff::text(&report),
        "Cluster Autoscaler: ready\nKarpenter: ready\nnode and template are the same"
    );
}

#[test]
fn a_node_that_lacks_devices_or_has_more_is_not_ready() {
    let template = template("h100x2", "Whole");
    let report = beside(&template, |slices| {
        let devices = slices[0].spec.devices.as_mut().unwrap();
        devices.retain(|device| device.name != "gpu-1");
        devices[0].name = "gpu-7".to_owned();
    });
    assert_eq!(
        texts(&report),
        [
            (What::Missing, "2 devices are missing: gpu-0, gpu-1"),
            (What::Extra, "1 device is not in the template: gpu-7"),
        ]
    );
    assert_eq!(report.cluster_autoscaler.len(), 2);
    assert_eq!(report.karpenter, Vec::<String>::new());
}

#[test]
fn a_node_without_slices_and_a_half_written_pool_say_so() {
    let template = template("h100x8", "Whole, Mig");
    let report = beside(&template, Vec::clear);
    assert!(report.karpenter[0].starts_with("the node has no ResourceSlice of gpu.divvy.dev"));
    let report = beside(&template, |slices| {
        slices.pop();
    });
    assert!(
        report.karpenter[0].contains("slices of pool n1/divvy are there"),
        "{report:?}"
    );
    // Slices of an earlier generation are out of the pool.
    let report = beside(&template, |slices| {
        let last = slices.len() - 1;
        slices[last].spec.pool.generation = 2;
    });
    assert!(report.karpenter[0].starts_with("1 of"), "{report:?}");
    assert!(!report.cluster_autoscaler.is_empty());
}

#[test]
fn taints_and_other_values_are_named_and_keep_no_node_from_being_ready() {
    let template = template("h100x2", "Whole");
    let report = beside(&template, |slices| {
        let devices = slices[0].spec.devices.as_mut().unwrap();
        devices[0].taints = Some(vec![DeviceTaint {
            key: "gpu.divvy.dev/xid".to_owned(),
            value: Some("79".to_owned()),
            effect: "NoSchedule".to_owned(),
            time_added: None,
        }]);
        for device in devices {
            let attributes = device.attributes.as_mut().unwrap();
            attributes.get_mut("driverVersion").unwrap().version = Some("1.2.3".to_owned());
            let memory = device.capacity.as_mut().unwrap().get_mut("memory").unwrap();
            memory.value.0 = "1Gi".to_owned();
        }
    });
    let found = texts(&report);
    assert_eq!(found.len(), 3, "{found:?}");
    assert!(
        found[0]
            .1
            .starts_with("taint gpu.divvy.dev/xid=79:NoSchedule on gpu-1: no pod gets")
    );
    assert!(
        found[1].1.starts_with("driverVersion is 1.2.3, and "),
        "{found:?}"
    );
    assert_eq!(found[2].1, "other capacity: gpu-0, gpu-1");
    assert!(report.is_ready());
}

#[test]
fn the_order_of_devices_and_counter_sets_are_compared_too() {
    let template = template("h100x2", "Whole, Mig");
    let report = beside(&template, |slices| {
        slices[0].spec.devices.as_mut().unwrap().reverse();
    });
    assert_eq!(texts(&report)[0].0, What::Order);
    let report = beside(&template, |slices| {
        for slice in slices {
            if let Some(sets) = &mut slice.spec.shared_counters {
                sets[0]
                    .counters
                    .values_mut()
                    .for_each(|counter| counter.value.0 = "9".to_owned());
            }
        }
    });
    assert_eq!(texts(&report)[0].0, What::Counters, "{report:?}");
}

#[test]
fn karpenters_config_has_the_devices_of_nodes_without_counters() {
    let template = template("l4x4", "Whole");
    let types = ["g6.12xlarge".to_owned(), "G6_48".to_owned()];
    let config = karpenter::dra_config(&template, &types).unwrap();
    let config = serde_json::to_value(config).unwrap();
    // The fields that its definition requires, by their names there.
    assert_eq!(config["apiVersion"], "test.karpenter.sh/v1alpha1");
    assert_eq!(config["metadata"]["name"], "divvy-g6-12xlarge");
    let pool = &config["spec"]["pools"][0];
    let expression = &pool["nodeSelectorTerms"][0]["matchExpressions"][0];
    assert_eq!(
        expression["values"],
        serde_json::json!(["g6.12xlarge", "G6_48"])
    );
    let devices = pool["resourceSlices"][0]["devices"].as_array().unwrap();
    assert_eq!(devices.len(), 4);
    assert_eq!(devices[0]["attributes"]["type"]["string"], "gpu");
}

#[test]
fn karpenters_config_is_refused_where_it_would_give_out_twice() {
    for (sim, modes) in [
        ("h100x2", "Whole, Mig"),
        ("l4x1", "Whole, TimeSlicing"),
        ("h100x1", "Mig"),
    ] {
        let error = karpenter::dra_config(&template(sim, modes), &["x".to_owned()]).unwrap_err();
        assert!(
            error.to_string().contains("has no sharedCounters"),
            "{error}"
        );
    }
    let template = template("l4x1", "Whole");
    let error = karpenter::dra_config(&template, &[]).unwrap_err();
    assert!(
        error.to_string().contains("needs --instance-type"),
        "{error}"
    );
    let long = karpenter::dra_config(&template, &["a".repeat(80)]).unwrap();
    let name = serde_json::to_value(long).unwrap()["metadata"]["name"].to_string();
    assert_eq!(name.len(), 63 + 2);
}

#[test]
fn annotations_are_for_whole_gpus_in_one_slice_and_for_nothing_else() {
    let annotated = clusterapi::annotations(&template("h100x8", "Whole")).unwrap();
    let annotations = &serde_json::to_value(annotated).unwrap()["metadata"]["annotations"];
    let of =
        |key: &str| annotations[format!("capacity.cluster-autoscaler.kubernetes.io/{key}")].clone();
    assert_eq!(of("gpu-count"), "8");
    assert_eq!(of("dra-driver"), DRIVER);
    assert_eq!(of("labels"), "divvy.dev/gpu=true");
    for modes in ["TimeSlicing", "Whole, Mig", "Whole, TimeSlicing"] {
        let error = clusterapi::annotations(&template("h100x2", modes)).unwrap_err();
        assert!(
            error.to_string().contains("never take them for ready"),
            "{modes}: {error}"
        );
    }
    let error = clusterapi::annotations(&template("none", "Whole")).unwrap_err();
    assert!(
        error.to_string().contains("publishes no devices"),
        "{error}"
    );
}
