//! The search: depth first, first fit, as the scheduler does it.
//!
//! Within a request only combinations are tried (the next device comes after the last one), across requests all
//! orders. The scheduler's search is exponential when a late request fails; here a state that failed is not
//! entered again, and devices that no request can tell apart count as the same. That changes the time, never the
//! result.

mod memory;
mod taints;

use k8s_openapi::api::resource::v1::DeviceTaint;

use self::memory::Memory;
use super::request::{Candidate, Choice, Mode, Prepared, Request};
use super::{AllocError, MAX_RESULTS, SelectorError};
use crate::allocated::Holder;
use crate::cel;
use crate::nodes;

/// Dead ends after which the search begins to remember them: remembering costs more than a few of them. In unit
/// tests it begins at once, so that small cases go through it.
const PATIENCE: u64 = if cfg!(test) { 0 } else { 64 };

/// What a request thinks of a device, whoever holds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Verdict {
    Selected,
    /// This selector (its place in the request's list) is false.
    Rejected(usize),
    /// The device's own node selection excludes the node.
    NotOnNode,
    /// It uses something that the scheduler has switched off.
    FeatureOff,
}

/// Why a device cannot be given to a request now.
#[derive(Debug, Clone)]
pub(crate) enum Refusal<'a> {
    Taken,
    Verdict(Verdict),
    Tainted(&'a DeviceTaint),
}

/// A device that was picked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pick {
    pub(crate) candidate: usize,
    /// Number of the request in its claim, and the alternative of it.
    pub(crate) request: usize,
    pub(crate) alternative: usize,
}

/// How a branch of the search ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Fits,
    No,
    /// The claim would get more devices than it can have.
    TooMany,
}

/// A place in the search: the next device to find.
#[derive(Debug, Clone, Copy)]
struct At {
    claim: usize,
    request: usize,
    alternative: Option<usize>,
    /// How many devices the request has, and the first candidate not yet tried for it.
    found: usize,
    start: usize,
}

impl At {
    fn request(claim: usize, request: usize) -> Self {
        Self { claim, request, alternative: None, found: 0, start: 0 }
    }
}

/// A search and its state.
pub(crate) struct Search<'s, 'a> {
    prepared: &'s Prepared<'a>,
    /// By request id and candidate; filled when first asked.
    verdicts: Vec<Vec<Option<Verdict>>>,
    /// By request id, for requests of mode All: every device they ask for.
    all: Vec<Vec<usize>>,
    /// By candidate: the claims of this call that have it. More than one only with admin access.
    taking: Vec<Vec<usize>>,
    /// By claim, in order.
    pub(crate) picks: Vec<Vec<Pick>>,
    /// By claim and request: the alternative that was taken.
    pub(crate) chosen: Vec<Vec<usize>>,
    pub(crate) steps: u64,
    /// Whether a branch ended because a claim would have got too many devices.
    pub(crate) limited: bool,
    dead_ends: u64,
    memory: Option<Memory>,
}

impl<'s, 'a> Search<'s, 'a> {
    pub(crate) fn new(prepared: &'s Prepared<'a>) -> Self {
        Self {
            prepared,
            verdicts: vec![vec![None; prepared.candidates.len()]; prepared.requests],
            all: vec![Vec::new(); prepared.requests],
            taking: vec![Vec::new(); prepared.candidates.len()],
            picks: vec![Vec::new(); prepared.claims.len()],
            chosen: prepared.claims.iter().map(|c| vec![0; c.requests.len()]).collect(),
            steps: 0,
            limited: false,
            dead_ends: 0,
            memory: None,
        }
    }

    /// Finds the devices of every request that asks for all.
    pub(crate) fn collect_all(&mut self) -> Result<(), AllocError> {
        let prepared = self.prepared;
        for claim in &prepared.claims {
            let mut fewest = 0_usize;
            for choice in &claim.requests {
                for request in &choice.alternatives {
                    if request.mode == Mode::All {
                        self.collect(request, Holder::of(claim.object))?;
                    }
                }
                let counts = choice.alternatives.iter().map(|a| self.wanted(a));
                fewest = fewest.saturating_add(counts.min().unwrap_or(0));
            }
            if fewest > MAX_RESULTS {
                return Err(AllocError::TooManyDevices { claim: Holder::of(claim.object), wanted: fewest });
            }
        }
        Ok(())
    }

    fn collect(&mut self, request: &Request<'a>, claim: Holder) -> Result<(), AllocError> {
        if let Some((pool, state)) = self.prepared.partial.clone() {
            return Err(AllocError::AllFromPartialPool { claim, request: request.name.clone(), pool, state });
        }
        let mut all = Vec::new();
        for index in 0..self.prepared.candidates.len() {
            if self.verdict(request, index)? == Verdict::Selected {
                all.push(index);
            }
        }
        if let Some(slot) = self.all.get_mut(request.id) {
            *slot = all;
        }
        Ok(())
    }

