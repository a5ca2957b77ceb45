//! The smallest CUDA program: loads `libcuda.so.1` by itself (no toolkit), counts GPUs, allocates
//! memory and runs a kernel.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::path::PathBuf;
use std::ptr;

use anyhow::{Context, Result, ensure};
use libloading::Library;
use serde::{Deserialize, Serialize};

/// Adds one to each number. PTX is compiled by the driver, for whatever GPU there is.
const PTX: &CStr = c"
.version 6.0
.target sm_50
.address_size 64
.visible .entry add_one(.param .u64 numbers, .param .u32 count)
{
    .reg .pred %p;
    .reg .b32 %r<6>;
    .reg .b64 %a<4>;
    ld.param.u64 %a0, [numbers];
    ld.param.u32 %r0, [count];
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mad.lo.u32 %r4, %r1, %r2, %r3;
    setp.ge.u32 %p, %r4, %r0;
    @%p bra done;
    cvta.to.global.u64 %a1, %a0;
    mul.wide.u32 %a2, %r4, 4;
    add.u64 %a3, %a1, %a2;
    ld.global.u32 %r5, [%a3];
    add.u32 %r5, %r5, 1;
    st.global.u32 [%a3], %r5;
done:
    ret;
}
";
const THREADS: u32 = 256;
const NUMBERS: u32 = 1 << 20;

/// CUDA's view of the first GPU that it sees, and of their number.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Seen {
    /// Number of GPUs that CUDA counts.
    pub(crate) count: i32,
    pub(crate) name: String,
    /// UUID in NVML's form.
    pub(crate) uuid: String,
    pub(crate) bus_id: String,
    pub(crate) multiprocessors: u32,
    pub(crate) memory_bytes: u64,
    /// Major and minor.
    pub(crate) capability: (u32, u32),
    /// The file that was loaded.
    pub(crate) library: Option<PathBuf>,
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "a kernel from PTX added one to {NUMBERS} numbers in the memory of {}",
            self.name
        )
    }
}

/// Memory that a program got.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Allocated {
    pub(crate) bytes: u64,
    /// CUDA's code for the step that it did not get; `None`: it got all.
    pub(crate) refused: Option<i32>,
}

/// So much is allocated at once.
const STEP: usize = 128 << 20;

/// Attributes of `cuDeviceGetAttribute`.
const MULTIPROCESSORS: c_int = 16;
const CAPABILITY: [c_int; 2] = [75, 76];

type Code = c_int;

/// Calls a function of the driver API by name, with the types of its C declaration, and checks its
/// code.
macro_rules! call {
    ($library:expr, $name:literal, ($($type:ty),*), ($($argument:expr),*)) => {{
        // SAFETY: the types are those of the function's declaration in cuda.h.
        let function = unsafe { $library.get::<unsafe extern "C" fn($($type),*) -> Code>($name) }
            .with_context(|| format!("{} is not in libcuda", String::from_utf8_lossy($name)))?;
        // SAFETY: pointers are to locals that live and are large enough, or were given by the
        // driver.
        let code = unsafe { function($($argument),*) };
        ensure!(code == 0, "{} failed with code {code}", String::from_utf8_lossy($name));
    }};
}

/// Returns true if the loader finds libcuda by itself.
pub(crate) fn can_be_loaded() -> bool {
    // SAFETY: as in [`check`].
    unsafe { Library::new("libcuda.so.1") }.is_ok()
}

/// Runs the program, which allocates so many bytes if it is to; `held` is called while its context
/// is on the GPU.
pub(crate) fn check(
    allocate: Option<u64>,
    held: impl FnOnce(&Seen, Option<Allocated>) -> Result<()>,
) -> Result<()> {
    // SAFETY: the driver's library; its initialisers are those of every CUDA program.
    let cuda = unsafe { Library::new("libcuda.so.1") }.context("libcuda.so.1 cannot be loaded")?;
    let mut device = 0;
    call!(cuda, b"cuInit", (c_uint), (0));
    call!(
        cuda,
        b"cuDeviceGet",
        (*mut c_int, c_int),
        (&raw mut device, 0)
    );
    let seen = look(&cuda, device)?;
    let mut context = ptr::null_mut();
    call!(
        cuda,
        b"cuDevicePrimaryCtxRetain",
        (*mut *mut c_void, c_int),
        (&raw mut context, device)
    );
    call!(cuda, b"cuCtxSetCurrent", (*mut c_void), (context));
    run_kernel(&cuda)?;
    let allocated = allocate
        .map(|bytes| allocate_up_to(&cuda, bytes))
        .transpose()?;
    held(&seen, allocated)?;
    call!(cuda, b"cuDevicePrimaryCtxRelease_v2", (c_int), (device));
    Ok(())
}

/// Allocates in steps until it has so many bytes or is refused. The memory goes with the context.
fn allocate_up_to(cuda: &Library, most: u64) -> Result<Allocated> {
    type Alloc = unsafe extern "C" fn(*mut u64, usize) -> Code;
    // SAFETY: the type is that of the function's declaration in cuda.h.
    let alloc = unsafe { cuda.get::<Alloc>(b"cuMemAlloc_v2") }?;
    let mut bytes = 0;
    while bytes < most {
        let mut memory = 0;
        // SAFETY: the pointer is to a local that lives.
        let code = unsafe { alloc(&raw mut memory, STEP) };
        if code != 0 {
            return Ok(Allocated {
                bytes,
                refused: Some(code),
            });
        }
        bytes += u64::try_from(STEP)?;
    }
    Ok(Allocated {
        bytes,
        refused: None,
    })
}

