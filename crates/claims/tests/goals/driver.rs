//! The executor's part of a story, by the same pure transitions.

use super::*;

/// Writes the record before the first change, as a prepare does.
type First<'a> = &'a mut dyn FnMut(&mut Story, &[Change]) -> Result<(), Failed>;

impl Story {
    /// An effect: the process may die before it or after it.
    pub(super) fn effect(&mut self, what: impl FnOnce(&mut Self)) -> Result<(), Failed> {
        if let Some(left) = &mut self.dies_in {
            if *left == 0 {
                self.dies_in = None;
                if self.chance.one_in(2) {
                    what(self);
                }
                self.say("    dies");
                return Err(Failed::Died);
            }
            *left -= 1;
        }
        what(self);
        Ok(())
    }

    pub(super) fn call(&mut self, call: &Call) -> Result<(), Failed> {
        assert!(self.hardware.late.is_empty(), "a call beside one in flight");
        self.changes += 1;
        // The supervisor carries out one request after the other, so none of its calls lands late.
        let in_order = matches!(
            call,
            Call::StopMps(_)
                | Call::StartMps(..)
                | Call::RestartMps(..)
                | Call::PutNamespace(_)
                | Call::RemoveNamespace(_)
        );
        let fault = match self.fault.take() {
            Some(Fault::Late) if in_order => Some(Fault::Lies),
            fault => fault,
        };
        match fault {
            Some(Fault::Refuses) => return Err(Failed::NotDone),
            Some(Fault::Lies) => {
                drop(self.hardware.run(call));
                return Err(Failed::Unknown);
            }
            Some(Fault::Late) => {
                self.hardware.late.push(call.clone());
                return Err(Failed::Unknown);
            }
            Some(Fault::Never) => return Err(Failed::Unknown),
            None => {}
        }
        let mut done = Ok(());
        let died = self.effect(|story| done = story.hardware.run(call));
        if matches!(died, Err(Failed::Died)) && !in_order && self.chance.one_in(3) {
            // Still in the driver.
            self.hardware.late.push(call.clone());
        }
        died.and(done)
    }

    pub(super) fn write_record(&mut self, record: Record) -> Result<(), Failed> {
        self.effect(|story| drop(story.records.insert(record.uid.clone(), record)))
    }

    pub(super) fn remove_record(&mut self, uid: &ClaimUid) -> Result<(), Failed> {
        self.effect(|story| drop(story.records.remove(uid)))
    }

    pub(super) fn all(&self) -> Records {
        let read = |(uid, record): (&ClaimUid, &Record)| {
            let stored = if self.torn.contains(uid) {
                Stored::Corrupt {
                    reason: "torn".to_owned(),
                }
            } else {
                Stored::Fine(record.clone())
            };
            (uid.clone(), Arc::new(stored))
        };
        self.records.iter().map(read).collect()
    }

    /// The state as it counts now.
    pub(super) fn open(&self) -> GpuState {
        let boot = self.boot();
        let mut state = self.file.clone().unwrap_or_default().in_boot(&boot);
        state.grant = self.granted;
        let fine = self
            .records
            .iter()
            .filter(|(uid, _)| !self.torn.contains(*uid));
        let uses: Vec<_> = fine
            .flat_map(|(_, record)| uses_of(record, &Self::gpu(), &boot))
            .collect();
        state.add_given(&uses);
        state
    }

    pub(super) fn save(&mut self, state: &GpuState) -> Result<(), Failed> {
        if self.file.as_ref() == Some(state) {
            return Ok(());
        }
        let state = state.clone();
        self.effect(|story| story.file = Some(state))
    }

    /// Places of instances of ours that no record holds.
    pub(super) fn strays(&self) -> BTreeSet<Place> {
        let is_held = |place: &Place| {
            let mut records = self.records.values();
            records.any(|record| record.devices[0].own_place() == Some(*place))
        };
        let noted = self.open().instances.into_keys();
        noted.filter(|place| !is_held(place)).collect()
    }

    pub(super) fn probe(&self, place: Place) -> Observed {
        if self.hardware.late.is_empty() {
            GpuSeen::observed(&Ok(self.hardware.living(place)))
        } else {
            Observed::InFlight
        }
    }

