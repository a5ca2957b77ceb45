//! State of one GPU: the figures that were read last, and the times of the next readings.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant, SystemTime};

use divvy_host::HostRoot;
use divvy_model::{
    Form, GpuDriver, GpuError, GpuUuid, MigDevice, MigUuid, ProcessSample, Sharing, TargetKind,
};
use divvy_telemetry::Durations;
use divvy_usage::{Figure, GpuReading, Holding, Pace, Unknown, computed};

use crate::app::config::Timing;
use crate::metrics::{ERROR, OK};

/// Readings after which performance monitors are asked for again that the driver said it does not
/// have: about a minute. It also says so once in a while of monitors that it has.
const ASK_AGAIN: u32 = 12;

/// The state of one GPU.
#[derive(Debug, Clone)]
pub(super) struct OnGpu {
    pub(super) reading: GpuReading,
    /// Pod UIDs of its processes.
    pub(super) pods: BTreeMap<u32, String>,
    lists: Turn,
    rates: Turn,
    /// The driver's time of the newest sample, in microseconds.
    since: u64,
    /// Partitions, and `None` for the GPU, that the driver has no performance monitors for, with
    /// the readings that are left until they are asked for again.
    no_sm: BTreeMap<Option<MigUuid>, u32>,
    /// Holds on it when it was last read.
    holders: Vec<Holding>,
    /// A reading is under way.
    busy: bool,
}

/// Times at which something is read.
#[derive(Debug, Clone)]
struct Turn {
    pace: Pace,
    /// A round that comes so much early reads instead of the next.
    early: Duration,
    next: Instant,
    /// When it was last read without a failure.
    read: Option<Instant>,
    /// Since when it should have been.
    wanted: Instant,
}

impl Turn {
    fn new(usual: Duration) -> Self {
        let now = Instant::now();
        Self {
            pace: Pace::new(usual),
            early: usual / 4,
            next: now,
            read: None,
            wanted: now,
        }
    }

    fn is_due(&self) -> bool {
        self.next <= Instant::now() + self.early
    }

    fn done(&mut self, calls: &Calls<'_>) {
        let now = Instant::now();
        self.next = now + self.pace.after(calls.longest);
        if !calls.failed {
            self.read = Some(now);
        }
    }

    fn age(&self) -> Duration {
        self.read.unwrap_or(self.wanted).elapsed()
    }
}

/// Figures that are due.
#[derive(Debug, Clone, Copy)]
pub(super) struct Due {
    /// Memory and processes.
    lists: bool,
    /// Utilisation.
    rates: bool,
}

/// The calls of one reading: each is timed, and the longest decides the pace.
struct Calls<'a> {
    seconds: &'a Durations,
    longest: Duration,
    failed: bool,
}

impl Calls<'_> {
    fn time<T>(
        &mut self,
        name: &'static str,
        call: impl FnOnce() -> Result<T, GpuError>,
    ) -> Result<T, GpuError> {
        let (timer, began) = (self.seconds.start(name), Instant::now());
        let answer = call();
        self.longest = self.longest.max(began.elapsed());
        self.failed |= answer.as_ref().err().map(Unknown::from) == Some(Unknown::Failed);
        timer.done(if answer.is_ok() { OK } else { ERROR });
        answer
    }
}

impl OnGpu {
    pub(super) fn new(timing: &Timing) -> Self {
        Self {
            reading: GpuReading::default(),
            pods: BTreeMap::new(),
            lists: Turn::new(timing.usage_lists),
            rates: Turn::new(timing.usage),
            since: 0,
            no_sm: BTreeMap::new(),
            holders: Vec::new(),
            busy: false,
        }
    }

    /// Returns the figures that are to be read now, with a copy of the state to read into; `None`
    /// while a reading is under way.
    pub(super) fn begin(&mut self, holdings: &[Holding]) -> Option<(Due, Self)> {
        if self.busy {
            return None;
        }
        let changed = self.holders != holdings;
        self.holders = holdings.to_vec();
        let due = Due {
            lists: changed || self.lists.is_due(),
            rates: changed || self.rates.is_due(),
        };
        if !due.lists && !due.rates {
            return None;
        }
        // The reading works on a copy. The figures that are shown stay until it ends, and only
        // their age grows.
        let before = self.clone();
        self.busy = true;
        Some((due, before))
    }

