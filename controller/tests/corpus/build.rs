//! Parts of the cases: devices, slices, pools, and what is expected of them.

use std::collections::BTreeMap;

use divvy_offer::{
    Allowed, Amount, AttributeValue, Capacity, CounterSet, CounterUse, Device, Feature, Pool,
    RequestPolicy, Slice, Taint,
};

use crate::model::{Case, Existing, Expect, Expected, Fate, Name};

const POOL: &str = "corpus/divvy";

pub(crate) fn device(name: &str) -> Device {
    #[expect(
        clippy::expect_used,
        reason = "constants of the cases; all are run by a test"
    )]
    let mut device = Device::new(name.parse().expect("a device name"));
    device
        .attributes
        .insert("type".into(), AttributeValue::String("gpu".to_owned()));
    device.capacity.insert(
        "memory".into(),
        Capacity::whole(Amount::Bytes(81_559 << 20)),
    );
    device
}

pub(crate) fn tainted(name: &str) -> Device {
    Device {
        taints: vec![Taint::no_schedule("gpu.divvy.dev/lost", Some("xid-79"))],
        ..device(name)
    }
}

pub(crate) fn driver_version(name: &str, version: &str) -> Device {
    let mut device = device(name);
    device.attributes.insert(
        "driverVersion".into(),
        AttributeValue::Version(version.to_owned()),
    );
    device
}

pub(crate) fn bigger(name: &str) -> Device {
    let mut device = device(name);
    device
        .capacity
        .insert("memory".into(), Capacity::whole(Amount::Bytes(144 << 30)));
    device
}

pub(crate) fn shared(name: &str) -> Device {
    let allowed = Allowed::Range {
        min: Amount::Bytes(1 << 30),
        max: None,
        step: Some(Amount::Bytes(1 << 20)),
    };
    let policy = Some(RequestPolicy {
        default: Amount::Bytes(1 << 30),
        allowed,
    });
    let mut device = Device {
        allow_multiple: true,
        ..device(name)
    };
    device.capacity.insert(
        "memory".into(),
        Capacity {
            value: Amount::Bytes(80 << 30),
            policy,
        },
    );
    device
}

pub(crate) fn shared_as_dropped(name: &str) -> Device {
    let mut device = device(name);
    device
        .capacity
        .insert("memory".into(), Capacity::whole(Amount::Bytes(80 << 30)));
    device
}

pub(crate) fn slices_counter() -> BTreeMap<String, Amount> {
    [("memory-slice-0".to_owned(), Amount::Count(1))].into()
}

pub(crate) fn partition(name: &str, set: &str, counter: &str) -> Device {
    let counters = [(counter.to_owned(), Amount::Count(1))].into();
    Device {
        consumes: vec![CounterUse {
            set: set.to_owned(),
            counters,
        }],
        ..device(name)
    }
}

pub(crate) fn of(devices: impl Into<Vec<Device>>) -> Slice {
    Slice {
        devices: devices.into(),
        counter_sets: vec![],
    }
}

pub(crate) fn counters(name: &str) -> Slice {
    Slice {
        devices: vec![],
        counter_sets: vec![CounterSet {
            name: name.to_owned(),
            counters: slices_counter(),
        }],
    }
}

pub(crate) fn gpu(n: usize) -> Slice {
    of([device(&format!("gpu-{n}"))])
}

pub(crate) fn pool(slices: impl Into<Vec<Slice>>) -> Pool {
    Pool {
        name: POOL.to_owned(),
        slices: slices.into(),
    }
}

pub(crate) fn existing(name: Name, generation: i64, count: i64, slice: Slice) -> Existing {
    Existing {
        name,
        pool: POOL,
        generation,
        count,
        slice,
        tainted_at: None,
        owned: true,
    }
}

/// Complete slices of one generation, in order.
pub(crate) fn indexed<const N: usize>(generation: i64, slices: [Slice; N]) -> Vec<Existing> {
    let count = i64::try_from(N).unwrap_or(i64::MAX);
    slices
        .into_iter()
        .enumerate()
        .map(|(i, slice)| existing(Name::Index(i), generation, count, slice))
        .collect()
}

pub(crate) fn expected(generation: i64, fate: Fate, slice: Slice) -> Expected {
    Expected {
        generation,
        fate,
        slice,
        tainted_at: None,
    }
}

/// A case in which the server keeps what it is given.
pub(crate) fn case(
    name: &'static str,
    existing: Vec<Existing>,
    desired: Pool,
    expect: impl Into<Vec<Expected>>,
) -> Case {
    let expect = Expect::Slices(expect.into(), vec![]);
    Case {
        name,
        existing,
        before: None,
        desired,
        gates_off: vec![],
        expect,
    }
}

pub(crate) fn refused(name: &'static str, desired: Pool, message: &'static str) -> Case {
    Case {
        name,
        existing: vec![],
        before: None,
        desired,
        gates_off: vec![],
        expect: Expect::Error(message),
    }
}

/// A case with a feature gate off, from nothing: `sent` is wanted, `stored` is what remains.
pub(crate) fn drops(
    name: &'static str,
    feature: Feature,
    sent: Vec<Slice>,
    stored: Vec<Slice>,
) -> Case {
    let expect = stored
        .into_iter()
        .map(|slice| expected(1, Fate::Created, slice))
        .collect();
    Case {
        name,
        existing: vec![],
        before: None,
        desired: pool(sent),
        gates_off: vec![feature],
        expect: Expect::Slices(expect, vec![feature]),
    }
}
