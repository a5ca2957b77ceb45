//! The C ABI of MIG as a C program uses it, wrong uses included; MIG devices; and the commands for
//! scripts.
#![expect(clippy::unwrap_used, reason = "a test says by panicking what failed")]

use std::ffi::{CString, c_char, c_uint, c_void};
use std::mem::zeroed;
use std::path::PathBuf;
use std::process::Command;
use std::ptr;

use libloading::{Library, Symbol};
use nvidia_ml::MockState;
use nvml_wrapper_sys::bindings::{
    nvmlComputeInstanceInfo_t, nvmlComputeInstanceProfileInfo_t, nvmlGpuInstancePlacement_t,
    nvmlGpuInstanceProfileInfo_v2_t, nvmlGpuInstanceProfileInfo_v3_t,
};

type Handle = *mut c_void;

const OK: u32 = 0;
const INVALID_ARGUMENT: u32 = 2;
const NOT_SUPPORTED: u32 = 3;
const NOT_FOUND: u32 = 6;
const IN_USE: u32 = 19;
const INSUFFICIENT_RESOURCES: u32 = 23;
const VERSION_MISMATCH: u32 = 25;

/// The library, a copy of its own, initialised, with one H100 whose MIG mode is on.
struct Nvml {
    library: Library,
    path: PathBuf,
    _dir: tempfile::TempDir,
}

impl Nvml {
    fn load() -> (Self, Handle) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("libnvidia-ml.so.1");
        let built = std::env::current_exe()
            .unwrap()
            .parent()
            .unwrap()
            .join("libnvidia_ml.so");
        fs_err::copy(built, &path).unwrap();
        let nvml = Self {
            // SAFETY: loading runs no code of ours beyond the standard library's.
            library: unsafe { Library::new(&path) }.unwrap(),
            path,
            _dir: dir,
        };
        assert_eq!(nvml.mock(&["create", "h100x1"]), "");
        assert_eq!(nvml.mock(&["mig", "0", "on"]), "on\n");
        assert_eq!(
            // SAFETY: as in nvml.h.
            unsafe { nvml.symbol::<extern "C" fn() -> u32>("nvmlInit_v2")() },
            OK
        );
        let gpu = nvml
            .handle("nvmlDeviceGetHandleByIndex_v2", None, 0)
            .unwrap();
        (nvml, gpu)
    }

    fn mock(&self, args: &[&str]) -> String {
        let state = format!("{}.json", self.path.display());
        let output = Command::new(env!("CARGO_BIN_EXE_mock-gpus"))
            .arg(state)
            .args(args)
            .output()
            .unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        if output.status.success() {
            text(output.stdout)
        } else {
            text(output.stderr)
        }
    }

    /// # Safety
    /// `F` is the symbol's type in nvml.h.
    unsafe fn symbol<F>(&self, name: &str) -> Symbol<'_, F> {
        // SAFETY: by this function's contract.
        unsafe { self.library.get(name) }.unwrap()
    }

    /// For symbols that nvml.h declares with a number, after a handle or not, and an out handle.
    fn handle(&self, name: &str, of: Option<Handle>, number: c_uint) -> Result<Handle, u32> {
        let mut out: Handle = ptr::null_mut();
        // SAFETY: by this function's contract.
        let code = unsafe {
            match of {
                Some(of) => self.symbol::<extern "C" fn(Handle, c_uint, *mut Handle) -> u32>(name)(
                    of,
                    number,
                    &raw mut out,
                ),
                None => self.symbol::<extern "C" fn(c_uint, *mut Handle) -> u32>(name)(
                    number,
                    &raw mut out,
                ),
            }
        };
        if code == OK { Ok(out) } else { Err(code) }
    }

    /// For symbols that nvml.h declares with a handle alone.
    fn on(&self, name: &str, of: Handle) -> u32 {
        // SAFETY: by this function's contract.
        unsafe { self.symbol::<extern "C" fn(Handle) -> u32>(name)(of) }
    }

    /// For symbols that nvml.h declares with a handle and one out value, which may be all zeroes.
    fn get<T>(&self, name: &str, of: Handle) -> (u32, T) {
        // SAFETY: by this function's contract.
        unsafe {
            let mut out: T = zeroed();
            let code = self.symbol::<extern "C" fn(Handle, *mut T) -> u32>(name)(of, &raw mut out);
            (code, out)
        }
    }

    fn uuid(&self, of: Handle) -> Result<String, u32> {
        let mut text: [c_char; 96] = [0; 96];
        // SAFETY: as in nvml.h.
        let code =
            unsafe {
                self.symbol::<extern "C" fn(Handle, *mut c_char, c_uint) -> u32>(
                    "nvmlDeviceGetUUID",
                )(of, text.as_mut_ptr(), 96)
            };
        let bytes: Vec<u8> = text
            .iter()
            .take_while(|c| **c != 0)
            .flat_map(|c| c.to_ne_bytes())
            .collect();
        if code == OK {
            Ok(String::from_utf8(bytes).unwrap())
        } else {
            Err(code)
        }
    }

    fn create(&self, gpu: Handle, profile: u32, start: u32, size: u32) -> Result<Handle, u32> {
        let at = nvmlGpuInstancePlacement_t { start, size };
        let mut out: Handle = ptr::null_mut();
        // SAFETY: as in nvml.h.
        let code = unsafe {
            self.symbol::<extern "C" fn(
                Handle,
                c_uint,
                *const nvmlGpuInstancePlacement_t,
                *mut Handle,
            ) -> u32>("nvmlDeviceCreateGpuInstanceWithPlacement")(
                gpu, profile, &raw const at, &raw mut out
            )
        };
        if code == OK { Ok(out) } else { Err(code) }
    }
}

