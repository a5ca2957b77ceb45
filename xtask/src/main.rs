//! The project's own commands: ci, checks, cluster, bench.
fn main() {}
