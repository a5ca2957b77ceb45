//! The CUDA version, with and without libcuda in the process. A test alone in its process: what
//! is loaded stays.

use std::ffi::c_int;

use libloading::Library;

#[test]
fn only_the_second_version_of_the_call_needs_libcuda_in_the_process() {
    let dir = tempfile::tempdir().unwrap();
    let built = std::env::current_exe()
        .unwrap()
        .parent()
        .unwrap()
        .join("libnvidia_ml.so");
    let beside = |name: &str| {
        let path = dir.path().join(name);
        fs_err::copy(&built, &path).unwrap();
        path
    };
    // As in a driver root: both in one folder, where the loader does not look.
    let (nvml, libcuda) = (beside("libnvidia-ml.so.1"), beside("libcuda.so.1"));
    // SAFETY: loading runs no code of ours beyond the standard library's.
    let load = |path| unsafe { Library::new(path) }.unwrap();
    let library = load(nvml);
    let ask = |name: &str| {
        let mut version: c_int = 0;
        // SAFETY: the type is the symbol's in nvml.h.
        let code = unsafe {
            library
                .get::<unsafe extern "C" fn(*mut c_int) -> u32>(name)
                .unwrap()(&raw mut version)
        };
        (code, version)
    };
    // SAFETY: as above.
    let code = unsafe {
        library
            .get::<extern "C" fn() -> u32>("nvmlInit_v2")
            .unwrap()()
    };
    assert_eq!(code, 0);
    let (first, second) = (
        "nvmlSystemGetCudaDriverVersion",
        "nvmlSystemGetCudaDriverVersion_v2",
    );
    assert_eq!((ask(first), ask(second)), ((0, 13000), (12, 0)));
    let _kept = load(libcuda);
    assert_eq!((ask(first), ask(second)), ((0, 13000), (0, 13000)));
}
