//! The step that has the memory of a share capped before its program runs.
//!
//! The node plugin sets the cap: it knows the claim, and has NVML. This program tells it which
//! process is about to become the container, and waits for its word. No amount passes through here:
//! the plugin reads it from its own record.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::bundle::State;
use crate::error::HookError;

/// Time for which a plugin that does not answer is waited for: it may be restarting.
const PATIENCE: Duration = Duration::from_secs(20);
/// Pause between two attempts to reach it.
const PAUSE: Duration = Duration::from_millis(50);
/// Bound on its answer.
const MOST_BYTES: u64 = 64 << 10;

/// The share whose memory is capped.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Share {
    /// Path of the plugin's socket.
    pub(crate) socket: String,
    /// UID of the claim.
    pub(crate) claim: String,
    /// Name of the CDI device.
    pub(crate) device: String,
}

/// Has the plugin cap the share's memory for the container with this state.
pub(crate) fn cap(state: &State, share: &Share) -> Result<(), HookError> {
    let question = json!({
        "claim": share.claim,
        "device": share.device,
        "pid": state.pid()?,
        "container": state.id(),
    });
    let until = Instant::now() + PATIENCE;
    loop {
        // Asked again after a failure between question and answer: a cap that is set twice is set.
        match ask(&share.socket, &question, until) {
            Ok(answer) => return verdict(&answer),
            Err(source) if Instant::now() >= until => {
                let socket = share.socket.clone();
                return Err(if is_timeout(&source) {
                    HookError::LimitsSilent { socket, source }
                } else {
                    HookError::LimitsAway { socket, source }
                });
            }
            Err(_) => std::thread::sleep(PAUSE),
        }
    }
}

/// Asks once.
fn ask(socket: &str, question: &Value, until: Instant) -> io::Result<Value> {
    let mut stream = UnixStream::connect(socket)?;
    let left = until.saturating_duration_since(Instant::now()).max(PAUSE);
    stream.set_read_timeout(Some(left))?;
    stream.set_write_timeout(Some(left))?;
    stream.write_all(format!("{question}\n").as_bytes())?;
    let mut line = String::new();
    let mut answer = BufReader::new(io::Read::take(stream, MOST_BYTES));
    if answer.read_line(&mut line)? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    serde_json::from_str(&line).map_err(io::Error::from)
}

fn verdict(answer: &Value) -> Result<(), HookError> {
    let text = |name| answer.get(name).and_then(Value::as_str).map(str::to_owned);
    match (text("refused"), text("failed"), answer.get("capped")) {
        (Some(why), _, _) => Err(HookError::LimitsRefused(why)),
        (_, Some(why), _) => Err(HookError::LimitsFailed(why)),
        (None, None, Some(Value::Bool(true))) => Ok(()),
        (None, None, _) => Err(HookError::LimitsFailed(
            "divvy's node plugin gave an answer that this program does not know".to_owned(),
        )),
    }
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
    )
}
