//! One GPU: what was read of it last, and what is to be read next.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use divvy_host::HostRoot;
use divvy_model::{GpuDriver, GpuError, GpuUuid, HoldKind, MigDevice};
use divvy_telemetry::Durations;
use divvy_usage::{Figure, GpuReading, Holding, Pace, Unknown, computed};

use crate::config::Timing;
use crate::sinks::metrics::{ERROR, OK};

/// Without a new sample for so long, everything that the driver has is asked for again: a sample of a time that is yet to
/// come would hide all later ones.
const NO_SAMPLE: Duration = Duration::from_mins(1);

/// The state of one GPU.
#[derive(Debug, Clone)]
pub(super) struct OnGpu {
    pub(super) reading: GpuReading,
    /// Pod UIDs of its processes.
    pub(super) pods: BTreeMap<u32, String>,
    lists: Turn,
    rates: Turn,
    /// The driver's time of the newest sample, and when it came.
    since: (u64, Instant),
    /// The driver has no performance monitors for it.
    no_sm: bool,
    /// Who held it when it was last read.
    holders: Vec<Holding>,
    /// A reading is under way.
    busy: bool,
}

/// When something is read.
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
        Self { pace: Pace::new(usual), early: usual / 4, next: now, read: None, wanted: now }
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

/// What is to be read.
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
            since: (0, Instant::now()),
            no_sm: false,
            holders: Vec::new(),
            busy: false,
        }
    }

    /// What is to be read now, and what of; nothing while a reading is under way.
    pub(super) fn begin(&mut self, holdings: &[Holding]) -> Option<(Due, Self)> {
        if self.busy {
            return None;
        }
        let changed = self.holders != holdings;
        self.holders = holdings.to_vec();
        let due = Due { lists: changed || self.lists.is_due(), rates: changed || self.rates.is_due() };
        if !due.lists && !due.rates {
            return None;
        }
        let before = self.clone();
        self.busy = true;
        Some((due, before))
    }

    /// The age of the oldest of its figures.
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
        let parts: Vec<MigDevice> = self.holders.iter().filter_map(|holding| holding.part.clone()).collect();
        self.reading.parts.retain(|uuid, _| parts.iter().any(|part| part.uuid == *uuid));
        if due.lists {
            let mut calls = Calls { seconds, longest: Duration::ZERO, failed: false };
            self.read_lists(driver, host, gpu, &parts, &mut calls);
            self.lists.done(&calls);
        }
        if due.rates {
            let mut calls = Calls { seconds, longest: Duration::ZERO, failed: false };
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
        let is_shared = any(|holding| match holding.kind {
            HoldKind::Share | HoldKind::Admin => true,
            HoldKind::Whole => holding.pods.len() > 1,
            HoldKind::Partition { .. } => false,
        });
        if any(|holding| holding.kind == HoldKind::Whole) {
            self.reading.sm = self.sm(driver, gpu, None, calls);
            // What the monitors say is better; one call is enough.
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
            self.pods = crate::pods::of_processes(host, &pids, &self.pods);
        }
        self.reading.memory = figure(calls.time("memory", || driver.memory(gpu, None)));
        for part in parts {
            let memory = figure(calls.time("memory", || driver.memory(gpu, Some(part))));
            self.reading.parts.entry(part.uuid.clone()).or_default().memory = memory;
        }
    }

    fn sm(
        &mut self,
        driver: &dyn GpuDriver,
        gpu: &GpuUuid,
        part: Option<&MigDevice>,
        calls: &mut Calls<'_>,
    ) -> Figure<f64> {
        if self.no_sm {
            return Err(Unknown::NotSupported);
        }
        let answer = figure(calls.time("sm_utilization", || driver.sm_utilization(gpu, part)));
        self.no_sm = answer == Err(Unknown::NotSupported);
        answer?.map(|percent| percent / 100.0).ok_or(Unknown::NotRead)
    }

    fn read_samples(&mut self, driver: &dyn GpuDriver, gpu: &GpuUuid, calls: &mut Calls<'_>) {
        if self.since.1.elapsed() > NO_SAMPLE {
            self.since = (0, Instant::now());
        }
        let since = self.since.0;
        let samples = figure(calls.time("process_utilization", || driver.process_utilization(gpu, since)));
        let listed = self.reading.processes.iter().flatten().map(|p| p.pid).collect();
        self.reading.computed = samples.map(|samples| {
            let (used, newest) = computed(&samples, since, &listed);
            if let Some(newest) = newest {
                self.since = (newest, Instant::now());
            }
            used
        });
    }
}

fn figure<T>(answer: Result<T, GpuError>) -> Figure<T> {
    answer.map_err(|error| {
        tracing::debug!(error = %error, "failed to read the use of a GPU");
        Unknown::from(&error)
    })
}
