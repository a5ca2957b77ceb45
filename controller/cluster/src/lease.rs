//! Leader election: of several instances the one acts that holds the Lease. The rules are those of
//! client-go's leader election: an instance that does not hold the Lease takes it after it has not
//! changed for as long as it says, and one that could not renew it in time stops acting before
//! another may begin.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};

/// Time for which an instance that is gone keeps others waiting.
pub(crate) const DURATION: Duration = Duration::from_secs(15);
/// Time after which an instance that could not renew does not act. Requests that it has begun then
/// must end before [`DURATION`] is over.
pub(crate) const RENEW_DEADLINE: Duration = Duration::from_secs(10);

/// State of an instance. Times are since any fixed moment.
#[derive(Debug)]
pub(crate) struct Election {
    pub(crate) name: String,
    identity: String,
    /// The version of the Lease that was seen last, since when.
    seen: Option<(String, Duration)>,
    /// When it was last renewed by this instance.
    renewed: Option<Duration>,
}

impl Election {
    pub(crate) fn new(name: &str, identity: &str) -> Self {
        Self {
            name: name.to_owned(),
            identity: identity.to_owned(),
            seen: None,
            renewed: None,
        }
    }

    /// Returns the Lease to be written, after it was read; `None` while another instance has it.
    pub(crate) fn next(
        &mut self,
        found: Option<&Lease>,
        now: Duration,
        clock: Timestamp,
    ) -> Option<Lease> {
        let Some(found) = found else {
            return Some(self.lease(None, clock));
        };
        let spec = found.spec.clone().unwrap_or_default();
        let holder = spec.holder_identity.as_deref().unwrap_or_default();
        let version = found.metadata.resource_version.clone().unwrap_or_default();
        let since = match &self.seen {
            Some((seen, since)) if *seen == version => *since,
            _ => now,
        };
        self.seen = Some((version, since));
        let lasts =
            u64::try_from(spec.lease_duration_seconds.unwrap_or_default()).unwrap_or_default();
        let is_over = holder.is_empty() || now.saturating_sub(since) >= Duration::from_secs(lasts);
        if holder != self.identity {
            self.renewed = None;
        }
        (holder == self.identity || is_over).then(|| self.lease(Some(found), clock))
    }

    /// Notes that the Lease was written, by a request that began at `began`.
    pub(crate) fn wrote(&mut self, began: Duration) {
        self.renewed = Some(began);
    }

    /// Returns until when this instance acts.
    pub(crate) fn leads_until(&self) -> Option<Duration> {
        self.renewed.map(|at| at + RENEW_DEADLINE)
    }

    /// Returns the Lease without a holder, so that another instance does not have to wait; `None`
    /// if this one does not hold it.
    pub(crate) fn release(&mut self, found: &Lease) -> Option<Lease> {
        let spec = found.spec.as_ref()?;
        if spec.holder_identity.as_deref() != Some(&self.identity) {
            return None;
        }
        self.renewed = None;
        let spec = LeaseSpec {
            holder_identity: Some(String::new()),
            ..spec.clone()
        };
        Some(Lease {
            metadata: found.metadata.clone(),
            spec: Some(spec),
        })
    }

