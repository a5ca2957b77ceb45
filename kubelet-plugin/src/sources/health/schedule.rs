//! When the GPUs are polled, and when the first view of their health goes out without a poll. Pure:
//! times are durations since the start.

use std::collections::BTreeSet;
use std::time::Duration;

use divvy_model::GpuUuid;

/// Time for which the first poll may keep the first pool waiting.
const FIRST_LOOK: Duration = Duration::from_secs(2);
/// Events come in bursts; the GPUs are not polled more often than this.
const AT_MOST: Duration = Duration::from_secs(1);

/// The driver as the inventory has it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct DriverState {
    /// True if it can be asked.
    pub(super) usable: bool,
    /// True while it is released on request.
    pub(super) released: bool,
    /// GPUs that it lists, readable or not.
    pub(super) listed: BTreeSet<GpuUuid>,
}

/// An occurrence that may change what is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Event {
    /// Time has passed, or the driver was seen.
    Time,
    /// A GPU has reported something that a poll may explain.
    Heard,
    /// The poll has ended.
    Polled {
        /// True if something is wrong with a GPU: its end is found out sooner.
        patients: bool,
    },
}

/// The next thing to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    /// Begin a poll.
    Poll,
    /// Forget the poll that is under way.
    Abandon,
    /// Publish what is known from before.
    PublishUnpolled,
    /// Wait for an event, at most until then.
    Wait(Option<Duration>),
}

/// The schedule of polls: at most one at a time.
#[derive(Debug)]
pub(super) struct Schedule {
    /// The interval while all is well.
    calm: Duration,
    /// The interval while something is wrong with a GPU.
    busy: Duration,
    driver: DriverState,
    /// When the poll began that is under way.
    polling: Option<Duration>,
    /// When the last one ended.
    polled: Option<Duration>,
    /// When the next is due; `None` while the end of the present one decides.
    due: Option<Duration>,
    published: bool,
}

impl Schedule {
    pub(super) fn new(calm: Duration, busy: Duration) -> Self {
        Self {
            calm,
            busy,
            driver: DriverState::default(),
            polling: None,
            polled: None,
            due: Some(Duration::ZERO),
            published: false,
        }
    }

    /// Notes the present state of the driver. Other GPUs than before are polled at once.
    pub(super) fn see(&mut self, driver: DriverState, now: Duration) {
        if driver.listed != self.driver.listed {
            self.due = Some(now);
        }
        self.driver = driver;
    }

    /// Notes that a view was published.
    pub(super) fn published(&mut self) {
        self.published = true;
    }

    /// Returns the GPUs to poll.
    pub(super) fn listed(&self) -> &BTreeSet<GpuUuid> {
        &self.driver.listed
    }

    /// Returns whether the driver is released.
    pub(super) fn is_released(&self) -> bool {
        self.driver.released
    }

    /// Takes an event in and returns what to do. To be called again, with [`Event::Time`], until it
    /// returns [`Action::Wait`].
    pub(super) fn next(&mut self, event: Event, now: Duration) -> Action {
        match event {
            Event::Time => {}
            Event::Heard => {
                let soon = self.polled.map_or(now, |at| at.saturating_add(AT_MOST));
                self.due_at(soon.max(now));
            }
            Event::Polled { patients } => {
                self.polling = None;
                self.polled = Some(now);
                let wait = if patients { self.busy } else { self.calm };
                // An event during the poll has made the next one due earlier.
                self.due_at(now.saturating_add(wait));
            }
        }
        // A released driver may be exchanged: the answers of a poll are about the time before. A
        // call that hangs goes on by itself.
        if self.driver.released && self.polling.take().is_some() {
            self.due = Some(now);
            return Action::Abandon;
        }
        // Nothing is offered before health is known. A released driver is not asked, which on a
        // cordoned node is so from the start; one that hangs is not waited for.
        let hangs_at = self.polling.map(|begun| begun.saturating_add(FIRST_LOOK));
        let hangs_at = hangs_at.filter(|_| !self.published);
        let too_long = hangs_at.is_some_and(|at| at <= now);
        if !self.published && (self.driver.released || too_long) {
            self.published = true;
            return Action::PublishUnpolled;
        }
        let due = self
            .due
            .filter(|_| self.driver.usable && self.polling.is_none());
        if due.is_some_and(|at| at <= now) {
            self.polling = Some(now);
            self.due = None;
            return Action::Poll;
        }
        Action::Wait(due.into_iter().chain(hangs_at).min())
    }

