use std::collections::BTreeMap;

use crate::{
    Allowed, Amount, AttributeValue, Capacity, CounterSet, CounterUse, Device, Pool, RequestPolicy,
    Slice, Taint, validate,
};

fn device(name: &str) -> Device {
    Device::new(name.parse().unwrap())
}

fn counters(n: usize) -> BTreeMap<String, Amount> {
    (0..n)
        .map(|i| (format!("c{i}"), Amount::Count(1)))
        .collect()
}

fn of_devices(devices: Vec<Device>) -> Pool {
    Pool {
        name: "node/divvy".to_owned(),
        slices: vec![Slice {
            devices,
            counter_sets: vec![],
        }],
    }
}

fn with_set(set: CounterSet, devices: Vec<Device>) -> Pool {
    let mut pool = of_devices(devices);
    pool.slices.push(Slice {
        devices: vec![],
        counter_sets: vec![set],
    });
    pool
}

fn many(n: usize) -> Vec<Device> {
    (0..n).map(|i| device(&format!("gpu-{i}"))).collect()
}

fn changed(change: impl FnOnce(&mut Device)) -> Pool {
    let mut gpu = device("gpu-0");
    change(&mut gpu);
    of_devices(vec![gpu])
}

fn attribute(name: &str, value: AttributeValue) -> Pool {
    changed(|gpu| drop(gpu.attributes.insert(name.to_owned().into(), value)))
}

fn policy(default: u64, allowed: Allowed) -> Pool {
    changed(|gpu| {
        gpu.allow_multiple = true;
        let policy = Some(RequestPolicy {
            default: Amount::Count(default),
            allowed,
        });
        gpu.capacity.insert(
            "cores".into(),
            Capacity {
                value: Amount::Count(100),
                policy,
            },
        );
    })
}

fn range(min: u64, max: Option<u64>, step: Option<u64>) -> Allowed {
    Allowed::Range {
        min: Amount::Count(min),
        max: max.map(Amount::Count),
        step: step.map(Amount::Count),
    }
}

fn values(values: &[u64]) -> Allowed {
    Allowed::Values(values.iter().copied().map(Amount::Count).collect())
}

fn text(n: usize) -> AttributeValue {
    AttributeValue::String("x".repeat(n))
}

#[test]
fn what_is_at_a_limit_passes() {
    let set = CounterSet {
        name: "gpu-0".to_owned(),
        counters: counters(32),
    };
    let user = |name: &str| {
        let mut gpu = device(name);
        gpu.consumes = vec![CounterUse {
            set: "gpu-0".to_owned(),
            counters: counters(32),
        }];
        gpu
    };
    let mut tainted = many(64);
    tainted[0].taints = (0..16)
        .map(|i| Taint::no_schedule(format!("gpu.divvy.dev/t{i}"), Some("a.b_c-1")))
        .collect();
    let pools = [
        of_devices(vec![]),
        of_devices(many(128)),
        of_devices(tainted),
        with_set(set, vec![user("gpu-0"), user("gpu-0-ts")]),
        changed(|gpu| {
            gpu.attributes = (0..32)
                .map(|i| (format!("a{i}").into(), text(64)))
                .collect();
        }),
        attribute("resource.kubernetes.io/pciBusID", AttributeValue::Int(-1)),
        attribute(&format!("a{}", "b".repeat(31)), AttributeValue::Bool(true)),
        attribute("v", AttributeValue::Version("1.2.3-rc.1+b".to_owned())),
        policy(1, Allowed::Any),
        policy(20, values(&[10, 20, 100])),
        policy(20, range(10, Some(100), Some(10))),
        policy(10, range(10, None, Some(90))),
    ];
    for pool in pools {
        assert_eq!(validate(&pool), Ok(()), "{pool:?}");
    }
}

