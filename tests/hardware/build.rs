//! Gives the library of the tests the name by which loaders know NVIDIA's.

fn main() {
    println!("cargo::rustc-link-arg-examples=-Wl,-soname,libcuda.so.1");
    println!("cargo::rerun-if-changed=build.rs");
}
