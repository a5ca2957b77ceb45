//! The node plugin: registration and DRA services, wiring, telemetry.
