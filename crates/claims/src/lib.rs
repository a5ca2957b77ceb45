//! Pure: config resolution, the prepare decision, plans and steps, record and GPU-state types.
