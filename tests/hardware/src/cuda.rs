//! The smallest CUDA program: loads `libcuda.so.1` by itself (no toolkit), counts GPUs, allocates memory and runs a kernel.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::ptr;

use anyhow::{Context, Result, ensure};
use libloading::Library;

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

/// What the program saw.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Seen {
    /// How many GPUs CUDA counts.
    pub(crate) count: i32,
    name: String,
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "CUDA sees {} GPU, {}, and a kernel from PTX added one to {NUMBERS} numbers in its memory",
            self.count, self.name
        )
    }
}

type Code = c_int;

/// Calls a function of the driver API by name, with the types of its C declaration, and checks its code.
macro_rules! call {
    ($library:expr, $name:literal, ($($type:ty),*), ($($argument:expr),*)) => {{
        // SAFETY: the types are those of the function's declaration in cuda.h.
        let function = unsafe { $library.get::<unsafe extern "C" fn($($type),*) -> Code>($name) }
            .with_context(|| format!("{} is not in libcuda", String::from_utf8_lossy($name)))?;
        // SAFETY: pointers are to locals that live and are large enough, or were given by the driver.
        let code = unsafe { function($($argument),*) };
        ensure!(code == 0, "{} failed with code {code}", String::from_utf8_lossy($name));
    }};
}

/// Runs the program on the first GPU.
pub(crate) fn check() -> Result<Seen> {
    // SAFETY: NVIDIA's library; its initialisers are what every CUDA program runs.
    let cuda = unsafe { Library::new("libcuda.so.1") }.context("libcuda.so.1 cannot be loaded")?;
    let (mut count, mut device, mut name) = (0, 0, [0 as c_char; 256]);
    call!(cuda, b"cuInit", (c_uint), (0));
    call!(cuda, b"cuDeviceGetCount", (*mut c_int), (&raw mut count));
    call!(cuda, b"cuDeviceGet", (*mut c_int, c_int), (&raw mut device, 0));
    let room = c_int::try_from(name.len())?;
    call!(cuda, b"cuDeviceGetName", (*mut c_char, c_int, c_int), (name.as_mut_ptr(), room, device));
    let name = name.map(c_char::cast_unsigned);
    let name = CStr::from_bytes_until_nul(&name)?.to_string_lossy().into_owned();

    let (mut context, mut module, mut kernel) = (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
    call!(cuda, b"cuDevicePrimaryCtxRetain", (*mut *mut c_void, c_int), (&raw mut context, device));
    call!(cuda, b"cuCtxSetCurrent", (*mut c_void), (context));
    let text = PTX.as_ptr().cast::<c_void>();
    call!(cuda, b"cuModuleLoadData", (*mut *mut c_void, *const c_void), (&raw mut module, text));
    call!(
        cuda,
        b"cuModuleGetFunction",
        (*mut *mut c_void, *mut c_void, *const c_char),
        (&raw mut kernel, module, c"add_one".as_ptr())
    );
    let mut numbers: Vec<u32> = (0..NUMBERS).collect();
    let (mut memory, size) = (0_u64, size_of_val(&*numbers));
    call!(cuda, b"cuMemAlloc_v2", (*mut u64, usize), (&raw mut memory, size));
    call!(cuda, b"cuMemcpyHtoD_v2", (u64, *const c_void, usize), (memory, numbers.as_ptr().cast(), size));
    let mut length = NUMBERS;
    let mut parameters = [(&raw mut memory).cast::<c_void>(), (&raw mut length).cast::<c_void>()];
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
        (kernel, blocks, 1, 1, THREADS, 1, 1, 0, ptr::null_mut(), parameters.as_mut_ptr(), ptr::null_mut())
    );
    call!(cuda, b"cuCtxSynchronize", (), ());
    call!(cuda, b"cuMemcpyDtoH_v2", (*mut c_void, u64, usize), (numbers.as_mut_ptr().cast(), memory, size));
    call!(cuda, b"cuMemFree_v2", (u64), (memory));
    call!(cuda, b"cuDevicePrimaryCtxRelease_v2", (c_int), (device));
    ensure!(numbers.iter().copied().eq(1..=NUMBERS), "the kernel did not do its work");
    Ok(Seen { count, name })
}
