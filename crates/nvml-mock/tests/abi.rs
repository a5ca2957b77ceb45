//! The C ABI as a C program uses it, wrong uses included; and the state as scripts and other
//! processes change it.
#![expect(clippy::unwrap_used, reason = "a test says by panicking what failed")]

use std::ffi::{CStr, c_char, c_uint, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr;

use libloading::{Library, Symbol};
use nvidia_ml::MockState;
use nvml_wrapper_sys::bindings::{nvmlGpuFabricInfo_v3_t, nvmlMemory_v2_t, nvmlProcessInfo_t};

type Handle = *mut c_void;

const OK: u32 = 0;
const UNINITIALIZED: u32 = 1;
const INVALID_ARGUMENT: u32 = 2;
const NOT_SUPPORTED: u32 = 3;
const NOT_FOUND: u32 = 6;
const INSUFFICIENT_SIZE: u32 = 7;
const GPU_IS_LOST: u32 = 15;
const VERSION_MISMATCH: u32 = 25;

/// The library, a copy of its own.
struct Nvml {
    library: Library,
    path: PathBuf,
    _dir: tempfile::TempDir,
}

impl Nvml {
    fn load() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("libnvidia-ml.so.1");
        let built = std::env::current_exe()
            .unwrap()
            .parent()
            .unwrap()
            .join("libnvidia_ml.so");
        fs_err::copy(built, &path).unwrap();
        // SAFETY: loading runs no code of ours beyond the standard library's.
        let library = unsafe { Library::new(&path) }.unwrap();
        Self {
            library,
            path,
            _dir: dir,
        }
    }

    fn state(&self) -> MockState {
        MockState::open(format!("{}.json", self.path.display())).unwrap()
    }

    /// # Safety
    /// `F` is the symbol's type in nvml.h.
    unsafe fn symbol<F>(&self, name: &str) -> Symbol<'_, F> {
        // SAFETY: by this function's contract.
        unsafe { self.library.get(name) }.unwrap()
    }

    fn init(&self) -> u32 {
        // SAFETY: as in nvml.h.
        unsafe { self.symbol::<extern "C" fn() -> u32>("nvmlInit_v2")() }
    }

    fn shutdown(&self) -> u32 {
        // SAFETY: as in nvml.h.
        unsafe { self.symbol::<extern "C" fn() -> u32>("nvmlShutdown")() }
    }

    fn at(&self, index: u32) -> (u32, Handle) {
        let mut handle: Handle = ptr::null_mut();
        // SAFETY: as in nvml.h.
        let code = unsafe {
            self.symbol::<extern "C" fn(c_uint, *mut Handle) -> u32>(
                "nvmlDeviceGetHandleByIndex_v2",
            )(index, &raw mut handle)
        };
        (code, handle)
    }

    fn by_uuid(&self, uuid: &CStr) -> u32 {
        let mut handle: Handle = ptr::null_mut();
        // SAFETY: as in nvml.h.
        unsafe {
            self.symbol::<extern "C" fn(*const c_char, *mut Handle) -> u32>(
                "nvmlDeviceGetHandleByUUID",
            )(uuid.as_ptr(), &raw mut handle)
        }
    }

    fn number(&self, name: &str, gpu: Handle) -> (u32, c_uint) {
        let mut number = 0;
        // SAFETY: only for symbols that nvml.h declares with a handle and one out number.
        let code = unsafe {
            self.symbol::<extern "C" fn(Handle, *mut c_uint) -> u32>(name)(gpu, &raw mut number)
        };
        (code, number)
    }

    fn name(&self, gpu: Handle, room: usize) -> (u32, Vec<u8>) {
        let mut buffer = vec![0u8; room];
        let length = c_uint::try_from(room).unwrap();
        // SAFETY: as in nvml.h.
        let code = unsafe {
            self.symbol::<extern "C" fn(Handle, *mut u8, c_uint) -> u32>("nvmlDeviceGetName")(
                gpu,
                buffer.as_mut_ptr(),
                length,
            )
        };
        (code, buffer)
    }
}

#[test]
fn calls_before_init_and_after_the_last_shutdown_are_refused() {
    let nvml = Nvml::load();
    assert_eq!((nvml.at(0).0, nvml.shutdown()), (UNINITIALIZED, OK));
    assert_eq!((nvml.init(), nvml.init()), (OK, OK));
    assert_eq!(
        (nvml.shutdown(), nvml.at(0).0),
        (OK, OK),
        "one user is left"
    );
    assert_eq!((nvml.shutdown(), nvml.at(0).0), (OK, UNINITIALIZED));
    assert_eq!(nvml.shutdown(), OK, "one too many does nothing");
    assert_eq!((nvml.init(), nvml.at(0).0), (OK, OK));
}

