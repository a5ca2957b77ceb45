//! Faults: what a call does instead of answering.

use std::time::Duration;

use divvy_model::{GpuErrorCode, GpuOp, GpuUuid};
use serde::{Deserialize, Serialize};

/// Names a fault that was set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct FaultId(pub u64);

/// Effect of a fault on a call that meets it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FaultEffect {
    /// Fails at once.
    Fail(GpuErrorCode),
    /// Hangs until the fault is released or cleared; then fails with the code, or does its work if
    /// there is none.
    Hang {
        /// The code after the hang.
        then: Option<GpuErrorCode>,
    },
    /// Waits so many milliseconds, then does its work.
    Delay(u64),
    /// Does its work, and fails all the same: the change was made, but the caller gets an error.
    /// (If the work itself fails: with that error.)
    FailAfter(GpuErrorCode),
    /// Does its work, hangs until the fault is released or cleared, and only then answers, with the
    /// code if there is one.
    HangAfter {
        /// The answer.
        then: Option<GpuErrorCode>,
    },
}

/// A fault: which calls it meets, how many, and what they do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// Only calls of this operation; `None` = all.
    #[serde(default)]
    pub op: Option<GpuOp>,
    /// Only calls on this GPU; `None` = all, also those on no GPU.
    #[serde(default)]
    pub gpu: Option<GpuUuid>,
    /// So many matching calls pass before the first is met.
    #[serde(default)]
    pub skip: u32,
    /// So many calls are met; `None` = every one until the fault is cleared.
    #[serde(default)]
    pub times: Option<u32>,
    /// Its effect on them.
    pub effect: FaultEffect,
}

impl Fault {
    /// Every call fails with `code`, until cleared.
    pub fn fail(code: GpuErrorCode) -> Self {
        Self {
            op: None,
            gpu: None,
            skip: 0,
            times: None,
            effect: FaultEffect::Fail(code),
        }
    }

    /// Every call hangs until released, and then does its work.
    pub fn hang() -> Self {
        Self {
            effect: FaultEffect::Hang { then: None },
            ..Self::fail(GpuErrorCode::UNKNOWN)
        }
    }

    /// Every call hangs until released, and then fails with `code`.
    pub fn hang_then_fail(code: GpuErrorCode) -> Self {
        Self {
            effect: FaultEffect::Hang { then: Some(code) },
            ..Self::hang()
        }
    }

    /// Every call takes `delay` longer, and then does its work.
    pub fn delay(delay: Duration) -> Self {
        let effect = FaultEffect::Delay(delay.as_millis().try_into().unwrap_or(u64::MAX));
        Self {
            effect,
            ..Self::hang()
        }
    }

    /// Every call does its work, and answers `code`.
    pub fn fail_after(code: GpuErrorCode) -> Self {
        Self {
            effect: FaultEffect::FailAfter(code),
            ..Self::hang()
        }
    }

    /// Every call does its work and hangs until released: past its deadline the caller cannot know
    /// that it was done.
    pub fn hang_after() -> Self {
        Self {
            effect: FaultEffect::HangAfter { then: None },
            ..Self::hang()
        }
    }

    /// Only calls of `op`.
    #[must_use]
    pub fn of(self, op: GpuOp) -> Self {
        Self {
            op: Some(op),
            ..self
        }
    }

    /// Only calls on `gpu`.
    #[must_use]
    pub fn on(self, gpu: &GpuUuid) -> Self {
        Self {
            gpu: Some(gpu.clone()),
            ..self
        }
    }

    /// Only the next `times` matching calls.
    #[must_use]
    pub fn times(self, times: u32) -> Self {
        Self {
            times: Some(times),
            ..self
        }
    }

    /// Not the first `skip` matching calls.
    #[must_use]
    pub fn after(self, skip: u32) -> Self {
        Self { skip, ..self }
    }

