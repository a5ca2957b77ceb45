//! The node plugin binary.
fn main() {}