/// The libraries of 535.309.01, 550.163.01 and 555.58.02 do the same.
#[test]
fn without_a_session_no_argument_is_looked_at() {
    let nvml = Nvml::load();
    let nothing: Handle = ptr::null_mut();
    let refused = |when: &str| {
        for name in [
            "nvmlDeviceGetMemoryInfo",
            "nvmlDeviceGetMemoryInfo_v2",
            "nvmlDeviceGetBrand",
            "nvmlDeviceGetC2cModeInfoV",
            "nvmlDeviceGetGpuFabricInfoV",
            "nvmlDeviceGetMemoryLimits_v1",
            "nvmlDeviceGetUtilizationRates",
        ] {
            let mut room = [0_u64; 64];
            // SAFETY: nvml.h declares each with a handle and one struct or number, which has room.
            unsafe {
                let ask = nvml.symbol::<extern "C" fn(Handle, *mut c_void) -> u32>(name);
                let room = (&raw mut room).cast();
                assert_eq!(ask(nothing, room), UNINITIALIZED, "{name} {when}");
                assert_eq!(
                    ask(nothing, ptr::null_mut()),
                    UNINITIALIZED,
                    "{name} {when}"
                );
            }
        }
        // SAFETY: as in nvml.h.
        unsafe {
            let by_uuid = nvml.symbol::<extern "C" fn(*const c_char, *mut Handle) -> u32>(
                "nvmlDeviceGetHandleByUUID",
            );
            assert_eq!(by_uuid(ptr::null(), ptr::null_mut()), UNINITIALIZED);
            let count = nvml.symbol::<extern "C" fn(*mut c_uint) -> u32>("nvmlDeviceGetCount_v2");
            assert_eq!(count(ptr::null_mut()), UNINITIALIZED);
        }
    };
    refused("before init");
    assert_eq!((nvml.init(), nvml.shutdown()), (OK, OK));
    refused("after shutdown");
}

/// The library knows its own version, also where no driver is loaded. 525 did not say it.
#[test]
fn the_librarys_version_needs_no_session_since_r535() {
    for (driver, known) in [
        ("525.147.05", false),
        ("535.54.03", true),
        ("580.95.05", true),
    ] {
        let nvml = Nvml::load();
        mock_gpus(&nvml.path, &["create", "h100x1"]);
        let change = nvml.state().edit(|engine| {
            engine.system.driver_version = driver.to_owned();
            engine.system.nvml_version = Some(format!("12.{driver}"));
        });
        change.unwrap();
        // SAFETY: as in nvml.h.
        let ask = |room: &mut [u8]| unsafe {
            let length = c_uint::try_from(room.len()).unwrap();
            let ask =
                nvml.symbol::<extern "C" fn(*mut u8, c_uint) -> u32>("nvmlSystemGetNVMLVersion");
            ask(room.as_mut_ptr(), length)
        };
        let mut room = [0; 80];
        assert_eq!(ask(&mut room), if known { OK } else { UNINITIALIZED });
        let text = CStr::from_bytes_until_nul(&room).unwrap().to_str().unwrap();
        assert_eq!(text.strip_prefix("12."), known.then_some(driver));
        let short = ask(&mut room[..3]);
        assert_eq!(
            short,
            if known {
                INSUFFICIENT_SIZE
            } else {
                UNINITIALIZED
            }
        );
        assert_eq!((nvml.init(), ask(&mut room)), (OK, OK));
    }
}

#[test]
fn codes_have_the_words_of_the_real_library() {
    let words = |driver: &str| {
        let nvml = Nvml::load();
        mock_gpus(&nvml.path, &["create", "h100x1"]);
        let change = |e: &mut divvy_gpu_sim::Engine| e.system.driver_version = driver.to_owned();
        nvml.state().edit(change).unwrap();
        // SAFETY: as in nvml.h; the words live as long as the library.
        let words = |code: u32| unsafe {
            let ask = nvml.symbol::<extern "C" fn(u32) -> *const c_char>("nvmlErrorString");
            CStr::from_ptr(ask(code)).to_str().unwrap().to_owned()
        };
        (0..=30).map(words).collect::<Vec<String>>()
    };
    let (old, new) = (words("535.161.08"), words("550.163.01"));
    assert_eq!(old[..28], new[..28]);
    let unknown = |code: usize| old[code] == "Unknown Error";
    assert_eq!(
        (0..=30).filter(|code| unknown(*code)).collect::<Vec<_>>(),
        [28, 29, 30]
    );
    let at = [7, 8, 12, 17, 20, 21, 24, 25, 26, 27, 28, 29].map(|code| new[code].as_str());
    assert_eq!(
        at,
        [
            "Insufficient Size",
            "Insufficient External Power",
            "NVML Shared Library Not Found",
            "GPU access blocked by the operating system",
            "Insufficient Memory",
            "No data",
            "Invalid Frequency",
            "Argument version mismatch",
            "Requested functionality has been deprecated",
            "System is not in ready state",
            "No supported GPUs were found",
            "Resource not in correct state to perform requested operation",
        ]
    );
}

