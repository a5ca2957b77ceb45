//! Only one instance on a node publishes and reconciles, also while two run side by side in a
//! rolling update.
//!
//! The holder of the lock file publishes. An instance that is registered with the kubelet and does
//! not hold the lock writes its own number, higher than all before, as a wish; a holder that reads
//! a wish higher than its own number releases the lock and waits. So the newest registered instance
//! publishes, and when it dies the kernel frees the lock and the other instance takes it again.

use std::fs::TryLockError;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use divvy_executor::Locked;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::node::facts::Registered;

/// Interval of attempts of a waiting instance after it has asked the holder to let go.
const TAKE_OVER: Duration = Duration::from_millis(200);

/// Number of polls in a row in which an older instance must find the lock free before it takes a
/// newer one for dead.
const PATIENCE: u32 = 3;

#[derive(Default)]
struct State {
    /// The lock, while we hold it.
    held: Option<Locked>,
    /// Polls in a row that found the lock free although a newer instance wants it.
    found_free: u32,
}

/// The lock and the wish file of one plugin folder.
pub(crate) struct PublisherLock {
    path: PathBuf,
    wish: PathBuf,
    /// Later instances have higher numbers.
    number: u128,
}

impl PublisherLock {
    pub(crate) fn new(plugin_dir: &Path) -> Self {
        let started = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        Self::at(plugin_dir, started.as_nanos())
    }

    /// Later than all before, also where the clock was set back since.
    fn at(plugin_dir: &Path, clock: u128) -> Self {
        let mut lock = Self::numbered(plugin_dir, clock);
        for file in [&lock.path, &lock.wish] {
            // A file that cannot be read now cannot be compared with later either.
            lock.number = lock
                .number
                .max(number_in(file).unwrap_or_default().saturating_add(1));
        }
        lock
    }

    fn numbered(plugin_dir: &Path, number: u128) -> Self {
        Self {
            path: plugin_dir.join("publisher.lock"),
            wish: plugin_dir.join("publisher.wish"),
            number,
        }
    }

    /// Keeps `publishes` right until `stop`: whether this instance is the one to publish and
    /// reconcile.
    pub(crate) async fn run(
        self,
        mut registered: watch::Receiver<Registered>,
        publishes: watch::Sender<bool>,
        poll: Duration,
        stop: CancellationToken,
    ) {
        let mut state = State::default();
        let mut complained = false;
        while !stop.is_cancelled() {
            let known = *registered.borrow_and_update() == Registered::Yes;
            match self.step(&mut state, known) {
                Ok(()) => complained = false,
                Err(error) if !complained => {
                    tracing::error!(%error, "failed to take the publisher lock; nothing is published until it is taken");
                    complained = true;
                }
                Err(_) => {}
            }
            let holds = state.held.is_some();
            publishes.send_if_modified(|now| std::mem::replace(now, holds) != holds);
            let asked = !holds && known && self.is_newest().unwrap_or(false);
            tokio::select! {
                () = tokio::time::sleep(if asked { TAKE_OVER.min(poll) } else { poll }) => {}
                Ok(()) = registered.changed() => {}
                () = stop.cancelled() => {}
            }
        }
        // Followers stop before the lock is freed, which `state` does when it is dropped.
        publishes.send_replace(false);
    }

    fn step(&self, state: &mut State, registered: bool) -> io::Result<()> {
        // A holder only looks whether a newer instance wants the lock. A wish is never withdrawn:
        // it is lower than the number of each instance that starts later.
        let wished = self.wished()?;
        if state.held.is_some() {
            if wished > self.number {
                tracing::info!("a newer instance takes over publishing");
                // Frees the lock. The newer instance tries it several times a second.
                *state = State::default();
            }
            return Ok(());
        }
        // An instance that is not registered does not ask the holder to leave. A free lock needs no
        // wish, so a full disk does not prevent publishing.
        let asked = if registered && wished < self.number {
            self.ask()
        } else {
            Ok(())
        };
        // The wish is on disk before the lock is tried: the holder may let go in between, and then
        // this instance is to be the one that takes it.
        let file = fs_err::OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&self.path)?;
        match Locked::alone(file) {
            // Free, but wanted by a newer instance, which may be about to take it. The lock is
            // freed at once.
            Ok(_) if wished > self.number && state.found_free < PATIENCE => state.found_free += 1,
            Ok(mut lock) => {
                if wished > self.number {
                    tracing::warn!("the newer instance has exited; publishing again");
                    self.ask()?;
                }
                // For those that start later. The lock is held also where a full disk does not take
                // the number.
                drop(
                    lock.set_len(0)
                        .and_then(|()| lock.write_all(self.number.to_string().as_bytes())),
                );
                *state = State {
                    held: Some(lock),
                    found_free: 0,
                };
            }
            Err((_, TryLockError::WouldBlock)) => {
                state.found_free = 0;
                asked?;
            }
            Err((_, TryLockError::Error(error))) => return Err(error),
        }
        Ok(())
    }

    fn ask(&self) -> io::Result<()> {
        fs_err::write(&self.wish, self.number.to_string())
    }

    fn is_newest(&self) -> io::Result<bool> {
        Ok(self.wished()? == self.number)
    }

    /// The highest number written as a wish; 0 if there is none.
    fn wished(&self) -> io::Result<u128> {
        number_in(&self.wish)
    }
}