    pub(super) fn settle(&mut self, state: &mut GpuState) -> Result<(), Failed> {
        let open: Vec<_> = state
            .instances
            .iter()
            .filter(|(_, i)| i.doubt.is_some() || matches!(i.life, Life::Begun | Life::Half { .. }))
            .map(|(place, instance)| (*place, instance.clone()))
            .collect();
        for (place, noted) in open {
            match noted.settled(place, self.probe(place)) {
                Some(settled) => drop(state.instances.insert(place, settled)),
                None => drop(state.instances.remove(&place)),
            }
        }
        self.save(state)
    }

    /// Brings the GPU to the goal of a call; says what could not be done.
    pub(super) fn bring(
        &mut self,
        caller: Caller<'_>,
        made_for: Option<&ClaimUid>,
        first: First<'_>,
    ) -> Result<(GpuState, Vec<Change>), Failed> {
        let mut state = self.open();
        self.settle(&mut state)?;
        let boot = self.boot();
        let holds = holds_on(&Self::gpu(), caller, &self.all(), &boot);
        let scope = Scope::new(holds, state.grant, &state.instances);
        let wanted = Goal::of(&scope, &state.mps);
        let ask = Ask::of(&state, &wanted, &scope);
        let (seen, is_odd) = self.look(&state, &wanted, ask.slice_in_force);
        state.correct(&seen);
        if scope.is_round() {
            state.note_wedged(&seen);
        }
        let changes = diff(&state, &seen, &wanted, &scope);
        self.check_order(&changes, &scope, &wanted);
        self.check_others(caller, &changes);
        first(self, &changes)?;
        let mut stuck: Vec<Change> = Vec::new();
        if !changes.is_empty() && !self.hardware.late.is_empty() {
            return Ok((state, changes));
        }
        for change in changes {
            if stuck.iter().any(|failed| needs(&change, failed)) {
                continue;
            }
            self.say(format!("    {change:?}"));
            match self.make(&mut state, &seen, &change, &wanted, made_for) {
                Ok(()) => {}
                Err(Failed::Died) => return Err(Failed::Died),
                Err(Failed::NotDone | Failed::Unknown) => {
                    stuck.push(change);
                    if made_for.is_some() {
                        break;
                    }
                }
            }
            if !self.hardware.late.is_empty() {
                // The real one meets its own call in flight.
                break;
            }
        }
        self.save(&state)?;
        if stuck.is_empty() && self.hardware.late.is_empty() && !is_odd {
            let slice = GpuSeen::as_noted(&state).slice;
            let seen = self.seen(&state, &wanted, slice);
            let left = diff(&state, &seen, &wanted, &scope);
            assert_eq!(left, [], "not at the goal {wanted:?} with {state:?}");
        }
        Ok((state, stuck))
    }

    /// Reads the GPU. Now and then a part of it cannot be read.
    fn look(
        &mut self,
        state: &GpuState,
        wanted: &Goal,
        slice: Option<TimeSlice>,
    ) -> (GpuSeen, bool) {
        let mut seen = self.seen(state, wanted, slice);
        let is_odd = self.odd && self.chance.one_in(4);
        if !is_odd {
            return (seen, false);
        }
        let error = || GpuError::global(GpuOp::GpuInstances, GpuErrorCode::UNKNOWN);
        if self.chance.one_in(2) {
            seen.mig = Some(Err(error()));
        }
        if self.chance.one_in(2) {
            seen.compute = Some(Err(error()));
        }
        if self.chance.one_in(2) {
            seen.mps = Some(Err("no answer".to_owned()));
        }
        for filling in seen.places.values_mut() {
            if self.chance.one_in(2) {
                *filling = Err(error());
            }
        }
        self.kinds.insert("odd");
        self.say(format!("    an odd look: {seen:?}"));
        (seen, true)
    }

