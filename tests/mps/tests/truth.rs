//! The stand-in answers as NVIDIA's programs do, whose answers `cargo xtask nvidia` finds out.

#![allow(clippy::unwrap_used, reason = "tests; a failure is a panic")]

use divvy_mps_stand_in::{DRIVERS, golden, program, transcript};

/// Part of the script for which there have to be two users.
const OF_USERS: &str = "## by another user";

#[test]
fn the_stand_in_answers_what_nvidias_programs_answer() {
    for (branch, words) in DRIVERS {
        // Short: the daemon's sockets are in it, and another user reaches them.
        let dir = tempfile::Builder::new()
            .prefix("s")
            .tempdir_in("/tmp")
            .unwrap();
        let bin = dir.path().join("bin");
        fs_err::create_dir(&bin).unwrap();
        for name in ["control", "server"] {
            fs_err::copy(program(), bin.join(format!("nvidia-cuda-mps-{name}"))).unwrap();
        }
        let seen = transcript(&bin, dir.path(), words).unwrap();
        let golden = golden(branch).unwrap();
        let seen = if rustix::process::getuid().is_root() {
            seen
        } else {
            // One user alone is the owner in any case.
            let parts = golden.split_once(OF_USERS).unwrap();
            let rest = seen.split_once("## its end").unwrap().1;
            let skipped = parts.1.split_once("## its end").unwrap().0;
            let before = seen.split_once(OF_USERS).unwrap().0;
            format!("{before}{OF_USERS}{skipped}## its end{rest}")
        };
        assert!(
            seen == golden,
            "R{branch}: {}",
            first_difference(&golden, &seen)
        );
    }
}

fn first_difference(golden: &str, seen: &str) -> String {
    let mut lines = golden.lines().zip(seen.lines()).enumerate();
    match lines.find(|(_, (golden, seen))| golden != seen) {
        Some((at, (golden, seen))) => format!("line {}: `{seen}` for `{golden}`", at + 1),
        None => "one has more lines".to_owned(),
    }
}
