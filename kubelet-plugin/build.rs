//! Makes the released program small: what the linker can do about that, where it is the one that
//! rustc brings.

use std::env::var;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=CARGO_ENCODED_RUSTFLAGS");
    let is = |name: &str, value: &str| var(name).is_ok_and(|found| found == value);
    // Only here is rustc's own LLD the default, and only it knows the first option.
    let lld = is("TARGET", "x86_64-unknown-linux-gnu")
        && !var("CARGO_ENCODED_RUSTFLAGS").is_ok_and(|flags| flags.contains("link"));
    if lld && is("PROFILE", "release") {
        // Functions that came out alike share one body. Nothing here compares addresses of
        // functions.
        println!("cargo::rustc-link-arg-bins=-Wl,--icf=all");
        // Relocations in a sixteenth of the space; glibc 2.36 (2022) and later read them, and the
        // image brings its own.
        println!("cargo::rustc-link-arg-bins=-Wl,-z,pack-relative-relocs");
    }
}
