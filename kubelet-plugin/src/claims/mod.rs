//! Claims: each is read from the API, checked, and handed to the executor, one task for each.

pub(crate) mod api;
pub(crate) mod claim;
pub(crate) mod fetch;
pub(crate) mod held;
pub(crate) mod service;
pub(crate) mod tasks;
