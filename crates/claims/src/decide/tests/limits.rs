//! Limits of memory above the request.

use divvy_model::{CapsPromise, MemoryCaps};
use serde_json::json;

use super::shares::share;
use super::*;
use crate::{AllocatedDevice, ConfigEntry, ConfigSource, Times};

const GIB: u64 = 1 << 30;

/// A claim of a share of 10 GiB, or of so many percent, with this limit.
fn limited(granted: (&str, &str), limit: &str) -> Claim {
    let result = AllocatedDevice {
        consumed_capacity: [(granted.0.to_owned(), granted.1.to_owned())].into(),
        ..share("main", "gpu-0-ts", "s1")
    };
    let limits = json!({ "memory": limit });
    let parameters =
        json!({ "apiVersion": "divvy.dev/v1beta1", "kind": "ShareConfig", "limits": limits });
    let entry = ConfigEntry {
        source: ConfigSource::Claim,
        requests: Vec::new(),
        driver: "gpu.divvy.dev".to_owned(),
        parameters,
    };
    Claim {
        configs: vec![entry],
        ..claim("a", vec![result])
    }
}

const TEN: (&str, &str) = ("memory", "10Gi");
const HALF: (&str, &str) = ("percent", "50");

/// A node that caps memory, whose policy has this factor and holds so much back.
fn capping(burst: &str, share_reserved_mib: u64) -> World {
    let mut world = World::new();
    world.inventory.system.memory_caps = MemoryCaps::Available;
    let mut state = GpuState::default().in_boot(&world.boot);
    state.grant.share_burst = burst.parse().unwrap();
    state.grant.share_reserved_mib = share_reserved_mib;
    world.gpus.insert(gpu(0), Arc::new(Stored::Fine(state)));
    world
}

#[test]
fn a_share_is_capped_at_its_limit_and_keeps_its_request() {
    for (burst, granted, limit, request, cap) in [
        ("1.6x", TEN, "16Gi", 10 * GIB, 16 * GIB),
        ("1x", TEN, "10Gi", 10 * GIB, 10 * GIB),
        ("2x", TEN, "20%", 10 * GIB, 16 * GIB),
        ("1.5x", HALF, "60Gi", 40 * GIB, 60 * GIB),
        ("1.5x", HALF, "75%", 40 * GIB, 60 * GIB),
        ("2x", HALF, "100%", 40 * GIB, 80 * GIB),
    ] {
        let world = capping(burst, 0);
        let devices = plan(world.decide(&limited(granted, limit))).devices;
        let amounts = devices[0].amounts();
        assert_eq!(
            (amounts.memory, amounts.limit),
            (Some(request), Some(cap)),
            "{granted:?} {limit}"
        );
    }
    // Of a GPU whose memory is no multiple of the parts, half times 1.5 is less than 75 percent.
    let mut world = capping("1.5x", 0);
    let board = world.inventory.gpus.get_mut(&gpu(0)).unwrap();
    board.facts.memory_bytes = Some(81_559 << 20);
    let amounts = plan(world.decide(&limited(HALF, "75%"))).devices[0].amounts();
    assert_eq!(
        (amounts.memory, amounts.limit),
        (Some(40_779 << 20), Some(61_169 << 20))
    );
    assert_eq!(world.refusal(&limited(HALF, "76%")).0, "limit-above-policy");
    // Percent are of what the policy leaves to shares.
    let world = capping("2x", 16 << 10);
    let amounts = plan(world.decide(&limited(HALF, "100%"))).devices[0].amounts();
    assert_eq!(
        (amounts.memory, amounts.limit),
        (Some(32 * GIB), Some(64 * GIB))
    );
}

#[test]
fn a_limit_that_cannot_be_kept_is_refused_with_the_remedy() {
    let refused = |world: &World, granted, limit: &str| world.refusal(&limited(granted, limit));
    let of = "limits.memory of its config, ";
    for (burst, granted, limit, category, words, fix) in [
        (
            "2x",
            TEN,
            "9Gi",
            "bad-limit",
            "9Gi, is below the 10Gi that its share has been granted",
            "raise limits.memory",
        ),
        (
            "2x",
            HALF,
            "49%",
            "bad-limit",
            "49% or 40140Mi, is below the 40Gi that",
            "raise limits.memory",
        ),
        (
            "99x",
            TEN,
            "81Gi",
            "bad-limit",
            "81Gi, is above the 80Gi that all shares of its GPU have together",
            "lower limits.memory to 80Gi",
        ),
        (
            "1.5x",
            TEN,
            "16Gi",
            "limit-above-policy",
            "16Gi, is above 15Gi, the most that the policy of its GPU allows for the 10Gi that its share has been granted (shares.burst.memory: 1.5x)",
            "select memoryLimitMaxPercent >= 160",
        ),
        (
            "1x",
            TEN,
            "10241Mi",
            "limit-above-policy",
            "10241Mi, is above 10Gi, the most",
            "select memoryLimitMaxPercent >= 101",
        ),
    ] {
        let (found, text) = refused(&capping(burst, 0), granted, limit);
        assert_eq!(found, category, "{text}");
        assert!(text.contains(&format!("{of}{words}")), "{text}");
        assert!(text.contains(fix), "{text}");
    }
    // The policy holds memory back: so much less is the limit.
    let (category, text) = refused(&capping("99x", 1024), TEN, "80Gi");
    assert_eq!(category, "bad-limit", "{text}");
    // Without a policy no limit is above the request.
    let mut world = capping("2x", 0);
    world.gpus.clear();
    assert_eq!(refused(&world, TEN, "11Gi").0, "limit-above-policy");
}