    /// How many devices a request takes.
    pub(crate) fn wanted(&self, request: &Request<'_>) -> usize {
        match request.mode {
            Mode::Exact(count) => count,
            Mode::All => self.all.get(request.id).map_or(0, Vec::len),
        }
    }

    /// Searches; afterwards the picks are the answer.
    pub(crate) fn run(&mut self) -> Result<bool, AllocError> {
        Ok(self.one(At::request(0, 0))? == Step::Fits)
    }

    fn one(&mut self, at: At) -> Result<Step, AllocError> {
        self.steps += 1;
        let prepared = self.prepared;
        let Some(claim) = prepared.claims.get(at.claim) else { return Ok(Step::Fits) };
        let Some(choice) = claim.requests.get(at.request) else {
            // A limit is a claim's own: what comes after it only sees a failure.
            return Ok(match self.one(At::request(at.claim + 1, 0))? {
                Step::Fits => Step::Fits,
                Step::No | Step::TooMany => Step::No,
            });
        };
        let alternative = match at.alternative {
            Some(alternative) => alternative,
            None if choice.prioritized => return self.first_available(at, choice),
            None => 0,
        };
        let Some(request) = choice.alternatives.get(alternative) else { return Ok(Step::No) };
        let wanted = self.wanted(request);
        if request.mode == Mode::All && wanted == 0 {
            return Ok(Step::No);
        }
        if at.found == wanted {
            return self.one(At::request(at.claim, at.request + 1));
        }
        let results = self.picks.get(at.claim).map_or(0, Vec::len);
        if results + wanted - at.found > MAX_RESULTS {
            self.limited = true;
            return Ok(Step::TooMany);
        }
        let at = At { alternative: Some(alternative), ..at };
        let key = self.memory.as_ref().map(|memory| self.key(memory, at, alternative, results));
        if let (Some(key), Some(memory)) = (&key, &self.memory)
            && memory.failed.contains(key)
        {
            return Ok(Step::No);
        }
        let step = match request.mode {
            Mode::All => self.next_of_all(at, alternative, request)?,
            Mode::Exact(_) => self.next_exact(at, alternative, request)?,
        };
        if step == Step::No {
            self.dead_ends += 1;
            if let (Some(key), Some(memory)) = (key, &mut self.memory) {
                memory.failed.insert(key);
            } else if self.dead_ends > PATIENCE && self.memory.is_none() {
                self.memory = Some(self.kinds());
            }
        }
        Ok(step)
    }

    fn first_available(&mut self, at: At, choice: &Choice<'a>) -> Result<Step, AllocError> {
        let mut all_too_many = true;
        for alternative in 0..choice.alternatives.len() {
            match self.one(At { alternative: Some(alternative), ..at })? {
                Step::Fits => {
                    if let Some(slot) = self.chosen.get_mut(at.claim).and_then(|c| c.get_mut(at.request)) {
                        *slot = alternative;
                    }
                    return Ok(Step::Fits);
                }
                Step::TooMany => {}
                Step::No => all_too_many = false,
            }
        }
        Ok(if all_too_many { Step::TooMany } else { Step::No })
    }

    fn next_of_all(&mut self, at: At, alternative: usize, request: &Request<'a>) -> Result<Step, AllocError> {
        let Some(candidate) = self.all.get(request.id).and_then(|all| all.get(at.found)).copied() else {
            return Ok(Step::No);
        };
        if self.refusal(request, candidate)?.is_some() {
            return Ok(Step::No);
        }
        self.with(at, alternative, candidate)
    }

    fn next_exact(&mut self, at: At, alternative: usize, request: &Request<'a>) -> Result<Step, AllocError> {
        for candidate in at.start..self.prepared.candidates.len() {
            if self.refusal(request, candidate)?.is_some() {
                continue;
            }
            match self.with(at, alternative, candidate)? {
                Step::No => {}
                done => return Ok(done),
            }
        }
        Ok(Step::No)
    }

    /// Goes on with the candidate picked, and takes the pick back unless that succeeds.
    fn with(&mut self, at: At, alternative: usize, candidate: usize) -> Result<Step, AllocError> {
        let (Some(claims), Some(picks)) = (self.taking.get_mut(candidate), self.picks.get_mut(at.claim))
        else {
            return Ok(Step::No);
        };
        claims.push(at.claim);
        picks.push(Pick { candidate, request: at.request, alternative });
        let step = self.one(At { found: at.found + 1, start: candidate + 1, ..at })?;
        if step != Step::Fits {
            if let Some(claims) = self.taking.get_mut(candidate) {
                claims.pop();
            }
            if let Some(picks) = self.picks.get_mut(at.claim) {
                picks.pop();
            }
        }
        Ok(step)
    }

