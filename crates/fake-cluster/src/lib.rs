//! A fake cluster for tests and for `divvy demo`: an API server and a kubelet ([`FakeKubelet`])
//! that behave like the real ones as far as a driver can observe, and misbehave on demand; and
//! builders for the objects in it.
//!
//! Never a normal dependency of the node plugin.

pub mod api;
pub mod build;
pub mod kubelet;

pub use api::{ApiError, FakeApi, Fault, Gate, GpuNode, GpuPolicy, HttpServer, View, WaitTimeout};
pub use kubelet::{ClaimRef, FakeKubelet, HealthWatch, KubeletConfig, KubeletError};
