//! The socket of the hook, on which it asks for caps and reports why it failed, and the rounds
//! that keep caps.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use divvy_claims::ClaimRef;
use serde::Deserialize;
use serde_json::json;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::cap::{Capper, Question, Uncapped};
use crate::caps::hook_words::{HookWords, Words};
use crate::host::sockets::{SocketFile, bind};
use crate::metrics::Metrics;
use crate::node::facts::GpusSeen;
use crate::sinks::notifier::Notifier;

/// Bound on a question.
const MOST_BYTES: u64 = 4096;
/// Time for which a hook that connects and says nothing is listened to.
const QUESTION: Duration = Duration::from_secs(5);

/// Pause after a connection that could not be taken.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// The socket's server.
pub(crate) struct Limits {
    pub(crate) capper: Arc<Capper>,
    pub(crate) socket: PathBuf,
    /// True if the memory of shares is to be capped. While it is not, nothing is done unless a
    /// claim from before has a cap.
    pub(crate) wanted: bool,
    /// Interval of the rounds.
    pub(crate) every: Duration,
    /// True while this instance is in charge: it alone repairs.
    pub(crate) in_charge: watch::Receiver<bool>,
    /// The GPUs as the driver lists them, and whether it is released.
    pub(crate) seen: watch::Receiver<GpusSeen>,
    /// Listens to the hook's words. `None`: no hook is called.
    pub(crate) words: Option<Arc<HookWords>>,
    pub(crate) notifier: Arc<Notifier>,
    pub(crate) metrics: Metrics,
    /// Work that goes on after an answer: Events.
    pub(crate) reports: TaskTracker,
}

impl Limits {
    /// Runs until `stop`. The socket is bound by every instance, the last one to start has it; when
    /// it goes, an instance that still runs binds it again.
    pub(crate) async fn run(self, stop: CancellationToken) {
        let mut bound: Option<(UnixListener, SocketFile)> = None;
        let mut warned = false;
        // Beside the questions: a GPU that answers slowly must not keep containers waiting.
        let mut round = tokio::spawn(async {});
        loop {
            let is_needed = self.is_needed().await;
            if !is_needed && self.words.is_none() {
                if let Some((_, file)) = bound.take() {
                    file.remove();
                }
            } else if self.is_lost(bound.as_ref().map(|(_, file)| file)).await {
                match bind(&self.socket) {
                    Ok(socket) => (bound, warned) = (Some(socket), false),
                    Err(error) => {
                        if !std::mem::replace(&mut warned, true) {
                            let error = crate::chain(&error);
                            tracing::error!(
                                error,
                                "containers with capped shares cannot start, will retry"
                            );
                        }
                        bound = None;
                    }
                }
            }
            let rest = tokio::time::sleep(self.every);
            tokio::pin!(rest);
            loop {
                tokio::select! {
                    stream = accept(bound.as_ref().map(|(listener, _)| listener)) => {
                        let (capper, words) = (self.capper.clone(), self.words.clone());
                        self.reports.spawn(answer(capper, words, self.notifier.clone(), stream));
                    }
                    () = &mut rest => break,
                    () = stop.cancelled() => {
                        if let Some((_, file)) = bound {
                            file.remove();
                        }
                        return;
                    }
                }
            }
            if is_needed && *self.in_charge.borrow() && round.is_finished() {
                round = tokio::spawn(self.round());
            }
        }
    }

    /// Returns whether there are caps to set.
    async fn is_needed(&self) -> bool {
        if self.wanted {
            return true;
        }
        let capper = self.capper.clone();
        let found = tokio::task::spawn_blocking(move || capper.is_needed());
        found.await.unwrap_or(true)
    }

    /// Returns whether no instance serves the socket: another that took it and died leaves its file
    /// behind.
    async fn is_lost(&self, bound: Option<&SocketFile>) -> bool {
        match bound {
            Some(file) if file.is_ours() => false,
            Some(_) => UnixStream::connect(&self.socket).await.is_err(),
            None => true,
        }
    }

    /// Returns a round: it sets caps again that the driver has forgotten.
    fn round(&self) -> impl Future<Output = ()> + use<> {
        let (capper, seen) = (self.capper.clone(), self.seen.clone());
        let (notifier, metrics) = (self.notifier.clone(), self.metrics.clone());
        async move {
            // On a thread: NVML blocks. A question would open a driver that was released to be
            // unloaded, and one that is down says nothing.
            let is_there = move || {
                let seen = seen.borrow();
                seen.released.is_none() && seen.problem.is_none()
            };
            let work = tokio::task::spawn_blocking(move || capper.round(&is_there));
            let Ok(round) = work.await else {
                return;
            };
            for cap in round.repaired {
                metrics.cap_repaired(cap.what);
                let note = cap.what.note(cap.bytes);
                tracing::warn!(pod.uid = cap.pod, gpu = %cap.gpu, bytes = cap.bytes, reason = cap.what.reason(), "{note}");
                for claim in &cap.claims {
                    notifier.warn(claim, cap.what.reason(), &note).await;
                }
            }
            for error in round.errors {
                tracing::warn!(error, "failed to look after the caps of a pod, will retry");
            }
        }
    }
}

