//! Every file in `fixtures/good` decodes, and every file in `fixtures/bad` is refused with exactly
//! the error beside it. YAML fixtures are what people put into manifests; they are turned into JSON
//! as the API server would.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests; clippy excepts only the test functions themselves"
)]

use std::path::{Path, PathBuf};

use divvy_api::names::{DRIVER, NVIDIA_DRIVER};
use divvy_api::{ConfigError, DeviceConfig, decode, decode_for};

fn fixtures(folder: &str) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fixtures")
        .join(folder);
    let mut files: Vec<PathBuf> = fs_err::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == "json" || e == "yaml"))
        .collect();
    files.sort();
    assert!(!files.is_empty());
    files
}

fn read(path: &Path) -> serde_json::Value {
    // JSON is YAML, too.
    serde_saphyr::from_slice(&fs_err::read(path).unwrap()).unwrap()
}

fn decode_file(path: &Path) -> Result<DeviceConfig, ConfigError> {
    decode(&read(path))
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut at = error.source();
    while let Some(cause) = at {
        text = format!("{text}: {cause}");
        at = cause.source();
    }
    text
}

#[test]
fn good_configs_decode_and_read_back_as_they_are_written() {
    for path in fixtures("good") {
        let config =
            decode_file(&path).unwrap_or_else(|e| panic!("{}: {}", path.display(), chain(&e)));
        assert_eq!(
            decode(&config.to_value()).unwrap(),
            config,
            "{}",
            path.display()
        );
        let want = fs_err::read_to_string(path.with_extension("expected")).unwrap();
        assert_eq!(
            config.to_value().to_string(),
            want.trim_end(),
            "{}",
            path.display()
        );
    }
}

#[test]
fn bad_configs_are_refused_with_the_error_beside_them() {
    for path in fixtures("bad") {
        let error = decode_file(&path).expect_err(&path.display().to_string());
        let want = fs_err::read_to_string(path.with_extension("expected")).unwrap();
        assert_eq!(
            format!("{}: {}", error.category(), chain(&error)),
            want.trim_end(),
            "{}",
            path.display()
        );
    }
}

/// Each is read in the place of NVIDIA's driver; beside it is our config, or why it is refused.
#[test]
fn configs_of_nvidia_become_ours_or_are_refused_by_name() {
    for path in fixtures("nvidia") {
        let found = match decode_for(NVIDIA_DRIVER, &read(&path)) {
            Ok(config) => config.to_value().to_string(),
            Err(error) => format!("{}: {}", error.category(), chain(&error)),
        };
        let beside = path.with_extension("expected");
        if std::env::var_os("DIVVY_BLESS").is_some() {
            fs_err::write(&beside, format!("{found}\n")).unwrap();
        }
        let want = fs_err::read_to_string(beside).unwrap();
        assert_eq!(found, want.trim_end(), "{}", path.display());
    }
}

#[test]
fn under_another_name_no_config_of_nvidia_is_read() {
    for path in fixtures("nvidia") {
        let parameters = read(&path);
        let theirs = parameters["apiVersion"] != "divvy.dev/v1beta1";
        let found = decode_for(DRIVER, &parameters);
        let refused = matches!(found, Err(ConfigError::ApiVersion { .. }));
        assert_eq!(refused, theirs, "{}", path.display());
    }
}

#[test]
fn our_configs_are_read_in_the_place_of_nvidia_too() {
    for path in fixtures("good").into_iter().chain(fixtures("bad")) {
        let parameters = read(&path);
        let [plain, standing_in] = [DRIVER, NVIDIA_DRIVER].map(|driver| {
            let decoded = decode_for(driver, &parameters);
            decoded.map_err(|error| error.category())
        });
        let theirs = parameters.get("apiVersion") == Some(&"resource.nvidia.com/v1beta1".into());
        if !theirs {
            assert_eq!(plain, standing_in, "{}", path.display());
        }
    }
}