#[test]
fn profile_structs_are_refused_unless_their_version_is_known() {
    let (nvml, gpu) = Nvml::load();
    let name = "nvmlDeviceGetGpuInstanceProfileInfoV";
    // SAFETY: numbers only; and as in nvml.h.
    unsafe {
        let mut v3: nvmlGpuInstanceProfileInfo_v3_t = zeroed();
        let ask = |index, info: *mut nvmlGpuInstanceProfileInfo_v3_t| {
            nvml.symbol::<extern "C" fn(Handle, c_uint, *mut nvmlGpuInstanceProfileInfo_v3_t) -> u32>(name)(
                gpu, index, info,
            )
        };
        for version in [0, 1, 152, 0x98 | 1 << 24, 0x94 | 3 << 24, 0x98 | 4 << 24] {
            v3.version = version;
            assert_eq!(ask(0, &raw mut v3), VERSION_MISMATCH, "{version:#x}");
        }
        v3.version = 0x98 | 3 << 24;
        assert_eq!(ask(0, &raw mut v3), OK);
        assert_eq!(
            (
                v3.id,
                v3.sliceCount,
                v3.memorySizeMB,
                v3.multiprocessorCount
            ),
            (19, 1, 9984, 16)
        );
        assert_eq!(ask(0, ptr::null_mut()), INVALID_ARGUMENT);
        assert_eq!(
            (ask(8, &raw mut v3), ask(0x12, &raw mut v3)),
            (NOT_SUPPORTED, INVALID_ARGUMENT)
        );

        let mut v2: nvmlGpuInstanceProfileInfo_v2_t = zeroed();
        v2.version = 0x98 | 2 << 24;
        let code = nvml
            .symbol::<extern "C" fn(Handle, c_uint, *mut nvmlGpuInstanceProfileInfo_v2_t) -> u32>(
                name,
            )(gpu, 9, &raw mut v2);
        let text: Vec<u8> = v2
            .name
            .iter()
            .take_while(|c| **c != 0)
            .flat_map(|c| c.to_ne_bytes())
            .collect();
        assert_eq!(
            (code, v2.id, v2.memorySizeMB, &text[..]),
            (OK, 15, 20096, &b"MIG 1g.20gb"[..])
        );
    }
}