    /// Returns the age of the oldest of its figures.
    pub(super) fn age(&self) -> Duration {
        self.lists.age().max(self.rates.age())
    }

    /// Reads what is due. May block.
    pub(super) fn read(
        mut self,
        driver: &dyn GpuDriver,
        host: &HostRoot,
        gpu: &GpuUuid,
        due: Due,
        seconds: &Durations,
    ) -> Self {
        // Figures of partitions that are gone go first: the lists below are for those that are held
        // now.
        // Several claims may have shares of one partition: it is read once.
        let mut parts: Vec<MigDevice> = Vec::new();
        for part in self
            .holders
            .iter()
            .filter_map(|holding| holding.part.as_ref())
        {
            if !parts.contains(part) {
                parts.push(part.clone());
            }
        }
        self.reading
            .parts
            .retain(|uuid, _| parts.iter().any(|part| part.uuid == *uuid));
        self.no_sm.retain(|uuid, _| {
            let is_there = |uuid: &MigUuid| parts.iter().any(|part| part.uuid == *uuid);
            uuid.as_ref().is_none_or(is_there)
        });
        // Lists before rates: samples of processes are attributed by the newest list.
        if due.lists {
            let mut calls = Calls {
                seconds,
                longest: Duration::ZERO,
                failed: false,
            };
            self.read_lists(driver, host, gpu, &parts, &mut calls);
            self.lists.done(&calls);
        }
        if due.rates {
            let mut calls = Calls {
                seconds,
                longest: Duration::ZERO,
                failed: false,
            };
            self.read_rates(driver, gpu, &parts, &mut calls);
            self.rates.done(&calls);
        }
        self.busy = false;
        self
    }

    fn read_rates(
        &mut self,
        driver: &dyn GpuDriver,
        gpu: &GpuUuid,
        parts: &[MigDevice],
        calls: &mut Calls<'_>,
    ) {
        let any = |is: fn(&Holding) -> bool| self.holders.iter().any(is);
        let is_shared = any(
            |holding| match (holding.kind.target, holding.kind.sharing) {
                (TargetKind::Gpu, Sharing::Exclusive) => holding.pods.len() > 1,
                (TargetKind::Partition, Sharing::Exclusive) => false,
                _ => true,
            },
        );
        if any(|holding| holding.kind == Form::WHOLE) {
            self.reading.sm = self.sm(driver, gpu, None, calls);
            // The figure of the monitors is better; one call is enough.
            self.reading.busy = match self.reading.sm {
                Err(Unknown::NotSupported) => {
                    let percent = figure(calls.time("utilization", || driver.utilization(gpu)));
                    percent.map(|percent| f64::from(percent) / 100.0)
                }
                _ => Err(Unknown::NotRead),
            };
        }
        for part in parts {
            let sm = self.sm(driver, gpu, Some(part), calls);
            self.reading.parts.entry(part.uuid.clone()).or_default().sm = sm;
        }
        // Processes are not sampled in MIG mode.
        if is_shared && parts.is_empty() {
            self.read_samples(driver, gpu, calls);
        }
    }

    fn read_lists(
        &mut self,
        driver: &dyn GpuDriver,
        host: &HostRoot,
        gpu: &GpuUuid,
        parts: &[MigDevice],
        calls: &mut Calls<'_>,
    ) {
        self.reading.number += 1;
        self.reading.processes = figure(calls.time("processes", || driver.processes(gpu)));
        if let Ok(processes) = &self.reading.processes {
            let pids: BTreeSet<u32> = processes.iter().map(|p| p.pid).collect();
            let pids: Vec<u32> = pids.into_iter().collect();
            // Right after the list: a process that ends first leaves no trace of its pod.
            self.pods = crate::host::pods::of_processes(host, &pids, &self.pods);
        }
        self.reading.memory = figure(calls.time("memory", || driver.memory(gpu, None)));
        for part in parts {
            let memory = figure(calls.time("memory", || driver.memory(gpu, Some(part))));
            self.reading
                .parts
                .entry(part.uuid.clone())
                .or_default()
                .memory = memory;
        }
    }

