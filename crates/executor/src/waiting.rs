//! How a prepare waits for others, without any lock.

use std::time::Duration;

use crate::{Call, Executor, Folder, PrepareCause, Stamp, Watch};

/// Least time from one attempt to the next.
const BREATH: Duration = Duration::from_millis(2);

/// Waiting without any lock: for a change of the records (the unprepare that is waited for may reach the other plugin
/// instance: it shows in the folder), and every now and then for everything else.
pub(crate) struct Waiting<'a> {
    executor: &'a Executor,
    call: &'a Call,
    give_up: Duration,
    watch: Watched,
}

/// Most prepares never wait, so that the records are only watched once one does.
enum Watched {
    NotYet,
    By(Box<dyn Watch>),
    /// Nothing can be watched here.
    Never,
}

impl<'a> Waiting<'a> {
    pub(crate) fn new(executor: &'a Executor, call: &'a Call, give_up: Duration) -> Self {
        Self { executor, call, give_up, watch: Watched::NotYet }
    }

    /// What has changed up to now is no reason to look again; the stamp of the records now.
    pub(crate) fn forget(&mut self) -> Option<Stamp> {
        if let Watched::By(watch) = &mut self.watch {
            watch.forget();
        }
        self.executor.state.records_stamp()
    }

    /// Waits until the attempt that began at `begun`, when the records had the stamp `seen`, may go better. Fails with
    /// `why` when there is no more time for that.
    pub(crate) fn until_worth_another_look(
        &mut self,
        begun: Duration,
        seen: Option<Stamp>,
        why: PrepareCause,
    ) -> Result<(), PrepareCause> {
        let Executor { parts, config, state, .. } = self.executor;
        if let Watched::NotYet = self.watch {
            self.watch = parts.store.watch(Folder::Claims).map_or(Watched::Never, Watched::By);
        }
        let look_again = parts.clock.now() + config.timing.look_again;
        let mut changed = false;
        loop {
            if self.call.cancel.is_cancelled() {
                return Err(PrepareCause::Cancelled);
            }
            let now = parts.clock.now();
            if now >= self.give_up {
                return Err(why);
            }
            // Also what happened before the watch was there.
            changed |= state.records_stamp() != seen;
            if now >= look_again || (changed && now >= begun + BREATH) {
                return Ok(());
            }
            match &mut self.watch {
                // A crowd that waits for each other must not wake at each of its own changes.
                Watched::By(_) if changed => parts.clock.sleep(BREATH),
                Watched::By(watch) => {
                    let time = look_again.min(self.give_up).saturating_sub(now);
                    changed = watch.wait(&self.call.cancel, time);
                }
                Watched::NotYet | Watched::Never => parts.clock.sleep(config.timing.poll),
            }
        }
    }
}