#[test]
fn a_handle_does_only_for_its_own_kind_and_not_after_the_end() {
    let (nvml, gpu) = Nvml::load();
    assert_eq!(nvml.create(gpu, 19, 7, 1), Err(INVALID_ARGUMENT));
    assert_eq!(nvml.create(gpu, 19, 0, 2), Err(INVALID_ARGUMENT));
    let instance = nvml.create(gpu, 14, 2, 2).unwrap();
    assert_eq!(nvml.create(gpu, 19, 3, 1), Err(INSUFFICIENT_RESOURCES));
    assert_eq!(
        nvml.create(instance, 19, 0, 1),
        Err(INVALID_ARGUMENT),
        "an instance is no GPU"
    );
    assert_eq!(
        nvml.on("nvmlGpuInstanceDestroy", gpu),
        INVALID_ARGUMENT,
        "a GPU is no instance"
    );
    assert_eq!(
        nvml.on("nvmlComputeInstanceDestroy", instance),
        INVALID_ARGUMENT
    );
    assert_eq!(
        nvml.handle("nvmlDeviceGetGpuInstanceById", Some(gpu), 4),
        Ok(instance)
    );
    assert_eq!(
        nvml.handle("nvmlDeviceGetGpuInstanceById", Some(gpu), 3),
        Err(NOT_FOUND)
    );

    // Two slices: the compute profile with index 1.
    let compute = nvml
        .handle("nvmlGpuInstanceCreateComputeInstance", Some(instance), 1)
        .unwrap();
    let more = nvml.handle("nvmlGpuInstanceCreateComputeInstance", Some(instance), 0);
    assert_eq!(more, Err(INSUFFICIENT_RESOURCES));
    assert_eq!(nvml.on("nvmlGpuInstanceDestroy", instance), IN_USE);
    let (code, info) =
        nvml.get::<nvmlComputeInstanceInfo_t>("nvmlComputeInstanceGetInfo_v2", compute);
    assert_eq!(
        (code, info.id, info.profileId, info.placement.size),
        (OK, 0, 1, 2)
    );
    let device: Handle = info.device.cast();
    let uuid = nvml.uuid(device).unwrap();
    assert!(uuid.starts_with("MIG-"), "{uuid}");

    assert_eq!(nvml.on("nvmlComputeInstanceDestroy", compute), OK);
    assert_eq!(
        nvml.on("nvmlComputeInstanceDestroy", compute),
        INVALID_ARGUMENT
    );
    let again = nvml
        .handle("nvmlGpuInstanceCreateComputeInstance", Some(instance), 1)
        .unwrap();
    assert_eq!(
        nvml.uuid(device),
        Err(INVALID_ARGUMENT),
        "its successor is another device"
    );
    assert_eq!(nvml.on("nvmlComputeInstanceDestroy", again), OK);
    assert_eq!(nvml.on("nvmlGpuInstanceDestroy", instance), OK);
    assert_eq!(
        nvml.on("nvmlGpuInstanceDestroy", instance),
        INVALID_ARGUMENT
    );
}

#[test]
fn compute_profiles_are_listed_by_index_for_shared_engines() {
    let (nvml, gpu) = Nvml::load();
    let instance = nvml.create(gpu, 9, 4, 4).unwrap();
    let ask = |index: c_uint, engines: c_uint| {
        // SAFETY: numbers only; and as in nvml.h.
        unsafe {
            let mut info: nvmlComputeInstanceProfileInfo_t = zeroed();
            let name = "nvmlGpuInstanceGetComputeInstanceProfileInfo";
            let code = nvml.symbol::<extern "C" fn(
                Handle,
                c_uint,
                c_uint,
                *mut nvmlComputeInstanceProfileInfo_t,
            ) -> u32>(name)(instance, index, engines, &raw mut info);
            (
                code,
                info.sliceCount,
                info.multiprocessorCount,
                info.instanceCount,
                info.sharedCopyEngineCount,
            )
        }
    };
    assert_eq!(
        (ask(0, 0), ask(2, 0)),
        ((OK, 1, 20, 3, 3), (OK, 3, 60, 1, 3))
    );
    assert_eq!(
        [ask(3, 0).0, ask(9, 0).0, ask(0, 1).0],
        [NOT_SUPPORTED, INVALID_ARGUMENT, INVALID_ARGUMENT]
    );
}

