//! [`Loaded`]: the library in this process, its GPUs in memory, with odd answers.

use std::ffi::{CString, c_char};
use std::path::{Path, PathBuf};

use divvy_gpu_sim::Engine;

/// More than the state of a node's GPUs takes.
const ROOM: usize = 1 << 16;

/// The library of a path, loaded into this process, with its GPUs in memory and no file: what it
/// answers is forgotten with the process. For tests that make millions of calls, and that want odd
/// answers. The library may be loaded by others of this process, too: it is the same one.
pub struct Loaded {
    library: libloading::Library,
    path: PathBuf,
}

impl Loaded {
    /// Loads the library that was built beside the test that runs.
    pub fn beside_this_test() -> Option<Self> {
        let test = std::env::current_exe().ok()?;
        Self::open(&test.parent()?.join("libnvidia_ml.so"))
    }

    fn open(path: &Path) -> Option<Self> {
        // SAFETY: loading runs no code of ours beyond the standard library's.
        let library = unsafe { libloading::Library::new(path) }.ok()?;
        let path = path.to_owned();
        Some(Self { library, path })
    }

    /// Returns the path to open it by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Gives it these GPUs. No session may be open. Returns true if it took them.
    pub fn keep(&self, engine: &Engine) -> bool {
        let text = serde_json::to_vec(engine).ok().map(CString::new);
        let Some(Ok(text)) = text else { return false };
        // SAFETY: the type is that of the function in `trial`, which is given a text with a NUL.
        let kept = unsafe {
            let keep = self
                .library
                .get::<unsafe extern "C" fn(*const c_char) -> u32>("divvy_mock_keep");
            keep.map(|keep| keep(text.as_ptr()))
        };
        kept.is_ok_and(|code| code == 0)
    }

    /// Returns its GPUs as they are.
    pub fn kept(&self) -> Option<Engine> {
        serde_json::from_slice(&self.text("divvy_mock_kept")).ok()
    }

    /// Has one call in `one_in` answer oddly, and every call of one call site in `sites`; 0 is
    /// none. The seed decides which, and how.
    pub fn odd(&self, seed: u64, one_in: u64, sites: u64) {
        // SAFETY: the type is that of the function in `trial`.
        let odd = unsafe {
            self.library
                .get::<extern "C" fn(u64, u64, u64)>("divvy_mock_odd")
        };
        if let Ok(odd) = odd {
            odd(seed, one_in, sites);
        }
    }

    /// Has every call answer well.
    pub fn good(&self) {
        self.odd(0, 0, 0);
    }

    /// Returns how many calls were made so far.
    pub fn calls(&self) -> u64 {
        // SAFETY: the type is that of the function in `trial`.
        let calls = unsafe {
            self.library
                .get::<extern "C" fn() -> u64>("divvy_mock_calls")
        };
        calls.map_or(0, |calls| calls())
    }

    /// Returns which odd answers were given since this was last asked, one a line: the place in the
    /// library's source, and the answer.
    pub fn noted(&self) -> String {
        String::from_utf8_lossy(&self.text("divvy_mock_noted")).into_owned()
    }

    fn text(&self, function: &str) -> Vec<u8> {
        let mut bytes = vec![0; ROOM];
        // SAFETY: the type is that of the functions in `trial`, which write no more than there is
        // room for.
        let length = unsafe {
            let get = self
                .library
                .get::<unsafe extern "C" fn(*mut c_char, usize) -> usize>(function);
            get.map_or(0, |get| get(bytes.as_mut_ptr().cast(), bytes.len()))
        };
        bytes.truncate(length);
        bytes
    }
}
