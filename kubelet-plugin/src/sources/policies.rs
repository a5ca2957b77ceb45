//! The policies of administrators: watched in the API, remembered on disk, and sent together with
//! the labels of this node that they may ask for.

mod book;
mod watch;

pub(crate) use watch::{PolicyWatch, PolicyWiring, RETRY, WAIT};
