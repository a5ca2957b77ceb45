//! Bringing a GPU to its goal: the one place where hardware is changed, for prepare, unprepare,
//! restore and reconcile alike. Called under the GPU's lock.
//!
//! A crash between any two writes is found again by what is on disk: a place is noted as begun
//! before an instance is made there and was empty then, so what fills it later is ours; the value
//! of a setting is noted before the setting leaves it; notes are dropped after what they are about
//! is gone. The invariants are listed in `divvy_gpu`'s `state`.

mod mps;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use divvy_claims::{Caller, Stored, holds_on};
use divvy_gpu::{
    Ask, Cause, Change, ChangeError, Goal, GpuSeen, GpuState, Instance, Life, Living, Moment,
    Observed, Scope, Setting, Stuck, Want, diff, needs,
};
use divvy_model::{ClaimUid, ComputeMode, GpuUuid, Place, Target, TimeSlice};

use crate::context::Context;
use crate::gpus::{Gpus, OpenState};
use crate::hardware::{Hardware, TimeSliceError};
use crate::records::{ClaimFiles, with_lost};
use crate::servers::{report_wedged, servers_to_look_at, wedged};
use crate::snapshot::Look;
use crate::state::{GpuStates, Records};
use crate::{Event, Report, StoreError, chain};

/// Time limit for setting a time slice where no call's deadline is shorter.
const SET_WITHIN: Duration = Duration::from_secs(10);
/// Time limit for a question to the supervisor.
pub(crate) const ASK_WITHIN: Duration = Duration::from_secs(3);

/// The changes that bring a GPU to its goal, worked out under its lock.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) gpu: GpuUuid,
    goal: Goal,
    scope: Scope,
    open: OpenState,
    seen: GpuSeen,
    pub(crate) changes: Vec<Change>,
}

impl Plan {
    /// Returns whether an instance is to be made: its claim's record comes first.
    pub(crate) fn creates(&self) -> bool {
        self.changes
            .iter()
            .any(|change| matches!(change, Change::Create(_)))
    }

    /// Returns whether more than notes is to be changed.
    pub(crate) fn changes_hardware(&self) -> bool {
        let is_note = |change: &Change| matches!(change, Change::Forget(_));
        !self.changes.iter().all(is_note)
    }
}

/// Readings that plans are made of.
pub(crate) struct Readings<'r> {
    /// Records as they are on disk.
    records: Cow<'r, Records>,
    /// Records with those that are lost.
    with_lost: Records,
    /// Files of GPUs and their hardware, where a call was decided on them under the same locks.
    look: Option<(&'r GpuStates, &'r BTreeMap<GpuUuid, GpuSeen>)>,
}

impl Readings<'_> {
    /// Reads the records now; GPUs are read when they are planned.
    pub(crate) fn now(context: &Context) -> Result<Self, StoreError> {
        let files = ClaimFiles::listed(context);
        let records = context.state.records()?;
        Ok(Self {
            with_lost: files.with_lost(context, &records)?,
            records: Cow::Owned(records),
            look: None,
        })
    }
}

impl<'r> Readings<'r> {
    /// Takes what a call was decided on.
    pub(crate) fn of(context: &Context, look: &'r Look<'_>) -> Result<Self, StoreError> {
        let records = &look.snapshot.records;
        Ok(Self {
            with_lost: look.claim_files.with_lost(context, records)?,
            records: Cow::Borrowed(records),
            look: Some((&look.states, &look.snapshot.hardware)),
        })
    }

    /// Returns the records with those that are lost.
    pub(crate) fn with_lost(&self) -> &Records {
        &self.with_lost
    }
}

/// The circumstances in which a goal is worked out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Round {
    Usual,
    /// The driver may have been loaded anew: time slices are set once more.
    DriverLoadedAnew,
    /// The node goes to another driver, so that no partitions are offered any more. Grants of rules
    /// stay on disk as they are: the node may come back.
    NodeIsLeft,
}

