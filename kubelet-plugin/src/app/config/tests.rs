use std::collections::BTreeSet;

use clap::Parser;
use divvy_model::Form;
use divvy_model::mig::ProfileVariant;
use divvy_offer::Modes;

use super::*;

fn parsed(flags: &[&str]) -> Result<Args, clap::Error> {
    let flags = ["plugin", "--node-name", "n1"].iter().chain(flags);
    Args::try_parse_from(flags)
}

fn config(flags: &[&str]) -> Result<Config, TooLong> {
    parsed(flags).unwrap().try_into()
}

#[test]
fn paths_follow_the_driver_name_and_the_pod() {
    let plain = config(&[]).unwrap();
    assert_eq!(
        plain.plugin_dir,
        Path::new("/var/lib/kubelet/plugins/gpu.divvy.dev")
    );
    assert_eq!(
        plain.sockets.dra,
        Path::new("/var/lib/kubelet/plugins/gpu.divvy.dev/dra.sock")
    );
    assert_eq!(
        plain.sockets.registration,
        Path::new("/var/lib/kubelet/plugins_registry/gpu.divvy.dev@reg.sock")
    );
    let named = config(&[
        "--driver-name",
        "gpu.nvidia.com",
        "--driver-root",
        "/run/nvidia",
    ])
    .unwrap();
    assert_eq!(
        named.plugin_dir,
        Path::new("/var/lib/kubelet/plugins/gpu.nvidia.com")
    );
    assert_eq!(
        (
            named.driver_root.as_deref(),
            named.host_driver_root.as_ref()
        ),
        (Some(Path::new("/run/nvidia")), None)
    );
    assert_eq!(config(&["--http", ""]).unwrap().http, []);
    assert_eq!(config(&["--http", ":1"]).unwrap().http.len(), 2);
    assert_eq!(config(&["--driver-root", ""]).unwrap().driver_root, None);
}

#[test]
fn rare_profiles_are_named_by_their_suffix() {
    let of = |flags: &[&str]| config(flags).unwrap().gpu_rules();
    assert_eq!(of(&[]), GpuRules::default());
    let all = of(&["--offer", "everything", "--mig-profiles", "-me, +me.all,"]);
    assert_eq!(all.modes, Modes::everything());
    assert_eq!(
        all.rare,
        BTreeSet::from([ProfileVariant::AllMedia, ProfileVariant::NoMedia])
    );
}

#[test]
fn a_profile_decides_what_gpus_without_a_policy_are() {
    let of = |flags: &[&str]| config(flags).unwrap().gpu_rules();
    for (name, form) in [
        ("whole", Form::WHOLE),
        ("partitions", Form::PARTITIONS),
        ("shared", Form::TIME_SLICED),
    ] {
        assert_eq!(of(&["--offer", name]).modes, Modes::Only([form].into()));
    }
    assert_eq!(of(&["--offer", "shared", "--slots", "4"]).shares.slots, 4);
    for slots in ["0", "1025", "-1", "some"] {
        assert!(parsed(&["--slots", slots]).is_err(), "{slots}");
    }
}

#[test]
fn how_long_a_gpu_has_to_be_well_can_be_said_in_seconds() {
    assert_eq!(config(&[]).unwrap().health, HealthRules::default());
    let longer = HealthRules {
        recover_after: Duration::from_mins(10),
        ..HealthRules::default()
    };
    assert_eq!(config(&["--recover-after", "600"]).unwrap().health, longer);
}

#[test]
fn the_state_is_served_on_loopback_unless_an_address_is_given_for_it() {
    assert!(config(&[]).unwrap().http_serves_state());
    assert!(
        config(&["--http", "[::1]:9440"])
            .unwrap()
            .http_serves_state()
    );
    assert!(!config(&["--http", ":9440"]).unwrap().http_serves_state());
    assert!(
        !config(&["--http", "10.0.0.7:9440"])
            .unwrap()
            .http_serves_state()
    );
    let apart = config(&["--debug-http", "127.0.0.1:9441"]).unwrap();
    assert!(!apart.http_serves_state());
    assert_eq!(apart.debug_http, ["127.0.0.1:9441".parse().unwrap()]);
}

