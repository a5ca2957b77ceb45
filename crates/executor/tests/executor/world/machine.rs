//! The machine itself: what it is made of, and how a call of a process that may die changes it.

use super::*;

/// A small deterministic source of chance.
#[derive(Debug, Clone)]
pub(crate) struct Chance(pub u64);

impl Chance {
    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((z ^ (z >> 31)) % u64::try_from(n).unwrap()).unwrap()
    }
    pub(crate) fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

/// Where in a call the process dies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Moment {
    Before,
    During,
    After,
}

/// The process dies at the call `in_calls` calls from now.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Crash {
    pub in_calls: usize,
    pub moment: Moment,
}

#[derive(Debug, Clone, Default)]
pub(super) struct File {
    /// Content that processes see.
    pub(super) seen: Option<(Vec<u8>, u64)>,
    /// Content that a loss of power leaves.
    pub(super) synced: Option<Vec<u8>>,
}

/// Fault of the next hardware call.
#[derive(Debug, Clone, Copy)]
pub(crate) enum HardwareFault {
    Refuses,
    /// Does its work and answers with an error all the same.
    Lies,
    /// Times out; the driver finishes (or drops) it after a while.
    Late {
        after: Duration,
        succeeds: bool,
    },
}

#[expect(clippy::struct_excessive_bools, reason = "faults that tests switch on")]
pub(crate) struct Machine {
    pub now: Duration,
    pub boot: u32,
    pub chance: Chance,
    pub(super) disk: BTreeMap<(Folder, String), File>,
    pub writes: u64,
    pub cdi: BTreeMap<String, Vec<u8>>,
    /// By claim and request.
    pub metadata: BTreeMap<(ClaimUid, String), Vec<u8>>,
    pub hardware_fault: Option<HardwareFault>,
    pub processes: BTreeMap<GpuUuid, Vec<ProcessOnGpu>>,
    pub process_error: Option<GpuErrorCode>,
    /// Failure of the next list of processes alone.
    pub odd_processes: Option<GpuErrorCode>,
    /// Claims in the API that are allocated here.
    pub api: BTreeMap<ClaimUid, Claim>,
    /// Numbers in the names of published devices.
    pub published: Vec<(u32, GpuUuid)>,
    /// Claims that a prepare was asked for and that are not among these.
    pub asked: BTreeMap<ClaimUid, Claim>,
    pub api_down: bool,
    /// Questions to the API about a claim so far.
    pub look_ups: usize,
    /// Time that each question to the API takes.
    pub api_takes: Option<Duration>,
    pub inventory: Option<Arc<Inventory>>,
    pub edits_missing: bool,
    /// Writes into the store or the CDI folder fail so.
    pub write_error: Option<(Place, io::ErrorKind)>,
    /// The disk is full from the next write of a CDI file on.
    pub fills_up: bool,
    pub(super) crash: Option<Crash>,
    /// The process dies at the next call that begins so.
    pub crash_at: Option<(&'static str, Moment)>,
    /// The executor's process is dead: no call of it has any effect.
    pub dead: bool,
    pub calls: usize,
    /// Changes of the store that were synced: each costs the disk a file and a folder, or a folder.
    pub syncs: usize,
    pub log: Vec<String>,
    /// Locks that are held, of whichever process.
    pub locked: BTreeSet<LockName>,
    /// Number of times that the policies have let MIG modes change; the first start does.
    pub grants: usize,
    /// Its GPUs and their driver.
    pub sim: SimNode,
    /// Another driver in its place, with GPUs of its own.
    pub driver: Option<Arc<dyn GpuDriver>>,
    /// The node's policies let MIG modes change, from the first start on.
    pub is_cut: bool,
    /// Calls of their driver that have timed out and are still at work.
    pub mig_late: Vec<MigLate>,
    /// Number of answers of an operation after which the late calls return.
    pub lands_after: Option<(GpuOp, usize)>,
    /// Time slices that are not the default; `None`: cards that have none that can be set.
    pub slices: Option<BTreeMap<GpuUuid, TimeSlice>>,
    /// Fault of the next change of a time slice.
    pub slice_fault: Option<HardwareFault>,
    /// MPS servers of whole GPUs that run.
    pub mps: BTreeMap<GpuUuid, MpsServer>,
    /// MPS servers of partitions that run, with the partition that each sees.
    pub mps_in: BTreeMap<GpuTarget, (MpsServer, MigUuid)>,
    /// Namespaces of those servers.
    pub namespaces: BTreeMap<GpuUuid, BTreeMap<MpsNamespaceName, MpsNamespace>>,
    /// Servers among them that are wedged.
    pub wedged: BTreeMap<GpuTarget, Unwell>,
    /// Questions to the supervisor about its servers so far.
    pub mps_looks: usize,
    /// True while the supervisor does not answer.
    pub no_supervisor: bool,
    /// Fault of the next change of a server or of a namespace.
    pub mps_fault: Option<HardwareFault>,
    /// Pods of the processes on them.
    pub pods: BTreeMap<u32, String>,
    /// The folder that drivers share, and the name of this one.
    pub among: Option<(PathBuf, &'static str)>,
    /// Files of the store whose content the disk does not give.
    pub bad_blocks: BTreeSet<(Folder, String)>,
    /// Nor does it give what is written in their place, with this error. `None`: only they are bad,
    /// with EIO.
    pub bad_disk: Option<i32>,
    /// Locks that another process has.
    pub busy: BTreeSet<LockName>,
}

/// A call of the driver that comes back late.
pub(crate) struct MigLate {
    pub at: Duration,
    pub succeeds: bool,
    pub gpu: GpuUuid,
    pub op: GpuOp,
    pub what: Box<dyn FnOnce(&SimNode) + Send>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    Store,
    Cdi,
    Metadata,
}

impl Machine {
    /// Counts a call with an effect and says how far it gets. `Err`: the caller hears nothing any
    /// more.
    pub(super) fn enter(&mut self, what: &str) -> Result<Option<Moment>, Dead> {
        if self.dead {
            return Err(Dead);
        }
        self.calls += 1;
        if let Some((at, moment)) = self.crash_at
            && what.starts_with(at)
        {
            self.crash_at = None;
            self.dead = true;
            self.log.push(format!("    dies {moment:?} {what}"));
            return Ok(Some(moment));
        }
        if let Some(crash) = &mut self.crash {
            if crash.in_calls == 0 {
                let moment = crash.moment;
                self.crash = None;
                self.dead = true;
                self.log.push(format!("    dies {moment:?} {what}"));
                return Ok(Some(moment));
            }
            crash.in_calls -= 1;
        }
        Ok(None)
    }

    /// Every call has time: a limit that is past would be an error before anything was tried.
    pub(super) fn has_time(&self, until: Duration, what: &str) {
        assert!(until > self.now, "{what}, with no time left for it");
    }

    /// Every change is made under the locks that keep others from it.
    pub(crate) fn needs(&self, lock: &LockName, what: &str) {
        assert!(
            self.locked.contains(lock),
            "{what} without the lock of {lock}; held: {:?}",
            self.locked
        );
    }

    pub(crate) fn needs_for_file(&self, folder: Folder, name: &str, new: Option<&[u8]>) {
        let stem = name.strip_suffix(".json").unwrap_or(name);
        match folder {
            Folder::Claims => self.needs_for_record(name, new),
            Folder::Gpus => self.needs(
                &LockName::Gpu(stem.parse().unwrap()),
                "a GPU's file is changed",
            ),
            Folder::Tombstones => {
                self.needs(
                    &LockName::Claim(stem.parse().unwrap()),
                    "a tombstone is changed",
                );
            }
            Folder::Node => self.needs(&LockName::Ordinals, "numbers are changed"),
            Folder::Corrupt => {}
        }
    }

    pub(crate) fn needs_for_cdi(&self, name: &str) {
        let driver = self.among.as_ref().map_or(DRIVER, |(_, name)| *name);
        let claim = divvy_claims::claim_of_cdi_file(driver, name).unwrap();
        self.needs(&LockName::Claim(claim), "a CDI file is changed");
    }

    /// A record is changed under its claim's lock; what it holds, under the locks of its GPUs too.
    pub(crate) fn needs_for_record(&self, name: &str, new: Option<&[u8]>) {
        let Some(Ok(uid)) = name.strip_suffix(".json").map(str::parse::<ClaimUid>) else {
            return;
        };
        self.needs(&LockName::Claim(uid), "a record is changed");
        let decode = |bytes: Option<&[u8]>| match bytes.map(Record::decode) {
            Some(Stored::Fine(record)) => Some(record),
            _ => None,
        };
        let old = decode(self.file(Folder::Claims, name).as_deref());
        let new = decode(new);
        if let (Some(old), Some(new)) = (&old, &new)
            && (Record {
                pods: old.pods.clone(),
                ..new.clone()
            }) == *old
        {
            return;
        }
        for gpu in old.iter().chain(&new).flat_map(Record::gpus) {
            self.needs(&LockName::Gpu(gpu), "what a claim holds is changed");
        }
    }

    /// Runs a call that is cut in two at most: `first` is its effect that may be lost, `second`
    /// makes it last.
    pub(crate) fn call<R>(
        &mut self,
        what: &str,
        effect: impl FnOnce(&mut Self, bool) -> R,
    ) -> Result<R, Dead> {
        match self.enter(what)? {
            None => Ok(effect(self, true)),
            Some(Moment::Before) => Err(Dead),
            Some(Moment::During) => {
                effect(self, false);
                Err(Dead)
            }
            Some(Moment::After) => {
                effect(self, true);
                Err(Dead)
            }
        }
    }

    pub(crate) fn driver(&self) -> &dyn GpuDriver {
        self.driver.as_deref().unwrap_or(&self.sim)
    }

    pub(crate) fn land(&mut self) {
        let now = self.now;
        let (due, rest): (Vec<_>, _) = std::mem::take(&mut self.mig_late)
            .into_iter()
            .partition(|l| l.at <= now);
        self.mig_late = rest;
        for late in due.into_iter().filter(|late| late.succeeds) {
            (late.what)(&self.sim);
        }
    }

    pub(crate) fn file(&self, folder: Folder, name: &str) -> Option<Vec<u8>> {
        self.disk
            .get(&(folder, name.to_owned()))?
            .seen
            .as_ref()
            .map(|(bytes, _)| bytes.clone())
    }

    /// Returns what a loss of power would leave.
    pub(crate) fn synced(&self, folder: Folder, name: &str) -> Option<Vec<u8>> {
        self.disk.get(&(folder, name.to_owned()))?.synced.clone()
    }

    /// Writes a file behind the executor's back.
    pub(crate) fn put(&mut self, folder: Folder, name: &str, bytes: Option<&[u8]>) {
        self.writes += 1;
        let seen = bytes.map(|b| (b.to_vec(), self.writes));
        self.disk.insert(
            (folder, name.to_owned()),
            File {
                seen,
                synced: bytes.map(<[u8]>::to_vec),
            },
        );
    }

    pub(crate) fn files(&self, folder: Folder) -> BTreeMap<String, Vec<u8>> {
        let here = self.disk.iter().filter(|((f, _), _)| *f == folder);
        here.filter_map(|((_, name), file)| Some((name.clone(), file.seen.clone()?.0)))
            .collect()
    }

    pub(crate) fn records(&self) -> BTreeMap<ClaimUid, Stored<Record>> {
        let files = self.files(Folder::Claims).into_iter();
        files
            .map(|(name, bytes)| {
                (
                    name.strip_suffix(".json").unwrap().parse().unwrap(),
                    Record::decode(&bytes),
                )
            })
            .collect()
    }

    pub(super) fn change(
        &mut self,
        folder: Folder,
        name: &str,
        bytes: Option<&[u8]>,
        synced: bool,
    ) {
        self.writes += 1;
        self.syncs += usize::from(synced);
        // Another file, in other blocks.
        if self.bad_disk.is_none() {
            self.bad_blocks.remove(&(folder, name.to_owned()));
        }
        let serial = self.writes;
        let file = self.disk.entry((folder, name.to_owned())).or_default();
        file.seen = bytes.map(|b| (b.to_vec(), serial));
        if synced {
            file.synced = bytes.map(<[u8]>::to_vec);
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Dead;

impl From<Dead> for io::Error {
    fn from(_: Dead) -> Self {
        io::Error::other("the process is dead")
    }
}