    /// Why the candidate cannot be given to the request now; `None` when it can.
    pub(crate) fn refusal(
        &mut self,
        request: &Request<'a>,
        index: usize,
    ) -> Result<Option<Refusal<'a>>, AllocError> {
        let prepared = self.prepared;
        let Some(candidate) = prepared.candidates.get(index) else { return Ok(Some(Refusal::Taken)) };
        let taking = self.taking.get(index).map(Vec::as_slice).unwrap_or_default();
        let taken = if request.admin {
            taking.contains(&request.claim)
        } else {
            !taking.is_empty() || self.is_taken(candidate)
        };
        if taken {
            return Ok(Some(Refusal::Taken));
        }
        let verdict = self.verdict(request, index)?;
        if verdict != Verdict::Selected {
            return Ok(Some(Refusal::Verdict(verdict)));
        }
        if let Some(taint) = self.untolerated(request, candidate) {
            return Ok(Some(Refusal::Tainted(taint)));
        }
        // Everything else would be an allocation that the scheduler might not make.
        let device = candidate.device;
        let unsupported = if device.consumes_counters.as_ref().is_some_and(|c| !c.is_empty()) {
            Some("consumesCounters (a partitionable device)")
        } else if device.allow_multiple_allocations == Some(true) && prepared.features.consumable_capacity {
            Some("allowMultipleAllocations (a shared device)")
        } else {
            None
        };
        match unsupported {
            None => Ok(None),
            Some(what) => {
                Err(AllocError::Unsupported { subject: format!("device {}", candidate.id()), what })
            }
        }
    }

    /// Whether an existing claim has the device.
    pub(crate) fn is_taken(&self, candidate: &Candidate<'_>) -> bool {
        let allocated = self.prepared.inputs.allocated;
        let shares_count = !self.prepared.features.consumable_capacity;
        allocated.is_taken(candidate.driver, candidate.pool, &candidate.device.name, shares_count)
    }

    /// The first taint that keeps the request away.
    fn untolerated(&self, request: &Request<'a>, candidate: &Candidate<'a>) -> Option<&'a DeviceTaint> {
        if !self.prepared.features.device_taints {
            return None;
        }
        let tolerations = request.tolerations.map(Vec::as_slice).unwrap_or_default();
        taints::untolerated(candidate.device.taints.as_deref()?, tolerations)
    }

    /// What the request thinks of the candidate; its selectors are evaluated once.
    pub(crate) fn verdict(&mut self, request: &Request<'a>, index: usize) -> Result<Verdict, AllocError> {
        let known = self.verdicts.get(request.id).and_then(|v| v.get(index)).copied().flatten();
        if let Some(verdict) = known {
            return Ok(verdict);
        }
        let verdict = self.judge(request, index)?;
        if let Some(slot) = self.verdicts.get_mut(request.id).and_then(|v| v.get_mut(index)) {
            *slot = Some(verdict);
        }
        Ok(verdict)
    }

    fn judge(&self, request: &Request<'a>, index: usize) -> Result<Verdict, AllocError> {
        let prepared = self.prepared;
        let Some(candidate) = prepared.candidates.get(index) else { return Ok(Verdict::NotOnNode) };
        let (device, features) = (candidate.device, prepared.features);
        let non_empty = |conditions: &Option<Vec<String>>| conditions.as_ref().is_some_and(|c| !c.is_empty());
        let binding = non_empty(&device.binding_conditions) && !features.device_binding;
        let counters = device.consumes_counters.as_ref().is_some_and(|c| !c.is_empty());
        if binding || (counters && !features.partitionable_devices) {
            return Ok(Verdict::FeatureOff);
        }
        for (place, selector) in request.selectors.iter().enumerate() {
            let Some(program) = selector.program() else { continue };
            match cel::eval(program, candidate.driver, device) {
                Ok(true) => {}
                Ok(false) => return Ok(Verdict::Rejected(place)),
                Err(source) => {
                    return Err(AllocError::Selector(Box::new(SelectorError {
                        origin: selector.origin.to_string(),
                        index: selector.index,
                        expression: program.source().to_owned(),
                        device: Some(candidate.id()),
                        source,
                    })));
                }
            }
        }
        let per_device = candidate.slice.spec.per_device_node_selection == Some(true);
        if per_device && !nodes::device_is_for(device, prepared.inputs.node)? {
            return Ok(Verdict::NotOnNode);
        }
        Ok(Verdict::Selected)
    }
}
