use crate::*;

const DRIVER: &str = "gpu.divvy.dev";
const UID: &str = "8a3f0b6e-2a57-4ac3-9d4b-0f6a3f1f9c11";

fn node(path: &str, minor: u32) -> DeviceNode {
    DeviceNode::character(path, 195, minor, 0o666, 0)
}

fn good_claim() -> ClaimSpec {
    let common = ContainerEdits {
        env: vec!["NVIDIA_VISIBLE_DEVICES=void".into()],
        device_nodes: vec![node("/dev/nvidiactl", 255)],
        mounts: vec![Mount {
            host_path: "/usr/lib64/libcuda.so.580.95.05".into(),
            container_path: "/usr/local/nvidia/lib64/libcuda.so.580.95.05".into(),
            options: vec!["ro".into(), "bind".into()],
            mount_type: None,
        }],
        hooks: vec![Hook {
            hook_name: HookName::CreateContainer,
            path: "/opt/divvy-cdi-hook".into(),
            args: vec!["divvy-cdi-hook".into(), "update-ldcache".into()],
            env: vec!["A=".into()],
            timeout: None,
        }],
        ..ContainerEdits::default()
    };
    let mut claim = ClaimSpec::new(DRIVER, UID, CommonEdits::new(common).unwrap());
    claim.add(
        "gpu-1",
        None,
        ContainerEdits { device_nodes: vec![node("/dev/nvidia1", 1)], ..Default::default() },
    );
    claim.add(
        "gpu-0-ts",
        Some("s1"),
        ContainerEdits { device_nodes: vec![node("/dev/nvidia0", 0)], ..Default::default() },
    );
    claim
}

fn good() -> Spec {
    good_claim().into_spec()
}

fn no_common() -> CommonEdits {
    CommonEdits::new(ContainerEdits::default()).unwrap()
}

fn message(change: impl FnOnce(&mut Spec)) -> String {
    let mut spec = good();
    change(&mut spec);
    let error = spec.validate().expect_err("refused");
    match std::error::Error::source(&error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

#[test]
fn a_claims_document_is_exactly_this() {
    let text = String::from_utf8(good().to_json_bytes().unwrap()).unwrap();
    let expected = concat!(
        r#"{"cdiVersion":"0.5.0","kind":"gpu.divvy.dev/claim","devices":[{"#,
        r#""name":"8a3f0b6e-2a57-4ac3-9d4b-0f6a3f1f9c11-gpu-0-ts-s1","containerEdits":{"deviceNodes":[{"#,
        r#""path":"/dev/nvidia0","type":"c","major":195,"minor":0,"fileMode":438,"permissions":"rwm"}]}},"#,
    );
    assert!(text.starts_with(expected), "{text}");
    assert!(text.contains(r#""hookName":"createContainer""#), "{text}");
}

#[test]
fn a_claims_bytes_are_those_of_its_document_with_and_without_a_common_part() {
    let mut bare = ClaimSpec::new(DRIVER, UID, no_common());
    bare.add("gpu-0", None, ContainerEdits::env(["A=b"]));
    let mut newer = ContainerEdits::env(["A=b"]);
    newer.additional_gids = vec![44];
    let mut newest = ClaimSpec::new(DRIVER, UID, CommonEdits::new(newer).unwrap());
    newest.add("gpu-0", None, ContainerEdits::env(["A=b"]));
    for claim in [good_claim(), bare, newest] {
        let bytes = claim.clone().into_json_bytes().unwrap();
        assert_eq!(bytes, claim.into_spec().to_json_bytes().unwrap());
    }
    let empty = ClaimSpec::new(DRIVER, UID, no_common());
    assert_eq!(empty.into_json_bytes().unwrap_err().to_string(), "the document lists no device");
    let wrong = CommonEdits::new(ContainerEdits::env(["NO_VALUE"])).unwrap_err();
    assert_eq!(wrong.to_string(), "containerEdits: env \"NO_VALUE\" is not of the form NAME=value");
}

#[test]
fn names_follow_from_driver_and_claim_alone() {
    assert_eq!(claim_file_name(DRIVER, UID), format!("gpu.divvy.dev-claim_{UID}.json"));
    let mut claim = ClaimSpec::new(DRIVER, UID, no_common());
    assert_eq!(
        claim.add("gpu-0", None, ContainerEdits::env(["A=b"])),
        format!("gpu.divvy.dev/claim={UID}-gpu-0")
    );
    assert_eq!(claim.file_name(), claim_file_name(DRIVER, UID));
    let kind: Kind = claim_kind(DRIVER).parse().unwrap();
    assert_eq!((kind.vendor(), kind.class()), (DRIVER, "claim"));
    assert_eq!(kind.qualified("x"), "gpu.divvy.dev/claim=x");
}

#[test]
fn bytes_read_back_are_the_same_document_and_the_same_bytes() {
    let bytes = good().to_json_bytes().unwrap();
    let back = Spec::from_json_bytes(&bytes).unwrap();
    assert_eq!(back, good());
    assert_eq!(back.to_json_bytes().unwrap(), bytes);
}

#[test]
fn reading_ignores_unknown_fields_and_keeps_unknown_hook_names() {
    let text = r#"{"cdiVersion":"9.9.9","kind":"a/b","newField":1,"devices":[{"name":"x","containerEdits":{"more":true,
        "hooks":[{"hookName":"whenever","path":"/x"}]}}]}"#;
    let spec = Spec::from_json_bytes(text.as_bytes()).unwrap();
    assert_eq!(spec.devices[0].container_edits.hooks[0].hook_name, HookName::Unknown("whenever".into()));
    assert_eq!(
        spec.validate().unwrap_err().to_string(),
        r#"device x: hook /x: hookName "whenever" is not known to runtimes"#
    );
}

