//! Caps of the memory of shares: the driver (R615 and later) holds the control group of a pod to
//! the sum of its shares of a GPU.
//!
//! A cap is set per container start and not in a prepare, since the pod's group is made after it:
//! the CDI file has the runtime call `divvy-cdi-hook limits`, which asks here ([`serve`]) and keeps
//! the program from running until the cap is set and was read back ([`cap`]). The shares of each
//! pod so far are noted ([`ledger`]), so that a second claim raises the cap, and caps that the
//! driver has forgotten are set again ([`rounds`]), and programs that got round theirs are found
//! ([`late`]). A node that cannot cap publishes so ([`ability`]).

pub(crate) mod ability;
pub(crate) mod cap;
mod claims;
mod entries;
mod group;
pub(crate) mod hook_words;
mod late;
mod ledger;
mod note;
mod rebuild;
pub(crate) mod rounds;
pub(crate) mod serve;

#[cfg(test)]
mod tests;
