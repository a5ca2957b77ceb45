//! Carries plans out: records, CDI files, locks, steps, undo, reconcile. Synchronous.