/// Waits for the next hook.
async fn accept(listener: Option<&UnixListener>) -> UnixStream {
    let Some(listener) = listener else {
        return std::future::pending().await;
    };
    loop {
        match listener.accept().await {
            Ok((stream, _)) => return stream,
            // The process has too many files open, say: the hook waits in the queue meanwhile.
            Err(error) => {
                tracing::debug!(%error, "failed to accept a hook");
                tokio::time::sleep(ACCEPT_AGAIN).await;
            }
        }
    }
}

/// User that may ask.
const ROOT: u32 = 0;

/// The message of a hook.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Asked {
    Cap(Question),
    Words(Words),
}

/// Answers one hook.
async fn answer(
    capper: Arc<Capper>,
    words: Option<Arc<HookWords>>,
    notifier: Arc<Notifier>,
    mut stream: UnixStream,
) {
    let done = match asked(&mut stream, ROOT).await {
        // Another instance that looks whether the socket is served.
        Ok(None) => return,
        Ok(Some(Asked::Words(said))) => return hear(words, said, stream).await,
        Ok(Some(Asked::Cap(asked))) => {
            let work = tokio::task::spawn_blocking(move || capper.cap(&asked));
            work.await
                .unwrap_or_else(|died| Err(plain(died.to_string())))
        }
        Err(why) => Err(plain(why)),
    };
    let text = match &done {
        Ok(()) => json!({ "capped": true }),
        Err(uncapped) if uncapped.failed => json!({ "failed": uncapped.why }),
        Err(uncapped) => json!({ "refused": uncapped.why }),
    };
    // A hook that has gone asks again, if its container still starts.
    if let Err(error) = stream.write_all(format!("{text}\n").as_bytes()).await {
        tracing::debug!(%error, "a hook did not wait for its answer");
    }
    if let Err(Uncapped { claim, why, failed }) = done {
        tracing::warn!(
            claim = claim.as_ref().map(ClaimRef::to_string),
            why,
            "the memory of a share is not capped; its container does not start"
        );
        if let Some(claim) = claim {
            let note = format!(
                "A container does not start, since the memory of its share is not capped: {why}"
            );
            // A reason each: Events of one reason are counted, and keep the note of the first.
            let reason = if failed {
                "memory-cap-failed"
            } else {
                "memory-not-capped"
            };
            notifier.warn(&claim, reason, &note).await;
        }
    }
}

/// Hears why a hook has failed. It waits until it was looked whose container it starts, since its
/// process says that, and not for the Events.
async fn hear(words: Option<Arc<HookWords>>, said: Words, stream: UnixStream) {
    let pid = stream.peer_cred().ok().and_then(|peer| peer.pid());
    let pid = pid.and_then(|pid| u32::try_from(pid).ok());
    let (Some(words), Some(pid)) = (words, pid) else {
        return;
    };
    let looks = words.clone();
    let looked = tokio::task::spawn_blocking(move || looks.look(pid, &said)).await;
    // The end of the connection is the answer.
    drop(stream);
    if let Ok(Some(report)) = looked {
        words.report(report).await;
    }
}

fn plain(why: String) -> Uncapped {
    Uncapped {
        claim: None,
        why,
        failed: false,
    }
}

/// Returns the question, if it is of this user; `None` if the other end says nothing.
async fn asked(stream: &mut UnixStream, user: u32) -> Result<Option<Asked>, String> {
    if !stream.peer_cred().is_ok_and(|peer| peer.uid() == user) {
        return Err("only root may ask".to_owned());
    }
    let read = tokio::time::timeout(QUESTION, question(stream)).await;
    read.unwrap_or_else(|_| Err("no question came".to_owned()))
}

/// Reads the question, a line of JSON; `None` if the other end says nothing.
async fn question(stream: &mut UnixStream) -> Result<Option<Asked>, String> {
    let mut line = String::new();
    let mut input = BufReader::new(stream).take(MOST_BYTES);
    let read = input.read_line(&mut line).await;
    read.map_err(|error| format!("the question cannot be read: {error}"))?;
    if line.is_empty() {
        return Ok(None);
    }
    let asked = serde_json::from_str(&line);
    asked.map_err(|error| format!("the question is not one: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program in a pod that has the socket mounted could lower the caps of others.
    #[tokio::test]
    async fn a_user_other_than_root_is_refused_whatever_it_asks() {
        let own = own_user();
        for (user, expected) in [(own, None), (own + 1, Some("only root may ask"))] {
            let (mut end, mut other) = UnixStream::pair().unwrap();
            let line = json!({ "claim": "uid", "device": "d", "pid": 1 });
            let line = format!("{line}\n");
            end.write_all(line.as_bytes()).await.unwrap();
            let found = asked(&mut other, user).await;
            assert_eq!(found.err().as_deref(), expected);
        }
    }

    /// A program that sends and sends fills no memory.
    #[tokio::test(start_paused = true)]
    async fn a_question_without_an_end_is_not_waited_for() {
        let (mut end, mut other) = UnixStream::pair().unwrap();
        let longest = usize::try_from(MOST_BYTES).unwrap();
        end.write_all(&vec![b' '; longest]).await.unwrap();
        // The other end stays open.
        let found = asked(&mut other, own_user()).await;
        let why = found.unwrap_err();
        assert!(why.contains("the question is not one"), "{why}");
    }

    fn own_user() -> u32 {
        use std::os::unix::fs::MetadataExt as _;
        fs_err::metadata("/proc/self").unwrap().uid()
    }
}
