use crate::*;

const UID: &str = "8a3f0b6e-2a57-4ac3-9d4b-0f6a3f1f9c11";

fn node(path: &str, minor: u32) -> DeviceNode {
    DeviceNode::character(path, 195, minor, 0o666, 0)
}

fn device(name: &str, path: &str, minor: u32) -> Device {
    let container_edits = ContainerEdits {
        device_nodes: vec![node(path, minor)],
        ..Default::default()
    };
    Device {
        name: format!("{UID}-{name}"),
        container_edits,
    }
}

fn good() -> Spec {
    let common = ContainerEdits {
        env: vec!["NVIDIA_VISIBLE_DEVICES=void".into()],
        device_nodes: vec![node("/dev/nvidiactl", 255)],
        mounts: vec![Mount {
            host_path: "/usr/lib64/libcuda.so.580.95.05".into(),
            container_path: "/usr/local/nvidia/lib64/libcuda.so.580.95.05".into(),
            options: vec!["ro".into(), "bind".into()],
        }],
        hooks: vec![Hook::new(
            Stage::CreateContainer,
            "/opt/divvy-cdi-hook".into(),
            vec!["divvy-cdi-hook".into(), "update-ldcache".into()],
            vec!["A=".into()],
            30,
        )],
        ..ContainerEdits::default()
    };
    let devices = vec![
        device("gpu-0-ts-s1", "/dev/nvidia0", 0),
        device("gpu-1", "/dev/nvidia1", 1),
    ];
    let kind = "gpu.divvy.dev/claim".to_owned();
    Spec {
        kind,
        devices,
        container_edits: common,
        ..Spec::default()
    }
}

/// Returns the bytes of a document with its own edits as the common ones.
fn bytes(spec: Spec) -> Result<Vec<u8>, SpecError> {
    let common = CommonEdits::new(spec.container_edits.clone())?;
    spec.into_json_bytes(&common)
}

fn message(change: impl FnOnce(&mut Spec)) -> String {
    let mut spec = good();
    change(&mut spec);
    bytes(spec).expect_err("refused").to_string()
}

#[test]
fn a_claims_document_is_exactly_this() {
    let text = String::from_utf8(bytes(good()).unwrap()).unwrap();
    let expected = concat!(
        r#"{"cdiVersion":"0.5.0","kind":"gpu.divvy.dev/claim","devices":[{"#,
        r#""name":"8a3f0b6e-2a57-4ac3-9d4b-0f6a3f1f9c11-gpu-0-ts-s1","containerEdits":{"deviceNodes":[{"#,
        r#""path":"/dev/nvidia0","type":"c","major":195,"minor":0,"fileMode":438,"permissions":"rwm"}]}},"#,
    );
    assert!(text.starts_with(expected), "{text}");
    let expected = concat!(
        r#""hooks":[{"hookName":"createContainer","path":"/opt/divvy-cdi-hook","#,
        r#""args":["divvy-cdi-hook","update-ldcache"],"env":["A="],"timeout":30}]"#,
    );
    assert!(text.contains(expected), "{text}");
    assert!(!text.contains("gid"), "{text}");
}

#[test]
fn bytes_read_back_are_the_same_document_and_the_same_bytes() {
    let bytes = bytes(good()).unwrap();
    let back: Spec = serde_json::from_slice(&bytes).unwrap();
    assert_eq!(
        back,
        Spec {
            cdi_version: "0.5.0".to_owned(),
            ..good()
        }
    );
    assert_eq!(self::bytes(back).unwrap(), bytes);
}

#[test]
fn the_version_is_the_lowest_that_the_content_needs() {
    let with = |change: &dyn Fn(&mut Spec)| {
        let device = Device {
            name: "a-gpu-0".to_owned(),
            container_edits: ContainerEdits::env(["A=b"]),
        };
        let mut spec = Spec {
            kind: "gpu.divvy.dev/claim".to_owned(),
            devices: vec![device],
            ..Spec::default()
        };
        change(&mut spec);
        let written: Spec = serde_json::from_slice(&bytes(spec).unwrap()).unwrap();
        written.cdi_version
    };
    assert_eq!(with(&|_| {}), "0.3.0");
    assert_eq!(with(&|s| s.devices[0].name = "0-gpu".into()), "0.5.0");
    assert_eq!(
        with(&|s| s.devices[0].container_edits.additional_gids.push(44)),
        "0.7.0"
    );
    assert_eq!(
        with(&|s| s.container_edits.additional_gids.push(44)),
        "0.7.0"
    );
}