fn look(cuda: &Library, device: c_int) -> Result<Seen> {
    let (mut count, mut uuid, mut memory) = (0, [0_u8; 16], 0_usize);
    let (mut name, mut bus_id) = ([0 as c_char; 256], [0 as c_char; 32]);
    call!(cuda, b"cuDeviceGetCount", (*mut c_int), (&raw mut count));
    let room = c_int::try_from(name.len())?;
    call!(
        cuda,
        b"cuDeviceGetName",
        (*mut c_char, c_int, c_int),
        (name.as_mut_ptr(), room, device)
    );
    call!(
        cuda,
        b"cuDeviceGetUuid",
        (*mut [u8; 16], c_int),
        (&raw mut uuid, device)
    );
    let room = c_int::try_from(bus_id.len())?;
    call!(
        cuda,
        b"cuDeviceGetPCIBusId",
        (*mut c_char, c_int, c_int),
        (bus_id.as_mut_ptr(), room, device)
    );
    call!(
        cuda,
        b"cuDeviceTotalMem_v2",
        (*mut usize, c_int),
        (&raw mut memory, device)
    );
    let attribute = |which: c_int| -> Result<u32> {
        let mut value = 0;
        call!(
            cuda,
            b"cuDeviceGetAttribute",
            (*mut c_int, c_int, c_int),
            (&raw mut value, which, device)
        );
        Ok(u32::try_from(value)?)
    };
    let [major, minor] = CAPABILITY;
    let maps = fs_err::read_to_string("/proc/self/maps").unwrap_or_default();
    Ok(Seen {
        count,
        name: text(&name)?,
        uuid: uuid_text(&uuid),
        bus_id: text(&bus_id)?,
        multiprocessors: attribute(MULTIPROCESSORS)?,
        memory_bytes: memory.try_into()?,
        capability: (attribute(major)?, attribute(minor)?),
        library: crate::compare::libcuda(&maps),
    })
}

fn text(chars: &[c_char]) -> Result<String> {
    let bytes: Vec<u8> = chars.iter().flat_map(|c| c.to_ne_bytes()).collect();
    Ok(CStr::from_bytes_until_nul(&bytes)?
        .to_string_lossy()
        .into_owned())
}

/// `GPU-` and the bytes in groups.
fn uuid_text(bytes: &[u8; 16]) -> String {
    let hex: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let hex = hex.concat();
    let groups = [(0, 8), (8, 12), (12, 16), (16, 20), (20, 32)]
        .map(|(from, to)| hex.get(from..to).unwrap_or_default());
    format!("GPU-{}", groups.join("-"))
}

fn run_kernel(cuda: &Library) -> Result<()> {
    let (mut module, mut kernel) = (ptr::null_mut(), ptr::null_mut());
    let text = PTX.as_ptr().cast::<c_void>();
    call!(
        cuda,
        b"cuModuleLoadData",
        (*mut *mut c_void, *const c_void),
        (&raw mut module, text)
    );
    call!(
        cuda,
        b"cuModuleGetFunction",
        (*mut *mut c_void, *mut c_void, *const c_char),
        (&raw mut kernel, module, c"add_one".as_ptr())
    );
    let mut numbers: Vec<u32> = (0..NUMBERS).collect();
    let (mut memory, size) = (0_u64, size_of_val(&*numbers));
    call!(
        cuda,
        b"cuMemAlloc_v2",
        (*mut u64, usize),
        (&raw mut memory, size)
    );
    call!(
        cuda,
        b"cuMemcpyHtoD_v2",
        (u64, *const c_void, usize),
        (memory, numbers.as_ptr().cast(), size)
    );
    let mut length = NUMBERS;
    let mut parameters = [
        (&raw mut memory).cast::<c_void>(),
        (&raw mut length).cast::<c_void>(),
    ];
    let blocks = NUMBERS.div_ceil(THREADS);
    call!(
        cuda,
        b"cuLaunchKernel",
        (
            *mut c_void,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            *mut c_void,
            *mut *mut c_void,
            *mut *mut c_void
        ),
        (
            kernel,
            blocks,
            1,
            1,
            THREADS,
            1,
            1,
            0,
            ptr::null_mut(),
            parameters.as_mut_ptr(),
            ptr::null_mut()
        )
    );
    call!(cuda, b"cuCtxSynchronize", (), ());
    call!(
        cuda,
        b"cuMemcpyDtoH_v2",
        (*mut c_void, u64, usize),
        (numbers.as_mut_ptr().cast(), memory, size)
    );
    call!(cuda, b"cuMemFree_v2", (u64), (memory));
    ensure!(
        numbers.iter().copied().eq(1..=NUMBERS),
        "the kernel did not do its work"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_uuid_is_written_as_nvml_writes_it() {
        let bytes = [
            0x12, 0x34, 0x56, 0x78, 0x9a, 0xbc, 0xde, 0xf0, 1, 2, 3, 4, 5, 6, 7, 8,
        ];
        assert_eq!(
            super::uuid_text(&bytes),
            "GPU-12345678-9abc-def0-0102-030405060708"
        );
    }
}