    fn sm(
        &mut self,
        driver: &dyn GpuDriver,
        gpu: &GpuUuid,
        part: Option<&MigDevice>,
        calls: &mut Calls<'_>,
    ) -> Figure<f64> {
        let device = part.map(|part| part.uuid.clone());
        // A driver that has no monitors says so at a price: it is asked again only once in a while.
        if let Some(left) = self.no_sm.get_mut(&device) {
            *left = left.saturating_sub(1);
            if *left > 0 {
                return Err(Unknown::NotSupported);
            }
        }
        self.no_sm.remove(&device);
        let answer = figure(calls.time("sm_utilization", || driver.sm_utilization(gpu, part)));
        if answer == Err(Unknown::NotSupported) {
            self.no_sm.insert(device, ASK_AGAIN);
        }
        answer?
            .map(|percent| percent / 100.0)
            .ok_or(Unknown::NotRead)
    }

    /// Reads what processes have computed since the newest sample that is known.
    fn read_samples(&mut self, driver: &dyn GpuDriver, gpu: &GpuUuid, calls: &mut Calls<'_>) {
        let since = self.since;
        let mut ask = |since| {
            figure(calls.time("process_utilization", || {
                driver.process_utilization(gpu, since)
            }))
        };
        let samples = ask(since);
        let is_silent = |samples: &[ProcessSample]| !samples.iter().any(|s| s.at > since);
        // Nothing has computed, or the clock was set back: samples that are older than the newest
        // known are left out of the answer. Only a list of all that the driver has distinguishes
        // the two.
        let all = match &samples {
            Ok(samples) if since > 0 && is_silent(samples) => Some(ask(0)),
            _ => None,
        };
        self.reading.computed = self.computed(samples, all);
    }

    fn computed(
        &mut self,
        samples: Figure<Vec<ProcessSample>>,
        all: Option<Figure<Vec<ProcessSample>>>,
    ) -> Figure<BTreeMap<u32, f64>> {
        let (samples, since) = (samples?, self.since);
        if let Some(all) = all {
            let all = all?;
            let plausible = all.iter().filter(|sample| sample.percent <= 100);
            let newest = plausible.map(|sample| sample.at).max();
            // All samples are older than the newest known one: the clock was set back. Begin again
            // from here.
            if let Some(newest) = newest.filter(|newest| *newest < since) {
                self.since = newest;
                return Err(Unknown::NotRead);
            }
            // The driver still has a sample of before the clock was set back.
            if since > clock_micros() {
                return Err(Unknown::NotRead);
            }
        }
        let processes = self.reading.processes.iter().flatten();
        let listed = processes.map(|p| p.pid).collect();
        let (used, newest) = computed(&samples, since, &listed);
        self.since = newest.unwrap_or(since);
        Ok(used)
    }
}

/// Returns the time of day in microseconds, by the clock of which the driver's samples have their
/// times, and a second more: the two are not read at the same moment.
fn clock_micros() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let late = now.unwrap_or_default() + Duration::from_secs(1);
    u64::try_from(late.as_micros()).unwrap_or(u64::MAX)
}

fn figure<T>(answer: Result<T, GpuError>) -> Figure<T> {
    answer.map_err(|error| {
        tracing::debug!(error = %error, "failed to read the use of a GPU");
        Unknown::from(&error)
    })
}

#[cfg(test)]
mod tests {
    use divvy_telemetry::MetricsRegistry;

    use super::*;

    #[test]
    fn a_reading_with_a_slow_call_puts_the_next_off() {
        let seconds = MetricsRegistry::new().durations("x", "X", "call", &[], &[]);
        let after = |millis| {
            let mut turn = Turn::new(Duration::from_secs(5));
            turn.done(&Calls {
                seconds: &seconds,
                longest: Duration::from_millis(millis),
                failed: false,
            });
            turn.next
        };
        let (usual, later) = (after(50), after(51));
        assert!(later >= usual + Duration::from_secs(5));
    }
}
