//! The program as its user calls it: exit statuses, files and folders of manifests, standard input.

use std::io::{self, Write as _};
use std::process::{Command, Output, Stdio};

fn divvy(arguments: &[&str], input: &str) -> io::Result<Output> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_divvy"));
    command
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn()?;
    // A program that does not read its input may be gone already.
    let _ = child
        .stdin
        .take()
        .map(|mut stdin| stdin.write_all(input.as_bytes()));
    child.wait_with_output()
}

/// The names of all fields.
fn keys(value: &serde_json::Value, all: &mut Vec<String>) {
    match value {
        serde_json::Value::Object(fields) => {
            // Documents of CDI are CDI's.
            for (key, value) in fields.iter().filter(|(key, _)| *key != "cdi") {
                all.push(key.clone());
                keys(value, all);
            }
        }
        serde_json::Value::Array(items) => items.iter().for_each(|item| keys(item, all)),
        _ => {}
    }
}

fn example(path: &str) -> String {
    format!("{}/../examples/{path}", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn a_driver_of_a_platform_that_is_not_supported_is_named() {
    for (file, platform) in [
        ("usr/lib/wsl/lib/libnvidia-ml.so.1", "WSL2"),
        ("etc/nv_tegra_release", "NVIDIA Jetson"),
    ] {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join(file);
        fs_err::create_dir_all(path.parent().unwrap()).unwrap();
        fs_err::write(&path, "x").unwrap();
        let folder = root.path().to_string_lossy().into_owned();
        let output = divvy(&["inventory", "--driver-root", &folder], "").unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        let says = format!("it holds the driver of {platform}, which divvy does not support");
        assert!(said.contains(&says), "{said}");
    }
}

#[test]
fn the_help_of_each_question_has_examples() {
    for arguments in [
        &["--help"][..],
        &["status", "node", "--help"],
        &["status", "gpu", "--help"],
        &["status", "claim", "--help"],
        &["status", "pod", "--help"],
    ] {
        let output = divvy(arguments, "").unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(said.contains("Examples:\n  divvy "), "{arguments:?} {said}");
    }
}

#[test]
fn wrong_arguments_end_with_2_and_say_what_is_wrong() {
    for (arguments, says) in [
        (&["demo", "--sim", "nothing"][..], "GPU model \"nothing\""),
        (&["inventory", "--sim", "nothing"], "GPU model \"nothing\""),
        (
            &["demo", "--only", "nothing"],
            "no example has that in its name",
        ),
        (
            &["demo", "--log-level", "loud"],
            "\"loud\" is neither one of off, error",
        ),
        (
            &["demo", "--mig-on", "2"],
            "--mig-on 2: the GPUs are numbered from 0 to 1",
        ),
        (
            &["demo", "--sick", "x"],
            "\"x\" is neither a number nor all",
        ),
        (&["demo", "--sim", "l4x1", "--mig-on", "all"], "--mig-on 0"),
        (&["demo", "--bogus"], "unexpected argument '--bogus'"),
        (&["status", "--bogus"], "unexpected argument '--bogus'"),
        (&["completion", "tcsh"], "invalid value 'tcsh'"),
        (&["convert"], "--file <FILE>"),
        (&["convert", "-f", "/nowhere.yaml"], "/nowhere.yaml"),
        (&["convert", "-f", "-"], "no objects in the files"),
        (
            &["claim", "gpu", "--same", "numa"],
            "--same needs --count 2 or more",
        ),
    ] {
        let output = divvy(arguments, "").unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
        assert!(said.contains(says), "{arguments:?}: {said}");
    }
}

#[test]
fn manifests_come_from_files_folders_and_standard_input() {
    let one_gpu = fs_err::read_to_string(example("one-gpu/manifests.yaml")).unwrap();
    let (folder, policy) = (example("share-small"), example("all-modes.yaml"));
    for (arguments, input, says) in [
        (
            &["demo", "-f", "-"][..],
            one_gpu.as_str(),
            "✓ standard input",
        ),
        (
            &["demo", "-f", &policy, "-f", &folder],
            "",
            "A   512 MiB   10 %  tenth-gpu",
        ),
        (
            &[
                "inventory",
                "--sim",
                "h100x1",
                "--policy",
                &policy,
                "--node-label",
                "divvy.dev/try=true",
            ],
            "",
            "share.divvy.dev",
        ),
    ] {
        let output = divvy(arguments, input).unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success(),
            "{arguments:?}: {said}{}",
            String::from_utf8_lossy(&output.stderr)
        );
        assert!(said.contains(says), "{arguments:?}: {said}");
    }
}

#[test]
fn converted_manifests_are_data_and_notes_are_talk() {
    let pod = |resource: &str| {
        format!(
            "{{apiVersion: v1, kind: Pod, metadata: {{name: p}}, spec: {{containers: [{{name: c, resources: {{limits: {{{resource}}}}}}}]}}}}"
        )
    };
    let json = &["convert", "-f", "-", "-o", "json"][..];
    for (arguments, resource, code, data, talk) in [
        (
            json,
            "nvidia.com/gpu: 1",
            0,
            "\"resourceClaimTemplateName\": \"p-gpu\"",
            "",
        ),
        (
            &["convert", "-f", "-"],
            "nvidia.com/gpumem: 1024, nvidia.com/gpu: 1",
            0,
            "memory: 1Gi",
            "note: shares need a GpuPolicy that offers them",
        ),
        (
            json,
            "nvidia.com/gpu: 1.5",
            1,
            "\"nvidia.com/gpu\": 1.5",
            "not converted: Pod default/p: spec.containers[0].resources.limits[nvidia.com/gpu]: 1.5: Kubernetes takes whole numbers",
        ),
        (
            json,
            "cpu: 1",
            0,
            "\"cpu\": 1",
            "note: nothing here asks for a GPU",
        ),
    ] {
        let output = divvy(arguments, &pod(resource)).unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{resource}: {said}");
        assert!(said.contains(talk), "{resource}: {said}");
        let shown = String::from_utf8_lossy(&output.stdout);
        assert!(shown.contains(data), "{resource}: {shown}");
        if arguments == json {
            serde_json::from_str::<serde_json::Value>(&shown).unwrap();
        }
    }
    assert_eq!(
        divvy(&["convert", "-f", "-"], "a: [")
            .unwrap()
            .status
            .code(),
        Some(2)
    );
}

#[test]
fn what_is_shown_to_programs_has_values_and_one_letter_case() {
    let output = divvy(&["demo", "--only", "share-small", "-o", "json"], "").unwrap();
    let said: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let device = &said["published"][0];
    assert!(
        device["memoryBytes"].as_u64() > Some(1 << 30) && device["numaNode"].is_u64(),
        "{device}"
    );
    let mut all = Vec::new();
    keys(&said, &mut all);
    assert!(all.iter().any(|key| key == "leftBehind"), "{all:?}");
    assert!(
        all.iter()
            .all(|key| !key.contains('_') && !key.starts_with(char::is_uppercase)),
        "{all:?}"
    );
}

#[test]
fn there_are_completions_and_a_version() {
    let output = divvy(&["completion", "bash"], "").unwrap();
    assert!(
        String::from_utf8_lossy(&output.stdout).contains("complete -F _divvy"),
        "{output:?}"
    );
    let output = divvy(&["version"], "").unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let version = format!("divvy {}, commit ", env!("CARGO_PKG_VERSION"));
    assert!(said.starts_with(&version), "{said}");
    assert!(
        said.ends_with(", for Kubernetes 1.34 and later\n"),
        "{said}"
    );
    let output = divvy(&["version", "-o", "json"], "").unwrap();
    let about: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let commit = about["commit"].as_str().unwrap_or_default();
    assert!(said.contains(&format!("commit {commit},")), "{about}");
    assert_eq!(about["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(about["demo"], true);
}
