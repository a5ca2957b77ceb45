//! A fake API server and a fake kubelet for tests and the demo.
