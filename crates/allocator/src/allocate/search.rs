//! The search: depth first, first fit, as the scheduler does it.
//!
//! Within a request only combinations are tried (the next device comes after the last one), across
//! requests all orders. This is exponential when a late request fails, in the scheduler as here.
//! Only what certainly fails is left out, and only after a first failure, so that errors on the way
//! are the scheduler's too.

mod count;
mod judge;
mod taints;

use k8s_openapi::api::resource::v1::ResourceClaim;

use self::judge::Demands;
use super::constraints;
use super::ledger::{Ledger, Shared};
use super::request::{Choice, Mode, Prepared, Request};
use super::{AllocError, MAX_RESULTS};
use crate::allocated::Holder;
use crate::pools::Gathered;

pub(crate) use judge::{Refusal, Verdict};

/// Most looks at devices in a search: a second or so. The scheduler gives up after ten
/// seconds; a limit on work has the same answer on every machine.
const MAX_LOOKS: u64 = 4_000_000;

/// Looks after which a search that has no answer counts the devices: one that can fit has nearly
/// always been found by then.
const FEW_LOOKS: u64 = 20_000;

/// A device that was picked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pick {
    pub(crate) candidate: usize,
    /// Number of the request in its claim, and the alternative of it.
    pub(crate) request: usize,
    pub(crate) alternative: usize,
}

/// End of a branch of the search.
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
    /// Number of devices that the request has, and the first candidate not yet tried for it.
    found: usize,
    start: usize,
}

impl At {
    fn request(claim: usize, request: usize) -> Self {
        Self {
            claim,
            request,
            alternative: None,
            found: 0,
            start: 0,
        }
    }
}

/// A search and its state.
pub(crate) struct Search<'s, 'a> {
    prepared: &'s Prepared<'a>,
    /// By request id and candidate; filled when first asked.
    verdicts: Vec<Vec<Option<Verdict>>>,
    /// By request id, for requests of mode All: every device they ask for.
    all: Vec<Vec<usize>>,
    /// By request id and candidate: what of its capacity is consumed; filled when first asked.
    demands: Vec<Vec<Option<Demands<'a>>>>,
    /// By candidate: the claims of this call that have it. More than one only with admin access; a
    /// device that can be shared is never in here.
    taking: Vec<Vec<usize>>,
    /// By candidate: the shares that this call has of it.
    shared: Vec<Shared>,
    /// Rest of the pools' counters.
    pub(crate) ledger: Ledger,
    /// By claim and constraint.
    constraints: Vec<Vec<constraints::State<'a>>>,
    /// By claim, in order.
    pub(crate) picks: Vec<Vec<Pick>>,
    /// By claim and request: the alternative that was taken.
    pub(crate) chosen: Vec<Vec<usize>>,
    pub(crate) steps: u64,
    /// Mark that a branch ended because a claim would have got too many devices.
    pub(crate) limited: bool,
    looks: u64,
    most_looks: u64,
    /// Mark that a request for all devices can never be satisfied, whatever this call picks.
    hopeless: bool,
    /// Answer of [`Search::may_fail`]; known after the first failure.
    may_fail: Option<bool>,
}

