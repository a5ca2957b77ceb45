//! Names, limits and times of NVIDIA's programs.

use std::time::Duration;

/// NVIDIA's programs.
pub(super) const CONTROL: &str = "nvidia-cuda-mps-control";
pub(super) const SERVER: &str = "nvidia-cuda-mps-server";
/// Socket of a daemon, in its folder of sockets.
pub(super) const SOCKET: &str = "control";
/// State of a server that serves, in the daemon's words.
pub(super) const ACTIVE: &str = "ACTIVE";
/// Longest path of the folder of sockets with which daemons start: they fail without a word in
/// longer ones.
pub(super) const LONGEST: usize = 83;

/// A command of the program takes milliseconds.
pub(super) const COMMAND_WITHIN: Duration = Duration::from_secs(3);
/// Time in which daemon and server are there.
pub(super) const READY_WITHIN: Duration = Duration::from_secs(8);
/// Time in which a daemon that was asked to quit may end by itself: it waits for clients that work.
pub(super) const QUIT_WITHIN: Duration = Duration::from_secs(5);
/// Time in which what was killed is gone. A process that hangs in the kernel module is not.
pub(super) const GONE_WITHIN: Duration = Duration::from_secs(2);
/// Pause between two looks.
pub(super) const LOOK: Duration = Duration::from_millis(10);
