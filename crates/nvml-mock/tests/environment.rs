//! The settings, as a plugin under test gets them. A test alone in its process: all tests share
//! the environment.

use nvidia_ml::MockState;

#[test]
fn the_state_file_and_the_first_gpus_come_from_the_environment() {
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("gpus.json");
    let built = std::env::current_exe()
        .unwrap()
        .parent()
        .unwrap()
        .join("libnvidia_ml.so");
    // SAFETY: no other thread of this process reads or writes the environment now.
    unsafe {
        std::env::set_var("DIVVY_MOCK_STATE", &state);
        std::env::set_var("DIVVY_MOCK_GPUS", "h1000");
    }
    // SAFETY: loading runs no code of ours beyond the standard library's; `nvmlInit_v2` is as in
    // nvml.h.
    let init = || unsafe {
        let library = libloading::Library::new(&built).unwrap();
        let init = library
            .get::<extern "C" fn() -> u32>("nvmlInit_v2")
            .unwrap();
        let code = init();
        drop(library);
        code
    };
    assert_eq!(
        (init(), state.exists()),
        (999, false),
        "a bad list of GPUs is refused"
    );
    // SAFETY: as above.
    unsafe { std::env::set_var("DIVVY_MOCK_GPUS", "a30x3") };
    assert_eq!(init(), 0);
    assert_eq!(
        MockState::open(&state)
            .unwrap()
            .read()
            .unwrap()
            .gpus()
            .len(),
        3
    );
    // SAFETY: as above.
    unsafe { std::env::set_var("DIVVY_MOCK_GPUS", "l4x1") };
    assert_eq!(init(), 0);
    assert_eq!(
        MockState::open(&state)
            .unwrap()
            .read()
            .unwrap()
            .gpus()
            .len(),
        3,
        "what is there stays"
    );
}
