//! Pure vocabulary: ids, GPU facts, profiles, placements, modes, health, and the GpuDriver trait.
