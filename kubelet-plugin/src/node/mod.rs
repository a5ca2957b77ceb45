//! The task that knows the node and decides what it offers: facts in over one channel, outputs out
//! over one watch each. The decision itself is pure ([`divvy_offer::step`]); nothing is awaited
//! between a fact and its outputs.

mod brain;
pub(crate) mod facts;
pub(crate) mod findings;
mod world;

pub(crate) use brain::{Brain, Followed, Offer, Outlets};
pub(crate) use world::{Holdings, State};
