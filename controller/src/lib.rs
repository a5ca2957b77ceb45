//! The ResourceSlice publisher.
