//! Texts about what divvy lacks, each with a look whether that is still so. A text without a line
//! here is found, and so is a lack that has gone.

use divvy_api::names::NVIDIA_DRIVER;
use divvy_model::{Form, MemoryCaps};
use divvy_why::driver;
use serde_json::json;

/// Says whether a config is refused.
fn refused(config: &serde_json::Value) -> bool {
    divvy_api::decode_for(NVIDIA_DRIVER, config).is_err()
}

/// Says whether a GpuPolicy with this rule is refused.
fn no_rule(rule: &serde_json::Value) -> bool {
    let policy = json!({"apiVersion": "divvy.dev/v1beta1", "kind": "GpuPolicy", "metadata": {"name": "p"}, "spec": {"rules": [rule]}});
    divvy_api::policy::decode_policy(&policy).is_err()
}

fn passes_no_gpus_through() -> bool {
    let all = [Form::ADMIN].into_iter().chain(Form::HELD);
    let mut classes = all.filter_map(|form| driver::class(NVIDIA_DRIVER, form));
    !classes.any(|class| class == driver::NVIDIA_VFIO)
}

/// A part of a text, and whether what it says is so.
type Lack = (&'static str, fn() -> bool);

const LACKS: &[Lack] = &[
    (
        "divvy does not pass GPUs through to virtual machines",
        passes_no_gpus_through,
    ),
    ("divvy has no counterpart of class", passes_no_gpus_through),
    ("has no counterpart: divvy has {}", || {
        let config =
            json!({"apiVersion": "resource.nvidia.com/v1beta1", "kind": "VfioDeviceConfig"});
        refused(&config)
    }),
    ("numbers of partitions have no counterpart", || {
        no_rule(&json!({"modes": ["Mig"], "mig": {"counts": {"1g.10gb": 7}}}))
    }),
    ("only MPS limits compute", || {
        let config = json!({"apiVersion": "divvy.dev/v1beta1", "kind": "ShareConfig", "limits": {"cores": 10}});
        refused(&config)
    }),
    (
        "drivers from R615 on keep programs to it where memory caps are on",
        || MemoryCaps::since("615.0.0") && !MemoryCaps::since("610.99.99"),
    ),
];

/// Words by which a text says that something is lacking.
const WORDS: [&str; 4] = [
    "no counterpart",
    "divvy does not pass",
    "only MPS limits",
    "nothing does (",
];

#[test]
fn what_a_text_says_is_lacking_is_lacking() {
    for (text, is_so) in LACKS {
        assert!(is_so(), "this is there now: {text}");
    }
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/convert");
    let mut sources = String::new();
    for entry in fs_err::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "rs") && !path.ends_with("tests.rs") {
            sources += &fs_err::read_to_string(path).unwrap();
        }
    }
    for (text, _) in LACKS {
        assert!(sources.contains(text), "no text says any more: {text}");
    }
    let is_code = |line: &&str| !line.trim_start().starts_with("//");
    for line in sources.lines().filter(is_code) {
        let lacks = WORDS.iter().any(|word| line.contains(word));
        let is_known = |(text, _): &Lack| line.contains(text);
        let continues = line.contains("nothing does (");
        assert!(
            !lacks || continues || LACKS.iter().any(is_known),
            "no line of LACKS for: {line}"
        );
    }
}
