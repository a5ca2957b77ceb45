//! CUDA programs as clients of an MPS server, or in a control group with a limit: each in the
//! container of a claim, with the sockets of the server or the group beside.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use divvy_model::{ComputeMode, GpuDriver, GpuFacts, GpuUuid};

use crate::apply::{self, Container, Ran};
use crate::report::{Check, Outcome};

/// The user who is not the server's.
const ANOTHER: u32 = 65_534;
/// Limit of the control group, and how much more is asked for.
const LIMIT: u64 = 2 << 30;

/// Limits of a client.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// In percent of the multiprocessors.
    pub(crate) cores: u32,
    pub(crate) memory_mib: Option<u64>,
}

/// Runs clients of the server with this folder of sockets, which the host has.
pub(crate) fn of_server(
    container: &Container,
    sockets: &Path,
    limits: Limits,
    facts: &GpuFacts,
) -> Vec<(Check, Outcome)> {
    let most = limits.memory_mib.map(|mib| (mib << 20) + (1 << 30));
    let client = container.clone().with_sockets(sockets).allocating(most);
    let run = |container: &Container| apply::run(container, &mut |_| {});
    let first = run(&client);
    let (as_client, memory) = match first {
        Err(error) => {
            let failed = || Outcome::Failed(format!("{error:#}"));
            (failed(), failed())
        }
        Ok(ran) => (
            of_cores(&ran, limits.cores, facts),
            of_memory(&ran, limits.memory_mib),
        ),
    };
    let other = run(&container.clone().with_sockets(sockets).for_user(ANOTHER));
    let users = other.map(|ran| match ran.answer {
        Some(_) => Outcome::Ok(format!("a program of user {ANOTHER} computed, too")),
        None => Outcome::Failed(format!("user {ANOTHER}: {}", ran.error)),
    });
    vec![
        (Check::MpsClient, as_client),
        (Check::MpsMemory, memory),
        (Check::MpsUsers, Outcome::from(users)),
    ]
}

fn of_cores(ran: &Ran, cores: u32, facts: &GpuFacts) -> Outcome {
    let Some(answer) = &ran.answer else {
        return Outcome::Failed(ran.error.clone());
    };
    let seen = answer.seen.multiprocessors;
    let Some(all) = facts.multiprocessors else {
        return Outcome::NotTried("the GPU's multiprocessors are not known".to_owned());
    };
    // They come in pairs at least.
    let most = (all * cores).div_ceil(100).next_multiple_of(2);
    let text = format!("of {all} multiprocessors a client of {cores} % has {seen}");
    if (1..=most).contains(&seen) {
        Outcome::Ok(text)
    } else {
        Outcome::Failed(text)
    }
}

fn of_memory(ran: &Ran, limit: Option<u64>) -> Outcome {
    let Some(limit) = limit else {
        return Outcome::NotTried("the GPU has no memory of its own".to_owned());
    };
    within(ran, limit << 20)
}

/// Judges whether a program got no more than a limit, and was refused the rest.
fn within(ran: &Ran, limit: u64) -> Outcome {
    let Some(answer) = &ran.answer else {
        return Outcome::Failed(ran.error.clone());
    };
    let Some(got) = &answer.allocated else {
        return Outcome::Failed("it did not try to allocate".to_owned());
    };
    let text = format!("{} of {} MiB were allocated", got.bytes >> 20, limit >> 20);
    match got.refused {
        Some(code) if got.bytes <= limit => {
            Outcome::Ok(format!("{text}, and more was refused with code {code}"))
        }
        Some(_) => Outcome::Failed(text),
        None => Outcome::Failed(format!("{text}, and nothing was refused")),
    }
}

