//! A real Kubernetes on this machine, the driver, and pods.