/// A change that could not be made.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failed {
    #[error(transparent)]
    Change(#[from] ChangeError),
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// A GPU that is not at its goal.
#[derive(Debug)]
pub(crate) enum NotBrought {
    /// Its file cannot be read or written.
    Store(StoreError),
    /// Changes that could not be made; all others were.
    Stuck(Vec<Stuck>),
}

impl From<StoreError> for NotBrought {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl Gpus<'_> {
    /// Works out what brings a GPU to the goal of a call. Open questions about it are settled
    /// first, as far as the hardware answers them.
    pub(crate) fn plan(
        self,
        gpu: &GpuUuid,
        caller: Caller<'_>,
        read: &Readings<'_>,
    ) -> Result<Plan, StoreError> {
        self.plan_in(Round::Usual, gpu, caller, read)
    }

    fn plan_in(
        self,
        round: Round,
        gpu: &GpuUuid,
        caller: Caller<'_>,
        read: &Readings<'_>,
    ) -> Result<Plan, StoreError> {
        // Nothing counts that was read before the lock.
        let stored = match read.look {
            Some((states, _)) => states
                .get(gpu)
                .map_or(Stored::Absent, |stored| stored.as_ref().clone()),
            None => self.context.state.gpu(gpu)?,
        };
        let mut open = self.opened(gpu, stored, &read.records)?;
        if round == Round::DriverLoadedAnew {
            open.state.doubt_slice();
        }
        self.settle(gpu, &mut open);
        // Work out the goal from all records.
        let holds = holds_on(gpu, caller, &read.with_lost, &self.context.config.boot);
        let mut grant = open.state.grant;
        grant.offers_partitions &= round != Round::NodeIsLeft;
        let scope = Scope::new(holds, grant, &open.state.instances);
        let goal = Goal::of(&scope, &open.state.mps);
        let ask = Ask::of(&open.state, &goal, &scope);
        let until = self.context.now() + ASK_WITHIN;
        let known = read.look.and_then(|(_, hardware)| hardware.get(gpu));
        let seen = self.hardware.look(gpu, &ask, until, known);
        // Drop notes that the hardware contradicts before the difference is worked out: an
        // administrator or a reboot has changed the setting, and what was found before us is no
        // longer true.
        open.state.correct(&seen);
        // A round reports it: a call that noted it first would keep it from the claims.
        if scope.is_round() {
            open.state.note_wedged(&seen);
        }
        let changes = diff(&open.state, &seen, &goal, &scope);
        Ok(Plan {
            gpu: gpu.clone(),
            goal,
            scope,
            open,
            seen,
            changes,
        })
    }

    /// Brings a GPU to the goal of a call.
    pub(crate) fn bring(
        self,
        gpu: &GpuUuid,
        caller: Caller<'_>,
        made_for: Option<&ClaimUid>,
        until: Duration,
    ) -> Result<GpuState, NotBrought> {
        let plan = self.plan(gpu, caller, &Readings::now(self.context)?)?;
        self.carry_out(plan, made_for, until)
    }

    /// Makes the changes of a plan, in order. Each is on disk before it begins, and its outcome
    /// with the next one that is written, or at the end: a note that is older than the hardware is
    /// found again. A change that fails ends a call that makes something for a claim, which is
    /// taken back; every other call goes on past it, with all that do not need it.
    pub(crate) fn carry_out(
        self,
        plan: Plan,
        made_for: Option<&ClaimUid>,
        until: Duration,
    ) -> Result<GpuState, NotBrought> {
        let Plan {
            gpu,
            goal,
            scope,
            mut open,
            seen,
            changes,
        } = plan;
        let mut stuck: Vec<Stuck> = Vec::new();
        for change in changes {
            // Leave out what needs a change that has failed: no instance is made in the wrong mode.
            if stuck.iter().any(|failed| needs(&change, &failed.change)) {
                continue;
            }
            let mut work = Work {
                gpus: self,
                gpu: &gpu,
                goal: &goal,
                scope: &scope,
                open: &mut open,
                seen: &seen,
                until,
            };
            match work.make(&change, made_for) {
                Ok(()) => {}
                // Without a file nothing is begun: a crash would leave what no note names.
                Err(Failed::Store(error)) => return Err(error.into()),
                Err(Failed::Change(error)) => {
                    stuck.push(Stuck { change, error });
                    if made_for.is_some() {
                        break;
                    }
                }
            }
        }
        // Write what came of them, and which notes the hardware contradicts.
        self.save_later(&gpu, &mut open);
        if stuck.is_empty() {
            Ok(open.state)
        } else {
            Err(NotBrought::Stuck(stuck))
        }
    }

    /// Settles open questions about a GPU: what was begun, and what is in doubt. A
    /// question that the hardware does not answer stays, and fences the GPU.
    fn settle(self, gpu: &GpuUuid, open: &mut OpenState) {
        let is_open = |instance: &Instance| {
            instance.doubt.is_some() || matches!(instance.life, Life::Begun | Life::Half { .. })
        };
        let questions: Vec<_> = open
            .state
            .instances
            .iter()
            .filter(|(_, instance)| is_open(instance))
            .map(|(place, instance)| (*place, instance.clone()))
            .collect();
        // Ask the hardware about each; a place that it does not show is forgotten.
        for (place, instance) in questions {
            match instance.settled(place, self.hardware.probe(gpu, place)) {
                Some(instance) => drop(open.state.instances.insert(place, instance)),
                None => drop(open.state.instances.remove(&place)),
            }
        }
        // A note that is not written is found again: this must not keep a claim from being let go
        // while the disk is full.
        self.save_later(gpu, open);
    }

    /// Brings all GPUs of which something is noted to the goal of what is held: gives back what no
    /// claim needs any more, sets what a policy has changed, and asks about what is in doubt. A GPU
    /// that is as its notes say is not asked; one that a call is working on is left for the next
    /// round. `again`: time slices are set once more, since the driver may have been loaded anew.
    pub(crate) fn tidy(self, again: bool, report: &mut Report) {
        let states = match self.context.state.gpus() {
            Ok(states) => states,
            Err(error) => return report.events.push(Event::failed(None, &error)),
        };
        let round = if again {
            Round::DriverLoadedAnew
        } else {
            Round::Usual
        };
        let servers = servers_to_look_at(self, &states);
        for (gpu, stored) in states {
            // Compare notes with notes first: most GPUs are as they should be and are not asked.
            let is_due = match stored.as_ref() {
                _ if servers.contains(&gpu) => Ok(true),
                Stored::Fine(state) => self.is_due(&gpu, state, again),
                Stored::Corrupt { .. } => Ok(true),
                Stored::Absent | Stored::Newer { .. } => Ok(false),
            };
            let done = is_due.and_then(|is_due| {
                let lock = is_due.then(|| self.context.lock_gpu(&gpu));
                match lock {
                    Some(Ok(_lock)) => self.tidy_one(&gpu, report, round),
                    // A busy lock means that a call is bringing this GPU to a goal right now. The
                    // next look finds what it leaves.
                    Some(Err(_)) => {
                        report.left_out = true;
                        Ok(())
                    }
                    None => Ok(()),
                }
            });
            if let Err(error) = done {
                report.events.push(Event::failed(None, &error));
            }
        }
    }

    /// Gives back the MIG modes that divvy has changed, on GPUs that nothing holds, whatever rules
    /// offer: the node goes to another driver. A GPU that another call is working on keeps its
    /// mode.
    pub(crate) fn leave(self, report: &mut Report) {
        let states = match self.context.state.gpus() {
            Ok(states) => states,
            Err(error) => return report.events.push(Event::failed(None, &error)),
        };
        let is_ours = |state: &GpuState| state.mig.is_some();
        for (gpu, stored) in states {
            if !stored.fine().is_some_and(is_ours) {
                continue;
            }
            let Ok(_lock) = self.context.lock_gpu(&gpu) else {
                continue;
            };
            let done = self.tidy_one(&gpu, report, Round::NodeIsLeft);
            if let Err(error) = done {
                report.events.push(Event::failed(None, &error));
            }
        }
    }

    /// Returns whether the notes about a GPU differ from its goal, or are of another boot.
    fn is_due(self, gpu: &GpuUuid, noted: &GpuState, again: bool) -> Result<bool, StoreError> {
        let config = &self.context.config;
        // Notes of another boot are dropped by writing the file anew.
        let now = noted.clone().in_boot(&config.boot);
        if now.instances.len() != noted.instances.len() || now.slice != noted.slice {
            return Ok(true);
        }
        let records = with_lost(self.context)?;
        let holds = holds_on(gpu, Caller::Round, &records, &config.boot);
        let scope = Scope::new(holds, now.grant, &now.instances);
        let goal = Goal::of(&scope, &now.mps);
        let is_open = |i: &Instance| i.doubt.is_some() || !matches!(i.life, Life::Whole(_));
        // Read without the lock: a call that is changing the mode has the GPU looked at once more.
        let is_changed = now.mig.is_some_and(|note| {
            let mode = self.hardware.mig_mode(gpu);
            mode.is_ok_and(|mode| mode.is_on() != note.ours)
        });
        Ok(is_changed
            || now.instances.values().any(is_open)
            || (again && now.slice.is_some())
            || !diff(&now, &GpuSeen::as_noted(&now), &goal, &scope).is_empty())
    }

    /// Brings one GPU to the goal of what is held. Under its lock.
    fn tidy_one(self, gpu: &GpuUuid, report: &mut Report, round: Round) -> Result<(), StoreError> {
        let stored = self.context.state.gpu(gpu)?;
        let was_fenced = match &stored {
            Stored::Fine(state) => state.fences(&self.context.config.boot).next().is_some(),
            Stored::Corrupt { .. } => true,
            Stored::Absent | Stored::Newer { .. } => false,
        };
        // Counted before and after, since the plan does not say which notes were dropped without a
        // change.
        let settings = |state: &GpuState| {
            let noted = [
                state.mig.is_some(),
                state.slice.is_some(),
                state.compute.is_some(),
            ];
            noted.into_iter().filter(|noted| *noted).count()
        };
        let boot = &self.context.config.boot;
        let before = stored
            .fine()
            .map(|state| wedged(state.clone().in_boot(boot)));
        // Hold nothing of its own: what no record holds is given back.
        let read = Readings::now(self.context)?;
        let plan = self.plan_in(round, gpu, Caller::Round, &read)?;
        let noted = stored.fine().map_or(0, |state| {
            // A note that an administrator has made void gives nothing back.
            let is_void = !plan.scope.gives_mig_mode_back() && plan.open.state.mig.is_none();
            let mig = state.mig.filter(|_| !is_void);
            settings(&GpuState {
                mig,
                ..state.clone()
            })
        });
        let started = plan.changes.iter().filter_map(|change| match change {
            Change::StartMps(target, _) | Change::RestartMps(target, _) => Some(*target),
            _ => None,
        });
        let restarted: BTreeSet<Target> = started.collect();
        let now = wedged(plan.open.state.clone());
        // A server that has ended, or is started below, does not serve again.
        let serves = |target| plan.seen.runs(target) && !restarted.contains(&target);
        report_wedged(self, gpu, &before.unwrap_or_default(), &now, serves, report)?;
        match self.carry_out(plan, None, self.context.now() + SET_WITHIN) {
            Ok(state) => {
                if !restarted.is_empty() {
                    let (claims, gpu) = (self.served(gpu, &restarted)?, gpu.clone());
                    report
                        .events
                        .push(Event::MpsServerRestarted { gpu, claims });
                }
                if settings(&state) < noted {
                    let gpu = gpu.clone();
                    report.events.push(Event::SettingsGivenBack { gpu });
                }
                if was_fenced && state.fences(&self.context.config.boot).next().is_none() {
                    let gpu = gpu.clone();
                    report.events.push(Event::FenceCleared { gpu });
                }
            }
            Err(NotBrought::Store(error)) => return Err(error),
            Err(NotBrought::Stuck(stuck)) => {
                for Stuck { change, error } in stuck {
                    let error = format!("failed to {}: {}", change.of(gpu), chain(&error));
                    report.events.push(Event::Failed { claim: None, error });
                }
            }
        }
        Ok(())
    }

    /// Settles open questions about a GPU that a prepare is refused for: the late call may have
    /// come back, and a file that cannot be read is made again.
    pub(crate) fn settle_now(self, gpu: &GpuUuid) -> Result<(), StoreError> {
        let Ok(_lock) = self.context.lock_gpu(gpu) else {
            return Ok(());
        };
        self.settle_locked(gpu)
    }

    /// Does the same under the GPU's lock.
    pub(crate) fn settle_locked(self, gpu: &GpuUuid) -> Result<(), StoreError> {
        let mut open = self.open(gpu)?;
        self.settle(gpu, &mut open);
        Ok(())
    }
}

/// Refuses a place whose noted instance does not live whole.
fn is_whole(gpu: &GpuUuid, noted: &Instance, living: &Living) -> Result<(), ChangeError> {
    match &noted.life {
        Life::Whole(made) if living.as_partition().as_ref() == Some(made) => Ok(()),
        life if living.is(life) => Err(ChangeError::NotDone(Cause::new(
            "a part of it was removed by others, and other claims hold what is left: end their pods",
        ))),
        _ => Err(Hardware::occupied(gpu, &living.instance)),
    }
}

/// A GPU while it is changed.
struct Work<'w, 'a> {
    gpus: Gpus<'a>,
    gpu: &'w GpuUuid,
    goal: &'w Goal,
    scope: &'w Scope,
    open: &'w mut OpenState,
    seen: &'w GpuSeen,
    until: Duration,
}

impl Work<'_, '_> {
    /// Makes one change. Nothing but the file changes beside a call that has not returned.
    fn make(&mut self, change: &Change, made_for: Option<&ClaimUid>) -> Result<(), Failed> {
        // An instance in doubt may be another claim's by now.
        if let Change::Remove(place) = change {
            self.has_no_open_question(*place)?;
        }
        // Forgetting changes a note only, and must not wait for a call that hangs.
        if !matches!(change, Change::Forget(_)) {
            self.gpus.hardware.nothing_in_flight(self.gpu)?;
        }
        match change {
            Change::Forget(place) => {
                self.forget(*place);
                Ok(())
            }
            Change::StopMps(target) => Ok(self.stop_mps(*target)?),
            Change::Remove(place) => Ok(self.remove(*place)?),
            Change::SetMigMode(on) => self.set_mig_mode(*on),
            Change::SetComputeMode(to) => self.set_compute_mode(*to),
            Change::SetTimeSlice(to) => self.set_time_slice(*to),
            Change::Create(place) => self.create(*place, made_for),
            Change::StartMps(target, server) => self.start_mps(*target, *server),
            Change::RestartMps(target, server) => self.restart_mps(*target, *server),
            Change::PutNamespace(namespace) => Ok(self.put_namespace(*namespace)?),
            Change::RemoveNamespace(name) => Ok(self.remove_namespace(*name)?),
        }
    }

    fn save(&mut self) -> Result<(), StoreError> {
        self.gpus.save(self.gpu, self.open)
    }

    fn forget(&mut self, place: Place) {
        self.open.state.instances.remove(&place);
    }

    fn doubt(&mut self, place: Place, reason: String) {
        if let Some(instance) = self.open.state.instances.get_mut(&place) {
            instance.doubt = Some(reason);
        }
    }

    fn has_no_open_question(&self, place: Place) -> Result<(), ChangeError> {
        let noted = self.open.state.instances.get(&place);
        match noted.and_then(|instance| instance.doubt.clone()) {
            None => Ok(()),
            Some(reason) => Err(ChangeError::Unknown(Cause::new(reason).passing())),
        }
    }

    /// Removes an instance. The record of its claim says already that it is going.
    fn remove(&mut self, place: Place) -> Result<(), ChangeError> {
        let Some(noted) = self.open.state.instances.get(&place) else {
            return Ok(());
        };
        match self.gpus.hardware.remove(self.gpu, place, &noted.life) {
            Ok(()) => {
                self.forget(place);
                Ok(())
            }
            Err(error @ ChangeError::NotDone(_)) => Err(error),
            // It may be gone all the same.
            Err(error @ ChangeError::Unknown(_)) => {
                if self.gpus.hardware.probe(self.gpu, place) == Observed::Absent {
                    self.forget(place);
                    return Ok(());
                }
                self.doubt(
                    place,
                    format!(
                        "the call to remove the partition of {} may still have its effect",
                        place.in_words()
                    ),
                );
                Err(error)
            }
        }
    }

    /// Changes a setting, in three steps: the note on disk, the call, and the note of its outcome.
    /// A call that certainly did nothing leaves the notes as they were.
    fn change_setting(
        &mut self,
        setting: Setting,
        call: impl FnOnce(Hardware<'_>) -> Result<(), ChangeError>,
    ) -> Result<(), Failed> {
        // Note the value that is found before the setting leaves it: after a crash it is known
        // what to give back.
        let before = self.open.state.clone();
        self.open.state.note_setting(setting, Moment::Before);
        if setting == Setting::SliceBack {
            // The value to give back is on disk already, so that a full disk must not keep it from
            // being given back.
            self.gpus.save_later(self.gpu, self.open);
        } else if let Err(error) = self.save() {
            self.open.state = before;
            return Err(error.into());
        }
        // Make the call, and note its outcome.
        let done = call(self.gpus.hardware);
        match &done {
            Ok(()) => self.open.state.note_setting(setting, Moment::Done),
            // Nothing has happened, so the notes are as before.
            Err(ChangeError::NotDone(_)) => self.open.state.restore_settings(&before),
            Err(ChangeError::Unknown(_)) => {
                self.open.state.note_setting(setting, Moment::Unknown);
            }
        }
        Ok(done?)
    }

    fn set_mig_mode(&mut self, to: bool) -> Result<(), Failed> {
        let now = match &self.seen.mig {
            Some(Ok(mode)) => mode.is_on(),
            Some(Err(error)) => {
                let why = Cause::from_gpu("MIG mode cannot be read", error.clone());
                return Err(ChangeError::NotDone(why).into());
            }
            // Not read. The change is listed, so the mode counts as the other one; the hardware is
            // asked again right before the call.
            None => !to,
        };
        let gpu = self.gpu;
        let done = self.change_setting(Setting::Mig { now, to }, |hardware| {
            hardware.set_mig_mode(gpu, to)
        });
        // Also after a failure, which may have changed the mode all the same. The content of CDI
        // files is made of the inventory, and a GPU may have another minor number now.
        self.gpus.hardware.read_again(gpu);
        done
    }

    fn set_compute_mode(&mut self, to: ComputeMode) -> Result<(), Failed> {
        let gpu = self.gpu;
        let not_done =
            |what: &str| ChangeError::NotDone(Cause::new(format!("compute mode of {gpu} {what}")));
        let now = match &self.seen.compute {
            Some(Ok(now)) => *now,
            Some(Err(error)) => {
                let why = Cause::from_gpu("compute mode cannot be read", error.clone());
                return Err(ChangeError::NotDone(why.passing()).into());
            }
            None => return Err(not_done("is not reported").into()),
        };
        // PROHIBITED is never ours: an administrator keeps work off the GPU with it, and a claim
        // must not undo that.
        if now == ComputeMode::Prohibited && !matches!(self.goal.compute, Want::Found) {
            return Err(not_done("is PROHIBITED, which an administrator has set").into());
        }
        self.change_setting(Setting::Compute { now, to }, |hardware| {
            hardware.set_compute_mode(gpu, to)
        })
    }

    /// Sets the time slice. A card that has none that can be set does what the default asks for.
    fn set_time_slice(&mut self, to: TimeSlice) -> Result<(), Failed> {
        let (gpu, until) = (self.gpu, self.slice_until());
        let is_back = matches!(self.goal.slice, Want::Found);
        let is_ignored = |error: &TimeSliceError| match error {
            TimeSliceError::Unsupported(_) => is_back || to == TimeSlice::Default,
            // Whatever was set is gone with the driver.
            TimeSliceError::NoDriver => is_back,
            TimeSliceError::Failed(_) => false,
        };
        let hardware = self.gpus.hardware;
        // Before the first change the slice is read, so that it can be given back. Later a read
        // would find our own value.
        let now = match self.open.state.slice {
            Some(noted) => noted.found,
            None => match hardware.time_slice(gpu, until) {
                Ok(now) => now.unwrap_or(TimeSlice::Default),
                Err(error) if is_ignored(&error) => return Ok(()),
                Err(error) => return Err(ChangeError::from(error).into()),
            },
        };
        let mut ignored = false;
        let setting = if is_back {
            Setting::SliceBack
        } else {
            Setting::Slice { now, to }
        };
        let done = self.change_setting(setting, |hardware| {
            let set = hardware.set_time_slice(gpu, to, until);
            ignored = set.as_ref().is_err_and(is_ignored);
            Ok(set?)
        });
        match done {
            // A card without time slices, or a driver that is gone, has nothing to give back.
            Err(Failed::Change(_)) if ignored => {
                self.open.state.slice = None;
                Ok(())
            }
            done => done,
        }
    }

    fn slice_until(&self) -> Duration {
        self.until.min(self.gpus.context.now() + SET_WITHIN)
    }

    /// Makes an instance, in four steps: the place is looked at and must be empty, it is noted as
    /// begun, the calls are made, and what came of them is noted. Whatever an error left at the
    /// place is ours, since the place was empty. A noted instance that could not be read when the
    /// change was worked out, and is found to live, is there already.
    fn create(&mut self, place: Place, made_for: Option<&ClaimUid>) -> Result<(), Failed> {
        let (hardware, gpu, at) = (self.gpus.hardware, self.gpu, place.in_words());
        let read =
            |source| ChangeError::NotDone(Cause::from_gpu("its state cannot be read", source));
        self.has_no_open_question(place)?;
        // Look first: what fills the place now is not ours, unless a note says so.
        let filling = hardware.filling(gpu, place).map_err(read)?;
        match (self.open.state.instances.get(&place), filling) {
            (None, None) => {}
            (None, Some(living)) => {
                return Err(Hardware::occupied(gpu, &living.instance).into());
            }
            (Some(noted), Some(living)) => {
                return is_whole(gpu, noted, &living).map_err(Into::into);
            }
            // All that was decided before took it for living: decide again.
            (Some(_), None) => {
                let gone = Cause::new("it is gone since the GPU was looked at").passing();
                return Err(ChangeError::NotDone(gone).into());
            }
        }
        let Some(made_for) = made_for else {
            return Err(ChangeError::NotDone(Cause::new("no claim asks for it")).into());
        };
        let note = |open: &mut OpenState, life: Life, doubt: Option<String>| {
            let instance = Instance {
                made_for: made_for.clone(),
                life,
                doubt,
            };
            open.state.instances.insert(place, instance);
        };
        // Note the begin on disk. From here on, what fills the place is ours.
        note(self.open, Life::Begun, None);
        if let Err(error) = self.save() {
            self.open.state.instances.remove(&place);
            return Err(error.into());
        }
        // Make it. An error proves nothing, so the place is looked at again.
        let error = match hardware.create(gpu, place) {
            Ok(made) => {
                note(self.open, Life::Whole(made), None);
                return Ok(());
            }
            Err(error) => error,
        };
        let cause = error.cause().clone();
        match hardware.probe(gpu, place) {
            // A call past its deadline may have succeeded after all.
            Observed::Whole(made) => {
                note(self.open, Life::Whole(made), None);
                return Ok(());
            }
            // The GPU instance is there without its compute instance: noted with its id, so that
            // taking the claim back removes it.
            Observed::Half(gi) => note(self.open, Life::Half { gi }, None),
            Observed::Absent => drop(self.open.state.instances.remove(&place)),
            Observed::InFlight => {
                let reason = format!("the call to create a partition of {at} has not returned");
                note(self.open, Life::Begun, Some(reason));
                return Err(ChangeError::Unknown(cause).into());
            }
            Observed::Uncertain(why) => {
                let reason =
                    format!("it is uncertain whether a partition of {at} was created: {why}");
                note(self.open, Life::Begun, Some(reason));
                return Err(ChangeError::Unknown(cause).into());
            }
        }
        Err(ChangeError::NotDone(cause).into())
    }
}
