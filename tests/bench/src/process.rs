//! Memory and processor time of a process, from `/proc`.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result};
use fs_err as fs;

/// Memory of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Memory {
    /// Bytes in memory, those of shared files included.
    pub(crate) resident: u64,
    /// Bytes that belong to no file.
    pub(crate) anonymous: u64,
}

/// Reads the memory of a process.
pub(crate) fn memory(pid: u32) -> Result<Memory> {
    parse_rollup(&fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?)
}

fn parse_rollup(text: &str) -> Result<Memory> {
    let field = |name: &str| -> Result<u64> {
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let number = line.and_then(|rest| rest.split_whitespace().next());
        let kib: u64 = number
            .with_context(|| format!("smaps_rollup has no {name}"))?
            .parse()?;
        Ok(kib * 1024)
    };
    Ok(Memory {
        resident: field("Rss")?,
        anonymous: field("Anonymous")?,
    })
}

/// Time that each thread has run on a core, to the nanosecond, by thread id.
pub(crate) type Threads = BTreeMap<String, Duration>;

/// Reads the threads of a process.
pub(crate) fn threads(pid: u32) -> Result<Threads> {
    let mut threads = Threads::new();
    for thread in fs::read_dir(format!("/proc/{pid}/task"))? {
        let thread = thread?;
        // A thread may end between the listing and this look.
        let Ok(times) = fs::read_to_string(thread.path().join("schedstat")) else {
            continue;
        };
        let ran = times.split(' ').next().unwrap_or_default().parse()?;
        threads.insert(
            thread.file_name().to_string_lossy().into_owned(),
            Duration::from_nanos(ran),
        );
    }
    Ok(threads)
}

/// Context switches of all threads of a process so far: each hand-over from one thread to another
/// costs at least one of a thread that waits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Switches {
    /// Switches of threads that waited for something.
    pub(crate) waits: u64,
    /// Switches of threads that had to leave their core.
    pub(crate) preempted: u64,
}

impl Switches {
    /// Adds the switches between two looks. Threads that have ended meanwhile count for nothing.
    pub(crate) fn add(&mut self, before: Self, after: Self) {
        self.waits += after.waits.saturating_sub(before.waits);
        self.preempted += after.preempted.saturating_sub(before.preempted);
    }
}

/// Reads the context switches of a process.
pub(crate) fn switches(pid: u32) -> Result<Switches> {
    let mut all = Switches::default();
    for thread in fs::read_dir(format!("/proc/{pid}/task"))? {
        // A thread may end between the listing and this look.
        let Ok(status) = fs::read_to_string(thread?.path().join("status")) else {
            continue;
        };
        let of_thread = parse_switches(&status);
        all.add(Switches::default(), of_thread);
    }
    Ok(all)
}

fn parse_switches(status: &str) -> Switches {
    let field = |name: &str| {
        let mut lines = status.lines();
        let rest = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        rest.and_then(|rest| rest.trim().parse().ok())
            .unwrap_or_default()
    };
    Switches {
        waits: field("voluntary_ctxt_switches"),
        preempted: field("nonvoluntary_ctxt_switches"),
    }
}

/// Returns the time that the threads of the later look have run since the earlier one.
pub(crate) fn ran(before: &Threads, after: &Threads) -> Duration {
    after
        .iter()
        .map(|(id, ran)| ran.saturating_sub(before.get(id).copied().unwrap_or_default()))
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_in_kibibytes() {
        let text = "5581-7ff (deleted)\nRss:                3452 kB\nPss:  1 kB\nAnonymous:           140 kB\n";
        assert_eq!(
            parse_rollup(text).unwrap(),
            Memory {
                resident: 3452 << 10,
                anonymous: 140 << 10
            }
        );
        assert_eq!(
            parse_rollup("Rss: 1 kB\n").unwrap_err().to_string(),
            "smaps_rollup has no Anonymous"
        );
    }

    #[test]
    fn switches_of_a_thread_are_read_by_their_kind() {
        let status = "Name:\tx\nvoluntary_ctxt_switches:\t12\nnonvoluntary_ctxt_switches:\t3\n";
        let expected = Switches {
            waits: 12,
            preempted: 3,
        };
        assert_eq!(parse_switches(status), expected);
        // A thread that starts a process waits until that has its program.
        assert!(
            std::process::Command::new("true")
                .status()
                .unwrap()
                .success()
        );
        assert!(switches(std::process::id()).unwrap().waits > 0);
    }

    #[test]
    fn threads_that_began_since_count_in_full_and_those_that_ended_do_not() {
        let times = |times: &[(&str, u64)]| -> Threads {
            times
                .iter()
                .map(|(id, nanos)| ((*id).to_owned(), Duration::from_nanos(*nanos)))
                .collect()
        };
        assert_eq!(
            ran(&times(&[("1", 5), ("2", 9)]), &times(&[("1", 7), ("3", 4)])),
            Duration::from_nanos(6)
        );
    }
}