#[test]
fn mig_devices_are_found_by_index_and_uuid_and_lead_to_their_gpu() {
    let (nvml, gpu) = Nvml::load();
    assert_eq!(
        nvml.get::<c_uint>("nvmlDeviceGetMaxMigDeviceCount", gpu),
        (OK, 8)
    );
    let uuid = nvml.mock(&["foreign", "0", "14", "4"]).trim().to_owned();
    let device = nvml
        .handle("nvmlDeviceGetMigDeviceHandleByIndex", Some(gpu), 0)
        .unwrap();
    assert_eq!(
        nvml.handle("nvmlDeviceGetMigDeviceHandleByIndex", Some(gpu), 1),
        Err(NOT_FOUND)
    );
    assert_eq!(nvml.uuid(device), Ok(uuid.clone()));
    let mut by_uuid: Handle = ptr::null_mut();
    let text = CString::new(uuid.clone()).unwrap();
    // SAFETY: as in nvml.h.
    let code = unsafe {
        nvml.symbol::<extern "C" fn(*const c_char, *mut Handle) -> u32>("nvmlDeviceGetHandleByUUID")(
            text.as_ptr(),
            &raw mut by_uuid,
        )
    };
    assert_eq!((code, by_uuid), (OK, device));
    let number = |name, of| nvml.get::<c_uint>(name, of);
    assert_eq!(number("nvmlDeviceIsMigDeviceHandle", device), (OK, 1));
    assert_eq!(number("nvmlDeviceIsMigDeviceHandle", gpu), (OK, 0));
    assert_eq!(number("nvmlDeviceGetGpuInstanceId", device), (OK, 5));
    assert_eq!(number("nvmlDeviceGetComputeInstanceId", device), (OK, 0));
    assert_eq!(
        number("nvmlDeviceGetGpuInstanceId", gpu).0,
        INVALID_ARGUMENT
    );
    let parent = nvml.get::<Handle>("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", device);
    assert_eq!(parent, (OK, gpu));
    // SAFETY: as in nvml.h.
    let remaining = |profile: c_uint| unsafe {
        let mut count = 0;
        let name = "nvmlDeviceGetGpuInstanceRemainingCapacity";
        let ask = nvml.symbol::<extern "C" fn(Handle, c_uint, *mut c_uint) -> u32>(name);
        (ask(gpu, profile, &raw mut count), count)
    };
    assert_eq!(
        (remaining(19), remaining(14), remaining(0)),
        ((OK, 5), (OK, 2), (OK, 0))
    );
}

#[test]
fn a_script_changes_mig_and_sees_what_lives() {
    let (nvml, gpu) = Nvml::load();
    let instance = nvml.create(gpu, 19, 0, 1).unwrap();
    let uuid = nvml.mock(&["foreign", "0", "9", "4"]);
    assert_eq!(
        nvml.mock(&["instances"]),
        format!("0 2 9 4:4 {uuid}0 7 19 0:1\n")
    );
    assert!(
        nvml.mock(&["foreign", "0", "9", "4"])
            .contains("INSUFFICIENT_RESOURCES")
    );
    assert_eq!(nvml.mock(&["mig", "0", "off"]), "pending: IN_USE (19)\n");
    nvml.mock(&["process", "0", "42", "7"]);
    assert_eq!(nvml.on("nvmlGpuInstanceDestroy", instance), IN_USE);
    nvml.mock(&["end", "42"]);
    assert_eq!(nvml.on("nvmlGpuInstanceDestroy", instance), OK);
    nvml.mock(&["client", "0", "dcgm"]);
    assert!(nvml.mock(&["reset", "0"]).contains("IN_USE"));
    nvml.mock(&["leave", "0", "dcgm"]);
    assert_eq!(nvml.mock(&["reset", "0"]), "");
    assert_eq!(
        (nvml.mock(&["instances"]), nvml.mock(&["mig", "0", "on"])),
        (String::new(), "on\n".to_owned())
    );
    nvml.mock(&["latency", "10", "20", "30"]);
    let state = MockState::open(format!("{}.json", nvml.path.display())).unwrap();
    assert_eq!(state.read().unwrap().latency.destroy_ms, 20);
    assert!(
        nvml.mock(&["latency", "1", "2", "x"])
            .contains("not a number")
    );
}