    pub(super) fn seen(
        &self,
        state: &GpuState,
        wanted: &Goal,
        slice: Option<TimeSlice>,
    ) -> GpuSeen {
        let places = state.instances.keys().chain(&wanted.instances);
        GpuSeen {
            mig: Some(Ok(MigMode::Supported {
                current: self.hardware.mig,
                pending: self.hardware.mig,
            })),
            compute: Some(Ok(self.hardware.compute)),
            slice,
            places: places
                .map(|place| (*place, Ok(self.hardware.living(*place))))
                .collect(),
            mps: Some(Ok(self.servers())),
            in_flight: (!self.hardware.late.is_empty()).then_some(GpuOp::SetMigMode),
        }
    }

    fn servers(&self) -> BTreeMap<Target, MpsSeen> {
        let servers = self.hardware.mps.iter();
        let seen = servers.map(|(target, (server, partition))| {
            let seen = MpsSeen {
                server: *server,
                partition: partition.as_ref().map(|uuid| uuid.parse().unwrap()),
                namespaces: (*target == Target::Gpu).then(|| self.hardware.namespaces.clone()),
                unwell: self.hardware.wedged.get(target).map(|is_idle| Unwell {
                    fault: MpsFault::Fault,
                    is_idle: *is_idle,
                    is_lasting: true,
                }),
            };
            (*target, seen)
        });
        seen.collect()
    }

    /// Removals come before MIG mode, and that before what is made; a call makes for its own claim,
    /// and nothing is given back while a record cannot be read.
    pub(super) fn check_order(&self, changes: &[Change], scope: &Scope, wanted: &Goal) {
        let rank = |change: &Change| match change {
            Change::Forget(_) => 0,
            Change::StopMps(_) | Change::RemoveNamespace(_) => 1,
            Change::Remove(_) => 2,
            Change::SetMigMode(_) => 3,
            Change::SetComputeMode(_) => 4,
            Change::SetTimeSlice(_) => 5,
            Change::Create(_) => 6,
            Change::StartMps(..) | Change::RestartMps(..) => 7,
            Change::PutNamespace(_) => 8,
        };
        assert!(changes.is_sorted_by_key(rank), "{changes:?}");
        let holds = scope.holds();
        let gets = |target: Target| {
            let mut gets = holds.gets().iter();
            gets.any(|one| one.hold.target == target)
        };
        for change in changes {
            match change {
                Change::RestartMps(target, _) => {
                    // Under clients by a round alone, and where rules say so.
                    let is_idle = self.hardware.wedged[target];
                    let may = scope.is_round() && scope.grant().restarts_wedged_mps;
                    assert!(is_idle || may, "started anew under its clients");
                }
                Change::Create(place) => {
                    assert!(gets(Target::Partition(*place)), "{change:?}");
                }
                Change::StartMps(target, _) => {
                    assert!(scope.is_round() || gets(*target), "{change:?}");
                }
                Change::Remove(_) => assert!(!scope.is_round(), "{change:?} in a round"),
                Change::SetMigMode(_) => {
                    let unused = scope.is_round() && holds.others.is_empty();
                    assert!(!holds.gets().is_empty() || unused, "{change:?} for no one");
                }
                _ => {}
            }
            let is_back = match change {
                Change::SetComputeMode(_) => wanted.compute == Want::Found,
                Change::SetTimeSlice(_) => wanted.slice == Want::Found,
                Change::SetMigMode(_) => wanted.mig == Want::Found,
                Change::StopMps(_) | Change::RemoveNamespace(_) => scope.is_round(),
                _ => false,
            };
            assert!(!(is_back && holds.unknown), "{change:?} too early");
        }
    }