/// Sets the compute mode of one process and runs a program beside the server and one in it. The
/// mode that was found is set again, whatever came of it.
pub(crate) fn alone(
    driver: &dyn GpuDriver,
    gpu: &GpuUuid,
    found: Option<ComputeMode>,
    container: &Container,
    sockets: &Path,
) -> Result<Outcome> {
    let found = found.context("the compute mode that is set cannot be read")?;
    let run = |container: &Container| apply::run(container, &mut |_| {});
    let tried = driver
        .set_compute_mode(gpu, ComputeMode::ExclusiveProcess)
        .map_err(anyhow::Error::from)
        .and_then(|()| {
            let beside = run(container)?;
            Ok((beside, run(&container.clone().with_sockets(sockets))?))
        });
    driver
        .set_compute_mode(gpu, found)
        .with_context(|| format!("the compute mode {found:?} cannot be set again"))?;
    let (beside, inside) = tried?;
    let mut problems = Vec::new();
    if beside.answer.is_some() {
        problems.push("a program beside the server computed".to_owned());
    }
    if inside.answer.is_none() {
        problems.push(format!("a client did not: {}", inside.error));
    }
    let refused = format!("a program beside the server was refused: {}", beside.error);
    Ok(Outcome::of(&problems, refused))
}

/// A control group for one program, below that of this process. Removed when it is dropped.
struct Group(PathBuf);

impl Group {
    fn new(groups: &Path) -> Result<Self> {
        let own = fs_err::read_to_string("/proc/self/cgroup")?;
        let own = own.lines().find_map(|line| line.strip_prefix("0::/"));
        let own = groups.join(own.context("there are control groups of version 1")?);
        ensure!(own.exists(), "{} is not there", own.display());
        let folder = own.join(format!("divvy-hardware-{}", std::process::id()));
        fs_err::create_dir(&folder)?;
        Ok(Self(folder))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Only an empty one can be removed, and its program has ended.
        drop(fs_err::remove_dir(&self.0));
    }
}

/// Limits the memory of a control group and runs a program in it that wants more.
pub(crate) fn in_a_group(
    driver: &dyn GpuDriver,
    gpu: &GpuUuid,
    groups: &Path,
    container: &Container,
) -> Result<Outcome> {
    let group = match Group::new(groups) {
        Ok(group) => group,
        Err(error) => {
            let why = format!("a control group cannot be made here: {error:#}");
            return Ok(Outcome::NotTried(why));
        }
    };
    driver.set_memory_limit(gpu, &group.0, Some(LIMIT))?;
    let tried = || -> Result<Outcome> {
        let read = driver.memory_limit(gpu, &group.0)?;
        ensure!(
            read.hard == Some(LIMIT),
            "{LIMIT} bytes were set, and {:?} are read",
            read.hard
        );
        let inside = container
            .clone()
            .in_group(&group.0)
            .allocating(Some(2 * LIMIT));
        Ok(within(&apply::run(&inside, &mut |_| {})?, LIMIT))
    };
    let tried = tried();
    driver
        .set_memory_limit(gpu, &group.0, None)
        .context("the limit cannot be ended")?;
    tried
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::apply::Answer;
    use crate::cuda::{Allocated, Seen};

    fn ran(multiprocessors: u32, bytes: u64, refused: Option<i32>) -> Ran {
        let seen = Seen {
            count: 1,
            name: "GPU".to_owned(),
            uuid: "GPU-0".to_owned(),
            bus_id: String::new(),
            multiprocessors,
            memory_bytes: 1,
            capability: (9, 0),
            library: None,
        };
        Ran {
            answer: Some(Answer {
                seen,
                reached: Vec::new(),
                allocated: Some(Allocated { bytes, refused }),
            }),
            ..Ran::default()
        }
    }

    #[test]
    fn more_than_the_limit_or_no_refusal_is_a_failure() {
        let gib = 1 << 30;
        assert!(matches!(within(&ran(1, gib, Some(2)), gib), Outcome::Ok(_)));
        for bad in [ran(1, 2 * gib, Some(2)), ran(1, gib, None), Ran::default()] {
            assert!(matches!(within(&bad, gib), Outcome::Failed(_)));
        }
    }

    #[test]
    fn a_client_has_its_part_of_the_multiprocessors_and_no_more() {
        let facts = crate::testing::inventory("h100x1")
            .gpus
            .into_values()
            .next();
        let facts = facts.unwrap().facts;
        assert_eq!(facts.multiprocessors, Some(132));
        for (has, fits) in [
            (66, true),
            (64, true),
            (0, false),
            (68, false),
            (132, false),
        ] {
            let outcome = of_cores(&ran(has, 0, None), 50, &facts);
            assert_eq!(matches!(outcome, Outcome::Ok(_)), fits, "{has}");
        }
    }
}
