//! Every file in `fixtures/good` decodes, and every file in `fixtures/bad` is refused with exactly
//! the error beside it. YAML fixtures are what people put into manifests; they are turned into JSON
//! as the API server would.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests; clippy excepts only the test functions themselves"
)]

use std::path::{Path, PathBuf};

use divvy_api::{ConfigError, DeviceConfig, decode};

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

fn decode_file(path: &Path) -> Result<DeviceConfig, ConfigError> {
    let text = fs_err::read(path).unwrap();
    // JSON is YAML, too.
    decode(&serde_saphyr::from_slice(&text).unwrap())
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
