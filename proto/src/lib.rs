//! gRPC contracts between the kubelet and the node plugin.
