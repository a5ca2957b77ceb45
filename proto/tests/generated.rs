//! The code in `generated/`, compared with the protocol files in `protos/`. They are compiled here
//! and not by a build script: programs that only use the contracts need none of the 60 crates of
//! the compiler.

use std::error::Error;
use std::path::Path;

const PROTOCOLS: [&str; 7] = [
    "registration",
    "dra_v1",
    "dra_health_v1",
    "dra_health_v1alpha1",
    "podresources_v1",
    "deviceplugin_v1beta1",
    "mps_supervisor_v1",
];

/// Returns the code of a protocol: its file has one package.
fn code(protocol: &str) -> Result<String, Box<dyn Error>> {
    let protos = Path::new(env!("CARGO_MANIFEST_DIR")).join("protos");
    // A compiler written in Rust, so that no `protoc` has to be installed.
    let files = protox::compile([format!("{protocol}.proto")], [protos])?;
    let out = tempfile::tempdir()?;
    // Ordered maps: what we answer and what tests print must not depend on a hash.
    // The health service of v1alpha1 has the messages of v1.
    tonic_prost_build::configure()
        .btree_map(".")
        .extern_path(".v1alpha1", "crate::health::v1")
        .out_dir(out.path())
        .emit_rerun_if_changed(false)
        .compile_fds(files)?;
    let mut written = fs_err::read_dir(out.path())?;
    let file = written.next().ok_or("no code")??;
    assert!(written.next().is_none(), "{protocol} has several packages");
    Ok(fs_err::read_to_string(file.path())?)
}

/// `DIVVY_BLESS=1` writes them.
#[test]
fn generated_code_is_that_of_the_protocol_files() -> Result<(), Box<dyn Error>> {
    for protocol in PROTOCOLS {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("generated/{protocol}.rs"));
        let code = code(protocol)?;
        if std::env::var_os("DIVVY_BLESS").is_some() {
            fs_err::write(&file, &code)?;
        }
        assert!(
            fs_err::read_to_string(&file)? == code,
            "{} is not that of its protocol file: DIVVY_BLESS=1 cargo test -p divvy-proto writes it",
            file.display()
        );
    }
    Ok(())
}
