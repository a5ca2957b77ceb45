use divvy_cdi::DeviceNode;
use serde_json::{Value, json};

use super::*;

const PLAIN: Look = Look {
    colour: false,
    wide: false,
    all: true,
};

fn claim(state: State, cdi: Option<Value>) -> ClaimReport {
    ClaimReport {
        claim: "default/c".to_owned(),
        pods: vec!["p".to_owned()],
        state,
        cdi,
    }
}

fn report(claims: Vec<ClaimReport>) -> Report {
    let device = PublishedDevice {
        name: "gpu-0".to_owned(),
        ..PublishedDevice::default()
    };
    let round = Round {
        claims,
        ..Round::default()
    };
    let scenario = Scenario {
        name: "one".to_owned(),
        rounds: vec![round],
        ..Scenario::default()
    };
    Report {
        sim: "h100x1".to_owned(),
        published: vec![device],
        scenarios: vec![scenario],
        ..Report::default()
    }
}

fn prepared() -> Report {
    let node = DeviceNode::character("/dev/nvidia0", 195, 0, 0o666, 0);
    let cdi = json!({
        "cdiVersion": "0.5.0", "kind": "gpu.divvy.dev/claim",
        "containerEdits": {"env": ["A=b"], "mounts": [{"hostPath": "/h", "containerPath": "/l"}]},
        "devices": [{"name": "u-gpu-0", "containerEdits": {"deviceNodes": [node]}}],
    });
    let devices = vec![DeviceReport {
        requests: vec!["gpu".to_owned()],
        device: "gpu-0".to_owned(),
        cdi_ids: vec!["gpu.divvy.dev/claim=u-gpu-0".to_owned()],
        ..DeviceReport::default()
    }];
    report(vec![claim(
        State::Prepared {
            devices,
            prepare_us: 1234,
        },
        Some(cdi),
    )])
}

#[test]
fn a_prepared_claim_is_shown_and_if_wide_with_its_node_and_its_edits() {
    let text = render(&prepared(), PLAIN);
    assert!(text.contains("\n  c      p        gpu-0\n"), "{text}");
    assert!(
        text.ends_with(
            "1 manifest, 1 claim: all as expected, all given back, nothing left behind."
        ),
        "{text}"
    );
    let text = render(
        &prepared(),
        Look {
            wide: true,
            ..PLAIN
        },
    );
    assert!(
        text.contains("  c      p        gpu-0  gpu      /dev/nvidia0  1       1.2 ms"),
        "{text}"
    );
    assert!(
        text.contains("  deviceNodes  1      /dev/nvidia0"),
        "{text}"
    );
}

#[test]
fn a_pending_claim_is_a_problem_with_its_reason_once() {
    let state = State::Pending {
        reason: "no room".to_owned(),
        detail: "device by device".to_owned(),
        cause: None,
        expected: false,
    };
    let text = render(&report(vec![claim(state, None)]), PLAIN);
    assert!(text.contains("✗ one\n"), "{text}");
    assert!(text.contains("\n  p is pending: no room\n"), "{text}");
    assert_eq!(text.matches("no room").count(), 1, "{text}");
    assert!(!text.contains("device by device"), "{text}");
    assert!(text.ends_with("1 manifest, 1 claim, 1 problem."), "{text}");
}

#[test]
fn what_is_skipped_or_fails_takes_a_line_and_says_why() {
    let mut report = prepared();
    report.scenarios.push(Scenario {
        name: "other".to_owned(),
        skipped: Some("needs 1 1g partition, the node has none".to_owned()),
        ..Scenario::default()
    });
    let problem = Some("the API server refuses it: x".to_owned());
    report.scenarios.push(Scenario {
        name: "bad".to_owned(),
        problem,
        ..Scenario::default()
    });
    let text = render(
        &report,
        Look {
            all: false,
            ..PLAIN
        },
    );
    assert!(
        text.contains(
            "\n· other                 skipped: needs 1 1g partition, the node has none\n"
        ),
        "{text}"
    );
    assert!(
        text.contains("\n✗ bad\n    the API server refuses it: x\n"),
        "{text}"
    );
    assert!(
        text.contains("2 manifests, 1 claim, 1 skipped, 1 problem.\n"),
        "{text}"
    );
}

#[test]
fn lines_are_wrapped_between_words() {
    let text = format!("{} {}", "a".repeat(50), "b".repeat(40));
    let expected = [
        format!("  {}", "a".repeat(50)),
        format!("    {}", "b".repeat(40)),
    ];
    assert_eq!(wrapped(&text, "  ", "    "), expected);
    assert_eq!(shortened(&"x".repeat(100), 80).chars().count(), 80);
}
