//! Pure: the scheduler's structured allocator and its CEL environment, offline, with reasons.
