//! GPU time: for how long claims had how much of the node's GPUs. Sums that only grow, by
//! namespace, class, product and form; what a held GPU has left that was to be had in no other
//! form is a sum of its own.
//!
//! Time is that since the boot, which no step of a clock changes; over a reboot it is the
//! difference of the wall clock, since claims keep their devices meanwhile. Sums are whole numbers,
//! so that they are the same in any number of steps. A reader shows a sum after it is saved: one
//! that was shown and lost would begin again lower, and be counted twice.

use std::collections::{BTreeMap, BTreeSet};

use divvy_model::{BootId, ClaimUid, DeviceName, GpuUuid};
use serde::{Deserialize, Serialize};

/// Thousandths of a percent in a GPU.
pub const WHOLE: u64 = 100_000;
/// Most time that counts over a reboot, in milliseconds: a day.
const LONGEST_REBOOT: u64 = 24 * 3_600_000;
/// Most series of claims; claims of further ones are counted together.
const MOST_SERIES: usize = 1000;
/// Namespace and class of those.
const OTHERS: &str = "(others)";

/// A point in time, in milliseconds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Moment {
    pub boot: BootId,
    /// Time since the boot.
    pub since_boot: u64,
    /// Time since 1970 by the wall clock.
    pub wall: u64,
}

impl Moment {
    /// Returns the time from an earlier moment to this one.
    fn since(&self, earlier: &Self) -> u64 {
        if self.boot == earlier.boot {
            self.since_boot.saturating_sub(earlier.since_boot)
        } else {
            // Counted time cannot be taken back, and the clock of a machine that has just booted
            // may be years ahead.
            self.wall.saturating_sub(earlier.wall).min(LONGEST_REBOOT)
        }
    }
}

/// Labels of a sum.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Series {
    pub namespace: String,
    pub class: String,
    pub product: String,
    pub form: String,
}

/// Device of a claim; the share distinguishes those of one device.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct HoldKey {
    pub claim: ClaimUid,
    pub device: DeviceName,
    pub share: String,
}

/// A device that a claim has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HeldTime {
    pub hold: HoldKey,
    pub gpu: GpuUuid,
    pub series: Series,
    pub has: Amounts,
    /// Amounts in use, as last read.
    pub uses: Amounts,
    /// When it was allocated, by the wall clock, if that is known.
    pub allocated: Option<u64>,
}

/// Amounts of a GPU, or of a GPU times milliseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Amounts {
    /// Part of the GPU, in thousandths of a percent.
    pub part: u64,
    /// Memory in MiB.
    pub memory: u64,
}

impl Amounts {
    fn add(&mut self, other: Self, time: u64) {
        let more = |sum: u64, amount: u64| sum.saturating_add(amount.saturating_mul(time));
        self.part = more(self.part, other.part);
        self.memory = more(self.memory, other.memory);
    }

    /// Returns the GPU-seconds of amounts times milliseconds.
    pub fn gpu_seconds(self) -> u64 {
        self.part / (WHOLE * 1000)
    }

    /// Returns the GiB-seconds of amounts times milliseconds.
    pub fn gib_seconds(self) -> u64 {
        self.memory / (1024 * 1000)
    }
}

/// Sums of a series, in amounts times milliseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sums {
    pub granted: Amounts,
    pub used: Amounts,
}

/// The sums of a node, and who holds what since when.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ledger {
    at: Moment,
    open: Vec<HeldTime>,
    sums: Vec<(Series, Sums)>,
    blocked: Vec<((String, String), u64)>,
}

impl Ledger {
    /// Returns one that counts from now on.
    pub fn new(now: Moment, held: Vec<HeldTime>) -> Self {
        let mut ledger = Self {
            at: now,
            open: held,
            sums: Vec::new(),
            blocked: Vec::new(),
        };
        ledger.count(Vec::new(), 0);
        ledger
    }

    /// Counts up to now, while the process follows every change: what was held before was held
    /// until now, and what is new begins now.
    pub fn step(&mut self, now: Moment, held: Vec<HeldTime>) {
        let time = now.since(&self.at);
        let spans = self.open.drain(..).map(|one| (one, Span::before(time)));
        let spans = spans.collect();
        (self.at, self.open) = (now, held);
        self.count(spans, time);
    }