    /// Returns the Lease as this instance holds it.
    fn lease(&self, found: Option<&Lease>, clock: Timestamp) -> Lease {
        let before = found
            .and_then(|lease| lease.spec.clone())
            .unwrap_or_default();
        let is_ours = before.holder_identity.as_deref() == Some(&self.identity);
        let transitions = before.lease_transitions.unwrap_or_default();
        let taken = found.is_some() && !is_ours;
        let spec = LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: i32::try_from(DURATION.as_secs()).ok(),
            acquire_time: if is_ours {
                before.acquire_time
            } else {
                Some(MicroTime(clock))
            },
            renew_time: Some(MicroTime(clock)),
            lease_transitions: Some(transitions.saturating_add(i32::from(taken))),
            ..before
        };
        let fresh = || ObjectMeta {
            name: Some(self.name.clone()),
            ..ObjectMeta::default()
        };
        // With the version that was read: of two that take it at once, one is refused.
        let metadata = found.map_or_else(fresh, |lease| lease.metadata.clone());
        Lease {
            metadata,
            spec: Some(spec),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn clock(seconds: u64) -> Timestamp {
        Timestamp::UNIX_EPOCH + at(1_000_000 + seconds)
    }

    /// Returns the Lease as the server has it after a write.
    fn stored(lease: Lease, version: &str) -> Lease {
        let metadata = ObjectMeta {
            resource_version: Some(version.to_owned()),
            ..lease.metadata
        };
        Lease { metadata, ..lease }
    }

    fn holder(lease: &Lease) -> &str {
        lease
            .spec
            .as_ref()
            .and_then(|spec| spec.holder_identity.as_deref())
            .unwrap_or_default()
    }

    #[test]
    fn the_first_takes_it_renews_it_and_leads_only_for_as_long_as_it_could() {
        let mut a = Election::new("l", "a");
        assert_eq!(a.leads_until(), None);
        let lease = a.next(None, at(0), clock(0)).unwrap();
        assert_eq!(
            (holder(&lease), a.leads_until()),
            ("a", None),
            "not before it is written"
        );
        a.wrote(at(0));
        assert_eq!(a.leads_until(), Some(at(10)));
        let renewed = a
            .next(Some(&stored(lease.clone(), "1")), at(2), clock(2))
            .unwrap();
        a.wrote(at(2));
        assert_eq!(a.leads_until(), Some(at(12)));
        let (first, second) = (lease.spec.unwrap(), renewed.spec.unwrap());
        assert_eq!(second.acquire_time, first.acquire_time);
        assert_eq!(second.renew_time, Some(MicroTime(clock(2))));
        assert_eq!(
            (first.lease_transitions, second.lease_transitions),
            (Some(0), Some(0))
        );
    }

    #[test]
    fn another_waits_until_it_is_unchanged_for_its_duration_by_its_own_clock() {
        let (mut a, mut b) = (Election::new("l", "a"), Election::new("l", "b"));
        let first = stored(a.next(None, at(0), clock(0)).unwrap(), "1");
        // Its clock is years ahead: that says nothing of the Lease.
        let late = |seconds: u64| clock(seconds + 100_000_000);
        assert_eq!(b.next(Some(&first), at(100), late(0)), None);
        assert_eq!(b.next(Some(&first), at(114), late(14)), None);
        let second = stored(a.next(Some(&first), at(14), clock(14)).unwrap(), "2");
        assert_eq!(
            b.next(Some(&second), at(115), late(15)),
            None,
            "it was renewed"
        );
        assert_eq!(b.next(Some(&second), at(129), late(29)), None);
        let taken = b.next(Some(&second), at(130), late(30)).unwrap();
        assert_eq!(holder(&taken), "b");
        assert_eq!(
            taken.metadata.resource_version.as_deref(),
            Some("2"),
            "of two that take it one is refused"
        );
        assert_eq!(taken.spec.as_ref().unwrap().lease_transitions, Some(1));
        // The other learns that it has lost it, and does not act any more.
        a.wrote(at(14));
        assert_eq!(a.next(Some(&stored(taken, "3")), at(31), clock(31)), None);
        assert_eq!(a.leads_until(), None);
    }

    #[test]
    fn a_released_lease_is_taken_at_once_and_only_its_holder_releases_it() {
        let (mut a, mut b) = (Election::new("l", "a"), Election::new("l", "b"));
        let lease = stored(a.next(None, at(0), clock(0)).unwrap(), "1");
        a.wrote(at(0));
        assert_eq!(b.release(&lease), None);
        let free = stored(a.release(&lease).unwrap(), "2");
        assert_eq!(a.leads_until(), None);
        assert_eq!(holder(&b.next(Some(&free), at(1), clock(1)).unwrap()), "b");
    }
}
