//! Parts that all stories have in common: the API server and the kubelet around a machine, their
//! knowledge, and how a story is shown when it fails.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Duration, Instant};

use divvy_claims::{Claim, Prepared};
use divvy_executor::{
    Event, Executor, LockName, PrepareError, Refresh, UnprepareError, Unprepared, chain,
};
use divvy_model::ClaimUid;

use crate::world::{Chance, Moment, World};

pub(crate) fn uid(name: &str) -> ClaimUid {
    format!("uid-{name}").parse().unwrap()
}

/// A machine, its executor, and the API server and kubelet around it.
pub(crate) struct Cast {
    pub(crate) world: World,
    pub(crate) executor: Executor,
    pub(crate) chance: Chance,
    /// Answers that the kubelet has and did not unprepare. The claim as it was prepared.
    pub(crate) answered: BTreeMap<ClaimUid, (Claim, Prepared)>,
    /// Unprepared, but said to linger.
    pub(crate) lingering: BTreeSet<ClaimUid>,
    pub(crate) allocations: u32,
}

impl Cast {
    pub(crate) fn new(world: World, seed: u64) -> Self {
        let executor = world.start();
        Self {
            world,
            executor,
            chance: Chance(seed ^ 0x5eed),
            answered: BTreeMap::new(),
            lingering: BTreeSet::new(),
            allocations: 0,
        }
    }

    pub(crate) fn say(&self, text: String) {
        self.world.lock().log.push(text);
    }

    /// The claim as the API has it now, and what its prepare is answered with; `None` if it is not
    /// allocated.
    pub(crate) fn ask_to_prepare(
        &self,
        name: &str,
    ) -> Option<(Claim, Result<Prepared, PrepareError>)> {
        let wanted = self.world.lock().api.get(&uid(name)).cloned()?;
        self.say(format!("prepare {name}"));
        let answer = self.world.prepare(&self.executor, &wanted);
        self.say(format!(
            "    {}",
            answer
                .as_ref()
                .map_or_else(|e| chain(e), |_| "ready".to_owned())
        ));
        Some((wanted, answer))
    }

    /// The kubelet has an answer. The same claim and allocation is always answered in the same way.
    pub(crate) fn note_answer(&mut self, wanted: Claim, prepared: Prepared) {
        if let Some((before, answer)) = self.answered.get(&wanted.uid)
            && before.allocation == wanted.allocation
        {
            assert_eq!(
                answer, &prepared,
                "the same claim and allocation, another answer"
            );
        }
        self.lingering.remove(&wanted.uid);
        self.answered.insert(wanted.uid.clone(), (wanted, prepared));
    }

    /// Unprepares, and returns whether the kubelet got the answer that nothing is left.
    pub(crate) fn ask_to_unprepare(&mut self, name: &str) -> bool {
        self.say(format!("unprepare {name}"));
        let answer: Result<Unprepared, UnprepareError> =
            self.world.unprepare(&self.executor, &uid(name));
        self.say(format!(
            "    {}",
            answer
                .as_ref()
                .map_or_else(|e| chain(e), |a| format!("{a:?}"))
        ));
        match answer {
            Ok(Unprepared::Done | Unprepared::NothingThere) if !self.world.lock().dead => {
                self.answered.remove(&uid(name));
                self.lingering.remove(&uid(name));
                true
            }
            Ok(Unprepared::PreparedAgain | Unprepared::LeftToNewer { .. }) => panic!("{answer:?}"),
            // Said to linger; or the process died, and may have done its work.
            Ok(_) | Err(_) => {
                self.lingering.insert(uid(name));
                false
            }
        }
    }

    /// After a crash: a new process, which restores before anything else.
    pub(crate) fn recover(&mut self) {
        while self.world.lock().dead {
            self.restart();
        }
        self.forget_released();
    }

    pub(crate) fn restart(&mut self) {
        self.say("restart".to_owned());
        self.world.kill();
        self.start();
    }

    /// No container outlives a reboot; the kubelet prepares again what its pods need.
    pub(crate) fn reboot(&mut self) {
        self.say("reboot".to_owned());
        self.world.reboot();
        // What is not allocated any more is asked for by no pod.
        let api = self.world.lock().api.clone();
        self.answered.retain(|uid, (claim, _)| {
            api.get(uid)
                .is_some_and(|c| c.allocation == claim.allocation)
        });
        self.start();
    }

