//! The library as a program sees it: its symbols, its name, and the layout of what it writes.
#![expect(clippy::unwrap_used, reason = "a test says by panicking what failed")]

use std::mem::{offset_of, size_of};
use std::path::PathBuf;

use divvy_model::GpuOp;
use nvidia_ml::{ALSO, symbols};
use nvml_wrapper_sys::bindings::{
    nvmlComputeInstanceInfo_t, nvmlComputeInstancePlacement_t, nvmlComputeInstanceProfileInfo_t,
    nvmlDeviceAddressingMode_t, nvmlEventData_t, nvmlFieldValue_t, nvmlGpuFabricInfo_t,
    nvmlGpuFabricInfo_v2_t, nvmlGpuFabricInfo_v3_t, nvmlGpuInstanceInfo_t,
    nvmlGpuInstancePlacement_t, nvmlGpuInstanceProfileInfo_t, nvmlGpuInstanceProfileInfo_v2_t,
    nvmlGpuInstanceProfileInfo_v3_t, nvmlMemory_t, nvmlMemory_v2_t, nvmlPciInfo_t,
    nvmlProcessInfo_t,
};

fn library() -> PathBuf {
    std::env::current_exe()
        .unwrap()
        .parent()
        .unwrap()
        .join("libnvidia_ml.so")
}

#[test]
fn every_operation_of_the_engine_is_exported() {
    // SAFETY: loading runs no code of ours beyond the standard library's.
    let library = unsafe { libloading::Library::new(library()) }.unwrap();
    let missing = |names: &[&'static str]| -> Vec<&'static str> {
        // SAFETY: the symbols are looked up, not used.
        names
            .iter()
            .copied()
            .filter(|s| unsafe { library.get::<fn()>(*s) }.is_err())
            .collect()
    };
    for op in GpuOp::ALL {
        assert_eq!(missing(symbols(op)), [""; 0], "{op:?}");
    }
    assert_eq!(missing(ALSO), [""; 0]);
}

#[test]
fn the_library_carries_the_name_that_programs_load() {
    let bytes = fs_err::read(library()).unwrap();
    let name = b"\0libnvidia-ml.so.1\0";
    assert!(bytes.windows(name.len()).any(|w| w == name));
}

#[test]
fn each_c_struct_is_laid_out_as_nvml_h_says() {
    // Worked out by hand from nvml.h's fields by the rules of a 64-bit C ABI, not from the Rust
    // types.
    assert_eq!(size_of::<nvmlPciInfo_t>(), 68);
    assert_eq!(
        (
            offset_of!(nvmlPciInfo_t, domain),
            offset_of!(nvmlPciInfo_t, busId)
        ),
        (16, 36)
    );
    assert_eq!(
        (size_of::<nvmlMemory_t>(), offset_of!(nvmlMemory_t, used)),
        (24, 16)
    );
    assert_eq!(
        (
            size_of::<nvmlMemory_v2_t>(),
            offset_of!(nvmlMemory_v2_t, total)
        ),
        (40, 8)
    );
    assert_eq!(
        (
            size_of::<nvmlProcessInfo_t>(),
            offset_of!(nvmlProcessInfo_t, gpuInstanceId)
        ),
        (24, 16)
    );
    assert_eq!(
        (
            size_of::<nvmlGpuFabricInfo_t>(),
            offset_of!(nvmlGpuFabricInfo_t, state)
        ),
        (28, 24)
    );
    assert_eq!(
        (
            size_of::<nvmlGpuFabricInfo_v2_t>(),
            offset_of!(nvmlGpuFabricInfo_v2_t, healthMask)
        ),
        (36, 32)
    );
    assert_eq!(
        (
            size_of::<nvmlGpuFabricInfo_v3_t>(),
            offset_of!(nvmlGpuFabricInfo_v3_t, healthSummary)
        ),
        (40, 36)
    );
    assert_eq!(size_of::<nvmlDeviceAddressingMode_t>(), 8);
    assert_eq!(
        (
            size_of::<nvmlFieldValue_t>(),
            offset_of!(nvmlFieldValue_t, value)
        ),
        (40, 32)
    );
    assert_eq!(
        (
            size_of::<nvmlEventData_t>(),
            offset_of!(nvmlEventData_t, eventData),
            offset_of!(nvmlEventData_t, gpuInstanceId)
        ),
        (32, 16, 24)
    );
}

#[test]
fn each_c_struct_of_mig_is_laid_out_as_nvml_h_says() {
    assert_eq!(size_of::<nvmlGpuInstancePlacement_t>(), 8);
    assert_eq!(size_of::<nvmlComputeInstancePlacement_t>(), 8);
    assert_eq!(
        (
            size_of::<nvmlGpuInstanceProfileInfo_t>(),
            offset_of!(nvmlGpuInstanceProfileInfo_t, memorySizeMB)
        ),
        (48, 40)
    );
    // Twelve numbers, then eight bytes aligned, then the name.
    assert_eq!(
        (
            size_of::<nvmlGpuInstanceProfileInfo_v2_t>(),
            offset_of!(nvmlGpuInstanceProfileInfo_v2_t, sliceCount),
            offset_of!(nvmlGpuInstanceProfileInfo_v2_t, memorySizeMB),
            offset_of!(nvmlGpuInstanceProfileInfo_v2_t, name)
        ),
        (152, 12, 48, 56)
    );
    assert_eq!(
        (
            size_of::<nvmlGpuInstanceProfileInfo_v3_t>(),
            offset_of!(nvmlGpuInstanceProfileInfo_v3_t, sliceCount),
            offset_of!(nvmlGpuInstanceProfileInfo_v3_t, memorySizeMB),
            offset_of!(nvmlGpuInstanceProfileInfo_v3_t, name),
            offset_of!(nvmlGpuInstanceProfileInfo_v3_t, capabilities)
        ),
        (152, 8, 40, 48, 144)
    );
    assert_eq!(
        (
            size_of::<nvmlGpuInstanceInfo_t>(),
            offset_of!(nvmlGpuInstanceInfo_t, placement)
        ),
        (24, 16)
    );
    assert_eq!(
        (
            size_of::<nvmlComputeInstanceProfileInfo_t>(),
            offset_of!(nvmlComputeInstanceProfileInfo_t, sharedOfaCount)
        ),
        (36, 32)
    );
    assert_eq!(
        (
            size_of::<nvmlComputeInstanceInfo_t>(),
            offset_of!(nvmlComputeInstanceInfo_t, gpuInstance),
            offset_of!(nvmlComputeInstanceInfo_t, placement)
        ),
        (32, 8, 24)
    );
}
