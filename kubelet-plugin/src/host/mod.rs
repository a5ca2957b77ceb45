//! The node as the plugin sees it: what containers are given of it, pods and sockets, files of its
//! own, and the programs that set what NVML cannot.

pub(crate) mod edits;
pub(crate) mod mps;
pub(crate) mod pods;
pub(crate) mod saved;
pub(crate) mod sockets;
pub(crate) mod time_slices;