#[test]
fn a_bad_flag_is_named_with_what_is_expected() {
    for (flag, value, message) in [
        (
            "--node-name",
            "Node",
            "expected a node's name (DNS subdomain)",
        ),
        (
            "--driver-name",
            "GPU",
            "expected a DNS subdomain of at most 63 lower-case characters, as gpu.divvy.dev",
        ),
        ("--cdi-dir", "cdi", "expected an absolute path"),
        ("--run-dir", "run", "expected an absolute path"),
        (
            "--http",
            "9440",
            "expected an address and a port, as 127.0.0.1:9440 or :9440, or nothing",
        ),
        (
            "--pod-uid",
            "a/b",
            "expected a pod's UID (letters, digits and dashes)",
        ),
        (
            "--mig-profiles",
            "+me,me",
            "\"me\" is no such suffix; expected +me, +me.all, -me or +gfx, separated by commas",
        ),
        (
            "--ignored-xids",
            "109,all",
            "\"all\" is no number; expected Xid numbers, separated by commas, as 109,119",
        ),
        (
            "--extra-nodes",
            "/dev/gdrdrv,/dev/../etc",
            "\"/dev/../etc\" is none; expected a path below /dev that is no GPU's, as /dev/gdrdrv or /dev/nvidia-fs*, several separated by commas",
        ),
        (
            "--debug-http",
            "localhost",
            "expected an address and a port, as 127.0.0.1:9440 or :9440, or nothing",
        ),
        (
            "--node-selector",
            "gpu",
            "\"gpu\" is no requirement; expected key=value or key!=value, separated by commas",
        ),
    ] {
        let flags = ["plugin", "--node-name=n1", flag, value];
        let flags = if flag == "--node-name" {
            &[flags[0], flag, value][..]
        } else {
            &flags[..]
        };
        let error = Args::try_parse_from(flags).unwrap_err().to_string();
        let name = flag
            .trim_start_matches('-')
            .replace('-', "_")
            .to_uppercase();
        assert!(
            error.starts_with(&format!(
                "error: invalid value '{value}' for '{flag} <{name}>': {message}\n"
            )),
            "{error}"
        );
    }
}

/// A chart sets variables for what was left empty, too.
#[test]
fn an_empty_value_is_the_default() {
    let empty = [
        "--plugin-dir",
        "--run-dir",
        "--driver-root",
        "--host-driver-root",
        "--device-nodes",
        "--nvml-library",
        "--mode-lock",
        "--mig-profiles",
        "--ignored-xids",
        "--extra-nodes",
        "--hook-path",
        "--hook-dir",
        "--debug-http",
        "--kubeconfig",
        "--pod-uid",
        "--node-selector",
    ];
    let empty: Vec<&str> = empty.iter().flat_map(|flag| [*flag, ""]).collect();
    let (empty, unset) = (config(&empty).unwrap(), config(&[]).unwrap());
    assert_eq!(format!("{empty:?}"), format!("{unset:?}"));
    assert_eq!(
        unset.hook_dir,
        Path::new("/opt/divvy/gpu.divvy.dev"),
        "by the driver's name"
    );
}

#[test]
fn nodes_take_turns_in_asking_who_holds_what_they_withdraw() {
    let least = Timing::default().leave;
    let turns: Vec<_> = (0..100)
        .map(|n| {
            Timing::of_node(&format!("node-{n}"))
                .leave
                .saturating_sub(least)
        })
        .collect();
    assert!(
        turns.iter().all(|turn| *turn < least) && turns.iter().any(|turn| !turn.is_zero()),
        "{turns:?}"
    );
    // No second, of thirty, in which more than a tenth of them ask.
    let busiest = (0..30)
        .map(|second| turns.iter().filter(|turn| turn.as_secs() == second).count())
        .max();
    assert!(busiest <= Some(10), "{turns:?}");
    assert_eq!(
        Timing::of_node("node-7").leave,
        turns[7] + least,
        "a restart changes nothing"
    );
}

#[test]
fn every_flag_has_an_environment_twin() {
    use clap::CommandFactory;
    for arg in Args::command()
        .get_arguments()
        .filter(|a| !["help", "version"].contains(&a.get_id().as_str()))
    {
        assert!(
            arg.get_env().is_some(),
            "--{} has no environment variable",
            arg.get_id()
        );
    }
}
