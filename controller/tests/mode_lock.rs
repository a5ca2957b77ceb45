//! The mode lock on the slices as they are published: the first claim decides what a GPU is, the
//! last one frees it.
#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use divvy_allocator::{AllocatedState, Allocator, Features, Inputs, Outcome, Slices};
use divvy_controller::{Accepted, Target, Write, plan_sync};
use divvy_gpu_sim::{Engine, mig_capabilities};
use divvy_model::Ordinals;
use divvy_offer::{GpuRules, Input, KubeVersion, Modes, ServerFeatures, carve};
use divvy_why::detail::detail;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use serde_json::{Value, from_value, json};

const DRIVER: &str = "gpu.divvy.dev";

struct World {
    slices: Vec<ResourceSlice>,
    classes: Vec<DeviceClass>,
    node: Node,
    held: Vec<ResourceClaim>,
}

impl World {
    /// A node whose GPUs may become everything.
    fn new(gpus: &str) -> Self {
        let engine = Engine::new(&gpus.parse().unwrap());
        let inventory = engine.inventory();
        let mut ordinals = Ordinals::default();
        ordinals.assign(
            inventory
                .gpus
                .iter()
                .map(|(uuid, gpu)| (uuid.clone(), gpu.facts.pci_address)),
        );
        let caps = |gpu: &divvy_gpu_sim::SimGpu| {
            Some((gpu.facts.uuid.clone(), mig_capabilities(&gpu.model)?))
        };
        let capabilities = engine.gpus().iter().filter_map(caps).collect();
        let all = GpuRules {
            modes: Modes::everything(),
            ..GpuRules::default()
        };
        let rules = inventory
            .gpus
            .keys()
            .map(|uuid| (uuid.clone(), all.clone()))
            .collect();
        let features = ServerFeatures::default().observe(KubeVersion::new(1, 37, 1));
        let plain = Input::plain("n1", &inventory, &ordinals, &features);
        let pool = carve(&Input {
            capabilities: &capabilities,
            rules: &rules,
            ..plain
        })
        .pool;
        let owner = OwnerReference {
            kind: "Node".to_owned(),
            name: "n1".to_owned(),
            ..OwnerReference::default()
        };
        let accepted = Accepted::default();
        let target = Target {
            driver: DRIVER,
            node: "n1",
            owner: &owner,
            pool: &pool,
            accepted: &accepted,
        };
        let writes = plan_sync(&[], &target).writes.into_iter();
        let slices = writes.filter_map(|write| match write {
            Write::Create(slice) => Some(*slice),
            Write::Update(_) | Write::Delete { .. } => None,
        });
        let class = |name: &str| -> DeviceClass {
            let cel = format!(
                "device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].type == '{name}'"
            );
            let selectors = json!([{ "cel": { "expression": cel } }]);
            from_value(json!({ "metadata": { "name": name }, "spec": { "selectors": selectors } }))
                .unwrap()
        };
        Self {
            slices: slices.collect(),
            classes: ["gpu", "mig", "gpu-share", "gpu-admin"].map(class).into(),
            node: from_value(json!({ "metadata": { "name": "n1" } })).unwrap(),
            held: Vec::new(),
        }
    }

    /// Places a claim for one device; which it got, or why not.
    fn place(&mut self, name: &str, class: &str, more: &Value) -> Result<String, String> {
        let mut exactly =
            json!({ "deviceClassName": class, "allocationMode": "ExactCount", "count": 1 });
        exactly
            .as_object_mut()
            .unwrap()
            .extend(more.as_object().cloned().unwrap());
        let mut claim: ResourceClaim = from_value(json!({
            "metadata": { "name": name, "namespace": "default", "uid": name },
            "spec": { "devices": { "requests": [{ "name": "r", "exactly": exactly }] } },
        }))
        .unwrap();
        let (slices, allocated) = (
            Slices::new(&self.slices),
            AllocatedState::from_claims(&self.held),
        );
        let inputs = Inputs {
            slices: &slices,
            classes: &self.classes,
            allocated: &allocated,
            node: &self.node,
        };
        match Allocator::new(Features::default())
            .allocate(&inputs, &[&claim])
            .unwrap()
        {
            Outcome::DoesNotFit(why) => Err(detail(&why)),
            Outcome::Fits(allocated) => {
                let [result] = allocated.results.as_slice() else {
                    panic!("one claim, one result")
                };
                let devices = result
                    .devices
                    .as_ref()
                    .and_then(|devices| devices.results.as_deref())
                    .unwrap();
                let device = devices.first().unwrap().clone();
                let status = json!({ "allocation": result });
                claim.status = Some(from_value(status).unwrap());
                self.held.push(claim);
                Ok(device.device)
            }
        }
    }