#[test]
fn a_limit_on_a_node_that_keeps_none_is_refused() {
    for caps in [
        MemoryCaps::OldDriver,
        MemoryCaps::NoCgroup2,
        MemoryCaps::NoController,
        MemoryCaps::SwitchedOff,
        MemoryCaps::NoHook,
    ] {
        let mut world = capping("2x", 0);
        world.inventory.system.memory_caps = caps;
        // Also one that is the request: its author relies on it.
        for limit in ["10Gi", "16Gi"] {
            let (category, text) = world.refusal(&limited(TEN, limit));
            assert_eq!(category, "limit-not-kept");
            assert!(
                text.contains(&format!("on this node: {}", caps.lack().unwrap())),
                "{text}"
            );
            assert!(
                text.contains("select memoryLimitMaxPercent >= 100"),
                "{text}"
            );
        }
        let mut without = limited(TEN, "10Gi");
        without.configs.clear();
        assert_eq!(plan(world.decide(&without)).devices[0].memory_cap, None);
    }
    let mut world = capping("2x", 0);
    world
        .inventory
        .gpus
        .get_mut(&gpu(0))
        .unwrap()
        .facts
        .memory_bytes = None;
    let (_, text) = world.refusal(&limited(TEN, "16Gi"));
    assert!(text.contains("no memory of its own"), "{text}");
}

/// The scheduler may have chosen a share for its cap, and the node fell below that since. Whole
/// devices and shares of partitions never had one.
#[test]
fn a_share_that_was_promised_a_cap_is_refused_where_there_is_none() {
    let of = |device: &str, made: Option<i64>| {
        let result = AllocatedDevice {
            consumed_capacity: [(TEN.0.to_owned(), TEN.1.to_owned())].into(),
            ..share("main", device, "s1")
        };
        Claim {
            times: Times {
                made,
                allocated: None,
            },
            ..claim("a", vec![result])
        }
    };
    let promised = |promise: CapsPromise, caps: MemoryCaps| {
        let mut world = capping("2x", 0);
        world.inventory.system.memory_caps = caps;
        for gpu in [gpu(0), gpu(2)] {
            let mut state = GpuState::default().in_boot(&world.boot);
            state.grant.caps = promise;
            world.gpus.insert(gpu, Arc::new(Stored::Fine(state)));
        }
        world
    };
    let ended = CapsPromise::Ended { at: 998 };
    let lost = MemoryCaps::NoHook;
    for (promise, at, refused) in [
        (CapsPromise::Never, Some(1), false),
        (CapsPromise::Never, None, false),
        (CapsPromise::Given, Some(i64::MAX), true),
        (ended, Some(1000), true),
        (ended, Some(1001), false),
        (ended, None, true),
    ] {
        let world = promised(promise, lost);
        let share = of("gpu-0-ts", at);
        if refused {
            let (category, text) = world.refusal(&share);
            assert_eq!(category, "cap-lost", "{promise:?} {at:?}");
            assert!(text.contains(lost.lack().unwrap()), "{text}");
        } else {
            assert_eq!(plan(world.decide(&share)).devices[0].memory_cap, None);
        }
        for uncapped in ["gpu-0", "gpu-2-mig-1g10gb-19-0"] {
            let claim = of(uncapped, at);
            assert_eq!(plan(world.decide(&claim)).devices[0].memory_cap, None);
        }
    }
    // While the node caps memory nothing is lost.
    let world = promised(CapsPromise::Given, MemoryCaps::Available);
    let devices = plan(world.decide(&of("gpu-0-ts", None))).devices;
    assert_eq!(devices[0].memory_cap, Some(10 * GIB));
}

/// No program can start with nothing, and without a number there is nothing to hold it to.
#[test]
fn a_share_of_no_memory_is_refused_where_memory_is_capped() {
    let all = 80 << 10;
    for (reserved, granted) in [(0, ("memory", "0")), (all, HALF), (0, ("cores", "50"))] {
        let mut share = limited(granted, "10Gi");
        share.configs.clear();
        let (category, text) = capping("2x", reserved).refusal(&share);
        assert_eq!(category, "cap-lost");
        assert!(
            text.contains("the memory of its share is not known, or nothing"),
            "{text}"
        );
    }
}
