//! The host as files: sysfs, proc, driver root and libraries, processes; every path under an injectable root.
