//! How a prepare waits for others, without any lock.

use std::time::Duration;

use crate::{Call, Executor, PrepareCause, Stamp};

/// Least time from one attempt to the next: a crowd that waits for each other must not wake at each of its own changes.
const BREATH: Duration = Duration::from_millis(2);

impl Executor {
    /// Waits until the attempt that began at `begun`, when the records had the stamp `seen`, may go better: the folder of
    /// records changes (the unprepare that is waited for may reach the other plugin instance), or it is time to look at
    /// everything else. Fails with `why` when there is no more time for that.
    pub(crate) fn wait_for_change(
        &self,
        call: &Call,
        begun: Duration,
        seen: Option<Stamp>,
        why: PrepareCause,
    ) -> Result<(), PrepareCause> {
        let timing = &self.config.timing;
        let look_again = self.parts.clock.now() + timing.look_again;
        loop {
            if call.cancel.is_cancelled() {
                return Err(PrepareCause::Cancelled);
            }
            let now = self.parts.clock.now();
            if now >= call.give_up(timing.hand_over) {
                return Err(why);
            }
            let changed = self.state.records_stamp() != seen;
            if now >= look_again || (changed && now >= begun + BREATH) {
                return Ok(());
            }
            // The longer it has waited the less a few milliseconds more matter.
            let pause = (now.saturating_sub(call.received) / 16).clamp(BREATH, timing.poll.max(BREATH));
            self.parts.clock.sleep(pause);
        }
    }
}