impl<'s, 'a> Search<'s, 'a> {
    pub(crate) fn new(prepared: &'s Prepared<'a>, pools: &[Gathered<'a>]) -> Self {
        let candidates = prepared.candidates.len();
        let states = |c: &super::request::Claim<'a>| {
            c.constraints
                .iter()
                .map(|_| constraints::State::default())
                .collect()
        };
        Self {
            prepared,
            verdicts: vec![vec![None; candidates]; prepared.requests],
            all: vec![Vec::new(); prepared.requests],
            demands: (0..prepared.requests).map(|_| Vec::new()).collect(),
            taking: vec![Vec::new(); candidates],
            shared: vec![Shared::default(); candidates],
            ledger: Ledger::new(pools, prepared.inputs.allocated),
            constraints: prepared.claims.iter().map(states).collect(),
            picks: vec![Vec::new(); prepared.claims.len()],
            chosen: prepared
                .claims
                .iter()
                .map(|c| vec![0; c.requests.len()])
                .collect(),
            steps: 0,
            limited: false,
            looks: 0,
            most_looks: MAX_LOOKS,
            hopeless: false,
            may_fail: None,
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
                        self.collect(request, claim.object)?;
                    }
                }
                let counts = choice.alternatives.iter().map(|a| self.wanted(a));
                fewest = fewest.saturating_add(counts.min().unwrap_or(0));
            }
            if fewest > MAX_RESULTS {
                return Err(AllocError::TooManyDevices {
                    claim: Holder::of(claim.object),
                    wanted: fewest,
                });
            }
        }
        Ok(())
    }

    fn collect(&mut self, request: &Request<'a>, claim: &ResourceClaim) -> Result<(), AllocError> {
        if let Some((pool, state)) = &self.prepared.partial {
            let problem =
                format!("asks for all devices, but resource pool {pool} is currently {state}");
            return Err(AllocError::of(claim, &request.name, problem));
        }
        let mut all = Vec::new();
        for index in 0..self.prepared.candidates.len() {
            if self.verdict(request, index)? == Verdict::Selected
                && self.fits_empty(request, index)?
            {
                all.push(index);
            }
        }
        if let Some(slot) = self.all.get_mut(request.id) {
            *slot = all;
        }
        Ok(())
    }

    /// Says whether the device could satisfy the request, were it not used at all.
    fn fits_empty(&mut self, request: &Request<'a>, index: usize) -> Result<bool, AllocError> {
        let Some(candidate) = self.prepared.candidates.get(index) else {
            return Ok(true);
        };
        let plain =
            request.capacity.is_none() && !candidate.shared && !judge::has_odd_capacity(candidate);
        if !self.prepared.features.consumable_capacity || plain {
            return Ok(true);
        }
        self.demand(request, index)?;
        Ok(!matches!(
            self.demands.get(request.id).and_then(|d| d.get(index)),
            Some(Some(Err(_)))
        ))
    }

    /// Returns the number of devices that a request takes.
    pub(crate) fn wanted(&self, request: &Request<'_>) -> usize {
        match request.mode {
            Mode::Exact(count) => count,
            Mode::All => self.all.get(request.id).map_or(0, Vec::len),
        }
    }

    /// Sets how long the next run may look for an answer: until devices are to be counted.
    pub(crate) fn shortly(mut self) -> Self {
        self.most_looks = FEW_LOOKS;
        self
    }

    /// Searches; afterwards the picks are the answer.
    pub(crate) fn run(&mut self) -> Result<bool, AllocError> {
        for request in self.for_all() {
            let all = self.all.get(request.id).cloned().unwrap_or_default();
            for index in all {
                self.hopeless |= matches!(self.refusal_of_all(request, index), Ok(Some(_)));
            }
        }
        Ok(self.one(At::request(0, 0))? == Step::Fits)
    }

    /// The requests for all devices that no alternative can replace.
    fn for_all(&self) -> impl Iterator<Item = &'s Request<'a>> + use<'s, 'a> {
        let choices = self
            .prepared
            .claims
            .iter()
            .flat_map(|claim| &claim.requests);
        let only = choices
            .filter(|choice| !choice.prioritized)
            .flat_map(|choice| &choice.alternatives);
        only.filter(|request| request.mode == Mode::All)
    }

    /// Says whether a request for all devices, other than this one, needs the device for itself.
    fn is_needed_whole(&self, request: &Request<'a>, index: usize) -> bool {
        let shared = self
            .prepared
            .candidates
            .get(index)
            .is_none_or(|candidate| candidate.shared);
        let needs = |other: &Request<'a>| {
            other.id != request.id
                && !other.admin
                && self
                    .all
                    .get(other.id)
                    .is_some_and(|all| all.contains(&index))
        };
        !shared && !request.admin && self.for_all().any(needs)
    }

    /// Says whether some branch of the search ends in an error, which then must be found in the
    /// scheduler's order: nothing may be left out.
    pub(crate) fn may_fail(&mut self) -> bool {
        if let Some(known) = self.may_fail {
            return known;
        }
        let prepared = self.prepared;
        let mut may_fail = false;
        for request in prepared
            .claims
            .iter()
            .flat_map(|c| &c.requests)
            .flat_map(|r| &r.alternatives)
        {
            may_fail |= request.mode == Mode::All && self.constraints_of(request).next().is_some();
            for index in 0..prepared.candidates.len() {
                may_fail |= match self.verdict(request, index) {
                    Ok(Verdict::Selected) => self.lacking(request, index).is_err(),
                    Ok(_) => false,
                    Err(_) => true,
                };
            }
        }
        self.may_fail = Some(may_fail);
        may_fail
    }

    /// Says whether so many devices from `start` on could be given to the request now; later there
    /// are
    /// only fewer.
    fn are_left(&mut self, request: &Request<'a>, start: usize, wanted: usize) -> bool {
        let mut left = wanted;
        for index in start..self.prepared.candidates.len() {
            if left == 0 {
                break;
            }
            self.looks += 1;
            match self.refusal(request, index) {
                Ok(None) => left -= 1,
                Ok(Some(_)) => {}
                // The search is to meet it.
                Err(_) => return true,
            }
        }
        left == 0
    }

    fn one(&mut self, at: At) -> Result<Step, AllocError> {
        self.steps += 1;
        let prepared = self.prepared;
        let Some(claim) = prepared.claims.get(at.claim) else {
            return Ok(Step::Fits);
        };
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
        let Some(request) = choice.alternatives.get(alternative) else {
            return Ok(Step::No);
        };
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
        let at = At {
            alternative: Some(alternative),
            ..at
        };
        match request.mode {
            Mode::All => self.next_of_all(at, alternative, request),
            Mode::Exact(_) => self.next_exact(at, alternative, request, wanted - at.found),
        }
    }

    fn first_available(&mut self, at: At, choice: &Choice<'a>) -> Result<Step, AllocError> {
        let mut all_too_many = true;
        for alternative in 0..choice.alternatives.len() {
            match self.one(At {
                alternative: Some(alternative),
                ..at
            })? {
                Step::Fits => {
                    if let Some(slot) = self
                        .chosen
                        .get_mut(at.claim)
                        .and_then(|c| c.get_mut(at.request))
                    {
                        *slot = alternative;
                    }
                    return Ok(Step::Fits);
                }
                Step::TooMany => {}
                Step::No => all_too_many = false,
            }
        }
        Ok(if all_too_many {
            Step::TooMany
        } else {
            Step::No
        })
    }

    fn next_of_all(
        &mut self,
        at: At,
        alternative: usize,
        request: &Request<'a>,
    ) -> Result<Step, AllocError> {
        let Some(candidate) = self
            .all
            .get(request.id)
            .and_then(|all| all.get(at.found))
            .copied()
        else {
            return Ok(Step::No);
        };
        if self.refusal_of_all(request, candidate)?.is_some() {
            return Ok(Step::No);
        }
        self.with(at, alternative, request, candidate)
    }

    fn next_exact(
        &mut self,
        at: At,
        alternative: usize,
        request: &Request<'a>,
        wanted: usize,
    ) -> Result<Step, AllocError> {
        let mut failed = false;
        for candidate in at.start..self.prepared.candidates.len() {
            self.looks += 1;
            if self.looks > self.most_looks {
                return Err(AllocError::TooHard { steps: self.steps });
            }
            if self.refusal(request, candidate)?.is_some() {
                continue;
            }
            if failed {
                if !self.are_left(request, candidate, wanted) || (self.hopeless && !self.may_fail())
                {
                    return Ok(Step::No);
                }
                if self.is_needed_whole(request, candidate) && !self.may_fail() {
                    continue;
                }
            }
            match self.with(at, alternative, request, candidate)? {
                Step::No => failed = true,
                done => return Ok(done),
            }
        }
        Ok(Step::No)
    }

    /// Goes on with the candidate picked, and takes the pick back unless that succeeds.
    fn with(
        &mut self,
        at: At,
        alternative: usize,
        request: &Request<'a>,
        candidate: usize,
    ) -> Result<Step, AllocError> {
        let charged = self.take(request, candidate);
        if let Some(picks) = self.picks.get_mut(at.claim) {
            picks.push(Pick {
                candidate,
                request: at.request,
                alternative,
            });
        }
        let step = self.one(At {
            found: at.found + 1,
            start: candidate + 1,
            ..at
        })?;
        if step != Step::Fits {
            if let Some(picks) = self.picks.get_mut(at.claim) {
                picks.pop();
            }
            self.give_back(request, candidate, charged);
        }
        Ok(step)
    }

    /// Enters a pick into all accounts; says whether counters were charged for it.
    fn take(&mut self, request: &Request<'a>, index: usize) -> bool {
        let prepared = self.prepared;
        let Some(candidate) = prepared.candidates.get(index) else {
            return false;
        };
        let charged = self.charges(index).is_some();
        if charged && let Some(charges) = candidate.charges {
            self.ledger.charge(candidate.home, charges);
        }
        if candidate.shared {
            let demands = self.demands.get(request.id).and_then(|d| d.get(index));
            let amounts = demands
                .and_then(|d| d.as_ref()?.as_ref().ok())
                .into_iter()
                .flatten();
            if let Some(shared) = self.shared.get_mut(index) {
                shared.add(amounts.map(|d| d.amount.nanos()));
            }
        } else if let Some(claims) = self.taking.get_mut(index) {
            claims.push(request.claim);
        }
        for (number, constraint) in self.constraints_of(request) {
            let Some(values) = self.values(&constraint, index) else {
                continue;
            };
            if let Some(state) = self
                .constraints
                .get_mut(request.claim)
                .and_then(|c| c.get_mut(number))
            {
                state.push(constraint.kind, values);
            }
        }
        charged
    }

    /// The opposite of [`Search::take`].
    fn give_back(&mut self, request: &Request<'a>, index: usize, charged: bool) {
        let prepared = self.prepared;
        let Some(candidate) = prepared.candidates.get(index) else {
            return;
        };
        for (number, _) in self.constraints_of(request) {
            if let Some(state) = self
                .constraints
                .get_mut(request.claim)
                .and_then(|c| c.get_mut(number))
            {
                state.pop();
            }
        }
        if candidate.shared {
            let demands = self.demands.get(request.id).and_then(|d| d.get(index));
            let amounts = demands
                .and_then(|d| d.as_ref()?.as_ref().ok())
                .into_iter()
                .flatten();
            if let Some(shared) = self.shared.get_mut(index) {
                shared.remove(amounts.map(|d| d.amount.nanos()));
            }
        } else if let Some(claims) = self.taking.get_mut(index) {
            claims.pop();
        }
        if charged && let Some(charges) = candidate.charges {
            self.ledger.give_back(candidate.home, charges);
        }
    }

    /// The constraints that a request is under, with their numbers.
    fn constraints_of<'r>(
        &self,
        request: &'r Request<'a>,
    ) -> impl Iterator<Item = (usize, constraints::Constraint<'a>)> + use<'r, 's, 'a> {
        let prepared = self.prepared;
        let all = prepared
            .claims
            .get(request.claim)
            .into_iter()
            .flat_map(|c| c.constraints.iter().copied());
        all.enumerate()
            .filter(|(_, constraint)| constraint.covers(&request.name))
    }
}
