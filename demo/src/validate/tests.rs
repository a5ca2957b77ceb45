use divvy_api::names::DRIVER;

use super::*;

const POLICY: &str = "apiVersion: divvy.dev/v1beta1\nkind: GpuPolicy\nmetadata: {name: all}\n\
                      spec: {rules: [{modes: [Whole, Mig, TimeSlicing]}]}\n---\n";

fn judged(sim: &str, text: &str) -> Judgement {
    let manifests = Manifests::parse("x", text).unwrap();
    let spec: Spec = sim.parse().unwrap();
    let fleet = spec.nodes(DRIVER, &manifests.policies, &[]).unwrap();
    judge(&manifests, DRIVER, &fleet, &classes(DRIVER).unwrap())
}

fn class(name: &str, expression: &str) -> String {
    format!(
        "apiVersion: resource.k8s.io/v1\nkind: DeviceClass\nmetadata: {{name: {name}}}\nspec:\n  selectors:\n  \
         - cel:\n      expression: |-\n        {expression}\n---\n"
    )
}

fn claim(name: &str, exactly: &str) -> String {
    format!(
        "apiVersion: resource.k8s.io/v1\nkind: ResourceClaim\nmetadata: {{name: {name}}}\nspec:\n  devices:\n    \
         requests: [{{name: gpu, exactly: {{{exactly}}}}}]\n---\n"
    )
}

fn only(lines: &[String]) -> &str {
    let [one] = lines else {
        panic!("{lines:#?}");
    };
    one
}

#[test]
fn what_a_fleet_has_is_valid() {
    let text = class(
        "big",
        "device.driver == 'gpu.divvy.dev' && device.attributes['gpu.divvy.dev'].type == 'gpu'",
    ) + &claim("a", "deviceClassName: big")
        + &claim("b", "deviceClassName: gpu.divvy.dev, count: 4");
    // Four GPUs are only on the second kind of node.
    assert_eq!(judged("2*l4x2,1*h100x4", &text), Judgement::default());
}

#[test]
fn a_selector_that_does_not_compile_is_an_error_and_only_that() {
    let found = judged("h100x2", &class("broken", "device.driver == "));
    let error = only(&found.errors);
    assert!(error.starts_with("DeviceClass broken: spec.selectors[0].cel.expression: Invalid value: compilation failed"), "{error}");
}

#[test]
fn a_selector_that_costs_too_much_is_an_error() {
    let deep = "device.attributes.all(a, device.attributes.all(b, device.attributes.all(c, device.attributes.all(d, a == b && c == d))))";
    let found = judged("h100x2", &class("dear", deep));
    assert!(
        only(&found.errors).contains("Forbidden: too complex, exceeds cost limit"),
        "{found:?}"
    );
}

#[test]
fn a_class_that_nothing_satisfies_is_an_error() {
    let text = class(
        "old",
        "device.attributes['gpu.divvy.dev'].productName == 'NVIDIA K80'",
    );
    let found = judged("2*h100x2,l4x1", &text);
    assert!(
        only(&found.errors).starts_with("DeviceClass old: nothing satisfies it: "),
        "{found:?}"
    );
    // A sick GPU is there all the same: taints do not count for a class.
    assert_eq!(
        judged("h100x2", &class("any", "true")).errors,
        Vec::<String>::new()
    );
}

#[test]
fn a_name_that_no_device_has_is_a_warning_with_the_one_meant() {
    let typo = "true || device.attributes['gpu.divvy.dev'].prodductName == 'x'";
    let text = class("typo", typo);
    let found = judged("h100x2", &text);
    assert_eq!(found.errors, Vec::<String>::new());
    assert!(
        only(&found.warnings).contains("did you mean \"productName\"?"),
        "{found:?}"
    );
}

#[test]
fn a_claim_that_no_node_can_hold_is_an_error() {
    let text = claim("many", "deviceClassName: gpu.divvy.dev, count: 3");
    let found = judged("9*h100x2", &text);
    let error = only(&found.errors);
    assert!(
        error.starts_with("ResourceClaim default/many: no node has it, even when all is free: "),
        "{error}"
    );
    assert_eq!(judged("h100x3", &text), Judgement::default());
}

#[test]
fn what_policies_publish_decides() {
    let share = claim(
        "share",
        "deviceClassName: share.divvy.dev, capacity: {requests: {memory: 10Gi}}",
    );
    assert_eq!(judged("h100x2", &share).errors.len(), 1);
    assert_eq!(
        judged("h100x2", &(POLICY.to_owned() + &share)),
        Judgement::default()
    );
}

#[test]
fn a_config_of_another_kind_of_request_is_an_error() {
    let text = "apiVersion: resource.k8s.io/v1\nkind: ResourceClaimTemplate\nmetadata: {name: t}\nspec:\n  spec:\n    devices:\n      \
                requests: [{name: gpu, exactly: {deviceClassName: gpu.divvy.dev}}]\n      config:\n      - requests: [gpu]\n        \
                opaque: {driver: gpu.divvy.dev, parameters: {apiVersion: divvy.dev/v1beta1, kind: ShareConfig}}\n";
    let found = judged("h100x2", text);
    assert!(
        only(&found.errors).contains("a ShareConfig for a request of class gpu.divvy.dev"),
        "{found:?}"
    );
}