    fn meets(&self, op: GpuOp, gpu: Option<&GpuUuid>) -> bool {
        self.op.is_none_or(|o| o == op) && self.gpu.as_ref().is_none_or(|g| Some(g) == gpu)
    }
}

/// Beginning of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Begin {
    /// It does its work.
    Work,
    Fail(GpuErrorCode),
    /// It hangs until this fault is released; ask [`crate::Engine::after_hang`].
    Hang(FaultId),
    /// It waits for so long, and then does its work.
    Delay(Duration),
    /// It does its work, and then this: fails (whatever came of the work) or hangs; never another
    /// of these.
    WorkThen(After),
}

/// Effect between a call's work and its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum After {
    /// Answers with a failure.
    Fail(GpuErrorCode),
    /// Hangs until this fault is released; ask [`crate::Engine::after_hang`] what is answered then.
    Hang(FaultId),
}

impl Begin {
    /// Returns the time that the call waits before its work.
    pub fn delay(self) -> Duration {
        if let Self::Delay(delay) = self {
            delay
        } else {
            Duration::ZERO
        }
    }

    /// Returns the effect after the call's work, if any but the answer.
    pub fn after(self) -> Option<After> {
        if let Self::WorkThen(after) = self {
            Some(after)
        } else {
            None
        }
    }
}

/// The faults set on an engine, in order of setting.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Faults {
    next: u64,
    set: Vec<SetFault>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct SetFault {
    id: FaultId,
    fault: Fault,
    #[serde(default)]
    released: bool,
}

impl Faults {
    pub(crate) fn set(&mut self, fault: Fault) -> FaultId {
        let id = FaultId(self.next);
        self.next += 1;
        self.set.push(SetFault {
            id,
            fault,
            released: false,
        });
        id
    }

    pub(crate) fn release(&mut self, id: Option<FaultId>) {
        for set in self
            .set
            .iter_mut()
            .filter(|s| id.is_none_or(|id| s.id == id))
        {
            set.released = true;
        }
    }

    pub(crate) fn clear(&mut self, id: Option<FaultId>) {
        self.set.retain(|s| id.is_some_and(|id| s.id != id));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.set.is_empty()
    }

    /// Meets a call with the first fault that applies, and counts it there.
    pub(crate) fn begin(&mut self, op: GpuOp, gpu: Option<&GpuUuid>) -> Begin {
        for set in &mut self.set {
            if !set.fault.meets(op, gpu) || set.fault.times == Some(0) {
                continue;
            }
            if set.fault.skip > 0 {
                set.fault.skip -= 1;
                continue;
            }
            // A released hang no longer blocks any call.
            let hangs = matches!(
                set.fault.effect,
                FaultEffect::Hang { .. } | FaultEffect::HangAfter { .. }
            );
            if set.released && hangs {
                continue;
            }
            if let Some(times) = &mut set.fault.times {
                *times -= 1;
            }
            return match set.fault.effect {
                FaultEffect::Fail(code) => Begin::Fail(code),
                FaultEffect::Hang { .. } => Begin::Hang(set.id),
                FaultEffect::Delay(millis) => Begin::Delay(Duration::from_millis(millis)),
                FaultEffect::FailAfter(code) => Begin::WorkThen(After::Fail(code)),
                FaultEffect::HangAfter { .. } => Begin::WorkThen(After::Hang(set.id)),
            };
        }
        Begin::Work
    }

    /// Looks again at a hanging call.
    pub(crate) fn after_hang(&self, id: FaultId) -> Begin {
        match self.set.iter().find(|s| s.id == id) {
            Some(set) if !set.released => Begin::Hang(id),
            Some(SetFault {
                fault:
                    Fault {
                        effect:
                            FaultEffect::Hang { then: Some(code) }
                            | FaultEffect::HangAfter { then: Some(code) },
                        ..
                    },
                ..
            }) => Begin::Fail(*code),
            _ => Begin::Work,
        }
    }
}
