//! A story: a GPU, its file, the records, and what happens to them.

use super::*;

mod driver;
mod hardware;

use hardware::*;

const NAMES: [&str; 5] = ["a", "b", "c", "d", "w"];

pub(super) struct Story {
    chance: Chance,
    hardware: Hardware,
    /// The GPU's file; `None`: it is lost.
    file: Option<GpuState>,
    records: BTreeMap<ClaimUid, Record>,
    /// Records that cannot be read now.
    torn: BTreeSet<ClaimUid>,
    granted: Granted,
    /// The driver has MPS servers with namespaces.
    has_namespaces: bool,
    boot: u32,
    /// Looks at the GPU may be odd.
    odd: bool,
    fault: Option<Fault>,
    /// The process dies after so many effects.
    dies_in: Option<u64>,
    pub(super) log: Vec<String>,
    pub(super) changes: u64,
    pub(super) kinds: BTreeSet<&'static str>,
}

type Records = BTreeMap<ClaimUid, Arc<Stored<Record>>>;

impl Story {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            chance: Chance(seed),
            hardware: Hardware {
                mig: false,
                compute: ComputeMode::Default,
                slice: TimeSlice::Default,
                mps: BTreeMap::new(),
                namespaces: BTreeMap::new(),
                wedged: BTreeMap::new(),
                instances: BTreeMap::new(),
                made: 0,
                late: Vec::new(),
            },
            file: Some(GpuState::default()),
            records: BTreeMap::new(),
            torn: BTreeSet::new(),
            granted: Granted {
                may_change_mode: true,
                offers_partitions: true,
                share_time_slice: None,
                mps: MpsServer::equal(4, None),
                ..Granted::default()
            },
            has_namespaces: false,
            boot: 1,
            odd: seed.is_multiple_of(2),
            fault: None,
            dies_in: None,
            log: Vec::new(),
            changes: 0,
            kinds: BTreeSet::new(),
        }
    }

    fn say(&mut self, what: impl Into<String>) {
        self.log.push(what.into());
    }

    fn boot(&self) -> BootId {
        format!("boot-{}", self.boot).parse().unwrap()
    }

    fn gpu() -> GpuUuid {
        "GPU-12345678-1234-1234-1234-123456780001".parse().unwrap()
    }

    pub(super) fn run(&mut self) {
        if self.chance.one_in(4) {
            self.hardware.compute = ComputeMode::ExclusiveProcess;
        }
        if self.chance.one_in(2) {
            self.has_namespaces = true;
            self.granted.mps = Some(MpsServer::NAMESPACES);
        }
        let (mig, compute) = (self.hardware.mig, self.hardware.compute);
        for _ in 0..20 + self.chance.below(40) {
            self.event();
            self.restart_if_dead();
            self.check();
        }
        self.end(mig, compute);
    }

    fn event(&mut self) {
        let name = NAMES[usize::try_from(self.chance.below(5)).unwrap()];
        let uid: ClaimUid = name.parse().unwrap();
        match self.chance.below(29) {
            0..9 => {
                if !self.records.contains_key(&uid) {
                    self.prepare(&uid);
                } else if self.chance.one_in(2) {
                    self.prepare_again(&uid);
                }
            }
            9..13 => drop(self.let_go(&uid)),
            13 => {
                let fates = [Fault::Refuses, Fault::Lies, Fault::Late, Fault::Never];
                let fault = fates[usize::try_from(self.chance.below(4)).unwrap()];
                self.say(format!("the next call {fault:?}"));
                self.fault = Some(fault);
            }
            14 | 15 => {
                let effects = self.chance.below(12);
                self.say(format!("the process dies after {effects} effects"));
                self.dies_in = Some(effects);
            }
            16 => self.land(),
            17 => self.tidy(),
            18 => {
                let slices = [None, Some(TimeSlice::Long), Some(TimeSlice::Short)];
                self.granted = Granted {
                    may_change_mode: !self.chance.one_in(4),
                    offers_partitions: !self.chance.one_in(4),
                    share_time_slice: slices[usize::try_from(self.chance.below(3)).unwrap()],
                    mps: if self.has_namespaces {
                        Some(MpsServer::NAMESPACES)
                    } else {
                        MpsServer::equal(if self.chance.one_in(2) { 2 } else { 4 }, None)
                    },
                    restarts_wedged_mps: self.chance.one_in(2),
                    ..Granted::default()
                };
                self.say(format!("{:?}", self.granted));
            }
            19 if self.chance.one_in(3) => self.reboot(),
            20 => self.administrator(),
            21 => self.tear(&uid),
            22 if self.torn.is_empty() && self.hardware.late.is_empty() => {
                // Only a file that says nothing beyond the records can be lost without a trace.
                let known = self.file.as_ref().is_none_or(|state| {
                    let whole = |i: &Instance| matches!(i.life, Life::Whole(_));
                    let settings = state.mig.is_some() || state.compute.is_some();
                    // A record of an earlier boot says nothing of this one.
                    let boot = self.boot();
                    let said = |target: Target| {
                        let mut records = self.records.values();
                        records.any(|record| {
                            let device = &record.devices[0];
                            record.boot == boot && device.target == target && device.mps.is_some()
                        })
                    };
                    let mut servers = state.mps.iter();
                    let server = servers.all(|(target, noted)| noted.up && said(*target));
                    !settings
                        && server
                        && state.slice.is_none()
                        && state.instances.values().all(whole)
                });
                let strays = self.strays();
                if known && strays.is_empty() {
                    self.say("the GPU's file is lost");
                    self.file = Some(GpuState::default());
                }
            }
            23 if !self.hardware.mps.is_empty() => {
                let at = self.chance.below(self.hardware.mps.len() as u64);
                let mut targets = self.hardware.mps.keys().copied();
                let target = targets.nth(usize::try_from(at).unwrap()).unwrap();
                self.say(format!("the MPS daemon of {target:?} dies"));
                self.hardware.server_ends(target);
            }
            25 | 26 if !self.hardware.mps.is_empty() => {
                let at = self.chance.below(self.hardware.mps.len() as u64);
                let mut targets = self.hardware.mps.keys().copied();
                let target = targets.nth(usize::try_from(at).unwrap()).unwrap();
                let is_idle = self.chance.one_in(2);
                self.say(format!("the MPS server of {target:?} is wedged: {is_idle}"));
                self.hardware.wedged.insert(target, is_idle);
            }
            27 => {
                self.say("wedged MPS servers serve again");
                self.hardware.wedged.clear();
            }
            24 if !self.hardware.namespaces.is_empty() => {
                self.say("a namespace is lost");
                let _ = self.hardware.namespaces.pop_first();
            }
            _ => {}
        }
    }

    // ---- what claims want

    /// `a` and `b` want a half, `c` and `d` share one or the whole GPU, `w` wants the whole GPU. A
    /// claim that has something alone perhaps wants an MPS server of its own.
    fn device(&mut self, uid: &ClaimUid) -> RecordedDevice {
        let half = Target::Partition(place(if self.chance.one_in(2) { 0 } else { 4 }));
        let slice = [None, Some(TimeSlice::Medium)];
        let (target, sharing, time_slice) = match uid.as_str() {
            "a" | "b" => (half, Sharing::Exclusive, None),
            "c" | "d" if self.chance.one_in(2) => {
                let ways = [Sharing::TimeSliced, Sharing::Mps];
                let way = ways[usize::try_from(self.chance.below(2)).unwrap()];
                (half, way, None)
            }
            "c" | "d" if self.has_namespaces || self.chance.one_in(2) => {
                (Target::Gpu, Sharing::Mps, None)
            }
            "c" | "d" => (
                Target::Gpu,
                Sharing::TimeSliced,
                self.granted.share_time_slice,
            ),
            _ => {
                let slice = slice[usize::try_from(self.chance.below(2)).unwrap()];
                (Target::Gpu, Sharing::Exclusive, slice)
            }
        };
        let mut same = self.records.values().map(|record| &record.devices[0]);
        let kept = same.find_map(|d| d.mps.filter(|_| d.target == target));
        let noted = self.open().mps.get(&target).map(|noted| noted.server);
        let server = kept.map(|kept| noted.unwrap_or(kept.server));
        let slots = if self.chance.one_in(2) { 2 } else { 4 };
        let server = server.or(match target {
            Target::Gpu => self.granted.mps,
            Target::Partition(_) => MpsServer::equal(slots, Some(40_192)),
        });
        let server = server.unwrap();
        // Among them the limits that slots have.
        let own = [(None, None), (Some(25), None), (Some(50), Some(1 << 30))];
        let (cores, memory) = own[usize::try_from(self.chance.below(3)).unwrap()];
        let is_own = sharing == Sharing::Exclusive && time_slice.is_none();
        let is_own = is_own && self.chance.one_in(2);
        let has_namespaces = self.has_namespaces && target == Target::Gpu;
        let server = match sharing {
            Sharing::Mps => Some(server),
            _ if has_namespaces => is_own.then_some(MpsServer::NAMESPACES),
            _ => is_own.then(|| MpsServer::of_claim(cores, memory)),
        };
        let namespace = MpsNamespace {
            name: MpsNamespaceName::of(uid, &"gpu-0".parse().unwrap()),
            cores: cores.unwrap_or(10),
            memory_mib: memory.map(|bytes| bytes >> 20),
        };
        let of = |server: MpsServer| MpsSlot {
            server,
            priority: None,
            namespace: server.has_namespaces().then_some(namespace),
        };
        RecordedDevice {
            allocated: AllocatedDevice {
                request: "main".to_owned(),
                pool: "node".to_owned(),
                device: "gpu-0".parse().unwrap(),
                share_id: None,
                admin_access: false,
                consumed_capacity: BTreeMap::new(),
            },
            gpu: Self::gpu(),
            target,
            sharing,
            theirs: false,
            time_slice,
            share_memory: None,
            memory_cap: None,
            clears_caps: false,
            mps: server.map(of),
            extra_nodes: Vec::new(),
            given: None,
        }
    }

    fn prepare(&mut self, uid: &ClaimUid) {
        let device = self.device(uid);
        let hold = device.hold(uid);
        let in_the_way = self.records.values().any(|other| {
            let undoing = matches!(&other.phase, Phase::Leaving(leaving) if leaving.undoing);
            other.holds().any(|theirs| {
                theirs.conflicts(&hold) || undoing && theirs.target.overlaps(hold.target)
            })
        });
        let noted = self.open();
        let stray = self
            .strays()
            .iter()
            .any(|place| Target::Partition(*place).overlaps(hold.target));
        let fenced = noted.fences(&self.boot()).next().is_some();
        let may = self.may_set_mig(device.target.place().is_some());
        let wrong = self.hardware.mig != device.target.place().is_some() && !may;
        let mut busy = in_the_way || stray || fenced || wrong;
        busy |= !self.torn.is_empty() || !self.hardware.late.is_empty();
        busy |= self.is_gone_beside(uid, device.target);
        if !busy {
            self.say(format!(
                "prepare {uid} {:?} {:?} {:?}",
                device.target, device.sharing, device.mps
            ));
            self.hold(uid, device, None);
        }
    }

    /// Carries a claim out again whose partition is gone, as after a boot or while it lingers.
    fn prepare_again(&mut self, uid: &ClaimUid) {
        let record = self.records[uid].clone();
        let Some(place) = record.devices[0].target.place() else {
            return;
        };
        let living = self.hardware.living(place).and_then(|l| l.as_partition());
        let gone = record.phase == Phase::Prepared && living != record.devices[0].given;
        let free = self.torn.is_empty() && self.hardware.late.is_empty();
        let free = free && !self.is_gone_beside(uid, record.devices[0].target);
        if gone && free && record.boot == self.boot() {
            self.say(format!("prepare {uid} again"));
            self.hold(uid, record.devices[0].clone(), Some(&record));
        }
    }

    /// Returns whether a partition would be made beside one that is gone under another claim, which
    /// `decide` refuses.
    fn is_gone_beside(&self, uid: &ClaimUid, target: Target) -> bool {
        let living = |place| {
            self.hardware
                .living(place)
                .and_then(|one| one.as_partition())
        };
        if target.place().is_none_or(|place| living(place).is_some()) {
            return false;
        }
        let boot = self.boot();
        let mut others = self.records.values().filter(|record| {
            let begun = record.phase == Phase::Preparing;
            record.uid != *uid && record.boot == boot && !begun && !is_undone(record)
        });
        others.any(|record| {
            let device = &record.devices[0];
            let is_gone = |place| living(place) != device.given;
            device.own_place().is_some_and(is_gone)
        })
    }

    fn may_set_mig(&self, on: bool) -> bool {
        let noted = self.file.as_ref().and_then(|state| state.mig);
        self.granted.may_change_mode || noted.is_some_and(|mig| mig.ours != on)
    }

    fn tidy(&mut self) {
        self.say("a round");
        self.restore();
        let brought = self.bring(Caller::Round, None, &mut |_, _| Ok(()));
        let is_odd = self.log.iter().rev().take_while(|line| *line != "a round");
        let is_odd = is_odd.filter(|line| line.contains("an odd look")).count() > 0;
        let is_whole = brought.is_ok_and(|(_, stuck)| stuck.is_empty());
        if is_whole && self.hardware.late.is_empty() && !is_odd {
            self.check_servers();
            self.check_namespaces();
        }
    }

    /// After a round each claim of this boot has its namespace, and no other is left. The server of
    /// claims that are being undone is theirs to stop.
    fn check_namespaces(&self) {
        let boot = self.boot();
        let fine = self.records.values().filter(|record| {
            record.boot == boot && needs_mps(record) && !self.torn.contains(&record.uid)
        });
        let wanted = fine.filter_map(|record| record.devices[0].mps?.namespace);
        let wanted: BTreeMap<_, _> = wanted.map(|one| (one.name, one)).collect();
        let mut found = self.hardware.namespaces.clone();
        if wanted.is_empty() || !self.torn.is_empty() {
            found.retain(|name, _| wanted.contains_key(name));
        }
        assert_eq!(found, wanted);
    }

    /// After a round each target has the server that its users need, and no other runs.
    fn check_servers(&self) {
        let boot = self.boot();
        // Users of an earlier boot and those that are undone are served by their own calls.
        let may_use: BTreeSet<Target> = self
            .records
            .values()
            .filter(|record| record.devices[0].mps.is_some())
            .map(|record| record.devices[0].target)
            .collect();
        for target in self.hardware.mps.keys() {
            let is_known = may_use.contains(target) || !self.torn.is_empty();
            assert!(is_known, "an orphan: the server of {target:?}");
        }
        for record in self.records.values() {
            let device = &record.devices[0];
            let is_now = record.boot == boot && needs_mps(record);
            let Some(slot) = device
                .mps
                .filter(|_| is_now && !self.torn.contains(&record.uid))
            else {
                continue;
            };
            // A partition that an administrator has removed has no server.
            let living = device
                .target
                .place()
                .map(|place| self.hardware.living(place));
            let living = living.map(|living| living.and_then(|living| living.as_partition()));
            if living
                .as_ref()
                .is_some_and(|living| *living != device.given)
            {
                continue;
            }
            let runs = self.hardware.mps.get(&device.target);
            let Some((server, partition)) = runs else {
                panic!("no MPS server for {record:?}");
            };
            let given = device.given.as_ref().map(|made| made.uuid.to_string());
            assert_eq!(*partition, given, "the server of another partition");
            let wedged = self.hardware.wedged.get(&device.target).copied();
            let noted = self.open().mps[&device.target].wedged.is_some();
            // A start whose outcome is not known is asked for again, and its note says so in the
            // next round.
            assert!(wedged.is_some() || !noted, "a note of a server that serves");
            let may_stay = |is_idle: bool| !is_idle && !self.granted.restarts_wedged_mps;
            assert!(wedged.is_none_or(may_stay), "a wedged server stays");
            if device.sharing == Sharing::Exclusive && self.torn.is_empty() {
                assert_eq!(*server, slot.server, "another server");
            }
        }
    }

    fn land(&mut self) {
        self.say("late calls land");
        for call in std::mem::take(&mut self.hardware.late) {
            drop(self.hardware.run(&call));
        }
    }

    fn restart_if_dead(&mut self) {
        while self.log.last().is_some_and(|last| last == "    dies") {
            self.say("restart");
            if self.chance.one_in(2) {
                self.land();
            }
            let unfinished: Vec<_> = self
                .records
                .values()
                .filter(|record| record.phase != Phase::Prepared)
                .map(|record| record.uid.clone())
                .collect();
            for uid in unfinished {
                if matches!(self.let_go(&uid), Err(Failed::Died)) {
                    break;
                }
            }
            if self.log.last().is_some_and(|last| last != "    dies") {
                self.restore();
            }
        }
    }

    fn reboot(&mut self) {
        self.say("reboot");
        self.boot += 1;
        self.hardware.mig = false;
        self.hardware.compute = ComputeMode::Default;
        self.hardware.slice = TimeSlice::Default;
        self.hardware.instances.clear();
        self.hardware.mps.clear();
        self.hardware.wedged.clear();
        self.hardware.namespaces.clear();
        self.hardware.late.clear();
        self.torn.clear();
        let unfinished = |record: &Record| record.phase != Phase::Prepared;
        let unfinished: Vec<_> = self.records.values().filter(|r| unfinished(r)).collect();
        for uid in unfinished
            .into_iter()
            .map(|r| r.uid.clone())
            .collect::<Vec<_>>()
        {
            drop(self.let_go(&uid));
        }
        self.restore();
    }

    /// Carries prepared claims of an earlier boot out again; a record goes on holding meanwhile.
    fn restore(&mut self) {
        let boot = self.boot();
        let earlier: Vec<_> = self
            .records
            .values()
            .filter(|record| record.boot != boot && record.phase == Phase::Prepared)
            .cloned()
            .collect();
        for record in earlier {
            let on = record.devices[0].target.place().is_some();
            let free = self.torn.is_empty() && self.hardware.late.is_empty();
            let beside = self.is_gone_beside(&record.uid, record.devices[0].target);
            if !free || beside || (self.hardware.mig != on && !self.may_set_mig(on)) {
                continue;
            }
            self.say(format!("restore {}", record.uid));
            let device = RecordedDevice {
                given: None,
                ..record.devices[0].clone()
            };
            if matches!(
                self.try_hold(&record.uid, device, Some(&record)),
                Err(Failed::Died)
            ) {
                return;
            }
        }
    }

    /// An administrator makes an instance beside ours, removes theirs, or removes one of ours.
    fn administrator(&mut self) {
        if !self.hardware.late.is_empty() {
            return;
        }
        let at = place(if self.chance.one_in(2) { 0 } else { 4 });
        let begun = self
            .open()
            .instances
            .get(&at)
            .is_some_and(|i| i.life == Life::Begun || i.doubt.is_some());
        match self.hardware.instances.get(&at).cloned() {
            Some(_) if self.chance.one_in(2) => {
                self.say(format!("the administrator removes what is at {at}"));
                self.hardware.instances.remove(&at);
            }
            None if self.hardware.mig && !begun => {
                self.hardware.made += 1;
                let real = Real {
                    gi: self.hardware.free_id(),
                    uuid: Some(format!("MIG-{}", self.hardware.made)),
                    ours: false,
                };
                self.say(format!("the administrator makes {real:?} at {at}"));
                self.hardware.instances.insert(at, real);
            }
            _ => {}
        }
    }

    /// A record cannot be read for a while.
    fn tear(&mut self, uid: &ClaimUid) {
        if self.torn.is_empty() {
            if self
                .records
                .get(uid)
                .is_some_and(|r| r.phase == Phase::Prepared)
            {
                self.say(format!("the record of {uid} is torn"));
                self.torn.insert(uid.clone());
            }
        } else {
            self.say("torn records are made again");
            self.torn.clear();
        }
    }

    /// True after every event.
    fn check(&self) {
        let state = self.open();
        // Whatever of ours lives is noted, or begun.
        for (place, real) in self.hardware.instances.iter().filter(|(_, real)| real.ours) {
            let living = self.hardware.living(*place).unwrap();
            let torn = self
                .torn
                .iter()
                .any(|uid| self.records[uid].devices[0].own_place() == Some(*place));
            assert!(
                torn || state.accounts_for(&self.boot(), &living.instance),
                "{real:?} at {place} is leaked; noted: {state:?}"
            );
        }
        // A server that runs is noted, or its claim's record says so.
        for target in self.hardware.mps.keys() {
            let mut torn = self.torn.iter().map(|uid| &self.records[uid].devices[0]);
            let torn = torn.any(|device| device.target == *target && device.mps.is_some());
            assert!(
                state.mps.contains_key(target) || torn,
                "the MPS server of {target:?} is leaked; noted: {state:?}"
            );
        }
        // Settings that we changed are noted.
        if self.hardware.late.is_empty() && self.hardware.slice != TimeSlice::Default {
            assert!(state.slice.is_some(), "the slice is not noted");
        }
        let holds: Vec<_> = self.records.values().flat_map(Record::holds).collect();
        for (n, one) in holds.iter().enumerate() {
            for other in &holds[n + 1..] {
                assert!(!one.conflicts(other), "{one:?} and {other:?}");
            }
        }
    }

    /// All claims end, all calls land: nothing of ours is left, every setting is as it was found.
    fn end(&mut self, mig: bool, compute: ComputeMode) {
        self.say("--- the end");
        (self.dies_in, self.fault, self.odd) = (None, None, false);
        self.torn.clear();
        self.land();
        for _ in 0..3 {
            for uid in self.records.keys().cloned().collect::<Vec<_>>() {
                drop(self.let_go(&uid));
            }
        }
        self.hardware.instances.retain(|_, real| real.ours);
        self.granted = Granted::default();
        self.tidy();
        self.tidy();
        assert!(self.records.is_empty(), "{:?}", self.records);
        assert!(self.hardware.instances.is_empty(), "{:?}", self.hardware);
        assert_eq!(self.hardware.slice, TimeSlice::Default);
        assert!(self.hardware.mps.is_empty(), "{:?}", self.hardware);
        assert!(self.hardware.namespaces.is_empty(), "{:?}", self.hardware);
        let compute = if self.boot == 1 {
            compute
        } else {
            ComputeMode::Default
        };
        assert_eq!(self.hardware.compute, compute);
        let state = self.file.clone().unwrap().in_boot(&self.boot());
        assert!(
            state.instances.is_empty() && state.mps.is_empty(),
            "{state:?}"
        );
        assert!(
            state.slice.is_none() && state.compute.is_none(),
            "{state:?}"
        );
        assert!(state.mig.is_none_or(|note| !note.ours), "{state:?}");
        // An administrator may have turned it on meanwhile, a reboot off.
        if self.boot == 1 {
            assert_eq!(self.hardware.mig, mig);
        }
    }
}

/// Returns whether a claim needs the MPS server: it has a slot, and is not being undone.
fn needs_mps(record: &Record) -> bool {
    !is_undone(record) && record.devices[0].mps.is_some()
}

fn is_undone(record: &Record) -> bool {
    matches!(&record.phase, Phase::Leaving(leaving) if leaving.undoing)
}

fn undoing(record: Record) -> Record {
    Record {
        phase: Phase::Leaving(Leaving {
            reason: "its partitions are being removed".to_owned(),
            undoing: true,
        }),
        ..record
    }
}
