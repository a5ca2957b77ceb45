//! The answers of a library for NVML on a machine without a driver, as text. NVIDIA's libraries are
//! asked by `cargo xtask nvidia`, the mock library as that of the same driver by a test: both have
//! to answer what is in `tests/golden`.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_uint, c_void};
use std::path::{Path, PathBuf};
use std::ptr;

use divvy_model::GpuOp;
use libloading::Library;

use crate::exports::{ALSO, symbols};

/// Branches whose libraries the mock library was compared with.
pub const BRANCHES: [u32; 4] = [525, 535, 550, 555];

/// Functions that are asked apart: they begin a session, or answer no code.
const APART: [&str; 3] = ["nvmlInit_v2", "nvmlInitWithFlags", "nvmlErrorString"];
/// The code that means none of the others.
const UNKNOWN: c_uint = 999;
/// The last code that has words, and some after it.
const LAST_CODE: c_uint = 31;
/// Far more than a function writes.
const ROOM: usize = 64 << 10;

/// A function with more arguments than any of them has. The C ABIs of x86-64 and aarch64 hand the
/// first six over in registers, which a function with fewer does not look at.
type Any = unsafe extern "C" fn(
    *mut c_void,
    *mut c_void,
    *mut c_void,
    *mut c_void,
    *mut c_void,
    *mut c_void,
) -> c_uint;

/// Returns the file with the answers of the library of a branch.
pub fn golden_file(branch: u32) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    folder.join(format!("r{branch}.txt"))
}

/// Asks a library everything that the mock library has, before a session and after one that could
/// not begin. `version` is that of its driver, which is left out of the answers.
pub fn without_a_driver(library: &Path, version: &str) -> Result<String, libloading::Error> {
    // SAFETY: NVIDIA's library, or the mock library, which runs no code of ours when it is loaded.
    let library = unsafe { Library::new(library) }?;
    let line = |name: &str, code: Option<c_uint>| format!("{} {name}\n", said(code));
    let first = codes(&library, true);
    let of_first = first.iter().map(|(name, code)| line(name, *code));
    let at_first: String = of_first.collect();
    let with_null = codes(&library, false);
    let sessions = APART.iter().take(2);
    let sessions: String = sessions
        .map(|name| line(name, call(&library, name, false)))
        .collect();
    let after = "after a session that did not begin";
    let after_codes = [codes(&library, true), codes(&library, false)];
    let [later, later_with_null] = after_codes.map(|codes| different(&first, &codes));
    let words = (0..=LAST_CODE).chain([UNKNOWN]).map(|code| {
        let words = words(&library, code);
        format!("{code} {}\n", words.unwrap_or_else(|| "absent".to_owned()))
    });
    let parts = [
        ("before a session".to_owned(), at_first),
        (
            "before a session, with null".to_owned(),
            different(&first, &with_null),
        ),
        ("sessions".to_owned(), sessions),
        (after.to_owned(), later),
        (format!("{after}, with null"), later_with_null),
        (
            "version".to_owned(),
            own_version(&library).replace(version, "DRIVER") + "\n",
        ),
        ("words".to_owned(), words.collect()),
    ];
    let text = parts.map(|(title, lines)| format!("## {title}\n{lines}"));
    Ok(text.concat())
}

fn said(code: Option<c_uint>) -> String {
    code.map_or_else(|| "absent".to_owned(), |code| code.to_string())
}

/// Lists the answers that are others than at first.
fn different(first: &Codes, now: &Codes) -> String {
    let is_other = |(name, code): &(&&str, &Option<c_uint>)| first.get(**name) != Some(*code);
    let lines = now.iter().filter(is_other);
    let lines: Vec<String> = lines
        .map(|(name, code)| format!("{} {name}\n", said(*code)))
        .collect();
    if lines.is_empty() {
        "(as at first)\n".to_owned()
    } else {
        lines.concat()
    }
}

type Codes = BTreeMap<&'static str, Option<c_uint>>;

fn codes(library: &Library, with_values: bool) -> Codes {
    let all = GpuOp::ALL.iter().flat_map(|op| symbols(*op)).chain(ALSO);
    let asked = all.filter(|name| !APART.contains(name));
    asked
        .map(|name| (*name, call(library, name, with_values)))
        .collect()
}

/// Calls a function with zeroes behind each of its arguments, or with null. `None`: the library has
/// no such function.
fn call(library: &Library, name: &str, with_values: bool) -> Option<c_uint> {
    // SAFETY: a function of NVML, by its name; see `Any`.
    let function = unsafe { library.get::<Any>(name) }.ok()?;
    let mut rooms: [Vec<u64>; 6] = Default::default();
    let [one, two, three, four, five, six] = rooms.each_mut().map(|room| {
        if with_values {
            room.resize(ROOM / size_of::<u64>(), 0);
            room.as_mut_ptr().cast::<c_void>()
        } else {
            ptr::null_mut()
        }
    });
    // SAFETY: without a session NVML looks at no argument but those of the functions that need
    // none, and these write less than there is room.
    Some(unsafe { function(one, two, three, four, five, six) })
}

/// Returns the library's version, or the code of the answer.
fn own_version(library: &Library) -> String {
    type Version = unsafe extern "C" fn(*mut c_char, c_uint) -> c_uint;
    // SAFETY: as in nvml.h.
    let Ok(ask) = (unsafe { library.get::<Version>("nvmlSystemGetNVMLVersion") }) else {
        return "absent".to_owned();
    };
    let mut text = [0; 80];
    // SAFETY: as in nvml.h; the last character stays a NUL.
    let code = unsafe { ask(text.as_mut_ptr(), 79) };
    // SAFETY: there is a NUL in it.
    let text = unsafe { CStr::from_ptr(text.as_ptr()) };
    match code {
        0 => text.to_string_lossy().into_owned(),
        code => code.to_string(),
    }
}

fn words(library: &Library, code: c_uint) -> Option<String> {
    type Words = unsafe extern "C" fn(c_uint) -> *const c_char;
    // SAFETY: as in nvml.h.
    let ask = unsafe { library.get::<Words>("nvmlErrorString") }.ok()?;
    // SAFETY: as in nvml.h.
    let text = unsafe { ask(code) };
    // SAFETY: not null, and a text that is never freed.
    let text = (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) });
    text.map(|text| text.to_string_lossy().into_owned())
}