    /// Brings the next poll forward.
    fn due_at(&mut self, at: Duration) {
        self.due = Some(self.due.map_or(at, |due| due.min(at)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CALM: Duration = s(30);
    const BUSY: Duration = s(5);
    const WELL: Event = Event::Polled { patients: false };

    const fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn driver(usable: bool, released: bool, gpus: u32) -> DriverState {
        let gpu = |n| format!("GPU-12345678-1234-1234-0000-12345678000{n}").parse::<GpuUuid>();
        DriverState {
            usable,
            released,
            listed: (0..gpus).map(|n| gpu(n).unwrap()).collect(),
        }
    }

    /// A schedule whose driver answers, with its first poll under way since the start.
    fn polling() -> Schedule {
        let mut schedule = Schedule::new(CALM, BUSY);
        schedule.see(driver(true, false, 2), s(0));
        assert_eq!(schedule.next(Event::Time, s(0)), Action::Poll);
        schedule
    }

    fn until(seconds: u64) -> Action {
        Action::Wait(Some(s(seconds)))
    }

    #[test]
    fn polls_follow_each_other_sooner_while_a_gpu_is_ill() {
        let mut schedule = polling();
        schedule.published();
        // While a poll is under way its end decides about the next.
        assert_eq!(schedule.next(Event::Time, s(1)), Action::Wait(None));
        assert_eq!(schedule.next(WELL, s(3)), until(33));
        assert_eq!(schedule.next(Event::Time, s(32)), until(33));
        assert_eq!(schedule.next(Event::Time, s(33)), Action::Poll);
        let ill = Event::Polled { patients: true };
        assert_eq!(schedule.next(ill, s(34)), until(39));
        // Other GPUs are there.
        schedule.see(driver(true, false, 1), s(35));
        assert_eq!(schedule.next(Event::Time, s(35)), Action::Poll);
    }

    #[test]
    fn a_burst_of_events_leads_to_one_poll() {
        let mut schedule = polling();
        schedule.published();
        assert_eq!(schedule.next(WELL, s(10)), until(40));
        assert_eq!(schedule.next(Event::Heard, s(10)), until(11));
        assert_eq!(schedule.next(Event::Heard, s(10)), until(11));
        assert_eq!(schedule.next(Event::Time, s(11)), Action::Poll);
        // The answers may be older than the event.
        assert_eq!(schedule.next(Event::Heard, s(12)), Action::Wait(None));
        assert_eq!(schedule.next(WELL, s(13)), Action::Poll);
        assert_eq!(schedule.next(WELL, s(14)), until(44));
    }

    #[test]
    fn a_first_poll_that_hangs_keeps_the_first_pool_waiting_for_a_moment() {
        let mut schedule = polling();
        assert_eq!(schedule.next(Event::Time, s(1)), until(2));
        assert_eq!(schedule.next(Event::Time, s(2)), Action::PublishUnpolled);
        assert_eq!(schedule.next(Event::Time, s(2)), Action::Wait(None));
        let mut schedule = polling();
        schedule.published();
        assert_eq!(schedule.next(Event::Time, s(2)), Action::Wait(None));
    }

    #[test]
    fn a_released_driver_is_not_polled_and_polled_at_once_when_it_is_back() {
        let mut schedule = polling();
        schedule.see(driver(false, true, 2), s(1));
        assert_eq!(schedule.next(Event::Time, s(1)), Action::Abandon);
        assert_eq!(schedule.next(Event::Time, s(1)), Action::PublishUnpolled);
        assert_eq!(schedule.next(Event::Time, s(1)), Action::Wait(None));
        assert_eq!(schedule.next(Event::Heard, s(9)), Action::Wait(None));
        schedule.see(driver(true, false, 2), s(20));
        assert_eq!(schedule.next(Event::Time, s(20)), Action::Poll);
        // Not there at all: nothing is polled, and nothing published.
        let mut schedule = Schedule::new(CALM, BUSY);
        assert_eq!(schedule.next(Event::Time, s(60)), Action::Wait(None));
    }
}