#[test]
#[expect(clippy::too_many_lines, reason = "one table of all limits")]
fn what_is_over_a_limit_is_refused_and_the_message_says_where() {
    let set = |name: &str, n| CounterSet {
        name: name.to_owned(),
        counters: counters(n),
    };
    let user = |set: &str, n| CounterUse {
        set: set.to_owned(),
        counters: counters(n),
    };
    let mut tainted = many(65);
    tainted[64].taints = vec![Taint::no_schedule("a", None)];
    let mut consuming = many(65);
    consuming[0].consumes = vec![user("s", 1)];
    let mut twice = of_devices(many(1));
    twice.slices.push(Slice {
        devices: many(1),
        counter_sets: vec![],
    });
    let mixed = Slice {
        devices: many(1),
        counter_sets: vec![set("s", 1)],
    };
    let nine = Slice {
        devices: vec![],
        counter_sets: (0..9).map(|i| set(&format!("s{i}"), 1)).collect(),
    };
    let named = |name: &str| Pool {
        name: name.to_owned(),
        slices: vec![],
    };
    let slice = |slice| Pool {
        name: "p".to_owned(),
        slices: vec![slice],
    };
    let consumes = |uses| changed(|gpu| gpu.consumes = uses);
    let exclusive_policy = changed(|gpu| {
        let policy = Some(RequestPolicy {
            default: Amount::Count(1),
            allowed: Allowed::Any,
        });
        gpu.capacity.insert(
            "cores".into(),
            Capacity {
                value: Amount::Count(1),
                policy,
            },
        );
    });
    let big = changed(|gpu| {
        gpu.capacity
            .insert("memory".into(), Capacity::whole(Amount::Count(u64::MAX)));
    });
    let cases: Vec<(Pool, &str)> = vec![
        (named(""), "pool \"\": \"\" is not a pool name"),
        (named("a//b"), "is not a pool name"),
        (named("A"), "is not a pool name"),
        (named(&"a".repeat(254)), "is not a pool name"),
        (
            of_devices(many(129)),
            "slice 0: 129 devices, the API takes 128",
        ),
        (
            of_devices(tainted),
            "slice 0: 65 devices (some with taints or counters), the API takes 64",
        ),
        (
            of_devices(consuming),
            "65 devices (some with taints or counters)",
        ),
        (twice, "slice 1: the device \"gpu-0\" is there twice"),
        (
            slice(mixed),
            "slice 0: devices and counter sets are in one slice",
        ),
        (slice(nine), "slice 0: 9 counter sets, the API takes 8"),
        (
            with_set(set("s", 33), vec![]),
            "counter set \"s\": 33 counters, the API takes 32",
        ),
        (
            with_set(set("s", 0), vec![]),
            "a set with at least one counter",
        ),
        (with_set(set("S", 1), vec![]), "\"S\" is not a DNS label"),
        (
            slice(Slice {
                devices: vec![],
                counter_sets: vec![set("s", 1), set("s", 1)],
            }),
            "the counter set \"s\" is there twice",
        ),
        (
            consumes(vec![user("s", 1)]),
            "device gpu-0, consumes: the counter set \"s\" is not in the pool",
        ),
        (
            consumes(vec![user("a", 1), user("b", 1), user("c", 1)]),
            "3 counter sets consumed, the API takes 2",
        ),
        (
            with_set(
                set("s", 1),
                vec![{
                    let mut gpu = device("gpu-0");
                    gpu.consumes = vec![user("s", 2)];
                    gpu
                }],
            ),
            "the counter \"c1\" is not in the pool",
        ),
        (
            with_set(
                set("s", 1),
                vec![{
                    let mut gpu = device("gpu-0");
                    gpu.consumes = vec![user("s", 1), user("s", 1)];
                    gpu
                }],
            ),
            "the counter set \"s\" is there twice",
        ),
        (
            changed(|gpu| {
                gpu.attributes = (0..33).map(|i| (format!("a{i}").into(), text(1))).collect();
            }),
            "33 attributes and capacities",
        ),
        (
            attribute("productName", text(65)),
            "device gpu-0, attribute \"productName\": ",
        ),
        (
            attribute(
                "driverVersion",
                AttributeValue::Version("580.95.05".to_owned()),
            ),
            "is not a semantic version",
        ),
        (attribute("9a", text(1)), "is not a qualified name"),
        (
            attribute(&"a".repeat(33), text(1)),
            "is not a qualified name",
        ),
        (
            attribute(&format!("{}/a", "d".repeat(64)), text(1)),
            "is not a qualified name",
        ),
        (
            attribute("Example.com/a", text(1)),
            "is not a qualified name",
        ),
        (
            changed(|gpu| {
                gpu.taints = (0..17)
                    .map(|i| Taint::no_schedule(format!("t{i}"), None))
                    .collect();
            }),
            "17 taints",
        ),
        (
            changed(|gpu| gpu.taints = vec![Taint::no_schedule("-a", None)]),
            "\"-a\" is not a label key",
        ),
        (
            changed(|gpu| gpu.taints = vec![Taint::no_schedule("a", Some("b c"))]),
            "\"b c\" is not a label value",
        ),
        (big, "device gpu-0, capacity \"memory\": "),
        (
            exclusive_policy,
            "the device does not allow multiple allocations",
        ),
        (
            policy(101, Allowed::Any),
            "the default is over the capacity",
        ),
        (
            policy(15, values(&[10, 20])),
            "the default is not a valid value",
        ),
        (policy(10, values(&[20, 10])), "do not ascend"),
        (policy(10, values(&[10, 10])), "do not ascend"),
        (
            policy(10, values(&[10, 101])),
            "a valid value is over the capacity",
        ),
        (
            policy(1, values(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11])),
            "11 valid values, the API takes 10",
        ),
        (
            policy(5, range(10, None, None)),
            "the default is under the minimum",
        ),
        (
            policy(50, range(10, Some(40), None)),
            "the default is over the maximum",
        ),
        (
            policy(10, range(10, Some(101), None)),
            "the maximum is over the capacity",
        ),
        (
            policy(10, range(10, None, Some(91))),
            "the minimum and one step are over the capacity",
        ),
        (
            policy(15, range(10, None, Some(10))),
            "the default is not a number of steps",
        ),
        (
            policy(20, range(10, Some(95), Some(10))),
            "the maximum is not a number of steps",
        ),
        (policy(10, range(10, None, Some(0))), "the step is zero"),
    ];
    for (pool, part) in cases {
        let message = validate(&pool).expect_err(part).to_string();
        assert!(message.contains(part), "{message:?} contains {part:?}");
    }
}

#[test]
fn the_message_names_slice_device_and_field() {
    assert_eq!(
        validate(&attribute("productName", text(65)))
            .unwrap_err()
            .to_string(),
        format!(
            "the pool cannot be published: device gpu-0, attribute \"productName\": {:?} is not a text of at most 64 bytes",
            "x".repeat(65)
        )
    );
}
