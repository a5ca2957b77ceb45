//! The step that has the memory of a share capped before its program runs.
//!
//! The node plugin sets the cap: it knows the claim, and has NVML. This program names the process
//! that is about to become the container, and waits for the answer. No amount passes through here:
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
    cap_within(PATIENCE, state, share)
}

fn cap_within(patience: Duration, state: &State, share: &Share) -> Result<(), HookError> {
    let question = json!({
        "claim": share.claim,
        "device": share.device,
        "pid": state.pid()?,
        "container": state.id(),
    });
    let until = Instant::now() + patience;
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

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    const STATE: &str =
        r#"{"ociVersion":"1.2.0","id":"c1","status":"creating","pid":4711,"bundle":"/b"}"#;

    /// Asks a server that treats one connection after the other so, and returns the question that
    /// it was asked last, with the result.
    fn asked(answers: &[Option<&str>]) -> (Value, Result<(), HookError>) {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s");
        let share = Share {
            socket: socket.display().to_string(),
            claim: "uid".to_owned(),
            device: "uid-gpu-0-ts".to_owned(),
        };
        let listener = UnixListener::bind(&socket).unwrap();
        let state = State::read(STATE.as_bytes()).unwrap();
        std::thread::scope(|scope| {
            let server = scope.spawn(|| {
                let mut question = String::new();
                for answer in answers {
                    let (stream, _) = listener.accept().unwrap();
                    question.clear();
                    BufReader::new(&stream).read_line(&mut question).unwrap();
                    // Without an answer: the plugin is killed.
                    if let Some(answer) = answer {
                        writeln!(&stream, "{answer}").unwrap();
                    }
                }
                serde_json::from_str(&question).unwrap()
            });
            let result = cap(&state, &share);
            (server.join().unwrap(), result)
        })
    }

    #[test]
    fn the_plugin_is_asked_about_the_process_and_gives_its_word() {
        let (question, result) = asked(&[Some(r#"{"capped":true}"#)]);
        let expected =
            json!({"claim": "uid", "device": "uid-gpu-0-ts", "pid": 4711, "container": "c1"});
        assert_eq!(question, expected);
        assert!(result.is_ok());
    }

    #[test]
    fn a_plugin_that_is_killed_before_its_answer_is_asked_again() {
        let (_, result) = asked(&[None, None, Some(r#"{"capped":true}"#)]);
        assert!(result.is_ok());
    }

    #[test]
    fn each_reason_has_its_words_and_its_exit_status() {
        let answers = [
            (
                r#"{"refused":"x is so"}"#,
                71,
                "the memory of this share is not capped: x is so",
            ),
            (
                r#"{"failed":"y fell"}"#,
                72,
                "failed to cap the memory of this share: y fell",
            ),
            (
                r#"{"capped":false}"#,
                72,
                "an answer that this program does not know",
            ),
        ];
        for (answer, code, text) in answers {
            let error = asked(&[Some(answer)]).1.unwrap_err();
            assert_eq!(error.exit_code(), code, "{error}");
            assert!(error.to_string().contains(text), "{error}");
        }
    }

    #[test]
    fn a_plugin_that_is_away_or_silent_is_named_in_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let share = |name: &str| Share {
            socket: dir.path().join(name).display().to_string(),
            claim: "uid".to_owned(),
            device: "d".to_owned(),
        };
        // Nothing of it takes a connection: the kernel does, for a listener.
        let _silent = UnixListener::bind(dir.path().join("silent")).unwrap();
        let state = State::read(STATE.as_bytes()).unwrap();
        for (name, code, text) in [
            ("away", 70, "divvy's node plugin does not answer at"),
            (
                "silent",
                73,
                "divvy's node plugin took too long to answer at",
            ),
        ] {
            let error = cap_within(PAUSE, &state, &share(name)).unwrap_err();
            assert_eq!(error.exit_code(), code, "{error}");
            assert!(error.to_string().contains(text), "{error}");
        }
    }
}
