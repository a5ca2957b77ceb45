//! Reasons why claims wait, in words for those who wrote them: from the allocator's explanation of
//! a node to a [`cause::Cause`], from the causes of all nodes to one answer ([`Tally`]), and from
//! that to a sentence and its remedy. The demo, `divvy status` and the page say the same. Pure.

pub mod cause;
pub mod classes;
pub mod detail;
pub mod device;
pub mod driver;
pub mod lookup;
pub mod selector;
mod shortage;
pub mod spelling;
pub mod taints;
mod tally;
mod verdict;

pub use shortage::{Shortage, some};
pub use tally::{Answer, OwnPods, Tally};
pub use verdict::{NodesWhy, Verdict, Why};