#[test]
fn wrong_arguments_get_the_codes_of_the_real_library() {
    let nvml = Nvml::load();
    assert_eq!(nvml.init(), OK);
    let (_, gpu) = nvml.at(0);
    assert_eq!(nvml.at(2).0, INVALID_ARGUMENT);
    assert_eq!(
        nvml.by_uuid(c"GPU-00000000-0000-0000-0000-000000000000"),
        NOT_FOUND
    );
    assert_eq!(
        nvml.number("nvmlDeviceGetBrand", ptr::null_mut()).0,
        INVALID_ARGUMENT
    );
    assert_eq!(
        nvml.number("nvmlDeviceGetBrand", ptr::without_provenance_mut(4711))
            .0,
        INVALID_ARGUMENT
    );
    assert_eq!(nvml.name(gpu, 21).0, INSUFFICIENT_SIZE);
    assert_eq!(
        nvml.name(gpu, 22),
        (OK, b"NVIDIA H100 80GB HBM3\0".to_vec())
    );

    let mut memory = nvmlMemory_v2_t {
        version: 0x28 | 1 << 24,
        total: 0,
        reserved: 0,
        free: 0,
        used: 0,
    };
    // SAFETY: as in nvml.h.
    unsafe {
        let ask = nvml.symbol::<extern "C" fn(Handle, *mut nvmlMemory_v2_t) -> u32>(
            "nvmlDeviceGetMemoryInfo_v2",
        );
        assert_eq!(ask(gpu, &raw mut memory), VERSION_MISMATCH);
        memory.version = 0x28 | 2 << 24;
        assert_eq!(
            (ask(gpu, &raw mut memory), memory.total),
            (OK, 85_520_809_984)
        );
        assert_eq!(ask(gpu, ptr::null_mut()), INVALID_ARGUMENT);
    }
}

#[test]
fn version_2_of_the_fabric_struct_is_not_written_beyond() {
    let nvml = Nvml::load();
    assert_eq!(nvml.init(), OK);
    let (_, gpu) = nvml.at(0);
    let mut info = nvmlGpuFabricInfo_v3_t {
        version: 0x24 | 2 << 24,
        clusterUuid: [7; 16],
        status: 7,
        cliqueId: 7,
        state: 7,
        healthMask: 7,
        healthSummary: 7,
    };
    // SAFETY: as in nvml.h; the struct of version 3 begins as that of version 2.
    let code = unsafe {
        nvml.symbol::<extern "C" fn(Handle, *mut nvmlGpuFabricInfo_v3_t) -> u32>(
            "nvmlDeviceGetGpuFabricInfoV",
        )(gpu, &raw mut info)
    };
    assert_eq!(
        (code, info.state, info.healthMask, info.healthSummary),
        (OK, 0, 0, 7)
    );
}

#[test]
fn processes_need_room() {
    let nvml = Nvml::load();
    assert_eq!(nvml.init(), OK);
    let (_, gpu) = nvml.at(0);
    let list = "nvmlDeviceGetComputeRunningProcesses_v3";
    let ask =
        |room: &mut c_uint, infos: &mut [nvmlProcessInfo_t]| {
            // SAFETY: as in nvml.h; `room` is the slice's length in each call below.
            unsafe {
                nvml.symbol::<extern "C" fn(Handle, *mut c_uint, *mut nvmlProcessInfo_t) -> u32>(
                    list,
                )(gpu, room, infos.as_mut_ptr())
            }
        };
    let mut none = 0;
    assert_eq!((ask(&mut none, &mut []), none), (OK, 0));
    mock_gpus(&nvml.path, &["process", "0", "42"]);
    let mut room = 0;
    assert_eq!((ask(&mut room, &mut []), room), (INSUFFICIENT_SIZE, 1));
    let mut infos = [nvmlProcessInfo_t {
        pid: 0,
        usedGpuMemory: 0,
        gpuInstanceId: 0,
        computeInstanceId: 0,
    }];
    assert_eq!((ask(&mut room, &mut infos), room), (OK, 1));
    assert_eq!((infos[0].pid, infos[0].gpuInstanceId), (42, u32::MAX));
}

