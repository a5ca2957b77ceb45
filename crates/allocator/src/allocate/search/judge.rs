//! Judgement of a request about a device, and what keeps it from getting the device now.

use k8s_openapi::api::resource::v1::DeviceTaint;

use super::super::capacity::{self, Demand, Unfit};
use super::super::constraints::{Constraint, Kind, Value};
use super::super::ledger::Short;
use super::super::request::{Candidate, Request};
use super::super::{AllocError, SelectorError};
use super::{Search, taints};
use crate::allocated::Uses;
use crate::cel;
use crate::nodes;

/// The suitability of a device for a request, independent of its holders.
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

/// Why a device cannot be given to a request now; in the scheduler's order.
#[derive(Debug, Clone)]
pub(crate) enum Refusal<'a> {
    Taken,
    Verdict(Verdict),
    /// Never, independent of other users.
    Unfit(Unfit<'a>),
    /// Others have too much of a capacity: this is left, in billionths.
    CapacityShort(Demand<'a>, i128),
    Counters(Short),
    Tainted(&'a DeviceTaint),
    /// By the claim's constraint of this number.
    Constraint(usize),
}

/// Amounts that a request consumes of a device, or the reason why it cannot.
pub(super) type Demands<'a> = Result<Vec<Demand<'a>>, Unfit<'a>>;

impl<'a> Search<'_, 'a> {
    /// Why the candidate cannot be given to the request now; `None` when it can.
    pub(crate) fn refusal(
        &mut self,
        request: &Request<'a>,
        index: usize,
    ) -> Result<Option<Refusal<'a>>, AllocError> {
        if let Some(refusal) = self.unavailable(request, index)? {
            return Ok(Some(refusal));
        }
        if let Some(refusal) = self.lacking(request, index)? {
            return Ok(Some(refusal));
        }
        Ok(self
            .uncharged(request, index)
            .or_else(|| self.constrained(request, index)))
    }

    /// The same for a device of a request for all: there a constraint that is not satisfied is an
    /// error, and capacity is looked at after it.
    pub(super) fn refusal_of_all(
        &mut self,
        request: &Request<'a>,
        index: usize,
    ) -> Result<Option<Refusal<'a>>, AllocError> {
        let refusal = self
            .unavailable(request, index)?
            .or_else(|| self.uncharged(request, index));
        if refusal.is_some() {
            return Ok(refusal);
        }
        if let Some(Refusal::Constraint(number)) = self.constrained(request, index) {
            let claim = self.prepared.claims.get(request.claim);
            let constraint = claim.and_then(|c| c.constraints.get(number));
            if let (Some(constraint), Some(candidate)) =
                (constraint, self.prepared.candidates.get(index))
            {
                let device = candidate.id();
                let problem = format!(
                    "cannot add device {device} because a claim constraint would not be satisfied: {constraint}; all devices must satisfy it, so select fewer or drop the constraint"
                );
                return Err(AllocError::of(request.of, &request.name, problem));
            }
        }
        self.lacking(request, index)
    }

    /// Taken, or not what the request selects.
    fn unavailable(
        &mut self,
        request: &Request<'a>,
        index: usize,
    ) -> Result<Option<Refusal<'a>>, AllocError> {
        let prepared = self.prepared;
        let Some(candidate) = prepared.candidates.get(index) else {
            return Ok(Some(Refusal::Taken));
        };
        let taking = self
            .taking
            .get(index)
            .map(Vec::as_slice)
            .unwrap_or_default();
        let taken = if request.admin {
            taking.contains(&request.claim)
        } else {
            !taking.is_empty() || self.is_taken(candidate)
        };
        if taken {
            return Ok(Some(Refusal::Taken));
        }
        let verdict = self.verdict(request, index)?;
        Ok((verdict != Verdict::Selected).then_some(Refusal::Verdict(verdict)))
    }

    /// Short of capacity.
    pub(super) fn lacking(
        &mut self,
        request: &Request<'a>,
        index: usize,
    ) -> Result<Option<Refusal<'a>>, AllocError> {
        let prepared = self.prepared;
        if !prepared.features.consumable_capacity {
            return Ok(None);
        }
        let Some(candidate) = prepared.candidates.get(index) else {
            return Ok(None);
        };
        let uses = self.uses(candidate);
        let plain =
            !candidate.shared && request.capacity.is_none() && !uses.is_some_and(Uses::is_shared);
        if plain && !has_odd_capacity(candidate) {
            // It is consumed whole, and it is whole.
            return Ok(None);
        }
        self.demand(request, index)?;
        let demands = self.demands.get(request.id).and_then(|d| d.get(index));
        let demands = match demands {
            Some(Some(Ok(demands))) => demands,
            Some(Some(Err(unfit))) => return Ok(Some(Refusal::Unfit(unfit.clone()))),
            _ => return Ok(None),
        };
        let Some(shared) = self.shared.get(index) else {
            return Ok(None);
        };
        for (place, demand) in demands.iter().enumerate() {
            let left = shared.left(place, demand.capacity, demand.total.nanos(), uses);
            if left < demand.amount.nanos() {
                return Ok(Some(Refusal::CapacityShort(demand.clone(), left)));
            }
        }
        Ok(None)
    }

    /// Short of counters, or tainted.
    fn uncharged(&self, request: &Request<'a>, index: usize) -> Option<Refusal<'a>> {
        let candidate = self.prepared.candidates.get(index)?;
        let counters = candidate
            .device
            .consumes_counters
            .as_ref()
            .is_some_and(|c| !c.is_empty());
        if counters && !self.prepared.features.partitionable_devices {
            return Some(Refusal::Verdict(Verdict::FeatureOff));
        }
        if let Some(charges) = self.charges(index)
            && let Some(short) = self.ledger.short(candidate.home, charges)
        {
            return Some(Refusal::Counters(short));
        }
        self.untolerated(request, candidate).map(Refusal::Tainted)
    }

    /// Against a constraint.
    fn constrained(&self, request: &Request<'a>, index: usize) -> Option<Refusal<'a>> {
        let states = self.constraints.get(request.claim)?;
        let refuses = |(number, constraint): (usize, Constraint<'a>)| {
            let values = self.values(&constraint, index);
            let allowed = values.is_some_and(|v| {
                states
                    .get(number)
                    .is_some_and(|s| s.after(constraint.kind, &v).is_some())
            });
            (!allowed).then_some(Refusal::Constraint(number))
        };
        self.constraints_of(request).find_map(refuses)
    }

    /// The candidate's values for a constraint.
    pub(crate) fn values(
        &self,
        constraint: &Constraint<'a>,
        index: usize,
    ) -> Option<Vec<Value<'a>>> {
        let candidate = self.prepared.candidates.get(index)?;
        constraint.values(
            candidate.driver,
            candidate.device,
            self.prepared.features.list_attributes,
        )
    }

    /// The counters that picking the candidate now would charge; none for a share of a device that
    /// is charged.
    pub(super) fn charges(&self, index: usize) -> Option<&'_ [crate::pools::Charge]> {
        let candidate = self.prepared.candidates.get(index)?;
        let picked = self.shared.get(index).is_some_and(|s| s.picked > 0);
        let paid = candidate.shared && self.uses(candidate).is_some_and(Uses::is_shared);
        candidate.charges.filter(|_| !picked && !paid)
    }

    /// Computes what the request consumes of the candidate, once.
    pub(super) fn demand(&mut self, request: &Request<'a>, index: usize) -> Result<(), AllocError> {
        let prepared = self.prepared;
        let Some(slots) = self.demands.get_mut(request.id) else {
            return Ok(());
        };
        if slots.is_empty() {
            slots.resize_with(prepared.candidates.len(), || None);
        }
        let (Some(slot), Some(candidate)) = (slots.get_mut(index), prepared.candidates.get(index))
        else {
            return Ok(());
        };
        if slot.is_none() {
            let demands = capacity::demands(
                request.capacity,
                candidate.device,
                prepared.features.fractional_capacity,
            );
            *slot = Some(demands.map_err(|error| {
                let (device, capacity, problem) = (candidate.id(), error.capacity, error.problem);
                let problem = format!(
                    "device {device}, capacity {capacity:?}: {problem}; correct the request, or the capacity in the ResourceSlice"
                );
                AllocError::of(request.of, &request.name, problem)
            })?);
        }
        Ok(())
    }

    pub(super) fn uses(&self, candidate: &Candidate<'_>) -> Option<&'a Uses> {
        self.prepared.inputs.allocated.uses(
            candidate.driver,
            candidate.pool,
            &candidate.device.name,
        )
    }

    /// Says whether an existing claim has the device.
    pub(crate) fn is_taken(&self, candidate: &Candidate<'_>) -> bool {
        let allocated = self.prepared.inputs.allocated;
        let shares_count = !self.prepared.features.consumable_capacity;
        allocated.is_taken(
            candidate.driver,
            candidate.pool,
            &candidate.device.name,
            shares_count,
        )
    }

    /// The first taint that keeps the request away.
    fn untolerated(
        &self,
        request: &Request<'a>,
        candidate: &Candidate<'a>,
    ) -> Option<&'a DeviceTaint> {
        if !self.prepared.features.device_taints {
            return None;
        }
        let tolerations = request.tolerations.map(Vec::as_slice).unwrap_or_default();
        taints::untolerated(candidate.device.taints.as_deref()?, tolerations)
    }

    /// Judges the candidate for the request; its selectors are evaluated once.
    pub(crate) fn verdict(
        &mut self,
        request: &Request<'a>,
        index: usize,
    ) -> Result<Verdict, AllocError> {
        let known = self
            .verdicts
            .get(request.id)
            .and_then(|v| v.get(index))
            .copied()
            .flatten();
        if let Some(verdict) = known {
            return Ok(verdict);
        }
        let verdict = self.judge(request, index)?;
        if let Some(slot) = self
            .verdicts
            .get_mut(request.id)
            .and_then(|v| v.get_mut(index))
        {
            *slot = Some(verdict);
        }
        Ok(verdict)
    }

    fn judge(&self, request: &Request<'a>, index: usize) -> Result<Verdict, AllocError> {
        let prepared = self.prepared;
        let Some(candidate) = prepared.candidates.get(index) else {
            return Ok(Verdict::NotOnNode);
        };
        let (device, features) = (candidate.device, prepared.features);
        let binding = device
            .binding_conditions
            .as_ref()
            .is_some_and(|c| !c.is_empty());
        if binding && !features.device_binding {
            return Ok(Verdict::FeatureOff);
        }
        for (place, selector) in request.selectors.iter().enumerate() {
            let failed = |device, source: &cel::CelError| {
                AllocError::Selector(Box::new(SelectorError {
                    origin: selector.origin.to_string(),
                    index: selector.index,
                    expression: selector.expression.to_owned(),
                    device,
                    source: source.clone(),
                }))
            };
            let program = selector
                .program
                .as_ref()
                .as_ref()
                .map_err(|source| failed(None, source))?;
            match cel::eval(
                program,
                candidate.driver,
                device,
                features.consumable_capacity,
            ) {
                Ok(true) => {}
                Ok(false) => return Ok(Verdict::Rejected(place)),
                Err(source) => return Err(failed(Some(candidate.id()), &source)),
            }
        }
        let per_device = candidate.slice.spec.per_device_node_selection == Some(true);
        if per_device && !nodes::device_is_for(device, prepared.inputs.node)? {
            return Ok(Verdict::NotOnNode);
        }
        Ok(Verdict::Selected)
    }
}

/// Says whether a capacity has to be looked at although the request says nothing about it: a policy
/// may
/// forbid it, and an amount below nothing is an error of the allocation.
pub(super) fn has_odd_capacity(candidate: &Candidate<'_>) -> bool {
    let mut capacities = candidate
        .device
        .capacity
        .iter()
        .flatten()
        .map(|(_, capacity)| capacity);
    capacities
        .any(|c| c.request_policy.is_some() || c.value.0.is_empty() || c.value.0.starts_with('-'))
}

impl std::fmt::Display for Constraint<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = match self.kind {
            Kind::Match => "matchAttribute",
            Kind::Distinct => "distinctAttribute",
        };
        write!(f, "{kind} {}", self.attribute)
    }
}