#[test]
fn a_cut_off_file_says_what_to_do_with_it() {
    let bytes = good().to_json_bytes().unwrap();
    let error = Spec::from_json_bytes(&bytes[..bytes.len() / 2]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the CDI document cannot be read; remove the file, and it is rebuilt from the claim's record"
    );
}

#[test]
fn the_version_is_the_lowest_that_the_content_needs() {
    let with = |change: &dyn Fn(&mut Spec)| {
        let mut claim = ClaimSpec::new(DRIVER, "a", no_common());
        claim.add("gpu-0", None, ContainerEdits::env(["A=b"]));
        let mut spec = claim.into_spec();
        change(&mut spec);
        spec.minimum_version().to_string()
    };
    assert_eq!(with(&|_| {}), "0.3.0");
    assert_eq!(
        with(&|s| s
            .container_edits
            .mounts
            .push(Mount { mount_type: Some("bind".into()), ..Mount::default() })),
        "0.4.0"
    );
    assert_eq!(with(&|s| s.devices[0].name = "0-gpu".into()), "0.5.0");
    assert_eq!(
        with(&|s| s
            .container_edits
            .device_nodes
            .push(DeviceNode { host_path: Some("/x".into()), ..node("/y", 0) })),
        "0.5.0"
    );
    assert_eq!(with(&|s| s.kind = "a/b.c".into()), "0.6.0");
    assert_eq!(with(&|s| drop(s.annotations.insert("a".into(), "b".into()))), "0.6.0");
    assert_eq!(with(&|s| drop(s.devices[0].annotations.insert("a".into(), "b".into()))), "0.6.0");
    assert_eq!(with(&|s| s.devices[0].container_edits.additional_gids.push(44)), "0.7.0");
    assert_eq!(with(&|s| s.container_edits.intel_rdt = Some(IntelRdt::default())), "0.7.0");
    assert_eq!(with(&|s| s.container_edits.net_devices.push(NetDevice::default())), "1.1.0");
}

#[test]
fn what_a_runtime_would_refuse_is_refused_with_the_place_and_the_rule() {
    let edits = |s: &mut Spec| s.devices[0].container_edits.clone();
    assert!(good().validate().is_ok());
    assert_eq!(
        message(|s| s.kind = "claim".into()),
        "the document's kind is invalid: kind \"claim\" is not of the form vendor/class, such as gpu.divvy.dev/claim"
    );
    assert!(message(|s| s.kind = "1a/b".into()).contains("vendor \"1a\" must begin with a letter"));
    assert!(message(|s| s.kind = "a/b-".into()).contains("class \"b-\""));
    assert!(message(|s| s.devices[0].name = "-x".into()).contains("device name \"-x\""));
    assert!(message(|s| s.devices[0].name = "a=b".into()).contains("device name \"a=b\""));
    assert_eq!(message(|s| s.devices.clear()), "the document lists no device");
    let duplicate = message(|s| s.devices[1] = s.devices[0].clone());
    assert_eq!(duplicate, format!("device {UID}-gpu-0-ts-s1 is listed twice"));
    assert!(
        message(|s| s.devices[0].container_edits = ContainerEdits::default())
            .ends_with("changes nothing: its containerEdits are empty")
    );
    assert_eq!(
        message(|s| s.container_edits.env.push("NO_VALUE".into())),
        "containerEdits: env \"NO_VALUE\" is not of the form NAME=value"
    );
    assert!(message(|s| s.container_edits.env.push("=x".into())).contains("NAME=value"));
    assert_eq!(
        message(|s| s.container_edits.mounts[0].container_path = "lib".into()),
        "containerEdits: mounts.containerPath \"lib\" must be an absolute path without '..'"
    );
    assert!(
        message(|s| s.container_edits.mounts[0].host_path = "/a/../b".into()).contains("mounts.hostPath")
    );
    assert!(message(|s| s.container_edits.hooks[0].path = "hook".into()).contains("hooks.path"));
    assert!(
        message(|s| s.container_edits.device_nodes[0].host_path = Some("x".into()))
            .contains("deviceNodes.hostPath")
    );
    assert!(
        message(|s| {
            let same = edits(s).device_nodes[0].clone();
            s.devices[0].container_edits.device_nodes.push(same);
        })
        .ends_with("deviceNodes.path \"/dev/nvidia0\" is listed twice")
    );
    assert!(
        message(|s| s.container_edits.device_nodes[0].node_type = Some("x".into()))
            .contains("must be one of b, c, u, p")
    );
    assert!(
        message(|s| s.container_edits.device_nodes[0].minor = None)
            .contains("type, major and minor go together")
    );
    assert!(
        message(|s| s.container_edits.device_nodes[0].permissions = Some("rx".into()))
            .contains("a part of \"rwm\"")
    );
    assert!(message(|s| s.container_edits.net_devices.push(NetDevice::default())).contains("network device"));
}

#[test]
fn appended_edits_keep_their_order_and_groups_are_listed_once() {
    let mut edits = ContainerEdits { additional_gids: vec![44], ..ContainerEdits::env(["A=1"]) };
    edits.append(ContainerEdits { additional_gids: vec![44, 5], ..ContainerEdits::env(["B=2"]) });
    assert_eq!(edits, ContainerEdits { additional_gids: vec![5, 44], ..ContainerEdits::env(["A=1", "B=2"]) });
}
