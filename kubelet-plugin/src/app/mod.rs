//! The program: flags and config, the tasks that it consists of, and their start and end.

pub(crate) mod args;
pub(crate) mod config;
pub(crate) mod parts;
pub(crate) mod ready;
pub(crate) mod run;
pub(crate) mod servers;
pub(crate) mod start;
pub(crate) mod supervise;
pub(crate) mod wiring;
