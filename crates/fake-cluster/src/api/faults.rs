//! Faults on demand.

use std::sync::Arc;

use tokio::sync::Semaphore;

/// Effect on a request instead of its normal answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Refused with this HTTP status; nothing is written.
    Status(u16),
    /// Refused as an eviction that a PodDisruptionBudget forbids.
    Budget,
    /// Never answered; nothing is written.
    Hang,
    /// The connection breaks before anything is written.
    DropBefore,
    /// The connection breaks after the write took effect: the caller cannot know.
    DropAfter,
}

/// Requests to hit: a verb and a plural resource name, `*` for any.
#[derive(Debug, Clone)]
struct Rule {
    verb: String,
    resource: String,
    left: usize,
    effect: Effect,
}

#[derive(Debug, Clone)]
pub(crate) enum Effect {
    Fault(Fault),
    /// Wait here, then carry on as if nothing had been.
    Hold(Arc<Semaphore>),
}

/// The faults not yet used up, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Faults(Vec<Rule>);

impl Faults {
    pub(crate) fn add(&mut self, verb: &str, resource: &str, left: usize, effect: Effect) {
        self.0.push(Rule {
            verb: verb.into(),
            resource: resource.into(),
            left,
            effect,
        });
    }

    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    /// The effect for one request; uses up one of its rule's turns.
    pub(crate) fn take(&mut self, verb: &str, resource: &str) -> Option<Effect> {
        let hits = |pattern: &str, value: &str| pattern == "*" || pattern == value;
        let rule = self
            .0
            .iter_mut()
            .find(|r| r.left > 0 && hits(&r.verb, verb) && hits(&r.resource, resource))?;
        rule.left -= 1;
        let effect = rule.effect.clone();
        self.0.retain(|rule| rule.left > 0);
        Some(effect)
    }
}

/// Requests that wait until this is dropped. See [`FakeApi::hold`](super::FakeApi::hold).
#[derive(Debug)]
#[must_use = "dropping it lets the requests go on"]
pub struct Held(pub(crate) Arc<Semaphore>);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.close();
    }
}