fn mock_gpus(library: &Path, args: &[&str]) -> String {
    let state = format!("{}.json", library.display());
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

/// The fake client: what it may have is what the driver says of its group.
#[test]
fn a_client_runs_out_of_memory_at_the_limit_of_the_nearest_group() {
    const MIB: u64 = 1 << 20;
    let nvml = Nvml::load();
    mock_gpus(&nvml.path, &["create", "h100x1"]);
    let root = tempfile::tempdir().unwrap();
    let leaf = root.path().join("pod/container");
    fs_err::create_dir_all(&leaf).unwrap();
    for folder in leaf.ancestors().take(3) {
        fs_err::write(folder.join("cgroup.controllers"), "misc").unwrap();
    }
    let allocate = |group: &Path, mib: u64| {
        let bytes = (mib * MIB).to_string();
        mock_gpus(
            &nvml.path,
            &["allocate", "0", group.to_str().unwrap(), &bytes],
        )
    };
    // Nothing limits it, and what it has now is never counted.
    assert_eq!(allocate(&leaf, 1024), format!("{}\n", 1024 * MIB));
    let limit = |group: &Path, mib: u64| {
        let chain = divvy_gpu_sim::SimGroup::chain(group).unwrap();
        let set = |e: &mut divvy_gpu_sim::Engine| {
            let gpu = e.gpus()[0].facts.uuid.clone();
            e.set_driver_version(
                "615.71.09",
                divvy_model::CudaVersion {
                    major: 13,
                    minor: 4,
                },
            );
            e.set_memory_limit(&gpu, &chain, Some(mib * MIB))
        };
        nvml.state().edit(set).unwrap().unwrap();
    };
    limit(&root.path().join("pod"), 1000);
    let out = allocate(&leaf, 1024);
    let expected = format!("mock-gpus: out of memory after {} bytes", 768 * MIB);
    assert!(out.starts_with(&expected), "{out}");
    assert!(allocate(&leaf, 256).contains("out of memory after 0 bytes"));
    // A neighbour lives, and an entry that is nearer hides the pod's.
    let other = root.path().join("other");
    fs_err::create_dir_all(&other).unwrap();
    fs_err::write(other.join("cgroup.controllers"), "misc").unwrap();
    assert_eq!(allocate(&other, 2048), format!("{}\n", 2048 * MIB));
    limit(&leaf, 4096);
    assert_eq!(allocate(&leaf, 512), format!("{}\n", 512 * MIB));
}

#[test]
fn what_a_script_changes_is_seen_by_a_process_that_runs() {
    let nvml = Nvml::load();
    let absent = mock_gpus(&nvml.path, &["list"]);
    assert!(
        absent.starts_with("mock-gpus: mock GPU state cannot be used: "),
        "{absent}"
    );
    assert!(
        absent.contains(&format!("{}.json", nvml.path.display())),
        "{absent}"
    );
    assert_eq!(mock_gpus(&nvml.path, &["create", "l4x1,h100x1"]), "");
    assert_eq!(nvml.init(), OK);
    assert_eq!(
        mock_gpus(&nvml.path, &["list"]),
        "0 GPU-12345678-1234-1234-0000-123456780000 0 l4\n1 GPU-12345678-1234-1234-0000-123456780001 1 h100\n"
    );
    let (_, l4) = nvml.at(0);
    assert_eq!(nvml.number("nvmlDeviceGetModuleId", l4).0, NOT_SUPPORTED);

    mock_gpus(&nvml.path, &["lose", "0"]);
    assert_eq!(
        (nvml.at(0).0, nvml.number("nvmlDeviceGetMinorNumber", l4).0),
        (GPU_IS_LOST, GPU_IS_LOST)
    );
    mock_gpus(
        &nvml.path,
        &["restore", "GPU-12345678-1234-1234-0000-123456780000"],
    );
    assert_eq!(nvml.number("nvmlDeviceGetMinorNumber", l4), (OK, 0));

    let fault = r#"{"op":"facts","times":1,"effect":{"fail":23}}"#;
    assert_eq!(mock_gpus(&nvml.path, &["fault", fault]), "0\n");
    assert_eq!((nvml.name(l4, 96).0, nvml.name(l4, 96).0), (23, OK));

    let boot = mock_gpus(&nvml.path, &["boot-id"]);
    mock_gpus(&nvml.path, &["reboot"]);
    assert_ne!(mock_gpus(&nvml.path, &["boot-id"]), boot);
    assert_eq!(
        mock_gpus(&nvml.path, &["add", "t4"]),
        "GPU-12345678-1234-1234-0000-123456780002\n"
    );
    assert_eq!(nvml.state().read().unwrap().gpus().len(), 3);
    mock_gpus(&nvml.path, &["remove", "0"]);
    assert_eq!(
        nvml.number("nvmlDeviceGetMinorNumber", l4).0,
        INVALID_ARGUMENT
    );
    assert_eq!(
        mock_gpus(&nvml.path, &["lose", "9"]),
        "mock-gpus: no GPU \"9\"\n"
    );
    assert!(mock_gpus(&nvml.path, &["add", "voodoo2"]).contains("known: a10, a100-40, "));
}