    fn release(&mut self, name: &str) {
        self.held
            .retain(|claim| claim.metadata.name.as_deref() != Some(name));
    }
}

fn memory(quantity: &str) -> Value {
    json!({ "capacity": { "requests": { "memory": quantity } } })
}

#[test]
fn while_a_share_lives_its_gpu_is_nothing_else_and_the_last_one_frees_it() {
    let mut world = World::new("h100x1");
    assert_eq!(
        world.place("a", "gpu-share", &memory("30Gi")),
        Ok("gpu-0-ts".to_owned())
    );
    assert_eq!(
        world.place("b", "gpu-share", &memory("40Gi")),
        Ok("gpu-0-ts".to_owned())
    );
    let over = world.place("c", "gpu-share", &memory("20Gi")).unwrap_err();
    assert!(over.contains("is short of memory"), "{over}");
    for class in ["gpu", "mig"] {
        let why = world.place("x", class, &json!({})).unwrap_err();
        assert!(
            why.contains("counter set gpu-0") && why.contains("default/a"),
            "{class}: {why}"
        );
    }
    world.release("a");
    assert!(world.place("x", "gpu", &json!({})).is_err(), "one is left");
    world.release("b");
    assert_eq!(world.place("x", "gpu", &json!({})), Ok("gpu-0".to_owned()));
    for class in ["gpu-share", "mig"] {
        assert!(world.place("y", class, &json!({})).is_err(), "{class}");
    }
    world.release("x");
    assert_eq!(
        world.place("m", "mig", &json!({})),
        Ok("gpu-0-mig-1g10gb-19-0".to_owned())
    );
    assert!(world.place("y", "gpu-share", &json!({})).is_err());
    assert_eq!(
        world.place("n", "mig", &json!({})),
        Ok("gpu-0-mig-1g10gb-19-1".to_owned())
    );
}

#[test]
fn small_claims_fill_from_one_end_and_whole_gpus_from_the_other() {
    let mut world = World::new("h100x3");
    assert_eq!(
        world.place("a", "gpu-share", &json!({})),
        Ok("gpu-0-ts".to_owned())
    );
    assert_eq!(world.place("b", "gpu", &json!({})), Ok("gpu-2".to_owned()));
    assert_eq!(
        world.place("c", "mig", &json!({})),
        Ok("gpu-1-mig-1g10gb-19-0".to_owned())
    );
    assert_eq!(
        world.place("d", "gpu-share", &json!({})),
        Ok("gpu-0-ts".to_owned())
    );
}

#[test]
fn who_asks_for_nothing_gets_a_fair_part_and_all_of_them_fit() {
    let mut world = World::new("l4x1");
    for n in 0..16 {
        assert_eq!(
            world.place(&format!("s{n}"), "gpu-share", &json!({})),
            Ok("gpu-0-ts".to_owned()),
            "{n}"
        );
    }
    let why = world
        .place("one-more", "gpu-share", &json!({}))
        .unwrap_err();
    assert!(why.contains("is short of cores"), "{why}");
}

#[test]
fn a_gpu_in_use_can_be_had_with_admin_access() {
    let mut world = World::new("h100x1");
    world.place("a", "mig", &json!({})).unwrap();
    let admin = world.place("monitor", "gpu-admin", &json!({ "adminAccess": true }));
    assert_eq!(admin, Ok("gpu-0-admin".to_owned()));
    assert!(
        world
            .place("monitor-2", "gpu", &json!({ "adminAccess": true }))
            .is_err(),
        "counters are in the way"
    );
    assert_eq!(
        world.place("b", "mig", &json!({})),
        Ok("gpu-0-mig-1g10gb-19-1".to_owned())
    );
}
