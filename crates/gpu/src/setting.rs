//! A setting of a GPU: a value that is found, changed while claims need another one, and given
//! back.

use serde::{Deserialize, Serialize};

/// The wanted value of a setting.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Want<T> {
    /// No claim needs a value: the one from before our first change.
    #[default]
    Found,
    To(T),
}

/// Progress of a change of a setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// The change is about to be made: written before the call.
    Before,
    /// The call has returned without an error.
    Done,
    /// The outcome is not known: the call has not returned, or ended in an error that leaves it
    /// open.
    Unknown,
}

/// A setting that we have changed, or are about to change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Changed<T> {
    /// Value before our first change: the one that is given back.
    pub found: T,
    /// Value that we set.
    pub ours: T,
    /// True if the last call that set it is known to have worked.
    pub sure: bool,
}

impl<T: Copy + PartialEq> Changed<T> {
    /// Returns the note at a moment of a change from `now` to `to`.
    pub(crate) fn at(noted: Option<Self>, now: T, to: T, at: Moment) -> Option<Self> {
        match at {
            Moment::Before => Some(Self::before(noted, now, to)),
            Moment::Done => noted.filter(|note| note.found != to),
            Moment::Unknown => Self::unsure(noted),
        }
    }

    /// Returns the note to be on disk before a setting goes from `now` to `to`. On the way back to
    /// `found` the note stays as it is: the setting is ours until it certainly is back.
    fn before(noted: Option<Self>, now: T, to: T) -> Self {
        match noted {
            // The way back: a crash after the call and before the note is dropped costs one more
            // call that sets the same value. Dropping the note first would lose `found`.
            Some(note) if note.found == to => note,
            _ => Self {
                // The first change decides what is given back. A second one finds our own value.
                found: noted.map_or(now, |note| note.found),
                ours: to,
                sure: true,
            },
        }
    }

    /// Returns the note for a setting of which it is not known whether it is at what was set last.
    pub(crate) fn unsure(noted: Option<Self>) -> Option<Self> {
        noted.map(|note| Self {
            sure: false,
            ..note
        })
    }

    /// Returns the value that a setting is to have, if any is known.
    pub(crate) fn wanted(noted: Option<Self>, want: Want<T>) -> Option<T> {
        match want {
            Want::To(to) => Some(to),
            Want::Found => noted.map(|note| note.found),
        }
    }
}