    /// Counts up to now after a restart. Devices that are held now were held all the time, or since
    /// they were allocated. Others ended while the earlier process lived: at `ended`, the last
    /// change of the records by the wall clock.
    pub fn resume(&mut self, now: Moment, held: Vec<HeldTime>, ended: u64) {
        let time = now.since(&self.at);
        let ago = |wall: u64| now.wall.saturating_sub(wall).min(time);
        let there: BTreeSet<_> = held.iter().map(|one| one.hold.clone()).collect();
        let known: BTreeSet<_> = self.open.iter().map(|one| one.hold.clone()).collect();
        let mut spans: Vec<(HeldTime, Span)> = Vec::new();
        for one in self.open.drain(..) {
            let length = if there.contains(&one.hold) {
                time
            } else {
                time - ago(ended)
            };
            spans.push((one, Span::before(length)));
        }
        for one in held.iter().filter(|one| !known.contains(&one.hold)) {
            spans.push((one.clone(), Span::until_now(one.allocated.map_or(0, ago))));
        }
        (self.at, self.open) = (now, held);
        self.count(spans, time);
    }

    /// Adds what was held in an interval. Each device that is held now has a sum from the start, 0:
    /// a reader of rates counts from the first value that it sees.
    fn count(&mut self, spans: Vec<(HeldTime, Span)>, time: u64) {
        let mut sums: BTreeMap<_, _> = std::mem::take(&mut self.sums).into_iter().collect();
        let mut blocked: BTreeMap<_, _> = std::mem::take(&mut self.blocked).into_iter().collect();
        let mut gpus = BTreeMap::<GpuUuid, OnGpu>::new();
        for (one, span) in spans {
            let length = span.first + span.last;
            let on = gpus.entry(one.gpu).or_insert_with(|| OnGpu {
                kind: (one.series.product.clone(), one.series.form.clone()),
                first: 0,
                last: 0,
                granted: 0,
            });
            on.first = on.first.max(span.first);
            on.last = on.last.max(span.last);
            on.granted += one.has.part.saturating_mul(length);
            let sum: &mut Sums = sums.entry(bounded(&sums, one.series)).or_default();
            sum.granted.add(one.has, length);
            sum.used.add(one.uses, length);
        }
        for one in &self.open {
            let series = bounded(&sums, one.series.clone());
            sums.entry(series).or_default();
            if one.has.part < WHOLE {
                let kind = (one.series.product.clone(), one.series.form.clone());
                blocked.entry(kind).or_default();
            }
        }
        for on in gpus.into_values() {
            let held = (on.first + on.last).min(time);
            let rest = WHOLE.saturating_mul(held).saturating_sub(on.granted);
            if rest > 0 {
                let sum: &mut u64 = blocked.entry(on.kind).or_default();
                *sum = sum.saturating_add(rest);
            }
        }
        self.sums = sums.into_iter().collect();
        self.blocked = blocked.into_iter().collect();
    }

    /// Returns the sums by series.
    pub fn sums(&self) -> impl Iterator<Item = (&Series, &Sums)> {
        self.sums.iter().map(|(series, sums)| (series, sums))
    }

    /// Returns the rest of held GPUs, by product and form, in thousandths of a percent times
    /// milliseconds.
    pub fn blocked(&self) -> impl Iterator<Item = (&str, &str, u64)> {
        let all = self.blocked.iter();
        all.map(|((product, form), rest)| (&**product, &**form, *rest))
    }
}

/// Part of an interval: from its beginning, or up to its end.
#[derive(Debug, Clone, Copy)]
struct Span {
    first: u64,
    last: u64,
}

impl Span {
    fn before(first: u64) -> Self {
        Self { first, last: 0 }
    }

    fn until_now(last: u64) -> Self {
        Self { first: 0, last }
    }
}

/// Time and part of a GPU that was held in an interval.
struct OnGpu {
    kind: (String, String),
    first: u64,
    last: u64,
    granted: u64,
}

/// Returns the series, or the one of all others, if there are too many.
fn bounded(sums: &BTreeMap<Series, Sums>, series: Series) -> Series {
    if sums.len() < MOST_SERIES || sums.contains_key(&series) {
        return series;
    }
    Series {
        namespace: OTHERS.to_owned(),
        class: OTHERS.to_owned(),
        ..series
    }
}

#[cfg(test)]
mod tests;