/// 0 if there is none.
fn number_in(file: &Path) -> io::Result<u128> {
    match fs_err::read_to_string(file) {
        // Text that is not a number was cut off by a crash.
        Ok(text) => Ok(text.trim().parse().unwrap_or(0)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_instance_publishes_and_the_older_once_it_is_dead() {
        let dir = tempfile::tempdir().unwrap();
        let (old, new) = (
            PublisherLock::numbered(dir.path(), 1),
            PublisherLock::numbered(dir.path(), 2),
        );
        let (mut a, mut b) = (State::default(), State::default());
        let mut turn = |with_new: bool, registered: bool| {
            old.step(&mut a, true).unwrap();
            if with_new {
                new.step(&mut b, registered).unwrap();
            } else {
                b = State::default();
            }
            (a.held.is_some(), b.held.is_some())
        };
        assert_eq!(
            turn(true, false),
            (true, false),
            "the first one there holds it"
        );
        assert_eq!(
            turn(true, false),
            (true, false),
            "one that is not registered asks for nothing"
        );
        assert_eq!(turn(true, true), (true, false), "now it asks");
        assert_eq!(turn(true, true), (false, true), "and gets it");
        for _ in 0..5 {
            assert_eq!(turn(true, true), (false, true));
        }
        let after_death: Vec<bool> = (0..6).map(|_| turn(false, false).0).collect();
        assert_eq!(after_death, [false, false, false, false, true, true]);
    }

    #[test]
    fn an_instance_that_cannot_write_its_wish_publishes_if_no_other_does() {
        let dir = tempfile::tempdir().unwrap();
        let unwritable = |number| PublisherLock {
            wish: dir.path().join("no/such/folder"),
            ..PublisherLock::numbered(dir.path(), number)
        };
        let (one, other) = (unwritable(1), unwritable(2));
        let (mut a, mut b) = (State::default(), State::default());
        one.step(&mut a, true).unwrap();
        assert!(a.held.is_some());
        other.step(&mut b, true).unwrap_err();
        assert!(b.held.is_none(), "and it knows why it waits");
    }

    /// A child process that is about to start a program has a copy of the descriptor.
    #[test]
    fn a_lock_is_free_at_once_although_a_child_has_its_file() {
        let dir = tempfile::tempdir().unwrap();
        let (old, new) = (
            PublisherLock::numbered(dir.path(), 1),
            PublisherLock::numbered(dir.path(), 2),
        );
        let (mut a, mut b) = (State::default(), State::default());
        old.step(&mut a, true).unwrap();
        let of_child = a.held.as_ref().unwrap().file().try_clone().unwrap();
        new.step(&mut b, true).unwrap();
        old.step(&mut a, true).unwrap();
        new.step(&mut b, true).unwrap();
        assert!(a.held.is_none() && b.held.is_some());
        drop(of_child);
    }

    /// A newer instance takes over although the clock was set back since the older one began.
    #[test]
    fn a_newer_instance_takes_over_although_the_clock_was_set_back() {
        let dir = tempfile::tempdir().unwrap();
        let (mut a, mut b) = (State::default(), State::default());
        let old = PublisherLock::at(dir.path(), 1_000);
        old.step(&mut a, false).unwrap();
        let new = PublisherLock::at(dir.path(), 500);
        for _ in 0..3 {
            new.step(&mut b, true).unwrap();
            old.step(&mut a, true).unwrap();
        }
        assert!(a.held.is_none() && b.held.is_some());
        let newest = PublisherLock::at(dir.path(), 400);
        assert!(newest.number > new.number, "the wish counts, too");
    }

    #[test]
    fn a_damaged_wish_is_nobodys() {
        let dir = tempfile::tempdir().unwrap();
        let lock = PublisherLock::numbered(dir.path(), 1);
        fs_err::write(&lock.wish, "12\0").unwrap();
        let mut state = State::default();
        lock.step(&mut state, false).unwrap();
        assert!(state.held.is_some());
    }
}
