//! Cases against [`plan_sync`], with a store of a few lines that does what a server does to slices;
//! and what both runners share.

use std::collections::BTreeMap;

use divvy_offer::{Pool, Slice, validate};
use k8s_openapi::api::resource::v1::{ResourceSlice, ResourceSliceSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time};

use crate::model::{Case, Existing, Expect, Expected, Fate, Name};
use divvy_controller::{Accepted, Target, Write, plan_sync, slice_name};
use divvy_controller::{comparable_spec, specs};

/// Runs a case against [`plan_sync`] alone, twice: the second run must have nothing to do. `Err`
/// says what differs. Cases with gates off need a server.
pub(crate) fn run_pure(case: &Case) -> Result<(), String> {
    if !case.gates_off.is_empty() {
        return Ok(());
    }
    let (driver, node) = ("gpu.divvy.dev", "node-1");
    let owner = owner(node, "node-uid");
    let mut store: BTreeMap<String, ResourceSlice> = BTreeMap::new();
    let mut version = 0_u32;
    let mut put = |store: &mut BTreeMap<String, ResourceSlice>, mut slice: ResourceSlice| {
        version += 1;
        slice.metadata.resource_version = Some(version.to_string());
        slice
            .metadata
            .uid
            .get_or_insert_with(|| format!("uid-{version}"));
        store.insert(slice.metadata.name.clone().unwrap_or_default(), slice);
    };
    for existing in &case.existing {
        put(&mut store, fixture(existing, driver, node, &owner));
    }
    let before = store.clone();
    if let Err(error) = validate(&case.desired) {
        return refused(case, &error.to_string());
    }
    let accepted = Accepted::default();
    let target = Target {
        driver,
        node,
        owner: &owner,
        pool: &case.desired,
        accepted: &accepted,
    };
    let plan = plan_sync(&store.values().cloned().collect::<Vec<_>>(), &target);
    let order = |write: &Write| {
        ["delete", "update", "create"]
            .iter()
            .position(|verb| *verb == write.verb())
    };
    if !plan.writes.is_sorted_by_key(order) {
        return Err(format!(
            "the order is not delete, update, create: {:?}",
            plan.writes
        ));
    }
    for write in plan.writes {
        match write {
            Write::Delete { name, .. } => drop(store.remove(&name)),
            Write::Update(slice) | Write::Create(slice) => put(&mut store, *slice),
        }
    }
    let after: Vec<ResourceSlice> = store.into_values().collect();
    compare(case, driver, node, &owner, &before, &after)?;
    match plan_sync(&after, &target).writes.as_slice() {
        [] => Ok(()),
        writes => Err(format!("a second sync writes again: {writes:?}")),
    }
}

/// Checks that a case wanted this refusal.
pub(crate) fn refused(case: &Case, message: &str) -> Result<(), String> {
    match &case.expect {
        Expect::Error(part) if message.contains(part) => Ok(()),
        Expect::Error(part) => Err(format!("the error {message:?} does not contain {part:?}")),
        Expect::Slices(..) => Err(format!("refused: {message}")),
    }
}

pub(crate) fn owner(node: &str, uid: &str) -> OwnerReference {
    OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Node".to_owned(),
        name: node.to_owned(),
        uid: uid.to_owned(),
        controller: Some(true),
        block_owner_deletion: None,
    }
}

/// An existing slice as an API object.
pub(crate) fn fixture(
    existing: &Existing,
    driver: &str,
    node: &str,
    owner: &OwnerReference,
) -> ResourceSlice {
    let name = match existing.name {
        Name::Index(index) => slice_name(index, driver, node),
        Name::Other(text) => format!("{text}-{driver}-{node}"),
    };
    let mut spec = spec(&existing.slice, existing.pool, driver, node);
    spec.pool.generation = existing.generation;
    spec.pool.resource_slice_count = existing.count;
    stamp(&mut spec, existing.tainted_at);
    let owner_references = existing.owned.then(|| vec![owner.clone()]);
    ResourceSlice {
        metadata: ObjectMeta {
            name: Some(name),
            owner_references,
            ..ObjectMeta::default()
        },
        spec,
    }
}

fn spec(slice: &Slice, pool: &str, driver: &str, node: &str) -> ResourceSliceSpec {
    let pool = Pool {
        name: pool.to_owned(),
        slices: vec![slice.clone()],
    };
    specs(driver, node, &pool)
        .into_iter()
        .next()
        .unwrap_or_default()
}

fn stamp(spec: &mut ResourceSliceSpec, at: Option<&str>) {
    let time = at.and_then(|at| at.parse().ok()).map(Time);
    for taint in spec
        .devices
        .iter_mut()
        .flatten()
        .flat_map(|device| device.taints.iter_mut().flatten())
    {
        taint.time_added.clone_from(&time);
    }
}

/// Compares what is there afterwards with what a case expects, whole.
pub(crate) fn compare(
    case: &Case,
    driver: &str,
    node: &str,
    owner: &OwnerReference,
    before: &BTreeMap<String, ResourceSlice>,
    after: &[ResourceSlice],
) -> Result<(), String> {
    let Expect::Slices(expected, _) = &case.expect else {
        return Err("it was published and should have been refused".to_owned());
    };
    let wanted: Vec<String> = (0..expected.len())
        .map(|index| slice_name(index, driver, node))
        .collect();
    let names: Vec<String> = after
        .iter()
        .filter_map(|slice| slice.metadata.name.clone())
        .collect();
    if names != wanted {
        return Err(format!("the slices are {names:?}, not {wanted:?}"));
    }
    let count = i64::try_from(expected.len()).unwrap_or(i64::MAX);
    for (slice, expected) in after.iter().zip(expected) {
        let name = slice.metadata.name.clone().unwrap_or_default();
        let found = (
            slice.spec.pool.generation,
            slice.spec.pool.resource_slice_count,
            fate(slice, before.get(&name)),
        );
        if found != (expected.generation, count, expected.fate) {
            let Expected {
                generation, fate, ..
            } = expected;
            return Err(format!(
                "{name} is {found:?}, not {:?}",
                (generation, count, fate)
            ));
        }
        let mut wanted = spec(&expected.slice, &case.desired.name, driver, node);
        if comparable_spec(&slice.spec) != comparable_spec(&wanted) {
            return Err(format!("{name} has {:?}, not {wanted:?}", slice.spec));
        }
        if slice.metadata.owner_references.as_deref() != Some(std::slice::from_ref(owner)) {
            return Err(format!(
                "{name} is owned by {:?}",
                slice.metadata.owner_references
            ));
        }
        if expected.tainted_at.is_some() {
            stamp(&mut wanted, expected.tainted_at);
            let times = |spec: &ResourceSliceSpec| -> Vec<Option<Time>> {
                let taints = spec
                    .devices
                    .iter()
                    .flatten()
                    .flat_map(|device| device.taints.iter().flatten());
                taints.map(|taint| taint.time_added.clone()).collect()
            };
            if times(&slice.spec) != times(&wanted) {
                return Err(format!(
                    "{name}: the times of its taints are {:?}",
                    times(&slice.spec)
                ));
            }
        }
    }
    Ok(())
}

fn fate(slice: &ResourceSlice, before: Option<&ResourceSlice>) -> Fate {
    match before {
        Some(before) if before.metadata.uid == slice.metadata.uid => {
            if before.metadata.resource_version == slice.metadata.resource_version {
                Fate::Kept
            } else {
                Fate::Updated
            }
        }
        _ => Fate::Created,
    }
}
