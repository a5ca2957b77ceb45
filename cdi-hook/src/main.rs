//! The small static program CDI files call to make driver libraries findable in a container.
fn main() {}
