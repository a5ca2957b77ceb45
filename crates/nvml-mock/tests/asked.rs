//! The library answers without a driver as NVIDIA's do, whose answers `cargo xtask nvidia` finds
//! out.

use nvidia_ml::{BRANCHES, GENERATIONS, MockState, golden_file, without_a_driver, without_symbols};

#[test]
fn without_a_driver_the_library_answers_what_nvidias_answers() {
    let built = std::env::current_exe().unwrap();
    let built = fs_err::read(built.with_file_name("libnvidia_ml.so")).unwrap();
    for branch in BRANCHES {
        let is_of = |version: &str| version.starts_with(&format!("{branch}."));
        // The last of a branch: R535 has several kinds. R555 has no row of its own.
        let of_branch = GENERATIONS.iter().rfind(|one| is_of(one.version));
        let generation = of_branch.unwrap_or_else(|| {
            let mut older = GENERATIONS.iter().rev();
            older
                .find(|one| *one.version < *format!("{branch}"))
                .unwrap()
        });
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("libnvidia-ml.so.1");
        let mut bytes = built.clone();
        assert_eq!(without_symbols(&mut bytes, &generation.lacks()), [""; 0]);
        fs_err::write(&path, bytes).unwrap();
        let state = format!("{}.json", path.display());
        let state = MockState::open_or_create(state, &"h100x1".parse().unwrap()).unwrap();
        let change = state.edit(|engine| {
            engine.set_driver_version(generation.version, generation.cuda);
            engine.set_driver_loaded(false);
        });
        change.unwrap();
        let seen = without_a_driver(&path, generation.version).unwrap();
        let golden = fs_err::read_to_string(golden_file(branch)).unwrap();
        let pairs = golden.lines().zip(seen.lines());
        let differ: Vec<_> = pairs.filter(|(one, other)| one != other).collect();
        assert!(
            seen == golden,
            "R{branch}: NVIDIA's and the mock's: {differ:?}"
        );
    }
}
