//! A `libcuda.so.1` without a GPU, for the tests of `divvy-hardware`: it sees the GPUs whose nodes
//! are in `/dev`, and says of them what is written behind the library in its own file
//! (`tests/program.rs` writes it there), a line for each: minor, UUID, PCI address, name,
//! multiprocessors, bytes, compute capability, multiprocessors of its smallest partition.
//!
//! A client of MPS has the limits that the daemon says. Beside a server a program gets no context
//! while the mock library's GPUs are in the compute mode of one process.

use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Result;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType,
};

/// Marker at the beginning of the data behind the library in its file.
const MARK: &str = "\n--- GPUs ---\n";
const OK: c_int = 0;
const NO_DEVICE: c_int = 100;
const OUT_OF_MEMORY: c_int = 2;
const UNAVAILABLE: c_int = 46;
/// Smaller allocations are memory that the program uses.
const LARGE: usize = 64 << 20;

/// Bytes of large allocations.
static ALLOCATED: AtomicU64 = AtomicU64::new(0);

/// Asks the daemon whose client this process is. `None`: it is none, or the daemon says nothing.
fn ask(question: &str) -> Option<String> {
    let folder = std::env::var_os("CUDA_MPS_PIPE_DIRECTORY")?;
    let socket = PathBuf::from(folder).join("control");
    let asked = || -> Result<String> {
        let flags = SocketFlags::CLOEXEC;
        let kind = SocketType::SEQPACKET;
        let daemon = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)?;
        rustix::net::connect(&daemon, &SocketAddrUnix::new(&socket)?)?;
        let hello = packet(&daemon)?;
        rustix::net::send(&daemon, question.as_bytes(), SendFlags::empty())?;
        rustix::net::shutdown(&daemon, Shutdown::Write)?;
        let answer = packet(&daemon)?;
        assert!(hello.starts_with(b"OUTB"));
        Ok(String::from_utf8_lossy(&answer).trim().to_owned())
    };
    asked().ok()
}

fn packet(from: &OwnedFd) -> Result<Vec<u8>> {
    let mut packet = vec![0; 4096];
    let (read, _) = rustix::net::recv(from, packet.as_mut_slice(), RecvFlags::empty())?;
    packet.truncate(read);
    Ok(packet)
}

/// Bytes that this client of MPS may allocate. The daemon is asked once.
fn limit() -> Option<u64> {
    static LIMIT: OnceLock<Option<u64>> = OnceLock::new();
    *LIMIT.get_or_init(ask_limit)
}

fn ask_limit() -> Option<u64> {
    let text = ask("get_default_device_pinned_mem_limit 0")?;
    let number = |unit: char| text.strip_suffix(unit)?.parse::<u64>().ok();
    number('G')
        .map(|n| n << 30)
        .or(number('M').map(|n| n << 20))
}

/// Returns whether programs beside an MPS server get no context. The parent knows the GPUs.
fn is_exclusive() -> bool {
    let parent = std::os::unix::process::parent_id();
    let environment = fs_err::read(format!("/proc/{parent}/environ")).unwrap_or_default();
    let environment = String::from_utf8_lossy(&environment).into_owned();
    let state = environment
        .split('\0')
        .find_map(|pair| pair.strip_prefix("DIVVY_MOCK_STATE="));
    let state = state.map(|path| format!("/proc/{parent}/root{path}"));
    let text = state.and_then(|path| fs_err::read_to_string(path).ok());
    text.is_some_and(|text| text.contains("ExclusiveProcess"))
}

/// The lines of the GPUs that have a node.
fn gpus() -> Vec<Vec<String>> {
    let maps = fs_err::read_to_string("/proc/self/maps").unwrap_or_default();
    let path = maps
        .lines()
        .filter_map(|line| line.find('/').and_then(|at| line.get(at..)));
    let own = path
        .map(str::trim_end)
        .find(|path| path.contains("/libcuda.so"))
        .unwrap_or_default();
    let bytes = fs_err::read(own).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let lines = text
        .rsplit_once(MARK)
        .map(|(_, lines)| lines.to_owned())
        .unwrap_or_default();
    let fields = lines
        .lines()
        .map(|line| line.split('|').map(str::to_owned).collect::<Vec<_>>());
    fields
        .filter(|of| {
            of.first()
                .is_some_and(|n| Path::new(&format!("/dev/nvidia{n}")).exists())
        })
        .collect()
}

fn field(device: c_int, at: usize) -> Option<String> {
    gpus().get(usize::try_from(device).ok()?)?.get(at).cloned()
}

/// Writes a value for the caller.
///
/// # Safety
/// `to` is valid for a write of `T`.
unsafe fn put<T>(to: *mut T, value: Option<T>) -> c_int {
    let Some(value) = value else { return NO_DEVICE };
    // SAFETY: as the caller promises.
    unsafe { to.write(value) };
    OK
}

/// # Safety
/// `to` has room for `room` bytes.
unsafe fn put_text(to: *mut c_char, room: c_int, text: Option<String>) -> c_int {
    let text = text.and_then(|text| CString::new(text).ok());
    let (Some(text), Ok(room)) = (text, usize::try_from(room)) else {
        return NO_DEVICE;
    };
    let bytes = text.as_bytes_with_nul();
    if bytes.len() > room {
        return NO_DEVICE;
    }
    // SAFETY: there is room, as was just seen.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr().cast(), to, bytes.len()) };
    OK
}