    /// Whatever was seen: nothing that the record of another claim names is removed, stopped or set
    /// otherwise. A record of an earlier boot, and one that is being undone, names nothing that is
    /// there.
    fn check_others(&self, caller: Caller<'_>, changes: &[Change]) {
        let claim = match caller {
            Caller::Gets(claim, _) | Caller::LetsGo(claim, _) => Some(claim),
            Caller::Round => None,
        };
        let boot = self.boot();
        let others = self.records.values().filter(|record| {
            let undone = matches!(&record.phase, Phase::Leaving(leaving) if leaving.undoing);
            Some(&record.uid) != claim && record.boot == boot && !undone
        });
        let devices: Vec<_> = others.map(|record| &record.devices[0]).collect();
        for change in changes {
            for device in &devices {
                let of_gpu = device.target == Target::Gpu;
                let harms = match change {
                    Change::Remove(place) => device.own_place() == Some(*place),
                    Change::StopMps(target) => device.mps.is_some() && device.target == *target,
                    Change::RemoveNamespace(name) => {
                        let namespace = device.mps.and_then(|slot| slot.namespace);
                        namespace.is_some_and(|one| one.name == *name)
                    }
                    Change::SetMigMode(on) => *on == of_gpu,
                    Change::SetComputeMode(to) => {
                        let needs = if device.mps.is_some() {
                            Some(ComputeMode::ExclusiveProcess)
                        } else {
                            (device.sharing == Sharing::TimeSliced).then_some(ComputeMode::Default)
                        };
                        of_gpu && needs.is_some_and(|needs| needs != *to)
                    }
                    // That of shares is the policy's, which may have changed.
                    Change::SetTimeSlice(to) => {
                        of_gpu
                            && claim.is_some()
                            && device.time_slice.is_some_and(|one| one != *to)
                            && device.sharing == Sharing::Exclusive
                    }
                    Change::Forget(_)
                    | Change::Create(_)
                    | Change::StartMps(..)
                    | Change::RestartMps(..)
                    | Change::PutNamespace(_) => false,
                };
                assert!(!harms, "{change:?} harms {device:?}");
            }
        }
    }

    pub(super) fn make(
        &mut self,
        state: &mut GpuState,
        seen: &GpuSeen,
        change: &Change,
        wanted: &Goal,
        made_for: Option<&ClaimUid>,
    ) -> Result<(), Failed> {
        match change {
            Change::Forget(place) => {
                self.kinds.insert("forget");
                state.instances.remove(place);
                self.save(state)
            }
            Change::Remove(place) => {
                self.kinds.insert("remove");
                let life = state.instances[place].life.clone();
                self.remove(state, *place, &life)
            }
            Change::StopMps(target) => {
                self.kinds.insert("stop");
                match self.call(&Call::StopMps(*target)) {
                    Ok(()) => drop(state.mps.remove(target)),
                    Err(Failed::Unknown) => {
                        state.doubt_server(*target);
                        self.save(state)?;
                        return Err(Failed::Unknown);
                    }
                    Err(error) => return Err(error),
                }
                self.save(state)
            }
            Change::StartMps(target, server) | Change::RestartMps(target, server) => {
                let is_anew = matches!(change, Change::RestartMps(..));
                self.kinds.insert(match target {
                    _ if is_anew => "restart",
                    Target::Gpu => "start",
                    Target::Partition(_) => "start in a partition",
                });
                let before = state.mps.clone();
                let partition = target.place().map(|place| {
                    let made = state.partition_at(place);
                    made.expect("a partition for a server").to_string()
                });
                state.note_server(*target, *server, false);
                self.save(state)?;
                let call = if is_anew {
                    Call::RestartMps(*target, partition, *server)
                } else {
                    Call::StartMps(*target, partition, *server)
                };
                match self.call(&call) {
                    Ok(()) => state.note_server(*target, *server, true),
                    // Of a restart it is not known then whether the one of before runs.
                    Err(Failed::NotDone) if is_anew => return Err(Failed::NotDone),
                    Err(Failed::NotDone) => {
                        state.mps = before;
                        self.save(state)?;
                        return Err(Failed::NotDone);
                    }
                    Err(error) => return Err(error),
                }
                self.save(state)
            }
            Change::PutNamespace(namespace) => {
                self.kinds.insert("put");
                self.call(&Call::PutNamespace(*namespace))
            }
            Change::RemoveNamespace(name) => {
                self.kinds.insert("end");
                self.call(&Call::RemoveNamespace(*name))
            }
            Change::SetMigMode(_) if matches!(seen.mig, Some(Err(_))) => Err(Failed::NotDone),
            Change::SetMigMode(to) => {
                self.kinds.insert("mig");
                let now = self.hardware.mig;
                self.set(state, Setting::Mig { now, to: *to }, &Call::Mig(*to))
            }
            Change::SetComputeMode(_) if matches!(seen.compute, Some(Err(_))) => {
                Err(Failed::NotDone)
            }
            Change::SetComputeMode(to) => {
                self.kinds.insert("compute");
                let now = self.hardware.compute;
                let setting = Setting::Compute { now, to: *to };
                self.set(state, setting, &Call::Compute(*to))
            }
            Change::SetTimeSlice(to) => {
                self.kinds.insert("slice");
                let now = state.slice.map_or(self.hardware.slice, |slice| slice.found);
                let setting = match wanted.slice {
                    Want::Found => Setting::SliceBack,
                    Want::To(_) => Setting::Slice { now, to: *to },
                };
                self.set(state, setting, &Call::Slice(*to))
            }
            Change::Create(place) => {
                self.kinds.insert("create");
                self.create(state, *place, made_for.expect("for a claim"))
            }
        }
    }