    fn start(&mut self) {
        self.executor = self.world.start();
        let report = self.executor.restore_cdi(Refresh::Missing);
        self.say(format!("    {:?}", report.events));
        // A claim that was not carried out again after a reboot has no container; one that is not
        // allocated any more, or anew, goes without an unprepare.
        let api = self.world.lock().api.clone();
        for event in &report.events {
            let Event::Released { claim } = event else {
                continue;
            };
            let now = api.get(claim).map(|claim| &claim.allocation);
            let answered = self.answered.get(claim);
            if answered.is_some_and(|(before, _)| Some(&before.allocation) != now) {
                self.answered.remove(claim);
            }
        }
    }

    /// The kubelet does not know of it, but a lingering claim that reconcile has finished holds
    /// nothing any more.
    pub(crate) fn forget_released(&mut self) {
        let records = self.world.lock().records();
        let gone: Vec<_> = self
            .lingering
            .iter()
            .filter(|uid| !records.contains_key(*uid))
            .cloned()
            .collect();
        for uid in gone {
            self.lingering.remove(&uid);
            self.answered.remove(&uid);
        }
    }

    /// The process will die within so many calls.
    pub(crate) fn crash_within(&mut self, calls: usize) {
        let moment = MOMENTS[self.chance.below(3)];
        self.world.crash_in(self.chance.below(calls), moment);
    }

    /// Returns one of the names, mostly one for which it matters.
    pub(crate) fn one_of(&mut self, names: &[String], any: &str) -> String {
        if names.is_empty() || self.chance.one_in(4) {
            any.to_owned()
        } else {
            names[self.chance.below(names.len())].clone()
        }
    }

    /// Another instance holds one lock, and is too slow to let it go while another call waits; or
    /// it lets all go.
    pub(crate) fn lock_is_held_or_let_go(&mut self, claims: &[&str], gpus: usize) {
        let lock = if self.chance.one_in(2) {
            LockName::Claim(uid(claims[self.chance.below(claims.len())]))
        } else {
            LockName::Gpu(self.world.gpu(self.chance.below(gpus)))
        };
        let mut m = self.world.lock();
        let text = if m.busy.is_empty() {
            format!("{lock} is held")
        } else {
            "locks are let go".to_owned()
        };
        m.log.push(text);
        if m.busy.is_empty() {
            m.busy.insert(lock);
        } else {
            m.busy.clear();
        }
    }

    pub(crate) fn time_passes(&mut self) {
        self.say("time passes".to_owned());
        self.world
            .pass(Duration::from_secs([1, 30, 200][self.chance.below(3)]));
        let error = self
            .chance
            .one_in(4)
            .then_some(divvy_model::GpuErrorCode::TIMEOUT);
        self.world.lock().process_error = error;
    }
}

pub(crate) const MOMENTS: [Moment; 3] = [Moment::Before, Moment::During, Moment::After];

/// Runs a story, and shows how it went if it failed.
pub(crate) fn with_log<R>(what: &str, world: &World, story: impl FnOnce() -> R) -> R {
    catch_unwind(AssertUnwindSafe(story)).unwrap_or_else(|panic| {
        eprintln!("{what}:\n{}", world.lock().log.join("\n"));
        resume_unwind(panic)
    })
}

/// Plays as many stories as the variable says, from the seed `DIVVY_SEED` on.
pub(crate) fn sequences(variable: &str, default: u64, mut play: impl FnMut(u64) -> usize) {
    let number = |name: &str| std::env::var(name).ok().and_then(|n| n.parse().ok());
    let (count, first) = (
        number(variable).unwrap_or(default),
        number("DIVVY_SEED").unwrap_or(1_u64),
    );
    let began = Instant::now();
    let calls: usize = (first..first + count).map(&mut play).sum();
    println!(
        "{count} sequences, {calls} calls into the seams, {:.2?}",
        began.elapsed()
    );
}

/// Returns words that say how a sequence is run alone.
pub(crate) fn alone(variable: &str, seed: u64) -> String {
    format!("sequence {seed} failed (DIVVY_SEED={seed} {variable}=1 runs it alone)")
}
