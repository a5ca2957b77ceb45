//! Pure: inventory and rules in, the pool of devices to publish out, every API limit checked.
