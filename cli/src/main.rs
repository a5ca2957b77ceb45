//! divvy: demo, inventory and more, on the command line.
fn main() {}
