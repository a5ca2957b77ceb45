//! Compiles the protocol files with a compiler written in Rust, so that no `protoc` has to be
//! installed. Each file gets an output folder of its own: the wire packages of two kubelet
//! protocols are both called `v1`.

use std::path::PathBuf;
use std::{env, error::Error};

const PROTOCOLS: [&str; 7] = [
    "registration",
    "dra_v1",
    "dra_health_v1",
    "dra_health_v1alpha1",
    "podresources_v1",
    "deviceplugin_v1beta1",
    "mps_supervisor_v1",
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=protos");
    let out = PathBuf::from(env::var("OUT_DIR")?);
    for name in PROTOCOLS {
        let folder = out.join(name);
        fs_err::create_dir_all(&folder)?;
        let files = protox::compile([format!("{name}.proto")], ["protos"])?;
        // Ordered maps: what we answer and what tests print must not depend on a hash.
        // The health service of v1alpha1 has the messages of v1.
        tonic_prost_build::configure()
            .btree_map(".")
            .extern_path(".v1alpha1", "crate::health::v1")
            .out_dir(&folder)
            .compile_fds(files)?;
    }
    Ok(())
}
