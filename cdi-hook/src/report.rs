//! The report to divvy's node plugin that a container does not start, and why. crun shows nothing
//! of a hook but its exit status; the plugin puts the words into Events of the claim and the pod.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use serde_json::json;

use crate::error::{HookError, chain};

/// Variable with the plugin's socket. The CDI file sets it; nothing of the image's environment
/// reaches a hook.
const SOCKET: &str = "DIVVY_HOOK_SOCKET";
/// Time for which the plugin is waited for, whatever it does.
const WITHIN: Duration = Duration::from_secs(1);
/// Longest reason, in bytes. Written as JSON it is six times as long at most, which the plugin
/// reads.
const LONGEST: usize = 600;

/// Reports to the plugin why a call failed. Its answer, or that there is none, changes nothing.
pub(crate) fn to_plugin(error: &HookError) {
    if let Some(socket) = std::env::var_os(SOCKET) {
        to_plugin_at(socket, error);
    }
}

fn to_plugin_at(socket: OsString, error: &HookError) {
    let words = json!({ "status": error.exit_code(), "why": cut(&chain(error)) });
    let line = format!("{words}\n");
    let (done, waits) = mpsc::channel();
    // On a thread, which ends with this program: a listener with a full queue holds up even the
    // connection.
    let begun = thread::Builder::new().spawn(move || {
        drop(say(socket, &line));
        drop(done);
    });
    if begun.is_ok() {
        // Nothing is ever sent: it ends with the thread, or with the time.
        let _: Result<(), _> = waits.recv_timeout(WITHIN);
    }
}

/// Says it, and waits until the plugin has looked whose process this is.
fn say(socket: OsString, line: &str) -> io::Result<()> {
    let mut stream = UnixStream::connect(socket)?;
    stream.write_all(line.as_bytes())?;
    let mut answer = [0; 1];
    stream.read(&mut answer).map(drop)
}

/// Returns the beginning of a text.
fn cut(text: &str) -> &str {
    let mut end = text.len().min(LONGEST);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.get(..end).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::os::unix::net::UnixListener;
    use std::time::Instant;

    use rustix::io::Errno;
    use serde_json::Value;

    use super::*;

    fn error(path: &str) -> HookError {
        HookError::inside("write", path, Errno::XDEV)
    }

    #[test]
    fn the_plugin_gets_status_and_words_and_answers() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s");
        let listener = UnixListener::bind(&socket).unwrap();
        let said = thread::scope(|scope| {
            let server = scope.spawn(|| {
                let (stream, _) = listener.accept().unwrap();
                let mut line = String::new();
                BufReader::new(&stream).read_line(&mut line).unwrap();
                line
            });
            // Its end is the answer.
            to_plugin_at(socket.clone().into(), &error("/etc/ld.so.cache"));
            server.join().unwrap()
        });
        let said: Value = serde_json::from_str(&said).unwrap();
        assert_eq!(said["status"], 75);
        let why = said["why"].as_str().unwrap();
        assert!(why.starts_with("cannot write /etc/ld.so.cache in the container"));
    }

    #[test]
    fn words_of_any_length_are_one_line_that_the_plugin_reads() {
        let longest = json!({ "status": 75, "why": cut(&"\u{1}".repeat(10_000)) });
        assert!(longest.to_string().len() < 4096);
        assert_eq!(cut("äö"), "äö");
        let odd = "ä".repeat(LONGEST);
        assert_eq!(cut(&format!("x{odd}")).len(), LONGEST - 1, "at a character");
    }

    /// A plugin that is away, hangs with a full queue, or takes the connection and says nothing.
    #[test]
    fn a_plugin_that_does_not_answer_holds_nothing_up() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let _silent = UnixListener::bind(at("silent")).unwrap();
        let full = UnixListener::bind(at("full")).unwrap();
        rustix::net::listen(&full, 0).unwrap();
        let _queued = UnixStream::connect(at("full")).unwrap();
        for name in ["away", "silent", "full"] {
            let begun = Instant::now();
            to_plugin_at(at(name).into(), &error("/etc/x"));
            // Far less than any runtime gives a hook, and more than a busy machine needs.
            assert!(begun.elapsed() < WITHIN * 8, "{name}");
        }
    }
}