#[test]
fn errors_name_the_place_and_the_rule() {
    bytes(good()).unwrap();
    assert!(message(|s| s.kind = "claim".into()).starts_with(
        "kind \"claim\" is not of the form vendor/class, such as gpu.divvy.dev/claim: both begin with a letter"
    ));
    assert!(message(|s| s.kind = "1a/b".into()).starts_with("kind \"1a/b\""));
    assert!(message(|s| s.kind = "a/b-".into()).starts_with("kind \"a/b-\""));
    assert!(message(|s| s.devices[0].name = "-x".into()).contains("device name \"-x\""));
    assert!(message(|s| s.devices[0].name = "a=b".into()).contains("device name \"a=b\""));
    assert_eq!(
        message(|s| s.devices.clear()),
        "the document lists no device"
    );
    let duplicate = message(|s| s.devices[1] = s.devices[0].clone());
    assert_eq!(
        duplicate,
        format!("device {UID}-gpu-0-ts-s1 is listed twice")
    );
    assert!(
        message(|s| s.devices[0].container_edits = ContainerEdits::default())
            .ends_with("changes nothing: its containerEdits are empty")
    );
    assert_eq!(
        message(|s| s.container_edits.env.push("NO_VALUE".into())),
        "containerEdits: env \"NO_VALUE\" is not of the form NAME=value"
    );
    assert!(message(|s| s.container_edits.env.push("=x".into())).contains("NAME=value"));
    assert!(message(|s| s.container_edits.hooks[0].env.push("=x".into())).contains("NAME=value"));
    assert_eq!(
        message(|s| s.container_edits.mounts[0].container_path = "lib".into()),
        "containerEdits: mounts.containerPath \"lib\" must be an absolute path without '..'"
    );
    assert!(
        message(|s| s.container_edits.mounts[0].host_path = "/a/../b".into())
            .contains("mounts.hostPath")
    );
    assert!(message(|s| s.container_edits.hooks[0].path = "hook".into()).contains("hooks.path"));
    assert!(
        message(|s| s.devices[0].container_edits.device_nodes[0].path = "x".into())
            .starts_with(&format!("device {UID}-gpu-0-ts-s1: deviceNodes.path"))
    );
    assert!(
        message(|s| {
            let same = s.devices[0].container_edits.device_nodes[0].clone();
            s.devices[0].container_edits.device_nodes.push(same);
        })
        .ends_with("deviceNodes.path \"/dev/nvidia0\" is listed twice")
    );
}

#[test]
fn stages_have_their_names_in_the_oci_specification() {
    let names = [Stage::CreateRuntime, Stage::CreateContainer]
        .map(|stage| serde_json::to_string(&stage).unwrap());
    assert_eq!(names, [r#""createRuntime""#, r#""createContainer""#]);
}

/// Runtimes pass these texts to the kernel, where a NUL ends them.
#[test]
fn texts_with_a_nul_are_refused() {
    type Change = fn(&mut ContainerEdits, String);
    let refused = |change: Change, good_text: &str, bad_text: &str| {
        let with = |text: &str| {
            let mut edits = good().container_edits;
            change(&mut edits, text.to_owned());
            CommonEdits::new(edits)
        };
        with(good_text).unwrap();
        with(bad_text).unwrap_err().to_string()
    };
    let variables: [Change; 2] = [
        |edits, text| edits.env[0] = text,
        |edits, text| edits.hooks[0].env[0] = text,
    ];
    for change in variables {
        assert_eq!(
            refused(change, "A=b", "A=b\0c"),
            r#"containerEdits: env "A=b\0c" is not of the form NAME=value"#
        );
    }
    let paths: [(&str, Change); 4] = [
        ("deviceNodes.path", |edits, text| {
            edits.device_nodes[0].path = text;
        }),
        ("mounts.containerPath", |edits, text| {
            edits.mounts[0].container_path = text;
        }),
        ("mounts.hostPath", |edits, text| {
            edits.mounts[0].host_path = text;
        }),
        ("hooks.path", |edits, text| edits.hooks[0].path = text),
    ];
    for (field, change) in paths {
        assert_eq!(
            refused(change, "/a/b", "/a\0/b"),
            format!(r#"containerEdits: {field} "/a\0/b" must be an absolute path without '..'"#)
        );
    }
}

#[test]
fn names_have_a_longest_length_and_a_last_character() {
    let kind = |vendor: usize, class: usize| {
        let kind = format!("{}/{}", "v".repeat(vendor), "c".repeat(class));
        bytes(Spec { kind, ..good() }).is_ok()
    };
    assert!(kind(253, 63));
    assert!(!kind(254, 63));
    assert!(!kind(253, 64));
    assert!(message(|s| s.kind = "v-/c".into()).starts_with("kind \"v-/c\""));
    for name in ["a-", "a.", "a:", "a_", "", "\u{e9}"] {
        let message = message(|s| s.devices[0].name = name.into());
        assert!(
            message.starts_with(&format!("device name {name:?} must begin and end")),
            "{message}"
        );
    }
}
