//! `GpuPolicy`: every file in `fixtures/policy/good` decodes, every one in `bad` is refused with
//! the error beside it.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests; clippy excepts only the test functions themselves"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use divvy_api::policy::{
    BurstSettings, Factor, GpuMatch, GpuPolicy, GpuPolicySpec, HealthSettings, IdleAction,
    IdleSettings, Instances, LabelSelector, MemoryPart, MemorySize, MigSettings, ModeLock,
    NodeMatch, OfferedMode, Operator, OveruseAction, PlacementOrder, PolicyRule, QuotaSettings,
    Requirement, ShareSettings, ShareUnit, TimeSlice, UsageSettings, decode_policy,
};
use serde_json::Value;

fn fixtures(folder: &str) -> Vec<(PathBuf, Value)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fixtures/policy")
        .join(folder);
    let mut files: Vec<PathBuf> = fs_err::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|p| p.extension().is_some_and(|e| e == "yaml"))
        .collect();
    files.sort();
    assert!(!files.is_empty());
    let read = |path: PathBuf| {
        let value = serde_saphyr::from_slice(&fs_err::read(&path).unwrap()).unwrap();
        (path, value)
    };
    files.into_iter().map(read).collect()
}

fn set<T: Ord>(items: impl IntoIterator<Item = T>) -> BTreeSet<T> {
    items.into_iter().collect()
}

/// Every field of every type has a value, by name: a new field does not compile without a line
/// here.
fn full() -> GpuPolicySpec {
    let expression = Requirement {
        key: "pool".into(),
        operator: Operator::In,
        values: set(["x".to_owned()]),
    };
    GpuPolicySpec {
        priority: 10,
        nodes: Some(NodeMatch {
            names: set(["n1".to_owned()]),
            selector: Some(LabelSelector {
                match_labels: BTreeMap::from([("zone".to_owned(), "a".to_owned())]),
                match_expressions: vec![expression],
            }),
        }),
        mode_lock: Some(ModeLock::Enabled),
        rules: vec![PolicyRule {
            name: Some("all".to_owned()),
            nodes: Some(NodeMatch {
                names: set(["n1".to_owned()]),
                selector: None,
            }),
            gpus: Some(GpuMatch {
                uuids: set(["GPU-12345678-1234-1234-1234-123456780001".to_owned()]),
                ordinals: set([0]),
                products: set(["*H100*".to_owned()]),
                pci_addresses: set(["0000:3b:00.0".to_owned()]),
            }),
            modes: Some(set([
                OfferedMode::Whole,
                OfferedMode::Mig,
                OfferedMode::TimeSlicing,
            ])),
            mig: Some(MigSettings {
                profiles: Some(set(["1g.10gb".to_owned(), "1g.10gb+me".to_owned()])),
                placement_order: Some(PlacementOrder::Descending),
                instances: Some(Instances::OnDemand),
                sharing: None,
            }),
            shares: Some(ShareSettings {
                unit: Some(ShareUnit::Amounts),
                slots: Some(8),
                min_percent: None,
                min_memory: Some(MemorySize { bytes: 100 << 20 }),
                min_cores: Some(5),
                reserved_memory: Some(MemoryPart::Amount(MemorySize { bytes: 1024 << 20 })),
                burst: Some(BurstSettings {
                    memory: Some(Factor {
                        burst: "1.5x".parse().unwrap(),
                    }),
                }),
                time_slice: Some(TimeSlice::Short),
            }),
            health: Some(HealthSettings {
                evict: Some(true),
                restart_wedged_mps: Some(true),
            }),
            usage: Some(UsageSettings {
                overuse: Some(OveruseAction::Evict),
                idle: Some(IdleSettings {
                    after_seconds: Some(600),
                    action: Some(IdleAction::Reclaim),
                    grace_seconds: Some(60),
                }),
            }),
            quota: Some(QuotaSettings {
                counters: Some(true),
            }),
        }],
    }
}

#[test]
fn good_policies_decode_and_read_back_as_they_are_written() {
    for (path, object) in fixtures("good") {
        let policy = decode_policy(&object).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let mut again = object.clone();
        again["spec"] = serde_json::to_value(&policy.spec).unwrap();
        assert_eq!(decode_policy(&again).unwrap(), policy, "{}", path.display());
        if path.ends_with("full.yaml") {
            let uid = Some("11111111-2222-3333-4444-555555555555".to_owned());
            assert_eq!(
                policy,
                GpuPolicy {
                    name: "full".to_owned(),
                    uid,
                    generation: Some(3),
                    spec: full()
                }
            );
        }
    }
}

#[test]
fn shares_by_percent_have_settings_of_their_own() {
    let (_, object) = fixtures("good")
        .into_iter()
        .find(|(path, _)| path.ends_with("percent.yaml"))
        .unwrap();
    let shares: Vec<_> = decode_policy(&object)
        .unwrap()
        .spec
        .rules
        .into_iter()
        .map(|rule| rule.shares.unwrap())
        .collect();
    let percent = ShareSettings {
        unit: Some(ShareUnit::Percent),
        ..ShareSettings::default()
    };
    let full = ShareSettings {
        slots: Some(100),
        min_percent: Some(10),
        reserved_memory: Some(MemoryPart::Amount(MemorySize { bytes: 1 << 30 })),
        time_slice: Some(TimeSlice::Long),
        ..percent.clone()
    };
    assert_eq!(shares, [full, percent]);
}

#[test]
fn bad_policies_are_refused_with_the_error_beside_them() {
    for (path, object) in fixtures("bad") {
        let error = decode_policy(&object)
            .expect_err(&path.display().to_string())
            .to_string();
        let expected = path.with_extension("expected");
        if std::env::var_os("DIVVY_BLESS").is_some() {
            fs_err::write(&expected, format!("{error}\n")).unwrap();
        }
        assert_eq!(
            error,
            fs_err::read_to_string(expected).unwrap().trim_end(),
            "{}",
            path.display()
        );
    }
}