    pub(super) fn set(
        &mut self,
        state: &mut GpuState,
        setting: Setting,
        call: &Call,
    ) -> Result<(), Failed> {
        let before = state.clone();
        state.note_setting(setting, Moment::Before);
        self.save(state)?;
        match self.call(call) {
            Ok(()) => state.note_setting(setting, Moment::Done),
            Err(Failed::Died) => return Err(Failed::Died),
            Err(Failed::NotDone) => {
                state.restore_settings(&before);
                self.save(state)?;
                return Err(Failed::NotDone);
            }
            Err(Failed::Unknown) => {
                state.note_setting(setting, Moment::Unknown);
                self.save(state)?;
                return Err(Failed::Unknown);
            }
        }
        self.save(state)
    }

    pub(super) fn remove(
        &mut self,
        state: &mut GpuState,
        place: Place,
        life: &Life,
    ) -> Result<(), Failed> {
        if state.instances[&place].doubt.is_some() {
            return Err(Failed::Unknown);
        }
        let real = self.hardware.instances.get(&place).cloned();
        let (gi, own) = match life {
            Life::Half { gi } => (gi.0, None),
            Life::Whole(made) => (made.gi.0, Some(made.uuid.to_string())),
            Life::Begun => return Ok(()),
        };
        let mut done = Ok(());
        if let Some(real) = real.filter(|real| real.gi == gi) {
            if let Some(uuid) = &real.uuid
                && own.as_ref() == Some(uuid)
            {
                done = self.call(&Call::DestroyComputeInstance(place, uuid.clone()));
            }
            if done.is_ok() && (real.uuid.is_none() || own == real.uuid) {
                done = self.call(&Call::DestroyGpuInstance(place, gi));
            }
        }
        match done {
            Err(Failed::Unknown) if self.probe(place) != Observed::Absent => {
                state.instances.get_mut(&place).unwrap().doubt = Some("removal".to_owned());
                self.save(state)?;
                return Err(Failed::Unknown);
            }
            Ok(()) | Err(Failed::Unknown) => {}
            Err(error) => return Err(error),
        }
        state.instances.remove(&place);
        self.save(state)
    }

    pub(super) fn create(
        &mut self,
        state: &mut GpuState,
        place: Place,
        made_for: &ClaimUid,
    ) -> Result<(), Failed> {
        let living = self.hardware.living(place);
        match (state.instances.get(&place), &living) {
            (None, None) => {}
            // It could not be read, and lives after all.
            (Some(noted), Some(living)) if noted.doubt.is_none() => {
                let made = living.as_partition().map(Life::Whole);
                return (made.as_ref() == Some(&noted.life))
                    .then_some(())
                    .ok_or(Failed::NotDone);
            }
            _ => return Err(Failed::NotDone),
        }
        let note = |life, doubt| Instance {
            made_for: made_for.clone(),
            life,
            doubt,
        };
        state.instances.insert(place, note(Life::Begun, None));
        self.save(state)?;
        let first = self.call(&Call::CreateGpuInstance(place));
        let done = first.and_then(|()| self.call(&Call::CreateComputeInstance(place)));
        if matches!(done, Err(Failed::Died)) {
            return Err(Failed::Died);
        }
        let noted = match self.probe(place) {
            Observed::Whole(made) => Some(note(Life::Whole(made), None)),
            Observed::Half(gi) => Some(note(Life::Half { gi }, None)),
            Observed::Absent => None,
            Observed::InFlight | Observed::Uncertain(_) => {
                Some(note(Life::Begun, Some("in flight".to_owned())))
            }
        };
        let whole = matches!(&noted, Some(i) if matches!(i.life, Life::Whole(_)));
        match noted {
            Some(instance) => drop(state.instances.insert(place, instance)),
            None => drop(state.instances.remove(&place)),
        }
        self.save(state)?;
        if whole {
            Ok(())
        } else {
            done.and(Err(Failed::NotDone))
        }
    }

