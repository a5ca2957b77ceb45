//! Commands of `divvy`, each a module with its arguments and its `run`, and what they have in
//! common with the demo: manifests, causes, views. Data on standard output, talk on standard error.

use std::fmt;

pub mod advice;
pub mod bundle;
pub mod claim;
mod comments;
pub mod complete;
pub mod convert;
pub mod defrag;
pub mod explain;
pub mod extended;
pub mod format;
#[cfg(test)]
mod golden;
pub mod inventory;
pub mod limit;
pub mod manifests;
pub mod objects;
pub mod offered;
pub mod runtime;
pub mod seen;
pub mod slices;
pub mod status;
pub mod strict;
pub mod table;
pub mod taints;
pub mod templates;
pub mod top;
pub mod ui;
pub mod usage;
pub mod view;
mod yaml;

/// Arguments that clap takes and the program cannot use: exit status 2, as with clap.
#[derive(Debug)]
pub struct Usage(pub String);

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}
