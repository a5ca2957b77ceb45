//! Gives the library the name programs link and load NVML by, and the needs of the real one.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libnvidia-ml.so.1");
    // The real library asks for these, empty files since glibc 2.34. So does this one, whether it
    // uses them or not: an image that could not load the real library must not load this one
    // either.
    if std::env::var("CARGO_CFG_TARGET_ENV").as_deref() == Ok("gnu") {
        println!("cargo:rustc-cdylib-link-arg=-Wl,--push-state,--no-as-needed");
        for library in ["libdl.so.2", "libpthread.so.0", "librt.so.1", "libm.so.6"] {
            println!("cargo:rustc-cdylib-link-arg=-l:{library}");
        }
        println!("cargo:rustc-cdylib-link-arg=-Wl,--pop-state");
    }
    println!("cargo:rerun-if-changed=build.rs");
}