#[unsafe(no_mangle)]
extern "C" fn cuInit(_flags: c_uint) -> c_int {
    if gpus().is_empty() { NO_DEVICE } else { OK }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> c_int {
    // SAFETY: cuda.h.
    unsafe { put(count, c_int::try_from(gpus().len()).ok()) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> c_int {
    // SAFETY: cuda.h.
    unsafe { put(device, field(ordinal, 0).map(|_| ordinal)) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetUuid(uuid: *mut [u8; 16], device: c_int) -> c_int {
    let bytes = field(device, 1).and_then(|text| {
        let hex: String = text.chars().skip(4).filter(|c| *c != '-').collect();
        Some(u128::from_str_radix(&hex, 16).ok()?.to_be_bytes())
    });
    // SAFETY: cuda.h.
    unsafe { put(uuid, bytes) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetPCIBusId(to: *mut c_char, room: c_int, device: c_int) -> c_int {
    // SAFETY: cuda.h.
    unsafe { put_text(to, room, field(device, 2)) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetName(to: *mut c_char, room: c_int, device: c_int) -> c_int {
    // SAFETY: cuda.h.
    unsafe { put_text(to, room, field(device, 3)) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) -> c_int {
    // SAFETY: cuda.h.
    unsafe { put(bytes, field(device, 5).and_then(|text| text.parse().ok())) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, which: c_int, device: c_int) -> c_int {
    // With a node of a MIG capability it is a partition.
    if which == 16 && std::env::var_os("CUDA_MPS_PIPE_DIRECTORY").is_some() {
        let percent = ask("get_default_active_thread_percentage");
        let percent = percent.and_then(|text| text.parse::<f64>().ok());
        let all = field(device, 4).and_then(|text| text.parse::<f64>().ok());
        let part = all.zip(percent).map(|(all, percent)| all * percent / 100.0);
        #[expect(clippy::cast_possible_truncation, reason = "a small number")]
        let part = part.map(|part| part as c_int);
        // SAFETY: cuda.h.
        return unsafe { put(value, part) };
    }
    let at = match which {
        16 if Path::new("/dev/nvidia-caps").exists() => 8,
        16 => 4,
        75 => 6,
        76 => 7,
        _ => return NO_DEVICE,
    };
    // SAFETY: cuda.h.
    unsafe { put(value, field(device, at).and_then(|text| text.parse().ok())) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, _device: c_int) -> c_int {
    if std::env::var_os("CUDA_MPS_PIPE_DIRECTORY").is_none() && is_exclusive() {
        return UNAVAILABLE;
    }
    // SAFETY: cuda.h.
    unsafe { put(context, Some(std::ptr::null_mut())) }
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetCurrent(_context: *mut c_void) -> c_int {
    OK
}

#[unsafe(no_mangle)]
extern "C" fn cuModuleLoadData(_module: *mut *mut c_void, _image: *const c_void) -> c_int {
    OK
}

#[unsafe(no_mangle)]
extern "C" fn cuModuleGetFunction(
    _f: *mut *mut c_void,
    _module: *mut c_void,
    _name: *const c_char,
) -> c_int {
    OK
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAlloc_v2(memory: *mut u64, size: usize) -> c_int {
    if size >= LARGE {
        let bytes = u64::try_from(size).unwrap_or(u64::MAX);
        let all = ALLOCATED.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let is_too_much = limit().is_some_and(|limit| all > limit);
        // SAFETY: cuda.h. Nothing uses the address.
        return unsafe {
            if is_too_much {
                OUT_OF_MEMORY
            } else {
                put(memory, Some(1 << 40))
            }
        };
    }
    let numbers = vec![0_u32; size / 4].leak();
    // SAFETY: cuda.h.
    unsafe { put(memory, Some(numbers.as_mut_ptr() as u64)) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, size: usize) -> c_int {
    // SAFETY: `to` is what cuMemAlloc_v2 gave, of this size.
    unsafe { std::ptr::copy_nonoverlapping(from.cast::<u8>(), to as *mut u8, size) };
    OK
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, size: usize) -> c_int {
    // SAFETY: `from` is what cuMemAlloc_v2 gave, of this size.
    unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to.cast(), size) };
    OK
}

/// The one kernel that there is: adds one to each number.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuLaunchKernel(
    _function: *mut c_void,
    _x: c_uint,
    _y: c_uint,
    _z: c_uint,
    _threads_x: c_uint,
    _threads_y: c_uint,
    _threads_z: c_uint,
    _shared: c_uint,
    _stream: *mut c_void,
    parameters: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> c_int {
    // SAFETY: the kernel's parameters are an address from cuMemAlloc_v2 and how many numbers are
    // there.
    let numbers = unsafe {
        let memory = (*parameters).cast::<u64>().read();
        let count = (*parameters.add(1)).cast::<u32>().read();
        std::slice::from_raw_parts_mut(memory as *mut u32, count as usize)
    };
    for number in numbers {
        *number += 1;
    }
    OK
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSynchronize() -> c_int {
    OK
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFree_v2(_memory: u64) -> c_int {
    OK
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRelease_v2(_device: c_int) -> c_int {
    OK
}