    /// Gives a claim its device, or takes everything back.
    pub(super) fn hold(
        &mut self,
        uid: &ClaimUid,
        device: RecordedDevice,
        earlier: Option<&Record>,
    ) {
        drop(self.try_hold(uid, device, earlier));
    }

    pub(super) fn try_hold(
        &mut self,
        uid: &ClaimUid,
        device: RecordedDevice,
        earlier: Option<&Record>,
    ) -> Result<(), Failed> {
        let claim = Claim {
            uid: uid.clone(),
            namespace: "ns".to_owned(),
            name: uid.to_string(),
            pod_claim_name: None,
            classes: BTreeMap::new(),
            times: divvy_claims::Times::default(),
            allocation: Allocation::default(),
            configs: Vec::new(),
            pods: Vec::new(),
        };
        let target = device.target;
        let boot = self.boot();
        let mut record = Record::new(&claim, &boot, vec![device], Phase::Prepared);
        let devices = record.devices.clone();
        let preparing = Record {
            phase: Phase::Preparing,
            ..record.clone()
        };
        let (of, is_first) = (uid.clone(), earlier.is_none());
        let brought = self.bring(
            Caller::Gets(&of, &devices),
            Some(uid),
            &mut |story, changes| {
                let creates = changes.iter().any(|c| matches!(c, Change::Create(_)));
                if creates && is_first {
                    story.write_record(preparing.clone())
                } else {
                    Ok(())
                }
            },
        )?;
        if let (state, []) = (&brought.0, &brought.1[..]) {
            if let Some(place) = target.place() {
                let Life::Whole(made) = &state.instances[&place].life else {
                    panic!("not whole: {state:?}")
                };
                record.devices[0].given = Some(made.clone());
            }
            return self.write_record(record);
        }
        // The claim has again what its earlier record says. Of an earlier boot, it has nothing.
        if let Some(earlier) = earlier {
            self.write_record(earlier.clone())?;
            if earlier.boot == boot {
                return Ok(());
            }
        }
        // The GPU is brought to the goal without it; the record goes last.
        let left = self.bring(Caller::LetsGo(&of, &devices), None, &mut |_, _| Ok(()))?;
        match earlier {
            Some(_) => Ok(()),
            None if left.1.iter().any(Change::is_removal) => self.write_record(undoing(record)),
            None => self.remove_record(uid),
        }
    }

    pub(super) fn let_go(&mut self, uid: &ClaimUid) -> Result<(), Failed> {
        let Some(record) = self.records.get(uid).cloned() else {
            return Ok(());
        };
        if self.torn.contains(uid) {
            return Ok(());
        }
        self.say(format!("let {uid} go"));
        let devices = record.devices.clone();
        let of = uid.clone();
        let begun = !matches!(record.phase, Phase::Prepared);
        let going = undoing(record.clone());
        let (_, stuck) = self.bring(
            Caller::LetsGo(&of, &devices),
            None,
            &mut |story, changes| {
                let is_note = |change: &Change| matches!(change, Change::Forget(_));
                if !changes.iter().all(is_note) && !begun {
                    story.write_record(going.clone())
                } else {
                    Ok(())
                }
            },
        )?;
        // A record that cannot be read may be of another user of a shared partition.
        let device = &record.devices[0];
        let others = self
            .records
            .values()
            .any(|other| other.uid != *uid && other.devices[0].target == device.target);
        let shared = device.sharing.is_shared() && device.own_place().is_some();
        let waits = shared && !self.torn.is_empty() && !others;
        if waits || stuck.iter().any(Change::is_removal) {
            return self.write_record(undoing(record));
        }
        self.remove_record(uid)
    }
}
