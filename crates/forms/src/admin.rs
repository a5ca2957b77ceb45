//! The GPU for those with admin access.

pub mod device;
